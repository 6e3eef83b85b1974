"""Normalisations: affine by running statistics, of a large constant by those of the sample itself."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.linalg.matrices import check_positive
from lipkit.modules.configuration import COUNT, INTEGER, flag, real, stored
from lipkit.modules.dense import Affine, _has_subnormal, scaling
from lipkit.modules.guarding import guard
from lipkit.modules.machine import Local, Measure, entries, rounding_rule
from lipkit.modules.rearrange import _check_dims, export_copy
from lipkit.modules.registry import Shape, export_rule, lipschitz_rule, output_shape
from lipkit.proof.arithmetic import (
    Arithmetic,
    Line,
    grow_number,
    size,
)
from lipkit.proof.roundoff import gamma, multiply_up, to_double, up

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


_FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.Linear)


def fold_norm(layer: nn.Module, norm: nn.Module, shape: Shape) -> nn.Module | None:
    """The convolution or linear layer that computes ``norm(layer(x))``, rounded once; None if it is not one.

    Args:
        layer: plain.
        norm: the module behind it, a batch normalisation by running statistics.
        shape: of one sample between both.

    Raises:
        NoRuleError: as `running_affine`; a normalisation whose forward pass may not be that of its type.

    >>> norm = nn.BatchNorm1d(2).eval()
    >>> _ = norm.running_mean.fill_(1.0)
    >>> folded = fold_norm(nn.Linear(3, 2, bias=False), norm, (2,))
    >>> [round(value, 4) for value in folded.bias.tolist()]
    [-1.0, -1.0]
    """
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or type(layer) not in _FOLDABLE:
        return None
    assert isinstance(norm, _BatchNorm)
    if norm.num_features != shape[0] or (type(layer) is nn.Linear and len(shape) != 1):
        return None
    guard(norm)
    scale, shift = running_affine(norm)
    folded: Any = copy.deepcopy(layer)
    weight, dtype = to_double(folded.weight), folded.weight.dtype
    taps = (1,) * (weight.ndim - 2)
    if isinstance(folded, (nn.ConvTranspose1d, nn.ConvTranspose2d)):
        # (in, out / groups, taps): a row belongs to one group of outputs.
        scales = scale.view(folded.groups, 1, -1, *taps)
        weight = (weight.unflatten(0, (folded.groups, -1)) * scales).flatten(0, 1)
    else:
        weight = weight * scale.view(-1, 1, *taps)
    if folded.bias is not None:
        shift = shift + to_double(folded.bias) * scale
    folded.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    folded.bias = nn.Parameter(shift.to(dtype), requires_grad=False)
    return folded


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


class Center(nn.Module):
    r"""Batch centring: the mean of each channel (dimension 1) is subtracted, in evaluation a running mean.

    In evaluation a translation, so its constant is 1; in training the output depends on the batch, and there is none.

    Args:
        channels: of dimension 1.
        momentum: weight of a batch in the running mean, in (0, 1].

    Buffer ``running_mean`` (channels,).

    Raises:
        OptionError: ``channels`` below 1, another momentum. ShapeError: an input with other channels.

    >>> layer = Center(1, momentum=1.0)
    >>> layer(torch.tensor([[1.0], [3.0]])).flatten().tolist(), layer.running_mean.tolist()
    ([-1.0, 1.0], [2.0])

    References:
        deel-torchlip's BatchCentering; Hu et al., NeurIPS 2023 (in LiResNet blocks).
    """

    running_mean: Tensor

    def __init__(self, channels: int, momentum: float = 0.1) -> None:
        super().__init__()
        check_positive(channels=channels)
        if not 0 < momentum <= 1:
            raise OptionError(f"momentum: expected a number above 0 and at most 1, got {momentum}")
        self.channels, self.momentum = channels, momentum
        self.register_buffer("running_mean", torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise ShapeError(f"Center: expected {self.channels} channels in dimension 1, got shape {tuple(x.shape)}")
        mean = self.running_mean
        if self.training:
            mean = x.mean([d for d in range(x.ndim) if d != 1])
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        return x - mean.view(-1, *[1] * (x.ndim - 2))

    def extra_repr(self) -> str:
        return f"{self.channels}, momentum={self.momentum}"


@lipschitz_rule(Center)
def _center(module: Center, input_shape: Shape | None) -> float:
    if module.training:
        raise NoRuleError(
            "Center: expected evaluation mode, got training=True: a mean of the batch makes it depend on the batch; "
            "call .eval()"
        )
    return 1.0


@export_rule(Center)
def _export_center(module: Center, input_shape: Shape) -> nn.Module:
    _center(module, input_shape)
    output_shape(module, input_shape)
    return Affine(torch.ones_like(module.running_mean), -module.running_mean)


@export_rule(*_AXES)
def _export_instance_norm(module: _InstanceNorm, input_shape: Shape) -> nn.Module:
    if not module.track_running_stats:
        return export_copy(module, input_shape)
    _check_dims(module, input_shape, _AXES[type(module)] + 1, _AXES[type(module)] + 1)
    return _export_batch_norm(module, input_shape)


export_rule(nn.LayerNorm, nn.GroupNorm)(export_copy)


@rounding_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def running_statistics(
    module: nn.BatchNorm2d | nn.InstanceNorm2d, input_shape: Shape, arithmetic: Arithmetic
) -> Measure:
    """The rule of a normalisation by its running statistics."""
    scale, _ = running_affine(module)
    assert module.running_mean is not None
    assert module.running_var is not None
    mean = module.running_mean.abs() * scale.abs()
    # The root, its reciprocal, three products and two sums, on scale, mean and shift, in either order.
    shift = mean + (0.0 if module.bias is None else module.bias.abs())
    variance: Tensor = module.running_var + module.eps
    numbers = [t for t in (module.running_mean, module.running_var, module.weight, module.bias) if t is not None]
    inverse = float(variance.rsqrt().amax())
    stored = max(inverse, module.eps, *(float(t.detach().abs().amax()) for t in numbers))
    clear = float(variance.amin()) >= 8 * arithmetic.tiny / arithmetic.unit
    if not clear or module.eps < 0 or float(module.running_var.amin()) < 0:
        stored = math.inf  # beside such a variance counts what is flushed to zero, or what cancels
    flushed = module.weight is not None and _has_subnormal(module.weight, arithmetic)
    lost = grow_number(arithmetic.tiny * inverse) if flushed else 0.0
    return scaling(scale, shift, 12, input_shape, arithmetic, stored, lost)


def own_statistics(
    module: nn.LayerNorm | nn.GroupNorm | nn.InstanceNorm2d,
    terms: int,
    input_shape: Shape,
    arithmetic: Arithmetic,
    squares: bool = False,
) -> Measure:
    """The bound of the module docstring.

    Args:
        terms: n, the numbers of one group, which lie beside each other.
        squares: whether the variance may be a difference of two squares.
    """
    eps, numbers, up = module.eps, entries(input_shape), 1 + 2.0**-40
    gain = float(own_constant(module).detach())
    weight, bias = (0.0 if t is None else float(t.detach().abs().amax()) for t in (module.weight, module.bias))
    weight = 1.0 if module.weight is None else weight
    shift = 0.0 if module.bias is None else float(size(module.bias[None])) * math.sqrt(numbers / module.bias.numel())
    gamma = arithmetic.gamma(4 * terms + 32)
    cap = math.sqrt(terms * eps / (5 * gamma)) if squares else math.sqrt(terms * eps) / (4 * gamma)
    cap = min(cap, math.sqrt(arithmetic.largest) / 8)  # squares must not overflow either
    # What is flushed to zero must not count beside eps.
    usable = gamma < math.inf and eps * arithmetic.unit >= 64 * (terms + 8) * arithmetic.tiny * (1 + cap)
    rising = arithmetic.room / cap * up if usable else math.inf
    linear = 5 * gamma * gain * up + 4 * arithmetic.tiny
    flushed = arithmetic.tiny * (12 * (terms + 8) * gain + 8 * weight + 8)
    constant = grow_number(arithmetic.gamma(4) * shift + math.sqrt(numbers) * flushed)
    quadratic = 2 * gamma * gain / math.sqrt(eps * terms) * up if squares else 0.0
    # The slope of the peak keeps a factor of 2^22 below the range of float64, for the gain of what comes before.
    most = max(1.0, 2 * math.sqrt(numbers * eps), arithmetic.room * 2.0**-1000)

    def measure(x: Tensor) -> Local:
        groups = size(x.detach().double().reshape(-1, terms)).view(len(x), -1)
        reached, furthest = Line(size(x), 1.0), Line(groups.amax(1), 1.0)
        error = reached.times(linear).plus(Line(torch.full_like(reached.at, constant), 0.0))
        peak = reached.times(grow_number(4 + 6 * gain))
        peak = Line(peak.at + 2 * shift + max(weight, bias, eps, 2 * gain), peak.slope)
        if rising == math.inf:
            peak = Line(torch.full_like(reached.at, math.inf), 0.0)
        else:
            peak = peak.most(furthest.times(rising))
        if squares:
            error = error.plus(Line(size(groups.square()), grow_number(most)).times(quadratic))
            peak = peak.most(Line(torch.zeros_like(reached.at), arithmetic.room / most * up))
        return Local(error, peak)

    return measure


@rounding_rule(nn.LayerNorm)
def _layer_norm_error(module: nn.LayerNorm, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return own_statistics(module, math.prod(module.normalized_shape), input_shape, arithmetic)


@rounding_rule(nn.GroupNorm)
def _group_norm_error(module: nn.GroupNorm, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return own_statistics(module, entries(input_shape) // module.num_groups, input_shape, arithmetic, squares=True)


@rounding_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_norm_error(module: nn.InstanceNorm2d, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    if module.track_running_stats:
        return running_statistics(module, input_shape, arithmetic)
    return own_statistics(module, math.prod(input_shape[1:]), input_shape, arithmetic)


stored(nn.LayerNorm, normalized_shape=INTEGER, eps=real, elementwise_affine=flag, bias=flag)
stored(nn.GroupNorm, num_groups=COUNT, num_channels=COUNT, eps=real, affine=flag)
for _kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    stored(_kind, num_features=COUNT, eps=real, affine=flag)
