"""Normalisations. By running statistics they are affine; by the sample's own statistics their constant is large."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError, finite
from lipkit.linalg.matrices import check_positive
from lipkit.modules.dense import Affine, with_numbers
from lipkit.modules.guarding import guard
from lipkit.modules.machine import proportional
from lipkit.modules.parametrised import settled
from lipkit.modules.plain import (
    COUNT,
    INTEGER,
    Plain,
    Range,
    RoundingBound,
    RoundingError,
    Shape,
    Shown,
    add_plain,
    around,
    flag,
    real,
    within_one,
)
from lipkit.modules.registry import check_dims, export_copy, output_shape
from lipkit.modules.views import Reshape, Together, per_channel
from lipkit.proof.roundoff import Arithmetic, Line, flat, gamma, grow, multiply_up, reciprocal_up, size, to_double, up

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

_InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


def running_affine(module: _BatchNorm | _InstanceNorm) -> tuple[Tensor, Tensor]:
    """Scale and shift (C,) in float64 of a normalisation by running statistics."""
    if module.training or module.running_mean is None or module.running_var is None:
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected evaluation mode with running statistics, got "
            f"training={module.training}, track_running_stats={module.track_running_stats}: batch statistics make "
            "it depend on the batch, or change with it; call .eval()"
        )
    variance = to_double(module.running_var) + module.eps
    if bool((variance <= 0).any()):  # NaN passes: it bounds nothing
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected running_var + eps above 0, got {float(variance.amin())}"
        )
    scale = variance.rsqrt()
    if module.weight is not None:
        scale = scale * to_double(module.weight)
    shift = -to_double(module.running_mean) * scale
    if module.bias is not None:
        shift = shift + to_double(module.bias)
    return scale, shift


def _batch_norm(module: _BatchNorm | _InstanceNorm, input_shape: Shape | None) -> Tensor:
    scale, _ = running_affine(module)
    largest = up(scale.abs().amax(), 4)
    if module.weight is not None and bool((module.weight != 0).any()):
        largest = largest + 2.0**-1074  # for a product below the normal range
    return largest


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def foldable(layer: nn.Module, norm: nn.Module, shape: Shape) -> bool:
    """True for a linear layer and a batch norm that act on the same dimension of channels.

    ``shape`` is that of a sample in front of ``layer`` or of ``norm``: only its number of dimensions counts.
    """
    both = type(layer) in LINEAR and type(norm) in NORMS and norm.running_var is not None
    return both and (type(layer) is not nn.Linear or len(shape) == 1)


def scaled_layer(layer: nn.Module, norm: nn.Module, *, inputs: bool = False) -> nn.Module:
    """The layer that equals ``norm(layer(x))``, in float64; with ``inputs``, ``layer(norm(x))`` without any bias."""
    assert isinstance(norm, _BatchNorm)
    scale, shift = running_affine(norm)
    given: Any = layer
    weight, bias = to_double(given.weight.detach()), given.bias
    taps, groups = (1,) * (weight.ndim - 2), getattr(layer, "groups", 1)
    if inputs == isinstance(layer, _TRANSPOSED):  # rows of a transposed convolution are its input channels
        weight = weight * scale.view(-1, 1, *taps)
    else:  # a row belongs to one group: (out, in / groups, taps), transposed (in, out / groups, taps)
        weight = (weight.unflatten(0, (groups, -1)) * scale.view(groups, 1, -1, *taps)).flatten(0, 1)
    if not inputs and bias is not None:
        shift = shift + to_double(bias) * scale
    return copy.deepcopy(with_numbers(layer, weight, None if inputs else shift))


def fold_norm(layer: nn.Module, norm: nn.Module, shape: Shape) -> nn.Module | None:
    """The convolution or linear layer that computes ``norm(layer(x))``, rounded once; None if no such layer exists.

    ``shape`` is that of one sample in front of the normalisation. A reshape may stand between layer and normalisation.
    """
    given: Any = layer
    if not foldable(layer, norm, shape):
        return None
    outputs = given.out_features if type(layer) is nn.Linear else given.out_channels
    if not norm.num_features == outputs == shape[0]:
        return None
    guard(norm := settled(norm))
    return scaled_layer(layer, norm).to(given.weight.dtype)


def own_constant(module: nn.LayerNorm | nn.GroupNorm | _InstanceNorm) -> Tensor:
    r""":math:`\max |w| / \sqrt{\epsilon}`, rounded up, of a normalisation by the sample's own statistics."""
    if not (math.isfinite(module.eps) and module.eps > 0):
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected eps a positive finite number, got {module.eps}: without it samples "
            "of small variance are stretched without limit"
        )
    constant = torch.tensor(1 / math.sqrt(module.eps) * (1 + gamma(4)), dtype=torch.float64)  # root and quotient
    if module.weight is not None:
        constant = multiply_up(to_double(module.weight).abs().amax(), constant.to(module.weight.device))
    return constant


def _layer_norm(module: nn.LayerNorm, input_shape: Shape | None) -> Tensor:
    normalized = tuple(module.normalized_shape)
    if input_shape is not None and input_shape[-len(normalized) :] != normalized:
        raise ShapeError(
            f"nn.LayerNorm: expected inputs that end in {normalized} after the batch, got {input_shape}: it would "
            "take the batch for one of its dimensions"
        )
    return own_constant(module)


def _instance_norm(module: _InstanceNorm, input_shape: Shape | None) -> Tensor:
    return _batch_norm(module, input_shape) if module.track_running_stats else own_constant(module)


def _export_batch_norm(module: _BatchNorm | _InstanceNorm, input_shape: Shape) -> nn.Module:
    scale, shift = running_affine(module)
    output_shape(module, input_shape)
    dtype = module.running_var.dtype  # type: ignore[union-attr]
    return Affine(scale.to(dtype), shift.to(dtype))


class Center(Shown):
    r"""Batch centring: the mean of each channel (dimension 1) is subtracted, in evaluation a running mean.

    In evaluation a translation, so its constant is 1; in training the output depends on the batch, and there is none.

    Args:
        momentum: weight of a batch in the running mean, in (0, 1].

    Buffer ``running_mean`` (channels,).

    Raises:
        OptionError: ``channels`` below 1, another momentum. ShapeError: a wrong number of channels.

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
        mean = per_channel(self, self.running_mean, x)
        if self.training:
            mean = x.mean([d for d in range(x.ndim) if d != 1], keepdim=True)
            with torch.no_grad():
                self.running_mean.lerp_(mean.flatten().to(self.running_mean.dtype), self.momentum)
        return x - mean


def _center(module: Center, input_shape: Shape | None) -> float | Tensor:
    if module.training:
        raise NoRuleError(
            f"{type(module).__name__}: expected evaluation mode, got training=True: a mean of the batch makes it "
            "depend on the batch; call .eval()"
        )
    return up(module.factor(), 4) if isinstance(module, BatchLipNorm) else 1.0


def _export_center(module: Center, input_shape: Shape) -> nn.Module:
    _center(module, input_shape)
    output_shape(module, input_shape)
    mean = module.running_mean
    if not isinstance(module, BatchLipNorm):
        return Affine(torch.ones_like(mean), -mean)
    scale = module.factor()
    shift = to_double(module.bias) - to_double(mean) * scale
    return Affine(scale.expand_as(mean).to(mean.dtype), shift.to(mean.dtype))


class BatchLipNorm(Center):
    r"""Batch centring, then one factor for all channels: the spread of the widest one becomes 1.

    .. math:: y_c = \frac{x_c - \mathrm E[x_c]}{\sqrt{\max_k \mathrm{Var}[x_k] + \epsilon}} + b_c

    In evaluation by running statistics: a gain and a translation of constant :math:`1 / \sqrt{\max_k v_k + \epsilon}`,
    which may be above 1 (`lipkit.lipschitz` of the network includes it). In training the output depends on the batch,
    and no constant exists. One factor for all channels keeps an orthogonal layer in front orthogonal up to scale,
    unlike the factors of `nn.BatchNorm2d`.

    Args:
        momentum: weight of a batch in the running statistics, in (0, 1].

    Buffers ``running_mean`` and ``running_var`` (channels,), the latter unbiased; parameter ``bias`` (channels,).

    Raises:
        OptionError: options out of range. ShapeError: a wrong number of channels, or, in training, one number per
            channel.

    >>> layer = BatchLipNorm(2, momentum=1.0, eps=1e-9)
    >>> y = layer(torch.tensor([[1.0, 1.0], [3.0, 5.0]]))
    >>> layer.running_var.tolist(), round(y[1, 1].item(), 4), round(y[1, 0].item(), 4)
    ([2.0, 8.0], 1.0, 0.5)

    References:
        deel-torchlip 1.0's BatchLipNorm (which averages over an epoch where this one forgets by ``momentum``).
    """

    running_var: Tensor

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__(channels, momentum)
        self.eps = finite("eps", eps, positive=True)
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        bias, variance = per_channel(self, self.bias, x), self.running_var
        if self.training:
            if x.numel() < 2 * x.shape[1]:
                raise ShapeError(f"BatchLipNorm: expected two numbers of each channel or more, got {tuple(x.shape)}")
            variance = torch.var(x, [d for d in range(x.ndim) if d != 1], correction=0)  # of this batch: biased
            count = x.numel() // x.shape[1]
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))  # as the statistics of torch
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        factor = (variance.amax() + self.eps).rsqrt()
        return super().forward(x) * factor + bias

    def factor(self) -> Tensor:
        """The factor of all channels in evaluation, in float64."""
        return (to_double(self.running_var).amax() + self.eps).rsqrt()


class LayerCenter(Together):
    r"""Layer centring: the mean over some dimensions of a sample is subtracted; an orthogonal projection, of norm 1.

    .. math:: y = x - \frac 1n \mathbf 1 \mathbf 1^T x \qquad (n \text{ numbers in the dimensions dims})

    Raises:
        OptionError: no dimension, one twice, or the batch, which is 0.

    >>> LayerCenter(2, 3)(torch.tensor([[[[1.0, 3.0]]]])).tolist()
    [[[[-1.0, 1.0]]]]

    References:
        deel-torchlip's LayerCentering; layer normalisation without its division, which has no small constant.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(self.dims, keepdim=True)


class UnitNorm(Together):
    r"""Numbers divided by their l2 norm, or by eps where that is larger: ``F.normalize``.

    .. math:: y = x / \max(\|x\|_2, \epsilon)

    over the dimensions ``dims``: the projection onto the ball of radius eps, divided by eps, so of constant
    :math:`1 / \epsilon`. ``lipkit.export(..., box=...)`` raises eps to the least norm of x in the box.

    Raises:
        OptionError: no dimension, one twice, or the batch, which is 0; eps not positive and finite.

    >>> UnitNorm(1, eps=10.0)(torch.tensor([[30.0, 40.0], [5.0, 0.0]])).mul(10).round().tolist()
    [[6.0, 8.0], [5.0, 0.0]]
    """

    def __init__(self, *dims: int, eps: float) -> None:
        super().__init__(*dims)
        finite("UnitNorm: eps", eps, positive=True)  # at 0 it has no constant
        self.eps = eps  # as given: files may hold a whole number

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=self.dims, eps=self.eps)  # type: ignore[arg-type]

    def within(self, x: Range) -> UnitNorm:
        """The module with the largest eps that changes nothing for inputs in a range."""
        least = float(torch.linalg.vector_norm(x.nearest, dim=self.dims).amin()) * (1 - 1e-6)
        return UnitNorm(*self.dims, eps=max(self.eps, least))


def _together(module: UnitNorm | LayerCenter, input_shape: Shape | None) -> float:
    check_dims(module, input_shape, max(module.dims))
    return reciprocal_up(module.eps) if isinstance(module, UnitNorm) else 1.0


def _unit_norm_error(module: UnitNorm, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    numbers, terms = math.prod(input_shape), math.prod(input_shape[dim - 1] for dim in module.dims)
    # The norm is wrong by gamma of itself and by what squares lose below the range; results have norm 1 at most.
    wrong = arithmetic.gamma(terms + 8) + 2 * math.sqrt((terms + 2) * arithmetic.tiny) / module.eps
    lost = 2 * wrong * math.sqrt(numbers / terms) + math.sqrt(numbers) * arithmetic.tiny
    error = grow(lost) if wrong < 0.25 else math.inf
    return proportional(0.0, error, grow(math.sqrt(arithmetic.room)), 2.0 + 2 * module.eps)


def _layer_center_error(module: LayerCenter, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    terms = math.prod(input_shape[dim - 1] for dim in module.dims)
    # The mean of n numbers is wrong by gamma(n + 2) of the mean of their moduli, n times, and the difference by a unit:
    # together gamma(n + 5) |x| in the l2 norm, since |mean| sqrt(n) <= |x|.
    error, floor = arithmetic.gamma(terms + 5), math.sqrt(math.prod(input_shape)) * (terms + 4) * arithmetic.tiny
    return proportional(error, floor, float(terms + 2))


def _export_apart(module: nn.GroupNorm | _InstanceNorm, input_shape: Shape) -> nn.Module:
    """A group or instance normalisation as a layer normalisation of each group, then an affine map of the channels."""
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return _export_batch_norm(module, input_shape)
    own_constant(module)
    output_shape(module, input_shape)
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else input_shape[0]
    n = math.prod(input_shape) // groups
    parts: list[nn.Module] = [nn.LayerNorm(n, module.eps, elementwise_affine=False)]
    if (groups, n) != input_shape:
        parts = [Reshape(groups, n), *parts, Reshape(*input_shape)]  # channels of a group are neighbours
    weight, bias = (module._parameters[name] for name in ("weight", "bias"))
    if (like := bias if weight is None else weight) is not None:  # a functional form may have either alone
        scale = torch.ones_like(like) if weight is None else weight
        parts.append(Affine(scale, torch.zeros_like(like) if bias is None else bias))
    return nn.Sequential(*parts)


def _layer_norm_error(module: nn.LayerNorm, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    terms = math.prod(module.normalized_shape)
    eps, numbers, up = module.eps, math.prod(input_shape), 1 + 2.0**-40
    gain = float(own_constant(module).detach())
    weight, bias = (0.0 if t is None else float(t.detach().abs().amax()) for t in (module.weight, module.bias))
    weight = 1.0 if module.weight is None else weight
    shift = 0.0 if module.bias is None else float(size(module.bias[None])) * math.sqrt(numbers / module.bias.numel())
    gamma = arithmetic.gamma(4 * terms + 32)  # two sums over the group, and what follows
    # Squares must not overflow either.
    cap = min(math.sqrt(terms * eps) / (4 * gamma), math.sqrt(arithmetic.largest) / 8)
    # What is flushed to zero must not count beside eps.
    usable = gamma < math.inf and eps * arithmetic.unit >= 64 * (terms + 8) * arithmetic.tiny * (1 + cap)
    rising = arithmetic.room / cap * up if usable else math.inf
    linear = 5 * gamma * gain * up + 4 * arithmetic.tiny
    flushed = arithmetic.tiny * (12 * (terms + 8) * gain + 8 * weight + 8)
    constant = grow(arithmetic.gamma(4) * shift + math.sqrt(numbers) * flushed)

    def measure(x: Tensor) -> RoundingBound:
        groups = size(x.detach().double().reshape(-1, terms)).view(len(x), -1)
        reached, furthest = Line(size(x), 1.0), Line(groups.amax(1), 1.0)
        error = reached.times(linear).plus(flat(reached.at, constant))
        peak = reached.times(grow(4 + 6 * gain))
        peak = Line(peak.at + 2 * shift + max(weight, bias, eps, 2 * gain), peak.slope)
        peak = flat(reached.at, math.inf) if rising == math.inf else peak.most(furthest.times(rising))
        return RoundingBound(error, peak)

    return measure


def _export_layer_norm(module: nn.LayerNorm, input_shape: Shape) -> nn.Module:
    _layer_norm(module, input_shape)  # its weights may have the dimensions of a matrix
    return export_copy(module, input_shape)


def _layer_norm_range(module: nn.LayerNorm, x: Range) -> Range:
    # |x_i - mean| <= sqrt(n - 1) times the standard deviation.
    size = math.sqrt(max(math.prod(module.normalized_shape) - 1, 0)) * torch.ones_like(x.low)
    weight = size if module.weight is None else size * module.weight.abs()
    centre = torch.zeros_like(x.low) if module.bias is None else torch.zeros_like(x.low) + module.bias
    return around(centre, weight)


for _batch in NORMS:
    add_plain(Plain(_batch, _batch_norm, export=_export_batch_norm))
for _centring in (Center, BatchLipNorm):
    add_plain(Plain(_centring, _center, export=_export_center))
add_plain(Plain(UnitNorm, _together, _unit_norm_error, {"dims": COUNT, "eps": real}, within_one))
_norm = {"normalized_shape": INTEGER, "eps": real, "elementwise_affine": flag, "bias": flag}
add_plain(Plain(LayerCenter, _together, _layer_center_error, {"dims": COUNT}))
add_plain(Plain(nn.LayerNorm, _layer_norm, _layer_norm_error, _norm, _layer_norm_range, export=_export_layer_norm))
add_plain(Plain(nn.GroupNorm, lambda module, input_shape: own_constant(module), export=_export_apart))
for _instance, _rank in ((nn.InstanceNorm1d, 2), (nn.InstanceNorm2d, 3), (nn.InstanceNorm3d, 4)):
    add_plain(Plain(_instance, _instance_norm, export=_export_apart, dims=(_rank, _rank)))
