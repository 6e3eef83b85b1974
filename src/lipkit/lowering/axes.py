"""The dimension of the batch in a tensor, and calls rewritten for values whose batch comes first.

A tensor that depends on the input has sizes (*before, B inner, *after): its batch is dimension ``axis``, merged with
``inner`` numbers of each sample. Modules and rules see the same numbers as (B, *before, inner, *after), or
(B, *before, *after) if inner is 1. The place of the batch in a result is observed (`lipkit.lowering.observe`). A rule
here checks that it follows from the places in the arguments, for every batch. Calls of functions without such a rule
must have the batch first in all arguments and results.
"""

import math
import operator
import string
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipkit.lowering.build import FUNCTIONS, MIXED, Build, Function
from lipkit.lowering.observe import Operand, Rows
from lipkit.lowering.tracing import flat
from lipkit.modules.activations import ACTIVATIONS


def _beside(call: Build, value: Any) -> Any:
    """An argument of an elementwise call: an operand whose batch is where the result's is, or a constant without it."""
    out = call.results[0]
    at = out.axis - out.rank  # from the end, where broadcasting aligns dimensions
    if isinstance(value, Operand):
        call.require(value.place == out.place)
    if isinstance(value, Rows):
        call.require(out.inner == 1 and value.axis - value.row.ndim == at)
        value = value.row
    if isinstance(value, Tensor) and out.inner == 1 and value.ndim >= -at:
        call.require(value.shape[at] == 1)
        return value.squeeze(at)
    return value


def ordered(call: Build) -> Build:
    """Rewrites a permutation of dimensions; calling the function on a tensor whose sizes all differ shows which."""
    x, *rest = call.args
    sizes = torch.empty(*range(2, 2 + x.rank), device="meta")  # from 2 on: no size is 1
    function = getattr(type(sizes), call.target) if isinstance(call.target, str) else call.target
    order = [n - 2 for n in function(sizes, *rest, **call.kwargs).shape]  # a size tells the dimension that it came from
    call.require((order.index(x.axis), x.inner) == (call.results[0].axis, call.results[0].inner))
    behind = [x.moved(d) for d in order if d != x.axis or x.inner > 1]
    return call.to("contiguous", x) if behind == sorted(behind) else call.to("permute", x, 0, *behind)


def viewed(call: Build) -> Build:
    """Rewrites a reshape, which must keep the number of entries in front of the batch."""
    x, out = call.args[0], call.results[0]
    call.require(math.prod(x.shape[: x.axis]) == math.prod(out.shape[: out.axis]))
    return call


def joined(call: Build) -> Build:
    """Rewrites an elementwise function of several values, each of which must hold the batch where the result does."""
    args, kwargs = fx.node.map_aggregate((call.args, call.kwargs), lambda value: _beside(call, value))
    return call.to(call.target, *args, **kwargs)


def behind(used: Callable[..., int]) -> Callable[[Build], Build]:
    """Makes the rule for functions of the last n = ``used(*arguments)`` dimensions, which must not hold the batch."""

    def rule(call: Build) -> Build:
        _beside(call, call.args[0])
        call.require(call.results[0].axis < call.results[0].rank - used(*call.args))
        return call

    return rule


def along(at: int, name: str = "dim", default: Any = None) -> Callable[[Build], Build]:
    """Makes the rule for functions along dimensions, given as argument ``at`` or ``name``; a result may lack these."""

    def rule(call: Build) -> Build:
        args, kwargs, out = list(call.args), dict(call.kwargs), call.results[0]
        x = next(v for v in flat(args) if isinstance(v, Operand))
        given = args[at] if len(args) > at else kwargs.get(name, default)
        dims = given if isinstance(given, (tuple, list)) else [given]
        for d in dims:
            expected = f"expected dimensions other than the batch (dimension {x.axis}), got {d}: it mixes samples"
            call.require(type(d) is int and d % x.rank != x.axis, expected)
        moved = [x.moved(d % x.rank) for d in dims]
        gone = sum(d % x.rank < x.axis for d in dims) if out.rank < x.rank else 0  # dimensions lost before the batch
        call.require((x.axis - gone, x.inner) == (out.axis, out.inner))
        if len(args) > at:
            args[at] = moved if dims is given else moved[0]
        else:
            kwargs[name] = moved if dims is given else moved[0]
        args[0] = [_beside(call, v) for v in args[0]] if isinstance(args[0], (tuple, list)) else args[0]
        return call.to(call.target, *args, **kwargs)

    return rule


def indexed(call: Build) -> Build:
    """Rewrites ``x.select(dim, index)``, or an index of integers, slices, lists and None that keeps the whole batch."""
    x, *given = *call.args, *(call.kwargs[name] for name in ("dim", "index") if name in call.kwargs)
    index, out = given[-1], call.results[0]
    items = list(index) if isinstance(index, tuple) else [index]
    items[:0] = [slice(None)] * (given[0] % x.rank) if given[1:] else []  # what select leaves whole
    chosen = [k for k, i in enumerate(items) if isinstance(i, (list, Tensor))]
    if len(chosen) == 1 and all(i in (Ellipsis, slice(None)) for k, i in enumerate(items) if k != chosen[0]):
        at = chosen[0] - (len(items) if Ellipsis in items[: chosen[0]] else 0)  # behind ..., counted from the end
        return along(1)(call.to(torch.index_select, x, at, items[at]))
    plain = all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items)
    whole = f"expected slices and integers that leave the batch whole (x[:, ...]), got {index!r}"
    call.require(plain, whole)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * (x.rank - sum(type(i) in (int, slice) for i in items))  # what ... stands for
    batch = [k for k, i in enumerate(items) if i is not None][x.axis]  # None adds a dimension and takes none
    every = [slice(i, j, k) for i in (None, 0) for j in (None, sys.maxsize) for k in (None, 1)]  # of any batch
    call.require(items[batch] in every, whole)
    call.require((sum(type(i) is not int for i in items[:batch]), x.inner) == (out.axis, out.inner))
    if x.inner == 1:  # with merged entries the batch is a dimension of the sample as well
        del items[batch]
    return call.to(operator.getitem, x, (slice(None), *items))


def _rank(call: Build, value: Any) -> int:
    """Number of dimensions of a value of the network, or of a constant."""
    if isinstance(value, Operand):
        return value.rank
    return (value.row if isinstance(value, Rows) else call.constant(value, "factor")).ndim


def _spelled(call: Build, equation: str, values: list[Any]) -> list[str]:
    """The letters of each value and of the result, where an equation may have ``...`` or leave out its result."""
    before, arrow, after = equation.replace(" ", "").partition("->")
    parts, letters = before.split(","), before.replace(",", "").replace("...", "")
    after = after if arrow else "..." * ("..." in before) + "".join(c for c in sorted(letters) if letters.count(c) == 1)
    hidden = [_rank(call, v) + 3 - len(one) if "..." in one else 0 for v, one in zip(values, parts, strict=True)]
    spare = "".join(c for c in string.ascii_letters if c not in letters)[: max(hidden)]
    named = zip((*parts, after), (*hidden, max(hidden)), strict=True)
    return [one.replace("...", spare[len(spare) - n :]) for one, n in named]


def contracted(call: Build) -> Build:
    """Rewrites ``torch.einsum``; its arguments become the parts without batch, sizes by letter, and the values."""
    equation, *values = call.args
    values = [*values[0]] if isinstance(values[0], (tuple, list)) else values
    call.require(isinstance(equation, str), "expected an equation in letters, got lists of numbers")
    parts, sizes = _spelled(call, equation, values), dict[str, int]()
    fits = all(one.isalpha() and len({*one}) == len(one) for one in parts if one)
    call.require(fits, f"expected each letter once in a part, got {equation!r}")
    batch, inner = parts[-1][call.results[0].axis], call.results[0].inner
    gone = batch if inner == 1 else ""  # otherwise it stands for the numbers of a sample in the dimension of the batch
    for k, value in enumerate(values):
        at, row = parts[k].find(batch), value.row if isinstance(value, Rows) else value
        if at >= 0 and isinstance(row, Tensor) and row.shape[at] == 1 and getattr(value, "axis", at) == at:
            parts[k], values[k] = parts[k].replace(batch, ""), row.squeeze(at)
    for part, value in zip(parts, (*values, *call.results), strict=True):
        place = value.axis if isinstance(value, Operand) and value.inner == inner else None
        fits = part.find(batch) == (-1 if isinstance(value, Tensor) else place)  # no sum runs over the batch
        call.require(fits, f"expected the batch in all parts except those of constants, got {equation!r}")
        for letter, size in zip(part.replace(gone, ""), value.shape, strict=True):
            call.require(sizes.setdefault(letter, size) == size, f"expected one size of {letter!r} in {equation!r}")
    return call.to(torch.einsum, [part.replace(gone, "") for part in parts], sizes, *values)


def multiplied(call: Build) -> Build:
    """Rewrites matrix products as contractions."""
    x, y = call.args
    front = string.ascii_lowercase[: max(_rank(call, x), _rank(call, y), 2) - 2]
    first, last = (front + "YX")[-_rank(call, x) :], "X" if _rank(call, y) == 1 else (front + "XZ")[-_rank(call, y) :]
    return contracted(call.to(torch.einsum, f"{first},{last}->{front}{first[-2:-1]}{last[1:][-1:]}", x, y))


def stacked(call: Build) -> Build:
    """Rewrites ``torch.stack``, whose new dimension may stand before the batch."""
    tensors, out = call.args[0], call.results[0]
    at = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % out.rank
    before = out.axis - (at < out.axis), out.inner, out.rank - 1
    call.require(all(v.place == before for v in tensors if isinstance(v, Operand)))
    one = replace(call, results=(next(v for v in tensors if isinstance(v, Operand)),))  # without the new dimension
    return call.to(call.target, [_beside(one, v) for v in tensors], out.moved(at))


def batch_first(call: Build) -> Build:
    """The call rewritten for values whose batch comes first.

    It is refused unless the place of the batch in the result follows from the arguments.
    """
    moved = any(
        isinstance(v, Rows) or (isinstance(v, Operand) and v.place[:2] != (0, 1))
        for v in [*flat((call.args, call.kwargs)), *call.results]
    )
    place = FUNCTIONS.get(call.target, Function()).place
    turns = place in (ordered, indexed, contracted, multiplied) and (
        call.target is not getattr or call.args[1] in ("T", "mT")
    )
    if (call.target is operator.getitem and isinstance(call.args[0], tuple)) or not (moved or turns):
        return call
    call.require(all(v.place == call.results[0].place for v in call.results))
    if place is None or (call.target is getattr and not turns):
        raise call.refuse(f"{MIXED}, or puts another dimension first")
    return call.covered(place)


# Modules to which images that are merged into the batch are joined channels, and the dimensions that they count: with
# one less, pools and instance normalisation take the batch for channels.
_LINES = (nn.Conv1d, nn.InstanceNorm1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)
_PLANES = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.MaxPool2d, nn.AvgPool2d,
           nn.AdaptiveAvgPool2d, nn.Dropout2d)  # fmt: skip
IMAGES: dict[type[nn.Module], Any] = {nn.BatchNorm1d: (2, 3), nn.GroupNorm: range(2, 7), nn.Flatten: range(2, 9)}
IMAGES |= dict.fromkeys(_LINES, (3,)) | dict.fromkeys(_PLANES, (4,))


def keeps_place(module: Any, x: Operand, y: Operand) -> bool:
    """True if a module from x to y has the batch first, or mixes only dimensions after the batch, or merged images."""
    kind, used = type(module), x.rank  # used: the last dimensions that the module mixes
    if kind in (nn.Identity, nn.Dropout) or (kind in ACTIVATIONS and ACTIVATIONS[kind].functions):
        used = 0
    elif kind in (nn.Linear, nn.LayerNorm):
        used = 1 if kind is nn.Linear else len(module.normalized_shape)
    first = x.axis == 0 and x.place[:2] == y.place[:2] and (x.inner == 1 or x.rank in IMAGES.get(kind, ()))
    return first or (x.place == y.place and x.axis + used < x.rank)
