"""``local_error``: an open function whose rules, registered by exact type, bound the rounding error of one module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.modules.guarding import guard, remember, type_name
from lipkit.modules.registry import Shape, lipschitz, output_shape
from lipkit.proof.arithmetic import FLOAT64, Arithmetic, Line, grow, grow_number, size


class Local(NamedTuple):
    r"""The error that one module adds, as a function of the distance s of its input from the given one.

    Attributes:
        error: ``error(s)`` bounds :math:`\|\hat m(h) - m(h)\|_2` for every h of the machine's format with
            :math:`\|h - x\|_2 \le s`: :math:`\hat m` in machine arithmetic, m in real arithmetic on the stored numbers.
        peak: bounds the modulus of every number that occurs on the way.
    """

    error: Line
    peak: Line


# At a batch x (N, *input_shape) in float64: bounds for all inputs near each of its samples.
Measure = Callable[[Tensor], Local]

RoundingRule = Callable[[Any, Shape, Arithmetic], Measure]

_RULES: dict[type[nn.Module], RoundingRule] = {}


def rounding_rule(*types: type[nn.Module]) -> Callable[[RoundingRule], RoundingRule]:
    """Register ``rule(module, input_shape, arithmetic) -> measure`` as the rounding error of exactly these types.

    The module is given in float64, with exactly the numbers that are stored; ``measure(x)`` returns a `Local`.

    >>> class Negate(nn.Module):
    ...     def forward(self, x): return -x
    >>> @rounding_rule(Negate)
    ... def _(module, input_shape, arithmetic): return lambda x: Local(nothing(x), nothing(x))
    """

    def put(rule: RoundingRule) -> RoundingRule:
        for kind in types:
            if kind in _RULES:
                raise NoRuleError(f"{kind.__qualname__} already has a rounding rule; expected one for each type")
            _RULES[kind] = rule
            remember(kind)
        return rule

    return put


def rounding_rules() -> tuple[type[nn.Module], ...]:
    """Every type with a rounding rule."""
    return tuple(_RULES)


def local_error(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    """The rule of a module, made ready for inputs of one shape.

    Raises:
        NoRuleError: no rule for exactly this type, or a module whose forward pass may not be that of its type.
    """
    guard(module)
    kind = type(module)
    name = type_name(kind)
    if kind not in _RULES:
        raise NoRuleError(
            f"rounding='sound': expected modules with a bound of their rounding error, got {name}, which has none: "
            "register one with lipkit.modules.rounding_rule, or certify with rounding='ignore'"
        )
    return _RULES[kind](module, input_shape, arithmetic)


def nothing(x: Tensor) -> Line:
    """The bound 0 for each sample of x."""
    return Line(x.new_zeros(len(x)).double(), 0.0)


def entries(shape: Shape) -> int:
    """Numbers in one sample."""
    return math.prod(shape)


class Step(NamedTuple):
    """One module of a chain: its proved constant, and its own error in the evaluator's arithmetic and in float64."""

    module: nn.Module
    gain: float
    machine: Measure
    double: Measure


class Walk(NamedTuple):
    """The state of knowledge after a chain, for inputs within s of each of N samples.

    Attributes:
        centre: the output at the sample, computed in float64.
        centre_error: (N,) bounds its distance from the exact one, C.
        error: bounds the error of the machine, E.
        move: bounds how far the exact output has moved, D.
        peak: bounds every number on the way.
    """

    centre: Tensor
    centre_error: Tensor
    error: Line
    move: Line
    peak: Line

    @property
    def spread(self) -> Line:
        """Bounds the distance of the machine's output from ``centre``."""
        return self.error.plus(self.move).plus(Line(self.centre_error, 0.0))


def step_of(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic, constant: Tensor) -> Step:
    """One step of a chain.

    Args:
        module: in float64.
        input_shape: of one input.
        arithmetic: of the evaluator.
        constant: the module's own; it is rounded up by more than the stored transform of a Fourier layer can lack.
    """
    gain = grow_number(float(constant.detach()) * (1 + 2.0**-44))
    machine = local_error(module, input_shape, arithmetic)
    double = machine if arithmetic == FLOAT64 else local_error(module, input_shape, FLOAT64)
    return Step(module, gain, machine, double)


def prepare(modules: Sequence[nn.Module], input_shape: Shape, arithmetic: Arithmetic) -> tuple[list[Step], Shape]:
    """The steps of a chain of modules in float64, and the shape of its output."""
    steps = []
    for module in modules:
        steps.append(step_of(module, input_shape, arithmetic, lipschitz(module, input_shape)))
        input_shape = output_shape(module, input_shape)
    return steps, input_shape


def start(x: Tensor) -> Walk:
    """Before the first module: the machine's input is exact, at a distance of at most s."""
    zero = nothing(x)
    # The machine's inputs are finite numbers of its format: they are no peak themselves.
    return Walk(x, zero.at, zero, Line(zero.at, 1.0), zero)


def advance(walk: Walk, step: Step) -> Walk:
    """After one more module."""
    spread, own = walk.spread, step.machine(walk.centre)
    own64 = own if step.double is step.machine else step.double(walk.centre)
    return Walk(
        centre=step.module(walk.centre),
        centre_error=Line(walk.centre_error, 0.0).times(step.gain).plus(Line(own64.error.at, 0.0)).at,
        error=walk.error.times(step.gain).plus(own.error.below(spread)),
        move=walk.move.times(step.gain),
        peak=walk.peak.most(own.peak.below(spread)),
    )


def through(steps: Sequence[Step], x: Tensor) -> Walk:
    """The whole chain, at a batch x in float64."""
    walk = start(x)
    with torch.no_grad():
        for step in steps:
            walk = advance(walk, step)
    return walk


def reach(walk: Walk) -> Line:
    """Bounds the norm of the machine's output."""
    return walk.spread.plus(Line(grow(size(walk.centre)), 0.0))


Runner = Callable[[Tensor], Walk]


def runner(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> Runner:
    """The walk of one module, or of a ``nn.Sequential`` of them."""
    modules = list(module) if type(module) is nn.Sequential else [module]
    steps, _ = prepare(modules, input_shape, arithmetic)
    return lambda x: through(steps, x)


def local_of(walk: Walk) -> Local:
    return Local(walk.error, walk.peak)
