"""Rules of the plain modules: every bound is computed from the stored numbers, in float64."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from lipkit.bounds.rounding import gamma, to_double, up
from lipkit.bounds.verified import spectral_norm
from lipkit.plain import Affine, ConvexResidual, FourierConv2d, GroupSort, MaxMin
from lipkit.protocol.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape


@lipschitz_rule(MaxMin, GroupSort)
def _sorting(module: nn.Module, input_shape: Shape | None) -> float:
    return 1.0


@lipschitz_rule(Affine)
def _affine(module: Affine, input_shape: Shape | None) -> Tensor:
    return to_double(module.scale).abs().amax()


@lipschitz_rule(ConvexResidual)
def _convex_residual(module: ConvexResidual, input_shape: Shape | None) -> Tensor:
    share = to_double(module.share)
    # As stored and evaluated the two weights are `share` and `1 - share`; negative ones count by absolute value.
    body, shortcut = (lipschitz(branch, input_shape) for branch in (module.body, module.shortcut))
    return up(share.abs() * body + (1 - share).abs() * shortcut, 4)


def transform_norm(matrices: list[Tensor]) -> float:
    """Proved bound of the norm of the stored transform (and of its transpose), butterfly included."""
    norm = 1.0
    for matrix in matrices:
        t = to_double(matrix)
        n = t.shape[0]
        # ||T||^2 = ||T T^*|| <= its largest absolute row sum.
        row_sum = float((t @ t.mT).abs().sum(1).amax()) + n * gamma(n + 2) * n
        norm *= math.sqrt(row_sum) * (1 + gamma(4))
    if len(matrices) > 1:
        # The butterfly multiplies by a rounded square root of one half.
        norm *= 1 + gamma(8)
    return norm * (1 + gamma(4))


@lipschitz_rule(FourierConv2d)
def _fourier(module: FourierConv2d, input_shape: Shape | None) -> Tensor:
    norms = [spectral_norm(module.real)]
    if len(module.pair):
        norms.append(spectral_norm(torch.complex(to_double(module.pair[:, 0]), to_double(module.pair[:, 1]))))
    return up(torch.stack(norms).amax() * transform_norm(module.matrices()) ** 2, 4)


@export_rule(Affine, FourierConv2d, GroupSort, MaxMin)
def _already_plain(module: nn.Module, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return copy.deepcopy(module)


@export_rule(ConvexResidual)
def _export_residual(module: ConvexResidual, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return ConvexResidual(export(module.body, input_shape), module.share, export(module.shortcut, input_shape))
