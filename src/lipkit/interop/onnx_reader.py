"""ONNX files as networks of torch modules: a closed list of operators, weights as stored."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import DataError, LipkitError, NoRuleError, first_line
from lipkit.files import open_regular
from lipkit.interop.reading import load
from lipkit.modules import Network

Step = Callable[["OnnxNetwork", list[Any]], Tensor]
# The default domain of ONNX has two names.
_DOMAIN = ("", "ai.onnx")
# Attributes that change nothing at inference with one output.
_HARMLESS = ("momentum", "ratio", "seed", "storage_order", "noop_with_empty_axes")


class OnnxNetwork(nn.Module):
    """The graph of an ONNX file as modules and functions, in the file's order.

    Attributes:
        input_shape: of one sample as the file says, or None where it leaves sizes open.
    """

    input_shape: tuple[int, ...] | None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.steps: list[tuple[Step, list[str], str]] = []
        self.source = ""
        self.result = ""

    def forward(self, x: Tensor) -> Tensor:
        values: dict[str, Any] = {self.source: x}
        for step, inputs, output in self.steps:
            values[output] = step(self, [values.get(name, self._buffers.get(_buffer(name))) for name in inputs])
        return values[self.result]


def _buffer(name: str) -> str:
    # Names of buffers have no dots; no two names become one.
    return f"stored {name.replace('_', '__').replace('.', '_:')}"


def load_onnx(
    path: str | Path, input_shape: tuple[int, ...] | None = None, *, box: tuple[float, float] | None = None
) -> Network:
    """The exported network of an ONNX file: to be bounded, certified, attacked and saved like any other.

    Args:
        path: the file.
        input_shape: of one sample, where the file leaves it open.
        box: the range of the inputs, see `lipkit.export`.

    Raises:
        DataError, NoRuleError: see `read_onnx`, and `lipkit.export` for what its graph has no plain form of; values of
            too many numbers, see `lipkit.interop.reading.load`.
        ShapeError: no ``input_shape``, or another one than the file says.
    """
    return load(read_onnx(path), path, input_shape, box)


def read_onnx(path: str | Path) -> OnnxNetwork:
    """The network of an ONNX file, in evaluation mode. Nothing in the file is executed.

    Raises:
        DataError: the file is missing, no ONNX or not well-formed, its graph does not have one input and one output, it
            stores numbers in a format that torch cannot read, or the package ``onnx`` is not installed.
        NoRuleError: an operator outside the list, by name, or attributes that it does not cover; a name that is
            defined twice; an input that is no floating-point tensor; operators of before version 7, which mean
            something else.
    """
    try:
        import onnx
    except ImportError:
        raise DataError(f"{path}: expected the package onnx to read it, got none: pip install lipkit[onnx]") from None
    try:
        open_regular(path).close()  # onnx would read a device without end
        file = onnx.load(str(path))
    except FileNotFoundError as error:
        raise DataError(f"{path}: expected an ONNX file with its weights, got no {error.filename or path}") from None
    except Exception as error:  # protobuf and the loader of external weights have no common error
        raise DataError(f"{path}: not an ONNX file that can be read: {first_line(error)}") from error
    try:
        return _read(file, path)
    except LipkitError:
        raise
    except Exception as error:  # of whatever in the file has another type, size or number of parts than its name says
        reason = first_line(error)
        raise DataError(f"{path}: not a well-formed ONNX graph: {type(error).__name__}: {reason}") from error


def _read(file: Any, path: str | Path) -> OnnxNetwork:
    import onnx

    graph, tensors = file.graph, onnx.TensorProto
    _check_meaning(file, path)
    if twice := [n for n, count in collections.Counter(t.name for t in graph.initializer).items() if count > 1]:
        raise NoRuleError(f"{path}: expected a new name for each stored tensor, got {twice}, defined twice")
    stored = {t.name: _numbers(onnx.numpy_helper.to_array(t), t.name, path) for t in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    if len(inputs) != 1 or len(graph.output) != 1:
        raise DataError(f"{path}: expected one input and one output, got {len(inputs)} and {len(graph.output)}")
    network = OnnxNetwork()
    network.source, network.result = inputs[0].name, graph.output[0].name
    kind = inputs[0].type.tensor_type
    if kind.elem_type not in (tensors.FLOAT16, tensors.BFLOAT16, tensors.FLOAT, tensors.DOUBLE):
        got = tensors.DataType.Name(kind.elem_type)  # type: ignore[attr-defined]
        raise NoRuleError(f"{path}: expected a floating-point input, got {inputs[0].name!r} of type {got}")
    batch, *sizes = [d.dim_value for d in kind.shape.dim] or [0]
    network.input_shape = tuple(sizes) if sizes and min(sizes) > 0 else None
    reader = _Reader(network, stored, len(sizes) + 1, batch)
    made = {network.source, *stored, ""}
    for i, node in enumerate(_with_activations(graph, stored)):
        if early := [name for name in node.input if name not in made]:
            raise DataError(f"{path}: expected nodes in the order of their values, got {early[0]!r} before it is made")
        made.update(node.output)
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            array = onnx.numpy_helper.to_array(attributes["value"])
            reader.check_new(node.output[0])
            stored[node.output[0]] = _numbers(array, node.output[0], path)
            continue
        if node.op_type == "Identity" and node.input[0] in stored and node.domain in _DOMAIN:
            reader.check_new(node.output[0])
            stored[node.output[0]] = stored[node.input[0]]
            continue
        if node.op_type == "Split":  # of several values: each of them by a node of its own
            for place, name in enumerate(node.output):
                one = _Node("Split", list(node.input), [name], f"{node.name}.{place}", node.domain)
                reader.add(i, one, {**attributes, "place": (place, len(node.output))})
            continue
        reader.add(i, node, attributes)
    reader.drop_borders()
    if network.result not in made:
        raise DataError(f"{path}: expected an output that a node makes, got {network.result!r}, which none does")
    for name, tensor in stored.items():
        network.register_buffer(_buffer(name), tensor)
    return network.eval()


class _Node(NamedTuple):
    """A node that is not in the file: several of it as one."""

    op_type: str
    input: list[str]
    output: list[str]
    name: str = ""
    domain: str = ""
    attribute: tuple[Any, ...] = ()


def _with_activations(graph: Any, stored: dict[str, Tensor]) -> list[Any]:
    """The nodes, with one Gelu for ``x (1 + erf(x / sqrt 2)) / 2`` and one Swish for ``x sigmoid(x)``.

    So older files write these, and products of two values have no constant.
    """
    made = {node.output[0]: node for node in graph.node if node.output}
    readers = collections.Counter(name for node in graph.node for name in node.input)
    readers.update(value.name for value in graph.output)

    def number(name: str) -> float | None:
        tensor = stored.get(name)
        return None if tensor is None or tensor.numel() != 1 else float(tensor)

    def split(name: str, kind: str, wanted: Callable[[str], bool]) -> str | None:
        """The other operand of the node of this kind that makes ``name``, if one operand is wanted."""
        node = made.get(name)
        if node is None or node.op_type != kind or len(node.input) != 2 or readers[name] != 1:
            return None
        for one, other in (node.input, reversed(node.input)) if kind != "Div" else (reversed(node.input),):
            if wanted(one):
                return str(other)
        return None

    def close(value: float) -> Callable[[str], bool]:
        return lambda name: (found := number(name)) is not None and math.isclose(found, value, rel_tol=1e-6)

    found: dict[str, tuple[str, str]] = {}
    for last in graph.node:
        if last.op_type == "Mul" and len(last.input) == 2:
            for a, b in (last.input, reversed(last.input)):
                gate = made.get(b)
                if gate is not None and gate.op_type == "Sigmoid" and list(gate.input) == [a] and readers[b] == 1:
                    found[last.output[0]] = ("Swish", a)
    for erf in graph.node:
        if erf.op_type != "Erf" or (x := split(erf.input[0], "Div", close(math.sqrt(2)))) is None:
            continue
        for last in graph.node:
            if last.op_type != "Mul" or len(last.input) != 2:
                continue
            for a, b in (last.input, reversed(last.input)):
                # x times half of the bracket, or half of x times the bracket.
                inner = split(b, "Mul", close(0.5)) if a == x else split(b, "Mul", x.__eq__) if close(0.5)(a) else None
                bracket = None if inner is None else split(inner, "Add", close(1.0))
                if bracket == erf.output[0] and readers[bracket] == 1:
                    found[last.output[0]] = ("Gelu", x)
    nodes = []
    for node in graph.node:
        kind, x = found.get(node.output[0], ("", "")) if node.output else ("", "")
        nodes.append(_Node(kind, [x], [node.output[0]]) if kind else node)
    # What only the written-out form reads is dropped.
    needed, kept = {value.name for value in graph.output}, []
    for node in reversed(nodes):
        if any(name in needed for name in node.output):
            kept.append(node)
            needed.update(node.input)
    return kept[::-1] if found else nodes


def _check_meaning(file: Any, path: str | Path) -> None:
    """Refuse files whose operators are not those that their names say."""
    versions = [entry.version for entry in file.opset_import if entry.domain in _DOMAIN]
    if versions and min(versions) < 7:
        raise NoRuleError(f"{path}: expected operators of version 7 or later, got {min(versions)}: export it again")
    own = [f.name for f in file.functions if f.domain in _DOMAIN]
    if own:
        raise NoRuleError(f"{path}: expected the operators of ONNX, got functions of the file in their place: {own}")


def _numbers(array: Any, name: str, path: str | Path) -> Tensor:
    try:
        return torch.from_numpy(array.copy())
    except TypeError:
        raise DataError(
            f"{path}: expected stored numbers in a format of numpy, such as float32, got {name!r} in {array.dtype}"
        ) from None


class _Reader:
    def __init__(self, network: OnnxNetwork, stored: dict[str, Tensor], rank: int, batch: int) -> None:
        self.network, self.stored, self.batch = network, stored, batch
        self.ranks = {network.source: rank}
        # What pads by pixels of the image: its input, the mode of torch, and the pads.
        self.bordered: dict[str, tuple[str, str, list[int]]] = {}

    def add(self, position: int, node: Any, attributes: dict[str, Any]) -> None:
        """Append one operator."""
        self.name = f"{position}:{node.name or node.op_type}".replace(".", "_")
        self.op, self.inputs, self.attributes = node.op_type, list(node.input), dict(attributes)
        self.output = node.output[0] if node.output else ""
        self.used = set(_HARMLESS)
        make = _OPERATORS.get(node.op_type) if node.domain in _DOMAIN else None
        if make is None:
            raise NoRuleError(
                f"{self.name}: expected one of the operators {', '.join(sorted(_OPERATORS))}, got "
                f"{node.domain + '.' if node.domain else ''}{node.op_type}: nothing is assumed to be 1-Lipschitz"
            )
        if len([name for name in node.output if name]) != 1:
            raise self.refuse("one output", f"{len(node.output)}")
        self.check_new(node.output[0])
        self.rank = self.ranks.get(self.inputs[0], 0)
        step, kept = make(self)
        if unknown := sorted(set(attributes) - self.used):
            raise self.refuse("attributes that its rule covers", f"{', '.join(unknown)}")
        self.ranks[node.output[0]] = self.rank
        self.network.steps.append((step, kept, node.output[0]))

    def check_new(self, name: str) -> None:
        """Refuse a name that is defined already: which tensor it is later on would be open."""
        if name in (*self.ranks, *self.stored):
            raise NoRuleError(f"expected a new name for each result, got {name!r}, which is defined already")

    def refuse(self, expected: str, got: str) -> NoRuleError:
        return NoRuleError(f"{self.name}: {self.op}: expected {expected}, got {got}")

    def weight(self, index: int) -> Tensor | None:
        """A stored operand; None if it is left out."""
        if index >= len(self.inputs) or not self.inputs[index]:
            return None
        tensor = self.stored.get(self.inputs[index])
        if tensor is None:
            raise self.refuse(f"stored weights as operand {index}", "a tensor that is computed")
        return tensor

    def needed(self, index: int) -> Tensor:
        tensor = self.weight(index)
        if tensor is None:
            raise self.refuse(f"operand {index}", "none")
        return tensor

    def take(self, name: str, default: Any) -> Any:
        """An attribute, or what it is where it is left out."""
        self.used.add(name)
        return self.attributes.get(name, default)

    def window(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Kernel, strides, dilations and the four paddings of a two-dimensional window."""
        pad = self.take("auto_pad", b"NOTSET")
        if pad not in (b"NOTSET", b"VALID"):
            raise self.refuse("explicit padding", f"{pad!r}")
        kernel = list(self.take("kernel_shape", ()))
        if self.rank != 4:
            raise self.refuse("images of two dimensions", f"a tensor of {self.rank} dimensions")
        strides, dilations = list(self.take("strides", (1, 1))), list(self.take("dilations", (1, 1)))
        pads = list(self.take("pads", (0, 0, 0, 0)))
        if (len(strides), len(dilations), len(pads)) != (2, 2, 4):
            raise self.refuse("two strides, two dilations and four paddings", f"{strides}, {dilations}, {pads}")
        return kernel, strides, dilations, pads

    def rounded_up(self, kernel: list[int], strides: list[int], pads: list[int]) -> bool:
        """True if windows may reach over the end; refused where torch and ONNX could mean different windows."""
        up = bool(self.take("ceil_mode", 0))
        if up and (any(pads) or any(s > k for s, k in zip(strides, kernel, strict=True))):
            raise self.refuse("no padding and overlapping windows with ceil_mode 1", f"{kernel}, {strides}, {pads}")
        return up

    def even_pads(self, pads: list[int]) -> tuple[int, int]:
        if pads[:2] != pads[2:]:
            raise self.refuse("the same padding on both sides", f"{pads}")
        return (pads[0], pads[1])

    def drop_borders(self) -> None:
        """Take out the paddings that convolutions have taken over."""
        read = {self.network.result, *(name for _, kept, _ in self.network.steps for name in kept)}
        self.network.steps = [s for s in self.network.steps if s[2] in read or s[2] not in self.bordered]

    def layer(self, module: nn.Module) -> tuple[Step, list[str]]:
        """The operator as a module on its first operand."""
        self.network.layers[self.name] = module
        name = self.name
        return (lambda network, values: network.layers[name](values[0])), self.inputs[:1]


def _filled(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    for name, tensor in tensors.items():
        value = None if tensor is None else tensor.clone()
        if name in module._buffers:
            module._buffers[name] = value
        else:
            setattr(module, name, None if value is None else nn.Parameter(value, requires_grad=False))
    return module


def _conv(r: _Reader) -> tuple[Step, list[str]]:
    weight, bias = r.needed(1), r.weight(2)
    kernel, strides, dilations, pads = r.window()
    groups = int(r.take("group", 1))
    if weight.ndim != 4 or kernel not in ([], list(weight.shape[2:])):
        raise r.refuse(f"a weight of four dimensions, kernel_shape {kernel}", f"{tuple(weight.shape)}")
    source, mode, border = r.bordered.get(r.inputs[0], (r.inputs[0], "zeros", pads))
    if mode != "zeros":
        reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        same = [*(n // 2 for n in reach), *(n - n // 2 for n in reach)]
        if any(pads) or not (border[:2] == border[2:] or (border == same and max(strides) == 1)):
            raise r.refuse(f"the padding {mode} on both sides, or as 'same' has it, and no zeros", f"{border}, {pads}")
        r.inputs[0], pads = source, border
    even = pads[:2] == pads[2:]
    padding: Any = tuple(pads[:2]) if even else "same" if mode != "zeros" else 0
    conv = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),  # type: ignore[arg-type]
        tuple(strides),  # type: ignore[arg-type]
        padding,
        tuple(dilations),  # type: ignore[arg-type]
        groups,
        padding_mode=mode,
        device="meta",
    )
    _filled(conv, weight=weight, bias=bias)
    if even or mode != "zeros":
        return r.layer(conv)
    top, left, bottom, right = pads
    return r.layer(nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), conv))


def _gemm(r: _Reader) -> tuple[Step, list[str]]:
    weight = r.needed(1)
    alpha, beta = float(r.take("alpha", 1.0)), float(r.take("beta", 1.0))
    if r.take("transA", 0) or alpha != 1 or r.rank != 2:
        raise r.refuse("samples times a matrix, alpha 1", f"transA={r.take('transA', 0)}, alpha={alpha}")
    weight = weight if r.take("transB", 0) else weight.T.contiguous()
    bias = r.weight(2)
    if bias is not None:
        bias = (beta * bias).expand(len(weight)).contiguous()
    return r.layer(_filled(nn.Linear(weight.shape[1], weight.shape[0], device="meta"), weight=weight, bias=bias))


def _matmul(r: _Reader) -> tuple[Step, list[str]]:
    weight = r.stored.get(r.inputs[1]) if len(r.inputs) == 2 else None
    if weight is None or weight.ndim != 2:
        return _elementwise(torch.matmul)(r)
    layer = nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    return r.layer(_filled(layer, weight=weight.T.contiguous(), bias=None))


def _max_pool(r: _Reader) -> tuple[Step, list[str]]:
    kernel, strides, dilations, pads = r.window()
    up = r.rounded_up(kernel, strides, pads)
    return r.layer(nn.MaxPool2d(kernel, strides, r.even_pads(pads), dilations, ceil_mode=up))  # type: ignore[arg-type]


def _average_pool(r: _Reader) -> tuple[Step, list[str]]:
    kernel, strides, dilations, pads = r.window()
    if dilations != [1, 1] or r.take("ceil_mode", 0):
        raise r.refuse("dilations 1 and ceil_mode 0", f"{dilations} and {r.take('ceil_mode', 0)}")
    counted = bool(r.take("count_include_pad", 0))
    return r.layer(nn.AvgPool2d(kernel, strides, r.even_pads(pads), count_include_pad=counted))  # type: ignore[arg-type]


def _global_average(r: _Reader) -> tuple[Step, list[str]]:
    if r.rank != 4:
        raise r.refuse("images of two dimensions", f"a tensor of {r.rank} dimensions")
    return r.layer(nn.AdaptiveAvgPool2d(1))


def _batch_norm(r: _Reader) -> tuple[Step, list[str]]:
    if r.take("training_mode", 0) or r.take("spatial", 1) != 1:
        raise r.refuse("training_mode 0 and spatial 1", f"{r.take('training_mode', 0)} and {r.take('spatial', 1)}")
    scale, shift, mean, var = (r.needed(i) for i in (1, 2, 3, 4))
    norm = nn.BatchNorm2d if r.rank == 4 else nn.BatchNorm1d
    module = norm(len(scale), eps=float(r.take("epsilon", 1e-5)), device="meta")
    _filled(module, weight=scale, bias=shift, running_mean=mean, running_var=var)
    module.num_batches_tracked = None
    return r.layer(module)


def _conv_transpose(r: _Reader) -> tuple[Step, list[str]]:
    weight, bias = r.needed(1), r.weight(2)
    kernel, strides, dilations, pads = r.window()
    groups, extra = int(r.take("group", 1)), list(r.take("output_padding", (0, 0)))
    if weight.ndim != 4 or "output_shape" in r.attributes or kernel not in ([], list(weight.shape[2:])):
        raise r.refuse(f"a weight of kernel_shape {kernel}, and no output_shape", f"{tuple(weight.shape)}")
    conv = nn.ConvTranspose2d(
        weight.shape[0],
        weight.shape[1] * groups,
        tuple(weight.shape[2:]),  # type: ignore[arg-type]
        tuple(strides),  # type: ignore[arg-type]
        r.even_pads(pads),
        tuple(extra),
        groups,
        dilation=tuple(dilations),  # type: ignore[arg-type]
        device="meta",
    )
    return r.layer(_filled(conv, weight=weight, bias=bias))


def _layer_norm(r: _Reader) -> tuple[Step, list[str]]:
    scale, shift = r.needed(1), r.weight(2)
    axis = int(r.take("axis", -1)) % max(r.rank, 1)
    if r.take("stash_type", 1) != 1 or axis != r.rank - scale.ndim:
        raise r.refuse("a scale of the normalised dimensions", f"axis {axis} and scale {tuple(scale.shape)}")
    module = nn.LayerNorm(tuple(scale.shape), eps=float(r.take("epsilon", 1e-5)), device="meta")
    return r.layer(_filled(module, weight=scale, bias=shift))


def _clip(r: _Reader) -> tuple[Step, list[str]]:
    low, high = (None if (t := r.weight(i)) is None else float(t) for i in (1, 2))
    if (low, high) == (0.0, 6.0):
        return r.layer(nn.ReLU6())
    if low is None or high is None:
        raise r.refuse("two limits", f"{low} and {high}")
    return r.layer(nn.Hardtanh(low, high))


def _gelu(r: _Reader) -> tuple[Step, list[str]]:
    return r.layer(nn.GELU(r.take("approximate", b"none").decode()))


def _softmax(r: _Reader) -> tuple[Step, list[str]]:
    return r.layer(nn.Softmax(int(r.take("axis", -1))))


def _activation(make: Callable[..., nn.Module], **arguments: tuple[str, float]) -> _Maker:
    """``make`` of attributes by their names in torch, each with the name and default that ONNX gives it."""

    def made(r: _Reader) -> tuple[Step, list[str]]:
        return r.layer(make(**{key: float(r.take(name, value)) for key, (name, value) in arguments.items()}))

    return made


def _identity(r: _Reader) -> tuple[Step, list[str]]:
    if len(r.inputs) > 2 and r.inputs[2]:
        raise r.refuse("dropout that is switched off", "an operand training_mode")
    return r.layer(nn.Identity())


def _flatten(r: _Reader) -> tuple[Step, list[str]]:
    if r.take("axis", 1) != 1:
        raise r.refuse("axis 1", f"{r.take('axis', 1)}")
    r.rank = 2
    return r.layer(nn.Flatten(1))


def _reshape(r: _Reader) -> tuple[Step, list[str]]:
    sizes = r.needed(1).tolist()
    # A first size of 1 comes from files that were made for one sample.
    first = (-1, 0, 1) if r.batch == 1 else (-1, 0)
    if not sizes or sizes[0] not in first or 0 in sizes[1:] or (r.take("allowzero", 0) and 0 in sizes):
        raise r.refuse("a shape that keeps the batch first", f"{sizes}")
    r.rank = len(sizes)
    return (lambda network, values: values[0].reshape(values[0].size(0), *sizes[1:])), r.inputs[:1]


def _reduce_mean(r: _Reader) -> tuple[Step, list[str]]:
    axes = list(r.take("axes", ())) or (r.needed(1).tolist() if len(r.inputs) > 1 else [])
    keep = bool(r.take("keepdims", 1))
    if not axes:
        raise r.refuse("axes other than the batch", "none")
    r.rank -= 0 if keep else len(axes)
    return (lambda network, values: values[0].mean(axes, keepdim=keep)), r.inputs[:1]


def _elementwise(function: Callable[[Any, Any], Tensor]) -> _Maker:
    def made(r: _Reader) -> tuple[Step, list[str]]:
        if len(r.inputs) != 2:
            raise r.refuse("two operands", f"{len(r.inputs)}")
        r.rank = max(r.ranks.get(name, 0) for name in r.inputs)
        return (lambda network, values: function(values[0], values[1])), r.inputs[:2]

    return made


def _transpose(r: _Reader) -> tuple[Step, list[str]]:
    order = list(r.take("perm", range(r.rank)[::-1]))
    return (lambda network, values: values[0].permute(order)), r.inputs[:1]


_BORDERS = {b"constant": "zeros", b"wrap": "circular", b"reflect": "reflect", b"edge": "replicate"}


def _pad(r: _Reader) -> tuple[Step, list[str]]:
    sizes, value = r.needed(1).tolist(), r.weight(2)
    mode = _BORDERS.get(r.take("mode", b"constant"))
    if mode is None or (value is not None and float(value)) or len(r.inputs) > 3:
        raise r.refuse("zeros around all dimensions", f"{r.take('mode', b'constant')!r} {value}")
    begin, end = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    if len(begin) != r.rank or begin[0] or end[0]:
        raise r.refuse("padding that leaves the batch alone", f"{sizes}")
    if mode != "zeros":
        if r.rank != 4 or begin[1] or end[1] or min(sizes) < 0:
            raise r.refuse("pixels copied around images", f"{sizes}")
        r.bordered[r.output] = (r.inputs[0], mode, [*begin[2:], *end[2:]])
        around = [begin[3], end[3], begin[2], end[2]]
        return (lambda network, values: F.pad(values[0], around, mode=mode)), r.inputs[:1]
    padding = [n for pair in zip(begin[:0:-1], end[:0:-1], strict=True) for n in pair]
    return (lambda network, values: F.pad(values[0], padding)), r.inputs[:1]


def _slice(r: _Reader) -> tuple[Step, list[str]]:
    starts, ends = r.needed(1).tolist(), r.needed(2).tolist()
    axes = list(range(len(starts))) if (t := r.weight(3)) is None else t.tolist()
    steps = [1] * len(starts) if (t := r.weight(4)) is None else t.tolist()
    index = [slice(None)] * r.rank
    for axis, *ends_of in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(*ends_of)
    return (lambda network, values: values[0][tuple(index)]), r.inputs[:1]


def _split(r: _Reader) -> tuple[Step, list[str]]:
    axis, (place, count) = int(r.take("axis", 0)), r.take("place", (0, 1))
    sizes = None if (t := r.weight(1)) is None else t.tolist()
    if int(r.take("num_outputs", count)) != count or (sizes is not None and len(sizes) != count):
        raise r.refuse(f"sizes of {count} outputs", f"{sizes}")

    def step(network: OnnxNetwork, values: list[Any]) -> Tensor:
        pieces: tuple[Tensor, ...] = values[0].chunk(count, axis) if sizes is None else values[0].split(sizes, axis)
        return pieces[place]

    return step, r.inputs[:1]


def _swish(r: _Reader) -> tuple[Step, list[str]]:
    if (alpha := float(r.take("alpha", 1.0))) != 1:
        raise r.refuse("alpha 1", f"{alpha}")
    return r.layer(nn.SiLU())


def _squeeze(r: _Reader) -> tuple[Step, list[str]]:
    axes = sorted(axis % r.rank for axis in r.needed(1).tolist())
    r.rank -= len(axes)
    return (lambda network, values: values[0].squeeze(axes)), r.inputs[:1]


def _unsqueeze(r: _Reader) -> tuple[Step, list[str]]:
    axes = r.needed(1).tolist()
    r.rank += len(axes)
    places = sorted(axis % r.rank for axis in axes)

    def step(network: OnnxNetwork, values: list[Any]) -> Tensor:
        y: Tensor = values[0]
        for place in places:
            y = y.unsqueeze(place)
        return y

    return step, r.inputs[:1]


def _concat(r: _Reader) -> tuple[Step, list[str]]:
    axis = int(r.take("axis", 1))
    r.rank = max(r.ranks.get(name, 0) for name in r.inputs)
    return (lambda network, values: torch.cat(values, axis)), r.inputs


_Maker = Callable[[_Reader], tuple[Step, list[str]]]

_OPERATORS: dict[str, _Maker] = {
    "Add": _elementwise(operator.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _elementwise(operator.truediv),
    "Dropout": _identity,
    "Elu": _activation(nn.ELU, alpha=("alpha", 1.0)),
    "Flatten": _flatten,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "HardSwish": _activation(nn.Hardswish),
    "Identity": _identity,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _activation(nn.LeakyReLU, negative_slope=("alpha", 0.01)),
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mish": _activation(nn.Mish),
    "Mul": _elementwise(operator.mul),
    "Pad": _pad,
    "ReduceMean": _reduce_mean,
    "Relu": _activation(nn.ReLU),
    "Reshape": _reshape,
    "Sigmoid": _activation(nn.Sigmoid),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": _elementwise(operator.sub),
    "Swish": _swish,
    "Tanh": _activation(nn.Tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
