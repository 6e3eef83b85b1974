"""Functions that move the numbers of one value, as modules: other shapes and orders, pieces, borders, windows."""

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.lowering.axes import along, behind, indexed, joined, ordered, viewed
from lipkit.lowering.build import FUNCTIONS, Build, Function, Value, plain
from lipkit.lowering.observe import Operand
from lipkit.lowering.tracing import flat
from lipkit.modules.dense import linear
from lipkit.modules.views import Enlarge, EnlargeBilinear, Expand, Pad, Permute, Roll


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


plain("expand", torch.broadcast_to, place=joined)(lambda call, x, *sizes: call.broadcast(call.same_format(x)).number)


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
        value = mapped(call, x, value, at, lambda units: units.flip(1))
    return value


@plain(torch.index_select, "index_select", place=along(1))
def _index_select(call: Build, x: Operand, dim: int, index: Any) -> int:
    (at,) = call.dims(call.same_format(x), dim)
    taken = torch.arange(x.shape[at - 1])[call.constant(index, "index")]
    call.require(taken.ndim == 1, f"expected a list of entries, got an index of shape {tuple(taken.shape)}")
    call.require(call.shape[at - 1] > 0, f"expected entries of dimension {dim}, got none")
    step = max(int(taken[1] - taken[0]), 1) if len(taken) > 1 else 1
    evenly = range(int(taken[0]), int(taken[-1]) + 1, step)
    if taken.tolist() == [*evenly]:
        return call.piece(x, at, evenly)  # which copies no entry
    return mapped(call, x, x.number, at, lambda units: units[:, taken])


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
        made = mapped(call, x, made, at, partial(lambda pair, units: F.pad(units[None], pair, mode)[0], pair))
    return made


def apply_along(call: Build, module: nn.Module, value: int, at: int, axes: int, own: int = 1) -> int:
    """Apply a module that acts along dimension ``own`` to dimension ``at`` of a value with ``axes`` dimensions."""
    swap = list(range(1, axes))
    swap[own - 1], swap[at - 1] = at, own
    return call.permuted(call.add(module, call.permuted(value, swap)), swap)


def mapped(call: Build, x: Operand, value: int, at: int, function: Callable[[Tensor], Tensor]) -> int:
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
    return value if same else apply_along(call, linear(matrix), value, at, x.ndim, x.ndim - 1)


@plain(torch.cumsum, "cumsum", place=along(1))
def _running_sum(call: Build, x: Operand, dim: int) -> int:
    (at,) = call.dims(call.same_format(x), dim)
    return mapped(call, x, x.number, at, lambda units: units.cumsum(1))


@plain(torch.repeat_interleave, "repeat_interleave", place=along(2))
def _interleaved(call: Build, x: Operand, repeats: Any, dim: int) -> int:
    (at,), times = call.dims(call.same_format(x), dim), call.constant(repeats, "number of copies")
    return mapped(call, x, x.number, at, lambda units: units.repeat_interleave(times, 1))


def _windows(call: Build, x: Operand, value: int, at: int, count: int, size: int, by: int, d: int, p: int) -> int:
    """``count`` windows of ``size`` along dimension ``at``: the first entry of each, then the second of each, ..."""
    taken = (d * torch.arange(size)[:, None] + by * torch.arange(count)).flatten()
    return mapped(call, x, value, at, lambda units: F.pad(units, (p, p))[:, taken])


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
        value = mapped(call, x, value, i + 2, row)
    return value
