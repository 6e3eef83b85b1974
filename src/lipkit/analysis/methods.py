"""Which bound each layer of a network gets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipkit import bounds
from lipkit.errors import OptionError
from lipkit.protocol import lipschitz

Bound = Callable[..., Tensor]
# Bounds of a kernel that hold for zero padding of any width and every image size, stride and dilation.
_KERNEL_BOUNDS = ("symbol_sup", "lipbound", "fantastic_four", "aol", "reshaped")


def kernel_bounds() -> dict[str, Bound]:
    """The bounds of :mod:`lipkit.bounds` that a convolution can be asked for by name.

    >>> "symbol_sup" in kernel_bounds()
    True
    """
    return {name: getattr(bounds, name) for name in _KERNEL_BOUNDS if hasattr(bounds, name)}


def check_method(method: str) -> str:
    """``method`` if it is ``"auto"``, ``"best"`` or one of :func:`kernel_bounds`.

    Raises:
        OptionError: another name.
    """
    names = ("auto", "best", *kernel_bounds())
    if method not in names:
        raise OptionError(f"method: expected one of {', '.join(names)}, got {method!r}")
    return method


def layer_bound(module: nn.Module, input_shape: tuple[int, ...], method: str = "auto") -> tuple[Tensor, str]:
    """Lipschitz bound of one layer and the name of the method.

    ``method`` applies to two-dimensional convolutions with zero padding; everything else has the one rule of its type.

    >>> layer_bound(nn.ReLU(), (3,))[1]
    'rule'
    """
    with torch.no_grad():
        if type(module) is not nn.Conv2d or module.padding_mode != "zeros" or method == "auto":
            return lipschitz(module, input_shape).detach(), _default(module)
        names = list(kernel_bounds()) if method == "best" else [method]
        found = {name: kernel_bounds()[name](module.weight, groups=module.groups).detach() for name in names}
        best = min(found, key=lambda name: float(found[name]))
        return found[best].to(torch.float64), best


def _default(module: nn.Module) -> str:
    if type(module) is nn.Linear:
        return "spectral_norm"
    if type(module) is nn.Conv2d:
        return "symbol_sup" if module.padding_mode == "zeros" else "circular"
    return "rule"
