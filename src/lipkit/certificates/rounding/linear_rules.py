r"""Rounding errors of linear layers whose weights are inner products: dense layers, convolutions, scalings, averages.

The machine's :math:`\hat y_i` of :math:`y_i = \sum_j w_{ij} h_j + b_i`, n terms in any order, is within

.. math:: \gamma_d \Big(\sum_j |w_{ij}| |h_j| + |b_i|\Big)
          + \eta \Big(\sum_j |w_{ij}| + \sum_{j: |w_{ij}| < \eta} |h_j| + 2 n + 2\Big), \qquad d = n + 1

of it. The first sum is measured at the sample, :math:`\| |W| |x| \|`, and grows by at most :math:`\| |W| \| s`
around it; :math:`\| |W| \|_2` is bounded by the root of its largest row sum times its largest column sum (Schur).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.certificates.rounding.arithmetic import (
    FLOAT64,
    Arithmetic,
    Line,
    grow,
    grow_number,
    multiply_numbers,
    size,
)
from lipkit.certificates.rounding.registry import Local, Measure, entries, rounding_rule
from lipkit.plain import Affine
from lipkit.protocol.normalization_rules import running_affine
from lipkit.protocol.registry import Shape, lipschitz, output_shape

_PerOutput = Callable[[Tensor], Tensor]
_Conv = nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d | nn.ConvTranspose2d


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
) -> Measure:
    """The bound of the module docstring.

    Args:
        absolute: |x| to ``|W| |x| + |b|``.
        sums: |W| to its largest row sum and its largest column sum.
        weight: the stored numbers of W.
        terms: n, the most terms of one output.
        outputs: how many outputs a sample has.
        copies: the most copies of an input that a padding makes.
        blocked: whether an evaluator that sums in blocks does so here.
    """
    magnitude = weight.detach().abs().double()
    depth = arithmetic.depth(terms) if blocked else terms
    error = arithmetic.gamma(depth + 1 + arithmetic.stored)
    up = 1 + FLOAT64.gamma(weight.numel() + terms + 16)
    row, column = (value * up for value in sums(magnitude))
    norm = grow_number(math.sqrt(row * column * copies))
    lost = 0.0
    if _has_subnormal(magnitude, arithmetic):
        tiny = (magnitude < arithmetic.tiny) & (magnitude > 0)
        row_count, column_count = sums(tiny.double())
        lost = multiply_numbers(grow_number(math.sqrt(row_count * column_count * copies)), arithmetic.tiny)
    floor = multiply_numbers(math.sqrt(outputs) * (row + 2 * terms + 2), arithmetic.tiny)
    biggest = float(magnitude.amax()) if magnitude.numel() else 0.0

    def measure(x: Tensor) -> Local:
        reached = Line(grow(size(absolute(x.abs())) * up), norm)
        found = (
            reached.times(error)
            .plus(Line(size(x), 1.0).times(lost))
            .plus(Line(torch.full_like(reached.at, floor), 0.0))
        )
        peak = reached.times(1 + error if error < math.inf else 1.0)
        return Local(found, Line(peak.at + biggest, peak.slope))

    return measure


@rounding_rule(nn.Linear)
def _linear(module: nn.Linear, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    weight, bias = module.weight.abs(), None if module.bias is None else module.bias.abs()
    return inner_products(
        lambda x: F.linear(x, weight, bias),
        lambda w: (float(w.sum(1).amax()), float(w.sum(0).amax())),
        module.weight,
        module.in_features,
        entries(output_shape(module, input_shape)),
        arithmetic,
    )


def last_layer(
    module: nn.Linear, arithmetic: Arithmetic
) -> tuple[Callable[[Tensor], Tensor], Tensor, Callable[[Tensor], Tensor]]:
    """The rounding error of each output of a dense layer alone.

    Returns:
        ``at``: inputs (N, n) to the error (N, K) there; ``slope`` (K,): what it grows by per distance from them;
        ``peak``: inputs to the size (N, K) of the numbers on the way.
    """
    weight = module.weight.detach().abs()
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach().abs()
    n = module.in_features
    error = arithmetic.gamma(arithmetic.depth(n) + 1 + arithmetic.stored)
    up = 1 + FLOAT64.gamma(n + 16)
    tiny = ((weight < arithmetic.tiny) & (weight > 0)).double()
    norms = size(weight)
    zero = weight.amax(1) == 0
    slope = grow(norms * error + tiny.sum(1).sqrt() * arithmetic.tiny)
    floor = arithmetic.tiny * (weight.sum(1) + 2 * n + 2) * up

    def peak(x: Tensor) -> Tensor:
        return grow(F.linear(x.abs(), weight, bias) * up)

    def at(x: Tensor) -> Tensor:
        return grow(peak(x) * error + F.linear(x.abs(), tiny) * arithmetic.tiny * up + floor)

    return at, torch.where(zero, 0.0, slope), peak


def padded_copies(module: _Conv, input_shape: Shape) -> float:
    """The most copies of one pixel in the padded image."""
    if module.padding_mode == "zeros" or isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d):
        return 1.0
    sizes = input_shape[1:]
    grid = torch.arange(math.prod(sizes), dtype=torch.float64).reshape(1, 1, *sizes)
    mode = module.padding_mode
    padded = F.pad(grid, list(module._reversed_padding_repeated_twice), mode=mode)
    return float(torch.bincount(padded.flatten().long()).amax())


@rounding_rule(nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
def _conv(module: _Conv, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    transposed = isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d)
    groups, taps = module.groups, math.prod(module.weight.shape[2:])
    absolute = copy.deepcopy(module)
    absolute.weight.data = module.weight.detach().abs()
    if module.bias is not None and absolute.bias is not None:
        absolute.bias.data = module.bias.detach().abs()

    def sums(w: Tensor) -> tuple[float, float]:
        # Each channel on one side against the channels of its group on the other, over all taps.
        grouped = w.flatten(2).sum(2).unflatten(0, (groups, -1))
        one, other = float(grouped.sum(2).amax()), float(grouped.sum(1).amax())
        return (other, one) if transposed else (one, other)

    return inner_products(
        absolute,
        sums,
        module.weight,
        module.in_channels // groups * taps,
        entries(output_shape(module, input_shape)),
        arithmetic,
        copies=1.0
        if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d)
        else padded_copies(module, input_shape),
        blocked=type(module) is nn.Conv2d and groups == 1,
    )


def scaling(
    scale: Tensor,
    shift: Tensor,
    operations: int,
    input_shape: Shape,
    arithmetic: Arithmetic,
    stored: float = 0.0,
    lost: float = 0.0,
) -> Measure:
    """Channels (dimension 1) times ``scale`` plus ``shift``, by that many chained operations.

    Args:
        stored: the largest modulus among the numbers that both are made of.
        lost: what the scale may be off by, absolutely, before it is made.
    """
    shape = (-1,) + (1,) * (len(input_shape) - 1)
    scale, shift = scale.detach().double().abs().view(shape), shift.detach().double().abs().view(shape)
    error = arithmetic.gamma(operations + 2 * arithmetic.stored)
    largest = grow_number(float(scale.amax()))
    lost += arithmetic.tiny if _has_subnormal(scale, arithmetic) else 0.0
    floor = math.sqrt(entries(input_shape)) * (arithmetic.tiny * (largest + 4 * operations + stored) + lost * stored)
    biggest = max(largest, stored)

    def measure(x: Tensor) -> Local:
        reached = Line(grow(size(x.abs() * scale + shift)), largest)
        error_line = reached.times(error).plus(Line(size(x), 1.0).times(lost))
        peak = reached.times(2.0)
        return Local(
            error_line.plus(Line(torch.full_like(reached.at, floor), 0.0)), Line(peak.at + biggest, peak.slope)
        )

    return measure


def _has_subnormal(values: Tensor, arithmetic: Arithmetic) -> bool:
    magnitude = values.detach().abs()
    return bool(((magnitude < arithmetic.tiny) & (magnitude > 0)).any())


@rounding_rule(Affine)
def _affine(module: Affine, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return scaling(module.scale, module.shift, 3, input_shape, arithmetic)


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


@rounding_rule(nn.AvgPool2d, nn.AdaptiveAvgPool2d)
def _average(module: nn.AvgPool2d | nn.AdaptiveAvgPool2d, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    outputs = entries(output_shape(module, input_shape))
    if isinstance(module, nn.AdaptiveAvgPool2d):
        terms = math.prod(input_shape[-2:]) // max(1, outputs // math.prod(input_shape[:-2]))
    else:
        kernel = module.kernel_size
        terms = kernel * kernel if isinstance(kernel, int) else math.prod(kernel)
    error = arithmetic.gamma(terms + 3)
    # All weights have one sign: the matrix of their moduli has the same norm.
    norm = grow_number(float(lipschitz(module, input_shape)))
    floor = math.sqrt(outputs) * (terms + 2) * arithmetic.tiny

    def measure(x: Tensor) -> Local:
        reached = Line(grow(size(module(x.abs())) * (1 + FLOAT64.gamma(terms + 8))), norm)
        found = reached.times(error).plus(Line(torch.full_like(reached.at, floor), 0.0))
        # Before the division a window holds the sum of its pixels.
        return Local(found, Line(size(x), 1.0).times(float(terms + 1)))

    return measure
