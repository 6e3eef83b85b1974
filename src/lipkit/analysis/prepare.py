"""An independent copy of a network with constant weights: weight and spectral normalisation become plain numbers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.spectral_norm import remove_spectral_norm as remove_spectral_hook
from torch.nn.utils.weight_norm import WeightNorm
from torch.nn.utils.weight_norm import remove_weight_norm as remove_weight_hook

from lipkit.errors import NoRuleError
from lipkit.linalg.transforms import normalisations
from lipkit.modules import guard
from lipkit.modules.guarding import refuse_wrapper

# In evaluation mode the weight is a function of stored numbers alone, which is all that is used of them.
PARAMETRIZATIONS = normalisations()
HOOKS = (SpectralNorm, WeightNorm)


def constant_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose normalised weights are the numbers that its forward pass uses now.

    Parametrized (``torch.nn.utils.parametrizations``) and hook-based spectral and weight normalisation are carried
    out; ``model`` is left as it is. The copy is on the CPU.

    Raises:
        NoRuleError: a wrapper such as DataParallel; any other parametrization, hook, or method replaced on an
            instance; spectral normalisation in training mode, where each forward pass changes the weight; a module
            that cannot be copied.

    >>> layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    >>> type(constant_copy(layer))
    <class 'torch.nn.modules.linear.Linear'>
    """
    if not isinstance(model, nn.Module):
        raise NoRuleError(f"analyze: expected an nn.Module, got {type(model).__qualname__}")
    for name, module in model.named_modules():
        refuse_wrapper(module, f"{_at(name)}analyze")
        if isinstance(module, torch.jit.ScriptModule):
            raise NoRuleError(
                f"{_at(name)}analyze: expected modules in Python, got {type(module).__qualname__}: pass the network "
                "that it was made from"
            )
    try:
        twin = copy.deepcopy(model, _computed_tensors(model))
    except Exception as error:  # the module is the user's and may raise anything
        raise NoRuleError(f"analyze: expected a module that can be copied, got {_first_line(error)}") from error
    for name, module in list(twin.named_modules()):
        _materialise(name, module)
    for name, module in twin.named_modules():
        try:
            guard(module)
        except NoRuleError as error:
            raise NoRuleError(f"{_at(name)}{error}") from None
    return twin.requires_grad_(False).cpu()


def _computed_tensors(model: nn.Module) -> dict[int, object]:
    """Copies of the tensors that deepcopy refuses: results of a computation, as hook-based weights are."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return memo


def _materialise(name: str, module: nn.Module) -> None:
    if parametrize.is_parametrized(module):
        lists = module.parametrizations
        for tensor_name in list(lists):  # type: ignore[arg-type]
            for kind in lists[tensor_name]:  # type: ignore[index]
                if type(kind) not in PARAMETRIZATIONS:
                    raise NoRuleError(
                        f"{_at(name)}parametrization {type(kind).__qualname__} of {tensor_name!r}: expected spectral "
                        "or weight normalisation or orthogonal of torch.nn.utils.parametrizations: make the weight "
                        "constant with torch.nn.utils.parametrize.remove_parametrizations"
                    )
                if type(kind).__name__ == "_SpectralNorm" and kind.training:
                    raise _still_changing(name)
            parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=True)
    for hook in list(module._forward_pre_hooks.values()):
        if type(hook) is SpectralNorm:
            if module.training:
                raise _still_changing(name)
            remove_spectral_hook(module, hook.name)
        elif type(hook) is WeightNorm:
            remove_weight_hook(module, hook.name)


def _still_changing(name: str) -> NoRuleError:
    return NoRuleError(
        f"{_at(name)}spectral normalisation: expected evaluation mode, got training mode, where each forward pass "
        "changes the weight; call .eval()"
    )


def _at(name: str) -> str:
    return f"at {name!r}: " if name else ""


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def sample(model: nn.Module, input_shape: tuple[int, ...], batch: int) -> Tensor:
    """Normal random inputs ``(batch, *input_shape)`` in the dtype of ``model``, always the same."""
    floating = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    like = floating[0] if floating else torch.zeros(())
    x = torch.randn(batch, *input_shape, generator=torch.Generator().manual_seed(0))
    return x.to(like.dtype)
