"""Functions that move, join, scale or add numbers, as modules; and those with a constant but no plain form."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.linalg.matrices import all_finite
from lipkit.lowering.axes import along, behind, contracted, indexed, joined, multiplied, ordered, stacked, viewed
from lipkit.lowering.build import FINITE, FUNCTIONS, Bounded, Build, Function, Rule, Value, function_rule
from lipkit.lowering.functional import with_tensors
from lipkit.lowering.observe import Operand, Varies
from lipkit.lowering.tracing import flat
from lipkit.modules.activations import GroupSort, MaxMin
from lipkit.modules.dense import Affine, linear
from lipkit.modules.graph import Add, Blend, Concatenate, Maximum
from lipkit.modules.limits import Elementary, MatrixProduct, Product
from lipkit.modules.normalization import LayerCenter, UnitNorm
from lipkit.modules.pooling import L2NormPool2d, Mean
from lipkit.modules.views import Enlarge, EnlargeBilinear, Expand, Pad, Permute, Piece, Roll
from lipkit.proof.roundoff import reciprocal_up, root


def plain(*targets: Callable[..., Any] | str, place: Callable[[Build], Build] | None = None) -> Callable[[Rule], Rule]:
    """Register a rule that makes modules for these functions; ``place`` as in `Function`."""

    def put(rule: Rule) -> Rule:
        FUNCTIONS.update(dict.fromkeys(targets, Function(rule, place)))
        return rule

    return put


# Reading the same entries under another shape or in another order.


@plain(
    *(torch.flatten, torch.reshape, torch.clone, torch.unsqueeze, torch.detach, operator.pos, torch.positive),
    *("flatten", "unflatten", "view", "reshape", "clone", "contiguous", "unsqueeze", "detach"),
    *("view_as", "reshape_as", "positive"),
    place=viewed,
)
def _moved(call: Build, x: Operand, *shape: Any, **options: Any) -> int:
    before = call.same_format(x).shape
    call.require(
        math.prod(before) == math.prod(call.shape),
        f"expected as many entries as before, got {call.shape} from {before}",
    )
    return call.reshaped(x.number, before, call.shape)


@plain(torch.squeeze, "squeeze", place=viewed)
def _squeeze(call: Build, x: Operand, *dims: Any, **options: Any) -> Value:
    for dim in flat((dims, options)):
        expected = f"expected dimensions other than the batch, got {dim}: a batch of one would lose it"
        call.require(dim % call.operand(x).rank != x.axis, expected)
    return _moved(call, x)


plain("expand", "expand_as", torch.broadcast_to, place=joined)(
    lambda call, x, *sizes: call.broadcast(call.same_format(x)).number
)


@plain("repeat", "tile", torch.tile)
def _repeat(call: Build, x: Operand, *sizes: Any) -> int:
    times = [1] * (call.same_format(x).ndim - len(flat(sizes))) + flat(sizes)
    call.require(len(times) == x.ndim and times[0] == 1)
    apart, copies = [1] * (2 * x.ndim - 2), [n for pair in zip(times[1:], x.shape, strict=True) for n in pair]
    apart[1::2] = x.shape
    value = call.add(Expand(*copies), call.reshaped(x.number, x.shape, tuple(apart)))
    return call.reshaped(value, tuple(copies), call.shape)


plain("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", place=viewed)(
    lambda call, x, *format, **options: call.operand(x).number
)
plain("permute", place=ordered)(lambda call, x, *dims: call.add(Permute(*dims[1:]), call.same_format(x)))
# `ordered` turns each of these into ``contiguous`` or ``permute``.
_moves: Any = ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t")
_moves = (*_moves, *(getattr(torch, name) for name in _moves), torch.permute, getattr)
FUNCTIONS.update(dict.fromkeys(_moves, Function(place=ordered)))


@plain(torch.roll, "roll", place=along(2, "dims"))
def _roll(call: Build, x: Operand, shifts: Any, dims: Any = None) -> int:
    value = call.same_format(x).number
    shifts = [shifts] if isinstance(shifts, int) else list(call.constant(shifts, "shift"))
    for dim, shift in zip(call.dims(x, dims), shifts, strict=True):
        value = call.add(Roll(dim, shift), value)
    return value


@plain(operator.getitem, torch.select, "select", place=indexed)
def _getitem(call: Build, x: Any, index: Any) -> Value:
    if isinstance(x, (tuple, list)):
        picked = x[call.constant(index, "index")]
        if isinstance(picked, (tuple, list)):
            return tuple(call.operand(t).number for t in picked)
        return call.operand(picked).number
    operand, shape = call.same_format(x), list(x.shape)
    for dim, item in enumerate((i for i in index[1:] if i is not None), 1):
        every = range(shape[dim - 1])
        taken = every[item] if isinstance(item, slice) else every[every[item] :][:1]  # every[-1] is the last entry
        shape[dim - 1] = len(taken)
        operand = replace(operand, shape=tuple(shape), number=call.piece(operand, dim, taken))
    return call.reshaped(operand.number, operand.shape, call.shape)


@plain(torch.flip, "flip")
def _flip(call: Build, x: Operand, *axes: Any, dims: Any = ()) -> int:
    value = call.same_format(x).number
    for at in call.dims(x, flat((axes, dims))):
        value = _mapped(call, x, value, at, lambda units: units.flip(1))
    return value


@plain(torch.index_select, "index_select", place=along(1))
def _index_select(call: Build, x: Operand, dim: int, index: Any) -> int:
    (at,) = call.dims(call.same_format(x), dim)
    taken = torch.arange(x.shape[at - 1])[call.constant(index, "index")]
    call.require(taken.ndim == 1, f"expected a list of entries, got an index of shape {tuple(taken.shape)}")
    call.require(call.shape[at - 1] > 0, f"expected entries of dimension {dim}, got none")
    return _mapped(call, x, x.number, at, lambda units: units[:, taken])


@plain(torch.narrow, "narrow", place=along(1))
def _narrow(call: Build, x: Operand, dim: int, start: int, length: int) -> int:
    (at,) = call.dims(call.same_format(x), dim)
    first = range(x.shape[at - 1])[start]  # -1 is the last
    return call.piece(x, at, range(first, first + length))


def _split(call: Build, x: Operand, *parts: Any, dim: int | None = None, **named: Any) -> Value:
    # The dimension is the last argument, if it is given. The sizes of the results tell where to cut.
    single = "unbind" in call.name
    at = dim if dim is not None else parts[-1] if len(parts) > (0 if single else 1) else 0
    (cut_at,) = call.dims(call.same_format(x), at)
    after = [result.shape for result in call.results]
    sizes = [1 if single else shape[cut_at - 1] for shape in after]
    got = f"got sizes {sizes} of {x.shape[cut_at - 1]} entries"
    call.require(sum(sizes) == x.shape[cut_at - 1], f"expected pieces that do not overlap, {got}")
    ranges = [range(*ends) for ends in itertools.pairwise([0, *itertools.accumulate(sizes)])]
    before = [(*x.shape[: cut_at - 1], size, *x.shape[cut_at:]) for size in sizes]
    return tuple(map(lambda *one: call.reshaped(call.piece(x, cut_at, one[0]), *one[1:]), ranges, before, after))


plain(torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split", place=along(2, default=0))(_split)
plain(torch.unbind, "unbind", place=along(1, default=0))(_split)


@plain(F.pad, place=behind(lambda x, pad, *rest: len(pad) // 2))
def _pad(call: Build, x: Operand, pad: Any, mode: str = "constant", value: Any = None) -> int:
    sizes, value = call.constant(pad, "padding"), call.constant(value, "value")
    expected = f"expected numbers around dimensions other than the batch, got {mode!r} {value} by {pad!r}"
    call.require(len(sizes) // 2 < call.operand(x).ndim, expected)
    if mode == "constant":
        padded = call.result(call.add(Pad(*sizes), x))
        if not value:
            return padded.number
        call.require(math.isfinite(value), f"expected a finite number around the input, got {value}")
        if call.bounding:
            return padded.number
        return call.elementwise(padded, shift=F.pad(call.like.expand(x.shape), sizes, value=value))
    made = x.number
    for at, *pair in zip(range(x.ndim - 1, 0, -1), sizes[::2], sizes[1::2], strict=False):  # the last dimension first
        kept = x.shape[at - 1] + min(pair)
        defined = mode != "circular" or min(pair) >= 0 or max(pair) <= kept
        call.require(defined, f"expected circular padding by the {kept} entries that are kept, got {pad!r}")
        made = _mapped(call, x, made, at, partial(lambda pair, units: F.pad(units[None], pair, mode)[0], pair))
    return made


def _mapped(call: Build, x: Operand, value: int, at: int, function: Callable[[Tensor], Tensor]) -> int:
    """Apply a linear function along dimension ``at`` of ``value``, as a matrix: its response to unit vectors.

    ``value`` has as many dimensions as ``x``, and its size along ``at``.
    """
    call.require((n := x.shape[at - 1]) <= 4096, f"expected at most 4096 entries in dimension {at}, got {n}")
    units = torch.eye(n, dtype=x.dtype)
    own, wide = function(units), function(units.to(call.like))
    # A bound needs the exact weights of a resizing; but which of two pixels is nearer, the network's format decides.
    chosen = wide if torch.allclose(own.to(wide), wide, rtol=0.0, atol=1e-3) else own
    matrix = call.number(chosen.T, "matrix", axes=2)
    same = matrix.shape == units.shape and bool((matrix == units).all())
    return value if same else _along(call, linear(matrix), value, at, x.ndim, x.ndim - 1)


@plain(torch.cumsum, "cumsum", place=along(1))
def _running_sum(call: Build, x: Operand, dim: int) -> int:
    (at,) = call.dims(call.same_format(x), dim)
    return _mapped(call, x, x.number, at, lambda units: units.cumsum(1))


@plain(torch.repeat_interleave, "repeat_interleave", place=along(2))
def _interleaved(call: Build, x: Operand, repeats: Any, dim: int) -> int:
    (at,), times = call.dims(call.same_format(x), dim), call.constant(repeats, "number of copies")
    return _mapped(call, x, x.number, at, lambda units: units.repeat_interleave(times, 1))


def _windows(call: Build, x: Operand, value: int, at: int, count: int, size: int, by: int, d: int, p: int) -> int:
    """``count`` windows of ``size`` along dimension ``at``: the first entry of each, then the second of each, ..."""
    taken = (d * torch.arange(size)[:, None] + by * torch.arange(count)).flatten()
    return _mapped(call, x, value, at, lambda units: F.pad(units, (p, p))[:, taken])


@plain("unfold", place=along(1, "dimension"))
def _unfold(call: Build, x: Operand, dimension: int, size: int, step: int) -> int:
    (at,) = call.dims(call.same_format(x), dimension)
    before, count, after = x.shape[: at - 1], call.shape[at - 1], x.shape[at:]
    value = _windows(call, x, x.number, at, count, size, step, 1, 0)
    value = call.reshaped(value, (*before, size * count, *after), (*before, size, count, *after))
    return call.add(Permute(*(d for d in range(1, x.ndim + 1) if d != at), at), value)


@plain(F.unfold)
def _columns(call: Build, x: Operand, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> int:
    call.require(x.ndim == 4, "expected images (N, C, H, W)")
    value, channels, sizes = call.same_format(x).number, x.shape[0], list[int]()
    for at in (2, 3):
        given = kernel_size, dilation, padding, stride
        size, d, p, by = ((*flat(one), *flat(one))[at - 2] for one in given)  # one number holds for both axes
        sizes += [size, (x.shape[at - 1] + 2 * p - d * (size - 1) - 1) // by + 1]
        value = _windows(call, x, value, at, sizes[-1], size, by, d, p)
    value = call.reshaped(value, (channels, sizes[0] * sizes[1], sizes[2] * sizes[3]), (channels, *sizes))
    return call.reshaped(call.add(Permute(1, 2, 4, 3, 5), value), (channels, *sizes), call.shape)


@plain(F.interpolate)
def _interpolate(
    call: Build, input: Operand, size: Any = None, scale_factor: Any = None, mode: str = "nearest", **options: Any
) -> int:
    """A linear map along each axis; upsampling by powers of two as `Enlarge` or `EnlargeBilinear`."""
    x = call.same_format(input)
    before, after = x.shape[1:], call.shape[1:]
    scales = None if scale_factor is None else [*flat(scale_factor)] * (1 if flat([scale_factor])[1:] else len(before))
    factors = [n // m if n % m == 0 else 0 for n, m in zip(after, before, strict=True)]
    powers = len(factors) == 2 and all(n and n & (n - 1) == 0 for n in factors) and scales in (None, factors)
    if powers and (mode == "nearest" or (mode == "bilinear" and not any(options.values()))):
        return call.add((Enlarge if mode == "nearest" else EnlargeBilinear)(*factors), x)
    mode, value = "bilinear" if mode in ("linear", "trilinear") else mode, x.number
    for i, m in enumerate(after):
        to: Any = {"size": (m, 2)} if scales is None else {"scale_factor": (float(scales[i]), 1.0)}
        one = partial(F.interpolate, mode=mode, **to, **options)
        # Images two equal pixels wide: with one, torch 2.13 mistakes their memory format where it antialiases.
        row = partial(lambda one, units: one(units[:, None, :, None].repeat(1, 1, 1, 2))[:, 0, :, 0], one)
        value = _mapped(call, x, value, i + 2, row)
    return value


# Sums, and products with constants.


@plain(
    *(operator.add, operator.sub, operator.iadd, operator.isub),
    *(torch.add, torch.sub, torch.subtract, "add", "add_", "sub", "sub_"),
    place=joined,
)
def _add(call: Build, x: Any, y: Any, *, alpha: Any = 1) -> int:
    sign, hidden = -1 if "sub" in call.name else 1, torch.tensor(False)
    weight = call.number(alpha, "alpha")
    if sign * float(weight) == 1:
        (x, first), (y, second) = call.unmasked(x), call.unmasked(y)
        hidden = first | second
    if isinstance(x, Operand) and isinstance(y, Operand):
        other = call.broadcast(y) if float(weight) == 1 else call.elementwise(y, scale=weight)
        value = call.add(Add(1, sign), call.broadcast(x), other)
    elif isinstance(x, Operand):
        value = call.elementwise(x, shift=sign * weight * call.shift(y))
    else:
        value = call.elementwise(y, scale=sign * weight, shift=call.shift(x))
    return call.masked(value, hidden)


plain(torch.rsub, place=joined)(lambda call, x, y, *, alpha=1: _add(call, y, x, alpha=alpha))


@plain(torch.lerp, "lerp", "lerp_", place=joined)
def _lerp(call: Build, input: Any, end: Any, weight: Any) -> Value:
    w = call.number(weight, "weight")
    stored = [w, *(call.number(t, "value") for t in (input, end) if not isinstance(t, Operand))]
    call.require(all(map(all_finite, stored)), FINITE)
    if isinstance(input, Operand) and isinstance(end, Operand):
        if not w.ndim:
            return call.add(Blend(w), call.broadcast(end), call.broadcast(input))
        return call.add(Add(1, 1), *(call.elementwise(t, scale=s) for t, s in ((input, 1 - w), (end, w))))
    if isinstance(input, Operand):
        return call.elementwise(input, scale=1 - w, shift=w * call.shift(end))
    return call.elementwise(end, scale=w, shift=(1 - w) * call.shift(input))


@plain(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", place=joined)
def _mul(call: Build, x: Any, y: Any) -> int:
    if isinstance(x, Operand) and isinstance(y, Operand):
        return call.add(call.named(Product()), call.broadcast(x), call.broadcast(y))
    moving, constant = (x, y) if isinstance(x, Operand) else (y, x)
    return call.elementwise(moving, scale=call.number(constant, "factor"))


def _chosen(call: Build, otherwise: Any, x: Any, condition: Any) -> int:
    """``x`` where the condition holds, each of the two also with a mask of -inf."""
    (x, first), (otherwise, second) = call.unmasked(x), call.unmasked(otherwise)
    value, here = _lerp(call, otherwise, x, condition), call.number(condition, "condition").bool()
    return call.masked(value, (first & here) | (second & ~here))


plain(torch.where, place=joined)(lambda call, condition, x, y: _chosen(call, y, x, condition))
plain("where", place=joined)(lambda call, x, condition, y: _chosen(call, y, x, condition))
_fill = (torch.masked_fill, "masked_fill", "masked_fill_")
plain(*_fill, place=joined)(lambda call, x, mask, value: _chosen(call, x, value, mask))


@plain(operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_", place=joined)
def _div(call: Build, x: Any, y: Any) -> Value:
    if isinstance(y, Operand):
        return _mul(call, x, call.result(_steep(call, call.broadcast(y).number, ["reciprocal"])))
    if call.bounding:
        smallest = call.number(y, "divisor").abs().nan_to_num(nan=0.0).amin()  # 0 gives no bound, and so does NaN
        return call.scale(call.broadcast(x), reciprocal_up(float(smallest)))
    scale = call.number(y, "divisor", torch.reciprocal)
    call.require(all_finite(scale), "expected a divisor whose reciprocal is a number of the network's format")
    return call.elementwise(x, scale=scale)


plain(operator.neg, torch.neg, torch.negative, "neg", "neg_", "negative", place=viewed)(
    lambda call, x, *, out=None: call.elementwise(x, scale=-1 - call.like)
)
plain(operator.abs, torch.abs, torch.absolute, "abs", "abs_", place=viewed)(
    lambda call, x: call.add(nn.LeakyReLU(-1.0), call.operand(x))
)


@plain(torch.einsum, place=contracted)
def _einsum(call: Build, parts: list[str], sizes: dict[str, int], *values: Any) -> int:
    """Contract a value that depends on the input with the others, one after the other."""
    *given, out = parts
    rest = [*zip(given, values, strict=True)]
    part, value = rest.pop(next(k for k, one in enumerate(values) if isinstance(one, Operand)))
    while {*part} != {*out} or rest:
        alone = "".join(c for c in part if c not in "".join((*(one for one, _ in rest), out)))
        # What no other part has is summed: a product with ones. Then constants that share a letter come first.
        after = [({*part}.isdisjoint(other), isinstance(one, Operand)) for other, one in rest]
        other, factor = (alone, torch.ones([sizes[c] for c in alone])) if alone else rest.pop(after.index(min(after)))
        later = "".join((*(one for one, _ in rest), out))
        kept = "".join(c for c in sizes if (c in part) != (c in other) or (c in part and c in later))
        kept = out if {*kept} == {*out} and not rest else kept
        value = call.result(_contraction(call, (part, other, kept), sizes, value, factor))
        part = kept
    return call.permuted(value, [part.index(c) + 1 for c in out])


_products: Any = (operator.matmul, torch.matmul, torch.linalg.matmul, "matmul", torch.mm, "mm", torch.bmm, "bmm")
FUNCTIONS.update(dict.fromkeys(_products, Function(place=multiplied)))


def _contraction(call: Build, parts: Sequence[str], sizes: dict[str, int], *values: Any) -> int:
    """Contract two values; each letter stands in at least two of the three parts."""

    def shape(groups: Sequence[str]) -> Any:
        return tuple(math.prod(sizes[letter] for letter in group) for group in groups)

    def regrouped(value: int, before: Sequence[str], after: Sequence[str]) -> int:  # one dimension for each group
        old, new = "".join(before), "".join(after)
        value = call.reshaped(value, shape(before), shape(old))
        value = call.permuted(value, [old.index(letter) + 1 for letter in new])
        return call.reshaped(value, shape(new), shape(after))

    (x, y), (first, last, out) = values, parts
    if isinstance(x, Tensor):
        x, y, first, last = y, x, last, first
    shared, summed, left, right = (
        "".join(letter for letter in sizes if (letter in first, letter in last, letter in out) == where)
        for where in ((True, True, True), (True, True, False), (True, False, True), (False, True, True))
    )
    if isinstance(y, Operand):
        product = call.named(MatrixProduct(*shape((left, summed, right))))
        a, b = regrouped(x.number, first, (*shared, left, summed)), regrouped(y.number, last, (*shared, summed, right))
        return regrouped(call.add(product, a, b), (*shared, left, right), out)
    weight = call.number(y, "weight", axes=len(last)).permute([*map(last.index, shared + right + summed)])
    heads, rows, columns = shape((shared, right, summed))
    if not shared:
        matrix = linear(weight.reshape(rows, columns))
        return regrouped(call.add(matrix, regrouped(x.number, first, (*left, summed))), (*left, right), out)
    # A matrix for each shared index: a convolution in groups, by kernels of size 1.
    made = nn.Conv1d(heads * columns, heads * rows, 1, groups=heads, device="meta")
    conv = with_tensors(call, made, weight=weight.reshape(-1, columns, 1), bias=None)
    return regrouped(call.add(conv, regrouped(x.number, first, (shared + summed, left))), (shared + right, left), out)


@plain(operator.pow, torch.pow, torch.square, "pow", "square", place=viewed)
def _power(call: Build, x: Operand, exponent: Any = 2) -> int:
    value, n = call.same_format(x).number, call.constant(exponent, "exponent")
    n = float(n) if isinstance(n, int | float) or (isinstance(n, Tensor) and not n.ndim) else n
    known = isinstance(n, float) and n in (-2, -1, -0.5, 0.5, 2, 3, 4)
    call.require(known, f"expected -2, -1, -0.5, 0.5, 2, 3 or 4 as exponent, got {n}")
    names = ["sqrt"] * (n in (-0.5, 0.5)) + ["reciprocal"] * (n < 0)
    value = _steep(call, value, names)
    base = value
    for _ in range(int(abs(n)) - 1):
        value = call.add(call.named(Product()), value, base)
    return value


def _steep(call: Build, value: int, names: Sequence[str]) -> int:
    """Apply the `Elementary` functions of these names, one after the other."""
    for name in names:
        value = call.add(call.named(Elementary(name)), value)
    return value


def _elementary(names: Sequence[str], call: Build, x: Operand) -> int:
    return _steep(call, call.same_format(x).number, names)


for _one in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal):
    _name = _one.__name__
    _names = ["sqrt", "reciprocal"] if _name == "rsqrt" else [_name]
    plain(_one, _name, f"{_name}_", place=viewed)(partial(_elementary, _names))


def swish(x: Tensor, slope: float) -> Tensor:
    """``x * sigmoid(slope * x)``, which is ``silu(slope * x) / slope``."""
    return x * torch.sigmoid(slope * x)


@plain(swish, place=viewed)
def _swish(call: Build, x: Operand, slope: float) -> Value:
    # ``silu(slope * x)`` is NaN where the product overflows, and loses digits where it is subnormal.
    call.require(0.01 <= abs(slope) <= 100, f"expected a slope of modulus 0.01 to 100, got {slope}")
    return _div(call, call.result(call.add(nn.SiLU(), call.elementwise(x, scale=call.like + slope))), slope)


def root_mean_square(x: Tensor, dims: Any, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)``, the mean over these dimensions."""
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()


@plain(root_mean_square, place=along(1))
def _root_mean_square(call: Build, x: Operand, dims: Any, eps: float) -> int:
    r"""The first n of the n + 1 numbers :math:`\sqrt n\, (x, c) / \|(x, c)\|` with :math:`c = \sqrt{n \epsilon}`.

    Its constant is :math:`1 / \sqrt\epsilon`, attained at 0: :math:`\|(x, c)\|^2 = n (\mathrm{mean}(x^2) + \epsilon)`
    is at least :math:`c^2`, so `UnitNorm` with eps c divides by this norm, and has the constant 1 / c.
    """
    call.require(0 < eps < math.inf, f"expected eps a positive finite number, got {eps}: near 0 nothing bounds it")
    value, order, sizes, groups = _gathered(call, x, x.number, call.dims(x, dims))
    n = groups[1]
    last = torch.arange(n + 1).expand(1, -1) == n
    c = math.sqrt(n * eps)
    value = call.add(Pad(0, 1), call.reshaped(value, sizes, groups))
    value = call.add(Affine(call.like[None, None] + 1, (call.like + c) * last), value)
    value = call.add(Piece(2, 0, n), call.add(UnitNorm(2, eps=float(call.like + c)), value))
    value = call.times(value, math.sqrt(n))
    value = call.reshaped(value, groups, sizes)
    return call.permuted(value, [order.index(d) + 1 for d in range(1, x.ndim)])


def _gathered(
    call: Build, x: Operand, value: int, dims: Sequence[int]
) -> tuple[int, list[int], tuple[int, ...], tuple[int, int]]:
    """The value with ``dims`` moved to the end; the new order and shape; how many groups these make, and their size."""
    order = [*(d for d in range(1, x.ndim) if d not in dims), *sorted({*dims})]
    sizes, kept = tuple(x.shape[d - 1] for d in order), x.ndim - 1 - len({*dims})
    return call.permuted(value, order), order, sizes, (math.prod(sizes[:kept]), math.prod(sizes[kept:]))


def centred(x: Tensor, dims: Any) -> Tensor:
    """``x`` less its mean over these dimensions."""
    return x - x.mean(dims, keepdim=True)


@plain(centred, place=along(1))
def _centred(call: Build, x: Operand, dims: Any) -> int:
    return call.add(LayerCenter(*sorted({*call.dims(call.same_format(x), dims)})), x)


def standardised(x: Tensor, dims: Any, eps: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps)`` over these dimensions: layer normalisation."""
    return root_mean_square(centred(x, dims), dims, eps)


@plain(standardised, place=along(1))
def _standardised(call: Build, x: Operand, dims: Any, eps: float) -> Value:
    return _root_mean_square(call, call.result(_centred(call, x, dims)), dims, eps)


@plain(F.rms_norm, place=behind(lambda x, shape, *rest: len(shape)))
def _rms_norm(call: Build, input: Operand, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Value:
    if eps is None:
        own = torch.finfo(call.operand(input).dtype).eps
        raise call.refuse(f"expected eps, got None, for which torch takes one of each format: set eps={own}")
    value = _root_mean_square(call, input, [*range(input.ndim - len(normalized_shape), input.ndim)], eps)
    return value if weight is None else _mul(call, call.result(value), weight)


@plain(F.softmax, torch.softmax, "softmax", place=along(1))
def _softmax(call: Build, input: Operand, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> int:
    """A softmax; behind a mask one for each run of equal rows, of what is not -inf there, with zeros elsewhere."""
    (x, hidden), (at,) = call.unmasked(call.operand(input)), call.dims(input, dim)
    if not bool(hidden.any()):
        return call.add(nn.Softmax(dim), x)
    n, varying = x.shape[at - 1], [d for d in range(1, x.ndim) if bool((hidden != hidden.narrow(d - 1, 0, 1)).any())]
    row = next((d for d in varying if d != at), at)
    call.require({*varying} <= {row, at}, f"expected a mask that varies along {dim} and one other, got {varying}")
    seen = ~hidden.movedim(at - 1, -1)
    rows = seen[None] if row == at else seen.movedim(row - 1 - (row > at), 0)
    kinds, counts = rows.reshape(len(rows), -1, n)[:, 0].unique_consecutive(dim=0, return_counts=True)
    ends, parts = [0, *counts.cumsum(0).tolist()], list[int]()
    for kind, *these in zip(kinds, ends[:-1], ends[1:], strict=True):
        here = kind.nonzero().flatten().tolist()
        call.require(bool(here), "expected a number in each row of a mask, got a row of -inf alone, which is NaN")
        part = x if row == at else replace(x, number=call.piece(x, row, range(*these)))
        parts.append(_shown(call, part, at, here, dim))
    return call.add(Concatenate(row), *parts) if len(parts) > 1 else parts[0]


def _shown(call: Build, x: Operand, at: int, here: list[int], dim: Any) -> int:
    """The softmax of the entries ``here`` along dimension ``at``, and zeros elsewhere."""
    n, stretch = x.shape[at - 1], range(here[0], here[-1] + 1)
    if len(stretch) == len(here):
        weights = call.add(nn.Softmax(dim), call.piece(x, at, stretch))
        around = (*(0, 0) * (x.ndim - 1 - at), here[0], n - 1 - here[-1])
        return call.add(Pad(*around), weights) if any(around) else weights
    weights = call.add(nn.Softmax(dim), _mapped(call, x, x.number, at, lambda units: units[:, here]))
    few = replace(x, shape=(*x.shape[: at - 1], len(here), *x.shape[at:]))
    return _mapped(call, few, weights, at, lambda units: units @ torch.eye(n).to(units)[here])


# Concatenations of values, and reductions.


def _compared(call: Build, value: int) -> tuple[type, int, int] | None:
    """(Maximum, a, b) if the value is max(a, b); (Affine, a, b) for a min(a, b) that `_larger` built; else None."""

    def negated(value: int) -> int:
        """a, if the value is -a; else -1."""
        module = call.wiring.modules[value - 1] if value > 0 else None
        minus = type(module) is Affine and bool((module.scale == -1).all() and (module.shift == 0).all())
        return call.wiring.sources[value - 1][0] if minus else -1

    turned = negated(value)
    outer = max(turned, value if turned < 0 else 0)
    if not outer or type(call.wiring.modules[outer - 1]) is not Maximum:
        return None
    a, b = call.wiring.sources[outer - 1]
    if turned >= 0:
        a, b = negated(a), negated(b)
    return (Maximum if turned < 0 else Affine, a, b) if min(a, b) >= 0 else None


def _beside(call: Build, at: int, one: Operand, values: Sequence[int]) -> int:
    """Concatenate values along dimension ``at``; their other dimensions are those of ``one``."""
    # max(a, b) with min(a, b) is a permutation of the entries of (a, b): a `MaxMin`, not sqrt(2) times as large.
    first, second = (_compared(call, value) for value in values) if len(values) == 2 else (None, None)
    if not first or not second or first[0] is second[0] or {*first[1:]} != {*second[1:]}:
        return call.add(Concatenate(at), *values)
    both = _along(call, MaxMin(), call.add(Concatenate(at), *first[1:]), at, one.ndim)
    return both if first[0] is Maximum else call.add(Roll(at, one.shape[at - 1]), both)


def _along(call: Build, module: nn.Module, value: int, at: int, axes: int, own: int = 1) -> int:
    """Apply a module that acts along dimension ``own`` to dimension ``at`` of a value with ``axes`` dimensions."""
    swap = list(range(1, axes))
    swap[own - 1], swap[at - 1] = at, own
    return call.permuted(call.add(module, call.permuted(value, swap)), swap)


@plain(torch.cat, torch.concat, torch.concatenate, place=along(1, default=0))
def _cat(call: Build, tensors: Any, dim: int = 0) -> int:
    moving = call.moving(*tensors) if call.bounding else [t for t in tensors if isinstance(t, Operand)]
    (at,) = call.dims(moving[0], dim)
    if call.bounding or len(moving) == len(tensors):
        return _beside(call, at, moving[0], [x.number for x in moving])
    # Constants before and after moving values: zeros around these, and a shift.
    call.constant([t for t in tensors if not isinstance(t, Operand)], "tensor")
    here = [isinstance(t, Operand) for t in tensors]
    first, stop, sizes = here.index(True), len(here) - here[::-1].index(True), [t.shape[at - 1] for t in tensors]
    expected = "expected constants before or after what depends on the input, got some in between"
    call.require(all(here[first:stop]), expected)
    joined = call.add(Concatenate(at), *moving) if len(moving) > 1 else moving[0].number
    padding = (*(0, 0) * (len(call.shape) - at), sum(sizes[:first]), sum(sizes[stop:]))  # torch: the last axis first
    numbers = [call.like.expand(t.shape) if isinstance(t, Operand) else call.number(t, "tensor") for t in tensors]
    return call.elementwise(call.result(call.add(Pad(*padding), joined)), shift=torch.cat(numbers, at - 1))


plain(torch.hstack)(lambda call, tensors: _cat(call, tensors, 1))


@plain(torch.stack, place=stacked)
def _stack(call: Build, tensors: Any, dim: int = 0) -> int:
    given = call.moving(*tensors)
    at = dim % (given[0].ndim + 1)
    call.require(at > 0, f"expected a new dimension after the batch, got {dim}")
    if len(given) == 2 and given[0].shape and all(_compared(call, x.number) for x in given):
        # Concatenated in the last dimension, which is then split in two: the new dimension is moved to its place.
        shape, last = given[0].shape, len(given[0].shape)
        both = _beside(call, last, given[0], [x.number for x in given])
        both = call.reshaped(both, (*shape[:-1], 2 * shape[-1]), (*shape[:-1], 2, shape[-1]))
        order = [*range(1, last), last + 1]
        order.insert(at - 1, last)
        return call.permuted(both, order)
    values = [call.reshaped(x.number, x.shape, (*x.shape[: at - 1], 1, *x.shape[at - 1 :])) for x in given]
    return call.add(Concatenate(at), *values)


def _larger(call: Build, sign: int, x: Any, y: Any) -> int:
    if isinstance(x, Operand) and isinstance(y, Operand):
        if sign > 0:
            return call.add(Maximum(), call.broadcast(x), call.broadcast(y))
        minus = [call.elementwise(t, scale=-1 - call.like) for t in (x, y)]  # min(x, y) = -max(-x, -y)
        return call.times(call.add(Maximum(), *minus), -1)
    return _limited(call, sign, x, y) if isinstance(x, Operand) else _limited(call, sign, y, x)


def _limited(call: Build, sign: int, x: Operand, constant: Any) -> int:
    """max(x, limit) (sign 1) or min(x, limit) (sign -1), as limit + sign relu(sign (x - limit))."""
    limit, factor = call.number(constant, "limit"), call.like + sign
    idle = (limit == -sign * math.inf) & call.bounding  # limits nothing
    call.require(all_finite(limit[~idle]), f"expected finite numbers as limits, got {constant}")
    if call.bounding:
        return call.add(Bounded(1.0, "closed form", call.shape), call.broadcast(x))
    turned = call.add(nn.ReLU(), call.elementwise(x, scale=factor, shift=-factor * limit))
    return call.elementwise(call.result(turned), scale=factor, shift=limit)


def _pooled(call: Build, pool: nn.Module, x: Operand, value: int, dim: Any) -> int:
    """Pool all entries along ``dim``: these dimensions go to the end, and each group becomes an image of one column."""
    value, _, sizes, groups = _gathered(call, x, value, call.dims(call.same_format(x), dim))
    column = call.reshaped(value, sizes, (*groups, 1))
    return call.reshaped(call.add(pool, column), (groups[0], 1, 1), call.shape)


def _largest(call: Build, sign: int, x: Operand, dim: Any, keepdim: bool = False) -> int:
    """The largest (sign 1) or smallest (sign -1) entry along dimensions."""
    value = call.operand(x).number if sign > 0 else call.times(call.operand(x), sign)
    value = _pooled(call, nn.AdaptiveMaxPool2d(1), x, value, dim)
    return value if sign > 0 else call.times(value, sign)


@plain(torch.norm, "norm", torch.linalg.norm, torch.linalg.vector_norm, place=along(2))
def _norm(
    call: Build, x: Operand, p: Any = None, dim: Any = None, keepdim: bool = False, ord: Any = None, **unset: None
) -> int:
    kinds = {call.constant(k, "norm") for k in (p, ord)} - {"fro", None}
    alone = call.target is not torch.linalg.norm or len(flat([dim])) == 1  # of two dimensions: of matrices
    call.require(kinds <= ({2} if alone else set()), f"expected the norm p=2, got {[*kinds]}")
    call.require(set(unset.values()) <= {None}, f"expected no {', '.join(unset)}")
    return _pooled(call, L2NormPool2d(), x, call.operand(x).number, dim)


def _of_two(call: Build) -> bool:
    return len(call.args) > 1 and isinstance(call.args[1], (Operand, Tensor, Varies))


def _max(sign: int, call: Build, x: Any, *given: Any, **named: Any) -> Value:
    """The maximum (sign 1) or minimum (sign -1) of two values, or along dimensions of one (indices become -1)."""
    found = (_larger if _of_two(call) else _largest)(call, sign, x, *given, **named)
    return found if len(call.results) == 1 else (found, -1)


def _extremes(call: Build) -> Build:
    return (joined if _of_two(call) else along(1))(call)


plain(torch.max, torch.amax, torch.maximum, torch.fmax, "max", "amax", "maximum", place=_extremes)(partial(_max, 1))
plain(torch.min, torch.amin, torch.minimum, torch.fmin, "min", "amin", "minimum", place=_extremes)(partial(_max, -1))


@plain(torch.sort, "sort", place=along(1, default=-1))
def _sort(call: Build, x: Operand, dim: int = -1, descending: bool = False, stable: bool = False) -> Value:
    """`GroupSort` of all entries along a dimension; -1, no value of the network, stands for torch's indices."""
    (at,) = call.dims(call.operand(x), dim)
    if descending:
        return _along(call, GroupSort(None), x.number, at, x.ndim), -1
    downwards = _along(call, GroupSort(None), call.times(x, -1), at, x.ndim)  # GroupSort sorts downwards
    return call.times(downwards, -1), -1


@plain(torch.topk, "topk", place=along(2, default=-1))
def _topk(call: Build, input: Operand, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Value:
    call.require(sorted, "expected sorted=True, got False, for which the order is open")
    values: Any = _sort(call, input, dim, largest)
    return call.piece(replace(input, number=values[0]), call.dims(input, dim)[0], range(k)), -1


@plain(torch.mean, "mean", torch.sum, "sum", place=along(1))
def _mean(call: Build, x: Operand, dim: Any = None, keepdim: bool = False) -> int:
    dims = sorted(set(call.dims(call.operand(x), dim)))
    count = math.prod(x.shape[d - 1] for d in dims)
    if call.bounding and call.name.endswith("sum"):
        return call.scale(x, root(count))
    mean = call.add(Mean(*dims, keepdim=keepdim or not call.shape), x)
    if not call.shape:
        mean = call.reshaped(mean, (1,) * len(x.shape), ())
    if not call.name.endswith("sum"):
        return mean
    return call.times(mean, count)  # a sum is a mean times its count


@plain(torch.clamp, torch.clip, torch.clamp_min, "clamp", "clamp_", "clip", "clamp_min", "clamp_min_", place=joined)
def _clamp(call: Build, x: Operand, min: Any = None, max: Any = None) -> int:
    ends = [end.detach().item() if isinstance(end, Tensor) and not end.ndim else end for end in (min, max)]
    if ends[1] is None and type(ends[0]) in (int, float) and ends[0] == 0:
        return call.add(nn.ReLU(), x)
    if all(type(end) in (int, float) and math.isfinite(end) for end in ends):
        return call.add(nn.Hardtanh(float(ends[0]), float(ends[1])), call.broadcast(x))
    for sign, end in zip((1, -1), ends, strict=True):
        x = x if end is None else call.result(_larger(call, sign, x, end))
    return x.number


plain(torch.clamp_max, "clamp_max", "clamp_max_", place=joined)(lambda call, x, max: _clamp(call, x, None, max))


# Functions with a Lipschitz constant but without a plain form.


@function_rule(torch.logsumexp, "logsumexp")
def _logsumexp(call: Build, x: Operand, dim: Any, keepdim: bool = False) -> int:
    call.dims(call.operand(x), dim)
    return call.keep(x)  # its gradient is a softmax, of norm at most 1


function_rule(torch.atan, "atan")(lambda call, x: call.keep(x))  # its slope is at most 1
