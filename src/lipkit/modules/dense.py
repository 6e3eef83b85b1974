r"""Rounding errors of linear layers that are inner products, in any order or in blocks; dense layers and scalings.

A machine computes :math:`y_i = \sum_j w_{ij} h_j + b_i`, n terms in any order, with an error of at most

.. math:: \gamma_d \Big(\sum_j |w_{ij}| |h_j| + |b_i|\Big)
          + \eta \Big(\sum_j |w_{ij}| + \sum_{j: |w_{ij}| < \eta} |h_j| + 2 n + 2\Big), \qquad d = n + 1

The first sum is measured at the sample x, :math:`\| |W| |x| \|`, and grows by at most :math:`\| |W| \| s` within
distance s of x; :math:`\| |W| \|_2` is bounded by the root of its largest row sum times its largest column sum (Schur).
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import ShapeError
from lipkit.linalg.matrices import check_positive
from lipkit.modules.machine import Sizes, norm_sizes
from lipkit.modules.parametrised import alike
from lipkit.modules.plain import (
    COUNT,
    Plain,
    Range,
    RoundingBound,
    RoundingError,
    Shape,
    Shown,
    Stored,
    add_plain,
    around,
    flag,
)
from lipkit.modules.registry import output_shape
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import FLOAT64, Arithmetic, Line, flat, grow, product, size, to_double


class Affine(nn.Module):
    """``y = scale * x + shift``, entry by entry, with constant buffers.

    Args:
        scale, shift: tensors with the first dimensions of a sample, each of its size or 1: ``(C,)`` for each channel.

    Raises:
        ShapeError: other numbers of dimensions, or a sample that broadcasting would enlarge.

    >>> Affine(torch.tensor([2.0]), torch.tensor([1.0]))(torch.zeros(1, 3)).tolist()
    [[1.0, 1.0, 1.0]]
    >>> Affine(torch.tensor([[2.0, 3.0]]), torch.zeros(1, 1))(torch.ones(1, 2, 2)).tolist()
    [[[2.0, 3.0], [2.0, 3.0]]]
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        alike = all(a == b or 1 in (a, b) for a, b in zip(scale.shape, shift.shape, strict=False))
        if scale.ndim < 1 or scale.ndim != shift.ndim or not alike or not scale.numel() or not shift.numel():
            got = f"{tuple(scale.shape)} and {tuple(shift.shape)}"
            raise ShapeError(f"Affine: expected scale and shift with the first dimensions of a sample, got {got}")
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("shift", shift.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        sample, rest = x.shape[1:], (1,) * (x.ndim - 1 - self.scale.ndim)
        sizes = [*zip(self.scale.shape, sample, strict=False), *zip(self.shift.shape, sample, strict=False)]
        if len(sample) < self.scale.ndim or any(n not in (1, m) for n, m in sizes):
            expected = f"scale {tuple(self.scale.shape)} and shift {tuple(self.shift.shape)} fit"
            raise ShapeError(f"Affine: expected samples that {expected}, got {tuple(x.shape)}")
        return x * self.scale.view(*self.scale.shape, *rest) + self.shift.view(*self.shift.shape, *rest)

    def extra_repr(self) -> str:
        return f"scale={tuple(self.scale.shape)}, shift={tuple(self.shift.shape)}"


class PositionCode(Shown):
    """``y = x + P`` with a trained offset P of each channel and place: a translation, so 1-Lipschitz.

    It lets layers that treat all places alike tell them apart. Parameter ``offset`` (channels, height, width), zeros at
    the start.

    Raises:
        OptionError: a size below 1. ShapeError: an input of another shape (it would be repeated).

    >>> PositionCode(2, 4, 4)(torch.ones(1, 2, 4, 4)).sum().item()
    32.0
    """

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        check_positive(channels=channels, height=height, width=width)
        self.channels, self.height, self.width = channels, height, width
        self.offset = nn.Parameter(torch.zeros(channels, height, width))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.offset.shape:
            wanted = f"samples of shape {tuple(self.offset.shape)}"
            raise ShapeError(f"PositionCode: expected {wanted}, got {tuple(x.shape)}")
        return x + self.offset


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """The ``nn.Linear`` that holds these tensors, not copies of them, without gradients."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return layer


def inner_products(
    absolute: Callable[[Tensor], Tensor],
    sums: Callable[[Tensor], tuple[float, float]],
    weight: Tensor,
    terms: int,
    outputs: int,
    arithmetic: Arithmetic,
    *,
    copies: float = 1.0,
    blocked: bool = True,
) -> RoundingError:
    """Rounding rule of ``W x + b``, by inner products of at most ``terms`` terms: the bound at the top of the file.

    ``absolute`` maps |x| to ``|W| |x| + |b|``; ``sums`` maps |W| to its largest row sum and its largest column sum.
    ``copies`` bounds how often padding repeats an input. ``blocked`` is False if even the evaluator that sums in blocks
    sums this module in any order.
    """
    magnitude = weight.detach().abs().double()
    depth = arithmetic.depth(terms) if blocked else terms
    error = arithmetic.gamma(depth + 1 + arithmetic.stored)  # the bias, and a weight that is rounded first
    up = 1 + FLOAT64.gamma(weight.numel() + terms + 16)  # for the sums that are taken here
    row, column = (value * up for value in sums(magnitude))
    norm = grow(math.sqrt(row) * math.sqrt(column * copies))  # Schur; root by root, as no product may underflow to 0
    lost = 0.0
    if _has_subnormal(magnitude, arithmetic):
        tiny = (magnitude < arithmetic.tiny) & (magnitude > 0)
        row_count, column_count = sums(tiny.double())
        lost = product(grow(math.sqrt(row_count * column_count * copies)), arithmetic.tiny)
    floor = product(math.sqrt(outputs) * (row + 2 * terms + 2), arithmetic.tiny)
    biggest = float(magnitude.amax()) if magnitude.numel() else 0.0

    def measure(x: Tensor) -> RoundingBound:
        reached = Line(grow(size(absolute(x.abs())) * up), norm)
        found = reached.times(error).plus(Line(size(x), 1.0).times(lost)).plus(flat(reached.at, floor))
        peak = reached.times(1 + error if error < math.inf else 1.0)  # partial sums of moduli are below
        return RoundingBound(found, Line(peak.at + biggest, peak.slope))

    return measure


def with_numbers(module: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """A layer with these weights, for use at once: it shares everything else with ``module``."""
    numbers = {"weight": weight, "bias": bias}
    made = {name: None if t is None else nn.Parameter(t, requires_grad=False) for name, t in numbers.items()}
    return alike(module, _parameters=made)


def linear_range(module: Any, x: Range) -> Range:
    """Range of ``W x + b`` on a box with centre c and radii r: ``W c + b +- |W| r``."""
    return around(module(x.centre), with_numbers(module, module.weight.abs(), None)(x.radius))


def linear_error(module: Any, input_shape: Shape, arithmetic: Arithmetic, copies: float = 1.0) -> RoundingError:
    """Rounding rule of a dense layer or a convolution; ``copies`` as in `inner_products`."""
    weight, bias, groups = module.weight.detach(), module.bias, getattr(module, "groups", 1)
    transposed = isinstance(module, nn.ConvTranspose2d)  # rows of its stored weight are inputs
    terms = weight[0].numel() if not transposed else len(weight) // groups * math.prod(weight.shape[2:])

    def sums(w: Tensor) -> tuple[float, float]:
        # Each channel on one side against the channels of its group on the other, over all taps.
        grouped = w.reshape(groups, len(w) // groups, w.shape[1], -1).sum(3)
        one, other = float(grouped.sum(2).amax()), float(grouped.sum(1).amax())
        return (other, one) if transposed else (one, other)

    return inner_products(
        with_numbers(module, weight.abs(), None if bias is None else bias.abs()),
        sums,
        weight,
        terms,
        math.prod(output_shape(module, input_shape)),
        arithmetic,
        copies=copies,
        blocked=not transposed and groups == 1,  # as `blocked` does
    )


_features = {"in_features": COUNT, "out_features": COUNT, "bias": flag}
add_plain(Plain(nn.Linear, lambda m, shape: spectral_norm(m.weight), linear_error, _features, linear_range))


def moduli_sizes(module: Callable[[Tensor], Tensor]) -> Sizes:
    r"""For a dense layer, lower and upper bounds of :math:`\| |W| |x| \|`, over the norm of |W| in `inner_products`.

    .. math:: \sum_{ij} |W_{ij}| |x_j| / \sqrt m \le \| |W| |x| \| \le \sum_j |x_j| \| W e_j \| \quad\text{(m rows)}

    The upper bound includes rounding, the lower one does not. Other modules and subnormal weights get `norm_sizes`.
    """
    if type(module) is not nn.Linear or _has_subnormal(module.weight, FLOAT64):
        return norm_sizes
    magnitude = module.weight.detach().abs()
    sums, columns = magnitude.sum(0), size(magnitude.T)
    norm = math.sqrt(float(magnitude.sum(1).amax())) * math.sqrt(float(sums.amax()))
    if not 0 < norm < math.inf:
        return norm_sizes
    up = 1 + FLOAT64.gamma(magnitude.numel() + 16)
    both = torch.stack((sums / (norm * math.sqrt(len(magnitude))), grow(columns / norm * up)), 1)

    def measure(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim > 2:
            return norm_sizes(x)
        low, high = (x.abs() @ both).unbind(1)
        return low, torch.minimum(grow(high * up), size(x))

    return measure


def last_layer(module: nn.Linear, arithmetic: Arithmetic) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Tensor]:
    """The rounding error of each single output of a dense layer, as (measure, slope).

    ``measure`` maps inputs (N, n) to two bounds (N, K): of the error at the input, which grows by ``slope`` (K,) per
    unit of l2 distance, and of the moduli of intermediate numbers.
    """
    weight = module.weight.detach().abs()
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach().abs()
    n = module.in_features
    error = arithmetic.gamma(arithmetic.depth(n) + 1 + arithmetic.stored)
    up = 1 + FLOAT64.gamma(n + 16)  # for the sums that are taken here
    tiny = ((weight < arithmetic.tiny) & (weight > 0)).double()
    slope = grow(size(weight) * error + tiny.sum(1).sqrt() * arithmetic.tiny)
    floor = arithmetic.tiny * (weight.sum(1) + 2 * n + 2) * up

    def measure(x: Tensor) -> tuple[Tensor, Tensor]:
        peak = grow(F.linear(x.abs(), weight, bias) * up)  # partial sums of moduli are below
        return grow(peak * error + F.linear(x.abs(), tiny) * arithmetic.tiny * up + floor), peak

    return measure, torch.where(weight.amax(1) == 0, 0.0, slope)  # the error of a row of zeros does not grow


def _affine_error(module: Affine, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    rest = (1,) * (len(input_shape) - module.scale.ndim)
    scale, shift = (t.detach().double().abs().view(*t.shape, *rest) for t in (module.scale, module.shift))
    error = arithmetic.gamma(3 + 2 * arithmetic.stored)  # product and sum, of two numbers that may be rounded
    largest = grow(float(scale.amax()))
    lost = arithmetic.tiny if _has_subnormal(scale, arithmetic) else 0.0
    floor = math.sqrt(math.prod(input_shape)) * arithmetic.tiny * (largest + 12)

    def measure(x: Tensor) -> RoundingBound:
        reached = Line(grow(size(x.abs() * scale + shift)), largest)
        error_line = reached.times(error).plus(Line(size(x), 1.0).times(lost))
        peak = reached.times(2.0)  # the product, then the sum
        return RoundingBound(error_line.plus(flat(reached.at, floor)), Line(peak.at + largest, peak.slope))

    return measure


def _has_subnormal(values: Tensor, arithmetic: Arithmetic) -> bool:
    magnitude = values.detach().abs()
    return bool(((magnitude < arithmetic.tiny) & (magnitude > 0)).any())


def _affine_range(m: Affine, x: Range) -> Range:
    return around(m(x.centre), Affine(m.scale.abs(), torch.zeros_like(m.shift))(x.radius))


_stored = Stored(
    {"scale": COUNT, "shift": COUNT},
    lambda m: {"scale": tuple(m.scale.shape), "shift": tuple(m.shift.shape)},
    lambda scale, shift: Affine(torch.zeros(scale), torch.zeros(shift)),
)
add_plain(Plain(Affine, lambda m, shape: to_double(m.scale).abs().amax(), _affine_error, _stored, _affine_range))


def _export_position(module: PositionCode, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return Affine(torch.ones_like(module.offset[:1, :1, :1]), module.offset)


add_plain(Plain(PositionCode, 1.0, export=_export_position))


# Linear layers whose inner products are summed in blocks: the same functions, with smaller rounding errors. A sum of n
# terms in an unknown order may lose n units of roundoff. Summed in blocks of b and the blocks pairwise, no term meets
# more than b + log2(n / b) additions, and that bounds the error whatever a library does inside a block.
BLOCK = 16


def pairwise(parts: Tensor) -> Tensor:
    """The sum over dimension 0, by halves."""
    while len(parts) > 1:
        half = len(parts) // 2
        rest = parts[2 * half :]  # the odd one, for the next round
        parts = parts[:half] + parts[half : 2 * half]
        if len(rest):
            parts = torch.cat((parts, rest))
    return parts[0]


def blocked_product(x: Tensor, weight: Tensor, block: int) -> Tensor:
    r"""``x @ weight.mT`` for x ``(..., N, n)`` and weight ``(m, n)``, in blocks of ``block`` terms."""
    n = weight.shape[1]
    fill = -n % block if n > block else 0  # zeros up to whole blocks
    if fill:
        x, weight = F.pad(x, (0, fill)), F.pad(weight, (0, fill))
    size = min(block, n)
    flat = x.reshape(-1, x.shape[-1])
    # One batched product, (k, N, b) by (k, b, m): the blocks are never added inside it.
    parts = flat.unflatten(1, (-1, size)).transpose(0, 1) @ weight.unflatten(1, (-1, size)).permute(1, 2, 0)
    return pairwise(parts).reshape(*x.shape[:-1], len(weight))


class BlockedLinear(nn.Linear):
    """``nn.Linear`` with its inner products in blocks."""

    block = BLOCK

    def forward(self, x: Tensor) -> Tensor:
        y = blocked_product(x, self.weight, self.block)
        return y if self.bias is None else y + self.bias


class BlockedConv2d(nn.Conv2d):
    """``nn.Conv2d`` without groups, by windows and products in blocks."""

    block = BLOCK

    def forward(self, x: Tensor) -> Tensor:
        zeros, border = self.padding_mode == "zeros", list(self._reversed_padding_repeated_twice)
        if zeros and not isinstance(self.padding, str):  # torch then pads by ``padding``
            border = [n for n in reversed(self.padding) for _ in (0, 1)]
        padded = F.pad(x, border, mode="constant" if zeros else self.padding_mode)
        kernel, dilation, stride = (tuple(v) for v in (self.weight.shape[2:], self.dilation, self.stride))
        sides = [
            (n - d * (k - 1) - 1) // s + 1
            for n, d, k, s in zip(padded.shape[2:], dilation, kernel, stride, strict=True)
        ]
        windows = F.unfold(padded, kernel, dilation=dilation, stride=stride).mT  # (N, places, channels * taps)
        y = blocked_product(windows, self.weight.flatten(1), self.block).mT.unflatten(2, sides)  # as images again
        return y if self.bias is None else y + self.bias[:, None, None]


def blocked(module: nn.Module, block: int = BLOCK) -> nn.Module:
    """A copy in which every ``nn.Linear`` and every ``nn.Conv2d`` without groups sums in blocks.

    Fourier and phase layers stay as they are: their inner products are short.
    """
    twin: Any = copy.deepcopy(module)
    if type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1):
        twin.__class__, twin.block = BlockedLinear if type(module) is nn.Linear else BlockedConv2d, block
        return twin
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else blocked(child, block)
    return twin
