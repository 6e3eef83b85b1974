"""Chains of modules: the product of their constants, the walk of their errors, the runs that one LMI bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.activations import slope_restricted
from lipkit.modules.fourier import StoredSymbol
from lipkit.modules.guarding import guard, type_name
from lipkit.modules.machine import (
    Measure,
    Step,
    local_of,
    prepare,
    rounding_rule,
    step_of,
    through,
)
from lipkit.modules.network import Network
from lipkit.modules.normalization import fold_norm
from lipkit.modules.registry import Shape, export_plain, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.proof.arithmetic import Arithmetic
from lipkit.proof.roundoff import multiply_up


class SlopeRun(NamedTuple):
    """Modules ``start`` to ``stop`` of a chain: linear layers with slope-restricted activations between them."""

    start: int
    stop: int
    weights: list[Tensor]
    multipliers: list[Tensor]


def slope_runs(network: Network) -> list[SlopeRun]:
    """The longest runs Linear, activation, Linear, ... whose activations all have a multiplier.

    >>> import torch
    >>> net = Network([nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)], (2,), {1: torch.ones(3)})
    >>> [(run.start, run.stop) for run in slope_runs(net)]
    [(0, 3)]
    """
    children, runs, start = list(network), [], 0
    while start < len(children):
        stop, weights, multipliers = start, [], []
        first = children[start]
        if type(first) is nn.Linear:
            stop, weights = start + 1, [first.weight]
            while stop + 1 < len(children):
                activation, following = children[stop], children[stop + 1]
                multiplier = network.multiplier(stop)
                if multiplier is None or not slope_restricted(activation) or type(following) is not nn.Linear:
                    break
                multipliers.append(multiplier)
                weights.append(following.weight)
                stop += 2
        if multipliers:
            runs.append(SlopeRun(start, stop, weights, multipliers))
        start = max(stop, start + 1)
    return runs


@lipschitz_rule(nn.Sequential)
def _sequential(module: nn.Sequential, input_shape: Shape | None) -> Tensor:
    return chain_constant(module, input_shape)


@lipschitz_rule(Network)
def _network(module: Network, input_shape: Shape | None) -> Tensor:
    if input_shape not in (None, module.input_shape):
        raise ShapeError(f"network exported for inputs of shape {module.input_shape}, got {input_shape}")
    return _with_multipliers(module, _factors(module, module.input_shape))


def chain_constant(children: Iterable[nn.Module], input_shape: Shape | None) -> Tensor:
    """The product of the constants of modules that follow each other, rounded up."""
    return _product(_factors(children, input_shape))


def _factors(children: Iterable[nn.Module], input_shape: Shape | None) -> list[Tensor]:
    """The constant of each of the modules that follow each other."""
    found: list[Tensor] = []
    before: nn.Module | None = None
    for child in children:
        if before is not None and input_shape is not None:
            input_shape = output_shape(before, input_shape)
        found.append(lipschitz(child, input_shape))
        before = child
    return found


def _product(factors: Sequence[Tensor]) -> Tensor:
    """Rounded up."""
    product = torch.ones((), dtype=torch.float64)
    for factor in factors:
        product = multiply_up(product, factor)
    return product


def _with_multipliers(network: Network, factors: Sequence[Tensor]) -> Tensor:
    """The product of the factors, where each run of linear layers with multipliers has the gain that its LMI proves."""
    gains = {run.start: (run.stop, gain_bound(run.weights, run.multipliers)) for run in slope_runs(network)}
    product, position = torch.ones((), dtype=torch.float64), 0
    while position < len(factors):
        stop, gain = gains.get(position, (position + 1, math.inf))
        factor = _product(factors[position:stop])
        if bool(factor.isfinite()):  # a bias that is not finite shows there only
            factor = factor.clamp_max(gain)
        product = multiply_up(product, factor)
        position = stop
    return product


@dataclasses.dataclass(frozen=True)
class ChainProof:
    """A network, proved module by module in one walk.

    Attributes:
        constant: of the whole network, rounded up; `inf` where nothing is known.
        prefixes: of its first 0, 1, 2, ... modules, rounded up.
        last: its last module if that is exactly an ``nn.Linear``, whose outputs are bounded one by one; else None.
        steps: the errors of the modules (of those before ``last``) in machine arithmetic; none where rounding is
            ignored.
        slack: what the exact transforms of Fourier layers can add to a constant, as a factor.
    """

    constant: float
    prefixes: tuple[float, ...]
    last: nn.Linear | None
    steps: tuple[Step, ...]
    slack: float

    @property
    def body_constant(self) -> float | None:
        """Of everything before the last layer; None without one."""
        return None if self.last is None else self.prefixes[-2]


def prove_chain(network: Network, arithmetic: Arithmetic | None) -> ChainProof:
    """Constants and rounding errors of a network in float64, from one walk over its modules.

    Args:
        network: exported, in float64.
        arithmetic: of the machine whose rounding is bounded; None ignores rounding.

    Raises:
        NoRuleError: another type, a module without a rule, or one whose forward pass may not be that of its type.
        OptionError: a bound is NaN.
    """
    guard(network)
    if type(network) is not Network:
        raise NoRuleError(f"expected a lipkit.modules.Network, got its subclass {type_name(type(network))}: export it")
    modules, shape = list(network), network.input_shape
    last = modules[-1] if modules and type(modules[-1]) is nn.Linear else None
    factors: list[Tensor] = []
    steps: list[Step] = []
    for module in modules:
        factors.append(lipschitz(module, shape).detach())
        if arithmetic is not None and module is not last:
            steps.append(step_of(module, shape, arithmetic, factors[-1]))
        shape = output_shape(module, shape)
    products = [torch.ones((), dtype=torch.float64)]
    for factor in factors:
        products.append(multiply_up(products[-1], factor))
    whole = _with_multipliers(network, factors) if network.multipliers() else products[-1]
    symbols = sum(isinstance(module, StoredSymbol) for module in network.modules())
    return ChainProof(
        constant=_rounded_up(whole),
        prefixes=(1.0, *map(_rounded_up, products[1:])),
        last=last if isinstance(last, nn.Linear) else None,
        steps=tuple(steps),
        slack=1.0 if arithmetic is None else 1 + 2.0**-43 * symbols,
    )


def proved_bound(network: nn.Sequential, input_shape: Shape) -> float:
    """``lipschitz`` of a chain, rounded up once more; 1 for an empty one.

    Raises:
        OptionError: the bound is NaN.
    """
    return _rounded_up(lipschitz(network, input_shape).detach()) if len(network) else 1.0


def _rounded_up(bound: Tensor) -> float:
    value = float(bound)
    if math.isnan(value):
        raise OptionError(f"expected a Lipschitz constant >= 0, got {value}")
    return math.nextafter(value, math.inf) if value > 0 else 0.0


@export_rule(nn.Sequential, Network)
def _export_sequential(module: nn.Sequential, input_shape: Shape) -> nn.Module:
    parts: list[Network] = []
    for child in module:
        before = parts[-1] if parts else None
        if before is not None and len(before) and not before.multipliers():
            folded = fold_norm(before[-1], child, input_shape)
            if folded is not None:
                parts[-1] = Network([*before[:-1], folded], before.input_shape)
                continue
        parts.append(export_plain(child, input_shape))
        input_shape = output_shape(parts[-1], input_shape)
    return nn.Sequential(*parts)


@rounding_rule(nn.Sequential, Network)
def _sequential_error(module: nn.Sequential, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    steps, _ = prepare(list(module), input_shape, arithmetic)
    return lambda x: local_of(through(steps, x))
