"""Files of ``torch.export`` (.pt2) as networks: the graph is read as text, numbers as bytes, nothing is executed.

``torch.export.load`` unpickles parts of such a file; here a part that is pickled is refused.
"""

from __future__ import annotations

import io
import json
import math
import operator
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import DataError, NoRuleError, rewording
from lipkit.files import open_regular
from lipkit.interop.reading import LARGEST, ReadNetwork, load
from lipkit.interop.runtimes import CLAIM, claimed, program_bytes
from lipkit.lowering.build import COMPOSED, FUNCTIONS
from lipkit.lowering.written import KINDS
from lipkit.modules import Network
from lipkit.modules.network import checked_shape

# Major version of the schema that defines the letters and numbers below.
SCHEMA = 8
_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
# Checks of sizes that torch puts between the operators; the export of the network checks sizes itself.
_CHECKS = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")


def _without_cudnn(norm: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, size, weight=None, bias=None, eps=1e-5, cudnn=True: norm(x, size, weight, bias, eps)


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    if scale != 1 or input_scale != 1:
        raise NoRuleError(f"aten.elu: expected scale and input_scale 1, got {scale} and {input_scale}")
    return F.elu(x, alpha)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    rest = [d for d in range(v.ndim) if d != dim]  # all for -1
    return v * (g / torch.linalg.vector_norm(v, dim=rest, keepdim=True))


def _maker(name: str) -> Callable[..., Tensor]:
    """The function of torch, or method, of this name that makes a constant; where in memory computes nothing."""
    make = getattr(torch, name, None) or (lambda x, *args, **named: getattr(x, name)(*args, **named))
    return lambda *args, dtype=None, **_: make(*args, dtype=dtype)


_STORED = "bitwise_not", "eq", "logical_not", "ne", "tril", "triu"  # of masks, which are stored numbers
_NAMES = "arange eye full full_like linspace new_full new_ones new_zeros ones ones_like zeros zeros_like"
_MAKERS = {name: _maker(name) for name in _NAMES.split()}

# Operators whose functions of torch have arguments of another name or order, or fewer of them.
OPERATORS: dict[str, Callable[..., Any]] = {
    "adaptive_max_pool1d.default": lambda x, size: (F.adaptive_max_pool1d(x, size), None),  # no indices
    "adaptive_max_pool2d.default": lambda x, size: (F.adaptive_max_pool2d(x, size), None),
    "batch_norm.default": lambda x, weight, bias, mean, var, training, momentum, eps, cudnn: F.batch_norm(
        x, mean, var, weight, bias, training, momentum, eps
    ),
    "_weight_norm.default": _weight_norm,
    "clone.default": lambda x, memory_format=None: x.clone(),
    "col2im.default": F.fold,
    "contiguous.default": lambda x, memory_format=None: x.contiguous(),
    **dict.fromkeys(("alias.default", "detach_.default"), lambda x: x.detach()),
    "einsum.default": lambda equation, tensors: torch.einsum(equation, *tensors),
    "elu.default": _elu,
    "expand.default": lambda x, size, implicit=False: x.expand(tuple(size)),  # one tuple: x may be a buffer
    "group_norm.default": _without_cudnn(F.group_norm),
    "im2col.default": F.unfold,
    "index.Tensor": lambda x, indices: x[tuple(slice(None) if i is None else i for i in indices)],
    "instance_norm.default": lambda x, weight, bias, mean, var, own, momentum, eps, cudnn: F.instance_norm(
        x, mean, var, weight, bias, own, momentum, eps
    ),
    "layer_norm.default": _without_cudnn(F.layer_norm),
    "lift_fresh_copy.default": lambda x: x.clone(),
    "linalg_vector_norm.default": lambda x, ord=2, dim=None, keepdim=False, dtype=None: torch.linalg.vector_norm(
        x, ord, dim, keepdim
    ),
    "log_sigmoid.default": lambda x: F.logsigmoid(x),
    "mT.default": lambda x: x.mT,
    "numpy_T.default": lambda x: x.T,
    **{f"{f.__name__}_.default": partial(f, inplace=True) for f in (F.celu, F.hardswish, F.mish, F.selu, F.silu)},
    "pow.Scalar": torch.pow,
    "slice.Tensor": lambda x, dim=0, start=None, end=None, step=1: x[
        (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)
    ],
    "softmax.int": lambda x, dim, dtype=None: F.softmax(x, dim, dtype=dtype),
    "split_with_sizes.default": lambda x, sizes, dim=0: x.split(sizes, dim),
    "sym_size.int": lambda x, dim: x.size(dim),
    "tensordot.default": lambda a, b, first, last: torch.tensordot(a, b, (first, last)),
    "to.dtype_layout": lambda x, dtype, **_: x.to(dtype),
    "unfold.default": lambda x, dim, size, step: x.unfold(dim, size, step),  # F.unfold is im2col
    "upsample_bicubic2d.vec": lambda x, size, corners, scales: F.interpolate(x, size, scales, "bicubic", corners),
    "upsample_bilinear2d.vec": lambda x, size, corners, scales: F.interpolate(x, size, scales, "bilinear", corners),
    "upsample_nearest2d.vec": lambda x, size, scales: F.interpolate(x, size, scales),
    **dict.fromkeys(("where.self", "where.ScalarOther", "where.ScalarSelf"), torch.where),  # as a method: x.where(mask)
}
_OF_SIZES = {f"_operator.{name}": getattr(operator, name) for name in ("add", "floordiv", "mul")}


def _function(name: str) -> Callable[..., Any] | None:
    """The function of torch, or method of tensors, that an operator of ATen computes; None if it is in no table.

    In-place operators also change aliases, so they stay in place and the export checks them.
    """
    base = name.partition(".")[0]
    if (found := OPERATORS.get(name) or _OF_SIZES.get(name) or _MAKERS.get(base)) is not None:
        return found
    found = getattr(F, base, None) or (None if hasattr(Tensor, base) else getattr(torch, base, None))
    if (found or base) not in {*FUNCTIONS, *COMPOSED, *_STORED} and base not in KINDS:
        return None
    return found or (lambda x, *args, **more: getattr(x, base)(*args, **more))


def _bound(name: str, given: dict[str, Any], path: str | Path) -> tuple[list[Any], dict[str, Any]]:
    """The positional arguments of an operator in the order of its schema, and its keyword-only arguments."""
    if name in _OF_SIZES:
        return [given["a"], given["b"]], {}
    base, overload = name.split(".")
    schema = getattr(getattr(torch.ops.aten, base), overload)._schema.arguments
    missing = [a.name for a in schema if not a.has_default_value() and a.name not in given]
    if missing or not given.keys() <= {a.name for a in schema}:
        raise DataError(f"{path}: expected the arguments of aten.{name}, got {sorted(given)}, missing {missing}")
    places = [a for a in schema if not a.kwarg_only]
    while places and places[-1].name not in given:
        places.pop()
    # An argument left out before a given one gets the schema's default.
    ordered = [given.get(a.name, {"as_ints": a.default_value}) for a in places]
    return ordered, {a.name: given[a.name] for a in schema if a.kwarg_only and a.name in given}


def _step(
    function: Callable[..., Any], ordered: list[Any], named: dict[str, Any], _: ReadNetwork, values: dict[str, Any]
) -> Any:
    """Evaluate one operator."""
    more = {name: _value(argument, values) for name, argument in named.items()}
    return function(*(_value(argument, values) for argument in ordered), **more)


def load_program(
    path: str | Path, input_shape: tuple[int, ...] | None = None, *, box: tuple[float, float] | None = None
) -> Network:
    """The exported network of a .pt2 file: to be bounded, certified, attacked and saved like any other.

    Arguments are those of `lipkit.interop.load_onnx`. The file is one of ``torch.export.save``, with a dynamic batch
    (``dynamic_shapes``).

    Raises:
        DataError: the file is missing, no archive of one program, damaged, of another version of the format, or too
            large.
        NoRuleError: numbers that are pickled; an operator without a rule, by name; more than one input or output, or
            a program that changes its buffers (exported in training mode); a graph that cannot be exported.
        ShapeError: no ``input_shape``, or another one than the file says.
    """
    return load(read_program(path), path, None if input_shape is None else checked_shape(input_shape), box)


def read_program(path: str | Path) -> ReadNetwork | Network:
    """The network of a .pt2 file, in evaluation mode; it refuses what `load_program` lists."""
    if not Path(path).exists():
        raise DataError(f"{path}: expected a file of torch.export, got none")
    start = f"{path}: not a file of torch.export that can be read: "
    # A damaged file can break any of the assumptions.
    with rewording(DataError, start, Exception, named=True), open_regular(path) as file:
        archive = zipfile.ZipFile(file)
        # torch finds entries whatever the case of their letters, and the first of one name, Python the last.
        names = {e.filename.lower() for e in archive.infolist() if e.filename == e.orig_filename}
        if len(names) < len(archive.infolist()):
            raise DataError(f"{path}: expected entries of different names in the archive, got some of the same")
        program = _json(archive, "models/", path)
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


def _graph(program: Any) -> Any:
    """The graph of a program, without the source lines that made its nodes."""
    module = program["graph_module"]
    nodes = [{**node, "metadata": None} for node in module["graph"]["nodes"]]
    return {**module, "graph": {**module["graph"], "nodes": nodes}}


def _written_alike(network: Network, program: Any, stored: Mapping[str, Tensor]) -> bool:
    """True if writing the network gives the graph of this file and exactly its numbers."""
    with zipfile.ZipFile(io.BytesIO(program_bytes(network))) as archive:
        other = _json(archive, "models/", "")
        numbers = {**_tensors(archive, "weights", ""), **_tensors(archive, "constants", "")}
    same = numbers.keys() == stored.keys() and all(torch.equal(t, stored[name]) for name, t in numbers.items())
    return same and _graph(program) == _graph(other)


def _network(module: Mapping[str, Any], stored: Mapping[str, Tensor], path: str | Path) -> ReadNetwork:
    graph, signature = module["graph"], module["signature"]
    network, inputs = ReadNetwork(), []
    for spec in signature["input_specs"]:
        ((kind, content),) = spec.items()
        if kind == "user_input":
            inputs.append(content["arg"].get("as_tensor", {}).get("name"))
            continue
        key = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
        if kind not in key:
            raise NoRuleError(f"{path}: expected parameters, buffers and one input, got an input of kind {kind!r}")
        attribute = f"stored{len(network.names)}"
        tensor = stored[content[key[kind]]]
        # Tracing follows methods of parameters too, such as expand to the size of the batch.
        setattr(network, attribute, nn.Parameter(tensor, False) if kind == "parameter" else nn.Buffer(tensor))
        network.names[content["arg"]["name"]] = attribute
    outputs = [next(iter(spec.items())) for spec in signature["output_specs"]]
    if changed := sorted({kind for kind, _ in outputs} - {"user_output"}):
        raise NoRuleError(f"{path}: expected no change of buffers, got outputs {changed}: export in evaluation mode")
    if len(inputs) != 1 or inputs[0] is None or len(outputs) != 1 or "as_tensor" not in outputs[0][1]["arg"]:
        raise NoRuleError(
            f"{path}: expected one tensor as input and one as output, got {len(inputs)} inputs and {len(outputs)} "
            "outputs: export a module that takes one of them and returns one"
        )
    network.source, network.result = inputs[0], outputs[0][1]["arg"]["as_tensor"]["name"]
    meta = graph["tensor_values"][network.source]
    if not _DTYPES[meta["dtype"]].is_floating_point:
        raise NoRuleError(f"{path}: expected a floating-point input, got {_DTYPES[meta['dtype']]}")
    sizes = [size.get("as_int", 0) for size in meta["sizes"][1:]]  # 0: a symbol
    network.input_shape = tuple(sizes) if sizes and min(sizes) > 0 else None
    for node in graph["nodes"]:
        name = node["target"].removeprefix("torch.ops.aten.")
        if name.partition(".")[0] in _CHECKS:
            continue
        if (function := _function(name)) is None:
            line = node["metadata"].get("stack_trace", "").strip().rpartition("\n")[2].strip()
            where = f" in {line!r}" if line else ""
            raise NoRuleError(f"{path}: no rule for the operator {node['target']}{where}")
        arguments = {item["name"]: item["arg"] for item in node["inputs"]}
        if len(arguments) < len(node["inputs"]):
            raise DataError(f"{path}: expected each argument of {node['target']} once, got {node['inputs']}")
        (kind, made), *more = (next(iter(output.items())) for output in node["outputs"])
        if {kind, *(k for k, _ in more)} - {"as_tensor"} and (more or kind not in ("as_tensors", "as_sym_int")):
            raise NoRuleError(f"{path}: expected tensors or one size of {node['target']}, got {node['outputs']}")
        several = bool(more) or kind == "as_tensors"  # from max along a dimension, or split
        made = [made, *(one for _, one in more)] if kind != "as_tensors" else made
        names = [one.get("name") or one["as_name"] for one in made]
        network.steps.append((partial(_step, function, *_bound(name, arguments, path)), names, several))
    return network.eval()


def _value(argument: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The number, the tensor or the size that an argument of the file names."""
    ((kind, content),) = argument.items()
    if kind in ("as_none", "as_device", "as_layout", "as_memory_format"):  # places in memory compute nothing
        return None
    if kind == "as_float":
        return float(content)  # infinite ones are words
    if kind in ("as_int", "as_bool", "as_string", "as_ints", "as_floats", "as_bools"):
        return tuple(content) if isinstance(content, list) else content
    if kind == "as_scalar_type":
        return _DTYPES[content]
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
    if kind == "as_optional_tensors":
        return [_value(one, values) for one in content]
    raise NoRuleError(f"a .pt2 file: expected numbers, tensors and sizes as arguments, got one of kind {kind!r}")


def _json(archive: zipfile.ZipFile, folder: str, path: str | Path, end: str = ".json") -> dict[str, Any]:
    """The parsed content of the only file in a folder of the archive whose name ends in ``end``."""
    inside = f"{_top(archive)}/{folder}"
    names = [name for name in archive.namelist() if name.startswith(inside) and name.endswith(end)]
    if len(names) != 1:
        raise DataError(f"{path}: expected one file {folder}*{end} in the archive, got {len(names)}")
    found: dict[str, Any] = json.loads(_entry(archive, names[0], path))
    return found


def _top(archive: zipfile.ZipFile) -> str:
    """The folder of the first entry, in which torch looks for all others."""
    return archive.namelist()[0].partition("/")[0]


def _entry(archive: zipfile.ZipFile, name: str, path: str | Path) -> bytes:
    """The bytes of a file in the archive; compressed ones, which could unpack to any size, are refused."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or not info.compress_size == info.file_size <= 8 * LARGEST:
        raise DataError(f"{path}: expected entries that are not compressed, of at most {8 * LARGEST} bytes, got {name}")
    return archive.read(info)


def _tensors(archive: zipfile.ZipFile, kind: str, path: str | Path) -> dict[str, Tensor]:
    """The tensors of a ``kind``, weights or constants, that the archive stores as bytes, by name."""
    found: dict[str, Tensor] = {}
    total = 0
    for name, entry in _json(archive, f"data/{kind}/", path, f"_{kind}_config.json")["config"].items():
        meta = entry["tensor_meta"]
        if entry["use_pickle"] or meta is None:
            raise NoRuleError(f"{path}: expected numbers as bytes, got {name!r} pickled, which is not read")
        sizes, strides = ([one["as_int"] for one in meta[key]] for key in ("sizes", "strides"))
        if (total := total + abs(math.prod(sizes))) > LARGEST:
            raise DataError(f"{path}: expected at most {LARGEST} stored numbers, got {total}")
        content = _entry(archive, f"{_top(archive)}/data/{kind}/{entry['path_name']}", path)
        dtype = _DTYPES[meta["dtype"]]
        offset = meta["storage_offset"]["as_int"]
        if min([*sizes, *strides, offset, 0]) < 0 or meta["layout"] != 7:  # 7: torch.strided
            raise DataError(f"{path}: expected a dense tensor with sizes from 0 on, got {name!r}: {sizes}, {strides}")
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.zeros(0, dtype=dtype)
        last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))  # place of the last number
        if (wanted := max(math.prod(sizes), last + 1 if math.prod(sizes) else 0)) > len(flat):
            raise DataError(f"{path}: expected {wanted} numbers for {name!r} of sizes {sizes}, got {len(flat)}")
        found[name] = flat.as_strided(sizes, strides, offset).clone()
    return found
