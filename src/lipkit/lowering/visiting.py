"""A walk over a traced graph: every value that changes with the input becomes an operand, all others are constants.

Bounds (`lipkit.analysis`) and plain networks (`lipkit.lowering.structure`) are made by such walks, which differ in what
they know of an operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lipkit.errors import NoRuleError
from lipkit.lowering.axes import MIXED, batch_first, last_dimensions
from lipkit.lowering.running import Observed, Placed, Sizes, Varies
from lipkit.lowering.tracing import BATCH, SIZE, Root, fetch, flat
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.registry import Shape, what_is_missing
from lipkit.proof.roundoff import root

# What takes the sizes of its result.
SHAPES = ("view", "reshape", "expand", torch.reshape, torch.broadcast_to)
# Formats that torch computes in; the narrower ones only store numbers.
FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Operand(Placed):
    """A tensor that changes with the network's input.

    Attributes:
        form: what the walk knows of it: its bound (`lipkit.modules.forms.Form`), or its number in a network.
        shape: of one sample.
        dtype: its format.
        axis, inner: where its batch stands in the forward pass; rules see the value whose batch comes first.
    """

    form: Any
    shape: Shape
    dtype: torch.dtype
    axis: int = 0
    inner: int = 1

    @property
    def ndim(self) -> int:
        """Dimensions of the value whose batch comes first."""
        return len(self.shape) + 1


def function_name(target: Any) -> str:
    """How a person calls a function.

    >>> function_name(F.max_pool2d), function_name(torch.add), function_name("view")
    ('torch.nn.functional.max_pool2d', 'torch.add', 'Tensor.view')
    """
    if isinstance(target, str):
        return f"Tensor.{target}"
    for home in (F, torch, torch.special, torch.linalg, torch.fft):
        for name in dir(home):
            if not name.startswith("_") and getattr(home, name, None) is target:
                return f"{home.__name__}.{name}"
    return f"{getattr(target, '__module__', None) or ''}.{getattr(target, '__qualname__', target)}".lstrip("._")


@dataclass(frozen=True)
class FunctionCall:
    """One call of a function or tensor method in the graph.

    Attributes:
        name: of the function, for messages.
        where: the module that calls it.
        shapes: of one sample of each tensor in the result.
        dtypes: of these tensors, all floating point.
    """

    name: str
    where: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def shape(self) -> Shape:
        """Of one sample of the (first) tensor in the result."""
        return self.shapes[0]

    @property
    def pieces(self) -> int:
        """Number of tensors in the result."""
        return len(self.shapes)

    def refuse(self, expected: str) -> NoRuleError:
        """The error for arguments that the rule does not cover."""
        place = f" in {self.where!r}" if self.where else ""
        return NoRuleError(f"analyze: {self.name}{place}: {expected}")

    def operand(self, x: Any) -> Operand:
        """``x`` if it is a tensor that changes with the input; refuses anything else."""
        if not isinstance(x, Operand):
            raise self.refuse(f"expected a tensor that depends on the input as its argument, got {_kind(x)}")
        return x

    def same_format(self, x: Any) -> Operand:
        """``x`` if the result has its dtype: bits that are read in another format are other numbers."""
        if self.operand(x).dtype not in self.dtypes:
            raise self.refuse(
                f"expected a result of the input's dtype {x.dtype}, got {self.dtypes[0]}: bits read in another "
                "format are other numbers; convert them with x.to(dtype)"
            )
        return self.operand(x)

    def constant(self, x: Any, name: str) -> Any:
        """``x`` if it is the same for every input and batch; refuses anything else."""
        if any(isinstance(v, Operand) for v in flat(x)):
            raise self.refuse(f"expected a constant {name}, got a tensor that depends on the input")
        if any(isinstance(v, Varies) for v in flat(x)):
            raise self.refuse(f"expected a constant {name}, got one that depends on the size of the batch")
        return x

    def dims(self, x: Operand, dims: Any) -> list[int]:
        """Dimensions counted from the front, 0 the batch, which must not be among them."""
        given = [dims] if isinstance(dims, int) else dims
        if not isinstance(given, (tuple, list)) or not all(type(d) is int for d in given):
            raise self.refuse(f"expected dimensions other than the batch, got {_kind(dims)}")
        counted = [d + x.ndim if d < 0 else d for d in given]
        if not all(0 < d < x.ndim for d in counted):
            raise self.refuse(f"expected dimensions other than the batch (dimension 0), got {dims!r}: it mixes samples")
        return counted

    def order(self, x: Operand, dims: tuple[Any, ...]) -> tuple[int, ...]:
        """The arguments of ``permute``, which must leave the batch first."""
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        if not order or order[0] != 0:
            raise self.refuse(f"expected an order that starts with the batch (dimension 0), got {order!r}")
        return tuple(d % x.ndim for d in order)

    def index(self, x: Operand, index: Any) -> list[Any]:
        """The parts of an index of slices, whole numbers and None behind that of the batch, which it leaves whole."""
        items = list(index) if isinstance(index, tuple) else [index]
        self.constant(flat(items), "index")
        plain = all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items)
        used = sum(type(item) in (int, slice) for item in items)
        whole = items[0] == slice(None) or (items[0] is Ellipsis and used < x.ndim)
        if not plain or not whole or items.count(Ellipsis) > 1:
            raise self.refuse(f"expected slices and integers that leave the batch whole (x[:, ...]), got {index!r}")
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items[at : at + 1] = [slice(None)] * (x.ndim - used)
        return items[1:]

    def repetition(self, x: Operand) -> float:
        """Constant of broadcasting ``x`` to the shape of the result: the root of the copies of each entry."""
        if len(x.shape) != len(self.shape):
            raise self.refuse(
                f"expected operands with the {len(self.shape) + 1} dimensions of the result, got {x.ndim}: the batch "
                "would be broadcast against another dimension"
            )
        return root(math.prod(self.shape) // max(math.prod(x.shape), 1))


def _kind(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


class Walk:
    """Visits every node in order; a subclass says what the input, a module and a function make of their operands.

    Args:
        root: the network.
        graph, observed: as left by :func:`lipkit.lowering.running.observe`.
    """

    def __init__(self, root: Root, graph: fx.Graph, observed: Observed) -> None:
        self.root, self.graph, self.values, self.how = root, graph, observed.values, observed.how
        self.known: dict[fx.Node, Any] = {}
        self._given: dict[fx.Node, tuple[Any, Any]] = {}

    def source(self) -> Any:
        """Knowledge of the network's input."""
        raise NotImplementedError

    def module(self, node: fx.Node, x: Operand) -> Any:
        """Knowledge of the output of a module."""
        raise NotImplementedError

    def function(self, node: fx.Node, shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...]) -> Any:
        """Knowledge of the result of a function; a tuple where it returns one."""
        raise NotImplementedError

    def output(self) -> Operand | None:
        """The network's output; None if it does not depend on the input.

        Raises:
            NoRuleError: what the walk refuses, by the name of the node; an output that is no tensor.
        """
        for node in self.graph.nodes:
            if node.op != "output":
                self.known[node] = self._visit(node)
                continue
            (last,) = node.args
            output = self.known[last] if isinstance(last, fx.Node) else last
            if not isinstance(output, (Operand, Tensor, Varies)):
                raise NoRuleError(f"analyze: expected one output tensor, got {type(output).__name__}")
        if isinstance(output, Operand) and not output.first:
            raise NoRuleError(f"analyze: {self.what(last)}: {MIXED}, or puts another dimension first")
        return output if isinstance(output, Operand) else None

    def _visit(self, node: fx.Node) -> Any:
        value = self.values[node]
        if node.op == "placeholder":
            self._format = value.dtype
            return Operand(self.source(), self._sizes(node, value).shape, value.dtype)
        if not isinstance(value, (Sizes, str)) and not _has_sizes(value):
            return value
        if isinstance(value, str):
            raise NoRuleError(
                f"analyze: {self.what(node)}: expected a tensor, got {value}, which depends on the values of the input"
            )
        values = value if isinstance(value, tuple) else (value,)
        self._refuse_batch(node, getattr(values[0], "axis", -1))
        given: list[Any] = [self.known[a] if isinstance(a, fx.Node) else a for a in (*node.args, *node.kwargs.values())]
        if node.op == "call_module":
            module = fetch(self.root, str(node.target))
            if why := what_is_missing(module):
                raise NoRuleError(f"analyze: {self.what(node)}: {why}")
            if len(given) != 1 or not isinstance(given[0], Operand) or not isinstance(value, Sizes):
                got = f"{len(given)} arguments" if len(given) != 1 else "a list, or several results"
                raise NoRuleError(f"analyze: {self.what(node)}: expected a module from one tensor to one, got {got}")
            if not given[0].shape and type(module) not in ACTIVATIONS:
                raise NoRuleError(f"analyze: {self.what(node)}: expected samples with dimensions, got numbers (N,)")
            self._check_place(node, module, given[0], value)
        places = [self._sizes(node, v) for v in values]
        shapes = tuple(v.shape for v in places)
        dtypes = tuple(self._checked_dtype(node, v.dtype) for v in values)
        if node.op == "call_module":
            found = self.module(node, given[0])
        else:
            found = self.function(self._batch_first(node, places), shapes, dtypes)
        if isinstance(value, tuple):
            return tuple(Operand(f, v.shape, v.dtype, v.axis, v.inner) for f, v in zip(found, places, strict=True))
        return Operand(found, shapes[0], dtypes[0], places[0].axis, places[0].inner)

    def _batch_first(self, node: fx.Node, places: list[Sizes]) -> fx.Node:
        """A node for the call of values whose batch comes first."""
        before = (node.target, *self.arguments(node))
        target, *given = batch_first(self.what(node), *before, tuple(places))
        if target is node.target and given[0] is before[1]:
            return node
        op = "call_method" if isinstance(target, str) else "call_function"
        made = fx.Graph().create_node(op, target, name=node.name)
        made.meta = node.meta
        self._given[made] = (given[0], given[1])
        return made

    def _check_place(self, node: fx.Node, module: Any, x: Operand, y: Sizes) -> None:
        """Refuse a module to which the place of the batch matters, unless it is first."""
        used, y = last_dimensions(module), self._sizes(node, y)
        alike = (x.rank, x.axis, x.inner) == (y.rank, y.axis, y.inner)
        if not (x.first and y.first) and (used is None or not alike or x.axis + used >= x.rank):
            raise NoRuleError(
                f"analyze: {self.what(node)}: expected the batch as the first dimension of samples that are kept apart, "
                f"got it as dimension {x.axis} of the input and {y.axis} of the output"
                f"{', merged with another' if x.inner > 1 or y.inner > 1 else ''}"
            )

    def _refuse_batch(self, node: fx.Node, axis: int) -> None:
        """Refuse what is made from the size of the batch, unless it is that size of a result."""
        made = [n for n in node.all_input_nodes if self.how.get(n) in (SIZE, BATCH)]
        _, *sizes = flat((node.args, node.kwargs))
        others = sizes[:axis] + sizes[axis + 1 :]
        whole = made and (self.how[made[0]] == SIZE or all(type(n) is int and n > 0 for n in others))
        there = sizes[axis : axis + 1]
        if made and not (whole and node.target in SHAPES and made == there and sizes.count(made[0]) == 1):
            raise NoRuleError(
                f"analyze: {self.what(node)}: expected constant arguments, got {made[0].name!r}, made from the size of "
                "the batch: that may only be the size of the batch in a shape, as in x.view(x.shape[0], -1)"
            )

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, constants by their values."""
        if node in self._given:
            return self._given[node]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.known.__getitem__)
        return args, kwargs

    def what(self, node: fx.Node) -> str:
        """How a message names a node."""
        where = f" in {node.meta['where']!r}" if node.meta.get("where") else ""
        if node.op == "call_module":
            module = fetch(self.root, str(node.target))
            return f"{type(module).__module__}.{type(module).__qualname__} at {path_of(node)!r}"
        return f"{called(node)}{where}"

    def _checked_dtype(self, node: fx.Node, dtype: torch.dtype) -> torch.dtype:
        """``dtype`` if it is a floating-point format that holds every number of the network's own."""
        if dtype in FORMATS and torch.promote_types(dtype, self._format) == dtype:
            return dtype
        if dtype.is_complex:
            why = "complex numbers have no rules: use real and imaginary parts as channels"
        elif dtype.is_floating_point:
            why = "its rounding is coarser or its range smaller: convert the whole network to it, or leave out the cast"
        else:
            why = (
                "whole numbers, bits and truth values jump where the input moves: use a continuous function, such as "
                "torch.relu or torch.clamp"
            )
        raise NoRuleError(
            f"analyze: {self.what(node)}: expected a result in a floating-point format that holds the network's "
            f"{self._format}, got {dtype}: {why}"
        )

    def _sizes(self, node: fx.Node, value: Any) -> Sizes:
        if not isinstance(value, Sizes) or value.axis < 0:
            raise NoRuleError(f"analyze: {self.what(node)}: {MIXED}")
        return value


def _has_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(v, (Sizes, str)) for v in value)


def called(node: fx.Node) -> str:
    """How a person calls the function of a node; attributes such as ``x.T`` are calls of getattr."""
    return function_name(str(node.args[1]) if node.target is getattr else node.target)


def path_of(node: fx.Node) -> str:
    """The path of the module that a node calls, in the network."""
    return str(node.target).removeprefix("net").removeprefix(".")
