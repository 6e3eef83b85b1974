"""Which bound each layer of a network gets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipkit.bounds import METHODS
from lipkit.errors import OptionError
from lipkit.modules import lipschitz
from lipkit.modules.convolutions import kernel_with_stride


def check_method(method: str) -> str:
    """``method`` if it is ``"auto"``, ``"best"`` or a name in ``lipkit.bounds.METHODS``.

    Raises:
        OptionError: another name.
    """
    names = ("auto", "best", *METHODS)
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
        names = list(METHODS) if method == "best" else [method]
        kernel = kernel_with_stride(module)
        found = {name: METHODS[name](kernel, groups=module.groups).detach() for name in names}
        best = min(found, key=lambda name: float(found[name]))
        return found[best].to(torch.float64), best


def _default(module: nn.Module) -> str:
    if type(module) is nn.Linear:
        return "spectral_norm"
    if type(module) in (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d):
        return "circular" if module.padding_mode == "circular" else "symbol_sup"
    return "rule"
