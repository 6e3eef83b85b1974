"""Rules of branches that are added."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipkit.bounds.rounding import up
from lipkit.plain import Sum
from lipkit.protocol.guarding import guard
from lipkit.protocol.plain_rules import refuse_inplace
from lipkit.protocol.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape


@lipschitz_rule(Sum)
def _sum(module: Sum, input_shape: Shape | None) -> Tensor:
    guard(module.branches)
    refuse_inplace(module)
    parts = torch.stack([lipschitz(branch, input_shape) for branch in module.branches])
    return parts[0] if len(parts) == 1 else up(parts.sum(), len(parts))


@export_rule(Sum)
def _export_sum(module: Sum, input_shape: Shape) -> nn.Module:
    guard(module.branches)
    refuse_inplace(module)
    output_shape(module, input_shape)
    return Sum(*(export(branch, input_shape) for branch in module.branches))
