"""Rounding errors of blocks: each branch by its own walk, then the operations that join them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipkit.certificates.rounding.arithmetic import Arithmetic, Line, size
from lipkit.certificates.rounding.chain import Runner, Walk, prepare, reach, runner, through
from lipkit.certificates.rounding.registry import Local, Measure, entries, nothing, rounding_rule
from lipkit.plain import ConvexResidual, Network, SandwichBlock, SlopeResidual, Sum
from lipkit.protocol.registry import Shape, output_shape


def joined(
    branches: list[tuple[Runner, float]], operations: int, outputs: int, arithmetic: Arithmetic, lost: float = 0.0
) -> Measure:
    """Branches times factors, added up: that many chained operations on the way of each.

    Args:
        branches: walks, with the modulus of their factors.
        outputs: numbers in one output.
        lost: what a factor may be off by, absolutely.
    """
    rounding = arithmetic.gamma(operations)

    def measure(x: Tensor) -> Local:
        error = Line(torch.full_like(nothing(x).at, 4 * operations * math.sqrt(outputs) * arithmetic.tiny), 0.0)
        peak = Line(size(x), 1.0)
        total = nothing(x)
        for run, factor in branches:
            walk = run(x)
            reached = reach(walk)
            error = error.plus(walk.error.times(factor)).plus(reached.times(rounding * factor + lost))
            peak = peak.most(walk.peak)
            total = total.plus(reached.times(factor + lost))
        return Local(error, peak.most(total.times(2.0)))

    return measure


def _parts(module: SandwichBlock | SlopeResidual, input_shape: Shape, arithmetic: Arithmetic) -> Runner:
    steps, _ = prepare([module.first, module.activation, module.second], input_shape, arithmetic)
    return lambda x: through(steps, x)


def _local(walk: Walk) -> Local:
    return Local(walk.error, walk.peak)


@rounding_rule(SandwichBlock)
def _sandwich(module: SandwichBlock, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    run = _parts(module, input_shape, arithmetic)
    return lambda x: _local(run(x))


@rounding_rule(nn.Sequential, Network)
def _sequential(module: nn.Sequential, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    steps, _ = prepare(list(module), input_shape, arithmetic)
    return lambda x: _local(through(steps, x))


@rounding_rule(SlopeResidual)
def _slope_residual(module: SlopeResidual, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    identity = runner(nn.Identity(), input_shape, arithmetic)
    branches = [(identity, 1.0), (_parts(module, input_shape, arithmetic), 1.0)]
    return joined(branches, 1, entries(input_shape), arithmetic)


@rounding_rule(Sum)
def _sum(module: Sum, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    branches = [(runner(branch, input_shape, arithmetic), 1.0) for branch in module.branches]
    return joined(branches, len(branches), entries(output_shape(module, input_shape)), arithmetic)


@rounding_rule(ConvexResidual)
def _convex_residual(module: ConvexResidual, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    share = float(module.share)
    branches = [
        (runner(module.body, input_shape, arithmetic), abs(share)),
        (runner(module.shortcut, input_shape, arithmetic), abs(1 - share) * (1 + 2.0**-50)),
    ]
    # 1 - share: a rounded share is off by u |share|, and one below the normal range by all of it.
    lost = arithmetic.stored * arithmetic.unit * abs(share) + arithmetic.tiny
    run = joined(branches, 3, entries(output_shape(module, input_shape)), arithmetic, lost)

    def measure(x: Tensor) -> Local:
        local = run(x)
        return local._replace(peak=Line(local.peak.at + abs(share), local.peak.slope))

    return measure
