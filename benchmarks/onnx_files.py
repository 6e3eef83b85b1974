"""Claim: a network read from an ONNX file computes what onnxruntime computes from that file, at every batch.

    python benchmarks/onnx_files.py --files 5000      # stops at a wrong one and keeps it
    python benchmarks/onnx_files.py --only 417        # one draw again

Each draw writes one file from its own seed: operators that the reader knows, in their forms of opsets 7 to 22, odd
attributes, names and stored values, other domains, functions of the file. `load_onnx` may refuse it with a sentence of
lipkit; what it reads is compared with onnxruntime at batches of 1, 2 and 5. Where onnxruntime refuses the file, ONNX's
reference evaluator decides; where that refuses it too, so must the reader.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

from lipkit.errors import LipkitError
from lipkit.interop import load_onnx

BATCHES = (1, 2, 5)
OPSETS = range(7, 23)
# Before, the reference evaluator takes Softmax and BatchNormalization for those of later versions.
FAITHFUL = 15
NAMES = ("a.b", "a_b", "x:0", "stored 1", "/layer/Relu_output_0", "0", "é")
Shape = tuple[Any, ...]  # "b" stands for the batch


class Failure(AssertionError):
    """A file that is read as another function, or that breaks the reader."""


class Draft:
    """The file as it grows."""

    def __init__(self, seed: int) -> None:
        self.draw, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.opset = self.draw.choice(OPSETS)
        self.dtype = np.float64 if self.opset >= FAITHFUL and self.draw.random() < 0.1 else np.float32
        self.nodes: list[Any] = []
        self.stored: dict[str, Any] = {}
        self.functions: list[Any] = []
        self.names = 0

    def name(self) -> str:
        self.names += 1
        odd = self.draw.choice(NAMES) if self.draw.random() < 0.1 else ""
        return (
            odd if odd and odd not in self.stored and all(odd not in n.output for n in self.nodes) else f"v{self.names}"
        )

    def odd(self, share: float = 0.06) -> bool:
        return self.draw.random() < share

    def node(self, kind: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> Any:
        made: list[str] = []
        for _ in range(outputs):
            made.append(next(n for n in iter(self.name, None) if n not in made))
        named = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(kind, list(inputs), made, name=self.draw.choice(("", made[0])), **named))
        return made[0] if outputs == 1 else made

    def keep(self, array: Any) -> str:
        """A stored tensor: an initializer, a Constant, or another name of one."""
        array, name = np.asarray(array), self.name()
        if self.draw.random() < 0.25:
            return str(self.node("Constant", [], value=onnx.numpy_helper.from_array(array)))
        self.stored[name] = array
        return str(self.node("Identity", [name])) if self.odd() else name

    def weights(self, *shape: int) -> str:
        return self.keep(
            (self.numbers.uniform(0.3, 1.5, shape) * self.numbers.choice([-1, 1], shape)).astype(self.dtype)
        )

    def formed(self, kind: str, x: str, since: int, given: dict[str, Any], outputs: int = 1, **more: Any) -> Any:
        """An operator whose attributes became operands; now and then in the form of other versions."""
        if (self.opset >= since) != self.odd(0.03):
            operands = ["" if value is None else self.keep(np.array(value)) for value in given.values()]
            while operands and not operands[-1]:
                operands.pop()
            return self.node(kind, [x, *operands], outputs, **more)
        plain = {
            key: value.item() if isinstance(value, np.generic | np.ndarray) else value for key, value in given.items()
        }
        return self.node(kind, [x], outputs, **plain, **more)


Made = tuple[str, Shape]


def size(s: Any) -> int:
    return 2 if s == "b" else max(int(s), 1)


def signed(d: Draft, axis: int, rank: int) -> int:
    return axis - rank if d.draw.random() < 0.3 else axis


def axis_of(d: Draft, s: Shape) -> int:
    """Seldom the batch."""
    return 0 if len(s) < 2 or d.odd() else d.draw.randrange(1, len(s))


def activation(d: Draft, x: str, s: Shape) -> Made:
    alpha = {"alpha": d.draw.choice((None, 0.3, 1.0, 1.5))}
    kinds: list[tuple[str, int, dict[str, Any]]] = [
        ("Relu", 7, {}), ("Sigmoid", 7, {}), ("Tanh", 7, {}), ("LeakyRelu", 7, alpha), ("Elu", 7, alpha),
        ("HardSwish", 14, {}), ("Mish", 18, {}), ("Gelu", 20, {"approximate": d.draw.choice((None, "none", "tanh"))}),
        ("Softplus", 7, {}), ("Softsign", 7, {}), ("Abs", 7, {}), ("Neg", 7, {}), ("Celu", 12, alpha),
        ("Selu", 7, d.draw.choice(({}, {"alpha": 0.7, "gamma": 1.2}))),
        ("HardSigmoid", 7, d.draw.choice(({}, {"alpha": 1 / 6, "beta": 0.5}, {"alpha": -0.3, "beta": 0.1}))),
        ("Shrink", 9, d.draw.choice(({"lambd": 0.4, "bias": 0.4}, {}, {"lambd": 0.2, "bias": 0.4}))),
        ("Cast", 9, {"to": 11 if (d.dtype == np.float64) != d.odd() else 1}),
    ]  # fmt: skip
    kind, _, attributes = d.draw.choice([k for k in kinds if k[1] <= d.opset or d.odd(0.02)])
    return d.node(kind, [x], **attributes), s


def softmax(d: Draft, x: str, s: Shape) -> Made:
    axis = None if d.draw.random() < 0.4 else signed(d, axis_of(d, s), len(s))
    return d.node("Softmax", [x], axis=axis), s


def clip(d: Draft, x: str, s: Shape) -> Made:
    low, high = d.draw.choice(
        ((0.0, 6.0), (-0.5, 0.7), (0.0, None), (None, 0.5), (-np.inf, 1.0), (0.5, -0.5), (0.2, 0.2))
    )
    cast = (lambda v: v) if d.opset < 11 else (lambda v: None if v is None else np.array(v, d.dtype))
    return d.formed("Clip", x, 11, {"min": cast(low), "max": cast(high)}), s


def dropout(d: Draft, x: str, s: Shape) -> Made:
    if d.opset < 12:
        return d.node("Dropout", [x], ratio=0.3), s
    return d.node("Dropout", [x, *([d.keep(np.float32(0.3))] if d.odd(0.5) else [])], seed=d.draw.choice((None, 3))), s


def prelu(d: Draft, x: str, s: Shape) -> Made:
    c = size(s[1]) if len(s) > 1 else 1
    shape = d.draw.choice(([1], [], [c, *(1 for _ in s[2:])], [1, c, *(1 for _ in s[2:])], [c], [1] * (len(s) + 1)))
    return d.node("PRelu", [x, d.weights(*shape)]), s


def extremum(d: Draft, x: str, s: Shape) -> Made:
    kind = d.draw.choice(("Max", "Min", "Sum"))
    if d.draw.random() < 0.5:
        y, t = activation(d, x, s)
        return d.node(kind, [x, y, d.weights(1)] if d.draw.random() < 0.5 else [x, y]), t
    pair = [x, d.weights(*d.draw.choice(([], [1], [size(s[-1])])))]
    d.draw.shuffle(pair)
    return d.node(kind, pair), s


def written_out(d: Draft, x: str, s: Shape) -> Made:
    """Activations as older files write them, now and then with another number."""
    number = lambda v: d.keep(np.array(v if not d.odd() else v + 0.1, d.dtype))  # noqa: E731
    kind = d.draw.randrange(7)
    if kind == 0:
        gate = d.node("HardSigmoid", [x], alpha=1 / 6, beta=d.draw.choice((None, 0.5, 0.5, 0.4)))
        return d.node("Mul", [x, gate]), s
    if kind == 1 and d.opset >= 11:
        clipped = d.node("Clip", [d.node("Add", [x, number(3.0)]), number(0.0), number(6.0)])
        if d.draw.random() < 0.5:
            return d.node("Div", [d.node("Mul", [x, clipped]), number(6.0)]), s
        return d.node("Mul", [d.node("Mul", [clipped, number(1 / 6)]), x]), s
    if kind == 2:
        return d.node("Mul", [x, d.node("Tanh", [d.node("Softplus", [x])])]), s
    if kind == 3:
        return d.node("Log", [d.node("Sigmoid", [x])]), s
    if kind == 4:
        return d.node("Sub", [x, d.node("Tanh", [x])]), s
    if kind == 5:
        return d.node("Div", [x, d.node("Add", [number(1.0), d.node("Abs", [x])])]), s
    cubic = d.node("Mul", [number(0.044715), d.node("Pow", [x, number(3.0)])])
    inner = d.node("Tanh", [d.node("Mul", [d.node("Add", [x, cubic]), number(np.sqrt(2 / np.pi))])])
    return d.node("Mul", [number(0.5), d.node("Mul", [x, d.node("Add", [number(1.0), inner])])]), s


def gather(d: Draft, x: str, s: Shape) -> Made:
    axis = axis_of(d, s)
    n = size(s[axis])
    places = d.draw.choice((0, n - 1, [0], list(range(n)), [n - 1, 0, 0], [-1, 0], [[0, 0]] if d.odd() else [0, n - 1]))
    made = d.node("Gather", [x, d.keep(np.array(places, np.int64))], axis=signed(d, axis, len(s)))
    return made, (*s[:axis], *np.array(places).shape, *s[axis + 1 :])


def sizes(d: Draft, x: str, s: Shape) -> Made:
    """A shape that is computed in the file: that of the value, parts of it, and numbers."""
    shape = d.node("Shape", [x])
    first = d.node("Gather", [shape, d.keep(np.array(0))], axis=0)
    first = d.formed("Unsqueeze", first, 13, {"axes": [0]})
    if d.odd():
        first = d.node(d.draw.choice(("Mul", "Add")), [first, d.keep(np.array([1]))])
    kind, n = d.draw.randrange(4), int(np.prod([size(k) for k in s[1:]]))
    if kind == 0:
        rest = d.keep(np.array([d.draw.choice((-1, n))]))
        return d.node("Reshape", [x, d.node("Concat", [first, rest], axis=0)]), (s[0], n)
    if kind == 1:
        wide = d.node("Concat", [first, d.keep(np.array([size(k) for k in s[1:]], np.int64))], axis=0)
        if len(s) > 1 and d.draw.random() < 0.5:
            wide = d.node("Where", [d.node("Equal", [wide, d.keep(np.array(-1))]), d.keep(np.array(1)), wide])
        kinds = [d.node("Expand", [d.weights(*(1 for _ in s[1:])), wide]) if d.opset >= 8 else x]
        if d.opset >= 9:
            kinds.append(
                d.node("ConstantOfShape", [wide], value=onnx.numpy_helper.from_array(np.full(1, 0.3, d.dtype)))
            )
        row = d.draw.choice(kinds)
        if len(s) > 1 and d.draw.random() < 0.5:
            axis = d.draw.randrange(1, len(s))
            pair = [row, x] if d.draw.random() < 0.5 else [x, row]
            return d.node("Concat", pair, axis=axis), (*s[:axis], 2 * size(s[axis]), *s[axis + 1 :])
        return d.node("Add", [row, x]), s
    if kind == 2:  # of another value, whose sizes depend on the batch
        turned = d.node("Transpose", [x], perm=[*range(1, len(s)), 0])
        part = d.formed(
            "Slice", turned, 10, {"starts": [0], "ends": [d.draw.choice((3, 2**31 - 1))], "axes": [len(s) - 1]}
        )
        count = d.node(
            "Cast", [d.node("Shape", [d.draw.choice((part, turned, x))])], to=11 if d.dtype == np.float64 else 1
        )
        return d.node("Add", [x, d.node("Gather", [count, d.keep(np.array(d.draw.choice((0, -1))))])]), s
    half = d.node("Div", [d.keep(np.array([4])), d.keep(np.array([2]))])
    if len(s) < 2:
        return x, s
    return d.formed("ReduceSum", x, 13, {"axes": [1]}, keepdims=1) if d.odd(0.5) else d.node("Tile", [x, half]), (
        (s[0], 1, *s[2:])
    )


def power(d: Draft, x: str, s: Shape) -> Made:
    return d.node("Pow", [x, d.keep(np.array(d.draw.choice((1, 2)), d.dtype))]), s


def enlarged(d: Draft, x: str, s: Shape) -> Made:
    rows, cols = d.draw.choice((1, 2, 2, 3)), d.draw.choice((1, 2, 4))
    scales = d.keep(np.array([1, 1, rows, cols], np.float32))
    after = (*s[:2], size(s[2]) * rows, size(s[3]) * cols)
    if d.opset < 10:
        more = {"scales": [1.0, 1.0, rows, cols]} if d.opset < 9 else {}
        return d.node("Upsample", [x] if more else [x, scales], mode="nearest", **more), after
    if d.opset == 10:
        return d.node("Resize", [x, scales], mode="nearest"), after
    if d.draw.random() < 0.3:
        return d.node("Resize", [x, "", scales], mode="linear", coordinate_transformation_mode="half_pixel"), after
    modes = ("asymmetric", "half_pixel", "pytorch_half_pixel", "align_corners", "tf_half_pixel_for_nn")
    more = {"coordinate_transformation_mode": d.draw.choice((None, *modes[:2], *modes))}
    more["nearest_mode"] = d.draw.choice((None, "floor", "round_prefer_floor", "round_prefer_ceil", "ceil"))
    return d.node(
        "Resize", [x, "" if d.opset > 11 else d.keep(np.zeros(0, np.float32)), scales], mode="nearest", **more
    ), after


def deeper(d: Draft, x: str, s: Shape) -> Made:
    if size(s[1]) % 4:
        x, s = d.node("Concat", [x] * 4, axis=1), (s[0], 4 * size(s[1]), *s[2:])
    mode = {"mode": d.draw.choice((None, "CRD", "DCR"))} if d.opset >= 11 else {}
    return d.node("DepthToSpace", [x], blocksize=2, **mode), (s[0], size(s[1]) // 4, size(s[2]) * 2, size(s[3]) * 2)


def swish(d: Draft, x: str, s: Shape) -> Made:
    gate = d.node("Sigmoid", [x])
    return d.node("Mul", d.draw.choice(([x, gate], [gate, x], [x, gate]))), s


def gelu(d: Draft, x: str, s: Shape) -> Made:
    scalar = d.draw.choice(((), (), (1,), (1,) * (len(s) + d.odd(0.2))))
    number = lambda v: d.keep(np.full(scalar, v, d.dtype))  # noqa: E731
    inner = d.node("Div", [x, number(np.sqrt(2) if not d.odd() else 1.5)])
    bracket = d.node("Add", [d.node("Erf", [inner]), number(1.0 if not d.odd() else 1.1)])
    if d.draw.random() < 0.5:
        return d.node("Mul", [x, d.node("Mul", [bracket, number(0.5)])]), (1,) * (len(scalar) - len(s)) + s
    return d.node("Mul", [d.node("Mul", [x, bracket]), number(0.5)]), (1,) * (len(scalar) - len(s)) + s


def arithmetic(d: Draft, x: str, s: Shape) -> Made:
    full = [1, *map(size, s[1:])]
    channels = [n if i == 1 else 1 for i, n in enumerate(full)]
    mixed, longer = [2, *full[1:]] if d.odd() else full, [1, *full] if d.odd() else full
    shape = d.draw.choice(([], [1], full[-1:], full, channels, mixed, longer, full[1:]))
    pair = [x, d.weights(*shape)]
    kind = d.draw.choice(("Add", "Sub", "Mul", "Div"))
    if kind != "Div" and d.draw.random() < 0.3:
        pair.reverse()
    return d.node(kind, pair), (1,) * (len(shape) - len(s)) + s


def branch(d: Draft, x: str, s: Shape) -> Made:
    y, t = d.draw.choice((activation, arithmetic, dense))(d, x, s)
    if d.draw.random() < 0.5 and len(s) > 1:
        axis = axis_of(d, s)
        joined = list(s)
        joined[axis] = size(s[axis]) + size(t[axis] if axis < len(t) else 1)
        return d.node("Concat", [x, y], axis=signed(d, axis, len(s)) if not d.odd(0.02) else None), tuple(joined)
    return d.node(d.draw.choice(("Add", "Sub")), [x, y]), s


def flatten(d: Draft, x: str, s: Shape) -> Made:
    axis = (
        None
        if d.draw.random() < 0.4
        else signed(d, 1 if d.draw.random() < 0.7 else d.draw.randrange(len(s) + 1), len(s))
    )
    return d.node("Flatten", [x], axis=axis), (s[0], int(np.prod([size(n) for n in s[1:]])))


def reshape(d: Draft, x: str, s: Shape) -> Made:
    sizes = [size(n) for n in s[1:]]
    after = d.draw.choice(([int(np.prod(sizes))], sizes[::-1], [*sizes, 1], [1, *sizes]))
    shown = list(after)
    if shown and d.draw.random() < 0.3:
        shown[d.draw.randrange(len(shown))] = d.draw.choice((-1, 0))
    first = d.draw.choice((0, 0, -1, 1 if d.odd(0.5) else 0, 2 if d.odd() else 0))
    zero = d.draw.choice((0, 1)) if d.odd(0.2) and d.opset >= 14 else None
    return d.node("Reshape", [x, d.keep(np.array([first, *shown]))], allowzero=zero), (s[0], *after)


def transpose(d: Draft, x: str, s: Shape) -> Made:
    tail = list(range(1, len(s)))
    d.draw.shuffle(tail)
    perm = [0, *tail]
    if d.odd(0.1):
        d.draw.shuffle(perm)
    after = perm if not d.odd(0.1) else list(range(len(s)))[::-1]
    return d.node("Transpose", [x], perm=perm if after is perm else None), tuple(s[i] for i in after)


def squeeze(d: Draft, x: str, s: Shape) -> Made:
    if 1 not in s:
        x, s = unsqueeze(d, x, s)
    ones = [i for i, n in enumerate(s) if n == 1 or d.odd(0.02)]
    axes = [signed(d, i, len(s)) for i in ones]
    gone = d.formed("Squeeze", x, 13, {"axes": axes if not d.odd(0.03) else None})
    return gone, tuple(n for i, n in enumerate(s) if i not in ones)


def unsqueeze(d: Draft, x: str, s: Shape) -> Made:
    axis = d.draw.randrange(0 if d.odd() else 1, len(s) + 1)
    made = d.formed("Unsqueeze", x, 13, {"axes": [signed(d, axis, len(s) + 1)]})
    return made, (*s[:axis], 1, *s[axis:])


def reduced(d: Draft, x: str, s: Shape) -> Made:
    kind, since = d.draw.choice((("ReduceMean", 18), ("ReduceSum", 13), ("ReduceMax", 18), ("ReduceMin", 18)))
    axes = sorted({axis_of(d, s) for _ in range(d.draw.randint(1, 2))})
    keep = d.draw.choice((None, 0, 1))
    given = {"axes": [signed(d, a, len(s)) for a in axes] if not d.odd(0.05) else None}
    more = {"noop_with_empty_axes": 1} if d.opset >= 18 and d.odd(0.1) else {}
    made = d.formed(kind, x, since, given, keepdims=keep, **more)
    return made, tuple(1 if i in axes else n for i, n in enumerate(s) if i not in axes or keep != 0)


def tiled(d: Draft, x: str, s: Shape) -> Made:
    times = [2 if (i and d.draw.random() < 0.4) or d.odd(0.03) else 1 for i in range(len(s))]
    after = tuple(n if k == 1 else k * size(n) for n, k in zip(s, times, strict=True))
    return d.node("Tile", [x, d.keep(np.array(times, np.int64))]), after


def masked(d: Draft, x: str, s: Shape) -> Made:
    mask = d.keep(d.numbers.random([1, *map(size, s[1:])]) < 0.5)
    parts = [x, d.weights(*d.draw.choice(([], [1], [size(s[-1])])))]
    d.draw.shuffle(parts)
    return d.node("Where", [mask, *parts]), s


def slices(d: Draft, x: str, s: Shape) -> Made:
    axis = axis_of(d, s)
    n, low = size(s[axis]), d.draw.choice((0, 0, 1, -2))
    high = d.draw.choice((n, n - 1, 2**31 - 1, 2**63 - 1, -1))
    given: dict[str, Any] = {"starts": [low], "ends": [high], "axes": [signed(d, axis, len(s))]}
    if d.odd(0.1):
        given = {"starts": [0] * len(s), "ends": [2**31 - 1] * len(s), "axes": None}
        low, high = 0, n
    if d.opset >= 10 and d.draw.random() < 0.3:
        given["steps"] = [d.draw.choice((1, 1, 2, -1 if d.odd() else 1))] * len(given["starts"])
    kept = len(range(n)[low : high : given.get("steps", [1])[0]])
    return d.formed("Slice", x, 10, given), tuple(kept if i == axis else k for i, k in enumerate(s))


def split(d: Draft, x: str, s: Shape) -> Made:
    axis = axis_of(d, s)
    n, count = size(s[axis]), d.draw.randint(2, 3)
    sizes = [1] * (count - 1) + [n - count + 1] if d.draw.random() < 0.5 else None
    more = {"num_outputs": count} if d.opset >= 18 and (sizes is None) != d.odd(0.05) else {}
    at = None if axis == 0 else signed(d, axis, len(s))
    parts = d.formed("Split", x, 13, {"split": sizes}, count, axis=at, **more)
    d.draw.shuffle(parts)
    return d.node("Concat", parts, axis=axis), s


def pad(d: Draft, x: str, s: Shape) -> Made:
    mode = d.draw.choice((None, "constant", "constant", "reflect", "edge", "wrap"))
    sizes = [0] * (2 * len(s))
    for i in range(0 if d.odd(0.03) else 1, len(s)):
        if mode in (None, "constant") or (i >= 2 and len(s) == 4):
            sizes[i], sizes[i + len(s)] = (d.draw.choice((0, 1, 1, 2, -1 if d.odd() else 0)) for _ in range(2))
    value = None if d.draw.random() < 0.5 else d.draw.choice((0.0, 0.0, 0.7, -1.5))
    if value is not None and d.opset >= 11:
        value = np.array(value, d.dtype)
    after = tuple(n if n == "b" else size(n) + sizes[i] + sizes[i + len(s)] for i, n in enumerate(s))
    return d.formed("Pad", x, 11, {"pads": sizes, "value": value}, mode=mode), after


def dense(d: Draft, x: str, s: Shape) -> Made:
    n, k = size(s[-1]), d.draw.choice((size(s[-1]), 3))
    if len(s) != 2 or d.draw.random() < 0.4:
        return d.node("MatMul", [x, d.weights(n, k)]), (*s[:-1], k)
    across = d.draw.choice((None, 0, 1))
    scales = {"alpha": d.draw.choice((None, None, 1.0, 0.5)), "beta": d.draw.choice((None, 1.0, 0.7))}
    shape = d.draw.choice(([k], [1, k], [1], [], [1, 1], [2, k] if d.odd() else [k]))
    bias = [] if d.opset >= 11 and d.draw.random() < 0.3 else [d.weights(*shape)]
    weight = d.weights(k, n) if across else d.weights(n, k)
    return d.node("Gemm", [x, weight, *bias], transB=across, transA=1 if d.odd(0.03) else None, **scales), (s[0], k)


def window(d: Draft, kernel: list[int]) -> tuple[dict[str, Any], Callable[[int, int], int]]:
    """Attributes, and the size after it."""
    stride, dilation = d.draw.choice((1, 1, 2)), d.draw.choice((1, 1, 1, 2))
    low, high = (d.draw.choice((0, 0, 1)) for _ in range(2))
    high = low if d.draw.random() < 0.7 else high
    attributes: dict[str, Any] = {"pads": [low, low, high, high], "strides": [stride] * 2, "dilations": [dilation] * 2}
    if dilation == 1 and d.draw.random() < 0.7:
        del attributes["dilations"]
    if d.odd(0.15):
        attributes["auto_pad"] = d.draw.choice(("NOTSET", "VALID", "SAME_LOWER", "SAME_UPPER"))
    if attributes["pads"] == [0] * 4 and d.draw.random() < 0.7:
        del attributes["pads"]
    if attributes.get("auto_pad") == "VALID" and d.draw.random() < 0.5:
        attributes.pop("pads", None)
    if attributes.get("auto_pad") == "VALID":
        low = high = 0
    if "SAME" in attributes.get("auto_pad", "") and not d.odd():
        attributes.pop("pads", None)
        return attributes, lambda n, i: -(-n // stride)
    return attributes, lambda n, i: (n + low + high - dilation * (kernel[i] - 1) - 1) // stride + 1


def convolution(d: Draft, x: str, s: Shape) -> Made:
    c, group = size(s[1]), d.draw.choice((1, 1, size(s[1])))
    kernel = [d.draw.choice((1, 2, 3)), d.draw.choice((2, 3))][: len(s) - 2]
    attributes, after = window(d, kernel * 2)
    if len(s) != 4:
        attributes = {}
    if d.odd(0.5):
        attributes["kernel_shape"] = kernel if not d.odd(0.03) else [k + 1 for k in kernel]
    out, sizes = 2 * group, [after(size(n), i) if len(s) == 4 else 3 for i, n in enumerate(s[2:])]
    bias = [d.weights(out)] if d.draw.random() < 0.5 else []
    return d.node("Conv", [x, d.weights(out, c // group, *kernel), *bias], group=group, **attributes), (
        s[0],
        out,
        *sizes,
    )


def transposed(d: Draft, x: str, s: Shape) -> Made:
    c, group = size(s[1]), d.draw.choice((1, 1, size(s[1])))
    attributes, _ = window(d, [3, 3])
    extra = d.draw.choice((None, [0, 0], [1, 1]))
    t, (p, _, q, _) = attributes.get("strides", [1])[0], attributes.get("pads", [0] * 4)
    reach, more = 2 * attributes.get("dilations", [1])[0], (extra or [0])[0]
    sizes = [t * (size(n) - 1) + more + reach + 1 - p - q for n in s[2:]]
    made = d.node("ConvTranspose", [x, d.weights(c, 2, 3, 3)], group=group, output_padding=extra, **attributes)
    return made, (s[0], 2 * group, *sizes)


def pooling(d: Draft, x: str, s: Shape) -> Made:
    kind, kernel = d.draw.choice(("MaxPool", "AveragePool", "GlobalAveragePool")), [d.draw.choice((2, 3)), 2]
    if kind == "GlobalAveragePool":
        return d.node(kind, [x]), (*s[:2], *(1 for _ in s[2:]))
    if len(s) == 3:
        pads = d.draw.choice((None, [0, 1], [1, 1]))
        made = d.node(kind, [x], kernel_shape=[2], strides=[2], pads=pads, auto_pad=None if pads else "SAME_UPPER")
        return made, (*s[:2], -(-size(s[2]) // 2))
    attributes, after = window(d, kernel)
    if "dilations" in attributes and d.opset < (10 if kind == "MaxPool" else 19) and not d.odd():
        del attributes["dilations"]
        attributes, after = {}, lambda n, i: n - kernel[i] + 1
    if kind == "AveragePool" and d.draw.random() < 0.5:
        attributes["count_include_pad"] = d.draw.choice((0, 1))
    if d.opset >= 10 and d.draw.random() < 0.2:
        attributes["ceil_mode"] = d.draw.choice((0, 1))
    return d.node(kind, [x], kernel_shape=kernel, **attributes), (
        *s[:2],
        *(after(size(n), i) for i, n in enumerate(s[2:])),
    )


def normalised(d: Draft, x: str, s: Shape) -> Made:
    n = size(s[1]) if len(s) > 1 else 1
    if d.opset >= 17 and d.draw.random() < 0.5:
        axis = axis_of(d, s)
        shape = [size(k) for k in s[axis:]]
        more = {"axis": signed(d, axis, len(s)) if axis != len(s) - 1 or d.odd(0.5) else None}
        return d.node("LayerNormalization", [x, d.weights(*shape), d.weights(*shape)], epsilon=0.01, **more), s
    var = d.keep(d.numbers.uniform(0.2, 2, n).astype(d.dtype))
    more = {"spatial": d.draw.choice((1, 0))} if d.opset < 9 and d.odd(0.2) else {}
    more |= {"momentum": 0.5} if d.opset >= 14 else {}  # the reference evaluator trains where an older one has it
    more |= {"training_mode": 1} if d.opset >= 14 and d.odd() else {}
    epsilon = d.draw.choice((None, 0.1))
    return d.node("BatchNormalization", [x, *(d.weights(n) for _ in range(3)), var], epsilon=epsilon, **more), s


ANY = (activation, activation, softmax, softmax, clip, dropout, swish, gelu, arithmetic, arithmetic, branch, flatten,
       reshape, transpose, squeeze, unsqueeze, reduced, reduced, tiled, masked, slices, split, pad, dense, dense,
       normalised, prelu, extremum, written_out, gather, sizes, sizes, power)  # fmt: skip
IMAGES = (convolution, convolution, transposed, pooling, pooling, pad, enlarged, deeper)


def own_domain(d: Draft) -> None:
    """One node of another domain; in most cases a function of the file, which computes something else."""
    node = d.draw.choice(d.nodes)
    node.domain = d.draw.choice(("my", "my", "my", "com.microsoft", "ai.onnx", "ai.onnx.ml"))
    if node.domain == "my" and len(node.output) == 1:
        given = [f"i{i}" for i in range(len(node.input))]
        value = onnx.numpy_helper.from_array(np.full(3, 0.4, d.dtype))
        body = (
            helper.make_node("Constant", [], ["o"], value=value)
            if not given
            else helper.make_node("Relu", given[:1], ["o"])
        )
        imports = [helper.make_opsetid("", d.opset)]
        names = [a.name for a in node.attribute]
        d.functions.append(helper.make_function("my", node.op_type, given, ["o"], [body], imports, names))


def spoiled(d: Draft) -> None:
    """One attribute or stored number that does not belong there."""
    node, kind = d.draw.choice(d.nodes), d.draw.randrange(6)
    if kind == 0:
        alpha = d.draw.choice((0.5, np.nan, np.inf))
        others = (("axes", [1]), ("outputs", ["v1"]), ("broadcast", 1), ("is_test", 1), ("pads", [1, 1, 1, 1]))
        name, value = d.draw.choice((("axis", 1), ("alpha", alpha), ("auto_pad", "VALID"), *others))
        if name not in [a.name for a in node.attribute]:
            node.attribute.append(helper.make_attribute(name, value))
    elif kind == 1 and node.attribute:
        del node.attribute[d.draw.randrange(len(node.attribute))]
    elif kind == 2 and node.attribute:
        node.attribute.append(node.attribute[0])
    elif kind == 3 and len(node.input):
        node.input[d.draw.randrange(len(node.input))] = d.draw.choice(("", "x", *d.stored))
    elif kind == 4 and d.stored:
        array = d.stored[d.draw.choice(list(d.stored))]
        if array.dtype.kind == "f" and array.size and array.flags.writeable:
            array.reshape(-1)[0] = d.draw.choice((np.nan, np.inf, 1e15, -0.0, 1e-40))
    elif kind == 5:
        node.output.append("more")


def draft(seed: int) -> tuple[Any, Shape]:
    """The file of a seed, and the shape of one sample."""
    d = Draft(seed)
    shape = s = d.draw.choice(
        (
            ("b", 4),
            ("b", 1),
            ("b", 2, 3, 2, 2),
            ("b", 3, 4),
            ("b", 2, 4),
            ("b", 2, 6, 6),
            ("b", 3, 5, 6),
            ("b", 2, 5, 5),
        )
    )
    batch = d.draw.choice(("batch", "batch", "batch", "batch", 1, 5 if d.odd(0.2) else "batch"))
    declared, x = (batch, *s[1:-1], "width" if d.odd(0.03) else s[-1]), "x"
    for _ in range(d.draw.randint(1, 5)):
        if not s:
            break
        more = IMAGES + IMAGES if len(s) == 4 else (convolution, pooling) if len(s) == 3 else ()
        x, s = d.draw.choice(more + ANY)(d, x, s)
    if d.odd(0.15):
        own_domain(d)
    if d.odd(0.12):
        spoiled(d)
    kind = onnx.TensorProto.DOUBLE if d.dtype == np.float64 else onnx.TensorProto.FLOAT
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in d.stored.items()]
    inputs = [helper.make_tensor_value_info("x", kind, declared)]
    if d.odd():  # as before version 4 of the format
        inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in stored]
    graph = helper.make_graph(d.nodes, "g", inputs, [helper.make_tensor_value_info(x, kind, None)], stored)
    imports = [
        helper.make_opsetid(name, v) for name, v in (("", d.opset), ("my", 1), ("com.microsoft", 1), ("ai.onnx.ml", 2))
    ]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=d.functions), shape[1:]


def runtimes(model: Any) -> list[Callable[[Any], Any]]:
    """onnxruntime, then the reference evaluator: each raises what it likes."""

    def first(x: Any) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, {"x": x})[0]

    return [first, lambda x: ReferenceEvaluator(model).run(None, {"x": x})[0]]


def check(seed: int, folder: Path) -> str:
    """The verdict on one file: "read", with the words of onnxruntime where nothing judges, or what refuses the file.

    Raises:
        Failure: with what was expected.
    """
    model, shape = draft(seed)
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    try:
        network = load_onnx(path, shape)
    except LipkitError as error:
        return str(error).removeprefix(f"{path}: ")
    except Exception as error:
        raise Failure(f"draw {seed}: load_onnx raises {type(error).__name__}: {error}") from error
    declared = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    kind = model.graph.input[0].type.tensor_type.elem_type
    rng = np.random.default_rng(seed)
    for batch in (declared,) if declared else BATCHES:
        x = rng.normal(size=(batch, *network.input_shape)).astype(helper.tensor_dtype_to_np_dtype(kind))
        refused = []
        for run in runtimes(model):
            try:
                expected = run(x)
                break
            except Exception as error:
                refused.append(str(error).splitlines()[0][:200])
                # No kernel in the one and a fault of the other judge nothing.
                if model.opset_import[0].version < FAITHFUL or (len(refused) == 2 and "NOT_IMPL" in refused[0]):
                    return f"read, refused by onnxruntime: {refused[0][:80]}"
        else:
            raise Failure(f"draw {seed}: read, but no runtime takes it at a batch of {batch}: {refused}")
        try:
            with torch.no_grad():
                found = network(torch.from_numpy(x)).numpy()
        except Exception as error:
            raise Failure(f"draw {seed}: read, but at a batch of {batch}: {type(error).__name__}: {error}") from error
        scale = min(np.abs(expected[np.isfinite(expected)]).max(initial=1.0), 1e6)
        if found.shape != expected.shape:
            raise Failure(f"draw {seed}: expected the shape {expected.shape}, got {found.shape}")
        if not np.allclose(found, expected, 1e-4, 1e-5 * scale, equal_nan=True):
            judge = "the reference evaluator" if refused else "onnxruntime"
            with np.errstate(invalid="ignore"):  # inf - inf
                apart = np.abs(found - expected).max()
            raise Failure(f"draw {seed}: another function than {judge}'s, by {apart}")
    return "read"


def reason(verdict: str) -> str:
    """A refusal without its names and numbers."""
    short = re.sub(r"^\d+:.*?: (\w+: )?", "", verdict).split(", got ")[0].split(": Node")[0]
    short = "expected one of the operators" if short.startswith("expected one of the op") else short
    return re.sub(r"'.*'|[\d.]+|\[.*?\]|\(.*?\)", "#", short)[:70]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--go-on", action="store_true", help="count wrong files instead of stopping at the first")
    given = parser.parse_args()
    warnings.simplefilter("error")
    onnxruntime.set_default_logger_severity(4)
    torch.set_num_threads(1)
    verdicts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    seeds = range(given.first, given.first + given.files) if given.only is None else [given.only]
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            try:
                verdict = check(seed, Path(folder))
            except Failure as failure:
                wrong.append(str(failure))
                Path("onnx-failure.onnx").write_bytes(draft(seed)[0].SerializeToString())
                print(failure, flush=True)
                if not given.go_on:
                    sys.exit("the file is kept as onnx-failure.onnx")
                continue
            if given.only is not None:
                print(onnx.printer.to_text(draft(seed)[0]), verdict)
            verdicts[verdict if verdict.startswith("read") else reason(verdict)] += 1
    for key, count in verdicts.most_common():
        print(f"{count:6d} {key}")
    read = sum(count for key, count in verdicts.items() if key.startswith("read"))
    print(f"{len(seeds)} files: {read} read, {len(seeds) - read - len(wrong)} refused, {len(wrong)} wrong")


if __name__ == "__main__":
    main()
