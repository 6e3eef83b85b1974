"""Where the batch stands in a tensor, and every call as one of values whose batch comes first.

Code that puts the tokens first, or takes windows for samples, computes with tensors of sizes (*before, B inner, *after):
their batch is dimension ``axis``, merged with ``inner`` numbers of each sample. The same numbers are the value
(B, *before, inner, *after), or (B, *before, *after) where inner is 1, of which modules and rules are. The place of the
batch in a result is observed (`lipkit.lowering.running`); here it must follow from those of the arguments, for every
batch, or the call is refused. A call without a rule here has the batch first throughout.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lipkit.errors import NoRuleError
from lipkit.lowering.running import Placed, Rows
from lipkit.lowering.tracing import flat
from lipkit.modules.activations import ACTIVATIONS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
MIXED = "expected a result with one row per sample, got one whose shape mixes the batch with other dimensions"


@dataclass(frozen=True)
class Placing:
    """A call with tensors whose batch need not be first.

    Attributes:
        what: its name in messages.
        target, args, kwargs: of its node, moving values as operands.
        out: its (first) result.
    """

    what: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Placed

    @property
    def x(self) -> Placed:
        """The first tensor that moves."""
        return next(v for v in flat((self.args, self.kwargs)) if isinstance(v, Placed))

    def refuse(self, expected: str) -> NoRuleError:
        return NoRuleError(f"analyze: {self.what}: {expected}")

    def check(self, axis: int, inner: int) -> None:
        """Refuse a result whose batch is not here."""
        if (self.out.axis, self.out.inner) != (axis, inner):
            raise self.refuse(MIXED)

    def alike(self, x: Any) -> None:
        """Refuse a tensor whose batch is not where that of the result is, from the end too."""
        if (x.rank, x.axis, x.inner) != (self.out.rank, self.out.axis, self.out.inner):
            raise self.refuse(
                f"expected one row per sample, in dimension {self.out.axis} of {self.out.rank} as in the result, got "
                f"{'a merged batch' if x.inner > 1 else 'the batch'} in dimension {x.axis} of {x.rank}"
            )

    def dimension(self, x: Placed, d: Any) -> int:
        """A dimension counted from the front; refuses the batch's."""
        if type(d) is not int or d % x.rank == x.axis:
            raise self.refuse(f"expected dimensions other than the batch (dimension {x.axis}), got {d}: it mixes samples")
        return d % x.rank

    def beside(self, value: Any) -> Any:
        """An argument beside a moving value: operands must be alike, constants lose the dimension of the batch."""
        if isinstance(value, Placed):
            self.alike(value)
        if isinstance(value, Rows):
            if self.out.inner > 1 or value.axis - value.row.ndim != self.out.axis - self.out.rank:
                raise self.refuse("expected a constant with one row per sample, got rows in another dimension")
            value = value.row
        if isinstance(value, Tensor) and self.out.inner == 1 and value.ndim >= self.out.rank - self.out.axis:
            at = self.out.axis - self.out.rank
            if value.shape[at] != 1:
                raise self.refuse(f"expected a constant without a batch, got {tuple(value.shape)}")
            return value.squeeze(at)
        return value


Rule = Callable[[Placing], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def _ordered(call: Placing) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What moves dimensions, by what it does to a tensor of as many different sizes."""
    x, rest = call.args[0], call.args[1:]
    sizes = torch.empty(*range(2, 2 + x.rank), device="meta")
    moved = getattr(sizes, call.target) if isinstance(call.target, str) else lambda *rest: call.target(sizes, *rest)
    order = [n - 2 for n in moved(*rest, **call.kwargs).shape]
    call.check(order.index(x.axis), x.inner)
    behind = [x.plain(d) for d in order if d != x.axis or x.inner > 1]
    if behind == sorted(behind):
        return "contiguous", (x,), {}
    return "permute", (x, 0, *behind), {}


def _viewed(call: Placing) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same numbers in the same order: as many before each sample as there were, and so as many behind."""
    x = call.args[0]
    if math.prod(x.shape[: x.axis]) != math.prod(call.out.shape[: call.out.axis]):
        raise call.refuse(MIXED)
    return call.target, call.args, call.kwargs


def _kept(call: Placing) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Number by number, or along the last dimensions, behind the batch."""
    call.alike(call.args[0])
    last = call.args[1] if call.target in (F.layer_norm, F.pad) else 0
    used = 1 if call.target in (F.linear, F.layer_norm) and not isinstance(last, (tuple, list)) else 0
    used += (len(last) // (2 if call.target is F.pad else 1)) if isinstance(last, (tuple, list)) else 0
    if call.out.axis >= call.out.rank - used:
        raise call.refuse(f"expected the batch before the last {used} dimensions, got it in {call.out.axis}: {MIXED}")
    return call.target, call.args, call.kwargs


def _joined(call: Placing) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Number by number, of several values."""
    args, kwargs = fx.node.map_aggregate((call.args, call.kwargs), call.beside)
    return call.target, args, kwargs


def _along(at: int, name: str, default: Any = None) -> Rule:
    """Along dimensions, which are one argument."""

    def rule(call: Placing) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        x, args, kwargs = call.x, list(call.args), dict(call.kwargs)
        given = args[at] if len(args) > at else kwargs.get(name, default)
        dims = [call.dimension(x, d) for d in (given if isinstance(given, (tuple, list)) else [given])]
        gone = dims if call.out.rank < x.rank else []
        call.check(x.axis - sum(d < x.axis for d in gone), x.inner)
        plain = [x.plain(d) for d in dims]
        kwargs[name] = plain if isinstance(given, (tuple, list)) else plain[0]
        if len(args) > at:
            args[at] = kwargs.pop(name)
        if isinstance(args[0], (tuple, list)):
            args[0] = [call.beside(v) for v in args[0]]
        return call.target, tuple(args), kwargs

    return rule


def _stacked(call: Placing) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    tensors, dim = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    x = call.x
    if any((v.rank, v.axis, v.inner) != (x.rank, x.axis, x.inner) for v in tensors):
        raise call.refuse(MIXED)
    at = call.dimension(call.out, dim)
    call.check(x.axis + (at <= x.axis), x.inner)
    return call.target, (tensors, call.out.plain(at)), {}


def _indexed(call: Placing) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    x, index = call.args
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(type(item) in (int, slice) for item in items)
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        raise call.refuse(f"expected slices and integers that leave the batch whole, got {index!r}")
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * (x.rank - used)
    plain: list[Any] = []
    axis = dim = place = 0
    for item in items:
        if item is not None and dim == x.axis:
            if item != slice(None):
                raise call.refuse(f"expected the batch, dimension {x.axis}, to be left whole, got {index!r}")
            axis = place
        if item is None or dim != x.axis or x.inner > 1:
            plain.append(item)
        dim, place = dim + (item is not None), place + (type(item) is not int)
    call.check(axis, x.inner)
    return call.target, (x, (slice(None), *plain)), {}


def _multiplied(call: Placing) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    x, y = call.args
    moving = [v for v in (x, y) if isinstance(v, Placed)]
    for v in moving:
        call.alike(v)
    constant = next((v for v in (x, y) if not isinstance(v, Placed)), None)
    axis, rank = call.out.axis, call.out.rank
    # Each matrix product runs along the last dimension of its first factor and the one before that of its second.
    if constant is None and axis >= rank - 2 or axis == rank - (1 if moving[0] is x else 2):
        raise call.refuse(f"expected matrices of each sample, got the batch in dimension {axis} of {rank}: {MIXED}")
    if constant is not None and not (isinstance(constant, Tensor) and constant.ndim == 2):
        raise call.refuse("expected a constant matrix, or matrices of each sample")
    if constant is not None and moving[0] is y and axis == rank - 1 and call.out.inner == 1:
        return call.target, (y, constant.T), {}  # without the batch, what was the dimension before is the last
    return call.target, call.args, call.kwargs


ORDERS = (
    *(getattr, "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t"),
    *(torch.permute, torch.transpose, torch.swapaxes, torch.swapdims, torch.movedim, torch.moveaxis, torch.t),
)
_VIEWS = (
    *(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze),
    *("flatten", "unflatten", "view", "reshape", "squeeze", "unsqueeze", "view_as", "reshape_as"),
)
_KEPT = (
    *(f for row in ACTIVATIONS.values() for f in row.functions or ()),
    *(torch.clone, torch.detach, torch.neg, operator.neg, operator.pos, torch.dropout, torch.dropout_, F.dropout),
    *(torch.abs, operator.abs, torch.sin, torch.cos, torch.atan, F.linear, F.layer_norm, F.pad, torch.broadcast_to),
    *("clone", "contiguous", "detach", "neg", "neg_", "abs", "abs_", "sin", "cos", "atan", "expand", "expand_as"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu"),
)
_JOINED = (
    *(operator.add, operator.sub, operator.iadd, operator.isub, torch.add, torch.sub, torch.subtract),
    *(operator.mul, operator.imul, torch.mul, torch.multiply),
    *(operator.truediv, operator.itruediv, torch.div, torch.true_divide),
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"),
    *(torch.maximum, torch.minimum, torch.fmax, torch.fmin, "maximum", "minimum"),
    *(torch.clamp, torch.clip, torch.clamp_min, torch.clamp_max),
    *("clamp", "clamp_", "clip", "clamp_min", "clamp_max", "clamp_min_", "clamp_max_"),
)
_REDUCED = (torch.mean, torch.sum, torch.amax, torch.amin, torch.logsumexp, torch.softmax, F.softmax)
RULES: dict[Any, Rule] = {
    **dict.fromkeys(ORDERS, _ordered),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(_KEPT, _kept),
    **dict.fromkeys(_JOINED, _joined),
    **dict.fromkeys((*_REDUCED, "mean", "sum", "amax", "amin", "logsumexp", "softmax"), _along(1, "dim")),
    **dict.fromkeys((torch.roll, "roll"), _along(2, "dims")),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.unbind, "unbind"), _along(1, "dim", 0)),
    **dict.fromkeys((torch.chunk, torch.split, torch.tensor_split), _along(2, "dim", 0)),
    **dict.fromkeys(("chunk", "split", "tensor_split"), _along(2, "dim", 0)),
    **dict.fromkeys((operator.matmul, torch.matmul, "matmul", torch.mm, "mm", torch.bmm, "bmm"), _multiplied),
    torch.stack: _stacked,
    operator.getitem: _indexed,
}
"""Functions, and tensor methods by name, to the call of values whose batch comes first."""


def batch_first(
    what: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Placed, ...]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same call of values whose batch comes first: target, arguments and named arguments.

    Raises:
        NoRuleError: the batch of the result does not follow from those of the arguments.
    """
    given = [*flat((args, kwargs)), *results]
    moved = any(isinstance(v, Rows) or (isinstance(v, Placed) and not v.first) for v in given)
    picked = target is operator.getitem and isinstance(args[0], tuple)  # one of several results
    turns = target in ORDERS and (target is not getattr or args[1] in ("T", "mT"))
    if picked or not (moved or turns):
        return target, args, kwargs
    call = Placing(what, target, args, kwargs, results[0])
    if any((v.axis, v.inner) != (call.out.axis, call.out.inner) for v in results):
        raise call.refuse(MIXED)
    if target not in RULES or (target in ORDERS and not turns):
        raise call.refuse("expected the batch as the first dimension, with one row per sample, of arguments and result")
    try:
        return RULES[target](call)
    except NoRuleError:
        raise
    except Exception as error:  # arguments of kinds that the rule does not expect
        raise call.refuse(f"expected arguments that its rule covers, got other ones: {error}") from error


def last_dimensions(module: nn.Module) -> int | None:
    """How many of the last dimensions a module acts on, if it treats all others alike; None for the others.

    >>> last_dimensions(nn.Linear(2, 3)), last_dimensions(nn.ReLU()), last_dimensions(nn.Softmax(1))
    (1, 0, None)
    """
    kind = type(module)
    if kind in (nn.Identity, nn.Dropout) or (kind in ACTIVATIONS and ACTIVATIONS[kind].functions):
        return 0
    if kind is nn.LayerNorm:
        return len(module.normalized_shape)  # type: ignore[arg-type]
    if kind is nn.Softmax and module.dim is not None and int(module.dim) < 0:  # type: ignore[arg-type]
        return -int(module.dim)  # type: ignore[arg-type]
    return 1 if kind is nn.Linear else None
