"""The table of modules, one row of rules for each exact type, and the types of the rules' results.

A layer for training adds two rules, `lipschitz_rule` and `export_rule`; a module of exported networks adds a whole row,
`add_plain`. Nothing is ever assumed to be 1-Lipschitz. A module without a rule is refused, and so is one whose forward
pass may differ from that of its type (hooks, an instance-level ``forward``). Parametrised modules count with their
present weights.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.modules.guarding import remember, type_name
from lipkit.proof.roundoff import Arithmetic, Line, next_up

Shape = tuple[int, ...]
"""The shape of one sample, without the batch."""


class RoundingBound(NamedTuple):
    r"""Bounds of the rounding error of one module m near an input x, as functions of a distance s.

    They hold for every h of the machine's format with :math:`\|h - x\|_2 \le s`.

    Attributes:
        error: bounds :math:`\|\hat m(h) - m(h)\|_2`: :math:`\hat m` in machine arithmetic, m in real arithmetic on the
            stored numbers.
        peak: bounds the modulus of every intermediate number.
    """

    error: Line
    peak: Line


# Maps a batch x (N, *input_shape) in float64 to bounds for all inputs near each of its samples.
RoundingError = Callable[[Tensor], RoundingBound]


class Range(NamedTuple):
    r"""Lowest and highest value of each entry, float64, ``(1, *shape)``: interval arithmetic, entry by entry.

    On a box with centre c and radii r, a linear map W has the range :math:`W c \pm |W| r`, and a non-decreasing
    function has its values at both ends. No certificate rests on a range: the limits made from them are part of the
    network, and `lipkit.modules.limits` leaves room for rounding, so that the limited network computes the same on
    the box.
    """

    low: Tensor
    high: Tensor

    @property
    def centre(self) -> Tensor:
        """Middle of each interval."""
        return self.low / 2 + self.high / 2

    @property
    def radius(self) -> Tensor:
        """Half the width of each interval, rounded up; ``centre +- radius`` covers it although `centre` is rounded."""
        return next_up(torch.maximum(self.high - self.centre, self.centre - self.low))

    @property
    def nearest(self) -> Tensor:
        """The least modulus of each entry."""
        return torch.maximum(self.low, -self.high).clamp_min(0)

    @property
    def farthest(self) -> Tensor:
        """The largest modulus of each entry."""
        return torch.maximum(self.low.abs(), self.high.abs())


def around(centre: Tensor, radius: Tensor) -> Range:
    """``centre +- radius``."""
    return Range(centre - radius, centre + radius)


def one_sign(module: Any, x: Range) -> Range:
    """Range ``W c +- |W r|`` of a linear map W whose rows each have weights of one sign."""
    return around(module(x.centre), module(x.radius).abs())


def within_one(module: Any, x: Range) -> Range:
    """Range of a map whose values lie in [-1, 1]."""
    return around(torch.zeros_like(x.low), torch.ones_like(x.low))


def monotone(module: Any, x: Range) -> Range:
    """Range of a non-decreasing map: its values at both ends."""
    return Range(module(x.low), module(x.high))


Accepts = Callable[[Any], bool]
"""A test of one value in a configuration: True if the constructor's argument may have it."""


def flag(value: Any) -> bool:
    """Accepts true and false."""
    return isinstance(value, bool)


def real(value: Any) -> bool:
    """Accepts a finite number."""
    return type(value) in (int, float) and abs(value) < 1e300  # a bool is no number, and NaN compares false


def each(accepts: Accepts, count: int | None = None) -> Accepts:
    """Accepts what ``accepts`` does, and tuples of up to 16 of these (exactly ``count``, if given)."""

    def accepted(value: Any) -> bool:
        if not isinstance(value, tuple):
            return accepts(value)
        return len(value) <= 16 and count in (len(value), None) and all(map(accepts, value))

    return accepted


def whole(least: int = -(2**31), most: int = 2**31 - 1, count: int | None = None) -> Accepts:
    """Accepts an integer in [least, most], or a tuple of up to 16 (exactly ``count``, if given)."""
    return each(lambda value: type(value) is int and least <= value <= most, count)  # a bool is no integer


def either(accepts: Accepts | None, *others: str | None) -> Accepts:
    """Accepts each of ``others`` (words or None), what ``accepts`` does (if given), and tuples of up to 16 of these."""

    def one(value: Any) -> bool:
        if value is None or isinstance(value, str):
            return value in others
        return accepts is not None and not isinstance(value, tuple) and accepts(value)

    return each(one)


def submodule(value: Any) -> bool:
    """Accepts the configuration of a module."""
    return isinstance(value, dict)


def submodules(value: Any) -> bool:
    """Accepts a tuple of configurations of modules."""
    return isinstance(value, tuple)


INTEGER, COUNT = whole(), whole(1)


class Stored(NamedTuple):
    """How modules are saved and loaded.

    Attributes:
        arguments: names of the constructor's arguments, each with a test of its values.
        read: maps a module to its arguments; by default the attributes of these names (``bias``: True if it has one).
        make: maps arguments to a module whose tensors are unset; by default the module's type.
    """

    arguments: Mapping[str, Accepts]
    read: Callable[[Any], dict[str, Any]] | None = None
    make: Callable[..., nn.Module] | None = None


# Any: a rule takes modules of exactly the type it is registered for, which the type of a table cannot express.
LipschitzRule = Callable[[Any, Shape | None], Tensor | float] | float
ExportRule = Callable[[Any, Shape], nn.Module]
RoundingRule = Callable[[Any, Shape, Arithmetic], RoundingError]
RangeRule = Callable[[Any, Range], Range]
IntegerRule = Callable[[Any, Any, Any, float], Any]

Rule = TypeVar("Rule", LipschitzRule, ExportRule, IntegerRule)


class Shown(nn.Module):
    """A module whose repr shows the constructor's arguments, read from attributes of the same names, but no tensors."""

    def extra_repr(self) -> str:
        own, shown = vars(self), list[str]()
        for name, parameter in inspect.signature(type(self)).parameters.items():
            if name in own and parameter.kind is parameter.VAR_POSITIONAL:
                shown += map(str, own[name])
            elif name in own:
                named = parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
                shown.append(f"{name}={own[name]}" if named else str(own[name]))
        return ", ".join(shown)


class Plain(NamedTuple):
    """One row of the table of modules. Uses that need a missing entry are refused; the message names the module.

    Attributes:
        kind: the type of the module, matched exactly.
        constant: proved l2 Lipschitz bound, a number or ``constant(module, input_shape)``.
        rounding: ``rounding(module, input_shape, arithmetic)`` bounds the error in a machine, as a `RoundingError`.
            The module is given in float64, with exactly the numbers that are stored.
        stored: the constructor's arguments by name, with tests; or a `Stored`. A stored module exports as a copy.
        range: ``range(module, x)`` encloses the outputs for inputs in the `Range` x; by default a ball around the
            output at the centre, of the constant times the half diagonal of x.
        integer: ``integer(builder, module, value, gain)`` writes the program in int32 (`lipkit.integer.Builder`).
        export: for a module that is not plain, ``export(module, input_shape)`` makes plain ones that compute the same.
        join: the rules of a module that reads several values, a `lipkit.modules.graph.Joining`.
        dims: least and most dimensions of a sample. With fewer, torch takes the batch for channels or pixels.
    """

    kind: type[nn.Module]
    constant: LipschitzRule | None = None
    rounding: RoundingRule | None = None
    stored: Mapping[str, Accepts] | Stored | None = None
    range: RangeRule | None = None
    integer: IntegerRule | None = None
    export: ExportRule | None = None
    join: Any = None
    dims: tuple[int, int] = (0, 9)


ROWS: dict[type[nn.Module], Plain] = {}
"""The row of each module, by its exact type."""


def add_plain(row: Plain) -> None:
    """Let exported networks hold modules of exactly this type.

    Raises:
        NoRuleError: its type has a row already, or another type is stored under its name.

    >>> add_plain(Plain(nn.ReLU, 1.0))
    Traceback (most recent call last):
    lipkit.errors.NoRuleError: torch.nn.modules.activation.ReLU already has a rule; expected one rule for each type
    """
    remember(row.kind)
    taken = row.kind if row.kind in ROWS else None if row.stored is None else stored_type(row.kind.__name__)
    if taken is not None:
        raise NoRuleError(f"{type_name(taken)} already has a rule; expected one rule for each type")
    ROWS[row.kind] = row._replace(stored=Stored(row.stored)) if isinstance(row.stored, Mapping) else row


def lipschitz_rule(*types: type[nn.Module]) -> Callable[[LipschitzRule], LipschitzRule]:
    """Register ``rule(module, input_shape) -> number``, or a number, as the proved l2 bound of exactly these types.

    >>> class Negate(nn.Module):
    ...     def forward(self, x): return -x
    >>> @lipschitz_rule(Negate)
    ... def _(module, input_shape): return 1.0
    >>> ROWS.pop(Negate).constant(Negate(), None)  # which leaves the table as it was
    1.0
    """
    return fill("constant", types)


def export_rule(*types: type[nn.Module]) -> Callable[[ExportRule], ExportRule]:
    """Register ``rule(module, input_shape) -> plain module`` as the export of these types; shared parts are copied."""
    return fill("export", types)


def fill(column: str, types: tuple[type[nn.Module], ...]) -> Callable[[Rule], Rule]:
    """Make a decorator that enters a rule as field ``column`` in the rows of exactly these types."""

    def filled(rule: Rule) -> Rule:
        for kind in types:
            row = row_of(kind)
            if getattr(row, column) is not None:
                raise NoRuleError(f"{type_name(kind)} already has a rule; expected one rule for each type")
            answer: dict[str, Any] = {column: rule}
            ROWS[kind] = row._replace(**answer)
        return rule

    for kind in types:
        remember(kind)
    return filled


def row_of(kind: type[nn.Module]) -> Plain:
    """The row of exactly this type; an empty row if it has none."""
    return ROWS.get(kind, Plain(kind))


def bounded(kind: type[nn.Module]) -> bool:
    """True for a type whose row has a Lipschitz constant."""
    return row_of(kind).constant is not None


def stored_types() -> tuple[type[nn.Module], ...]:
    """Every type that can be saved."""
    return tuple(kind for kind, row in ROWS.items() if row.stored is not None)


def stored_type(name: str) -> type[nn.Module] | None:
    """The type that is saved under this name, or None."""
    return next((kind for kind in stored_types() if kind.__name__ == name), None)


def rules() -> dict[type[nn.Module], tuple[bool, bool]]:
    """Every type with a rule, mapped to (has a rule for ``lipschitz``, has a rule for ``export``)."""
    found = {kind: (bounded(kind), row.export is not None or row.stored is not None) for kind, row in ROWS.items()}
    return {kind: (known, exported) for kind, (known, exported) in found.items() if known or ROWS[kind].export}
