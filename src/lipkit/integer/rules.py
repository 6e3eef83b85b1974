"""The integer programs of single modules, which `lipkit.integer.quantisation` puts together.

A convolution is a move, which pads and lays windows side by side, then a matrix product. A Fourier layer becomes a
circular convolution with a kernel as large as the image; a Taylor polynomial becomes a matrix. Their weights are
responses to impulses in float64, and the distance of these from the exact responses is part of the error.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds import circular
from lipkit.errors import NoRuleError
from lipkit.integer.program import Fold, Move, Sort
from lipkit.integer.quantisation import Builder, IntValue, integer_rule
from lipkit.modules.activations import GroupSort, MaxMin
from lipkit.modules.dense import Affine, with_numbers
from lipkit.modules.fourier import FourierConv2d, TaylorConv2d
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Join, Maximum, value_forms, value_shapes
from lipkit.modules.isometric import HalfAbs
from lipkit.modules.machine import enlarged, local_error
from lipkit.modules.pooling import Mean, pair
from lipkit.modules.registry import lipschitz, output_shape
from lipkit.modules.sandwich import SandwichBlock, SlopeResidual
from lipkit.modules.spread import SpreadConv2d, check_parts
from lipkit.modules.views import Pad, Permute, Piece, Reshape, Roll, Shift2d, numbered
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import FLOAT64, grow

MAX_PRODUCTS = 1 << 24
"""Most entries of the matrix that a Fourier or Taylor layer is written out as."""


def _refuse(module: nn.Module, expected: str, got: object) -> NoRuleError:
    return NoRuleError(f"evaluator 'integer': {type(module).__name__}: expected {expected}, got {got}")


def _move(moved: Tensor) -> Move:
    return Move(moved.flatten().long() - 1)  # -1: padding


@integer_rule(nn.Flatten, Reshape, Permute, Piece, Roll, Pad, Shift2d)
def _moves(builder: Builder, module: nn.Module, value: IntValue, gain: float) -> IntValue:
    return builder.exact(_move(module(numbered(value.shape))), value, output_shape(module, value.shape))


@integer_rule(MaxMin, GroupSort)
def _sort(builder: Builder, module: MaxMin | GroupSort, value: IntValue, gain: float) -> IntValue:
    length = module.group_size or value.shape[0] if isinstance(module, GroupSort) else 2
    outer = value.shape[0] // length if isinstance(module, GroupSort) else 1  # MaxMin takes channels half of all apart
    return builder.exact(Sort(outer, length, math.prod(value.shape) // (outer * length)), value, value.shape)


@integer_rule(nn.ReLU, HalfAbs)
def _fold(builder: Builder, module: nn.Module, value: IntValue, gain: float) -> IntValue:
    n, half = math.prod(value.shape), value.shape[0] // 2 * math.prod(value.shape[1:])
    fold = Fold("relu", n, n) if type(module) is nn.ReLU else Fold("abs", half, n)
    return builder.exact(fold, value, value.shape)


@integer_rule(nn.LeakyReLU)
def _leaky(builder: Builder, module: nn.LeakyReLU, value: IntValue, gain: float) -> IntValue:
    slope = float(module.negative_slope)
    parts = builder.branch([nn.ReLU()], value), builder.branch([], value)
    return builder.blend(value, gain, parts, (1 - slope, slope))  # (1 - a) relu(x) + a x


@integer_rule(nn.Linear)
def _dense(builder: Builder, module: nn.Linear, value: IntValue, gain: float) -> IntValue:
    if len(value.shape) != 1:
        raise _refuse(module, "inputs of one dimension", value.shape)
    return builder.linear(value, gain, (module.out_features,), module.weight, module.bias, _matrix_norm)


def _matrix_norm(change: Tensor) -> float:
    return float(spectral_norm(change.flatten(1)))


@integer_rule(Affine)
def _scale(builder: Builder, module: Affine, value: IntValue, gain: float) -> IntValue:
    rows = value.shape[: module.scale.ndim]
    n, rest = math.prod(rows), math.prod(value.shape) // math.prod(rows)
    scale, shift = (t.expand(rows).reshape(n) for t in (module.scale, module.shift))
    return builder.linear(value, gain, value.shape, scale[:, None], shift, _largest, (n, 1, rest), groups=n)


def _largest(change: Tensor) -> float:
    return float(change.abs().amax())


@integer_rule(nn.Conv2d)
def _conv(builder: Builder, module: nn.Conv2d, value: IntValue, gain: float) -> IntValue:
    if module.padding_mode not in ("zeros", "circular"):
        raise _refuse(module, "padding_mode 'zeros' or 'circular'", module.padding_mode)
    spans = [d * (k - 1) for d, k in zip(module.dilation, module.weight.shape[2:], strict=True)]
    if module.padding_mode == "circular" and any(s >= n for s, n in zip(spans, value.shape[1:], strict=True)):
        raise _refuse(module, f"windows within the image {value.shape[1:]}", module.kernel_size)

    def norm(change: Tensor) -> float:
        return float(lipschitz(with_numbers(module, change.view_as(module.weight), module.bias), value.shape))

    mode = "constant" if module.padding_mode == "zeros" else "circular"
    padded = F.pad(numbered(value.shape), module._reversed_padding_repeated_twice, mode)
    return _convolve(builder, value, gain, padded, module.weight, module.bias, norm, module)


def _convolve(
    builder: Builder,
    value: IntValue,
    gain: float,
    padded: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Callable[[Tensor], float],
    conv: nn.Conv2d | None = None,
    inexact: float = 0.0,
) -> IntValue:
    """A convolution by ``weight`` with ``conv``'s options; ``padded`` (1, C, h, w) are the padded `numbered`."""
    stride, dilation, groups = ((1, 1), (1, 1), 1) if conv is None else (conv.stride, conv.dilation, conv.groups)
    kernel = weight.shape[2:]
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    h, w = ((n - span) // s + 1 for n, span, s in zip(padded.shape[2:], spans, stride, strict=True))
    image, shape = (padded.shape[1], padded.shape[2], padded.shape[3]), (len(weight), h, w)
    if groups == 1 and all(s >= span for s, span in zip(stride, spans, strict=True)):
        # Windows have nothing in common: their entries become channels, and the rest is a product of matrices.
        padded = F.unfold(padded, kernel, dilation, 0, stride)
        image, weight, stride, dilation = (padded.shape[1], 1, h * w), weight.flatten(1), (1, 1), (1, 1)
    moved = builder.exact(_move(padded), value, image)
    return builder.linear(
        moved, gain, shape, weight, bias, norm, image, groups=groups, stride=stride, dilation=dilation, inexact=inexact
    )


@integer_rule(FourierConv2d, SpreadConv2d)
def _symbol(builder: Builder, module: FourierConv2d | SpreadConv2d, value: IntValue, gain: float) -> IntValue:
    if isinstance(module, SpreadConv2d):
        check_parts(module)
    channels, h, w = value.shape
    products = channels * module.out_channels * (h * w) ** 2
    if products > MAX_PRODUCTS:
        raise _refuse(module, f"at most {MAX_PRODUCTS} products of pixels and taps", f"{products} on {h} x {w} pixels")
    impulses = torch.zeros(channels, channels, h, w).double()
    impulses[range(channels), range(channels), 0, 0] = 1
    response, off = _responses(module, impulses)
    padded = F.pad(numbered(value.shape), (w - 1, 0, h - 1, 0), "circular")  # the response reaches one image back
    kernel = response.transpose(0, 1).flip(2, 3)  # a convolution of torch is a correlation
    # At each frequency, an error of the kernel counts by at most the sum of its moduli, for each pair of channels.
    inexact = grow(float(off.square().sum().sqrt()) * math.sqrt(h * w))
    return _convolve(
        builder, value, gain, padded, kernel, module.bias, lambda change: float(circular(change, h, w)), inexact=inexact
    )


@integer_rule(TaylorConv2d)
def _taylor(builder: Builder, module: TaylorConv2d, value: IntValue, gain: float) -> IntValue:
    shape, n = output_shape(module, value.shape), math.prod(value.shape)
    if n * math.prod(shape) > MAX_PRODUCTS:
        raise _refuse(module, f"at most {MAX_PRODUCTS} products as a matrix", n * math.prod(shape))
    response, off = _responses(module, torch.eye(n).double().view(n, *value.shape))
    bias = None if module.bias is None else module.bias.repeat_interleave(math.prod(shape[1:]))  # one for each pixel
    inexact = grow(float(off.square().sum().sqrt()))  # the Frobenius norm of the matrix of errors
    return builder.linear(value, gain, shape, response.flatten(1).T, bias, _matrix_norm, inexact=inexact)


def _responses(module: Any, impulses: Tensor) -> tuple[Tensor, Tensor]:
    """The linear part's response to each impulse in float64, and a bound of its distance from the exact one."""
    twin = copy.deepcopy(module)
    twin.bias = None
    return twin(impulses), local_error(twin, tuple(impulses.shape[1:]), FLOAT64)(impulses).error.at


@integer_rule(nn.AvgPool2d, nn.AdaptiveAvgPool2d, Mean)
def _average(builder: Builder, module: Any, value: IntValue, gain: float) -> IntValue:
    shape = output_shape(module, value.shape)
    if len(value.shape) != 3:
        raise _refuse(module, "images with channels", f"inputs of shape {value.shape}")
    if type(module) is nn.AvgPool2d:
        if module.ceil_mode or pair(module.padding) != [0, 0]:
            raise _refuse(module, "no padding and no ceil_mode", module)
        kernel, stride = pair(module.kernel_size), pair(module.stride)
        divisor = module.divisor_override or math.prod(kernel)
    else:
        if isinstance(module, Mean) and sorted(module.dims) != [2, 3]:
            raise _refuse(module, "the mean over rows and columns of images", module)
        sides = [*zip(value.shape[1:], [*shape[1:], 1, 1][:2], strict=True)]  # 1, 1: a mean drops both
        if any(n % m for n, m in sides):
            raise _refuse(module, "windows that do not overlap", module)
        kernel = stride = [n // m for n, m in sides]
        divisor = math.prod(kernel)
    channels = value.shape[0]
    weight = torch.full((channels, 1, *kernel), 1 / divisor, dtype=torch.float64)

    def norm(change: Tensor) -> float:
        return _largest(change) * abs(divisor) * gain

    image, off = (channels, value.shape[1], value.shape[2]), 2.0**-52 * gain  # 1 / divisor is rounded
    return builder.linear(
        value, gain, shape, weight, None, norm, image, groups=channels, stride=tuple(stride), inexact=off
    )


@integer_rule(SandwichBlock)
def _sandwich(builder: Builder, module: SandwichBlock, value: IntValue, gain: float) -> IntValue:
    inner = builder.branch(module.parts(), value)
    error = grow(gain * value.error + inner.error)
    return replace(inner, error=error, reach=grow(gain * value.reach))


@integer_rule(SlopeResidual)
def _slope_residual(builder: Builder, module: SlopeResidual, value: IntValue, gain: float) -> IntValue:
    parts = builder.branch(module.parts(), value), builder.branch([], value)
    return builder.blend(value, gain, parts, (1.0, 1.0))


@integer_rule(Graph)
def _graph(builder: Builder, module: Graph, value: IntValue, gain: float) -> IntValue:
    """The value after a `Graph`. Its errors are bounded as if its input were exact; the input's error is added last."""
    shapes = value_shapes(module, value.shape)
    wired = list(zip(module.nodes, module.sources, strict=True))
    constants = [None if isinstance(n, Join) else enlarged(lipschitz(n, shapes[read[0]])) for n, read in wired]
    moving = value_forms(module, [None if c is None else torch.tensor(c, dtype=torch.float64) for c in constants])
    start = builder.branch([], value)
    values = [start]
    for (node, read), constant, form in zip(wired, constants, moving[1:], strict=True):
        given = [values[i] for i in read]
        if constant is None:
            values.append(_joined(builder, node, start, grow(float(form.total())), given))
        else:
            values.append(builder.chain([node], given[0], [constant]))
    error, reach = grow(gain * value.error + values[-1].error), grow(gain * value.reach)
    return replace(values[-1], error=error, reach=reach)


def _joined(builder: Builder, join: Any, start: IntValue, gain: float, parts: list[IntValue]) -> IntValue:
    """The value of a join of ``parts``, branches from ``start``; ``gain`` is the constant of the result."""
    kind = type(join)
    if kind is Add:
        return builder.blend(start, gain, parts, join.signs)
    if kind is Blend:
        share = float(join.share)
        return builder.blend(start, gain, parts, (share, 1 - share))
    if kind not in (Concatenate, Maximum):
        raise _refuse(join, "joins Add, Blend, Concatenate or Maximum", kind.__qualname__)
    # Pad each part with zeros in the places of the others, so that one sum gives all of them the same fraction.
    beside = join if kind is Concatenate else Concatenate(1)
    places = [numbered(part.shape) for part in parts]
    placed = [beside(*(n if i == k else 0 * n for k, n in enumerate(places))) for i in range(len(parts))]
    shape = tuple(placed[0].shape[1:])
    moved = [builder.exact(_move(p), part, shape) for p, part in zip(placed, parts, strict=True)]
    found = builder.blend(start, gain, moved, [1.0] * len(parts), apart=True)
    if kind is Concatenate:
        return found
    n = math.prod(parts[0].shape)
    largest = builder.exact(Sort(1, len(parts), n), found, shape)  # the largest of each entry comes first
    return builder.exact(Move(torch.arange(n)), largest, parts[0].shape)
