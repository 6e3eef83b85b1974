"""ONNX files as networks of torch modules: a closed list of operators, weights as stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import DataError, NoRuleError
from lipkit.files import open_regular

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


def read_onnx(path: str | Path) -> OnnxNetwork:
    """The network of an ONNX file, in evaluation mode. Nothing in the file is executed.

    Raises:
        DataError: the file is missing or no ONNX, its graph does not have one input and one output, it stores
            numbers in a format that torch cannot read, or the package ``onnx`` is not installed.
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
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: not an ONNX file that can be read: {reason}") from error
    graph, tensors = file.graph, onnx.TensorProto
    _check_meaning(file, path)
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
    for i, node in enumerate(graph.node):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            array = onnx.numpy_helper.to_array(attributes["value"])
            reader.check_new(node.output[0])
            stored[node.output[0]] = _numbers(array, node.output[0], path)
            continue
        reader.add(i, node, attributes)
    for name, tensor in stored.items():
        network.register_buffer(_buffer(name), tensor)
    return network.eval()


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

    def add(self, position: int, node: Any, attributes: dict[str, Any]) -> None:
        """Append one operator."""
        self.name = f"{position}:{node.name or node.op_type}".replace(".", "_")
        self.op, self.inputs, self.attributes = node.op_type, list(node.input), dict(attributes)
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
        if pad not in (b"NOTSET", b"VALID") or (self.take("ceil_mode", 0)):
            raise self.refuse("explicit padding and ceil_mode 0", f"{pad!r}, {self.take('ceil_mode', 0)}")
        kernel = list(self.take("kernel_shape", ()))
        if self.rank != 4:
            raise self.refuse("images of two dimensions", f"a tensor of {self.rank} dimensions")
        return (
            kernel,
            list(self.take("strides", (1, 1))),
            list(self.take("dilations", (1, 1))),
            list(self.take("pads", (0, 0, 0, 0))),
        )

    def even_pads(self, pads: list[int]) -> tuple[int, int]:
        if pads[:2] != pads[2:]:
            raise self.refuse("the same padding on both sides", f"{pads}")
        return (pads[0], pads[1])

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
    _, strides, dilations, pads = r.window()
    groups = int(r.take("group", 1))
    if weight.ndim != 4:
        raise r.refuse("a weight of four dimensions", f"{tuple(weight.shape)}")
    even = pads[:2] == pads[2:]
    conv = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),  # type: ignore[arg-type]
        tuple(strides),  # type: ignore[arg-type]
        tuple(pads[:2]) if even else 0,  # type: ignore[arg-type]
        tuple(dilations),  # type: ignore[arg-type]
        groups,
        device="meta",
    )
    _filled(conv, weight=weight, bias=bias)
    if even:
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
    return r.layer(_filled(nn.Linear(1, 1, device="meta"), weight=weight, bias=bias))


def _matmul(r: _Reader) -> tuple[Step, list[str]]:
    weight = r.needed(1)
    if weight.ndim != 2:
        raise r.refuse("a matrix as the second operand", f"shape {tuple(weight.shape)}")
    return r.layer(_filled(nn.Linear(1, 1, device="meta"), weight=weight.T.contiguous(), bias=None))


def _max_pool(r: _Reader) -> tuple[Step, list[str]]:
    kernel, strides, dilations, pads = r.window()
    return r.layer(nn.MaxPool2d(kernel, strides, r.even_pads(pads), dilations))  # type: ignore[arg-type]


def _average_pool(r: _Reader) -> tuple[Step, list[str]]:
    kernel, strides, dilations, pads = r.window()
    if dilations != [1, 1]:
        raise r.refuse("dilations 1", f"{dilations}")
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


def _relu(r: _Reader) -> tuple[Step, list[str]]:
    return r.layer(nn.ReLU())


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
    if not sizes or sizes[0] not in first or 0 in sizes[1:] or r.take("allowzero", 0):
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


def _add(r: _Reader) -> tuple[Step, list[str]]:
    r.rank = max(r.ranks.get(name, 0) for name in r.inputs)
    return (lambda network, values: values[0] + values[1]), r.inputs[:2]


def _concat(r: _Reader) -> tuple[Step, list[str]]:
    axis = int(r.take("axis", 1))
    r.rank = max(r.ranks.get(name, 0) for name in r.inputs)
    return (lambda network, values: torch.cat(values, axis)), r.inputs


_OPERATORS: dict[str, Callable[[_Reader], tuple[Step, list[str]]]] = {
    "Add": _add,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Concat": _concat,
    "Conv": _conv,
    "Dropout": _identity,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "Identity": _identity,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "ReduceMean": _reduce_mean,
    "Relu": _relu,
    "Reshape": _reshape,
}
