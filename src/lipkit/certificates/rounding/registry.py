"""``local_error``: an open function whose rules, registered by exact type, bound the rounding error of one module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lipkit.certificates.rounding.arithmetic import Arithmetic, Line
from lipkit.errors import NoRuleError
from lipkit.protocol.guarding import guard, remember, type_name
from lipkit.protocol.registry import Shape


class Local(NamedTuple):
    r"""What one module adds to the error, as a function of the distance s of its input from the given one.

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
            "register one with lipkit.certificates.rounding.rounding_rule, or certify with rounding='ignore'"
        )
    return _RULES[kind](module, input_shape, arithmetic)


def nothing(x: Tensor) -> Line:
    """The bound 0 for each sample of x."""
    return Line(x.new_zeros(len(x)).double(), 0.0)


def entries(shape: Shape) -> int:
    """Numbers in one sample."""
    return math.prod(shape)
