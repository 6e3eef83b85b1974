"""Runs of linear layers with slope-restricted activations between them, as matrices: what one LMI bounds.

A linear module, or a graph of them, has an `Action` on samples; `walked` follows values through a module, and `mapped`
makes matrices of what it meets. `slope_runs` finds the runs of a network that have multipliers.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lipkit.errors import ShapeError
from lipkit.modules.activations import ACTIVATIONS, slope_restricted
from lipkit.modules.dense import Affine
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, value_shapes
from lipkit.modules.network import Network
from lipkit.modules.normalization import LayerCenter
from lipkit.modules.plain import Shape
from lipkit.modules.pooling import EnlargeBilinear, Mean, window_terms
from lipkit.modules.registry import output_shape
from lipkit.modules.views import Expand, Pad, Permute, Piece, Reshape, Roll, Shift2d
from lipkit.proof.roundoff import gamma, known, to_double, up

LARGEST = 2**22
"""Most entries of a matrix."""

MOST_ROWS = 3000
"""Most inputs, units and outputs in one LMI."""

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)

LAYERS = (*CONVOLUTIONS, Graph)
"""Modules that begin a run, besides a dense layer."""


class Action(NamedTuple):
    """A linear module or join, without its shift: ``of`` its values, ``moduli`` the same with moduli of its numbers.

    ``terms`` is the most numbers in one sum; 0 if numbers are only copied.
    """

    of: Callable[..., Tensor]
    moduli: Callable[..., Tensor]
    terms: int = 0


def numbers(stored: Tensor) -> Tensor:
    """Stored numbers in float64, on the CPU."""
    return to_double(stored.detach()).cpu()


def _linear(node: nn.Linear, shape: Shape) -> Action:
    weight = numbers(node.weight)
    return Action(lambda v: F.linear(v, weight), lambda v: F.linear(v, weight.abs()), node.in_features)


def _affine(node: Affine, shape: Shape) -> Action:
    scale = numbers(node.scale)
    scale = scale.view(*scale.shape, *[1] * (len(shape) - scale.ndim))
    return Action(lambda v: scale * v, lambda v: scale.abs() * v, 1)


def _blend(node: Blend, shape: Shape) -> Action:
    share = numbers(node.share)
    rest = 1 - share
    return Action(lambda a, b: share * a + rest * b, lambda a, b: share.abs() * a + rest.abs() * b, 3)


def _convolution(node: nn.Conv2d | nn.ConvTranspose2d, shape: Shape) -> Action:
    weight = numbers(node.weight)

    def by(kernel: Tensor) -> Callable[..., Tensor]:
        given = {"weight": kernel} | ({} if node.bias is None else {"bias": kernel.new_zeros(node.out_channels)})
        return lambda v: functional_call(node, given, (v,))

    return Action(by(weight), by(weight.abs()), node.in_channels // node.groups * math.prod(node.kernel_size))


def _average(node: Any, shape: Shape) -> Action:
    return Action(node, lambda v: node(v).abs(), window_terms(node, shape) + 8)


def _centred(node: LayerCenter, shape: Shape) -> Action:
    terms = 2 + math.prod(shape[dim - 1] for dim in node.dims)
    return Action(node, lambda v: v + v.mean(node.dims, keepdim=True), terms)


def _add(node: Add, shape: Shape) -> Action:
    return Action(node, lambda *values: functools.reduce(operator.add, values), len(node.signs))


ACTIONS: dict[type[nn.Module], Callable[[Any, Shape], Action]] = {
    nn.Linear: _linear, Affine: _affine, Blend: _blend, Add: _add, LayerCenter: _centred,
    nn.Conv2d: _convolution, nn.ConvTranspose2d: _convolution,
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AvgPool2d, EnlargeBilinear, Mean), _average),
    **dict.fromkeys(
        (Concatenate, Expand, nn.Flatten, Pad, Permute, Piece, Reshape, Roll, Shift2d),
        lambda node, shape: Action(node, node),
    ),
}  # fmt: skip
"""The action of each linear module and join on samples; the shape is that of its first value."""

Part = tuple[Tensor, Tensor]
"""Values (count, *shape), a matrix or a vector (a diagonal), in float64, and a bound of the error of each entry."""


def acted(act: Action, given: Sequence[Part]) -> Part:
    """The result of an action on values that are known up to errors."""
    found, errors = zip(*given, strict=True)
    error = act.moduli(*errors)
    if act.terms:
        # | fl(A v) - A v' | <= gamma_n |A| |v| + |A| |v - v'|, and a number below the normal range for each term.
        error = up(error + gamma(act.terms + 2) * act.moduli(*(v.abs() for v in found)), 2 * act.terms + 8)
        error = error + 4 * act.terms * 2.0**-1074
    return act.of(*found), error


def composed(left: Tensor, part: Part | None) -> Part:
    """The product of ``left``, a matrix or a diagonal, and ``part``, None for the identity."""
    if part is None:
        return left, torch.zeros_like(left)

    def times(a: Tensor, b: Tensor) -> Tensor:
        if a.ndim == 1:
            return a.view(-1, *[1] * (b.ndim - 1)) * b
        return a * b if b.ndim == 1 else a @ b

    terms = left.shape[-1] if left.ndim == 2 and part[0].ndim == 2 else 1
    return acted(Action(lambda b: times(left, b), lambda b: times(left.abs(), b), terms), [part])


def mapped(act: Action, parts: Sequence[Part], shapes: Sequence[Shape]) -> Part:
    """`acted` on matrices, each column a value of one of these shapes; an error that is not known is infinite."""
    rows = [(a.mT.reshape(-1, *size), e.mT.reshape(-1, *size)) for (a, e), size in zip(parts, shapes, strict=True)]
    found, error = acted(act, rows)
    return found.flatten(1).mT, known(error.flatten(1).mT)


T = TypeVar("T")


def walked(
    module: Any, given: Sequence[T], shapes: Sequence[Shape], activated: Callable[[Any, T, Shape], T],
    moved: Callable[[Action, Any, Sequence[T], Sequence[Shape]], T],
) -> T:  # fmt: skip
    """The value behind a module whose `units` are known, from the values that it reads, of these shapes.

    ``activated(activation, value, shape)`` and ``moved(action, module, values, shapes)`` make new values.
    """
    kind, value, shape = type(module), given[0], shapes[0]
    if kind is Network:
        for child in module:
            value, shape = walked(child, [value], [shape], activated, moved), output_shape(child, shape)
        return value
    if kind is Graph:
        values, sizes = [value], value_shapes(module, shape)
        for node, read in zip(module.nodes, module.sources, strict=True):
            values.append(walked(node, [values[k] for k in read], [sizes[k] for k in read], activated, moved))
        return values[-1]
    if kind in ACTIVATIONS:
        return activated(module, value, shape)
    return moved(ACTIONS[kind](module, shape), module, given, shapes)


def units(module: Any, shape: Shape, takes: Callable[[Any], bool]) -> float:
    """The number of units of a graph of linear modules, and of activations that it ``takes``; inf for other graphs.

    It is inf for a value of more than `MOST_ROWS` entries, too.
    """
    kind = type(module)
    if math.prod(shape) > MOST_ROWS:
        return math.inf
    if kind is Network:
        total, size = 0.0, shape
        for child in module:
            total, size = total + units(child, size, takes), output_shape(child, size)
        return total
    if kind is Graph:
        sizes = value_shapes(module, shape)
        return sum(units(node, sizes[read[0]], takes) for node, read in zip(module.nodes, module.sources, strict=True))
    if kind in ACTIVATIONS:
        return math.prod(shape) if takes(module) else math.inf
    return 0.0 if kind in ACTIONS else math.inf


def is_linear(module: nn.Module, shape: Shape) -> bool:
    """True for a linear module, or a graph of them, if the matrices of its values have not too many entries.

    At most `LARGEST`, for convolutions a quarter: 1,024 inputs and outputs.
    """
    if units(module, shape, lambda activation: False):
        return False
    values = value_shapes(module, shape) if type(module) is Graph else [shape, output_shape(module, shape)]
    entries = math.prod(shape) * max(map(math.prod, values))
    return entries <= (LARGEST // 4 if type(module) in CONVOLUTIONS else LARGEST)  # their columns take longer


def widened(part: Part, width: int, before: bool = False) -> Part:
    """A matrix with columns of zeros for the values that came after what it reads, or ``before`` that."""
    more = part[0].new_zeros(len(part[0]), width - part[0].shape[1])
    first, second = ([more, t] if before else [t, more] for t in part)
    return torch.cat(first, 1), torch.cat(second, 1)


class SlopeRun(NamedTuple):
    """Modules ``start`` to ``stop - 1`` of a chain: linear layers with slope-restricted activations between them."""

    start: int
    stop: int
    weights: list[Tensor]  # W_0 .. W_L in float64, each the product of the linear layers between two activations
    errors: list[Tensor]  # bounds of the rounding error of each entry of a weight; zeros for a single layer
    multipliers: list[Tensor]  # of the L activations
    places: list[int]  # of the L activations in the chain; those of a graph are at its place

    @property
    def branches(self) -> bool:
        """True if there are graphs with activations: then weights read x and all activations before them."""
        return len({*self.places}) < len(self.places) or any(
            after.shape[1] != len(before) for before, after in itertools.pairwise(self.weights)
        )

    @property
    def units(self) -> int:
        return sum(map(len, self.weights[:-1]))


# Modules that leave a vector as it is.
SAME = (nn.Flatten, Reshape)


def in_unit_slope(module: nn.Module) -> bool:
    """True for a scalar activation of slope in [0, 1]: of a PReLU, which training may change, as its numbers are."""
    if type(module) is nn.PReLU:
        return bool(((module.weight >= 0) & (module.weight <= 1)).all())
    return slope_restricted(module)


def in_runs(module: nn.Module) -> bool:
    """True for modules that can be part of a `SlopeRun`."""
    return type(module) in (nn.Linear, Affine, *SAME) or in_unit_slope(module)


class _Open:
    """A `SlopeRun` that grows.

    ``part`` is the product of the linear layers since the last activation, None right behind one; ``wide`` once a graph
    has branched: then all matrices read x and all activations before them. ``by_rows``: layers map each row of a sample
    alone, and matrices are of one row.
    """

    def __init__(self, start: int, by_rows: bool = False) -> None:
        self.start, self.parts, self.places = start, list[Part](), list[int]()
        self.part: Part | None = None
        self.wide, self.by_rows = False, by_rows

    @property
    def begun(self) -> bool:
        return bool(self.parts) or self.part is not None

    @property
    def columns(self) -> int:
        """Number of x and of all activations so far."""
        first = self.parts[0] if self.parts else self.part
        assert first is not None
        return first[0].shape[1] + self.units

    @property
    def units(self) -> int:
        return sum(len(weight) for weight, _ in self.parts)

    def takes_activation(self) -> bool:
        """True if `part` is a matrix and, where all matrices read everything, its units are not too many."""
        if self.part is None or self.part[0].ndim != 2:
            return False
        return not self.wide or self.units + len(self.part[0]) <= MOST_ROWS

    def branches(self, graph: Graph, shape: Shape) -> bool:
        """True for a graph of linear modules and slope-restricted activations, if the units are not too many."""
        return self.units + units(graph, shape, in_unit_slope) <= MOST_ROWS

    def activated(self, place: int) -> None:
        """Append an activation behind `part`."""
        assert self.part is not None
        self.parts, self.places = [*self.parts, self.part], [*self.places, place]
        self.part = self._units(len(self.part[0])) if self.wide else None

    def _units(self, count: int) -> Part:
        """The last ``count`` activations, as a matrix of all columns."""
        return widened(self._one(count), self.columns, before=True)

    def _one(self, count: int) -> Part:
        one = torch.eye(count, dtype=torch.float64)
        return one, torch.zeros_like(one)

    def through(self, module: nn.Module, shape: Shape, place: int, wide: bool = False) -> None:
        """Append a linear module, or a graph: rows for its activations if it is ``wide``, and its output as `part`."""
        if self.part is None:
            self.part = self._one(math.prod(shape))
        elif self.part[0].ndim == 1:
            self.part = composed(self._one(math.prod(shape))[0], self.part)
        if wide:
            self.part, self.wide = widened(self.part, self.columns, before=True), True

        def activated(activation: nn.Module, value: Part, size: Shape) -> Part:
            self.parts = [*self.parts, self._whole(value)]
            self.places = [*self.places, place]
            return self._units(len(value[0]))

        def moved(act: Action, node: nn.Module, given: Sequence[Part], shapes: Sequence[Shape]) -> Part:
            return mapped(act, [self._whole(value) for value in given], shapes)

        self.part = self._whole(walked(module, [self.part], [shape], activated, moved))

    def _whole(self, part: Part) -> Part:
        return widened(part, self.columns) if self.wide else part

    def finished(self, stop: int, multipliers: Mapping[int, Tensor]) -> SlopeRun:
        assert self.part is not None
        weights, errors = zip(*self.parts, self.part, strict=True)
        used = list[Tensor]()
        for place in dict.fromkeys(self.places):  # of a graph: those of its activations in turn
            sizes = [len(weight) for weight, at in zip(weights, self.places, strict=False) if at == place]
            given, total = multipliers[place], sum(sizes)
            if len(given) not in (1, total):  # 1: of a candidate
                raise ShapeError(f"multiplier {place}: expected shape ({total},), got {tuple(given.shape)}")
            used += given.split(sizes) if len(given) == total else [given] * len(sizes)
        return SlopeRun(self.start, stop, [*weights], [*errors], used, [*self.places])


def slope_runs(
    network: Network, *, candidates: bool = False, branches: bool = True, joined: bool = True
) -> list[SlopeRun]:
    """The longest runs layer, activation, layer, ..., layer whose activations all have a multiplier.

    Consecutive linear modules count as one layer; runs that are not ``joined`` end between them. A graph of linear
    modules and activations is part of a run if it has a multiplier, which holds those of its units;
    ``branches=False`` leaves such graphs out, and convolutions. A run without activations counts if its last layer
    carries a multiplier, whose values are not used. ``candidates`` adds all runs without multipliers.
    """
    given = dict.fromkeys(range(len(network)), torch.ones(1)) if candidates else network.multipliers()
    multipliers = {i: values.cpu() for i, values in given.items()}  # matrices are made on the CPU
    runs, run = dict[int, SlopeRun](), _Open(0)  # by their starts
    shape = network.input_shape
    for i, module in enumerate(network if multipliers else ()):
        before, shape = shape, output_shape(module, shape)
        by_rows = type(module) is nn.Linear and math.prod(before) != before[-1]
        seam = not joined and run.takes_activation() and not (in_unit_slope(module) or type(module) in SAME)
        if not run.begun or seam or (run.by_rows != by_rows and type(module) in (nn.Linear, *LAYERS)):
            run = _Open(i, by_rows)
        vectors = all(math.prod(s) == (s or (1,))[-1] for s in (before, shape))  # one row, in any shape
        if vectors and type(module) in SAME:
            continue
        linear = linear_map(module, before, vectors)
        if linear is not None and (run.begun or linear.ndim == 2):
            run.part = composed(linear, run.part)
            if linear.ndim == 2:
                runs[run.start] = run.finished(i + 1, multipliers)
        elif in_unit_slope(module) and i in multipliers and run.takes_activation():
            run.activated(i)
        elif (
            (branches or type(module) not in CONVOLUTIONS)
            and ((run.begun and not run.by_rows) or (type(module) in LAYERS and _used(network, i, multipliers)))
            and is_linear(module, before)
        ):
            run.through(module, before, i)
            runs[run.start] = run.finished(i + 1, multipliers)
        elif type(module) is Graph and i in multipliers and branches and run.branches(module, before):
            run.through(module, before, i, wide=True)
            runs[run.start] = run.finished(i + 1, multipliers)
        else:
            run = _Open(i + 1)
    return [run for run in runs.values() if run.multipliers or run.stop - 1 in multipliers]


def _used(network: Network, start: int, multipliers: Mapping[int, Tensor]) -> bool:
    """True if a multiplier stands before any activation without one: else the matrix of a layer is made for nothing."""
    linear = (*ACTIONS, Graph)
    parts = enumerate([*network][start:], start)
    return next((i in multipliers for i, part in parts if i in multipliers or type(part) not in linear), False)


def linear_map(module: nn.Module, shape: Shape, vectors: bool) -> Tensor | None:
    """The matrix of a linear layer or the diagonal of a scaling of vectors, without shifts; None for other modules."""
    if type(module) is nn.Linear:
        return numbers(module.weight)
    if not vectors or type(module) is not Affine:
        return None
    scale = numbers(module.scale)
    return scale.view(*scale.shape, *[1] * (len(shape) - scale.ndim)).expand(shape).flatten()
