"""The operators of ONNX that `lipkit.interop.onnx_reader` reads: a rule each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.interop.onnx_layers import BATCH, DTYPES, LAYERS, Call, around, copied
from lipkit.lowering.functional import filled
from lipkit.modules.views import Enlarge

# Activations.


def _clip(c: Call) -> Any:
    low, high = (None if (n := c.numbers(name, i)) is None else float(n) for i, name in ((1, "min"), (2, "max")))
    low, high = None if low == -math.inf else low, None if high == math.inf else high
    if low is not None and high is not None and not low < high:
        raise c.refuse("two limits, the lower one first", f"{low} and {high}")
    if low is None and high is None:
        return nn.Identity()
    return torch.clamp(c.x, low, high)


def _softmax(c: Call) -> Any:
    axis = c.axis(c.get("axis", -1 if c.opset >= 13 else 1))
    if c.opset >= 13 or axis == c.rank - 1:
        return nn.Softmax(axis)
    # Before version 13: over all dimensions from the axis on.
    shape = [c.x.size(i) for i in range(c.rank)]
    return F.softmax(c.x.flatten(axis), axis).reshape(shape)


def activation(make: Callable[..., nn.Module], **arguments: tuple[str, float]) -> Callable[[Call], nn.Module]:
    """A rule that calls ``make`` with ``arguments`` by torch's names, each given as (ONNX's name, default)."""
    return lambda c: make(**{key: float(c.get(name, value)) for key, (name, value) in arguments.items()})


def _hard_sigmoid(c: Call) -> Any:
    slope, shift = float(c.get("alpha", 0.2)), float(c.get("beta", 0.5))
    if shift == 0.5 and math.isclose(slope, 1 / 6, rel_tol=1e-7):
        return nn.Hardsigmoid()
    return torch.clamp(slope * c.x + shift, 0.0, 1.0)


def _selu(c: Call) -> Any:
    alpha, gamma = float(c.get("alpha", 1.6732631921768188)), float(c.get("gamma", 1.0507010221481323))
    if math.isclose(alpha, 1.6732632423543772, rel_tol=1e-7) and math.isclose(gamma, 1.0507009873554805, rel_tol=1e-7):
        return nn.SELU()
    return gamma * F.elu(c.x, alpha)


def _prelu(c: Call) -> nn.Module:
    slope = c.weight(1)
    channels = slope.numel() if slope.numel() > 1 else 1
    if c.opset < 7 and slope.ndim == 1:
        slope = slope.reshape(-1, *[1] * (c.rank - 2))
    if slope.ndim > c.rank or (channels > 1 and (slope.ndim < c.rank - 1 or slope.shape[1 - c.rank] != channels)):
        raise c.refuse("one slope, or one for each channel", f"shape {tuple(slope.shape)}")
    return filled(nn.PReLU(channels, device="meta"), weight=slope.reshape(channels))


def _only(holds: Callable[[Call], bool], make: Callable[[Call], Any], c: Call) -> Any:
    """``make(c)``, for calls that meet the condition ``holds``; others are refused."""
    if not holds(c):
        raise c.refuse("attributes and operands that its rule covers", f"{c.node.attributes}")
    return make(c)


# Numbers one by one.


def _elementwise(function: Callable[[Any, Any], Any], c: Call) -> Any:
    operands = c.tensors()
    if c.opset < 7 and "axis" in c.node.attributes:  # the second operand's first dimension is this one of the first
        behind = c.rank - c.axis(c.get("axis", 0)) - operands[1].ndim
        operands[1] = reduce(lambda t, _: t.unsqueeze(-1), range(behind), operands[1])
    ranks = {t.ndim - 1 for i, t in enumerate(operands) if i in c.moving}
    most = max((t.ndim for i, t in enumerate(operands) if i not in c.moving), default=0)
    if c.alone and (len(ranks) > 1 or most > min(ranks)):  # torch would take the batch for another dimension
        raise c.refuse(f"an input with the batch first, or operands of {min(ranks)} dimensions", f"{ranks}, {most}")
    return reduce(function, operands)


def _where(c: Call) -> Any:
    if 0 in c.moving:
        raise c.refuse("a stored condition", "one that depends on the input, where the result may jump")
    return torch.where(*([c.tensor(i) for i in range(3)] if c.moving else c.operands))


def _dequantized(c: Call) -> Any:
    """``(x - zero) scale`` for stored whole numbers: one scale for all, or one for each entry of an axis."""
    x, scale, axis = c.x, c.weight(1), c.axis(c.get("axis", 1), max(c.rank, 2))
    zero = c.tensor(2) if c.has(2) else torch.zeros_like(scale, dtype=x.dtype)
    if c.get("block_size", 0) or scale.ndim > 1 or zero.shape != scale.shape:
        raise c.refuse("one scale, or one for each entry of an axis", f"scales {list(scale.shape)}")
    along = [-1 if i == axis else 1 for i in range(x.ndim)] if scale.ndim else []
    return (x.int() - zero.int().reshape(along)).to(scale.dtype) * scale.reshape(along)


def _divided(a: Any, b: Any) -> Any:
    return a / b if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")  # as in C


def _power(c: Call) -> Any:
    if not c.moving:
        return torch.pow(c.x, c.weight(1)).to(c.x.dtype)  # ONNX keeps the format of the base
    exponent = c.numbers("", 1)
    if 0 not in c.moving or exponent not in (-2, -1, -0.5, 0.5, 1, 2, 3, 4):
        raise c.refuse("one of the powers -2, -1, -0.5, 0.5, 1, 2, 3 and 4", f"{exponent}")
    return c.x ** float(exponent) if exponent not in (1, 2, 3) else reduce(torch.mul, [c.x] * int(exponent))


def _equal(c: Call) -> Any:
    a, b = c.operands
    # The batch size may be any number above 0: only a comparison with 0 or less has a known result.
    if (((a == BATCH) & (b > 0)) | ((b == BATCH) & (a > 0))).any():
        raise c.refuse("no comparison with the size of the batch", "one")
    return a == b


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Call], Any]:
    return lambda c: function(c.x)


def _cast(c: Call) -> Any:
    to = DTYPES.get(c.get("to", 0))
    if c.moving and to == c.dtype:
        return nn.Identity()
    if c.moving or to is None or (c.sized and to not in (torch.int32, torch.int64, torch.float32, torch.float64)):
        raise c.refuse(f"the format {c.dtype} of the network", f"{to}")
    return c.operands[0].to(to)


def _reduced(name: str, c: Call) -> Any:
    axes, keep, none = c.axes(), bool(c.get("keepdims", 1)), bool(c.get("noop_with_empty_axes", 0))
    if not axes and (none or (c.moving and (not c.one or c.rank == 1))):
        raise c.refuse("axes other than the batch", "none")
    c.leaves = c.alone or (not axes and not keep)  # even the batch of a file for one sample
    axes = axes or list(range(1 if c.moving else 0, c.rank))
    if name == "prod":  # torch takes one axis at a time; from the last on, the earlier ones keep their places
        return reduce(lambda y, axis: y.prod(axis, keepdim=keep), reversed(axes), c.x)
    if name == "norm":
        return torch.linalg.vector_norm(c.x, 2, axes, keep)
    if name in ("abs", "square"):
        return getattr(c.x, name)().sum(axes, keepdim=keep)
    return getattr(c.x, name)(axes, keepdim=keep)


# The same numbers in another order.


def _shape(c: Call) -> Tensor:
    shape = c.operands[0].shape[c.alone :]
    if any(n != BATCH and n % BATCH == 0 and n for n in shape):
        raise c.refuse("no size made from that of the batch", "one")
    sizes = torch.tensor(list(shape), dtype=torch.int64)
    return sizes[c.get("start", 0) : c.get("end", None)]  # ends are cut and negative ones count, as in Python


def _arranged(c: Call, sizes: list[Any]) -> Any:
    """The first operand in these ``sizes``; in a file for one sample, the first is the batch if it is 1."""
    if not (c.moving and c.one):
        return c.moved.reshape(sizes)
    c.leaves = sizes[:1] != [1]
    return c.moved.reshape([c.source.size(0), *sizes[not c.leaves :]])


def _flatten(c: Call) -> Any:
    axis, rank = c.get("axis", 1), c.rank - c.alone
    axis = rank if axis == rank else c.axis(axis) - c.alone
    if axis == 1 and not c.alone and c.rank > 1:
        return nn.Flatten(1)
    sizes, open_batch = c.sizes, c.moving and not c.one
    if open_batch and (axis == 0 or math.prod(sizes[1:axis]) != 1):
        raise c.refuse("axis 1", f"{axis}")
    return _arranged(c, [sizes[0] if open_batch else math.prod(sizes[:axis]), math.prod(sizes[axis:])])


def _reshape(c: Call) -> Any:
    x, sizes, zero = c.moved, c.numbers("shape", 1, batch=True), c.get("allowzero", 0)
    if not isinstance(sizes, list) or sizes.count(-1) > 1 or (zero and 0 in sizes):
        raise c.refuse("a shape with one size -1 at most, and 0 as a copy", f"{sizes}")
    if c.moving and c.one:
        sizes = [1 if n == BATCH else n or c.sizes[i] for i, n in enumerate(sizes)]
        rest = math.prod(c.sizes) // max(-math.prod(sizes), 1)
        return _arranged(c, [rest if n == -1 else n for n in sizes])
    return x.reshape([c.source.size(0) if n == BATCH else n or x.size(i) for i, n in enumerate(sizes)])


def _expand(c: Call) -> Any:
    x, sizes = c.moved, c.numbers("shape", 1, batch=True)
    if c.moving:
        sizes = [1] * (c.rank - len(sizes)) + sizes
        if len(sizes) > c.rank or sizes[0] not in (1, BATCH) or BATCH in sizes[1:]:
            raise c.refuse("a shape that keeps the batch first", f"{sizes}")
        # torch refuses sizes that cannot come from repeating.
        first = -1 if sizes[0] == 1 else c.source.size(0)
        return x.expand([first, *(x.size(i) if n == 1 else n for i, n in enumerate(sizes) if i)])
    rows = torch.broadcast_shapes(x.shape, [1 if n == BATCH else n for n in sizes])
    return c.repeated(x.expand(rows).clone(), sizes)


def _tiled(c: Call) -> Any:
    times = c.numbers("repeats", 1)
    if not isinstance(times, list) or len(times) != c.rank:  # torch takes fewer and more
        raise c.refuse(f"{c.rank} repeats, one for each axis", f"{times}")
    return c.x.tile(times)


def _filled_shape(c: Call) -> Tensor:
    sizes = c.numbers("shape", 0, batch=True)
    value = c.get("value", torch.zeros(1)).reshape(())
    return c.repeated(value.expand([1 if n == BATCH else n for n in sizes]).clone(), sizes)


BORDERS = {b"wrap": "circular", b"reflect": "reflect", b"edge": "replicate"}


def pads_of(c: Call) -> tuple[list[int], list[int]]:
    """How many entries a Pad adds before and after each axis."""
    sizes, axes = list(c.numbers("pads", 1)), c.numbers("axes", 3)
    places = range(c.rank) if axes is None else [c.axis(axis) for axis in axes]
    if len(sizes) != 2 * len(places) or len(set(places)) != len(places):
        raise c.refuse("two paddings of each axis", f"{sizes} of {list(places)}")
    before, after = [0] * c.rank, [0] * c.rank
    for place, *pair in zip(places, sizes[: len(places)], sizes[len(places) :], strict=True):
        before[place], after[place] = pair
    return before, after


def _pad(c: Call) -> Any:
    value, kind = c.numbers("value", 2), c.get("mode", b"constant")
    before, after = pads_of(c)
    if (c.moving and (before[0] or after[0])) or (
        kind != b"constant" and (kind not in BORDERS or min(*before, *after) < 0)
    ):
        raise c.refuse("padding that leaves the batch alone", f"{before}, {after}, {kind!r}")
    if kind == b"constant":
        first = 1 if c.moving else 0  # torch pads from the last axis on: the batch is left out
        number = next(iter(value), 0) if isinstance(value, list) else value or 0
        return F.pad(c.x, around(before[first:], after[first:]), value=float(number))
    x = c.x
    for axis in range(1, c.rank):
        x = copied(x, axis, before[axis], after[axis], kind.decode())
    return x


def _slice(c: Call) -> Any:
    starts, ends, axes, steps = (c.numbers(name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1))
    index: dict[int, slice] = {}
    x = c.moved
    for axis, *part in zip(axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True):
        place = c.axis(axis)
        if part[2] == 0 or (part[2] < 0 and c.moving and place == 0) or place in index:
            raise c.refuse("steps from 1 on for the batch, each axis once", f"steps {steps}, axes {axes}")
        if part[2] < 0:
            part[0] = max(part[0], -x.shape[place])  # ONNX starts at the first number, Python before it
            x = x.index_select(place, torch.tensor(range(x.shape[place])[slice(*part)], dtype=torch.int64))
            part = [0, 2**31, 1]
        # A full slice lets tracing see that the whole batch is kept.
        index[place] = slice(None) if part[0] == 0 and part[1] >= 2**31 - 1 and part[2] == 1 else slice(*part)
    return x[tuple(index.get(place, slice(None)) for place in range(c.rank))]


def _transpose(c: Call) -> Any:
    order = c.get("perm", range(c.rank - c.alone)[::-1])
    return c.moved.permute([*range(c.alone), *(axis + c.alone for axis in order)])


def _gather(c: Call) -> Any:
    axis, x = c.axis(c.get("axis", 0)), c.moved
    if not c.moving:
        n, which = x.shape[axis], c.tensor(1)
        if which.numel() and not -n <= int(which.min()) <= int(which.max()) < n:
            raise c.refuse(f"entries of {n}", f"{which.tolist()}")
        flat = x.index_select(axis, (which % max(n, 1)).long().flatten())  # which % n: negative ones count from the end
        return flat.reshape((*x.shape[:axis], *which.shape, *x.shape[axis + 1 :]))
    places = c.numbers("indices", 1)
    single, n = isinstance(places, int), x.size(axis)
    if axis == 0 and c.one and places in (0, -1, [0], [-1]):  # the only sample
        return _arranged(c, c.sizes[single:])
    if n % BATCH == 0:
        raise c.refuse("entries of another axis than the batch", f"{c.get('axis', 0)}")
    wanted = [places] if single else places
    if not wanted or not all(isinstance(i, int) and -n <= i < n for i in wanted):
        raise c.refuse(f"a row of entries of {n}", f"{places}")
    return x.select(axis, places) if single else x.index_select(axis, torch.tensor(wanted) % n)


def _split(c: Call) -> Any:
    axis, count, sizes = c.axis(c.get("axis", 0)), len(c.node.output), c.numbers("split", 1)
    if c.get("num_outputs", count) != count or (sizes is not None and len(sizes) != count):
        raise c.refuse(f"sizes of {count} outputs", f"{sizes}")
    x = c.moved
    # torch refuses sizes that do not add up.
    parts = x.split(sizes or [x.size(axis) // count] * count, axis)
    return [parts[i] for i in range(count)]


def _single(c: Call, name: str, index: int) -> int:
    """A stored number, with or without a dimension."""
    given = c.numbers(name, index)
    return int(given[0] if isinstance(given, list) else given)


def _running_sum(c: Call) -> Any:
    axis, backwards, exclusive = c.axis(_single(c, "", 1)), c.get("reverse", 0), c.get("exclusive", 0)
    x = c.moved.flip(axis) if backwards else c.moved
    y = x.cumsum(axis) - x if exclusive else x.cumsum(axis)
    return y.flip(axis) if backwards else y


def _neighbours(c: Call) -> Any:
    size, options = c.get("size", 1), {key: c.get(name, v) for key, (name, v) in _NEIGHBOURS.items()}
    if size % 2 == 0:
        raise c.refuse("an odd size, whose windows all runtimes centre alike", f"{size}")
    return F.local_response_norm(c.x, size, **options)


def _largest(c: Call) -> Any:
    axis = c.axis(c.get("axis", -1))
    if not c.get("sorted", 1):
        raise c.refuse("sorted=1", "0, for which the order is open")
    return c.moved.topk(_single(c, "k", 1), axis, bool(c.get("largest", 1)))[0]


def _squeeze(c: Call) -> Any:
    axes = c.axes()
    if not axes and c.moving and not c.one:
        raise c.refuse("axes other than the batch", "none")
    # torch's squeeze keeps sizes other than 1; a reshape refuses them.
    return _arranged(c, [n for i, n in enumerate(c.sizes, c.alone) if (i not in axes if axes else n != 1)])


def _unsqueeze(c: Call) -> Any:
    sizes = c.sizes
    for axis in c.axes(more=1):
        sizes.insert(axis - c.alone, 1)
    return _arranged(c, sizes)


def _concat(c: Call) -> Any:
    axis = c.axis(c.get("axis", 1), max(t.ndim for i, t in enumerate(c.operands) if i in c.moving or not c.moving))
    if not c.moving or len(c.moving) == len(c.operands):
        c.read.update(range(len(c.operands)))
        return torch.cat(list(c.operands), axis)
    if not c.one:
        raise c.refuse("a constant expanded to a row for each sample", "one without the batch")
    rows = [t[None] if c.alone and i not in c.moving else t for i, t in enumerate(c.tensors())]
    return torch.cat([t if i in c.moving else c.repeated(t, [BATCH, *t.shape[1:]]) for i, t in enumerate(rows)], axis)


def _resized(c: Call) -> Any:
    """Upsampling to the nearest pixel by whole factors, or any sizes by bilinear or bicubic weights.

    Only coordinate modes on which all runtimes agree.
    """
    sizes = c.numbers("sizes", 3, batch=True) if c.node.kind == "Resize" else None
    scales = c.numbers("scales", 2 if c.node.kind == "Resize" and c.opset >= 11 else 1)
    own = [c.x.size(i) for i in range(c.rank)]
    if sizes and (sizes[0] == BATCH or (c.one and sizes[0] == 1)):
        scales = [1.0, *(n / m for n, m in zip(sizes[1:], own[1:], strict=True))]
    default = "half_pixel" if c.node.kind == "Resize" and c.opset >= 11 else "asymmetric"
    mode = c.get("mode", b"nearest").decode()
    place = c.get("coordinate_transformation_mode", default.encode()).decode()
    rounds = c.get("nearest_mode", b"round_prefer_floor" if default == "half_pixel" else b"floor").decode()
    near = mode == "nearest" and (place, rounds) in (
        ("asymmetric", "floor"), ("tf_half_pixel_for_nn", "floor"), ("half_pixel", "round_prefer_floor"),
        ("half_pixel", "round_prefer_ceil"),
    )  # fmt: skip
    images = c.rank == 4 and len(scales or ()) == 4 and scales[:2] == [1, 1]
    images &= c.get("keep_aspect_ratio_policy", b"stretch") == b"stretch" and not c.get("antialias", 0)
    after = [*(sizes or [n * s for n, s in zip(own, scales or (), strict=False)])[2:]]
    if images and near and all(s >= 1 and s % 1 == 0 for s in scales):
        return Enlarge(int(scales[2]), int(scales[3]))
    cubic = c.get("cubic_coeff_a", -0.75) == -0.75 and not c.get("exclude_outside", 0)
    smooth = mode == "linear" or (mode == "cubic" and cubic)
    if not (images and smooth and place in ("half_pixel", "align_corners") and all(n % 1 == 0 for n in after)):
        raise c.refuse(
            "images enlarged by whole numbers, nearest, or of whole sizes, linear or cubic",
            f"{mode}, {place}, {rounds}, {scales}",
        )
    smooth_mode = "bilinear" if mode == "linear" else "bicubic"
    return F.interpolate(c.x, [int(n) for n in after], mode=smooth_mode, align_corners=place == "align_corners")


def _depth_to_space(c: Call) -> Any:
    n = c.get("blocksize", 1)
    if c.get("mode", b"DCR") == b"CRD":
        return nn.PixelShuffle(n)
    b, depth, rows, cols = (c.x.size(i) for i in range(4))
    apart = c.x.reshape([b, n, n, depth // n**2, rows, cols]).permute([0, 3, 4, 1, 5, 2])
    return apart.reshape([b, depth // n**2, rows * n, cols * n])


def _constant(c: Call) -> Tensor:
    (name,) = c.node.attributes
    value = c.get(name, None)
    if isinstance(value, Tensor):
        return value
    if not name.startswith(("value_float", "value_int")):
        raise c.refuse("numbers as its value", name)
    return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)


_NEIGHBOURS: dict[str, tuple[str, float]] = {"alpha": ("alpha", 1e-4), "beta": ("beta", 0.75), "k": ("bias", 1.0)}
# Functions of torch of the same name, in lower case; activations of the same name; reductions by names of methods.
_FUNCTIONS = ("Abs", "Asinh", "Atan", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "Reciprocal", "Sin", "Sqrt")
_ACTIVATIONS = ("Mish", "Sigmoid", "Softplus", "Softsign", "Tanh")
_REDUCED = {"L1": "abs", "L2": "norm", "Max": "amax", "Mean": "mean", "Min": "amin", "Prod": "prod", "Sum": "sum"}
_SAME, _SHRINK = activation(nn.Identity), activation(nn.Softshrink, lambd=("lambd", 0.5))
OPERATORS: dict[str, Callable[[Call], Any]] = {
    **LAYERS,
    **{name: _each(getattr(torch, name.lower())) for name in _FUNCTIONS},
    **{name: activation(getattr(nn, name)) for name in _ACTIVATIONS},
    **{f"Reduce{name}": partial(_reduced, method) for name, method in _REDUCED.items()},
    "Add": partial(_elementwise, operator.add),
    "And": partial(_elementwise, torch.logical_and),
    "Cast": _cast,
    "Celu": activation(nn.CELU, alpha=("alpha", 1.0)),
    "Clip": _clip,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _filled_shape,
    "CumSum": _running_sum,
    "DepthToSpace": _depth_to_space,
    "Div": partial(_elementwise, _divided),
    "DequantizeLinear": _dequantized,
    # Operand 2 says whether it is training; before version 7, an attribute does.
    "Dropout": partial(
        _only, lambda c: not (c.has(2) and c.numbers("", 2)) and (c.opset > 6 or c.get("is_test", 0)), _SAME
    ),
    "Einsum": lambda c: torch.einsum(c.get("equation", b"").decode(), *c.tensors()),
    "Elu": activation(nn.ELU, alpha=("alpha", 1.0)),
    "Equal": _equal,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": lambda c: nn.GELU(c.get("approximate", b"none").decode()),
    "Greater": partial(_elementwise, torch.gt),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": activation(nn.Hardswish),
    "Identity": _SAME,
    "LRN": _neighbours,
    "LeakyRelu": activation(nn.LeakyReLU, negative_slope=("alpha", 0.01)),
    "Less": partial(_elementwise, torch.lt),
    "LogSoftmax": lambda c: nn.LogSoftmax(c.axis(c.get("axis", -1))),  # refused by name, with advice
    "Max": partial(_elementwise, torch.maximum),
    "Mean": lambda c: _elementwise(operator.add, c) / len(c.operands),
    "Min": partial(_elementwise, torch.minimum),
    "Mul": partial(_elementwise, operator.mul),
    "Neg": _each(operator.neg),
    "Not": _each(torch.logical_not),
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _power,
    "ReduceSumSquare": partial(_reduced, "square"),
    "Relu": activation(nn.ReLU),
    "Reshape": _reshape,
    "Resize": _resized,
    "Selu": _selu,
    "Shape": _shape,
    # With another bias, it jumps.
    "Shrink": partial(_only, lambda c: c.get("bias", 0.0) == c.get("lambd", 0.5), _SHRINK),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": partial(_elementwise, operator.sub),
    "Sum": partial(_elementwise, operator.add),
    "Swish": partial(_only, lambda c: c.get("alpha", 1.0) == 1, activation(nn.SiLU)),
    "Tile": _tiled,
    "TopK": _largest,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Upsample": _resized,
    "Where": _where,
}
# Only for stored operands.
STORED = ("And", "Ceil", "DequantizeLinear", "Equal", "Erf", "Floor", "Greater", "Less", "Not", "ReduceProd")
# These copy every number of the result from an operand, which may then be the batch size.
COPIES = (
    *("Cast", "Concat", "ConstantOfShape", "Equal", "Expand", "Gather", "Identity", "Reshape", "Shape", "Slice"),
    *("Split", "Squeeze", "Transpose", "Unsqueeze", "Where"),
)
# These need the batch as the first dimension.
BATCHED = {*LAYERS, "DepthToSpace", "Einsum", "Expand", "PRelu", "Pad", "LRN", "Resize", "Tile", "Upsample", "Where"}
BATCHED -= {"MatMul"}
