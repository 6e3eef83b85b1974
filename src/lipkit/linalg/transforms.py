"""Detects and leaves transforms of functions (vmap, grad, ...). Only this file uses private names of torch.

A release of torch may drop any of these names; ``tests/linalg/test_transforms.py`` looks for each.
"""

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
    """The active modes that intercept torch's operations. A default device counts only if it is meta."""
    from torch.utils._device import DeviceContext

    functions: list[Any] = getattr(torch.overrides, "_get_current_function_mode_stack", list)()
    dispatch: list[Any] = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list)()
    both = (*functions, *dispatch)
    return [mode for mode in both if type(mode) is not DeviceContext or mode.device.type == "meta"]


def has_global_hooks() -> bool:
    """True if a forward hook is installed for all modules at once."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def transformed(gradient: Tensor | None = None) -> bool:
    """True inside ``torch.func`` (vmap, jvp, grad, ...) or forward-mode derivatives, or if ``gradient`` is batched.

    Transforms do not follow writes into given memory: code that makes such writes must then take another path.
    """
    active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    # ``torch.autograd.grad(..., is_grads_batched=True)`` batches in another way, which only its tensors show.
    compiled = torch.compiler.is_compiling()  # the compiler cannot trace the call below
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


def one_alone(a: Tensor) -> Tensor:
    """``a`` without the wrappers of derivatives by ``torch.func``; ``OptionError`` for a batch of its vmap."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(a):
        a = functorch.get_unwrapped(a)
    if functorch.is_batchedtensor(a):
        raise OptionError("expected one matrix or kernel for a proof, got a batch of torch.func.vmap: use a loop")
    return a


@contextlib.contextmanager
def outside(a: Tensor) -> Iterator[Tensor]:
    """Yield the values of ``a`` without graph and tangent; inside the block no transform of ``torch.func`` is active.

    Proofs need this: they read values and pass them to other libraries. To surrounding transforms the results are
    constants. A batch of ``torch.func.vmap`` is refused.
    """
    if not transformed():
        yield a.detach()
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield one_alone(a).detach()


def is_empty(x: Tensor) -> bool:
    """True for a batch (0, ...) of no samples; always False under a compiler, tracer or mode, which follows sizes."""
    seen = torch.compiler.is_compiling() or not isinstance(x, Tensor) or bool(active_modes())
    return not seen and x.ndim > 1 and x.shape[0] == 0


def with_zeros(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The output for an empty batch, cut from that for a sample of zeros: some operations refuse empty batches."""
    return function(torch.cat((x, x.new_zeros(1, *x.shape[1:]))))[:0]
