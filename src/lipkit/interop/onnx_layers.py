"""A node of an ONNX file with its operands, and the operators that have weights or windows: layers of torch.

A rule returns a module, to be applied to the first operand, or the result of functions of torch. It is called with
stored operands to evaluate a node, with meta tensors to find sizes, and with symbols to be traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.lowering.functional import batch_norm, convolution, filled
from lipkit.modules.dense import linear
from lipkit.modules.views import Pad

# As TensorProto numbers them.
FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
DTYPES = {2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool, **FLOATS}
# Attributes without effect at inference with one output, or that belong to refused options.
_HARMLESS = ("broadcast", "momentum", "ratio", "seed", "storage_order", "cubic_coeff_a", "saturate", "exclude_outside",
             "extrapolation_value", "round_mode")  # fmt: skip
OLDEST, NEWEST = 6, 28
"""The versions of ONNX between which the rules know all definitions of their operators."""
BATCH = 2**23 - 15
"""The batch size while a file is read. No stored number equals it, so a number that does was copied from a shape.
Numbers computed from it cannot be recognised; they are refused."""


def holds_batch(tensor: Tensor) -> bool:
    """True if an entry is `BATCH`, which formats of less than four bytes cannot hold."""
    return tensor.dtype.itemsize >= 4 and bool((tensor == BATCH).any())


def _in_words(number: re.Match[str]) -> str:
    """A number of a message, with multiples of `BATCH` in words."""
    times, rest = divmod(int(number[0]), BATCH)
    return number[0] if rest or not times else f"{times} * batch" if times > 1 else "batch"


class Node(NamedTuple):
    """An operator of ONNX, or several operators of the file read as one."""

    kind: str
    input: list[str]
    output: list[str]
    name: str
    attributes: dict[str, Any]
    rule: Any  # makes the module of a `Call`, or the values it computes; None for an operator without a rule


@dataclass
class Call:
    """One node and its operands."""

    node: Node
    opset: int  # version of the operators
    one: bool  # the file is for one sample, so that a first size of 1 is the batch
    dtype: torch.dtype  # of the network
    alone: bool  # the values of the network lack the batch in the file; here it is put first
    moving: frozenset[int]  # indices of operands that depend on the input
    sized: frozenset[int]  # indices of operands that hold the batch size as a number
    operands: list[Any]  # stored tensors, and values of the network or their sizes
    source: Any  # the input of the network
    used: set[str] = field(default_factory=lambda: set(_HARMLESS))  # attributes that the rule read
    read: set[int] = field(default_factory=set)  # operands that it computed with
    leaves: bool | None = None  # the results lack the batch in the file; None: as the operands do

    def on(self, operands: list[Any], source: Any) -> Call:
        """A copy of this call with other operands."""
        return replace(self, operands=operands, source=source, used=set(), read=set())

    def refuse(self, expected: str, got: str) -> NoRuleError:
        """The error to raise for a call that no rule covers."""
        got = re.sub(r"\d{7,}", _in_words, got)
        return NoRuleError(f"{self.node.name}: {self.node.kind}: expected {expected}, got {got}")

    def has(self, index: int) -> bool:
        """True if an operand is given."""
        return index < len(self.operands) and self.operands[index] is not None

    def tensor(self, index: int) -> Any:
        """Operand ``index``, for computations: refused if it is missing or depends on the batch size."""
        if not self.has(index):
            raise self.refuse(f"operand {index}", "none")
        if index in self.sized:
            raise self.refuse("no number made from the size of the batch", f"one as operand {index}")
        self.read.add(index)
        return self.operands[index]

    @property
    def x(self) -> Any:
        """The first operand, as :meth:`tensor` returns it."""
        return self.tensor(0)

    @property
    def moved(self) -> Any:
        """The first operand, for rules that only copy its numbers: unlike :meth:`tensor`, it accepts the batch size."""
        self.read.add(0)
        return self.operands[0]

    @property
    def rank(self) -> int:
        return int(self.operands[0].ndim)

    @property
    def sizes(self) -> list[Any]:
        """The sizes of the first operand; in a file for one sample, the batch, which must be first, has the size 1."""
        if not (self.moving and self.one):
            return [self.operands[0].size(i) for i in range(self.rank)]
        behind = [self.operands[0].size(i) for i in range(1, self.rank)]
        if any(n % BATCH == 0 and n for n in behind):
            raise self.refuse("a value with the batch first", f"sizes {list(self.operands[0].shape)}")
        return [1] * (not self.alone) + behind

    def tensors(self) -> list[Any]:
        """All operands; operands of different formats are refused."""
        found = [self.tensor(i) for i in range(len(self.operands))]
        # With values of the network among them, the reader compares the formats.
        formats = set() if self.moving else {t.dtype for t in found}
        if len(formats) > 1:
            raise self.refuse("operands of one format", f"{sorted(map(str, formats))}")
        return found

    def repeated(self, row: Tensor, sizes: Sequence[int]) -> Any:
        """A constant ``row``, repeated for each sample if the first of the wanted ``sizes`` is the batch's."""
        if BATCH not in sizes:
            return row
        if BATCH in sizes[1:] or row.dtype != self.dtype or row.ndim > len(sizes) or len(row) != 1:
            got = f"{tuple(row.shape)} of {row.dtype} for {sizes}"
            raise self.refuse(f"one row of {self.dtype} for each sample, the batch first", got)
        return self.source.new_zeros((self.source.size(0), *row.shape[1:])) + row

    def weight(self, index: int) -> Tensor:
        """An operand that is stored in the file."""
        if index in self.moving:
            raise self.refuse(f"stored weights as operand {index}", "a tensor that is computed")
        found: Tensor = self.tensor(index)
        return found

    @property
    def bias(self) -> Tensor | None:
        return self.weight(2) if self.has(2) else None

    def get(self, name: str, default: Any) -> Any:
        """The value of an attribute, or ``default``."""
        self.used.add(name)
        return self.node.attributes.get(name, default)

    def numbers(self, name: str, index: int, batch: bool = False) -> Any:
        """Numbers that older versions of an operator have as an attribute, and newer ones as an operand; or None."""
        given = self.get(name, None)
        if not self.has(index):
            return given
        if index in self.moving:
            raise self.refuse(f"stored numbers as operand {index}", "a tensor that is computed")
        if index in self.sized and not batch:
            raise self.refuse("no size made from that of the batch", f"one as operand {index}")
        if self.operands[index].numel() > 2**16:  # as a list of Python numbers
            raise self.refuse(f"at most {2**16} numbers as operand {index}", f"{self.operands[index].numel()}")
        return self.operands[index].tolist()

    def axis(self, axis: int, rank: int | None = None) -> int:
        """``axis`` counted from the first dimension, also where the file counts from the last (negative numbers)."""
        rank = (self.rank if rank is None else rank) - self.alone
        # Exporters wrote negative axes before version 11 allowed them; onnxruntime reads them, except in Flatten.
        least = 0 if self.node.kind == "Flatten" and self.opset < 11 else -rank
        if not least <= axis < rank:
            raise self.refuse(f"an axis from {least} to {rank - 1}", f"{axis}")
        return axis % rank + self.alone

    def axes(self, index: int = 1, more: int = 0) -> list[int]:
        """The sorted, distinct ``axes`` (attribute or operand); ``more=1``: they are new dimensions of the result."""
        given = self.numbers("axes", index) or []
        rank = self.rank + more * len(given)
        found = sorted({self.axis(axis, rank) for axis in given})
        if len(found) < len(given):
            raise self.refuse("axes, each once", f"{given}")
        return found

    def window(self, kernel: Sequence[int] = ()) -> Window:
        """The window of a convolution whose weight has this ``kernel``, or of a pool."""
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
            before, after = (less, more) if auto == b"SAME_UPPER" else (more, less)  # UPPER: one more behind if odd
        elif auto not in (b"NOTSET", b"VALID"):
            raise self.refuse("auto_pad of ONNX", f"{auto!r}")
        if min(*before, *after, 0) < 0:
            raise self.refuse("paddings from 0 on", f"{pads}")
        return Window(shape, strides, dilations, before, after)


class Window(NamedTuple):
    """A window: by axis its size, stride and dilation, and the paddings before and after."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    @property
    def even(self) -> bool:
        """True if the padding is the same before and after, as torch's layers need."""
        return self.before == self.after

    @property
    def around(self) -> list[int]:
        return around(self.before, self.after)

    def convolution(self, kind: str, weight: Tensor, bias: Tensor | None, **options: Any) -> nn.Module:
        """The convolution of ``kind`` Conv or ConvTranspose by this window."""
        make = getattr(nn, f"{kind}{len(self.kernel)}d")
        return convolution(make, weight, bias, stride=tuple(self.strides), dilation=tuple(self.dilations), **options)


def around(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Paddings as torch has them: before and after the last axis, the one before it, and so on."""
    return [n for pair in zip(before[::-1], after[::-1], strict=True) for n in pair]


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
    weight, bias = c.weight(1), c.bias
    groups, window = int(c.get("group", 1)), c.window(tuple(weight.shape[2:]))
    mode, *border = c.get("border", ("zeros",))
    if border:
        window = window._replace(before=border[0][2:], after=border[1][2:])
    padding = tuple(window.before) if window.even else "same" if border else 0
    conv = window.convolution("Conv", weight, bias, padding=padding, padding_mode=mode, groups=groups)
    return conv if window.even or border else nn.Sequential(Pad(*window.around), conv)


def _conv_transpose(c: Call) -> nn.Module:
    weight, bias = c.weight(1), c.bias
    window = c.window(tuple(weight.shape[2:]))
    groups, extra = int(c.get("group", 1)), list(c.get("output_padding", [0] * len(window.kernel)))
    if "output_shape" in c.node.attributes or c.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise c.refuse("explicit padding and no output_shape", f"{c.node.attributes}")
    if any(n >= stride for n, stride in zip(extra, window.strides, strict=True)):
        raise c.refuse(f"output_padding below the strides {window.strides}", f"{extra}")
    options: dict[str, Any] = {"padding": tuple(window.before) if window.even else 0, "output_padding": tuple(extra)}
    conv = window.convolution("ConvTranspose", weight, bias, groups=groups, **options)
    return conv if window.even else nn.Sequential(conv, Pad(*(-n for n in window.around)))  # padding crops the output


def _gemm(c: Call) -> nn.Module:
    weight, bias = c.weight(1), c.bias
    if c.get("transA", 0) or c.rank != 2:
        raise c.refuse("samples times a matrix", f"transA={c.get('transA', 0)}, {c.rank} dimensions")
    weight = weight if c.get("transB", 0) else weight.mT
    if (alpha := float(c.get("alpha", 1.0))) != 1:
        weight = alpha * weight
    beta = float(c.get("beta", 1.0))
    if bias is not None:
        flat = bias.squeeze(0) if bias.ndim == 2 else bias  # ONNX broadcasts a row
        bias = (beta * flat).expand(len(weight)).contiguous()
    return linear(weight, bias)


def _matmul(c: Call) -> Any:
    a, b = c.tensors()
    stored = [t.ndim for i, t in enumerate((a, b)) if i not in c.moving]
    if c.alone and (stored[0] > 2 if stored else a.ndim != b.ndim):  # torch would take the batch for another dimension
        raise c.refuse("an input with the batch first, or matrices", f"operands of {[a.ndim, b.ndim]} dimensions")
    if turned := c.alone and c.moving == {1} and b.ndim == 2:
        a, b = b, a.mT if a.ndim == 2 else a
    if b.ndim == 1 and (turned or c.moving == {0}):
        return torch.matmul(a, b[:, None]).squeeze(-1)
    if c.moving and min(a.ndim, b.ndim) < 2:
        raise c.refuse("matrices", f"operands of {[a.ndim, b.ndim]} dimensions")
    if c.moving != {0} or b.ndim != 2:
        return torch.matmul(a, b)
    return linear(b.T)


def _batch_norm(c: Call) -> nn.Module:
    training = c.get("training_mode", 0) or (c.opset < 7 and not c.get("is_test", 0))
    if training or c.get("spatial", 1) != 1:
        raise c.refuse("training_mode 0 and spatial 1", f"{training} and {c.get('spatial', 1)}")
    scale, shift, mean, var = (c.weight(i) for i in (1, 2, 3, 4))
    return batch_norm(tuple(c.x.shape[1:]), mean, var, scale, shift, float(c.get("epsilon", 1e-5)))


def _normalised(make: Callable[[Call, Tensor, float], nn.Module], c: Call) -> nn.Module:
    scale = c.weight(1)
    if c.get("stash_type", 1) != 1:
        raise c.refuse("stash_type 1", f"{c.get('stash_type', 1)}")
    return filled(make(c, scale, float(c.get("epsilon", 1e-5))), weight=scale, bias=c.bias)


def _layer_norm(c: Call, scale: Tensor, epsilon: float) -> nn.Module:
    if (axis := c.axis(c.get("axis", -1))) != c.rank - scale.ndim:
        raise c.refuse("a scale of the normalised dimensions", f"axis {axis} and scale {tuple(scale.shape)}")
    return nn.LayerNorm(tuple(scale.shape), epsilon, device="meta")


# Pools.


def _pooled(c: Call) -> tuple[Any, Window, bool]:
    """The pooled value, the window, and True if ceil_mode adds one: only where the windows do not fit the image."""
    x, window = c.x, c.window()
    reach = zip(range(2, c.rank), *window, strict=True)
    over = any((x.size(i) + p + q - d * (k - 1) - 1) % s for i, k, s, d, p, q in reach)
    return x, window, bool(c.get("ceil_mode", 0)) and over


def _max_pool(c: Call) -> Any:
    x, window, up = _pooled(c)
    pool, (kernel, strides, dilations, before, after) = getattr(F, f"max_pool{c.rank - 2}d"), window
    # Runtimes disagree about windows that reach over the end, or hold nothing but padding.
    padded = any(before) or any(after)
    if (up and any(s > k for s, k in zip(strides, kernel, strict=True))) or (padded and (up or max(dilations) > 1)):
        got = f"{kernel}, {strides}, {dilations}, {before}, {after}"
        raise c.refuse("overlapping windows with ceil_mode 1, and no pads beside it or dilations", got)
    if window.even:
        return pool(x, kernel, strides, before, dilations, up)
    if any(p >= k for p, k in zip([*before, *after], kernel * 2, strict=True)):
        raise c.refuse("paddings below the size of the window", f"{kernel}, {before}, {after}")
    # A window that reaches beyond the border holds the pixel at the border, so copies of it change no maximum.
    for axis in range(2, c.rank):
        x = copied(x, axis, before[axis - 2], after[axis - 2], "edge")
    return pool(x, kernel, strides)


def _average_pool(c: Call) -> Any:
    x, window, up = _pooled(c)
    pool, (kernel, strides, dilations, before, after) = getattr(F, f"avg_pool{c.rank - 2}d"), window
    if max(dilations) > 1 or up or any(p >= k for p, k in zip([*before, *after], kernel * 2, strict=True)):
        got = f"{dilations}, {up}, {before}, {after}"
        raise c.refuse("dilations 1, windows that fit or ceil_mode 0, and paddings below the window", got)
    counted = bool(c.get("count_include_pad", 0))
    if window.even:
        return pool(x, kernel, strides, before, False, counted)
    y = pool(F.pad(x, window.around), kernel, strides)
    if counted:
        return y
    inside = F.pad(torch.ones(1, 1, *(x.size(i) for i in range(2, c.rank)), dtype=c.dtype), window.around)
    return y * (1 / pool(inside, kernel, strides))  # divided by the part of each window inside the image


def copied(x: Any, axis: int, before: int, after: int, mode: str) -> Any:
    """``x`` padded along an axis with copies of its entries, by numpy's modes ``edge``, ``reflect`` and ``wrap``."""
    n = x.size(axis)
    if max(before, after) > min(n - (mode == "reflect"), 256):
        raise ValueError(f"{before} and {after} entries of {n} copied around them")
    order = np.pad(np.arange(n), (before, after), mode).tolist()  # type: ignore[call-overload]
    first, last = ([x.narrow(axis, i, 1) for i in part] for part in (order[:before], order[before + n :]))
    return torch.cat([*first, x, *last], axis) if first or last else x


LAYERS: dict[str, Callable[[Call], Any]] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda c: (
        nn.AdaptiveAvgPool2d(1) if c.rank == 4 else c.x.mean(list(range(2, c.rank)), keepdim=True)
    ),
    "GlobalMaxPool": lambda c: (nn.AdaptiveMaxPool1d if c.rank == 3 else nn.AdaptiveMaxPool2d)(1),
    "GroupNormalization": partial(
        _normalised, lambda c, w, eps: nn.GroupNorm(c.get("num_groups", 1), c.x.size(1), eps, device="meta")
    ),
    "InstanceNormalization": partial(
        _normalised,
        lambda c, w, eps: nn.GroupNorm(len(w), len(w), eps, device="meta"),  # a group for each channel
    ),
    "LayerNormalization": partial(_normalised, _layer_norm),
    "MatMul": _matmul,
    "MaxPool": _max_pool,
}
