"""One call of a function in a traced graph, and the modules that its rule makes of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError, rewording
from lipkit.linalg.matrices import all_finite
from lipkit.lowering.composed import COMPOSED
from lipkit.lowering.observe import Operand, Varies
from lipkit.lowering.tracing import flat
from lipkit.modules.dense import Affine
from lipkit.modules.graph import Wiring
from lipkit.modules.limits import ToLimit
from lipkit.modules.plain import Shape
from lipkit.modules.views import Expand, Permute, Piece, reshaped
from lipkit.proof.roundoff import to_double

MIXED = "expected a result with one row per sample, got one whose shape mixes the batch with other dimensions"
FINITE = "expected finite numbers, got infinite ones or NaN (-inf is for a mask, right in front of a softmax)"

Value = int | tuple[int, ...]
Rule = Callable[..., Value]


class Bounded(nn.Module):
    """A map that can be bounded but not exported: only its Lipschitz constant, and the method that found it, are known.

    ``shape`` is that of one sample of its output, needed if the same call adds modules behind it.
    """

    def __init__(self, constant: float | Tensor, method: str, shape: Shape | None = None) -> None:
        super().__init__()
        self.constant, self.method, self.shape = torch.as_tensor(constant, dtype=torch.float64), method, shape


class Masked(nn.Module):
    """Marks a value that is -inf where ``hidden`` is true (of a sample's shape): for a softmax, no network holds it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class Build:
    """One call of a function or tensor method that becomes modules.

    Attributes:
        name: of the function.
        what: how messages name the call: the function, and the module that calls it.
        target, args, kwargs: the call, with operands for tensors that change with the input.
        results: the tensors that it returns, all floating point.
        wiring: where the modules go.
        like: a zero of the dtype and device that constants get.
        bounding: True if only Lipschitz constants are needed: leaves may be `Bounded`, and shifts are left out.
    """

    name: str
    what: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Operand, ...]
    wiring: Wiring
    like: Tensor
    bounding: bool

    @property
    def shape(self) -> Shape:
        """Shape of one sample of the (first) result."""
        return self.results[0].shape

    def refuse(self, expected: str) -> NoRuleError:
        """The error of this call, with what was expected."""
        return NoRuleError(f"analyze: {self.what}: {expected}")

    def require(self, condition: bool, expected: str = MIXED) -> None:
        """Refuse the call unless the condition holds."""
        if not condition:
            raise self.refuse(expected)

    def covered(self, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``rule(call, ...)``. Whatever the rule raises becomes a refusal of the arguments."""
        start = f"analyze: {self.what}: expected arguments that its rule covers, got other ones: "
        with rewording(NoRuleError, start, Exception):  # of kinds that the rule does not expect
            inspect.signature(rule).bind(self, *args, **kwargs)
            return rule(self, *args, **kwargs)

    def to(self, target: Any, *args: Any, **kwargs: Any) -> Build:
        """This call with another function and other arguments."""
        return replace(self, target=target, args=args, kwargs=kwargs)

    def operand(self, x: Any) -> Operand:
        """``x`` if it is a tensor that changes with the input; refuses anything else."""
        if not isinstance(x, Operand):
            raise self.refuse(f"expected a tensor that depends on the input as its argument, got {_kind(x)}")
        return x

    def same_format(self, x: Any) -> Operand:
        """``x`` if the result has its dtype. Another dtype is refused: the same bits would be other numbers."""
        if self.operand(x).dtype not in (dtypes := [result.dtype for result in self.results]):
            why = "bits read in another format are other numbers; convert them with x.to(dtype)"
            raise self.refuse(f"expected a result of the input's dtype {x.dtype}, got {dtypes[0]}: {why}")
        return self.operand(x)

    def constant(self, x: Any, name: str) -> Any:
        """``x`` if it is the same for every input and batch; refuses anything else."""
        moving, varying = (any(isinstance(v, kind) for v in flat(x)) for kind in (Operand, Varies))
        self.require(not moving, f"expected a constant {name}, got a tensor that depends on the input")
        self.require(not varying, f"expected a constant {name}, got one that depends on the size of the batch")
        return x

    def number(
        self, x: Any, name: str, of: Callable[[Tensor], Tensor] = torch.clone, axes: int | None = None
    ) -> Tensor:
        """``of(x)`` for a constant x without batch and with at most ``axes`` dimensions, in the network's dtype."""
        axes = len(self.shape) if axes is None else axes
        value = self.constant(x, name)
        value = to_double(value.detach()) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        self.require(not value.is_complex(), f"expected real numbers as {name}, got {value.dtype}")
        if value.ndim == axes + 1 and len(value) == 1:  # one row for all samples
            value = value[0]
        self.require(value.ndim <= axes, f"expected a {name} without a batch, got shape {tuple(value.shape)}")
        return of(value).to(self.like)

    def dims(self, x: Operand, dims: Any) -> list[int]:
        """Dimensions counted from the front, 0 the batch, which must not be among them."""
        given = [dims] if isinstance(dims, int) else dims
        whole = isinstance(given, (tuple, list)) and all(type(d) is int for d in given)
        self.require(whole, f"expected dimensions other than the batch, got {_kind(dims)}")
        counted = [d + x.ndim if d < 0 else d for d in given]
        expected = f"expected dimensions other than the batch (dimension 0), got {dims!r}: it mixes samples"
        self.require(all(0 < d < x.ndim for d in counted), expected)
        return counted

    def moving(self, *values: Any) -> list[Operand]:
        """The operands in ``values``. Constant tensors are skipped if only bounds are made and they are finite."""
        self.require(all_finite(*(x for x in values if isinstance(x, Tensor))), FINITE)
        return [self.operand(x) for x in values if not (self.bounding and isinstance(x, Tensor))]

    def add(self, module: nn.Module, *values: Operand | int) -> int:
        """Add a module that reads these values (operands, or value numbers); return the number of its output."""
        return self.wiring.add(module, *(v.number if isinstance(v, Operand) else v for v in values))

    def times(self, value: Operand | int, factor: float) -> int:
        """A value times a number."""
        return self.add(Affine(self.like[None] + factor, self.like[None]), value)

    def permuted(self, value: Operand | int, order: Sequence[int]) -> int:
        """A value with its dimensions, counted from 1, in another order."""
        number = value.number if isinstance(value, Operand) else value
        return number if [*order] == sorted(order) else self.add(Permute(*order), number)

    def result(self, number: Any) -> Operand:
        """The (first) result as the operand of another rule, computed by value ``number``."""
        return replace(self.results[0], number=number)

    def scale(self, x: Operand, factor: float | Tensor, method: str = "closed form") -> int:
        """Add a map of Lipschitz constant ``factor`` that has no plain form; return the number of its output."""
        return self.add(Bounded(factor, method), x)

    def keep(self, x: Operand) -> int:
        """Add a map of constant 1 that keeps the dtype and has no plain form; return the number of its output."""
        return self.scale(self.same_format(x), 1.0)

    def reshaped(self, value: int, before: Shape, after: Shape) -> int:
        """A value with its entries in the shape ``after``; the shape () counts as (1,)."""
        before, after = before or (1,), after or (1,)
        return value if before == after else self.add(reshaped(after), value)

    def broadcast(self, x: Any) -> Operand:
        """``x`` repeated to the shape of the result, as elementwise functions do."""
        if self.operand(x).shape == self.shape:
            return self.operand(x)
        if len(x.shape) != len(self.shape):
            got = f"got {x.ndim}: the batch would be broadcast against another dimension"
            raise self.refuse(f"expected operands with the {len(self.shape) + 1} dimensions of the result, {got}")
        return Operand(self.shape, x.dtype, number=self.add(Expand(*self.shape), x))

    def shift(self, x: Any) -> Tensor:
        """The constant ``x`` that is added; 1 for bounds, which do not depend on it (0 would look like no addition)."""
        term = self.number(x, "term")
        self.require(all_finite(term), FINITE)
        return self.like + 1 if self.bounding else term

    def elementwise(self, x: Any, *, scale: Tensor | None = None, shift: Tensor | None = None) -> int:
        """``scale * x + shift``, with torch's broadcasting."""
        given = self.broadcast(x)
        numbers = [self.like + 1 if scale is None else scale, self.like if shift is None else shift]
        axes = len(given.shape) or 1
        full = [t.reshape((1,) * (axes - t.ndim) + tuple(t.shape)) for t in numbers]  # broadcasting adds them in front
        if all(t.shape[1:].numel() == 1 for t in full):  # one number for each channel
            channels = max(t.shape[0] for t in full)
            full = [t.reshape(-1).expand(channels) for t in full]
        return self.add(Affine(*full), given)

    def unmasked(self, x: Any) -> tuple[Any, Tensor]:
        """A value or a constant with finite numbers for -inf, and where it is -inf."""
        marked = self.wiring.modules[x.number - 1] if isinstance(x, Operand) and x.number > 0 else None
        if isinstance(marked, Masked):
            return replace(x, number=self.wiring.sources[x.number - 1][0]), marked.hidden
        if isinstance(x, float) and x == -math.inf:
            return 0.0, torch.tensor(True)
        if isinstance(x, Tensor) and x.is_floating_point() and bool((hidden := x.isneginf()).any()):
            return x.masked_fill(hidden, 0.0), self.number(hidden, "mask").bool()
        return x, torch.tensor(False)

    def masked(self, value: Any, hidden: Tensor) -> int:
        """A value that is the result, but for -inf where ``hidden`` is true."""
        return self.add(Masked(hidden.expand(self.shape)), value) if bool(hidden.any()) else int(value)

    def named(self, limited: ToLimit) -> ToLimit:
        """Give ``limited`` this call's name for messages. Refused while bounding: without a box it has no bound."""
        if self.bounding:
            bounds = "analyze(..., box=(0, 1)), or lipkit bound --box 0,1, bounds it for inputs in a box"
            raise self.refuse(f"{limited.needs}; {bounds}")
        limited.where = self.what
        if self.results[0].dtype == torch.float64:
            limited.limits = limited.limits.double()
        return limited

    def piece(self, x: Operand, dim: int, entries: range) -> int:
        """The ``entries`` of ``x`` along dimension ``dim``."""
        if entries == range(x.shape[dim - 1]):
            return x.number
        if not entries and self.bounding:
            return self.scale(x, 0.0)
        self.require(bool(entries), f"expected pieces with entries, got none of dimension {dim}")
        return self.add(Piece(dim, entries.start, entries.stop, entries.step), x)


class Function(NamedTuple):
    """The row of a function, or of a tensor method by its name.

    Attributes:
        rule: ``rule(call, *arguments)`` gives the number of the value, or a tuple for several.
        place: rewrites a call whose batch is not first (`lipkit.lowering.axes`); None refuses such a call.
        exported: True if the modules compute the same as the function; otherwise only their constant is right.
    """

    rule: Rule | None = None
    place: Callable[[Build], Build] | None = None
    exported: bool = True


FUNCTIONS: dict[Any, Function] = {}
"""The rows of all functions and, by name, of all tensor methods that have one."""


def function_name(target: Any) -> str:
    """A function's name as users write it: ``torch.nn.functional.max_pool2d``, ``torch.add``, ``Tensor.view``."""
    if isinstance(target, str):
        return f"Tensor.{target}"
    for home in (F, torch, torch.special, torch.linalg, torch.fft):
        if names := [name for name, value in vars(home).items() if value is target and not name.startswith("_")]:
            return f"{home.__name__}.{min(names)}"
    if isinstance(target, type(torch.ops.aten.add)):
        return f"torch.ops.{target}"  # its own name is that of a C++ record
    where = (getattr(target, "__module__", None) or "").replace("_operator", "operator")
    return f"{where}.{getattr(target, '__qualname__', target)}".lstrip(".")


def plain(*targets: Callable[..., Any] | str, place: Callable[[Build], Build] | None = None) -> Callable[[Rule], Rule]:
    """Register a rule that makes modules for these functions; ``place`` as in `Function`."""

    def put(rule: Rule) -> Rule:
        FUNCTIONS.update(dict.fromkeys(targets, Function(rule, place)))
        return rule

    return put


def function_rule(*targets: Callable[..., Any] | str) -> Callable[[Rule], Rule]:
    """Register ``rule(call, *arguments) -> value`` for exactly these functions and tensor methods (by name).

    This is for functions that have a Lipschitz constant but no module that computes the same: `lipkit.analyze` bounds
    them, nothing exports them. The rule gets the arguments of the function, with a `lipkit.analysis.Operand` for each
    tensor that changes with the network's input. By ``call.scale(x, factor)`` or ``call.keep(x)`` it states the l2
    Lipschitz constant of the result, sample by sample.

    Raises:
        NoRuleError: a target already has a rule, or a module that computes the same.

    >>> def halve(x): return x / 2
    >>> @function_rule(halve)
    ... def _(call, x): return call.scale(x, 0.5)
    >>> FUNCTIONS.pop(halve).rule is _
    True
    """

    def put(rule: Rule) -> Rule:
        for target in targets:
            if target in FUNCTIONS or target in COMPOSED:
                raise NoRuleError(f"{function_name(target)} already has a rule; expected one rule for each function")
            FUNCTIONS[target] = Function(rule, exported=False)
        return rule

    return put


def function_rules() -> dict[Any, Rule]:
    """Every function and method name with the rule that makes its modules (a copy)."""
    return {target: row.rule for target, row in FUNCTIONS.items() if row.rule is not None}


def _kind(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
