"""ONNX files as networks of torch modules: a closed list of operators, weights as stored.

A node whose operands are all stored is evaluated by its rule in `lipkit.interop.onnx_operators`; the others make up the
network, and run once on the meta device, for their sizes.
"""

from __future__ import annotations

import collections
import contextlib
import graphlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipkit.errors import DataError, LipkitError, NoRuleError, ShapeError, first_line, lacks_memory, rewording
from lipkit.files import open_regular, read_bytes
from lipkit.interop.onnx_layers import BATCH, FLOATS, NEWEST, OLDEST, Call, Node, holds_batch, takes_over
from lipkit.interop.onnx_operators import BATCHED, BORDERS, COPIES, OPERATORS, STORED, activation, pads_of
from lipkit.interop.reading import LARGEST, Budget, ReadNetwork, load
from lipkit.interop.runtimes import CLAIM, claimed, onnx_model
from lipkit.lowering.written import ENDS, GATES, fits
from lipkit.modules import Network
from lipkit.modules.network import checked_shape

# The default domain of ONNX has two names.
_DOMAIN = ("", "ai.onnx")
# Operators with results that a network may leave unread: masks, moments and indices.
_MORE = ("Dropout", "LayerNormalization", "MaxPool", "TopK")


def _step(call: Call, numbers: dict[str, Tensor], network: ReadNetwork, values: dict[str, Any]) -> Any:
    """Evaluate a node; ``numbers`` are its sizes, axes and limits by name."""
    node = call.node
    if node.name in network.layers:
        return network.layers[node.name](values[node.input[0]])
    operands = [numbers.get(name, values.get(name)) for name in node.input]
    return node.rule(call.on(operands, values[network.source]))


def load_onnx(
    path: str | Path, input_shape: tuple[int, ...] | None = None, *, box: tuple[float, float] | None = None
) -> Network:
    """The exported network of an ONNX file: to be bounded, certified, attacked and saved like any other.

    Args:
        path: the file. Nothing in it is executed.
        input_shape: of one sample, where the file leaves it open; or all sizes of an input without a batch.
        box: the range of the inputs, see `lipkit.export`.

    Raises:
        DataError: a file that is missing, not well-formed, too large, or has several inputs or outputs; no package
            ``onnx``.
        NoRuleError: operators without a rule, all of them by name; versions, attributes or formats that a rule does not
            cover; a graph that cannot be exported.
        ShapeError: no ``input_shape``, or another one than the file says.
    """
    shape = None if input_shape is None else checked_shape(input_shape)
    network = read_onnx(path, shape)
    try:
        return load(network, path, shape, box)
    except NoRuleError:
        if isinstance(network, ReadNetwork) and network.whole:
            with contextlib.suppress(LipkitError):
                return load_onnx(path, network.whole, box=box)
        raise


def read_onnx(path: str | Path, input_shape: tuple[int, ...] | None = None) -> ReadNetwork | Network:
    """The network of an ONNX file, in evaluation mode; it refuses what `load_onnx` lists.

    A file of `lipkit.interop.write_onnx` gives back the network that it was written from, if that network gives the
    same graph again with the installed torch.
    """
    try:
        import onnx
    except ImportError:
        raise DataError(f"{path}: expected the package onnx to read it, got none: pip install lipkit[onnx]") from None
    start = f"{path}: not an ONNX file that can be read: "
    with rewording(DataError, start, Exception, named=True):  # protobuf and numpy have no common error
        try:
            content = read_bytes(path, 1 << 31)
            if content.startswith(b"version https://git-lfs"):
                why = "got a Git LFS pointer in its place: git lfs pull fetches it"
                raise DataError(f"{path}: expected an ONNX file, {why}")
            return _read(onnx.ModelProto.FromString(content), path, input_shape)
        except FileNotFoundError as error:
            got = error.filename or path
            raise DataError(f"{path}: expected an ONNX file with its weights, got no {got}") from None


def _read(file: Any, path: str | Path, input_shape: tuple[int, ...] | None) -> ReadNetwork | Network:
    import onnx

    graph = file.graph
    inside = [a.t for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.TENSOR]
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
        both = f"{[v.name for v in inputs]} and {[v.name for v in graph.output]}"
        raise DataError(
            f"{path}: expected one input and one output, got {both}: onnx.utils.extract_model cuts out a part"
        )
    for entry in file.metadata_props:
        if entry.key == CLAIM:
            ours = claimed(entry.value, stored, lambda network: _written_alike(network, file))
            if ours is not None and input_shape in (None, ours.input_shape):
                return ours
    network = ReadNetwork()
    network.source, network.result = inputs[0].name, graph.output[0].name
    kind = inputs[0].type.tensor_type
    if (dtype := FLOATS.get(kind.elem_type)) is None:
        got = onnx.TensorProto.DataType.Name(kind.elem_type)  # type: ignore[attr-defined]
        raise NoRuleError(f"{path}: expected a floating-point input, got {network.source!r} of type {got}")
    opset, nodes = _nodes(file, path, {network.source, *stored})
    whole = batch, *declared = [max(d.dim_value, 0) for d in kind.shape.dim] or [0]  # 0: open
    if alone := batch > 0 and (not declared or (batch > 1 and len(input_shape or ()) == len(whole))):
        batch, declared = 1, whole
    given = tuple(declared) if input_shape is None else input_shape
    fits = len(given) == len(declared) and all(m in (0, n) for n, m in zip(given, declared, strict=True))
    if not given or not network.source or not fits or min(given) < 1:
        if lacking := {node.kind for node in nodes if node.rule is None}:
            raise _without_rules(path, lacking)
        got = [d.dim_value or "open" for d in kind.shape.dim]
        if not declared or not network.source:
            raise NoRuleError(
                f"{path}: expected an input with a name and the batch first, got {network.source!r}: {got}"
            )
        raise ShapeError(f"{path}: expected the input_shape of one sample, {got[1:]}, got {input_shape}")
    network.input_shape = given
    nodes = _with_activations(nodes, network.result, stored)
    x = torch.empty(BATCH, *given, dtype=dtype, device="meta")
    reader = _Reader(network, stored, x, partial(Call, opset=opset, one=batch == 1, dtype=dtype), alone)
    with torch.no_grad(), Budget(BATCH, total):
        reader.read(nodes)
    if reader.lacking:
        raise _without_rules(path, reader.lacking)
    network.whole = tuple(whole) if batch > 1 and input_shape is None else None
    if reader.refusal and network.whole:
        with contextlib.suppress(LipkitError):
            return _read(file, path, network.whole)
    if reader.refusal:
        taken = f": the first size of the input, {batch}, is taken for the batch" * (batch > 1)
        raise NoRuleError(f"{reader.refusal}{taken}")
    if network.result in stored:
        raise NoRuleError(f"{path}: expected an output that depends on the input, got {network.result!r}, a constant")
    if network.result not in reader.values:
        raise DataError(f"{path}: expected an output that a node makes, got {network.result!r}, which none does")
    reader.finish()
    names = {buffer: name for name, buffer in network.names.items()}
    conditions = {call.node.input[0] for call in reader.calls if call.node.kind == "Where"}
    for buffer, tensor in network.state_dict().items():
        wanted = torch.bool if (name := names.get(buffer, buffer)) in conditions else dtype
        if tensor.dtype != wanted:
            raise DataError(f"{path}: expected numbers in the input's format {wanted}, got {name!r} in {tensor.dtype}")
    return network.eval()


def _written_alike(network: Network, file: Any) -> bool:
    """True if writing the network gives exactly the graph of this file."""
    alone = type(file).FromString(file.SerializeToString())  # a copy
    alone.ClearField("metadata_props")
    return bool(onnx_model(network) == alone)


def _without_rules(path: str | Path, kinds: set[str]) -> NoRuleError:
    names = ", ".join(sorted(kinds))
    why = "nothing is assumed to be 1-Lipschitz"
    if any("Quant" in kind or "QLinear" in kind or kind.endswith("Integer") for kind in kinds):
        why += "; rounding to whole numbers jumps where the input moves: read the file from before the quantisation"
    return NoRuleError(f"{path}: expected operators that have rules, got the operators {names}: {why}")


def _nodes(file: Any, path: str | Path, given: set[str]) -> tuple[int, list[Node]]:
    """The version of the operators, and the nodes in topological order.

    An operator of another domain gets the domain as a prefix, so that no rule takes it for one of ONNX.
    """
    import onnx

    versions = {entry.version for entry in file.opset_import if entry.domain in _DOMAIN}
    newest = onnx.defs.onnx_opset_version()
    if not versions and all(node.domain not in _DOMAIN for node in file.graph.node):
        versions = {newest}  # of operators that the file does not use
    if len(versions) != 1 or not OLDEST <= min(versions) <= newest:
        got = sorted(versions)
        raise NoRuleError(f"{path}: expected operators of one version from {OLDEST} to {newest}, got {got}")
    if own := [f"{f.domain}.{f.name}" for f in file.functions]:
        raise NoRuleError(f"{path}: expected operators of ONNX, got functions of the file: {own}: export it inlined")
    (opset,), nodes, context = versions, [], onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = file.ir_version, {"": opset}
    read = {*(value.name for value in file.graph.output), *(n for node in file.graph.node for n in node.input)}
    for position, node in enumerate(file.graph.node):
        name = f"{position}:{node.name or node.op_type}".replace(".", "_")
        kind, attributes = f"{node.domain}." * (node.domain not in _DOMAIN) + node.op_type, {}
        if kind in OPERATORS:
            try:
                node.domain = ""
                onnx.checker.check_node(node, context)
            except onnx.checker.ValidationError as error:
                raise DataError(f"{name}: not well-formed in version {opset} of ONNX: {first_line(error)}") from None
            if (version := onnx.defs.get_schema(kind, opset, "").since_version) > NEWEST:
                raise NoRuleError(f"{name}: expected {kind} of a version up to {NEWEST}, got version {version}")
            for a in node.attribute:
                tensor = a.type == onnx.AttributeProto.TENSOR
                attributes[a.name] = _numbers(a.t, name, path) if tensor else onnx.helper.get_attribute_value(a)
        # Further results of a BatchNormalization mean that it trains.
        more = [n for n in node.output[1:] if n in read or kind not in _MORE]
        nodes.append(Node(kind, list(node.input), [*node.output[:1], *more], name, attributes, OPERATORS.get(kind)))
    made = set(given)
    for one in file.graph.node:
        outputs = [n for n in one.output if n]
        if again := made.intersection(outputs) or {n for n in outputs if outputs.count(n) > 1}:
            raise NoRuleError(f"{path}: expected a new name for each result, got {again.pop()!r}, defined already")
        made.update(outputs)
    return opset, list(_sorted(nodes, given, path))


def _sorted(nodes: list[Node], given: set[str], path: str | Path) -> Iterator[Node]:
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    if early := {n for node in nodes for n in node.input if n} - makers.keys() - given:
        raise DataError(f"{path}: expected values that nodes make, got {early.pop()!r}, which none does")
    needs = {i: {makers[n] for n in node.input if n in makers} for i, node in enumerate(nodes)}
    try:
        return map(nodes.__getitem__, list(graphlib.TopologicalSorter(needs).static_order()))
    except graphlib.CycleError as error:
        names = [nodes[i].output for i in error.args[1]]
        raise DataError(f"{path}: expected values that are made of earlier ones, got a circle of {names}") from None


def _with_activations(nodes: list[Node], result: str, stored: dict[str, Tensor]) -> list[Node]:
    """Replace the nodes that write out an activation, such as ``x * Sigmoid(x)``, by one node, which has a constant."""
    made = {name: node for node in nodes for name in node.output}
    readers = collections.Counter([result, *(name for node in nodes for name in node.input)])

    def equals(name: str, wanted: float) -> bool:
        """True for a stored scalar equal to ``wanted`` in float32; more dimensions would change the product's shape."""
        constant = made[name].attributes.get("value") if name in made and made[name].kind == "Constant" else None
        tensor = stored.get(name, constant)
        if not isinstance(tensor, Tensor) or tensor.shape not in ((), (1,)):
            return False
        return math.isclose(float(tensor), wanted, rel_tol=2e-7)

    def look(name: str, kind: str, wanted: Mapping[str, float]) -> list[str] | None:
        node = made.get(name)
        if node is None or node.kind != kind or node.attributes.keys() - wanted:
            return None
        given = {"alpha": 0.2, "beta": 0.5} | node.attributes  # defaults of HardSigmoid
        return node.input if all(math.isclose(given[key], wanted[key], rel_tol=2e-7) for key in wanted) else None

    kept: list[Node] = []
    gone: set[str] = set()
    for node in reversed(nodes):  # from the end, so that the largest pattern is found first
        if gone.issuperset(node.output):
            continue
        for pattern, make in GATES if node.kind in ENDS else ():
            found: dict[str, Any] = {}
            if fits(pattern, node.output[0], look, equals, found):
                inside = found["inside"][:-1]  # the last is the result itself
                if all(readers[name] == inside.count(name) for name in inside):
                    node = Node("activation", [found["x"]], node.output, node.name, {}, activation(make))
                    gone.update(inside)
                    break
        kept.append(node)
    return kept[::-1]


def _numbers(tensor: Any, name: str, path: str | Path) -> Tensor:
    """A stored tensor, read from the file or from the external data file that it names."""
    import onnx

    try:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            found = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        else:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            content = _beside(tensor, path, math.prod(tensor.dims) * dtype.itemsize)
            found = torch.from_numpy(np.frombuffer(content, dtype).reshape(tensor.dims))
    except TypeError:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)  # type: ignore[attr-defined]
        raise DataError(
            f"{path}: expected stored numbers in a format of numpy, such as float32, got {name!r} in {kind}"
        ) from None
    if holds_batch(found):
        raise NoRuleError(f"{path}: expected no stored number {BATCH}, which stands for the batch, got one in {name!r}")
    return found


def _beside(tensor: Any, path: str | Path, size: int) -> bytearray:
    """The ``size`` bytes of a tensor in a regular file inside the folder of ``path``; nothing more is read."""
    part, folder = {entry.key: entry.value for entry in tensor.external_data}, Path(path).parent.resolve()
    beside, offset = (folder / part["location"]).resolve(), int(part.get("offset", 0))  # resolve: links, too
    if not beside.is_relative_to(folder):
        raise DataError(f"{path}: expected weights within the folder of the file, got {part['location']!r}")
    with open_regular(beside) as file:
        held = os.fstat(file.fileno()).st_size - offset
        if offset < 0 or not int(part.get("length", held)) == size <= held:
            raise DataError(f"{path}: expected {size} bytes of {tensor.name!r}, got {part}, and {held} in the file")
        file.seek(offset)
        return bytearray(file.read(size))


class _Reader:
    """Runs the nodes of a file in turn: on stored operands to get stored tensors, on others to make up the network."""

    def __init__(
        self, network: ReadNetwork, stored: dict[str, Tensor], x: Tensor, call: Callable[..., Call], alone: bool
    ) -> None:
        self.network, self.stored, self.call = network, stored, partial(call, source=x)
        self.values = {network.source: x}  # without memory, for their sizes
        self.alone = {network.source} if alone else set()  # values without the batch in the file
        self.sized: set[str] = set()  # stored tensors that hold the batch size as a number
        self.lacking: set[str] = set()
        self.refusal: NoRuleError | None = None
        self.calls: list[Call] = []  # those that make up the network
        # Paddings by copied pixels: their input, torch's name of the mode, and the pads before and after.
        self.bordered: dict[str, tuple[str, Any]] = {}

    def read(self, nodes: Iterable[Node]) -> None:
        unknown: dict[str, bool] = {}  # values that were not made; True: may depend on the input
        for node in nodes:
            lost = [unknown[name] for name in node.input if name in unknown]
            moving = any(lost) or not self.values.keys().isdisjoint(node.input)
            if node.rule is None or (moving and node.kind in STORED):
                self.lacking.add(node.kind)
            elif not lost:
                try:
                    self._add(node)
                    continue
                except NoRuleError as error:  # told at the end, if no node lacks a rule altogether
                    self.refusal = self.refusal or error
            unknown.update(dict.fromkeys(node.output, moving and node.kind != "Shape"))

    def _add(self, node: Node) -> None:
        if node.kind == "Conv" and node.input[0] in self.bordered:
            source, border = self.bordered[node.input[0]]
            merged = node._replace(input=[source, *node.input[1:]], attributes={**node.attributes, "border": border})
            if takes_over(node, border, self.stored.get(node.input[1])):
                node = merged
        moving = frozenset(i for i, name in enumerate(node.input) if name in self.values)
        given = [self.values.get(n, self.stored.get(n)) if n else None for n in node.input]
        while given and given[-1] is None:  # operands left out at the end
            given.pop()
        sized = frozenset(i for i, name in enumerate(node.input) if name in self.sized)
        apart = {node.input[i] in self.alone for i in moving}
        call: Call = self.call(node=node, moving=moving, sized=sized, operands=given, alone=True in apart)
        if node.kind != "Split" and len([name for name in node.output if name]) != 1:
            raise call.refuse("one output", f"{len(node.output)}")
        if call.sized and not call.moving and node.kind not in COPIES:
            raise call.refuse("no size computed from that of the batch", "one")
        if call.alone and (len(apart) > 1 or node.kind in BATCHED):
            without = self.values[node.input[min(moving)]]
            raise call.refuse("an input with the batch first", f"sizes {list(without.shape[1:])}")
        layer: nn.Module | None = None
        try:
            made = node.rule(call)
            if isinstance(made, nn.Module):
                layer = made.eval()
                made = layer(given[0])
        except Exception as error:  # torch refuses what the rule asks for
            if isinstance(error, LipkitError) or lacks_memory(error):
                raise
            raise call.refuse("what its rule covers", f"{type(error).__name__}: {first_line(error)}") from error
        if missed := sorted(set(node.attributes) - call.used):
            raise call.refuse("attributes that its rule covers", f"{', '.join(missed)}")
        several = isinstance(made, (tuple, list))
        found = dict(zip(node.output, made if several else [made], strict=several))
        if all(not value.is_meta for value in found.values()):  # no value of the network went in
            self.stored.update(found)
            holding = {name for name, value in found.items() if holds_batch(value)}
            if holding and node.kind not in COPIES:
                raise call.refuse(f"no computed number {BATCH}, which stands for the batch", "one")
            self.sized |= holding
            return
        self.values.update(found)
        if call.alone if call.leaves is None else call.leaves:
            self.alone.update(found)
        if layer is not None:
            self.network.layers[node.name] = layer
        self.calls.append(call)
        if node.kind == "Pad" and (mode := BORDERS.get(call.get("mode", b"constant"))):
            self.bordered[node.output[0]] = (node.input[0], (mode, *pads_of(call)))

    def finish(self) -> None:
        """Keep the stored tensors that the steps read; drop paddings that a convolution has taken over."""
        network = self.network
        read = {network.result, *(name for call in self.calls for name in call.node.input)}
        for call in self.calls:
            node, numbers = call.node, dict[str, Tensor]()
            if read.isdisjoint(node.output) and node.output[0] in self.bordered:
                continue
            for i, name in enumerate(node.input[: 1 if node.name in network.layers else None]):
                if name in self.stored and i in call.read:
                    network._buffers[network.names.setdefault(name, f"stored{len(network.names)}")] = self.stored[name]
                elif name in self.stored:
                    numbers[name] = self.stored[name]
            step = partial(_step, call.on([], None), numbers)
            network.steps.append((step, node.output, node.kind == "Split"))
