"""Chains of modules: products of constants, propagated rounding errors, and runs that one LMI bounds."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound
from lipkit.errors import NoRuleError, ShapeError
from lipkit.modules.activations import slope_restricted
from lipkit.modules.dense import Affine
from lipkit.modules.fourier import FourierConv2d
from lipkit.modules.graph import Graph, value_shapes
from lipkit.modules.guarding import guard, type_name
from lipkit.modules.linear_graph import (
    ACTIONS,
    CONVOLUTIONS,
    LAYERS,
    MOST_ROWS,
    Action,
    is_linear,
    mapped,
    numbers,
    units,
    walked,
)
from lipkit.modules.machine import ProvedModule, chain_error, prove_module
from lipkit.modules.network import Network
from lipkit.modules.normalization import fold_norm
from lipkit.modules.plain import INTEGER, Plain, Shape, Stored, add_plain, submodules
from lipkit.modules.registry import export_plain, lipschitz, output_shape
from lipkit.modules.views import Reshape
from lipkit.proof.roundoff import Arithmetic, gamma, multiply_up, product, to_double, up

Part = tuple[Tensor, Tensor]
"""A matrix or a vector (a diagonal), and a bound of the error of each entry."""


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

    def read_all(self) -> list[Part]:
        """The weights with their errors, each with columns for x and all activations before it."""
        widths = itertools.accumulate(map(len, self.weights[:-1]), initial=self.weights[0].shape[1])
        parts = zip(zip(self.weights, self.errors, strict=True), widths, strict=True)
        return [widened(part, width, before=True) for part, width in parts]


# Modules that leave a vector as it is.
_SAME = (nn.Flatten, Reshape)


def in_unit_slope(module: nn.Module) -> bool:
    """True for a scalar activation of slope in [0, 1]: of a PReLU, which training may change, as its numbers are."""
    if type(module) is nn.PReLU:
        return bool(((module.weight >= 0) & (module.weight <= 1)).all())
    return slope_restricted(module)


def in_runs(module: nn.Module) -> bool:
    """True for modules that can be part of a `SlopeRun`."""
    return type(module) in (nn.Linear, Affine, *_SAME) or in_unit_slope(module)


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
            self.part = _composed(self._one(math.prod(shape))[0], self.part)
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
        seam = not joined and run.takes_activation() and not (in_unit_slope(module) or type(module) in _SAME)
        if not run.begun or seam or (run.by_rows != by_rows and type(module) in (nn.Linear, *LAYERS)):
            run = _Open(i, by_rows)
        vectors = all(math.prod(s) == (s or (1,))[-1] for s in (before, shape))  # one row, in any shape
        if vectors and type(module) in _SAME:
            continue
        linear = _linear_map(module, before, vectors)
        if linear is not None and (run.begun or linear.ndim == 2):
            run.part = _composed(linear, run.part)
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


def _linear_map(module: nn.Module, shape: Shape, vectors: bool) -> Tensor | None:
    """The matrix of a linear layer or the diagonal of a scaling of vectors, without shifts; None for other modules."""
    if type(module) is nn.Linear:
        return numbers(module.weight)
    if not vectors or type(module) is not Affine:
        return None
    scale = numbers(module.scale)
    return scale.view(*scale.shape, *[1] * (len(shape) - scale.ndim)).expand(shape).flatten()


def _composed(left: Tensor, part: Part | None) -> Part:
    """The product of ``left`` and ``part``, matrices or diagonals, in float64, with a bound of each entry's error."""
    if part is None:
        return left, torch.zeros_like(left)
    right, error = part

    def times(a: Tensor, b: Tensor) -> Tensor:
        if a.ndim == 1:
            return a.view(-1, *[1] * (b.ndim - 1)) * b
        return a * b if b.ndim == 1 else a @ b

    # | fl(AB) - AB' | <= gamma_n |A| |B| + |A| |B - B'|, and each term can lose a number below the normal range.
    n, size = left.shape[-1], left.abs()
    bound = up(times(size, error) + gamma(n + 2) * times(size, right.abs()), 2 * n + 12)
    return times(left, right), bound + 4 * n * 2.0**-1074


def _network(module: Network, input_shape: Shape | None) -> Tensor:
    if input_shape not in (None, module.input_shape):
        raise ShapeError(f"network exported for inputs of shape {module.input_shape}, got {input_shape}")
    return _with_multipliers(module, constants(module, module.input_shape))


def chain_constant(children: Iterable[nn.Module], input_shape: Shape | None) -> Tensor:
    """The product of the constants of modules that follow each other, rounded up."""
    return _product(constants(children, input_shape))


def constants(children: Iterable[nn.Module], input_shape: Shape | None) -> list[Tensor]:
    """The constants of modules that follow each other."""
    found: list[Tensor] = []
    before: nn.Module | None = None
    for child in children:
        if before is not None and input_shape is not None:
            # Node by node: constants of a forward pass that is bounded have another format than its layers.
            shapes = value_shapes(before, input_shape) if type(before) is Graph else [output_shape(before, input_shape)]
            input_shape = shapes[-1]
        found.append(lipschitz(child, input_shape))
        before = child
    return found


def _product(factors: Sequence[Tensor]) -> Tensor:
    """Product of 0-d factors, rounded up."""
    return functools.reduce(multiply_up, factors, torch.ones((), dtype=torch.float64))


def whole(factors: Sequence[float]) -> float:
    """Product of constants, rounded up; inf times 0 is inf, because a module of constant inf may have NaN weights."""
    return math.inf if math.inf in factors else product(*factors)


def _with_multipliers(network: Network, factors: Sequence[Tensor]) -> Tensor:
    """The product of the factors, in which each run with multipliers counts by the gain that its LMI proves.

    Multipliers that balance two runs may not balance the run that both make, so the smallest product counts.
    """
    norms, runs = [float(factor.detach()) for factor in factors], slope_runs(network)
    if not runs:
        return _product(factors)
    apart, found = slope_runs(network, joined=False), [whole(norms), _by_runs(norms, runs)]
    if [(run.start, run.stop) for run in apart] != [(run.start, run.stop) for run in runs]:
        found.append(_by_runs(norms, apart))
    return torch.tensor(min(found), dtype=torch.float64)


def _by_runs(norms: Sequence[float], runs: Iterable[SlopeRun]) -> float:
    """The product of norms, in which each run counts by the gain that its LMI proves."""
    found = [*norms]
    for run in runs:
        limit = whole(norms[run.start : run.stop])
        # Narrow formats make multipliers 0 or infinite, which prove nothing.
        lost = any(bool(((m == 0) | m.isinf()).any()) for m in map(to_double, run.multipliers))
        if math.isfinite(limit) and not lost:  # only the norms show a bias that is not finite
            found[run.start] = min(limit, gain_bound(run.weights, run.multipliers, run.errors))
            found[run.start + 1 : run.stop] = [1.0] * (run.stop - run.start - 1)  # counted in the first one
    return whole(found)


@dataclasses.dataclass(frozen=True)
class ChainProof:
    """A network, proved module by module in one walk."""

    constant: float  # of the whole network, rounded up; inf if no bound follows
    prefixes: tuple[float, ...]  # constants of its first 0, 1, 2, ... modules, rounded up
    last: nn.Linear | None  # the last module, if it is an nn.Linear of vectors: each output is bounded alone
    steps: tuple[ProvedModule, ...]  # the modules before ``last``; empty if rounding is ignored
    slack: float  # factor by which the exact transforms of Fourier layers can raise a constant

    @property
    def body_constant(self) -> float | None:
        """The constant of all modules before `last`; None if there is no `last`."""
        return None if self.last is None else self.prefixes[-2]


def prove_chain(network: Network, arithmetic: Arithmetic | None) -> ChainProof:
    """Constants and rounding errors of an exported network in float64, from one walk over its modules.

    ``arithmetic`` is that of the machine whose rounding is bounded; None ignores rounding.
    """
    guard(network)
    if type(network) is not Network:
        raise NoRuleError(f"expected a lipkit.modules.Network, got its subclass {type_name(type(network))}: export it")
    modules, shape = list(network), network.input_shape
    last: nn.Linear | None = None
    factors: list[Tensor] = []
    steps: list[ProvedModule] = []
    for place, module in enumerate(modules, 1):  # by place: one module may stand in several
        factors.append(lipschitz(module, shape).detach())
        if place == len(modules) and type(module) is nn.Linear and len(shape) == 1:  # not applied row by row
            last = module
        elif arithmetic is not None:
            steps.append(prove_module(module, shape, arithmetic, factors[-1]))
        shape = output_shape(module, shape)
    products = [*itertools.accumulate(factors, multiply_up, initial=torch.ones((), dtype=torch.float64))]
    symbols = sum(isinstance(module, FourierConv2d) for module in network.modules())
    return ChainProof(
        constant=_rounded_up(_with_multipliers(network, factors)),
        prefixes=(1.0, *map(_rounded_up, products[1:])),
        last=last,
        steps=tuple(steps),
        slack=1.0 if arithmetic is None else 1 + 2.0**-43 * symbols,  # each is enlarged by 2^-44, see `enlarged`
    )


def _rounded_up(bound: Tensor) -> float:
    value = float(bound.nan_to_num(math.inf))  # 0 times an infinite constant bounds nothing
    return math.nextafter(value, math.inf) if value > 0 else 0.0  # products with an exact 0 are exact


def _export_sequential(module: nn.Sequential, input_shape: Shape) -> nn.Module:
    parts: list[Network] = []
    for i, child in enumerate(module):
        before = parts[-1] if parts else None
        if before is not None and not before.multipliers():
            place = max((k for k, part in enumerate(before) if type(part) is not Reshape), default=-1)
            folded = fold_norm(before[place], child, input_shape) if place >= 0 else None
            if folded is not None:
                parts[-1] = Network([*before[:place], folded, *before[place + 1 :]], before.input_shape)
                continue
        parts.append(export_plain(child, input_shape))
        multiplier = module.multiplier(i) if isinstance(module, Network) else None
        if multiplier is not None and len(parts[-1]) == 1:
            parts[-1].carry(0, multiplier)
        input_shape = output_shape(parts[-1], input_shape)
    return nn.Sequential(*parts)


def _made(modules: Any, input_shape: Any, multipliers: dict[str, int]) -> Network:
    given = {int(i): torch.zeros(operator.index(n)) for i, n in multipliers.items()}
    return Network(modules, input_shape, given)


def _read(network: Network) -> dict[str, Any]:
    sizes = {str(i): len(m) for i, m in network.multipliers().items()}
    # Not children(): that would list a module that stands in the chain twice only once.
    return {"modules": tuple(network), "input_shape": network.input_shape, "multipliers": sizes}


_arguments = {"modules": submodules, "input_shape": INTEGER, "multipliers": lambda value: isinstance(value, dict)}
add_plain(Plain(nn.Sequential, chain_constant, chain_error, export=_export_sequential))
add_plain(Plain(Network, _network, chain_error, Stored(_arguments, _read, _made), export=_export_sequential))
