"""Chains of modules: products of constants, the gains of runs that an LMI proves, and propagated rounding errors."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound
from lipkit.errors import NoRuleError, ShapeError
from lipkit.modules.fourier import FourierConv2d
from lipkit.modules.graph import Graph, value_shapes
from lipkit.modules.guarding import guard, type_name
from lipkit.modules.machine import ProvedModule, chain_error, prove_module
from lipkit.modules.network import Network
from lipkit.modules.normalization import fold_norm
from lipkit.modules.plain import INTEGER, Plain, Shape, Stored, add_plain, submodules
from lipkit.modules.registry import export_plain, lipschitz, output_shape
from lipkit.modules.slope_runs import SlopeRun, slope_runs
from lipkit.modules.views import Reshape
from lipkit.proof.roundoff import Arithmetic, multiply_up, product, to_double


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
