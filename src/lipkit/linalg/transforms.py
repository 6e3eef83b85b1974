"""Transforms of functions (vmap, grad, ...): how to detect and leave them. Only this file uses torch's private names.

A release of torch may drop any of them; ``tests/linalg/test_transforms.py`` looks for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from lipkit.errors import OptionError


def nnpack_enabled() -> bool:
    """True if torch may convolve by NNPACK on this machine."""
    if not torch.backends.nnpack.is_available():
        return False
    return bool(getattr(torch._C, "_get_nnpack_enabled", lambda: True)())


def active_modes() -> list[Any]:
    """The active modes that intercept torch's operations. A default device does not count: it changes no operation."""
    from torch.utils._device import DeviceContext

    functions: list[Any] = getattr(torch.overrides, "_get_current_function_mode_stack", list)()
    dispatch: list[Any] = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list)()
    both = (*functions, *dispatch)
    return [mode for mode in both if type(mode) is not DeviceContext or mode.device.type == "meta"]


def has_global_hooks() -> bool:
    """True if hooks are installed that see every module."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def transformed(gradient: Tensor | None = None) -> bool:
    """True inside ``torch.func`` (vmap, jvp, grad, ...) or forward-mode differentiation, or for a batch of gradients.

    Transforms follow torch's operations, but not writes into given memory: pure functions take another path there.
    """
    active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    # ``torch.autograd.grad(..., is_grads_batched=True)`` batches in another way, which only its tensors show.
    compiled = torch.compiler.is_compiling()  # which cannot trace the question
    legacy = gradient is not None and not compiled and torch._C._functorch.is_legacy_batchedtensor(gradient)
    return bool(active()) or getattr(forward_ad, "_current_level", -1) >= 0 or legacy


def plain_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], g: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of ``function(*inputs)`` from the upstream ``g``, None for an input without one.

    They can be differentiated again, and batched, unlike those of a backward pass written by hand.
    """
    if transformed():  # an input may need a derivative that its requires_grad does not show

        def filled(*given: Tensor) -> Tensor:
            left = iter(given)
            return function(*(None if t is None else next(left) for t in inputs))

        made = iter(torch.func.vjp(filled, *(t for t in inputs if t is not None))[1](g))
        return tuple(None if t is None else next(made) for t in inputs)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views make autograd take the inputs as independent, also where one was made of another.
        views = [None if t is None else t.view_as(t) for t in inputs]
        asked = [view for view in views if view is not None and view.requires_grad]
        # Not by torch.func.vjp, which refuses saved tensors with hooks: those of checkpoints and of offloading.
        found = iter(torch.autograd.grad(function(*views), asked, g, create_graph=again, allow_unused=True))
    return tuple(next(found) if view is not None and view.requires_grad else None for view in views)


def differentiated(a: Tensor) -> bool:
    """True if ``a`` may be differentiated: through its graph, or by a transform."""
    return (torch.is_grad_enabled() and a.requires_grad) or transformed()


@contextlib.contextmanager
def outside(a: Tensor) -> Iterator[Tensor]:
    """Yields the values of ``a`` without graph and tangent; inside the block no transform of ``torch.func`` is active.

    For proofs, which read values and hand them to other libraries. Surrounding transforms see constants; a batch of
    ``torch.func.vmap`` is refused.
    """
    if not transformed():
        yield a.detach()
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(a):
        a = functorch.get_unwrapped(a)
    if functorch.is_batchedtensor(a):
        raise OptionError("expected one matrix or kernel to prove a bound for, got a batch of torch.func.vmap")
    with temporarily_clear_interpreter_stack():
        yield a.detach()


def is_empty(x: Tensor) -> bool:
    """True for a batch (B, ...) of no samples; False where a compiler, a trace or a mode follows sizes."""
    seen = torch.compiler.is_compiling() or not isinstance(x, Tensor) or bool(active_modes())
    return not seen and x.ndim > 1 and x.shape[0] == 0


def with_zeros(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The empty output of an empty batch, by way of a sample of zeros: transforms and reshapes refuse empty batches."""
    return function(torch.cat((x, x.new_zeros(1, *x.shape[1:]))))[:0]
