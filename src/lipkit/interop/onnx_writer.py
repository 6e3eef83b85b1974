"""Exported networks as ONNX: the graph of torch.export, node by node, in standard operators on real numbers.

A rule takes a writer and the arguments of a call of ATen, defaults filled in, and adds nodes of ONNX. Calls whose
operands are all stored are evaluated, except for large parameters that are only transposed or reshaped: the file holds
those once.

A file takes 4 to 16 times less time than by torch.onnx.export (five models, one core of an Intel Xeon), and has
constants in float64 where torch.onnx.export writes float32 attributes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lipkit.errors import NoRuleError
from lipkit.interop.onnx_layers import DTYPES

# The first versions of ONNX with circular padding, and with torch's number of windows under ceil_mode.
OPSET, CEIL_OPSET = 19, 22
KINDS = {dtype: number for number, dtype in DTYPES.items()}
END = 2**63 - 1  # of a slice that goes to the last entry
LARGE = 256  # numbers of a parameter that is stored once, whatever forms of it are needed


class Value(NamedTuple):
    """A value of the network: its name in the file, its shape for any size of the batch, and its number format."""

    name: str
    shape: tuple[Any, ...]  # an int, or a torch.SymInt where the size depends on the batch
    dtype: torch.dtype


class Writer:
    """The nodes and the stored tensors of a file."""

    def __init__(self, names: dict[int, str], dtype: torch.dtype) -> None:
        self.names, self.dtype = names, dtype  # of tensors with names of their own, by id; of the network
        self.nodes: list[Any] = []
        self.stored: dict[str, Tensor] = {}
        self.numbers: dict[Any, str] = {}  # names of the other stored tensors, by content: equal ones are stored once
        self.opset = OPSET
        self.out: Any = None  # the example of the result of the call that is being written

    def add(self, kind: str, *operands: Any, results: int = 1, **attributes: Any) -> Any:
        """Add a node on values, tensors, numbers or integer lists; returns the name of its result, or a list."""
        from onnx import helper

        while operands[-1] is None:  # operands left out at the end
            operands = operands[:-1]
        names = [f"{kind.lower()}_{len(self.nodes)}" + f"_{i}" * (results > 1) for i in range(results)]
        self.nodes.append(helper.make_node(kind, [*map(self.name, operands)], names, name=names[0], **attributes))
        return names[0] if results == 1 else names

    def name(self, value: Any) -> str:
        """The name of an operand, which is stored in the file unless it is a value of the network."""
        if value is None:
            return ""
        if isinstance(value, Value | str):
            return value if isinstance(value, str) else value.name
        name = self.names.get(id(value))
        if isinstance(value, list):
            value = torch.tensor(value, dtype=torch.int64)
        elif not isinstance(value, Tensor):
            number, value = value, torch.tensor(value, dtype=self.dtype)
            if not math.isclose(value, number, rel_tol=2 * torch.finfo(self.dtype).eps):
                raise NoRuleError(f"write: expected numbers within the range of {self.dtype}, got {number}")
        if name is None:
            key = value.dtype, value.shape, value.detach().numpy().tobytes()
            name = self.numbers.setdefault(key, f"number_{len(self.numbers)}")
        self.stored[name] = value
        return name

    def shaped(self, x: Any, shape: Sequence[Any]) -> Any:
        """``x`` reshaped to ``shape``; a size that depends on the batch follows from the others."""
        return self.add("Reshape", x, [n if isinstance(n, int) else -1 for n in shape])

    def cut(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        """The entries from ``start`` to ``stop`` along an axis."""
        return self.add("Slice", x, [start], [stop], [axis], [step])

    def rows(self, row: Any) -> Any:
        """``row`` (1, ...), repeated for every sample of the batch."""
        batch = self.cut(self.add("Shape", "input"), 0, 0, 1)
        return self.add("Expand", row, self.add("Concat", batch, [int(n) for n in self.out.shape[1:]], axis=0))


def _plus(kind: str, w: Writer, x: Any, y: Any, alpha: float) -> Any:
    return w.add(kind, x, _times(w, alpha, y))


def _times(w: Writer, factor: float, x: Any) -> Any:
    return x if factor == 1 else w.add("Mul", x, float(factor))


def _relu6(w: Writer, x: Any) -> Any:
    return w.add("Clip", w.add("Add", x, 3.0), 0.0, 6.0)


def _hardsigmoid(w: Writer, x: Value) -> Any:
    if w.dtype != torch.float64:
        return w.add("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    return w.add("Div", _relu6(w, x), 6.0)


def _slopes(w: Writer, x: Value, slopes: Any) -> Any:
    return w.add("PRelu", x, slopes if len(x.shape) < 3 else w.shaped(slopes, (-1, *(1,) * (len(x.shape) - 2))))


def _short(w: Writer, alpha: float) -> bool:
    """True if an attribute of ONNX, which is float32, holds a number as precisely as the network does."""
    return w.dtype != torch.float64 or float(torch.tensor(alpha)) == alpha


def _leaky_relu(w: Writer, x: Value, slope: float) -> Any:
    return w.add("LeakyRelu", x, alpha=float(slope)) if _short(w, slope) else w.add("PRelu", x, slope)


def _elu(w: Writer, x: Value, alpha: float, *_: Any) -> Any:
    if _short(w, alpha):
        return w.add("Elu", x, alpha=float(alpha))
    return w.add("Add", w.add("Max", x, 0.0), w.add("Mul", w.add("Elu", w.add("Min", x, 0.0)), alpha))


def _selu(w: Writer, x: Value) -> Any:
    if w.dtype != torch.float64:
        return w.add("Selu", x)
    return w.add("Mul", _elu(w, x, 1.6732632423543772), 1.0507009873554805)


def _softplus(w: Writer, x: Value, beta: float, threshold: float) -> Any:
    scaled = _times(w, beta, x)
    return w.add("Where", w.add("Greater", scaled, float(threshold)), x, _times(w, 1 / beta, w.add("Softplus", scaled)))


def _gelu(w: Writer, x: Value, approximate: str) -> Any:
    if approximate == "tanh":
        cubic = w.add("Mul", w.add("Mul", w.add("Mul", x, x), x), 0.044715)
        gate = w.add("Tanh", w.add("Mul", w.add("Add", x, cubic), math.sqrt(2 / math.pi)))
    else:
        gate = w.add("Erf", w.add("Div", x, math.sqrt(2)))
    return w.add("Mul", w.add("Add", gate, 1.0), w.add("Mul", x, 0.5))  # 2 x may exceed the range of the format


def _reshape(w: Writer, x: Any, *_: Any) -> Any:
    return w.shaped(x, w.out.shape)


def _transpose(function: Callable[..., Tensor], w: Writer, x: Any, *given: Any) -> Any:
    sizes = function(torch.empty([*range(2, len(x.shape) + 2)], device="meta"), *given).shape  # all different
    return w.add("Transpose", x, perm=[n - 2 for n in sizes])


def _slice(w: Writer, x: Value, dim: int, start: int | None, stop: int | None, step: int) -> Any:
    start, stop = start or 0, END if stop is None else stop
    return x if (start, stop, step) == (0, END, 1) else w.cut(x, dim, start, stop, step)


def _split(w: Writer, x: Value, _: Any, dim: int) -> list[Any]:
    sizes = [int(part.shape[dim]) for part in w.out]
    return w.add("Split", x, sizes, results=len(sizes), axis=dim) if len(sizes) > 1 else [x]


def _roll(w: Writer, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Any:
    y: Any = x
    for shift, dim in zip(shifts, dims, strict=True):
        at = -shift % x.shape[dim]
        y = w.add("Concat", w.cut(y, dim, at, END), w.cut(y, dim, 0, at), axis=dim) if at else y
    return y


def _expand(w: Writer, x: Any, *_: Any) -> Any:
    shape = w.out.shape
    if not isinstance(shape[0], int) and (len(x.shape) < len(shape) or isinstance(x.shape[0], int)):
        return w.rows(x)
    return w.add("Expand", x, [n if isinstance(n, int) else 1 for n in shape])


def _filled(value: float, w: Writer, *_: Any) -> Any:
    return w.rows(torch.full((1,) * w.out.ndim, value, dtype=w.out.dtype))


def _cast(w: Writer, x: Value, *_: Any) -> Any:
    return x if w.out.dtype == x.dtype else w.add("Cast", x, to=KINDS[w.out.dtype])


def _reduced(kind: str, w: Writer, x: Value, dims: Any, keep: bool, *_: Any) -> Any:
    dims = [dims] if isinstance(dims, int) else [*(dims or range(len(x.shape)))]
    return w.add(kind, x, dims, keepdims=int(keep))


def _norm(w: Writer, x: Value, order: float, dims: Any, keep: bool, *_: Any) -> Any:
    if order not in (1, 2):
        raise NoRuleError(f"write: expected norms of order 1 or 2, got {order}")
    return _reduced(f"ReduceL{order:.0f}", w, x, dims, keep)


def _layer_norm(w: Writer, x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float, *_: Any) -> Any:
    if w.dtype != torch.float64:
        weight = torch.ones([*shape], dtype=w.dtype) if weight is None else weight
        return w.add("LayerNormalization", x, weight, bias, axis=-len(shape), epsilon=float(eps))
    # Written out: that operator has its eps in float32, and takes moments of float64 in float32.
    dims = [*range(-len(shape), 0)]
    moved = w.add("Sub", x, w.add("ReduceMean", x, dims))
    square = w.add("ReduceMean", w.add("Mul", moved, moved), dims)
    y = w.add("Div", moved, w.add("Sqrt", w.add("Add", square, float(eps))))
    y = y if weight is None else w.add("Mul", y, weight)
    return y if bias is None else w.add("Add", y, bias)


def _linear(w: Writer, x: Value, weight: Any, bias: Any) -> Any:
    if len(x.shape) == 2:
        return w.add("Gemm", x, weight, bias, transB=1)
    y = w.add("MatMul", x, w.add("Transpose", weight, perm=[1, 0]))
    return y if bias is None else w.add("Add", y, bias)


def _each(sizes: Any, count: int = 2) -> list[int]:
    """One size for each axis."""
    return [sizes] * count if isinstance(sizes, int) else [*sizes] * (count // len(sizes))


def _conv(w: Writer, x: Value, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    kernel = [*weight.shape[2:]]
    strides, dilations = _each(stride, len(kernel)), _each(dilation, len(kernel))
    if isinstance(padding, str):
        spans = [d * (k - 1) * (padding == "same") for d, k in zip(dilations, kernel, strict=True)]
        pads = [n // 2 for n in spans] + [n - n // 2 for n in spans]  # as torch pads: the odd one behind
    else:
        pads = _each(padding, len(kernel)) * 2
    patches = len(kernel) == 2 and kernel == strides and not any(pads) and {groups, *dilations} == {1}
    if w.dtype == torch.float64 and patches:
        return _patches(w, x, weight, bias)
    return w.add("Conv", x, weight, bias, strides=strides, pads=pads, dilations=dilations, group=groups)


def _patches(w: Writer, x: Value, weight: Any, bias: Any) -> Any:
    """A convolution of patches that do not overlap as one product: onnxruntime has no convolution in float64."""
    (_, c, h, v), (m, _, p, q) = x.shape, weight.shape
    y: Any = x
    for axis, n, rest in ((2, h, h % p), (3, v, v % q)):
        y = w.cut(y, axis, 0, n - rest) if rest else y
    y = w.add("Transpose", w.shaped(y, (-1, c, h // p, p, v // q, q)), perm=[0, 2, 4, 1, 3, 5])
    y = w.shaped(y, (-1, h // p, v // q, c * p * q))
    y = _linear(w, Value(y, (-1, h // p, v // q, c * p * q), w.dtype), w.shaped(weight, (m, c * p * q)), bias)
    return w.add("Transpose", y, perm=[0, 3, 1, 2])


def _conv_transpose(
    w: Writer, x: Value, weight: Any, bias: Any, stride: Any, padding: Any, more: Any, groups: int, dilation: Any
) -> Any:
    stride, before, more = _each(stride), _each(padding), _each(more)
    after = [p - m for p, m in zip(before, more, strict=True)]
    if min(after) >= 0 and any(m >= s for m, s in zip(more, stride, strict=True)):
        more = [0, 0]  # runtimes refuse such an output_padding; to crop less behind is the same
    else:
        after = before
    return w.add(
        "ConvTranspose", x, weight, bias, strides=stride, pads=before + after, output_padding=more,
        dilations=_each(dilation), group=groups,
    )  # fmt: skip


def _pool(pool: Callable[..., Any], w: Writer, x: Value, *given: Any) -> Any:
    """``pool`` on images (B, C, H, W), or on (B, H, W), to which this adds the axis of channels that ONNX needs."""
    if len(x.shape) == 4:
        return pool(w, x, *given)
    return w.add("Squeeze", pool(w, w.add("Unsqueeze", x, [1]), *given), [1])


def _max_pool(w: Writer, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    w.opset = CEIL_OPSET if ceil else w.opset
    return w.add(
        "MaxPool", x, kernel_shape=_each(kernel), strides=_each(stride or kernel), pads=_each(padding) * 2,
        dilations=_each(dilation), ceil_mode=int(ceil),
    )  # fmt: skip


def _average_pool(
    w: Writer, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, counted: bool, divisor: int | None
) -> Any:
    shape, strides, pads = _each(kernel), _each(stride or kernel), _each(padding)
    if divisor is not None:  # zeros around the image, a plain average, and a factor
        ends = [min(p + s - 1, k - 1) if ceil else p for k, s, p in zip(shape, strides, pads, strict=True)]
        x, pads, ceil = w.add("Pad", x, [0, 0, *pads, 0, 0, *ends]), [0, 0], False
    w.opset = CEIL_OPSET if ceil else w.opset
    y = w.add(
        "AveragePool", x, kernel_shape=shape, strides=strides, pads=pads * 2, ceil_mode=int(ceil),
        count_include_pad=int(counted),
    )  # fmt: skip
    return y if divisor is None else _times(w, math.prod(shape) / divisor, y)


def _adaptive_pool(w: Writer, x: Value, _: Any) -> Any:
    """Adaptive average pooling: along each axis, a product with a matrix that averages."""
    rows, columns = (
        F.adaptive_avg_pool1d(torch.eye(n, dtype=torch.float64)[None], o)[0].to(w.dtype)
        for n, o in zip(x.shape[-2:], w.out.shape[-2:], strict=True)
    )
    return w.add("MatMul", w.add("MatMul", rows.T.contiguous(), x), columns)


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(w: Writer, x: Value, padding: Sequence[int], mode: str, value: float | None) -> Any:
    rest = [0] * (len(x.shape) - len(padding) // 2)
    ends = [*rest, *padding[::2][::-1], *rest, *padding[1::2][::-1]]  # torch counts pairs from the last axis
    return w.add("Pad", x, ends, float(value) if value else None, mode=_MODES[mode])


def _bilinear(w: Writer, x: Value, size: Any, corners: bool, *_: Any) -> Any:
    factors = torch.tensor([1.0, 1.0, *(m / n for n, m in zip(x.shape[2:], w.out.shape[2:], strict=True))])
    place = "align_corners" if corners else "half_pixel"
    return w.add("Resize", x, None, factors, mode="linear", coordinate_transformation_mode=place)


_SAME = {
    "relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "abs": "Abs", "neg": "Neg", "exp": "Exp", "log": "Log",
    "sqrt": "Sqrt", "reciprocal": "Reciprocal", "sin": "Sin", "cos": "Cos", "erf": "Erf", "mul": "Mul", "div": "Div",
    "maximum": "Max", "minimum": "Min", "gt": "Greater", "lt": "Less", "ge": "GreaterOrEqual", "le": "LessOrEqual",
    "where": "Where", "pow": "Pow", "matmul": "MatMul", "mm": "MatMul", "bmm": "MatMul", "sign": "Sign",
    "clamp": "Clip", "hardtanh": "Clip", "clamp_min": "Clip", "atan": "Atan", "asin": "Asin", "acos": "Acos",
    "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh", "tan": "Tan", "floor": "Floor", "ceil": "Ceil",
}  # fmt: skip
_MOVES = (Tensor.permute, Tensor.transpose, Tensor.t, Tensor.movedim)
# By the name of the operator in ATen: rules, and names of operators of ONNX with the same operands.
RULES: dict[str, Callable[..., Any] | str] = {
    **_SAME,
    **{f.__name__: partial(_transpose, f) for f in _MOVES},
    "mT": partial(_transpose, lambda x: x.mT),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as"), _reshape),
    **dict.fromkeys(("clone", "contiguous", "alias"), lambda w, x, *_: x),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("zeros_like", "new_zeros"), partial(_filled, 0.0)),
    **dict.fromkeys(("ones_like", "new_ones"), partial(_filled, 1.0)),
    **dict.fromkeys(("conv1d", "conv2d"), _conv),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "add": partial(_plus, "Add"),
    "sub": partial(_plus, "Sub"),
    "rsub": lambda w, x, y, alpha: w.add("Sub", y, _times(w, alpha, x)),
    "square": lambda w, x: w.add("Mul", x, x),
    "rsqrt": lambda w, x: w.add("Reciprocal", w.add("Sqrt", x)),
    "silu": lambda w, x: w.add("Mul", x, w.add("Sigmoid", x)),
    "mish": lambda w, x: w.add("Mul", x, w.add("Tanh", w.add("Softplus", x))),
    "log_sigmoid": lambda w, x: w.add("Neg", w.add("Softplus", w.add("Neg", x))),
    "softshrink": lambda w, x, end: w.add("Sub", x, w.add("Clip", x, -float(end), float(end))),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda w, x: w.add("Mul", x, w.add("Div", _relu6(w, x), 6.0)),
    "leaky_relu": _leaky_relu,
    "prelu": _slopes,
    "elu": _elu,
    "celu": lambda w, x, alpha: w.add("Mul", w.add("Elu", w.add("Div", x, alpha)), alpha),
    "selu": _selu,
    "softplus": _softplus,
    "gelu": _gelu,
    "softmax": lambda w, x, dim, _: w.add("Softmax", x, axis=dim),
    "select": lambda w, x, dim, index: w.add("Gather", x, torch.tensor(index), axis=dim),
    "unbind": lambda w, x, dim: [w.add("Gather", x, torch.tensor(i), axis=dim) for i in range(len(w.out))],
    "slice": _slice,
    "narrow": lambda w, x, dim, start, length: w.cut(x, dim, start, start + length or END),
    "cat": lambda w, values, dim: w.add("Concat", *(v for v in values if w.name(v)), axis=dim),
    "stack": lambda w, values, dim: w.add("Concat", *(w.add("Unsqueeze", v, [dim]) for v in values), axis=dim),
    "roll": _roll,
    "to": _cast,
    "amax": partial(_reduced, "ReduceMax"),
    "amin": partial(_reduced, "ReduceMin"),
    "mean": partial(_reduced, "ReduceMean"),
    "sum": partial(_reduced, "ReduceSum"),
    "linalg_vector_norm": _norm,
    "sort": lambda w, x, dim, down: w.add("TopK", x, [x.shape[dim]], results=2, axis=dim, largest=int(down)),
    "layer_norm": _layer_norm,
    "linear": _linear,
    "conv_transpose2d": _conv_transpose,
    "max_pool2d": partial(_pool, _max_pool),
    "avg_pool2d": partial(_pool, _average_pool),
    "adaptive_avg_pool2d": _adaptive_pool,
    "pad": _pad,
    "upsample_bilinear2d": _bilinear,
}
_FORMS = ("mT", *(name for name, r in RULES.items() if r is _reshape), *(f.__name__ for f in _MOVES))


def _operator(node: fx.Node) -> str:
    packet: Any = getattr(node.target, "overloadpacket", node.target)  # aten.add of aten.add.Tensor
    return str(packet.__name__)


class _Graph:
    """Translates a program node by node; a node whose operands are all stored is evaluated instead."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        given, tensors = program.graph_signature, {**program.state_dict, **program.constants}
        places = {**given.inputs_to_parameters, **given.inputs_to_buffers, **given.inputs_to_lifted_tensor_constants}
        inputs = {node: places.get(node.name) for node in program.graph.find_nodes(op="placeholder")}
        (source,) = (node for node, place in inputs.items() if place is None)
        self.values: dict[fx.Node, Any] = {source: Value("input", *_form(source.meta["val"]))}
        self.constants: dict[fx.Node, Any] = {node: tensors[place] for node, place in inputs.items() if place}
        self.formed = {*self.constants}  # parameters, and those that are only transposed or reshaped
        self.writer = Writer({id(tensors[p]): p for p in inputs.values() if p}, source.meta["val"].dtype)

    def operand(self, node: fx.Node) -> Any:
        if node in self.formed and node.op != "placeholder" and node not in self.values:
            self.values[node] = self.written(node)
        return self.values.get(node, self.constants.get(node))

    def written(self, node: fx.Node) -> Any:
        """Add the ONNX node of an ATen call, and return its value (a list for several results)."""
        args = [
            node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
            for i, a in enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
        ]
        if (rule := RULES.get(_operator(node))) is None:
            raise NoRuleError(f"write: expected operators that have a rule in ONNX, got {node.target}")
        operands = fx.map_arg(args, self.operand)
        out = self.writer.out = node.meta["val"]
        made = self.writer.add(rule, *operands) if isinstance(rule, str) else rule(self.writer, *operands)
        if isinstance(made, list):
            return [Value(self.writer.name(name), *_form(one)) for name, one in zip(made, out, strict=True)]
        return Value(self.writer.name(made), *_form(out))

    def add(self, node: fx.Node) -> None:
        out = node.meta.get("val")
        if all(n in self.constants for n in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.constants.__getitem__)
            self.constants[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            large = isinstance(out, Tensor) and out.numel() > LARGE
            if large and _operator(node) in _FORMS and self.formed.issuperset(node.all_input_nodes):
                self.formed.add(node)
        elif node.target is operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        elif isinstance(out, (Tensor, list, tuple)):  # no size of the batch
            several = [out] if isinstance(out, Tensor) else out
            if all(any(type(n) is int and n == 0 for n in one.shape) for one in several):
                made = [Value("", *_form(one)) for one in several]  # without entries: Concat leaves them out
                self.values[node] = made[0] if isinstance(out, Tensor) else made
            else:
                self.values[node] = self.written(node)


def _form(example: Tensor) -> tuple[tuple[Any, ...], torch.dtype]:
    return tuple(example.shape), example.dtype


def model_of(program: torch.export.ExportedProgram) -> Any:
    """The ONNX model of an exported network's program. Equal programs give equal models.

    Raises:
        NoRuleError: an operator that has no rule.
    """
    from onnx import helper, numpy_helper

    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    graph = _Graph(program)
    with torch.no_grad():
        for node in calls:
            graph.add(node)
        (result,) = program.graph.output_node().args[0]
        end = graph.operand(result)
    writer = graph.writer
    if all(end.name not in node.output for node in writer.nodes):
        end = end._replace(name=writer.add("Identity", end))
    for node in writer.nodes:
        for names in (node.input, node.output):
            names[:] = ["output" if name == end.name else name for name in names]
    ends = [
        helper.make_tensor_value_info(name, KINDS[value.dtype], ["batch", *value.shape[1:]])
        for name, value in (("input", next(iter(graph.values.values()))), ("output", end))
    ]
    stored = [numpy_helper.from_array(t.detach().contiguous().numpy(), name) for name, t in writer.stored.items()]
    version = helper.make_opsetid("", writer.opset)
    return helper.make_model(
        helper.make_graph(writer.nodes, "network", ends[:1], ends[1:], stored), opset_imports=[version],
        ir_version=helper.find_min_ir_version_for([version]), producer_name="lipkit",
    )  # fmt: skip
