"""A network with its own forward pass as a chain of modules, with a `Graph` wherever values branch.

The forward pass is traced (`lipkit.lowering.tracing`), run for two batch sizes and compared with the network
(`lipkit.lowering.observe`). Then a walk over its calls turns results that change with the input into values of a
wiring; other results are constants. The calls become the network's own modules, modules that compute a function
(`lipkit.lowering.functional`), modules that move numbers (`lipkit.lowering.moves`), and modules that join or combine
values (`lipkit.lowering.functions`). Any other call is refused by name.
"""

import copy
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipkit.errors import NoRuleError
from lipkit.linalg.precision import without_autocast
from lipkit.lowering.axes import IMAGES, batch_first, keeps_place
from lipkit.lowering.build import FINITE, MIXED, Build, Function, Masked, function_name
from lipkit.lowering.copies import constant_copy
from lipkit.lowering.functions import FUNCTIONS
from lipkit.lowering.observe import Operand, Rows, Varies, check_outputs, close, observe
from lipkit.lowering.tracing import BATCH, BATCHES, SIZE, Root, fetch, flat, sample, trace, where
from lipkit.lowering.written import recognise
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.graph import Wiring
from lipkit.modules.guarding import type_name
from lipkit.modules.parametrised import repeated, settled
from lipkit.modules.plain import Shape
from lipkit.modules.recurrent import Outputs
from lipkit.modules.registry import LATER, export_plain, lipschitz, what_is_missing
from lipkit.modules.views import Piece, Reshape, reshaped
from lipkit.proof.roundoff import WIDE

# Functions that take the sizes of their result.
SHAPES = ("view", "reshape", "expand", "unflatten", torch.reshape, torch.broadcast_to)
# Functions whose values jump where the input moves.
JUMPS = {
    *("round", "floor", "ceil", "trunc", "fix", "frac", "fmod", "mod", "remainder", "floordiv", "floor_divide"),
    *("heaviside", "sign", "sgn", "copysign", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"),
}


@dataclass(frozen=True)
class Label:
    """The origin of a module in a wiring, named as the user knows it."""

    name: str  # path of the module, or of the one that calls the function
    type: str  # class of the module, or name of the function
    what: str  # for messages
    own: bool  # True: a module of the network, False: a function


class Interpreter:
    """Turns a network into a wiring of modules: ``wiring``, with a label for each module in ``labels``.

    Args:
        root: an independent copy with constant weights, which is traced and run.
        input_shape: of one sample.
        bound_to: holds the modules that are wired, ``root`` or the network itself.
        exact: True if bounds are computed from the wiring: constants are float64, not in the network's format.
        bounding: True if only Lipschitz constants are needed: leaves may be `Bounded`, and shifts are left out.
    """

    def __init__(
        self, root: Root, input_shape: Shape, bound_to: Root, *, exact: bool = False, bounding: bool = False
    ) -> None:
        self.graph, self._other_way = trace(root, input_shape)
        self.observed = observe(root, self.graph, input_shape)
        recognise(root, self.graph, self.observed)
        self.wiring, self.labels = Wiring(), list[Label]()
        self._root, self._input_shape, self._bound_to, self._bounding = root, input_shape, bound_to, bounding
        self._exact = exact
        self._known: dict[fx.Node, Any] = {}
        self._joined: dict[int, int] = {}  # of a value of merged images, the same with their channels joined

    def check(self, model: nn.Module) -> None:
        """Refuse a network that is not the function of its graph, by `lipkit.lowering.observe.check_outputs`."""
        check_outputs(self._root, self.observed, self._input_shape, model, self._other_way)

    def shapes(self) -> dict[int, Shape]:
        """Shape of one sample of each value, by the value's number."""
        operands = [x for x in flat(list(self._known.values())) if isinstance(x, Operand)]
        return {x.number: x.shape or (1,) for x in operands}

    def output(self) -> Operand | None:
        """Wire all calls and return the output, or None if it is constant. Refuses by name whatever has no rule."""
        for node in self.graph.nodes:
            if node.target is operator.getitem and not node.users and isinstance(self._known[node.args[0]], tuple):
                continue  # one of several results that nobody reads; a slice is checked, read or not
            if node.op != "output":
                self._known[node] = self._visit(node)
                continue
            (last,) = node.args
            output = self._known[last] if isinstance(last, fx.Node) else last
            if not isinstance(output, (Operand, Tensor, Varies)):
                got = type(output).__name__.removeprefix("immutable_")
                several = isinstance(output, list | tuple | dict)
                what = f"{got}: bound a module of yours that returns one of them" if several else got
                raise NoRuleError(f"analyze: expected one output tensor, got {what}")
        if isinstance(output, Operand) and output.place[:2] != (0, 1):
            raise self._refuse(last, f"{MIXED}, or puts another dimension first")
        for value in self.wiring.used(output.number) if isinstance(output, Operand) else ():
            if isinstance(self.wiring.modules[value - 1], Masked):
                raise NoRuleError(f"analyze: {self.labels[value - 1].what}: {FINITE}")
        return output if isinstance(output, Operand) else None

    def _visit(self, node: fx.Node) -> Any:
        value = self.observed.values[node]
        if node.op == "placeholder":
            self._format = value.dtype
            return replace(self._kept_apart(node, value), number=0)
        if isinstance(value, str):
            raise self._refuse(node, f"expected a tensor, got {value}, which depends on the values of the input")
        values = value if isinstance(value, tuple) else (value,)
        if not any(isinstance(v, (Operand, str)) for v in values):
            return value
        self._refuse_batch(node, getattr(values[0], "axis", -1))
        given: Any = fx.node.map_arg((node.args, node.kwargs), self._known.__getitem__)
        if node.op == "call_module":
            given = [*given[0], *given[1].values()]
            self._check_module(node, given, value)
        if node.target is getattr and node.args[1] == "values" and isinstance(given[0][0], tuple):
            return given[0][0][0]  # the values of torch.max and torch.sort
        results = tuple(self._kept_apart(node, v) for v in values)
        for i, result in enumerate(results):
            if len(results) == 1 or not _unread(node, i, len(results)):
                self._check_dtype(node, result.dtype)
        if node.op == "call_module" and isinstance(value, tuple):
            # Of nn.RNN: the outputs of all steps, and the last states, of which they hold that of the last layer.
            number, last = self._module(node, given[0], value[0]), "the last states: read outputs[:, -1]"
            if value[1].shape[0] == 1 and not _unread(node, 1, 2):
                self.labels.append(self.labels[-1])
                steps = value[0].shape[0]
                last = replace(value[1], number=self.wiring.add(Piece(1, steps - 1, steps), number))
            return replace(value[0], number=number), last
        if node.op == "call_module":
            return replace(value, number=self._module(node, given[0], value))
        found = self._function(node, given[0], given[1], results)
        if isinstance(value, tuple):
            return tuple(replace(v, number=number) for v, number in zip(results, found, strict=True))
        return replace(value, number=found)

    def _module(self, node: fx.Node, x: Operand, y: Operand) -> int:
        module: Any = settled(fetch(self._bound_to, str(node.target)))
        if getattr(module, "inplace", False):
            # Whoever reads the overwritten tensor later reads this value: see `observe`.
            module = copy.copy(module)
            module.inplace = False
        if type(module) is nn.RNN:
            module = Outputs(module)
        path = _path_of(node)
        label, number = Label(path, type(module).__qualname__, f"at {path!r}", own=True), x.number
        if x.inner > 1 and type(module) in IMAGES:
            if number not in self._joined:
                self._joined[number] = self.wiring.add(reshaped((x.inner * x.shape[1], *x.shape[2:])), number)
            joined = self.wiring.add(repeated(module, x.inner), self._joined[number])
            number = self.wiring.add(reshaped(y.shape), joined)
            self._joined[number] = joined
        else:
            number = self.wiring.add(module, number)
        self.labels += [label] * (len(self.wiring.modules) - len(self.labels))
        return number

    def _function(self, node: fx.Node, args: Any, kwargs: Any, results: tuple[Operand, ...]) -> Any:
        like = torch.zeros((), dtype=torch.float64 if self._exact else self._format)
        name, what = _called(node), self._what(node)
        for place, word in enumerate(("input", "other")):  # torch's names of its first two operands
            ours = name.startswith(("torch.", "Tensor.")) and "input" not in kwargs.keys() - {word}
            if word in kwargs and len(args) == place and ours:
                args, kwargs = (*args, kwargs[word]), {key: value for key, value in kwargs.items() if key != word}
        call = batch_first(Build(name, what, node.target, args, kwargs, results, self.wiring, like, self._bounding))
        row = FUNCTIONS.get(call.target, Function())
        if row.rule is None and name.rpartition(".")[2].rstrip("_") in JUMPS:
            raise call.refuse("it jumps where the input moves, so no Lipschitz constant exists: leave it out")
        if row.rule is None and self._bounding:
            raise call.refuse(
                "it has no rule, and nothing is assumed to be 1-Lipschitz; register one with "
                "lipkit.analysis.function_rule, or put it into a module with a rule of its own"
            )
        if row.rule is None or not (row.exported or self._bounding):
            raise call.refuse(
                "it has no plain form that could be exported; register the module that computes it with "
                "lipkit.lowering.function_module, or put it into a module with rules of its own (lipkit.analyze bounds "
                "more functions than can be exported)"
            )
        value = call.covered(row.rule, *call.args, **call.kwargs)
        label = Label(str(node.meta.get("where", "")), name, what, own=False)
        self.labels += [label] * (len(self.wiring.modules) - len(self.labels))  # one for each new module
        return value

    def _refuse_batch(self, node: fx.Node, axis: int) -> None:
        """Refuse arguments computed from the batch size, except the batch size itself in the result's shape."""
        how = self.observed.how
        made = [n for n in node.all_input_nodes if how.get(n) in (SIZE, BATCH)]
        _, *sizes = flat((node.args, node.kwargs))  # the first is the tensor
        if node.target == "unflatten":
            sizes[:1] = [1] * sizes[0]  # of the dimensions in front
        there = made and made == sizes[axis : axis + 1] and sizes.count(made[0]) == 1 and node.target in SHAPES
        if made and not (there and (how[made[0]] == SIZE or all(type(n) is int and n > 0 for n in {*sizes} - {*made}))):
            raise self._refuse(
                node,
                f"expected constant arguments, got {made[0].name!r}, made from the size of the batch: that may only be "
                "the size of the batch in a shape, as in x.view(x.shape[0], -1)",
            )

    def _check_module(self, node: fx.Node, given: list[Any], value: Any) -> None:
        """Refuse a module without a rule, or one that its rule does not cover where it is called."""
        module = fetch(self._root, str(node.target))
        if why := what_is_missing(module):
            raise self._refuse(node, why)
        if type(module) is nn.RNN and isinstance(value, tuple):
            value = value[0]
            given[1:] = [g for g in given[1:] if not (g is None or (isinstance(g, Rows) and not bool(g.row.any())))]
        if len(given) != 1 or not isinstance(given[0], Operand) or not isinstance(value, Operand):
            got = f"{len(given)} arguments" if len(given) != 1 else "a list, or several results"
            raise self._refuse(node, f"expected a module from one tensor to one, got {got}")
        if not given[0].shape and type(module) not in ACTIVATIONS:
            raise self._refuse(node, "expected samples with dimensions, got numbers (N,)")
        if not keeps_place(module, given[0], self._kept_apart(node, value)):
            raise self._refuse(node, f"{MIXED}, or reads the batch elsewhere than first")

    def _check_dtype(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Refuse dtypes other than floating-point ones that represent every number of the network's dtype."""
        if dtype in WIDE and torch.promote_types(dtype, self._format) == dtype:  # holds all of its numbers
            return
        if dtype.is_complex:
            why = "complex numbers have no rules: use real and imaginary parts as channels"
        elif dtype.is_floating_point:
            why = "its rounding is coarser or its range smaller: convert the whole network to it, or leave out the cast"
        else:
            why = (
                "whole numbers, bits and truth values jump where the input moves: use a continuous function, such as "
                "torch.relu or torch.clamp"
            )
        raise self._refuse(
            node,
            f"expected a result in a floating-point format that holds the network's {self._format}, got {dtype}: {why}",
        )

    def _kept_apart(self, node: fx.Node, value: Any) -> Operand:
        if not isinstance(value, Operand) or value.axis < 0:
            raise self._refuse(node, MIXED)
        return value

    def _refuse(self, node: fx.Node, expected: str) -> NoRuleError:
        return NoRuleError(f"analyze: {self._what(node)}: {expected}")

    def _what(self, node: fx.Node) -> str:
        """How a message names a node."""
        if node.op == "call_module":
            module = fetch(self._root, str(node.target))
            return f"{type(module).__module__}.{type(module).__qualname__} at {_path_of(node)!r}"
        return f"{_called(node)}{where(node)}"


def _called(node: fx.Node) -> str:
    """The name of the function that a node calls, as users write it; reading ``x.T`` is a call of getattr."""
    return function_name(str(node.args[1]) if node.target is getattr else node.target)


def _path_of(node: fx.Node) -> str:
    """The path of the module that a node calls, in the network."""
    return str(node.target).removeprefix("net").removeprefix(".")


def _unread(node: fx.Node, piece: int, count: int) -> bool:
    """True if nothing reads result ``piece`` of ``count``, such as the indices of torch.max."""
    for user in (user for user in node.users if user.users):
        index = {"values": 0}.get(str(user.args[1])) if user.target is getattr else user.args[1]
        if user.target not in (operator.getitem, getattr) or type(index) is not int or index % count == piece:
            return False
    return True


def structure(model: nn.Module, input_shape: Shape, *, own: bool = False) -> tuple[nn.Sequential, Tensor]:
    """The forward pass of ``model`` as a chain of modules, and its outputs for a `tracing.sample` of ``BATCHES[1]``.

    Args:
        model: traced in the mode that it is in, on the CPU.
        input_shape: of one sample.
        own: the result calls the modules of ``model`` itself, so that bounds have derivatives; otherwise copies whose
            normalised weights (spectral, weight, orthogonal) are plain numbers.

    Raises:
        NoRuleError: a node has no plain form (the message names it and its module), or `lipkit.analyze` refuses it.
        ShapeError: the forward pass does not accept inputs of this shape.

    >>> class Residual(nn.Module):
    ...     def __init__(self): super().__init__(); self.body = nn.Linear(2, 2)
    ...     def forward(self, x): return torch.relu(x + self.body(x))
    >>> graph, last = structure(Residual(), (2,))[0]
    >>> list(graph.nodes), last
    ([Linear(in_features=2, out_features=2, bias=True), Add(1, 1)], ReLU())
    >>> [list(read) for read in graph.sources]
    [[0], [0, 1]]
    """
    function = "lipschitz" if own else "export"
    with torch.inference_mode(False), without_autocast(), torch.random.fork_rng(devices=[]):
        try:
            root = Root(constant_copy(model))
            lowering = Interpreter(root, input_shape, Root(model) if own else root, exact=own)
            output = lowering.output()
            lowering.check(model)
        except NoRuleError as error:
            # The refusals are worded for analyze.
            raise NoRuleError(f"{function}: {str(error).removeprefix('analyze: ')}") from None
    if output is None:
        raise NoRuleError(f"{function}: expected an output that depends on the input, got a constant one")
    chain = nn.Sequential(*lowering.wiring.chain(output.number), *([] if output.shape else [Reshape()]))
    return chain, lowering.observed.outputs[1]


def check_same(plain: nn.Module, model: nn.Module, input_shape: Shape, expected: Tensor | None = None) -> None:
    """Raise ``NoRuleError`` if two networks differ on one batch. This proves nothing, but reveals wrong rules.

    ``expected`` are the outputs of ``model``, if they are known.
    """
    x = sample(model, input_shape, BATCHES[1])
    with torch.no_grad():
        own = x.to(sample(plain, input_shape, 1).dtype)  # wider than that of halves with constrained layers
        found, expected = plain(own.clone()), model(x.clone()) if expected is None else expected
    if found.dtype != expected.dtype:  # a cast at the end
        found = found.to(expected.dtype)
    if not close(found, expected):
        raise NoRuleError(
            "export: expected plain modules that compute the same as the network, got other outputs: a rule of "
            "lipkit.lowering.function_module or lipkit.modules.export_rule does not match its function"
        )


def _structure_constant(module: nn.Module, input_shape: Shape | None) -> Tensor:
    if input_shape is None:
        raise NoRuleError(
            f"lipschitz: expected an input_shape, because {type_name(type(module))} has its own forward pass, which "
            "has to be traced, got none: lipkit.lipschitz(network, input_shape=(3, 32, 32)), for instance"
        )
    return lipschitz(structure(module, input_shape, own=True)[0], input_shape)


def _structure_export(module: nn.Module, input_shape: Shape) -> nn.Module:
    chain, expected = structure(module, input_shape)
    training = any(part.training for part in module.modules())
    if training:
        check_same(chain, module, input_shape, expected)
    network = export_plain(chain, input_shape)
    # The chain holds copies. An export is in evaluation mode, whose outputs may differ from those in training mode.
    check_same(network, chain.eval(), input_shape, None if training else expected)
    return network.to(next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu")))


LATER.update(lipschitz=_structure_constant, export=_structure_export, constant=constant_copy)
