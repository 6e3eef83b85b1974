"""Chains of modules: the product of their constants, the walk of their errors, the runs that one LMI bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound
from lipkit.errors import ShapeError
from lipkit.modules.machine import (
    Measure,
    _local,
    prepare,
    rounding_rule,
    through,
)
from lipkit.modules.network import Network
from lipkit.modules.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.modules.slope_runs import slope_runs
from lipkit.proof.arithmetic import Arithmetic
from lipkit.proof.roundoff import multiply_up


@lipschitz_rule(nn.Sequential)
def _sequential(module: nn.Sequential, input_shape: Shape | None) -> Tensor:
    return chain_constant(list(module), input_shape)


@lipschitz_rule(Network)
def _network(module: Network, input_shape: Shape | None) -> Tensor:
    if input_shape not in (None, module.input_shape):
        raise ShapeError(f"network exported for inputs of shape {module.input_shape}, got {input_shape}")
    gains = {run.start: (run, gain_bound(run.weights, run.multipliers)) for run in slope_runs(module)}
    product, shape, position = torch.ones((), dtype=torch.float64), module.input_shape, 0
    children = list(module)
    while position < len(children):
        run, gain = gains.get(position, (None, math.inf))
        part = children[position : run.stop if run else position + 1]
        factor = chain_constant(part, shape)
        if bool(factor.isfinite()):  # a bias that is not finite shows there only
            factor = factor.clamp_max(gain)
        product = multiply_up(product, factor)
        for child in part:
            shape = output_shape(child, shape)
        position += len(part)
    return product


def chain_constant(children: Sequence[nn.Module], input_shape: Shape | None) -> Tensor:
    """The product of the constants of modules that follow each other, rounded up."""
    product = torch.ones((), dtype=torch.float64)
    for i, child in enumerate(children):
        factor = lipschitz(child, input_shape)
        product = multiply_up(product, factor)
        if input_shape is not None and i + 1 < len(children):
            input_shape = output_shape(child, input_shape)
    return product


@export_rule(nn.Sequential, Network)
def _export_sequential(module: nn.Sequential, input_shape: Shape) -> nn.Module:
    parts: list[nn.Module] = []
    for child in module:
        part = export(child, input_shape)
        input_shape = output_shape(part, input_shape)
        parts.append(part)
    return nn.Sequential(*parts)


@rounding_rule(nn.Sequential, Network)
def _sequential_error(module: nn.Sequential, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    steps, _ = prepare(list(module), input_shape, arithmetic)
    return lambda x: _local(through(steps, x))
