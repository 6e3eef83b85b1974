r"""Rules of torch's normalisations: by running statistics an affine map, by the sample's own a map with a constant.

n numbers with mean :math:`\mu` and variance v (both of the sample) become
:math:`z = (x - \mu) / \sqrt{v + \epsilon}`, whose Jacobian is

.. math:: J = \frac{1}{\sqrt{v + \epsilon}} \Big(I - \frac{1 1^\top}{n}\Big) \Big(I - \frac{z z^\top}{n}\Big)

with :math:`\|z\|^2 \le n`: both brackets are contractions, so that :math:`y = w z + b` has a constant of at most
:math:`\max_i |w_i| / \sqrt{\epsilon}`. The exact one is :math:`\|\mathrm{diag}(w) (I - 1 1^\top / n)\|_2 /
\sqrt{\epsilon}`, reached where all x are equal: the same number where two weights have the largest modulus (equal
weights, n >= 2), else smaller by a factor of at most :math:`\sqrt{1 - 1/n}`. Groups do not touch each other: the
largest of their constants counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipkit.bounds.rounding import gamma, multiply_up, to_double, up
from lipkit.errors import NoRuleError, ShapeError
from lipkit.plain import Affine
from lipkit.protocol.registry import Shape, export_rule, lipschitz_rule, output_shape
from lipkit.protocol.torch_rules import _check_dims, export_copy

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
_AXES = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}


def running_affine(module: _BatchNorm | _InstanceNorm) -> tuple[Tensor, Tensor]:
    """Scale and shift (C,) in float64 of a normalisation by running statistics.

    Raises:
        NoRuleError: training mode, or no running statistics.
    """
    if module.training or module.running_mean is None or module.running_var is None:
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected evaluation mode with running statistics, got "
            f"training={module.training}, track_running_stats={module.track_running_stats}: batch statistics make "
            "it depend on the batch, or change with it; call .eval()"
        )
    scale = (to_double(module.running_var) + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * to_double(module.weight)
    shift = -to_double(module.running_mean) * scale
    if module.bias is not None:
        shift = shift + to_double(module.bias)
    return scale, shift


@lipschitz_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(module: _BatchNorm, input_shape: Shape | None) -> Tensor:
    scale, _ = running_affine(module)
    largest = up(scale.abs().amax(), 4)
    if module.weight is not None and bool((module.weight != 0).any()):
        largest = largest + 2.0**-1074  # for a product below the normal range
    return largest


def own_constant(module: nn.LayerNorm | nn.GroupNorm | _InstanceNorm) -> Tensor:
    r""":math:`\max |w| / \sqrt{\epsilon}`, rounded up, of a normalisation by the sample's own statistics.

    Raises:
        NoRuleError: eps is not positive and finite.
    """
    if not (math.isfinite(module.eps) and module.eps > 0):
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected eps a positive finite number, got {module.eps}: without it samples "
            "of small variance are stretched without limit"
        )
    constant = torch.tensor(1 / math.sqrt(module.eps) * (1 + gamma(4)), dtype=torch.float64)
    if module.weight is not None:
        constant = multiply_up(to_double(module.weight).abs().amax(), constant.to(module.weight.device))
    return constant


@lipschitz_rule(nn.LayerNorm)
def _layer_norm(module: nn.LayerNorm, input_shape: Shape | None) -> Tensor:
    normalized = tuple(module.normalized_shape)
    if input_shape is not None and input_shape[-len(normalized) :] != normalized:
        raise ShapeError(
            f"nn.LayerNorm: expected inputs that end in {normalized} behind the batch, got {input_shape}: it would "
            "take the batch for one of its dimensions"
        )
    return own_constant(module)


@lipschitz_rule(nn.GroupNorm)
def _group_norm(module: nn.GroupNorm, input_shape: Shape | None) -> Tensor:
    return own_constant(module)


@lipschitz_rule(*_AXES)
def _instance_norm(module: _InstanceNorm, input_shape: Shape | None) -> Tensor:
    axes = _AXES[type(module)]
    # One dimension less and torch takes the batch for the channels.
    _check_dims(module, input_shape, axes + 1, axes + 1)
    if module.track_running_stats:
        return torch.as_tensor(_batch_norm(module, input_shape))
    return own_constant(module)


@export_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _export_batch_norm(module: _BatchNorm, input_shape: Shape) -> nn.Module:
    scale, shift = running_affine(module)
    output_shape(module, input_shape)
    dtype = module.running_var.dtype  # type: ignore[union-attr]
    return Affine(scale.to(dtype), shift.to(dtype))


@export_rule(*_AXES)
def _export_instance_norm(module: _InstanceNorm, input_shape: Shape) -> nn.Module:
    if not module.track_running_stats:
        return export_copy(module, input_shape)
    _check_dims(module, input_shape, _AXES[type(module)] + 1, _AXES[type(module)] + 1)
    return _export_batch_norm(module, input_shape)


export_rule(nn.LayerNorm, nn.GroupNorm)(export_copy)
