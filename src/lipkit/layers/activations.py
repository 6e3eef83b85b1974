"""Which activations a slope-restricted layer (sandwich, SLL, CPL) accepts, by name or as a module."""

from __future__ import annotations

import copy

from torch import nn

from lipkit.errors import OptionError
from lipkit.modules.activations import BY_NAME, slope_restricted


def slope_activation(activation: str | nn.Module) -> nn.Module:
    """The activation of this name, or a copy of this module, with slope in [0, 1] everywhere.

    =============================================== ==================================================================
    qualify                                         do not
    =============================================== ==================================================================
    relu, relu6, hardtanh, tanh, sigmoid,           GELU, SiLU, Mish, Hardswish, SELU (slopes above 1 or below 0), abs
    hardsigmoid, softplus, softsign, logsigmoid,    and PReLU (slopes below 0, or learnable), MaxMin, GroupSort and
    softshrink, tanhshrink, celu, elu (alpha <= 1), Softmax (not elementwise), Hardshrink and Threshold (jumps)
    leakyrelu (slope <= 1)
    =============================================== ==================================================================

    Raises:
        OptionError: an activation that does not qualify; the message lists those that do.

    >>> slope_activation("tanh"), slope_activation(nn.LeakyReLU(0.1))
    (Tanh(), LeakyReLU(negative_slope=0.1))
    """
    if isinstance(activation, str) and activation in BY_NAME:
        return BY_NAME[activation]()
    if isinstance(activation, nn.Module) and slope_restricted(activation):
        return copy.deepcopy(activation)
    raise OptionError(
        f"activation: expected one with slope in [0, 1] ({', '.join(sorted(BY_NAME))}, or such a module), "
        f"got {activation!r}"
    )
