"""ONNX files as networks of torch modules: a closed list of operators, weights as stored."""

from __future__ import annotations

import collections
import math
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import DataError, LipkitError, NoRuleError, first_line
from lipkit.files import open_regular, read_bytes
from lipkit.interop.reading import LARGEST, load
from lipkit.modules import Network

Step = Callable[["OnnxNetwork", list[Any]], Tensor]
_FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}  # as TensorProto numbers them
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
        DataError: the file or its weights are missing, no ONNX or not well-formed, its graph does not have one input
            and one output, it stores more than ``LARGEST`` numbers or a format that torch cannot read, or the package
            ``onnx`` is not installed.
        NoRuleError: an operator outside the list, by name, or a version or attributes of it that its rule does not
            cover; functions of the file; a name that is defined twice; an input that is no floating-point tensor.
    """
    try:
        import onnx
    except ImportError:
        raise DataError(f"{path}: expected the package onnx to read it, got none: pip install lipkit[onnx]") from None
    try:
        return _read(onnx.ModelProto.FromString(read_bytes(path, 1 << 31)), path)
    except LipkitError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: expected an ONNX file with its weights, got no {error.filename or path}") from None
    except Exception as error:  # protobuf and numpy have no common error
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{path}: not an ONNX file that can be read: {reason}") from error


def _read(file: Any, path: str | Path) -> OnnxNetwork:
    import onnx

    graph = file.graph
    inside = [a.t for node in graph.node for a in node.attribute if a.name == "value"]
    sizes = [list(t.dims) for t in (*graph.initializer, *inside)]
    if (total := sum(map(math.prod, sizes))) > LARGEST or min(map(min, filter(None, sizes)), default=0) < 0:
        raise DataError(f"{path}: expected at most {LARGEST} stored numbers, got {total}")
    if twice := [n for n, count in collections.Counter(t.name for t in graph.initializer).items() if count > 1]:
        raise NoRuleError(f"{path}: expected a new name for each stored tensor, got {twice}, defined twice")
    if graph.sparse_initializer:
        raise NoRuleError(f"{path}: expected dense weights, got {len(graph.sparse_initializer)} sparse ones")
    stored = {t.name: _numbers(t, t.name, path) for t in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    if len(inputs) != 1 or len(graph.output) != 1:
        raise DataError(f"{path}: expected one input and one output, got {len(inputs)} and {len(graph.output)}")
    network = OnnxNetwork()
    network.source, network.result = inputs[0].name, graph.output[0].name
    kind = inputs[0].type.tensor_type
    if (dtype := _FLOATS.get(kind.elem_type)) is None:
        got = onnx.TensorProto.DataType.Name(kind.elem_type)  # type: ignore[attr-defined]
        raise NoRuleError(f"{path}: expected a floating-point input, got {network.source!r} of type {got}")
    batch, *shape = [d.dim_value for d in kind.shape.dim] or [0]
    if not shape or not network.source:
        raise NoRuleError(f"{path}: expected a named input of samples with sizes, got {network.source!r}: {[batch]}")
    network.input_shape = tuple(shape) if min(shape) > 0 else None
    made = {network.source, *stored}
    opset, nodes = _nodes(file, path)
    for node in nodes:
        if early := [name for name in node.input if name and name not in made]:
            raise DataError(f"{path}: expected nodes in the order of their values, got {early[0]!r} before it is made")
        if again := made.intersection(node.output):
            raise NoRuleError(f"{path}: expected a new name for each result, got {again.pop()!r}, defined already")
        made.update(filter(None, node.output))
        if node.kind == "Constant" and "value" in node.attributes:
            stored[node.output[0]] = _numbers(node.attributes["value"], node.output[0], path)
        elif node.kind == "Identity" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
    reader = _Reader(network, stored, len(shape) + 1, batch, opset)
    for node in _with_activations(nodes, network.result, stored):
        if node.output[0] not in stored:
            reader.add(node)
    reader.drop_borders()
    if network.result not in reader.ranks:
        raise DataError(f"{path}: expected an output that a node makes, got {network.result!r}, which none does")
    for name in (name for _, kept, _ in network.steps for name in kept if name in stored):
        network.register_buffer(_buffer(name), stored[name])
    for name, tensor in network.state_dict().items():
        if tensor.dtype != dtype:
            raise DataError(f"{path}: expected numbers in the input's format {dtype}, got {name!r} in {tensor.dtype}")
    return network.eval()


class _Node(NamedTuple):
    """An operator of ONNX itself, in a version that its rule covers, or several of the file's as one."""

    kind: str
    input: list[str]
    output: list[str]
    name: str
    attributes: dict[str, Any]


def _nodes(file: Any, path: str | Path) -> tuple[int, list[_Node]]:
    """The version of the operators, and the nodes: what is of another domain ends here, so that no rule asks for it."""
    import onnx

    versions = {entry.version for entry in file.opset_import if entry.domain in _DOMAIN}
    newest = onnx.defs.onnx_opset_version()
    if len(versions) != 1 or not 7 <= min(versions) <= newest:
        raise NoRuleError(f"{path}: expected operators of one version from 7 to {newest}, got {sorted(versions)}")
    if own := [f"{f.domain}.{f.name}" for f in file.functions]:
        raise NoRuleError(f"{path}: expected operators of ONNX, got functions of the file: {own}: export it inlined")
    (opset,), nodes, context = versions, [], onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = file.ir_version, {"": opset}
    for position, node in enumerate(file.graph.node):
        name = f"{position}:{node.name or node.op_type}".replace(".", "_")
        _, covered = _OPERATORS.get(node.op_type, (None, ())) if node.domain in _DOMAIN else (None, ())
        if not covered:
            raise NoRuleError(
                f"{name}: expected one of the operators {', '.join(sorted(_OPERATORS))}, got "
                f"{node.domain + '.' if node.domain else ''}{node.op_type}: nothing is assumed to be 1-Lipschitz"
            )
        try:
            node.domain = ""
            onnx.checker.check_node(node, context)
        except onnx.checker.ValidationError as error:
            raise DataError(f"{name}: not well-formed in version {opset} of ONNX: {first_line(error)}") from None
        if (version := onnx.defs.get_schema(node.op_type, opset, "").since_version) not in covered:
            raise NoRuleError(f"{name}: expected {node.op_type} of version {covered}, got version {version}")
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes["outputs"] = outputs = list(node.output)
        pieces = [[one] for one in outputs] if node.op_type == "Split" else [outputs]
        nodes += [_Node(node.op_type, list(node.input), made, name, attributes) for made in pieces]
    return opset, nodes


def _with_activations(nodes: list[_Node], result: str, stored: dict[str, Tensor]) -> list[_Node]:
    """The nodes, with one Gelu for ``x (1 + erf(x / sqrt 2)) / 2`` and one Swish for ``x sigmoid(x)``.

    So older files write these, and products of two values have no constant.
    """
    made = {name: node for node in nodes for name in node.output}
    readers = collections.Counter([result, *(name for node in nodes for name in node.input)])

    def split(name: str, kind: str, wanted: Callable[[str, str], bool]) -> str | None:
        """The other operand of the node of this kind that makes ``name``, if one operand is wanted."""
        node = made.get(name)
        if node is None or node.kind != kind or len(node.input) != 2 or readers[name] != 1:
            return None
        pairs = (node.input, node.input[::-1]) if kind != "Div" else (node.input[::-1],)
        return next((other for one, other in pairs if wanted(one, other)), None)

    def close(value: float) -> Callable[[str, str], bool]:
        """True for a stored number; of more dimensions, it would give them to the product."""
        return lambda name, _: (
            name in stored and stored[name].shape in ((), (1,)) and math.isclose(stored[name], value, rel_tol=1e-7)
        )

    def gate(name: str | None) -> str | None:
        """The x of ``1 + erf(x / sqrt 2)``."""
        inner = split(name or "", "Add", close(1.0)) or ""
        erf = made.get(inner)
        read = erf is not None and erf.kind == "Erf" and readers[inner] == 1
        return split(erf.input[0], "Div", close(math.sqrt(2))) if erf and read else None

    found: dict[str, tuple[str, str]] = {}
    for last in nodes:
        for a, b in (last.input, last.input[::-1]) if last.kind == "Mul" else ():
            sigmoid = made.get(b)
            if sigmoid is not None and sigmoid.kind == "Sigmoid" and sigmoid.input == [a] and readers[b] == 1:
                found[last.output[0]] = ("Swish", a)
            # x times half of the gate, or half of x times the gate.
            elif gate(split(b, "Mul", close(0.5))) == a:
                found[last.output[0]] = ("Gelu", a)
            elif close(0.5)(a, b) and (x := split(b, "Mul", lambda one, other: gate(one) == other)):
                found[last.output[0]] = ("Gelu", x)
    # What only the written-out form reads is dropped.
    needed, kept = {result}, []
    for node in reversed(nodes):
        kind, x = found.get(node.output[0], ("", ""))
        node = _Node(kind, [x], node.output, node.name, {}) if kind else node
        if not found or needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    return kept[::-1]


def _numbers(tensor: Any, name: str, path: str | Path) -> Tensor:
    """A stored tensor, from the file or from the part beside it that it names."""
    import onnx

    try:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        content = _beside(tensor, path, math.prod(tensor.dims) * dtype.itemsize)
        return torch.from_numpy(np.frombuffer(content, dtype).reshape(tensor.dims))
    except TypeError:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)  # type: ignore[attr-defined]
        raise DataError(
            f"{path}: expected stored numbers in a format of numpy, such as float32, got {name!r} in {kind}"
        ) from None


def _beside(tensor: Any, path: str | Path, size: int) -> bytearray:
    """The bytes of a tensor in a regular file within the folder of ``path``; no more than its sizes take is read."""
    part, folder = {entry.key: entry.value for entry in tensor.external_data}, Path(path).parent.resolve()
    beside, offset = (folder / part["location"]).resolve(), int(part.get("offset", 0))
    if not beside.is_relative_to(folder):
        raise DataError(f"{path}: expected weights within the folder of the file, got {part['location']!r}")
    with open_regular(beside) as file:
        held = os.fstat(file.fileno()).st_size - offset
        if offset < 0 or not int(part.get("length", held)) == size <= held:
            raise DataError(f"{path}: expected {size} bytes of {tensor.name!r}, got {part}, and {held} in the file")
        file.seek(offset)
        return bytearray(file.read(size))


class _Reader:
    def __init__(self, network: OnnxNetwork, stored: dict[str, Tensor], rank: int, batch: int, opset: int) -> None:
        self.network, self.stored, self.batch, self.opset = network, stored, batch, opset
        self.ranks = {network.source: rank}
        # What pads by pixels of the image: its input, the mode of torch, and the pads.
        self.bordered: dict[str, tuple[str, str, list[int]]] = {}

    def add(self, node: _Node) -> None:
        """Append one operator."""
        self.name, self.op, self.inputs, self.attributes = node.name, node.kind, list(node.input), node.attributes
        if len([name for name in node.output if name]) != 1:
            raise self.refuse("one output", f"{len(node.output)}")
        self.output, self.used = node.output[0], {"outputs", *_HARMLESS}
        self.rank = max(map(self.rank_of, self.inputs[:1]), default=0)
        try:
            step, kept = _OPERATORS[node.kind][0](self)
        except LipkitError:
            raise
        except Exception as error:  # of torch, about what the rule asks it for
            raise self.refuse("what its rule covers", f"{type(error).__name__}: {first_line(error)}") from error
        if unknown := sorted(set(self.attributes) - self.used):
            raise self.refuse("attributes that its rule covers", f"{', '.join(unknown)}")
        self.ranks[self.output] = self.rank
        self.network.steps.append((step, kept, self.output))

    def rank_of(self, name: str) -> int:
        """Dimensions of a value, with the batch."""
        return self.stored[name].ndim if name in self.stored else self.ranks.get(name, 0)

    def axis(self, axis: int) -> int:
        """An axis, counted from the start; the batch is none, and before version 11 nothing is counted from the end."""
        if not (-self.rank if self.opset >= 11 else 0) <= axis < self.rank or axis % self.rank == 0:
            raise self.refuse(f"an axis from 1 to {self.rank - 1}, behind the batch", f"{axis}")
        return axis % self.rank

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

    def numbers(self, name: str, index: int) -> Any:
        """An attribute in older versions, an operand in newer ones: onnx has checked which it is."""
        given, tensor = self.take(name, None), self.weight(index)
        return given if tensor is None else tensor.tolist()

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
        if pad == b"VALID" and "pads" in self.attributes:
            raise self.refuse("no pads beside auto_pad=VALID", f"{pads}")
        if (len(kernel or (0, 0)), len(strides), len(dilations), len(pads)) != (2, 2, 2, 4):
            got = f"{kernel}, {strides}, {dilations}, {pads}"
            raise self.refuse("two sizes, two strides, two dilations and four paddings", got)
        return kernel, strides, dilations, pads

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
        value, place = None if tensor is None else tensor.clone(), getattr(module, name)
        if value is not None and value.shape != place.shape:
            raise ValueError(f"{name} of shape {tuple(value.shape)}, not {tuple(place.shape)}")
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
    window: dict[str, Any] = {"kernel_size": tuple(weight.shape[2:]), "padding": padding, "padding_mode": mode}
    window |= {"stride": tuple(strides), "dilation": tuple(dilations), "groups": groups, "device": "meta"}
    conv = nn.Conv2d(weight.shape[1] * groups, weight.shape[0], **window)
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
    weight = weight if r.take("transB", 0) else weight.mT.contiguous()
    bias = r.weight(2)
    if bias is not None:
        flat = bias.squeeze(0) if bias.ndim == 2 else bias
        bias = (beta * flat).expand(len(weight)).contiguous()
    return r.layer(_filled(nn.Linear(weight.shape[1], weight.shape[0], device="meta"), weight=weight, bias=bias))


def _matmul(r: _Reader) -> tuple[Step, list[str]]:
    weight = r.stored.get(r.inputs[1]) if len(r.inputs) == 2 else None
    if min(map(r.rank_of, r.inputs)) < 2:
        raise r.refuse("matrices", f"operands of {list(map(r.rank_of, r.inputs))} dimensions")
    if weight is None or weight.ndim != 2:
        return _elementwise(torch.matmul)(r)
    layer = nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    return r.layer(_filled(layer, weight=weight.T.contiguous(), bias=None))


def _max_pool(r: _Reader) -> tuple[Step, list[str]]:
    kernel, strides, dilations, pads = r.window()
    up = bool(r.take("ceil_mode", 0))
    # Over the end, or on nothing but padding, runtimes mean different windows.
    if (up and any(s > k for s, k in zip(strides, kernel, strict=True))) or (any(pads) and (up or max(dilations) > 1)):
        got = f"{kernel}, {strides}, {dilations}, {pads}"
        raise r.refuse("overlapping windows with ceil_mode 1, and no pads beside it or dilations", got)
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
    if any(n >= stride for n, stride in zip(extra, strides, strict=True)):
        raise r.refuse(f"output_padding below the strides {strides}", f"{extra}")
    window: dict[str, Any] = {"kernel_size": tuple(weight.shape[2:]), "padding": r.even_pads(pads), "groups": groups}
    window |= {"stride": tuple(strides), "dilation": tuple(dilations), "output_padding": tuple(extra), "device": "meta"}
    conv = nn.ConvTranspose2d(weight.shape[0], weight.shape[1] * groups, **window)
    return r.layer(_filled(conv, weight=weight, bias=bias))


def _layer_norm(r: _Reader) -> tuple[Step, list[str]]:
    scale, shift = r.needed(1), r.weight(2)
    axis = r.axis(r.take("axis", -1))
    if r.take("stash_type", 1) != 1 or axis != r.rank - scale.ndim:
        raise r.refuse("a scale of the normalised dimensions", f"axis {axis} and scale {tuple(scale.shape)}")
    module = nn.LayerNorm(tuple(scale.shape), eps=float(r.take("epsilon", 1e-5)), device="meta")
    return r.layer(_filled(module, weight=scale, bias=shift))


def _clip(r: _Reader) -> tuple[Step, list[str]]:
    low, high = (None if (n := r.numbers(name, i)) is None else float(n) for i, name in ((1, "min"), (2, "max")))
    if (low, high) == (0.0, 6.0):
        return r.layer(nn.ReLU6())
    if low is None or high is None or not low < high:
        raise r.refuse("two limits, the lower one first", f"{low} and {high}")
    return r.layer(nn.Hardtanh(low, high))


def _gelu(r: _Reader) -> tuple[Step, list[str]]:
    return r.layer(nn.GELU(r.take("approximate", b"none").decode()))


def _softmax(r: _Reader) -> tuple[Step, list[str]]:
    axis = r.axis(r.take("axis", -1 if r.opset >= 13 else 1))
    if r.opset >= 13 or axis == r.rank - 1:
        return r.layer(nn.Softmax(axis))
    # Before version 13: over all dimensions from the axis on.
    step, kept = r.layer(nn.Softmax(axis))
    return (lambda network, values: step(network, [values[0].flatten(axis)]).reshape(values[0].shape)), kept


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
    if (axis := r.axis(r.take("axis", 1))) != 1:
        raise r.refuse("axis 1", f"{axis}")
    r.rank = 2
    return r.layer(nn.Flatten(1))


def _reshape(r: _Reader) -> tuple[Step, list[str]]:
    sizes = r.needed(1).tolist()
    # A first size of 1 comes from files that were made for one sample.
    first = {-1: True, 0: not r.take("allowzero", 0), 1: r.batch == 1}
    if not sizes or not first.get(sizes[0]) or 0 in sizes[1:] or sizes.count(-1) > 1:
        raise r.refuse("a shape that keeps the batch first", f"{sizes}")
    r.rank = len(sizes)
    return (lambda network, values: values[0].reshape(values[0].size(0), *sizes[1:])), r.inputs[:1]


def _reduce_mean(r: _Reader) -> tuple[Step, list[str]]:
    axes = [r.axis(axis) for axis in r.numbers("axes", 1) or ()]
    keep = bool(r.take("keepdims", 1))
    if not axes:
        raise r.refuse("axes other than the batch", "none")
    r.rank -= 0 if keep else len(axes)
    return (lambda network, values: values[0].mean(axes, keepdim=keep)), r.inputs[:1]


def _elementwise(function: Callable[[Any, Any], Tensor]) -> _Maker:
    def made(r: _Reader) -> tuple[Step, list[str]]:
        r.rank = max(map(r.rank_of, r.inputs))
        return (lambda network, values: function(values[0], values[1])), r.inputs[:2]

    return made


def _transpose(r: _Reader) -> tuple[Step, list[str]]:
    order = list(r.take("perm", range(r.rank)[::-1]))
    return (lambda network, values: values[0].permute(order)), r.inputs[:1]


_BORDERS = {b"constant": "zeros", b"wrap": "circular", b"reflect": "reflect", b"edge": "replicate"}


def _pad(r: _Reader) -> tuple[Step, list[str]]:
    sizes, value = list(r.numbers("pads", 1)), r.numbers("value", 2)
    mode = _BORDERS.get(r.take("mode", b"constant"))
    if mode is None or value not in (None, 0) or any(r.inputs[3:]):
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
    starts, ends, axes, steps = (r.numbers(name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1))
    index: dict[int, slice] = {}
    for axis, *part in zip(axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True):
        # Of the batch all is kept.
        place = 0 if axis == 0 and part[0] == 0 and part[1] >= 2**31 - 1 and part[2] == 1 else r.axis(axis)
        if part[2] < 1 or place in index:
            raise r.refuse("steps from 1 on, each axis once", f"steps {steps}, axes {axes}")
        index[place] = slice(*part) if place else slice(None)
    every = tuple(index.get(place, slice(None)) for place in range(r.rank))
    return (lambda network, values: values[0][every]), r.inputs[:1]


def _split(r: _Reader) -> tuple[Step, list[str]]:
    axis, outputs, sizes = r.axis(r.take("axis", 0)), r.take("outputs", []), r.numbers("split", 1)
    place, count = outputs.index(r.output), len(outputs)
    if r.take("num_outputs", count) != count or (sizes is not None and len(sizes) != count):
        raise r.refuse(f"sizes of {count} outputs", f"{sizes}")

    # torch refuses sizes that do not add up.
    return (lambda network, values: values[0].split(sizes or [values[0].shape[axis] // count] * count, axis)[place]), (
        r.inputs[:1]
    )


def _swish(r: _Reader) -> tuple[Step, list[str]]:
    if (alpha := float(r.take("alpha", 1.0))) != 1:
        raise r.refuse("alpha 1", f"{alpha}")
    return r.layer(nn.SiLU())


def _squeeze(r: _Reader) -> tuple[Step, list[str]]:
    axes = [r.axis(axis) for axis in r.numbers("axes", 1) or ()]
    if not axes or len(set(axes)) < len(axes):
        raise r.refuse("axes, each once", f"{axes}")
    r.rank -= len(axes)

    # torch's squeeze keeps sizes other than 1; this reshape refuses them.
    left = [axis for axis in range(r.rank + len(axes)) if axis not in axes]
    return (lambda network, values: values[0].reshape([values[0].shape[axis] for axis in left])), r.inputs[:1]


def _unsqueeze(r: _Reader) -> tuple[Step, list[str]]:
    axes = list(r.numbers("axes", 1))
    r.rank += len(axes)
    places = sorted({r.axis(axis) for axis in axes})
    if len(places) < len(axes):
        raise r.refuse("axes, each once", f"{axes}")

    index = tuple(None if place in places else slice(None) for place in range(r.rank))
    return (lambda network, values: values[0][index]), r.inputs[:1]


def _concat(r: _Reader) -> tuple[Step, list[str]]:
    r.rank = max(map(r.rank_of, r.inputs))
    axis = r.axis(r.take("axis", 1))
    return (lambda network, values: torch.cat(values, axis)), r.inputs


def _inside(r: _Reader) -> tuple[Step, list[str]]:
    raise r.refuse("it as a part of a Gelu, or a stored tensor as its value", "another form")


_Maker = Callable[[_Reader], tuple[Step, list[str]]]

# By operator: its rule, and the versions of its definition, as ONNX counts them, whose meaning the rule has. Of a newer
# definition nothing is known, before 7 operators mean something else.
_OPERATORS: dict[str, tuple[_Maker, tuple[int, ...]]] = {
    "Add": (_elementwise(operator.add), (7, 13, 14)),
    "AveragePool": (_average_pool, (7, 10, 11, 19, 22)),
    "BatchNormalization": (_batch_norm, (7, 9, 14, 15)),
    "Clip": (_clip, (6, 11, 12, 13)),
    "Concat": (_concat, (4, 11, 13)),
    "Constant": (_inside, (1, 9, 11, 12, 13, 19, 21, 23, 24, 25)),
    "Conv": (_conv, (1, 11, 22)),
    "ConvTranspose": (_conv_transpose, (1, 11, 22)),
    "Div": (_elementwise(operator.truediv), (7, 13, 14)),
    "Dropout": (_identity, (7, 10, 12, 13, 22)),
    "Elu": (_activation(nn.ELU, alpha=("alpha", 1.0)), (6, 22)),
    "Erf": (_inside, (9, 13)),
    "Flatten": (_flatten, (1, 9, 11, 13, 21, 23, 24, 25)),
    "Gelu": (_gelu, (20,)),
    "Gemm": (_gemm, (7, 9, 11, 13)),
    "GlobalAveragePool": (_global_average, (1, 22)),
    "HardSwish": (_activation(nn.Hardswish), (14, 22)),
    "Identity": (_identity, (1, 13, 14, 16, 19, 21, 23, 24, 25)),
    "LayerNormalization": (_layer_norm, (17,)),
    "LeakyRelu": (_activation(nn.LeakyReLU, negative_slope=("alpha", 0.01)), (6, 16)),
    "MatMul": (_matmul, (1, 9, 13)),
    "MaxPool": (_max_pool, (1, 8, 10, 11, 12, 22)),
    "Mish": (_activation(nn.Mish), (18, 22)),
    "Mul": (_elementwise(operator.mul), (7, 13, 14)),
    "Pad": (_pad, (2, 11, 13, 18, 19, 21, 23, 24, 25)),
    "ReduceMean": (_reduce_mean, (1, 11, 13, 18)),
    "Relu": (_activation(nn.ReLU), (6, 13, 14)),
    "Reshape": (_reshape, (5, 13, 14, 19, 21, 23, 24, 25)),
    "Sigmoid": (_activation(nn.Sigmoid), (6, 13)),
    "Slice": (_slice, (1, 10, 11, 13)),
    "Softmax": (_softmax, (1, 11, 13)),
    "Split": (_split, (2, 11, 13, 18)),
    "Squeeze": (_squeeze, (1, 11, 13, 21, 23, 24, 25)),
    "Sub": (_elementwise(operator.sub), (7, 13, 14)),
    "Swish": (_swish, (24,)),
    "Tanh": (_activation(nn.Tanh), (6, 13)),
    "Transpose": (_transpose, (1, 13, 21, 23, 24, 25)),
    "Unsqueeze": (_unsqueeze, (1, 11, 13, 21, 23, 24, 25)),
}
