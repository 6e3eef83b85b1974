"""Where the batch stands in a tensor, and every call as one of values whose batch comes first.

A moving tensor has sizes (*before, B inner, *after): its batch is dimension ``axis``, merged with ``inner`` numbers of
each sample. Modules and rules see the same numbers as (B, *before, inner, *after), or (B, *before, *after) where inner
is 1. The place of the batch in a result is observed (`lipkit.lowering.observe`); here it must follow from those of the
arguments, for every batch. Calls without a rule here have the batch first throughout.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipkit.errors import NoRuleError
from lipkit.lowering.observe import Operand, Rows
from lipkit.lowering.tracing import flat
from lipkit.modules.activations import ACTIVATIONS

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
MIXED = "expected a result with one row per sample, got one whose shape mixes the batch with other dimensions"


@dataclass(frozen=True)
class Placing:
    """A call of tensors whose batch need not be first: its name in messages, its node's parts, its (first) result."""

    what: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Operand

    def require(self, condition: bool, expected: str = MIXED) -> None:
        """Refuse the call unless the condition holds."""
        if not condition:
            raise NoRuleError(f"analyze: {self.what}: {expected}")

    def dimension(self, x: Operand, d: Any) -> int:
        """The place of a dimension other than the batch in the value whose batch comes first."""
        expected = f"expected dimensions other than the batch (dimension {x.axis}), got {d}: it mixes samples"
        self.require(type(d) is int and d % x.rank != x.axis, expected)
        return x.plain(d % x.rank)

    def beside(self, value: Any) -> Any:
        """An argument beside moving values: those have the batch of the result, constants lose that dimension."""
        out, at = self.out, self.out.axis - self.out.rank
        if isinstance(value, Operand):
            self.require(value.place == out.place)
        if isinstance(value, Rows):
            self.require(out.inner == 1 and value.axis - value.row.ndim == at)
            value = value.row
        if isinstance(value, Tensor) and out.inner == 1 and value.ndim >= -at:
            self.require(value.shape[at] == 1)
            return value.squeeze(at)
        return value


def ordered(call: Placing) -> Call:
    """Moves of dimensions, found from what the function does to a tensor of as many different sizes."""
    x, *rest = call.args
    sizes = torch.empty(*range(2, 2 + x.rank), device="meta")
    function = getattr(type(sizes), call.target) if isinstance(call.target, str) else call.target
    order = [n - 2 for n in function(sizes, *rest, **call.kwargs).shape]
    call.require((order.index(x.axis), x.inner) == (call.out.axis, call.out.inner))
    behind = [x.plain(d) for d in order if d != x.axis or x.inner > 1]
    return ("contiguous", (x,), {}) if behind == sorted(behind) else ("permute", (x, 0, *behind), {})


def viewed(call: Placing) -> Call:
    """Numbers in the same order: as many before each sample as there were, and so as many behind it."""
    x, out = call.args[0], call.out
    call.require(math.prod(x.shape[: x.axis]) == math.prod(out.shape[: out.axis]))
    return call.target, call.args, call.kwargs


def joined(call: Placing) -> Call:
    """Number by number, of several values."""
    return call.target, *fx.node.map_aggregate((call.args, call.kwargs), call.beside)


def behind(used: Callable[..., int]) -> Callable[[Placing], Call]:
    """Along the last dimensions, as many as ``used`` finds in the arguments."""

    def rule(call: Placing) -> Call:
        call.beside(call.args[0])
        call.require(call.out.axis < call.out.rank - used(*call.args))
        return call.target, call.args, call.kwargs

    return rule


def along(at: int, name: str = "dim", default: Any = None) -> Callable[[Placing], Call]:
    """Along the dimensions in one argument, which may disappear."""

    def rule(call: Placing) -> Call:
        args, kwargs, out = list(call.args), dict(call.kwargs), call.out
        x = next(v for v in flat(args) if isinstance(v, Operand))
        given = args[at] if len(args) > at else kwargs.get(name, default)
        dims = given if isinstance(given, (tuple, list)) else [given]
        plain = [call.dimension(x, d) for d in dims]
        gone = sum(d % x.rank < x.axis for d in dims) if out.rank < x.rank else 0
        call.require((x.axis - gone, x.inner) == (out.axis, out.inner))
        if len(args) > at:
            args[at] = plain if dims is given else plain[0]
        else:
            kwargs[name] = plain if dims is given else plain[0]
        args[0] = [call.beside(v) for v in args[0]] if isinstance(args[0], (tuple, list)) else args[0]
        return call.target, tuple(args), kwargs

    return rule


def indexed(call: Placing) -> Call:
    """By whole numbers, slices and None, which leave the batch whole."""
    x, index = call.args
    items = list(index) if isinstance(index, tuple) else [index]
    plain = all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items)
    whole = f"expected slices and integers that leave the batch whole (x[:, ...]), got {index!r}"
    call.require(plain, whole)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * (x.rank - sum(type(i) in (int, slice) for i in items))
    batch = [k for k, i in enumerate(items) if i is not None][x.axis]
    call.require(items[batch] == slice(None), whole)
    call.require((sum(type(i) is not int for i in items[:batch]), x.inner) == (call.out.axis, call.out.inner))
    if x.inner == 1:
        del items[batch]
    return call.target, (x, (slice(None), *items)), {}


def multiplied(call: Placing) -> Call:
    """Matrices of each sample, or one constant matrix; they cannot meet along the batch, whose size varies."""
    x, y = call.args
    for v in (x, y):
        call.require(isinstance(v, Operand) or (isinstance(v, Tensor) and v.ndim == 2), "expected a constant matrix")
        call.require(not isinstance(v, Operand) or v.place == call.out.place)
    if isinstance(x, Tensor) and call.out.axis == call.out.rank - 1 and call.out.inner == 1:
        return call.target, (y, x.T), {}  # without the batch, what was the dimension before is the last
    return call.target, call.args, call.kwargs


RULES: dict[Any, Callable[[Placing], Call]] = {getattr: ordered, operator.getitem: indexed}
"""Functions, and tensor methods by name, to the call of values whose batch comes first."""
for _name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "permute"):
    RULES[_name] = RULES[getattr(torch, _name)] = ordered


def batch_first(what: str, call: Call, results: tuple[Operand, ...]) -> Call:
    """A call that does the same to values whose batch comes first: target, arguments and named arguments.

    Raises:
        NoRuleError: the batch of the result does not follow from those of the arguments.
    """
    target, args, kwargs = call
    moved = any(
        isinstance(v, Rows) or (isinstance(v, Operand) and v.place[:2] != (0, 1))
        for v in [*flat((args, kwargs)), *results]
    )
    turns = RULES.get(target) in (ordered, indexed) and (target is not getattr or args[1] in ("T", "mT"))
    if (target is operator.getitem and isinstance(args[0], tuple)) or not (moved or turns):
        return call
    placing = Placing(what, target, args, kwargs, results[0])
    placing.require(all(v.place == results[0].place for v in results))
    placing.require(target in RULES and (turns or target is not getattr), f"{MIXED}, or puts another dimension first")
    try:
        return RULES[target](placing)
    except NoRuleError:
        raise
    except Exception as error:  # arguments of kinds that the rule does not expect
        raise NoRuleError(
            f"analyze: {what}: expected arguments that its rule covers, got other ones: {error}"
        ) from error


def keeps_place(module: Any, x: Operand, y: Operand) -> bool:
    """True if a module from x to y has the batch first, or acts on each number or on last dimensions behind the batch.

    >>> x = Operand(None, (3, 4), torch.float32, axis=1)
    >>> keeps_place(nn.Linear(4, 4), x, x), keeps_place(nn.Softmax(1), x, x)
    (True, False)
    """
    kind, used = type(module), x.rank
    if kind in (nn.Identity, nn.Dropout) or (kind in ACTIVATIONS and ACTIVATIONS[kind].functions):
        used = 0
    elif kind in (nn.Linear, nn.LayerNorm):
        used = 1 if kind is nn.Linear else len(module.normalized_shape)
    elif kind is nn.Softmax and (module.dim or 0) < 0:
        used = -module.dim
    return x.place[:2] == y.place[:2] == (0, 1) or (x.place == y.place and x.axis + used < x.rank)
