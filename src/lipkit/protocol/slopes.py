"""Activations with slope in [0, 1], and the runs of linear layers between them that one LMI bounds."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, nn

from lipkit.plain import Network

# Scalar activations whose slope lies in [0, 1] everywhere. Not here: GELU, SiLU, Mish, SELU, Hardswish (slope above 1
# or below 0), MaxMin and GroupSort (not scalar), Softmax (not elementwise), Hardshrink and Threshold (jumps).
SLOPE_RESTRICTED: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU6,
    nn.CELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardsigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.LogSigmoid,
    nn.Hardtanh,
    nn.Softshrink,
    nn.Tanhshrink,
)


def slope_restricted(module: nn.Module) -> bool:
    """Whether ``module`` is a scalar activation with slope in [0, 1] everywhere, parameters considered.

    >>> slope_restricted(nn.ReLU()), slope_restricted(nn.GELU()), slope_restricted(nn.LeakyReLU(0.1))
    (True, False, True)
    """
    kind = type(module)
    if isinstance(module, nn.LeakyReLU) and kind is nn.LeakyReLU:
        return 0 <= module.negative_slope <= 1
    if isinstance(module, nn.ELU) and kind is nn.ELU:
        return 0 <= module.alpha <= 1
    if isinstance(module, nn.CELU) and kind is nn.CELU:
        return 0 < module.alpha < math.inf
    if isinstance(module, nn.Softplus) and kind is nn.Softplus:
        return 0 < module.beta < math.inf and 20 <= module.threshold < math.inf
    if isinstance(module, nn.Hardtanh) and kind is nn.Hardtanh:
        return -math.inf < module.min_val <= module.max_val < math.inf
    if isinstance(module, nn.Softshrink) and kind is nn.Softshrink:
        return 0 <= module.lambd < math.inf
    return kind in SLOPE_RESTRICTED


class SlopeRun(NamedTuple):
    """Modules ``start`` to ``stop`` of a chain: linear layers with slope-restricted activations between them."""

    start: int
    stop: int
    weights: list[Tensor]
    multipliers: list[Tensor]


def slope_runs(network: Network) -> list[SlopeRun]:
    """The longest runs Linear, activation, Linear, ... whose activations all have a multiplier.

    >>> import torch
    >>> net = Network([nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)], (2,), {1: torch.ones(3)})
    >>> [(run.start, run.stop) for run in slope_runs(net)]
    [(0, 3)]
    """
    children, runs, start = list(network), [], 0
    while start < len(children):
        stop, weights, multipliers = start, [], []
        first = children[start]
        if type(first) is nn.Linear:
            stop, weights = start + 1, [first.weight]
            while stop + 1 < len(children):
                activation, following = children[stop], children[stop + 1]
                multiplier = network.multiplier(stop)
                if multiplier is None or not slope_restricted(activation) or type(following) is not nn.Linear:
                    break
                multipliers.append(multiplier)
                weights.append(following.weight)
                stop += 2
        if multipliers:
            runs.append(SlopeRun(start, stop, weights, multipliers))
        start = max(stop, start + 1)
    return runs
