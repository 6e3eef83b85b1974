"""A walk over a traced graph: every value that changes with the input becomes an operand, all others are constants.

`lipkit.lowering.structure.Lowering`, which makes modules of it, says what an operand is known by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lipkit.errors import NoRuleError
from lipkit.lowering.axes import MIXED, batch_first, keeps_place
from lipkit.lowering.observe import Observed, Operand, Varies
from lipkit.lowering.tracing import BATCH, SIZE, Root, fetch, flat
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.plain import Shape
from lipkit.modules.registry import what_is_missing
from lipkit.proof.roundoff import root

# What takes the sizes of its result.
SHAPES = ("view", "reshape", "expand", torch.reshape, torch.broadcast_to)
# Formats that torch computes in; the narrower ones only store numbers.
FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


class Interpreter:
    """Visits every node in order; a subclass says what the input, a module and a function make of their operands.

    Args:
        root: the network.
        graph, observed: as left by :func:`lipkit.lowering.observe.observe`.
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
        if isinstance(output, Operand) and output.place[:2] != (0, 1):
            raise NoRuleError(f"analyze: {self.what(last)}: {MIXED}, or puts another dimension first")
        return output if isinstance(output, Operand) else None

    def _visit(self, node: fx.Node) -> Any:
        value = self.values[node]
        if node.op == "placeholder":
            self._format = value.dtype
            return replace(self._kept_apart(node, value), form=self.source())
        if not isinstance(value, (Operand, str)) and not _has_sizes(value):
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
            if len(given) != 1 or not isinstance(given[0], Operand) or not isinstance(value, Operand):
                got = f"{len(given)} arguments" if len(given) != 1 else "a list, or several results"
                raise NoRuleError(f"analyze: {self.what(node)}: expected a module from one tensor to one, got {got}")
            if not given[0].shape and type(module) not in ACTIVATIONS:
                raise NoRuleError(f"analyze: {self.what(node)}: expected samples with dimensions, got numbers (N,)")
            if not keeps_place(module, given[0], self._kept_apart(node, value)):
                raise NoRuleError(f"analyze: {self.what(node)}: {MIXED}, or reads the batch elsewhere than first")
        places = tuple(self._kept_apart(node, v) for v in values)
        shapes = tuple(v.shape for v in places)
        dtypes = tuple(self._checked_dtype(node, v.dtype) for v in places)
        if node.op == "call_module":
            return replace(value, form=self.module(node, given[0]))
        found = self.function(self._batch_first(node, places), shapes, dtypes)
        if isinstance(value, tuple):
            return tuple(replace(v, form=form) for v, form in zip(places, found, strict=True))
        return replace(value, form=found)

    def _batch_first(self, node: fx.Node, places: tuple[Operand, ...]) -> fx.Node:
        """A node for the call of values whose batch comes first."""
        call = (node.target, *self.arguments(node))
        target, args, kwargs = batch_first(self.what(node), call, places)
        if args is call[1]:
            return node
        made = fx.Graph().create_node("call_method" if isinstance(target, str) else "call_function", target)
        made.meta, self._given[made] = node.meta, (args, kwargs)
        return made

    def _refuse_batch(self, node: fx.Node, axis: int) -> None:
        """Refuse what is made from the size of the batch, unless it is that size of a result."""
        made = [n for n in node.all_input_nodes if self.how.get(n) in (SIZE, BATCH)]
        _, *sizes = flat((node.args, node.kwargs))
        there = made and made == sizes[axis : axis + 1] and sizes.count(made[0]) == 1 and node.target in SHAPES
        if made and not (
            there and (self.how[made[0]] == SIZE or all(type(n) is int and n > 0 for n in {*sizes} - {*made}))
        ):
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

    def _kept_apart(self, node: fx.Node, value: Any) -> Operand:
        if not isinstance(value, Operand) or value.axis < 0:
            raise NoRuleError(f"analyze: {self.what(node)}: {MIXED}")
        return value


def _has_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(v, (Operand, str)) for v in value)


def called(node: fx.Node) -> str:
    """How a person calls the function of a node; attributes such as ``x.T`` are calls of getattr."""
    return function_name(str(node.args[1]) if node.target is getattr else node.target)


def path_of(node: fx.Node) -> str:
    """The path of the module that a node calls, in the network."""
    return str(node.target).removeprefix("net").removeprefix(".")
