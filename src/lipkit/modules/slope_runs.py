"""The runs of linear layers and slope-restricted activations that one LMI bounds."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from lipkit.modules.activations import slope_restricted
from lipkit.modules.network import Network


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
