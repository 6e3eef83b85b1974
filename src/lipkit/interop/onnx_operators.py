"""The operators of ONNX that `lipkit.interop.onnx_reader` reads: a row each, with what they compute in torch.

A rule gives a module, which is applied to the first operand, or calls functions of torch. It serves stored operands,
which it computes with, values without memory, for their sizes, and symbols that are traced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.modules.views import Enlarge, EnlargeBilinear, Pad

# As TensorProto numbers them.
FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
_DTYPES = {2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool, **FLOATS}
# Attributes without effect at inference with one output, or that belong to refused options.
_HARMLESS = ("momentum", "ratio", "seed", "storage_order", "cubic_coeff_a", "saturate", "exclude_outside",
             "extrapolation_value", "round_mode")  # fmt: skip
BATCH = 2**23 - 15
"""The batch size while a file is read. No stored number equals it, so a number that does was copied from a shape.
Numbers computed from it cannot be recognised; they are refused."""


def holds_batch(tensor: Tensor) -> bool:
    # Narrower formats do not hold it.
    return tensor.dtype.itemsize >= 4 and bool((tensor == BATCH).any())


class Node(NamedTuple):
    """An operator of ONNX in a version that its rule covers, or several operators of the file read as one."""

    kind: str
    input: list[str]
    output: list[str]
    name: str
    attributes: dict[str, Any]
    row: Any  # Row, or None


class Row(NamedTuple):
    """All that is known of an operator.

    Attributes:
        rule: the module, or the values, that a call computes.
        versions: of the operator's definition, as ONNX counts them, that the rule implements.
        moves: whether operands may depend on the input.
        copies: whether every number of the result is copied from an operand; then operands may hold the batch size.
        rowwise: whether an operand may be a constant row that is repeated for each sample.
    """

    rule: Callable[[Call], Any]
    versions: tuple[int, ...]
    moves: bool = True
    copies: bool = False
    rowwise: bool = False


@dataclass
class Call:
    """One node and its operands.

    Attributes:
        opset: version of the operators.
        one: whether the file is for one sample, so that a first size of 1 is the batch.
        dtype: of the network.
        moving: indices of operands that depend on the input.
        sized: indices of operands that hold the batch size as a number.
        rows: indices of constant operands that are repeated for each sample; one row is kept.
        operands: stored tensors, and values of the network or their sizes.
        source: the input of the network.
        used, read: attributes that the rule read, and operands that it computed with.
    """

    node: Node
    opset: int
    one: bool
    dtype: torch.dtype
    moving: frozenset[int]
    sized: frozenset[int]
    rows: frozenset[int]
    operands: list[Any]
    source: Any
    used: set[str] = field(default_factory=lambda: set(_HARMLESS))
    read: set[int] = field(default_factory=set)

    def on(self, operands: list[Any], source: Any) -> Call:
        """A copy of this call with other operands."""
        fixed = (self.node, self.opset, self.one, self.dtype, self.moving, self.sized, self.rows)
        return Call(*fixed, operands, source)

    def refuse(self, expected: str, got: str) -> NoRuleError:
        return NoRuleError(f"{self.node.name}: {self.node.kind}: expected {expected}, got {got}")

    def has(self, index: int) -> bool:
        """True if an operand is given."""
        return index < len(self.operands) and self.operands[index] is not None

    def tensor(self, index: int) -> Any:
        """An operand to compute with."""
        if not self.has(index):
            raise self.refuse(f"operand {index}", "none")
        if index in self.sized:
            raise self.refuse("no number made from the size of the batch", f"one as operand {index}")
        self.read.add(index)
        return self.operands[index]

    @property
    def x(self) -> Any:
        return self.tensor(0)

    @property
    def moved(self) -> Any:
        """The first operand, for rules that only copy its numbers; it may hold the batch size."""
        self.read.add(0)
        return self.operands[0]

    @property
    def rank(self) -> int:
        return int(self.operands[0].ndim)

    def tensors(self) -> list[Any]:
        """All operands, of one format."""
        found = [self.tensor(i) for i in range(len(self.operands))]
        # With values of the network among them, the reader compares the formats.
        formats = set() if self.moving else {t.dtype for t in found}
        if len(formats) > 1:
            raise self.refuse("operands of one format", f"{sorted(map(str, formats))}")
        return found

    def weight(self, index: int) -> Tensor | None:
        """A stored operand; None if it is left out."""
        if not self.has(index):
            return None
        if index in self.moving:
            raise self.refuse(f"stored weights as operand {index}", "a tensor that is computed")
        found: Tensor = self.tensor(index)
        return found

    def needed(self, index: int) -> Tensor:
        self.tensor(index)
        return self.weight(index)  # type: ignore[return-value]

    def get(self, name: str, default: Any) -> Any:
        """The value of an attribute, or ``default``."""
        self.used.add(name)
        return self.node.attributes.get(name, default)

    def numbers(self, name: str, index: int, batch: bool = False) -> Any:
        """Numbers from an attribute (older versions) or an operand (newer ones); onnx has checked which applies."""
        given = self.get(name, None)
        if not self.has(index):
            return given
        if index in self.moving:
            raise self.refuse(f"stored numbers as operand {index}", "a tensor that is computed")
        if index in self.sized and not batch:
            raise self.refuse("no size made from that of the batch", f"one as operand {index}")
        if self.operands[index].numel() > 2**16:
            raise self.refuse(f"at most {2**16} numbers as operand {index}", f"{self.operands[index].numel()}")
        return self.operands[index].tolist()

    def axis(self, axis: int, rank: int | None = None) -> int:
        """An axis counted from the start. Negative axes exist from version 11 on."""
        rank = self.rank if rank is None else rank
        if not (-rank if self.opset >= 11 else 0) <= axis < rank:
            raise self.refuse(f"an axis from 0 to {rank - 1}", f"{axis}")
        return axis % rank

    def axes(self, index: int = 1, more: int = 0) -> list[int]:
        """The sorted, distinct ``axes`` (attribute or operand) of a tensor with ``more`` extra dimensions per axis."""
        given = self.numbers("axes", index) or []
        rank = self.rank + more * len(given)
        found = sorted({self.axis(axis, rank) for axis in given})
        if len(found) < len(given):
            raise self.refuse("axes, each once", f"{given}")
        return found

    def window(self, kernel: Sequence[int] = ()) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
        """Kernel, strides, dilations, and the paddings before and after each axis of a window."""
        count, auto = self.rank - 2, self.get("auto_pad", b"NOTSET")
        shape = list(self.get("kernel_shape", kernel))
        strides, dilations = list(self.get("strides", [1] * count)), list(self.get("dilations", [1] * count))
        pads = list(self.get("pads", [0] * 2 * count))
        if auto != b"NOTSET" and "pads" in self.node.attributes:
            raise self.refuse(f"no pads beside auto_pad={auto.decode(errors='replace')}", f"{pads}")
        wanted = (count, count, count, 2 * count)
        if count not in (1, 2) or tuple(map(len, (shape, strides, dilations, pads))) != wanted:
            raise self.refuse(
                "images or sequences, and a size, a stride, a dilation and two paddings of each axis",
                f"{self.rank} dimensions, {shape}, {strides}, {dilations}, {pads}",
            )
        if kernel and shape != list(kernel):
            raise self.refuse(f"a weight of kernel_shape {shape}", f"{list(kernel)}")
        before, after = pads[:count], pads[count:]
        if auto in (b"SAME_UPPER", b"SAME_LOWER"):
            sizes = [self.operands[0].size(axis) for axis in range(2, self.rank)]
            whole = zip(sizes, shape, strides, dilations, strict=True)
            total = [max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0) for n, k, s, d in whole]
            less, more = [n // 2 for n in total], [n - n // 2 for n in total]
            before, after = (less, more) if auto == b"SAME_UPPER" else (more, less)
        elif auto not in (b"NOTSET", b"VALID"):
            raise self.refuse("auto_pad of ONNX", f"{auto!r}")
        if min(*before, *after, 0) < 0:
            raise self.refuse("paddings from 0 on", f"{pads}")
        return shape, strides, dilations, before, after


def _filled(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    for name, tensor in tensors.items():
        value, place = None if tensor is None else tensor.clone(), getattr(module, name)
        if value is not None and value.shape != place.shape:
            raise ValueError(f"{name} of shape {tuple(value.shape)}, not {tuple(place.shape)}")
        if name in module._buffers:
            module._buffers[name] = value
        else:
            setattr(module, name, None if value is None else nn.Parameter(value, requires_grad=False))
    return module


# Layers with weights, as modules.


def takes_over(conv: Node, border: tuple[str, list[int], list[int]], weight: Tensor | None) -> bool:
    """True if a convolution can replace the preceding padding by copied pixels with its own padding mode."""
    _, before, after = border
    if weight is None or weight.ndim != 4 or len(before) != 4 or any((*before[:2], *after[:2])):
        return False
    if any(conv.attributes.get("pads", ())) or conv.attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return False
    dilations, strides = conv.attributes.get("dilations", [1, 1]), conv.attributes.get("strides", [1, 1])
    reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=False)]
    same = before[2:] == [n // 2 for n in reach] and after[2:] == [n - n // 2 for n in reach] and max(strides) == 1
    return before == after or same


def _conv(c: Call) -> nn.Module:
    weight, bias = c.needed(1), c.weight(2)
    groups = int(c.get("group", 1))
    shape, strides, dilations, before, after = c.window(tuple(weight.shape[2:]))
    mode, *border = c.get("border", ("zeros",))
    if border:
        before, after = border[0][2:], border[1][2:]
    padding: Any = tuple(before) if before == after else "same" if border else 0
    window: dict[str, Any] = {"kernel_size": tuple(shape), "padding": padding, "padding_mode": mode}
    window |= {"stride": tuple(strides), "dilation": tuple(dilations), "groups": groups, "device": "meta"}
    make: Any = nn.Conv2d if c.rank == 4 else nn.Conv1d
    conv = _filled(make(weight.shape[1] * groups, weight.shape[0], **window), weight=weight, bias=bias)
    return conv if before == after or border else nn.Sequential(Pad(*_around(before, after)), conv)


def _around(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Paddings as torch has them: before and after the last axis, the one before it, and so on."""
    return [n for pair in zip(before[::-1], after[::-1], strict=True) for n in pair]


def _conv_transpose(c: Call) -> nn.Module:
    weight, bias = c.needed(1), c.weight(2)
    shape, strides, dilations, before, after = c.window(tuple(weight.shape[2:]))
    groups, extra = int(c.get("group", 1)), list(c.get("output_padding", [0] * len(shape)))
    if "output_shape" in c.node.attributes or c.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise c.refuse("explicit padding and no output_shape", f"{c.node.attributes}")
    if any(n >= stride for n, stride in zip(extra, strides, strict=True)):
        raise c.refuse(f"output_padding below the strides {strides}", f"{extra}")
    even = before == after
    window: dict[str, Any] = {"kernel_size": tuple(shape), "padding": tuple(before) if even else 0, "groups": groups}
    window |= {"stride": tuple(strides), "dilation": tuple(dilations), "output_padding": tuple(extra), "device": "meta"}
    make: Any = nn.ConvTranspose2d if c.rank == 4 else nn.ConvTranspose1d
    conv = _filled(make(weight.shape[0], weight.shape[1] * groups, **window), weight=weight, bias=bias)
    return conv if even else nn.Sequential(conv, Pad(*(-n for n in _around(before, after))))


def _gemm(c: Call) -> nn.Module:
    weight, bias = c.needed(1), c.weight(2)
    if c.get("transA", 0) or c.rank != 2:
        raise c.refuse("samples times a matrix", f"transA={c.get('transA', 0)}, {c.rank} dimensions")
    weight = float(c.get("alpha", 1.0)) * (weight if c.get("transB", 0) else weight.mT.contiguous())
    beta = float(c.get("beta", 1.0))
    if bias is not None:
        flat = bias.squeeze(0) if bias.ndim == 2 else bias
        bias = (beta * flat).expand(len(weight)).contiguous()
    return _filled(nn.Linear(weight.shape[1], weight.shape[0], device="meta"), weight=weight, bias=bias)


def _matmul(c: Call) -> Any:
    a, b = c.tensors()
    if min(a.ndim, b.ndim) < 2:
        raise c.refuse("matrices", f"operands of {[a.ndim, b.ndim]} dimensions")
    if c.moving != {0} or b.ndim != 2:
        return torch.matmul(a, b)
    return _filled(nn.Linear(b.shape[0], b.shape[1], device="meta"), weight=b.T.contiguous(), bias=None)


def _batch_norm(c: Call) -> nn.Module:
    if c.get("training_mode", 0) or c.get("spatial", 1) != 1:
        raise c.refuse("training_mode 0 and spatial 1", f"{c.get('training_mode', 0)} and {c.get('spatial', 1)}")
    scale, shift, mean, var = (c.needed(i) for i in (1, 2, 3, 4))
    make: Any = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(c.rank, nn.BatchNorm1d)
    module: Any = make(len(scale), eps=float(c.get("epsilon", 1e-5)), device="meta")
    module.num_batches_tracked = None
    return _filled(module, weight=scale, bias=shift, running_mean=mean, running_var=var)


def _normalised(make: Callable[[Call, Tensor, float], nn.Module]) -> Callable[[Call], nn.Module]:
    def made(c: Call) -> nn.Module:
        scale = c.needed(1)
        if c.get("stash_type", 1) != 1:
            raise c.refuse("stash_type 1", f"{c.get('stash_type', 1)}")
        return _filled(make(c, scale, float(c.get("epsilon", 1e-5))), weight=scale, bias=c.weight(2))

    return made


def _layer_norm(c: Call, scale: Tensor, epsilon: float) -> nn.Module:
    if (axis := c.axis(c.get("axis", -1))) != c.rank - scale.ndim:
        raise c.refuse("a scale of the normalised dimensions", f"axis {axis} and scale {tuple(scale.shape)}")
    return nn.LayerNorm(tuple(scale.shape), epsilon, device="meta")


def _instance_norm(c: Call, scale: Tensor, epsilon: float) -> nn.Module:
    make: Any = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}[c.rank]
    found: nn.Module = make(len(scale), epsilon, affine=True, device="meta")
    return found


# Pools: those of sequences as those of images of one row.


def _pool(rule: Callable[..., Any]) -> Callable[[Call], Any]:
    def made(c: Call) -> Any:
        shape, strides, dilations, before, after = c.window()
        rows = [[1] * (4 - c.rank), [0] * (4 - c.rank)]
        shape, strides, dilations = (rows[0] + n for n in (shape, strides, dilations))
        before, after = (rows[1] + n for n in (before, after))
        x = c.x.unsqueeze(2) if c.rank == 3 else c.x
        # Windows that do not fit: ceil_mode asks for more of them.
        reach = zip(range(2, 4), shape, strides, dilations, before, after, strict=True)
        over = any((x.size(i) + p + q - d * (k - 1) - 1) % s for i, k, s, d, p, q in reach)
        y = rule(c, x, shape, strides, dilations, before, after, bool(c.get("ceil_mode", 0)) and over)
        return y.squeeze(2) if c.rank == 3 else y

    return made


def _max_pool(c: Call, x: Any, kernel: list[int], strides: list[int], dilations: list[int], before: list[int],
              after: list[int], up: bool) -> Any:  # fmt: skip
    # Over the end, or on nothing but padding, runtimes mean different windows.
    padded = any(before) or any(after)
    if (up and any(s > k for s, k in zip(strides, kernel, strict=True))) or (padded and (up or max(dilations) > 1)):
        got = f"{kernel}, {strides}, {dilations}, {before}, {after}"
        raise c.refuse("overlapping windows with ceil_mode 1, and no pads beside it or dilations", got)
    if before == after:
        return F.max_pool2d(x, kernel, strides, before, dilations, up)
    if any(p >= k for p, k in zip([*before, *after], kernel * 2, strict=True)):
        raise c.refuse("paddings below the size of the window", f"{kernel}, {before}, {after}")
    # A window that reaches beyond the border has the pixel at the border, too.
    for axis in (2, 3):
        x = _copied(x, axis, before[axis - 2], after[axis - 2], "replicate")
    return F.max_pool2d(x, kernel, strides)


def _average_pool(c: Call, x: Any, kernel: list[int], strides: list[int], dilations: list[int], before: list[int],
                  after: list[int], up: bool) -> Any:  # fmt: skip
    if max(dilations) > 1 or up or any(p >= k for p, k in zip([*before, *after], kernel * 2, strict=True)):
        got = f"{dilations}, {up}, {before}, {after}"
        raise c.refuse("dilations 1, windows that fit or ceil_mode 0, and paddings below the window", got)
    counted = bool(c.get("count_include_pad", 0))
    if before == after:
        return F.avg_pool2d(x, kernel, strides, before, False, counted)
    around = _around(before, after)
    y = F.avg_pool2d(F.pad(x, around), kernel, strides)
    if counted:
        return y
    inside = F.pad(torch.ones(1, 1, x.size(2), x.size(3), dtype=c.dtype), around)
    return y * (1 / F.avg_pool2d(inside, kernel, strides))


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
    """``make`` of attributes by their names in torch, each with the name and default that ONNX gives it."""
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
    slope = c.needed(1)
    channels = slope.numel() if slope.numel() > 1 else 1
    if slope.ndim > c.rank or (channels > 1 and (slope.ndim < c.rank - 1 or slope.shape[1 - c.rank] != channels)):
        raise c.refuse("one slope, or one for each channel", f"shape {tuple(slope.shape)}")
    return _filled(nn.PReLU(channels, device="meta"), weight=slope.reshape(channels))


def _only(make: Callable[[Call], Any], holds: Callable[[Call], bool]) -> Callable[[Call], Any]:
    """``make`` of a call for which its condition holds."""

    def made(c: Call) -> Any:
        if not holds(c):
            raise c.refuse("attributes and operands that its rule covers", f"{c.node.attributes}")
        return make(c)

    return made


# Numbers one by one.


def _elementwise(function: Callable[[Any, Any], Any], least: int = 2) -> Callable[[Call], Any]:
    def made(c: Call) -> Any:
        values = c.tensors()
        if any(values[i].ndim < max(t.ndim for t in values) for i in c.rows):
            raise c.refuse("rows with the most dimensions", f"{[t.ndim for t in values]}")
        if len(values) < least:
            return values[0].clone()
        return reduce(function, values)

    return made


def _divided(a: Any, b: Any) -> Any:
    return a / b if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


def _larger(function: Callable[[Any, Any], Any], sign: int) -> Callable[[Call], Any]:
    """The maximum (sign 1) or minimum (-1) of the operands; of a value and a constant, by a ReLU."""

    def made(c: Call) -> Any:
        values = [(c.tensors()[i], i in c.moving) for i in range(len(c.operands))]
        (found, moves), *rest = sorted(values, key=lambda pair: not pair[1])
        for value, moving in rest:
            found = sign * F.relu(sign * (found - value)) + value if moves and not moving else function(found, value)
        return found

    return made


def _power(c: Call) -> Any:
    if not c.moving:
        return torch.pow(c.x, c.needed(1)).to(c.x.dtype)
    exponent = c.numbers("", 1)
    if 0 not in c.moving or exponent not in (1, 2, 3):
        raise c.refuse("the first, second or third power", f"{exponent}")
    return reduce(torch.mul, [c.x] * int(exponent))


def _equal(c: Call) -> Any:
    a, b = c.operands
    # The batch size may be any number above 0: only a comparison with 0 or less has a known result.
    if (((a == BATCH) & (b > 0)) | ((b == BATCH) & (a > 0))).any():
        raise c.refuse("no comparison with the size of the batch", "one")
    return a == b


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Call], Any]:
    return lambda c: function(c.x)


def _cast(c: Call) -> Any:
    to = _DTYPES.get(c.get("to", 0))
    if c.moving and to == c.dtype:
        return nn.Identity()
    if c.moving or to is None or (c.sized and to not in (torch.int32, torch.int64, torch.float32, torch.float64)):
        raise c.refuse(f"the format {c.dtype} of the network", f"{to}")
    return c.operands[0].to(to)


def _reduced(name: str) -> Callable[[Call], Any]:
    def made(c: Call) -> Any:
        axes, keep, none = c.axes(), bool(c.get("keepdims", 1)), bool(c.get("noop_with_empty_axes", 0))
        if not axes and (c.moving or none):
            raise c.refuse("axes other than the batch", "none")
        axes = axes or list(range(c.rank))
        if name == "prod":  # of one axis at a time
            return reduce(lambda y, axis: y.prod(axis, keepdim=keep), reversed(axes), c.x)
        return getattr(c.x, name)(axes, keepdim=keep)

    return made


# The same numbers in another order.


def _shape(c: Call) -> Tensor:
    if any(n != BATCH and n % BATCH == 0 and n for n in c.operands[0].shape):
        raise c.refuse("no size made from that of the batch", "one")
    sizes = torch.tensor(list(c.operands[0].shape), dtype=torch.int64)
    return sizes[c.get("start", 0) : c.get("end", None)]


def _flatten(c: Call) -> Any:
    axis = c.get("axis", 1)
    axis = c.rank if axis == c.rank else c.axis(axis)
    if axis == 1:
        return nn.Flatten(1)
    sizes = [c.x.size(i) for i in range(c.rank)]
    if c.moving and (axis == 0 or math.prod(sizes[1:axis]) != 1):
        raise c.refuse("axis 1", f"{axis}")
    return c.x.reshape([sizes[0] if c.moving else math.prod(sizes[:axis]), math.prod(sizes[axis:])])


def _reshape(c: Call) -> Any:
    x, sizes, zero = c.moved, c.numbers("shape", 1, batch=True), c.get("allowzero", 0)
    if not isinstance(sizes, list) or sizes.count(-1) > 1 or (zero and 0 in sizes):
        raise c.refuse("a shape with one size -1 at most, and 0 as a copy", f"{sizes}")
    if not c.moving:
        return x.reshape([x.size(i) if n == 0 else n for i, n in enumerate(sizes)])
    # A first size of 1 comes from files that were made for one sample.
    batch = {BATCH, 1} if c.one else {BATCH}
    own = {0: lambda i: x.size(i), **dict.fromkeys(batch, lambda i: c.source.size(0))}
    return x.reshape([own[n](i) if n in own and (n != 1 or not i) else n for i, n in enumerate(sizes)])


def _expand(c: Call) -> Any:
    x, sizes = c.moved, c.numbers("shape", 1, batch=True)
    if BATCH in sizes[1:] or (c.moving and len(sizes) > c.rank):
        raise c.refuse("the batch as the first size", f"{sizes}")
    if c.moving:
        sizes = [1] * (c.rank - len(sizes)) + sizes
        if sizes[0] not in (1, BATCH):
            raise c.refuse("a shape that keeps the batch first", f"{sizes}")
        # torch refuses sizes that cannot come from repeating.
        return x.expand([-1, *(x.size(i) if n == 1 else n for i, n in enumerate(sizes) if i)])
    # Keep one row for the whole batch.
    rows = [1 if n == BATCH else n for n in sizes]
    if BATCH in sizes and x.ndim == len(sizes) and len(x) != 1:
        raise c.refuse("one row for each sample", f"{len(x)}")
    return x.expand(torch.broadcast_shapes(x.shape, rows)).clone()


def _filled_shape(c: Call) -> Tensor:
    sizes = c.numbers("shape", 0, batch=True)
    if BATCH in sizes[1:]:
        raise c.refuse("the batch as the first size", f"{sizes}")
    value = c.get("value", torch.zeros(1))
    return torch.full([1 if n == BATCH else n for n in sizes], value.reshape(()).item(), dtype=value.dtype)


def _copied(x: Any, axis: int, before: int, after: int, mode: str) -> Any:
    """``x`` padded along an axis with copies of its entries: ``replicate``, ``reflect`` or ``circular``."""
    n = x.size(axis)
    if max(before, after) > min(n - (mode == "reflect"), 256):
        raise ValueError(f"{before} and {after} entries of {n} copied around them")
    from_ = [*range(-before, 0), *range(n, n + after)]
    if mode == "replicate":
        from_ = [min(max(i, 0), n - 1) for i in from_]
    else:
        from_ = [i % n if mode == "circular" else abs(i) if i < n else 2 * (n - 1) - i for i in from_]
    parts = [x[(slice(None),) * axis + (slice(i, i + 1),)] for i in from_]
    return torch.cat([*parts[:before], x, *parts[before:]], axis) if parts else x


BORDERS = {b"wrap": "circular", b"reflect": "reflect", b"edge": "replicate"}


def pads_of(c: Call) -> tuple[list[int], list[int]]:
    """Numbers of padded entries before and after each axis."""
    sizes, axes = list(c.numbers("pads", 1)), c.numbers("axes", 3)
    places = range(c.rank) if axes is None else [c.axis(axis) for axis in axes]
    if len(sizes) != 2 * len(places) or len(set(places)) != len(places):
        raise c.refuse("two paddings of each axis", f"{sizes} of {list(places)}")
    before, after = (
        [dict(zip(places, part, strict=True)).get(i, 0) for i in range(c.rank)]
        for part in (sizes[: len(places)], sizes[len(places) :])
    )
    return before, after


def _pad(c: Call) -> Any:
    value, kind = c.numbers("value", 2), c.get("mode", b"constant")
    before, after = pads_of(c)
    if (c.moving and (before[0] or after[0])) or (
        kind != b"constant" and (kind not in BORDERS or min(*before, *after) < 0)
    ):
        raise c.refuse("padding that leaves the batch alone", f"{before}, {after}, {kind!r}")
    if kind == b"constant":
        if value not in (None, 0, [], [0]):
            raise c.refuse("zeros around all dimensions", f"{value}")
        first = 1 if c.moving else 0
        return F.pad(c.x, _around(before[first:], after[first:]))
    x = c.x
    for axis in range(1, c.rank):
        x = _copied(x, axis, before[axis], after[axis], BORDERS[kind])
    return x


def _slice(c: Call) -> Any:
    starts, ends, axes, steps = (c.numbers(name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1))
    index: dict[int, slice] = {}
    for axis, *part in zip(axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True):
        place = c.axis(axis)
        if part[2] < 1 or place in index:
            raise c.refuse("steps from 1 on, each axis once", f"steps {steps}, axes {axes}")
        # A full slice lets tracing see that the whole batch is kept.
        index[place] = slice(None) if part[0] == 0 and part[1] >= 2**31 - 1 and part[2] == 1 else slice(*part)
    return c.moved[tuple(index.get(place, slice(None)) for place in range(c.rank))]


def _gather(c: Call) -> Any:
    axis, x = c.axis(c.get("axis", 0)), c.moved
    if not c.moving:
        n, which = x.shape[axis], c.tensor(1)
        if which.numel() and not -n <= int(which.min()) <= int(which.max()) < n:
            raise c.refuse(f"entries of {n}", f"{which.tolist()}")
        flat = x.index_select(axis, (which % max(n, 1)).long().flatten())
        return flat.reshape((*x.shape[:axis], *which.shape, *x.shape[axis + 1 :]))
    if axis == 0:
        raise c.refuse("entries of another axis than the batch", "0")
    n, places = x.size(axis), c.numbers("indices", 1)
    single = isinstance(places, int)
    wanted = [places] if single else places
    if not wanted or not all(isinstance(i, int) and -n <= i < n for i in wanted):
        raise c.refuse(f"a row of entries of {n}", f"{places}")
    wanted = [i % n for i in wanted]
    if single:
        return x[(slice(None),) * axis + (wanted[0],)]
    step = wanted[1] - wanted[0] if len(wanted) > 1 else 1
    if step > 0 and wanted == list(range(wanted[0], wanted[-1] + 1, step)):
        return x[(slice(None),) * axis + (slice(wanted[0], wanted[-1] + 1, step),)]
    # As a product, because its norm is that of the most copies of one entry.
    matrix = torch.zeros(n, len(wanted), dtype=c.dtype)
    matrix[wanted, list(range(len(wanted)))] = 1
    return torch.matmul(x.transpose(axis, -1), matrix).transpose(axis, -1)


def _split(c: Call) -> Any:
    axis, count, sizes = c.axis(c.get("axis", 0)), len(c.node.output), c.numbers("split", 1)
    if c.get("num_outputs", count) != count or (sizes is not None and len(sizes) != count):
        raise c.refuse(f"sizes of {count} outputs", f"{sizes}")
    x = c.moved
    # torch refuses sizes that do not add up.
    parts = x.split(sizes or [x.size(axis) // count] * count, axis)
    return [parts[i] for i in range(count)]


def _squeeze(c: Call) -> Any:
    axes = c.axes()
    if not axes and c.moving:
        raise c.refuse("axes, each once", f"{axes}")
    x = c.moved
    if not axes:
        return x.squeeze()
    # torch's squeeze keeps sizes other than 1; this reshape refuses them.
    return x.reshape([x.size(axis) for axis in range(c.rank) if axis not in axes])


def _concat(c: Call) -> Any:
    axis = c.axis(c.get("axis", 1), max(t.ndim for t in c.operands))
    if not c.moving or len(c.moving) == len(c.operands):
        c.read.update(range(len(c.operands)))
        return torch.cat(list(c.operands), axis)
    values, places = c.tensors(), sorted(c.moving)
    if axis == 0 or places != list(range(places[0], places[-1] + 1)):
        raise c.refuse("constants before or behind values, along another axis than the batch", f"axis {axis}")
    if any(len(t) != 1 or not (c.one or i in c.rows) for i, t in enumerate(values) if i not in c.moving):
        raise c.refuse("one row for each sample", f"{[tuple(t.shape) for t in values]}")
    # Zeros, to which the constants are added.
    sizes = [t.size(axis) for t in values]
    first, last = places[0], places[-1] + 1
    x = torch.cat(values[first:last], axis) if last > first + 1 else values[first]
    blank = [0, 0] * (x.ndim - 1 - axis)
    around = [*blank, sum(sizes[:first]), sum(sizes[last:])]
    shapes = [[1, *(t.size(i) for i in range(1, t.ndim))] for t in values]
    filled = [torch.zeros(shapes[i], dtype=c.dtype) if i in c.moving else t for i, t in enumerate(values)]
    return F.pad(x, around) + torch.cat(filled, axis)


def _enlarge(c: Call) -> nn.Module:
    """Upsampling by whole factors, nearest or bilinear; only coordinate modes on which all runtimes agree."""
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
    whole = (
        c.rank == 4 and len(scales or ()) == 4 and scales[:2] == [1, 1] and all(s >= 1 and s % 1 == 0 for s in scales)
    )
    if not whole or not (near or (mode == "linear" and place == "half_pixel")) or c.get("antialias", 0):
        raise c.refuse("images enlarged by whole numbers, nearest or linear", f"{mode}, {place}, {rounds}, {scales}")
    return (Enlarge if near else EnlargeBilinear)(int(scales[2]), int(scales[3]))


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


def _gates() -> Iterator[tuple[Any, Callable[[], nn.Module]]]:
    """Pairs of a pattern and a module: activations that older files write out as nested (operator, operands) in x."""
    exact: Any = [("Erf", ("Div", "x", math.sqrt(2))), ("Erf", ("Mul", "x", math.sqrt(0.5)))]
    cubic = ("Add", "x", ("Mul", 0.044715, ("Pow", "x", 3.0)))
    for inner, kind in (*((e, "none") for e in exact), (("Tanh", ("Mul", math.sqrt(2 / math.pi), cubic)), "tanh")):
        gate = ("Add", 1.0, inner)
        for one, two, three in (("x", 0.5, gate), (0.5, "x", gate), (gate, 0.5, "x")):
            yield ("Mul", one, ("Mul", two, three)), partial(nn.GELU, kind)
    clipped: Any = ("Clip", ("Add", "x", 3.0), 0.0, 6.0)
    hard: Any = [("HardSigmoid", "x", {"alpha": 1 / 6, "beta": 0.5}), ("Div", clipped, 6.0), ("Mul", clipped, 1 / 6)]
    for whole in (*(("Mul", "x", h) for h in hard), ("Div", ("Mul", "x", clipped), 6.0)):
        yield whole, nn.Hardswish
    yield ("Mul", "x", ("Sigmoid", "x")), nn.SiLU
    yield ("Mul", "x", ("Tanh", ("Softplus", "x"))), nn.Mish
    yield ("Log", ("Sigmoid", "x")), nn.LogSigmoid
    yield ("Sub", "x", ("Tanh", "x")), nn.Tanhshrink
    yield ("Div", "x", ("Add", 1.0, ("Abs", "x"))), nn.Softsign
    yield ("Where", ("Greater", "x", 20.0), "x", ("Softplus", "x")), nn.Softplus


# Versions above these are unknown; below version 7 operators have other meanings.
OPERATORS: dict[str, Row] = {
    "Ceil": Row(_each(torch.ceil), (6, 13), moves=False),
    "Cos": Row(_each(torch.cos), (7, 22), moves=False),
    "Erf": Row(_each(torch.erf), (9, 13), moves=False),
    "Exp": Row(_each(torch.exp), (6, 13), moves=False),
    "Floor": Row(_each(torch.floor), (6, 13), moves=False),
    "Log": Row(_each(torch.log), (6, 13), moves=False),
    "Not": Row(_each(torch.logical_not), (1,), moves=False),
    "Reciprocal": Row(_each(torch.reciprocal), (6, 13), moves=False),
    "Sin": Row(_each(torch.sin), (7, 22), moves=False),
    "Sqrt": Row(_each(torch.sqrt), (6, 13), moves=False),
    "And": Row(_elementwise(torch.logical_and), (7,), moves=False),
    "Greater": Row(_elementwise(torch.gt), (7, 9, 13), moves=False),
    "Less": Row(_elementwise(torch.lt), (7, 9, 13), moves=False),
    "Abs": Row(activation(lambda: nn.LeakyReLU(-1.0)), (6, 13)),
    "Add": Row(_elementwise(operator.add), (7, 13, 14), rowwise=True),
    "AveragePool": Row(_pool(_average_pool), (7, 10, 11, 19, 22)),
    "BatchNormalization": Row(_batch_norm, (7, 9, 14, 15)),
    "Cast": Row(_cast, (6, 9, 13, 19, 21, 23, 24, 25, 28), copies=True, rowwise=True),
    "Celu": Row(activation(nn.CELU, alpha=("alpha", 1.0)), (12, 28)),
    "Clip": Row(_clip, (6, 11, 12, 13)),
    "Concat": Row(_concat, (4, 11, 13), copies=True, rowwise=True),
    "Constant": Row(_constant, (1, 9, 11, 12, 13, 19, 21, 23, 24, 25)),
    "ConstantOfShape": Row(_filled_shape, (9, 20, 21, 23, 24, 25), copies=True),
    "Conv": Row(_conv, (1, 11, 22)),
    "ConvTranspose": Row(_conv_transpose, (1, 11, 22)),
    "DepthToSpace": Row(_depth_to_space, (1, 11, 13, 28)),
    "Div": Row(_elementwise(_divided), (7, 13, 14), rowwise=True),
    "Dropout": Row(_only(activation(nn.Identity), lambda c: not (c.has(2) and c.numbers("", 2))), (7, 10, 12, 13, 22)),
    "Elu": Row(activation(nn.ELU, alpha=("alpha", 1.0)), (6, 22)),
    "Equal": Row(_equal, (7, 11, 13, 19), moves=False, copies=True),
    "Expand": Row(_expand, (8, 13), copies=True, rowwise=True),
    "Flatten": Row(_flatten, (1, 9, 11, 13, 21, 23, 24, 25)),
    "Gather": Row(_gather, (1, 11, 13), copies=True),
    "Gelu": Row(lambda c: nn.GELU(c.get("approximate", b"none").decode()), (20,)),
    "Gemm": Row(_gemm, (7, 9, 11, 13)),
    "GlobalAveragePool": Row(
        lambda c: nn.AdaptiveAvgPool2d(1) if c.rank == 4 else c.x.mean(list(range(2, c.rank)), keepdim=True), (1, 22)
    ),
    "GroupNormalization": Row(
        _normalised(lambda c, _, eps: nn.GroupNorm(c.get("num_groups", 1), c.x.size(1), eps, device="meta")), (18, 21)
    ),
    "HardSigmoid": Row(_hard_sigmoid, (6, 22)),
    "HardSwish": Row(activation(nn.Hardswish), (14, 22)),
    "Identity": Row(activation(nn.Identity), (1, 13, 14, 16, 19, 21, 23, 24, 25), copies=True, rowwise=True),
    "InstanceNormalization": Row(_normalised(_instance_norm), (6, 22)),
    "LayerNormalization": Row(_normalised(_layer_norm), (17,)),
    "LeakyRelu": Row(activation(nn.LeakyReLU, negative_slope=("alpha", 0.01)), (6, 16)),
    "MatMul": Row(_matmul, (1, 9, 13)),
    "Max": Row(_larger(torch.maximum, 1), (6, 8, 12, 13)),
    "MaxPool": Row(_pool(_max_pool), (1, 8, 10, 11, 12, 22)),
    "Min": Row(_larger(torch.minimum, -1), (6, 8, 12, 13)),
    "Mish": Row(activation(nn.Mish), (18, 22)),
    "Mul": Row(_elementwise(operator.mul), (7, 13, 14), rowwise=True),
    "Neg": Row(_each(operator.neg), (6, 13)),
    "PRelu": Row(_prelu, (7, 9, 16)),
    "Pad": Row(_pad, (2, 11, 13, 18, 19, 21, 23, 24, 25)),
    "Pow": Row(_power, (7, 12, 13, 15)),
    "ReduceMax": Row(_reduced("amax"), (1, 11, 12, 13, 18, 20), moves=False),
    "ReduceMean": Row(_reduced("mean"), (1, 11, 13, 18)),
    "ReduceProd": Row(_reduced("prod"), (1, 11, 13, 18), moves=False),
    "ReduceSum": Row(_reduced("sum"), (1, 11, 13)),
    "Relu": Row(activation(nn.ReLU), (6, 13, 14)),
    "Reshape": Row(_reshape, (5, 13, 14, 19, 21, 23, 24, 25), copies=True),
    "Resize": Row(_enlarge, (10, 11, 13, 18, 19)),
    "Selu": Row(_selu, (6, 22)),
    "Shape": Row(_shape, (1, 13, 15, 19, 21, 23, 24, 25), copies=True),
    # With another bias, it jumps.
    "Shrink": Row(
        _only(activation(nn.Softshrink, lambd=("lambd", 0.5)), lambda c: c.get("bias", 0.0) == c.get("lambd", 0.5)),
        (9,),
    ),
    "Sigmoid": Row(activation(nn.Sigmoid), (6, 13)),
    "Slice": Row(_slice, (1, 10, 11, 13), copies=True),
    "Softmax": Row(_softmax, (1, 11, 13)),
    "Softplus": Row(activation(nn.Softplus), (1, 22)),
    "Softsign": Row(activation(nn.Softsign), (1, 22)),
    "Split": Row(_split, (2, 11, 13, 18), copies=True),
    "Squeeze": Row(_squeeze, (1, 11, 13, 21, 23, 24, 25), copies=True),
    "Sub": Row(_elementwise(operator.sub), (7, 13, 14), rowwise=True),
    "Sum": Row(_elementwise(operator.add, 1), (6, 8, 13), rowwise=True),
    "Swish": Row(_only(activation(nn.SiLU), lambda c: c.get("alpha", 1.0) == 1), (24,)),
    "Tanh": Row(activation(nn.Tanh), (6, 13)),
    "Tile": Row(lambda c: c.x.tile(c.numbers("repeats", 1)), (6, 13), moves=False),
    "Transpose": Row(
        lambda c: c.moved.permute(list(c.get("perm", range(c.rank)[::-1]))), (1, 13, 21, 23, 24, 25), copies=True
    ),
    "Unsqueeze": Row(
        lambda c: reduce(lambda x, axis: x.unsqueeze(axis), c.axes(more=1), c.moved),
        (1, 11, 13, 21, 23, 24, 25),
        copies=True,
    ),
    "Upsample": Row(_enlarge, (7, 9, 10)),
    "Where": Row(lambda c: torch.where(*c.operands), (9, 16), moves=False, copies=True),
}

GATES = tuple(_gates())
ENDS = {pattern[0] for pattern, _ in GATES}
