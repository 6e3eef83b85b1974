"""Files of ``torch.export`` (.pt2) as networks: the graph is read as text, numbers as bytes, nothing is executed.

``torch.export.load`` unpickles parts of such a file; here a part that is pickled is refused.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import DataError, NoRuleError
from lipkit.files import open_regular
from lipkit.interop.reading import LARGEST, load
from lipkit.interop.runtimes import CLAIM, claimed, program_bytes
from lipkit.modules import Network

# Major version of the schema, of which the letters and numbers below are.
SCHEMA = 8
_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
# Checks of sizes that torch puts between the operators; export looks at the sizes itself.
_CHECKS = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")


def _batch_norm(
    input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
    eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _slice(self: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    return self[(slice(None),) * (dim % self.ndim) + (slice(start, end, step),)]


def _add(self: Any, other: Any, alpha: float = 1) -> Any:
    return self + (other if alpha == 1 else alpha * other)


def _subtract(self: Any, other: Any, alpha: float = 1) -> Any:
    return self - (other if alpha == 1 else alpha * other)


def _softmax(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return F.softmax(self, dim, dtype=dtype)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    return F.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


def _group_norm(
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Tensor:
    return F.group_norm(input, num_groups, weight, bias, eps)


def _product(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda input, weight, bias=None, **options: function(input, weight, bias, **options)


# Operators of aten by name, with the arguments of their schemas. A trailing underscore (in place) is looked up without.
OPERATORS: dict[str, Callable[..., Any]] = {
    "adaptive_avg_pool2d.default": lambda self, output_size: F.adaptive_avg_pool2d(self, tuple(output_size)),
    "add.Tensor": _add,
    "avg_pool2d.default": lambda self, kernel_size, stride=(), *args, **kwargs: F.avg_pool2d(
        self, kernel_size, stride or None, *args, **kwargs
    ),
    "batch_norm.default": _batch_norm,
    "cat.default": lambda tensors, dim=0: torch.cat(tensors, dim),
    "chunk.default": lambda self, chunks, dim=0: self.chunk(chunks, dim),
    "clamp.default": lambda self, min=None, max=None: self.clamp(min, max),
    "clone.default": lambda self, memory_format=None: self.clone(),
    "contiguous.default": lambda self, memory_format=None: self.contiguous(),
    "conv1d.default": _product(F.conv1d),
    "conv2d.default": _product(F.conv2d),
    "conv2d.padding": _product(F.conv2d),
    "conv_transpose2d.input": F.conv_transpose2d,
    "detach.default": lambda self: self.detach(),
    "detach_.default": lambda self: self.detach(),
    "div.Tensor": lambda self, other: self / other,
    "dropout.default": lambda input, p, train: F.dropout(input, p, train),
    "elu.default": lambda self, alpha=1.0, scale=1.0, input_scale=1.0: F.elu(self, _one(alpha, scale, input_scale)),
    "expand.default": lambda self, size, implicit=False: self.expand(*size),
    "flatten.using_ints": lambda self, start_dim=0, end_dim=-1: self.flatten(start_dim, end_dim),
    "gelu.default": lambda self, approximate="none": F.gelu(self, approximate=approximate),
    "group_norm.default": _group_norm,
    "hardsigmoid.default": lambda self: F.hardsigmoid(self),
    "hardswish.default": lambda self: F.hardswish(self),
    "hardtanh.default": lambda self, min_val=-1.0, max_val=1.0: F.hardtanh(self, min_val, max_val),
    "layer_norm.default": _layer_norm,
    "leaky_relu.default": lambda self, negative_slope=0.01: F.leaky_relu(self, negative_slope),
    "linear.default": _product(F.linear),
    "matmul.default": lambda self, other: torch.matmul(self, other),
    "max_pool2d.default": lambda self, kernel_size, stride=(), *args, **kwargs: F.max_pool2d(
        self, kernel_size, stride or None, *args, **kwargs
    ),
    "maximum.default": lambda self, other: torch.maximum(self, other),
    "mean.dim": lambda self, dim, keepdim=False: self.mean(dim, keepdim=keepdim),
    "minimum.default": lambda self, other: torch.minimum(self, other),
    "mish.default": lambda self: F.mish(self),
    "mul.Tensor": lambda self, other: self * other,
    "narrow.default": lambda self, dim, start, length: self.narrow(dim, start, length),
    "neg.default": lambda self: -self,
    "pad.default": lambda self, pad, mode="constant", value=None: F.pad(self, tuple(pad), mode, value),
    "permute.default": lambda self, dims: self.permute(*dims),
    "pixel_shuffle.default": lambda self, upscale_factor: F.pixel_shuffle(self, upscale_factor),
    "pixel_unshuffle.default": lambda self, downscale_factor: F.pixel_unshuffle(self, downscale_factor),
    "prelu.default": lambda self, weight: F.prelu(self, weight),
    "relu.default": lambda self: F.relu(self),
    "relu6.default": lambda self: F.relu6(self),
    "reshape.default": lambda self, shape: self.reshape(*shape),
    "roll.default": lambda self, shifts, dims=(): self.roll(tuple(shifts), tuple(dims)),
    "select.int": lambda self, dim, index: self.select(dim, index),
    "sigmoid.default": lambda self: self.sigmoid(),
    "silu.default": lambda self: F.silu(self),
    "slice.Tensor": _slice,
    "softmax.int": _softmax,
    "softplus.default": lambda self, beta=1.0, threshold=20.0: F.softplus(self, beta, threshold),
    "split.Tensor": lambda self, split_size, dim=0: self.split(split_size, dim),
    "split_with_sizes.default": lambda self, split_sizes, dim=0: self.split(list(split_sizes), dim),
    "squeeze.dim": lambda self, dim: self.squeeze(dim),
    "squeeze.dims": lambda self, dim: self.squeeze(tuple(dim)),
    "sub.Tensor": _subtract,
    "sym_size.int": lambda self, dim: self.size(dim),
    "tanh.default": lambda self: self.tanh(),
    "transpose.int": lambda self, dim0, dim1: self.transpose(dim0, dim1),
    "unflatten.int": lambda self, dim, sizes: self.unflatten(dim, tuple(sizes)),
    "unsqueeze.default": lambda self, dim: self.unsqueeze(dim),
    "upsample_nearest2d.vec": lambda input, output_size, scale_factors: F.interpolate(
        input, output_size and tuple(output_size), scale_factors and tuple(scale_factors)
    ),
    "view.default": lambda self, size: self.view(*size),
}
_OF_SIZES: dict[str, Callable[..., Any]] = {
    "_operator.add": lambda a, b: a + b,
    "_operator.floordiv": lambda a, b: a // b,
    "_operator.mul": lambda a, b: a * b,
}
# In place, what is read later through another name changes too: these are called as such, and export looks at it.
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "add_.Tensor": lambda self, other, alpha=1: self.add_(other, alpha=alpha),
    "clamp_.default": lambda self, min=None, max=None: self.clamp_(min, max),
    "div_.Tensor": lambda self, other: self.div_(other),
    "elu_.default": lambda self, alpha=1.0: F.elu_(self, alpha),
    "hardtanh_.default": lambda self, min_val=-1.0, max_val=1.0: F.hardtanh_(self, min_val, max_val),
    "leaky_relu_.default": lambda self, negative_slope=0.01: F.leaky_relu_(self, negative_slope),
    "mul_.Tensor": lambda self, other: self.mul_(other),
    "relu_.default": lambda self: self.relu_(),
    "sigmoid_.default": lambda self: self.sigmoid_(),
    "silu_.default": lambda self: F.silu(self, inplace=True),
    "sub_.Tensor": lambda self, other, alpha=1: self.sub_(other, alpha=alpha),
    "tanh_.default": lambda self: self.tanh_(),
}


def _one(alpha: float, *others: float) -> float:
    if any(value != 1 for value in others):
        raise NoRuleError(f"aten.elu: expected scale and input_scale 1, got {others}")
    return alpha


class ProgramNetwork(nn.Module):
    """The graph of a .pt2 file as calls of torch's functions, in the file's order.

    Attributes:
        input_shape: of one sample as the file says, or None where it leaves sizes open.
    """

    input_shape: tuple[int, ...] | None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable[..., Any], dict[str, Any], list[str], bool]] = []
        self.names: dict[str, str] = {}
        self.source = self.result = ""

    def forward(self, x: Tensor) -> Any:
        values: dict[str, Any] = {name: getattr(self, attribute) for name, attribute in self.names.items()}
        values[self.source] = x
        for function, arguments, outputs, several in self.steps:
            made = function(**{name: _value(argument, values) for name, argument in arguments.items()})
            values.update(zip(outputs, made, strict=True) if several else [(outputs[0], made)])
        return values[self.result]


def load_program(
    path: str | Path, input_shape: tuple[int, ...] | None = None, *, box: tuple[float, float] | None = None
) -> Network:
    """The exported network of a .pt2 file: to be bounded, certified, attacked and saved like any other.

    Args:
        path: the file, written by ``torch.export.save`` with a batch of any size (``dynamic_shapes``).
        input_shape: of one sample, where the file leaves it open.
        box: the range of the inputs, see `lipkit.export`.

    Raises:
        DataError, NoRuleError: see `read_program`, and `lipkit.export` for what its graph has no plain form of; values
            of too many numbers, see `lipkit.interop.reading.load`.
        ShapeError: no ``input_shape``, or another one than the file says.
    """
    return load(read_program(path), path, input_shape, box)


def read_program(path: str | Path) -> ProgramNetwork | Network:
    """The network of a .pt2 file, in evaluation mode. Nothing in the file is executed or unpickled.

    Raises:
        DataError: the file is missing, no archive of one program, damaged, or of another version of the format.
        NoRuleError: numbers that are pickled; an operator outside the list, by name; more than one input or output, or
            a program that changes its buffers (one that was exported in training mode).
    """
    try:
        with open_regular(path) as file:
            archive = zipfile.ZipFile(file)
            program = _json(archive, r"models/", path)
            if (major := program["schema_version"]["major"]) != SCHEMA:
                raise DataError(f"{path}: expected version {SCHEMA} of the format of torch.export, got {major}")
            state = _tensors(archive, "weights", path)
            stored = {**state, **_tensors(archive, "constants", path)}
            for name in (n for n in archive.namelist() if n.endswith(f"extra/{CLAIM}")):
                text = _entry(archive, name, path).decode()
                ours = claimed(text, state, lambda network: _written_alike(network, program, stored))
                if ours is not None:
                    return ours
            return _network(program["graph_module"], stored, path)
    except (DataError, NoRuleError):
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: expected a file of torch.export, got none") from None
    except Exception as error:  # a damaged file can break any of the assumptions
        raise DataError(
            f"{path}: not a file of torch.export that can be read: {type(error).__name__}, {error}"
        ) from None


def _graph(program: Any) -> Any:
    """What a program computes, without where in the source each node was made."""
    module = program["graph_module"]
    nodes = [{**node, "metadata": None} for node in module["graph"]["nodes"]]
    return {**module, "graph": {**module["graph"], "nodes": nodes}}


def _written_alike(network: Network, program: Any, stored: Mapping[str, Tensor]) -> bool:
    """Whether a file has the graph and, to the bit, the numbers of what is written of a network."""
    with zipfile.ZipFile(io.BytesIO(program_bytes(network))) as archive:
        other = _json(archive, r"models/", "")
        numbers = {**_tensors(archive, "weights", ""), **_tensors(archive, "constants", "")}
    same = numbers.keys() == stored.keys() and all(torch.equal(t, stored[name]) for name, t in numbers.items())
    return same and _graph(program) == _graph(other)


def _network(module: Mapping[str, Any], stored: Mapping[str, Tensor], path: str | Path) -> ProgramNetwork:
    graph, signature = module["graph"], module["signature"]
    network, inputs = ProgramNetwork(), []
    for spec in signature["input_specs"]:
        ((kind, content),) = spec.items()
        if kind == "user_input":
            inputs.append(content["arg"].get("as_tensor", {}).get("name"))
            continue
        key = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
        if kind not in key:
            raise NoRuleError(f"{path}: expected parameters, buffers and one input, got an input of kind {kind!r}")
        attribute = f"stored{len(network.names)}"
        network.register_buffer(attribute, stored[content[key[kind]]])
        network.names[content["arg"]["name"]] = attribute
    outputs = [next(iter(spec.items())) for spec in signature["output_specs"]]
    if len(inputs) != 1 or inputs[0] is None or [kind for kind, _ in outputs] != ["user_output"]:
        raise NoRuleError(
            f"{path}: expected one tensor as input, one as output and no change of buffers, got {len(inputs)} inputs "
            f"and outputs of kinds {[kind for kind, _ in outputs]}: export in evaluation mode"
        )
    network.source, network.result = inputs[0], outputs[0][1]["arg"]["as_tensor"]["name"]
    meta = graph["tensor_values"][network.source]
    if not _DTYPES[meta["dtype"]].is_floating_point:
        raise NoRuleError(f"{path}: expected a floating-point input, got {_DTYPES[meta['dtype']]}")
    sizes = [size.get("as_int", 0) for size in meta["sizes"][1:]]
    network.input_shape = tuple(sizes) if sizes and min(sizes) > 0 else None
    for node in graph["nodes"]:
        name = node["target"].removeprefix("torch.ops.aten.")
        if name.partition(".")[0] in _CHECKS:
            continue
        function = {**OPERATORS, **_IN_PLACE, **_OF_SIZES}.get(name)
        if function is None:
            where = node["metadata"].get("stack_trace", "").strip().splitlines()[-1:]
            raise NoRuleError(
                f"{path}: no rule for the operator {node['target']}{f' in {where[0].strip()!r}' * bool(where)}"
            )
        arguments = {item["name"]: item["arg"] for item in node["inputs"]}
        if len(arguments) < len(node["inputs"]):
            raise DataError(f"{path}: expected each argument of {node['target']} once, got {node['inputs']}")
        made: Any
        kind, made = next(iter(node["outputs"][0].items())) if len(node["outputs"]) == 1 else ("several", None)
        if kind not in ("as_tensor", "as_tensors", "as_sym_int"):
            raise NoRuleError(f"{path}: expected one value of {node['target']}, got {len(node['outputs'])}")
        several = kind == "as_tensors"
        names = [one["name"] for one in made] if several else [made.get("name") or made["as_name"]]
        network.steps.append((function, arguments, names, several))
    return network.eval()


def _value(argument: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The number, the tensor or the size that an argument of the file names."""
    ((kind, content),) = argument.items()
    if kind == "as_none":
        return None
    if kind in ("as_int", "as_float", "as_bool", "as_string", "as_ints", "as_floats", "as_bools"):
        return content
    if kind == "as_tensor":
        return values[content["name"]]
    if kind == "as_tensors":
        return [values[one["name"]] for one in content]
    if kind == "as_sym_int":
        return content["as_int"] if "as_int" in content else values[content["as_name"]]
    if kind == "as_sym_ints":
        return [_value({"as_sym_int": one}, values) for one in content]
    if kind == "as_optional_tensor":
        return _value(content, values)
    if kind == "as_memory_format":
        return None  # an order in memory, which computes nothing
    raise NoRuleError(f"a .pt2 file: expected numbers, tensors and sizes as arguments, got one of kind {kind!r}")


def _json(archive: zipfile.ZipFile, folder: str, path: str | Path, end: str = ".json") -> dict[str, Any]:
    names = [name for name in archive.namelist() if f"/{folder}" in name and name.endswith(end)]
    if len(names) != 1:
        raise DataError(f"{path}: expected one file {folder}*{end} in the archive, got {len(names)}")
    found: dict[str, Any] = json.loads(_entry(archive, names[0], path))
    return found


def _entry(archive: zipfile.ZipFile, name: str, path: str | Path) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or not info.compress_size == info.file_size <= 8 * LARGEST:
        raise DataError(f"{path}: expected entries that are not compressed, of at most {8 * LARGEST} bytes, got {name}")
    return archive.read(info)


def _tensors(archive: zipfile.ZipFile, kind: str, path: str | Path) -> dict[str, Tensor]:
    """The numbers of the archive by name."""
    found: dict[str, Tensor] = {}
    total = 0
    for name, entry in _json(archive, f"data/{kind}/", path, f"_{kind}_config.json")["config"].items():
        meta = entry["tensor_meta"]
        if entry["use_pickle"] or meta is None:
            raise NoRuleError(f"{path}: expected numbers as bytes, got {name!r} pickled, which is not read")
        sizes, strides = ([one["as_int"] for one in meta[key]] for key in ("sizes", "strides"))
        if (total := total + abs(math.prod(sizes))) > LARGEST:
            raise DataError(f"{path}: expected at most {LARGEST} stored numbers, got {total}")
        folder = next(n for n in archive.namelist() if f"/data/{kind}/" in n).partition("/data/")[0]
        content, dtype = _entry(archive, f"{folder}/data/{kind}/{entry['path_name']}", path), _DTYPES[meta["dtype"]]
        offset = meta["storage_offset"]["as_int"]
        if min([*sizes, *strides, offset, 0]) < 0 or meta["layout"] != 7:
            raise DataError(f"{path}: expected a dense tensor with sizes from 0 on, got {name!r}: {sizes}, {strides}")
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.zeros(0, dtype=dtype)
        last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if (wanted := max(math.prod(sizes), last + 1 if math.prod(sizes) else 0)) > len(flat):
            raise DataError(f"{path}: expected {wanted} numbers for {name!r} of sizes {sizes}, got {len(flat)}")
        found[name] = flat.as_strided(sizes, strides, offset).clone()
    return found
