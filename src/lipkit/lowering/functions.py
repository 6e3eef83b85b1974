"""Functions that add, multiply, join or reduce values, as modules; and those with a constant but no plain form."""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.linalg.matrices import all_finite
from lipkit.lowering.axes import along, behind, contracted, joined, multiplied, stacked, viewed
from lipkit.lowering.build import FINITE, FUNCTIONS, Bounded, Build, Function, Value, function_rule, plain
from lipkit.lowering.functional import convolution
from lipkit.lowering.moves import apply_along, mapped
from lipkit.lowering.observe import Operand, Varies
from lipkit.lowering.tracing import flat
from lipkit.modules.activations import GroupSort, MaxMin
from lipkit.modules.dense import Affine, linear
from lipkit.modules.graph import Add, Blend, Concatenate, Maximum
from lipkit.modules.limits import Elementary, MatrixProduct, Product
from lipkit.modules.normalization import LayerCenter, UnitNorm
from lipkit.modules.pooling import L2NormPool2d, Mean
from lipkit.modules.views import Pad, Piece, Roll
from lipkit.proof.roundoff import reciprocal_up, root

# Sums, and products with constants.


@plain(
    *(operator.add, operator.sub, operator.iadd, operator.isub),
    *(torch.add, torch.sub, torch.subtract, "add", "add_", "sub", "sub_"),
    place=joined,
)
def _add(call: Build, x: Any, y: Any, *, alpha: Any = 1) -> int:
    sign, hidden = -1 if "sub" in call.name else 1, torch.tensor(False)
    weight = call.number(alpha, "alpha")
    if sign * float(weight) == 1:
        (x, first), (y, second) = call.unmasked(x), call.unmasked(y)
        hidden = first | second
    if isinstance(x, Operand) and isinstance(y, Operand):
        other = call.broadcast(y) if float(weight) == 1 else call.elementwise(y, scale=weight)
        value = call.add(Add(1, sign), call.broadcast(x), other)
    elif isinstance(x, Operand):
        value = call.elementwise(x, shift=sign * weight * call.shift(y))
    else:
        value = call.elementwise(y, scale=sign * weight, shift=call.shift(x))
    return call.masked(value, hidden)


plain(torch.rsub, place=joined)(lambda call, x, y, *, alpha=1: _add(call, y, x, alpha=alpha))


@plain(torch.lerp, "lerp", "lerp_", place=joined)
def _lerp(call: Build, input: Any, end: Any, weight: Any) -> Value:
    if isinstance(weight, Operand):
        step = call.result(_mul(call, weight, call.result(_add(call, end, input, alpha=-1))))
        return _add(call, input, step)
    w = call.number(weight, "weight")
    stored = [w, *(call.number(t, "value") for t in (input, end) if not isinstance(t, Operand))]
    call.require(all(map(all_finite, stored)), FINITE)
    if isinstance(input, Operand) and isinstance(end, Operand):
        if not w.ndim:
            return call.add(Blend(w), call.broadcast(end), call.broadcast(input))
        return call.add(Add(1, 1), *(call.elementwise(t, scale=s) for t, s in ((input, 1 - w), (end, w))))
    if isinstance(input, Operand):
        return call.elementwise(input, scale=1 - w, shift=w * call.shift(end))
    return call.elementwise(end, scale=w, shift=(1 - w) * call.shift(input))


@plain(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", place=joined)
def _mul(call: Build, x: Any, y: Any) -> int:
    if isinstance(x, Operand) and isinstance(y, Operand):
        return call.add(call.named(Product()), call.broadcast(x), call.broadcast(y))
    moving, constant = (x, y) if isinstance(x, Operand) else (y, x)
    return call.elementwise(moving, scale=call.number(constant, "factor"))


def _chosen(call: Build, otherwise: Any, x: Any, condition: Any) -> int:
    """``x`` where the condition holds, each of the two also with a mask of -inf."""
    (x, first), (otherwise, second) = call.unmasked(x), call.unmasked(otherwise)
    here, value = call.number(condition, "condition").bool(), _lerp(call, otherwise, x, condition)
    return call.masked(value, (first & here) | (second & ~here))


plain(torch.where, place=joined)(lambda call, condition, x, y: _chosen(call, y, x, condition))
plain("where", place=joined)(lambda call, x, condition, y: _chosen(call, y, x, condition))
_fill = (torch.masked_fill, "masked_fill", "masked_fill_")
plain(*_fill, place=joined)(lambda call, x, mask, value: _chosen(call, x, value, mask))


@plain(operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_", place=joined)
def _div(call: Build, x: Any, y: Any) -> Value:
    if isinstance(y, Operand):
        return _mul(call, x, call.result(_steep(call, call.broadcast(y).number, ["reciprocal"])))
    if call.bounding:
        smallest = call.number(y, "divisor").abs().nan_to_num(nan=0.0).amin()  # 0 gives no bound, and so does NaN
        return call.scale(call.broadcast(x), reciprocal_up(float(smallest)))
    scale = call.number(y, "divisor", torch.reciprocal)
    call.require(all_finite(scale), "expected a divisor whose reciprocal is a number of the network's format")
    return call.elementwise(x, scale=scale)


plain(operator.neg, torch.neg, torch.negative, "neg", "neg_", "negative", place=viewed)(
    lambda call, x, *, out=None: call.elementwise(x, scale=-1 - call.like)
)
plain(operator.abs, torch.abs, torch.absolute, "abs", "abs_", place=viewed)(
    lambda call, x: call.add(nn.LeakyReLU(-1.0), call.operand(x))
)


@plain(torch.einsum, place=contracted)
def _einsum(call: Build, parts: list[str], sizes: dict[str, int], *values: Any) -> int:
    """Contract a value that depends on the input with the others, one after the other."""
    *given, out = parts
    rest = [*zip(given, values, strict=True)]
    part, value = rest.pop(next(k for k, one in enumerate(values) if isinstance(one, Operand)))
    while {*part} != {*out} or rest:
        alone = "".join(c for c in part if c not in "".join((*(one for one, _ in rest), out)))
        # What no other part has is summed: a product with ones. Then constants that share a letter come first.
        after = [({*part}.isdisjoint(other), isinstance(one, Operand)) for other, one in rest]
        other, factor = (alone, torch.ones([sizes[c] for c in alone])) if alone else rest.pop(after.index(min(after)))
        later = "".join((*(one for one, _ in rest), out))
        kept = "".join(c for c in sizes if (c in part) != (c in other) or (c in part and c in later))
        kept = out if {*kept} == {*out} and not rest else kept
        value = call.result(_contraction(call, (part, other, kept), sizes, value, factor))
        part = kept
    return call.permuted(value, [part.index(c) + 1 for c in out])


_products: Any = (operator.matmul, torch.matmul, torch.linalg.matmul, "matmul", torch.mm, "mm", torch.bmm, "bmm")
FUNCTIONS.update(dict.fromkeys(_products, Function(place=multiplied)))


def _contraction(call: Build, parts: Sequence[str], sizes: dict[str, int], *values: Any) -> int:
    """Contract two values; each letter stands in at least two of the three parts."""

    def shape(groups: Sequence[str]) -> Any:
        return tuple(math.prod(sizes[letter] for letter in group) for group in groups)

    def regrouped(value: int, before: Sequence[str], after: Sequence[str]) -> int:  # one dimension for each group
        old, new = "".join(before), "".join(after)
        value = call.reshaped(value, shape(before), shape(old))
        value = call.permuted(value, [old.index(letter) + 1 for letter in new])
        return call.reshaped(value, shape(new), shape(after))

    (x, y), (first, last, out) = values, parts
    if isinstance(x, Tensor):
        x, y, first, last = y, x, last, first
    shared, summed, left, right = (
        "".join(letter for letter in sizes if (letter in first, letter in last, letter in out) == where)
        for where in ((True, True, True), (True, True, False), (True, False, True), (False, True, True))
    )
    if isinstance(y, Operand):
        product = call.named(MatrixProduct(*shape((left, summed, right))))
        a, b = regrouped(x.number, first, (*shared, left, summed)), regrouped(y.number, last, (*shared, summed, right))
        return regrouped(call.add(product, a, b), (*shared, left, right), out)
    weight = call.number(y, "weight", axes=len(last)).permute([*map(last.index, shared + right + summed)])
    heads, rows, columns = shape((shared, right, summed))
    if not shared:
        matrix = linear(weight.reshape(rows, columns))
        return regrouped(call.add(matrix, regrouped(x.number, first, (*left, summed))), (*left, right), out)
    # A matrix for each shared index: a convolution in groups, by kernels of size 1.
    conv = convolution(nn.Conv1d, weight.reshape(-1, columns, 1), None, groups=heads)
    return regrouped(call.add(conv, regrouped(x.number, first, (shared + summed, left))), (shared + right, left), out)


@plain(operator.pow, torch.pow, torch.square, "pow", "square", place=viewed)
def _power(call: Build, x: Any, exponent: Any = 2) -> int:
    if isinstance(exponent, Operand):  # b^x = exp(x log b)
        rate = call.number(x, "base", torch.log)
        call.require(all_finite(rate), f"expected a base > 0, got {x}")
        return _elementary(["exp"], call, call.result(call.elementwise(exponent, scale=rate)))
    value, n = call.same_format(x).number, call.constant(exponent, "exponent")
    n = float(n) if isinstance(n, int | float) or (isinstance(n, Tensor) and not n.ndim) else n
    known = isinstance(n, float) and n in (-2, -1, -0.5, 0.5, 2, 3, 4)
    call.require(known, f"expected -2, -1, -0.5, 0.5, 2, 3 or 4 as exponent, got {n}")
    names = ["sqrt"] * (n in (-0.5, 0.5)) + ["reciprocal"] * (n < 0)
    value = _steep(call, value, names)
    base = value
    for _ in range(int(abs(n)) - 1):
        value = call.add(call.named(Product()), value, base)
    return value


def _steep(call: Build, value: int, names: Sequence[str]) -> int:
    """Apply the `Elementary` functions of these names, one after the other."""
    for name in names:
        value = call.add(call.named(Elementary(name)), value)
    return value


def _elementary(names: Sequence[str], call: Build, x: Operand) -> int:
    return _steep(call, call.same_format(x).number, names)


for _one in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal):
    _name = _one.__name__
    _names = ["sqrt", "reciprocal"] if _name == "rsqrt" else [_name]
    plain(_one, _name, f"{_name}_", place=viewed)(partial(_elementary, _names))


def swish(x: Tensor, slope: float) -> Tensor:
    """``x * sigmoid(slope * x)``, which is ``silu(slope * x) / slope``."""
    return x * torch.sigmoid(slope * x)


@plain(swish, place=viewed)
def _swish(call: Build, x: Operand, slope: float) -> Value:
    # ``silu(slope * x)`` is NaN where the product overflows, and loses digits where it is subnormal.
    call.require(0.01 <= abs(slope) <= 100, f"expected a slope of modulus 0.01 to 100, got {slope}")
    return _div(call, call.result(call.add(nn.SiLU(), call.elementwise(x, scale=call.like + slope))), slope)


def root_mean_square(x: Tensor, dims: Any, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)``, the mean over these dimensions."""
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()


@plain(root_mean_square, place=along(1))
def _root_mean_square(call: Build, x: Operand, dims: Any, eps: float) -> int:
    r"""The first n of the n + 1 numbers :math:`\sqrt n\, (x, c) / \|(x, c)\|` with :math:`c = \sqrt{n \epsilon}`.

    Its constant is :math:`1 / \sqrt\epsilon`, attained at 0: :math:`\|(x, c)\|^2 = n (\mathrm{mean}(x^2) + \epsilon)`
    is at least :math:`c^2`, so `UnitNorm` with eps c divides by this norm, and has the constant 1 / c.
    """
    call.require(0 < eps < math.inf, f"expected eps a positive finite number, got {eps}: near 0 nothing bounds it")
    value, order, sizes, groups = _gathered(call, x, x.number, call.dims(x, dims))
    n = groups[1]
    last = torch.arange(n + 1).expand(1, -1) == n
    c = math.sqrt(n * eps)
    value = call.add(Pad(0, 1), call.reshaped(value, sizes, groups))
    value = call.add(Affine(call.like[None, None] + 1, (call.like + c) * last), value)
    value = call.add(Piece(2, 0, n), call.add(UnitNorm(2, eps=float(call.like + c)), value))
    value = call.times(value, math.sqrt(n))
    value = call.reshaped(value, groups, sizes)
    return call.permuted(value, [order.index(d) + 1 for d in range(1, x.ndim)])


def _gathered(
    call: Build, x: Operand, value: int, dims: Sequence[int]
) -> tuple[int, list[int], tuple[int, ...], tuple[int, int]]:
    """The value with ``dims`` moved to the end; the new order and shape; how many groups these make, and their size."""
    order = [*(d for d in range(1, x.ndim) if d not in dims), *sorted({*dims})]
    sizes, kept = tuple(x.shape[d - 1] for d in order), x.ndim - 1 - len({*dims})
    return call.permuted(value, order), order, sizes, (math.prod(sizes[:kept]), math.prod(sizes[kept:]))


def centred(x: Tensor, dims: Any) -> Tensor:
    """``x`` less its mean over these dimensions."""
    return x - x.mean(dims, keepdim=True)


@plain(centred, place=along(1))
def _centred(call: Build, x: Operand, dims: Any) -> int:
    return call.add(LayerCenter(*sorted({*call.dims(call.same_format(x), dims)})), x)


def standardised(x: Tensor, dims: Any, eps: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps)`` over these dimensions: layer normalisation."""
    return root_mean_square(centred(x, dims), dims, eps)


@plain(standardised, place=along(1))
def _standardised(call: Build, x: Operand, dims: Any, eps: float) -> Value:
    return _root_mean_square(call, call.result(_centred(call, x, dims)), dims, eps)


@plain(F.rms_norm, place=behind(lambda x, shape, *rest: len(shape)))
def _rms_norm(call: Build, input: Operand, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Value:
    if eps is None:
        own = torch.finfo(call.operand(input).dtype).eps
        raise call.refuse(f"expected eps, got None, for which torch takes one of each format: set eps={own}")
    value = _root_mean_square(call, input, [*range(input.ndim - len(normalized_shape), input.ndim)], eps)
    return value if weight is None else _mul(call, call.result(value), weight)


@plain(F.softmax, torch.softmax, "softmax", place=along(1))
def _softmax(call: Build, input: Operand, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> int:
    """A softmax; behind a mask one for each run of equal rows, of what is not -inf there, with zeros elsewhere."""
    (x, hidden), (at,) = call.unmasked(call.operand(input)), call.dims(input, dim)
    if not bool(hidden.any()):
        return call.add(nn.Softmax(dim), x)
    n, varying = x.shape[at - 1], [d for d in range(1, x.ndim) if bool((hidden != hidden.narrow(d - 1, 0, 1)).any())]
    row = next((d for d in varying if d != at), at)
    call.require({*varying} <= {row, at}, f"expected a mask that varies along {dim} and one other, got {varying}")
    seen = ~hidden.movedim(at - 1, -1)
    rows = seen[None] if row == at else seen.movedim(row - 1 - (row > at), 0)
    kinds, counts = rows.reshape(len(rows), -1, n)[:, 0].unique_consecutive(dim=0, return_counts=True)
    ends, parts = [0, *counts.cumsum(0).tolist()], list[int]()
    for kind, *these in zip(kinds, ends[:-1], ends[1:], strict=True):
        here = kind.nonzero().flatten().tolist()
        call.require(bool(here), "expected a number in each row of a mask, got a row of -inf alone, which is NaN")
        part = x if row == at else replace(x, number=call.piece(x, row, range(*these)))
        parts.append(_shown(call, part, at, here, dim))
    return call.add(Concatenate(row), *parts) if len(parts) > 1 else parts[0]


def _shown(call: Build, x: Operand, at: int, here: list[int], dim: Any) -> int:
    """The softmax of the entries ``here`` along dimension ``at``, and zeros elsewhere."""
    n, stretch = x.shape[at - 1], range(here[0], here[-1] + 1)
    if len(stretch) == len(here):
        weights = call.add(nn.Softmax(dim), call.piece(x, at, stretch))
        around = (*(0, 0) * (x.ndim - 1 - at), here[0], n - 1 - here[-1])
        return call.add(Pad(*around), weights) if any(around) else weights
    weights = call.add(nn.Softmax(dim), mapped(call, x, x.number, at, lambda units: units[:, here]))
    few = replace(x, shape=(*x.shape[: at - 1], len(here), *x.shape[at:]))
    return mapped(call, few, weights, at, lambda units: units @ torch.eye(n).to(units)[here])


# Concatenations of values, and reductions.


def _compared(call: Build, value: int) -> tuple[type, int, int] | None:
    """(Maximum, a, b) if the value is max(a, b); (Affine, a, b) for a min(a, b) that `_larger` built; else None."""

    def negated(value: int) -> int:
        """a, if the value is -a; else -1."""
        module = call.wiring.modules[value - 1] if value > 0 else None
        minus = type(module) is Affine and bool((module.scale == -1).all() and (module.shift == 0).all())
        return call.wiring.sources[value - 1][0] if minus else -1

    turned = negated(value)
    outer = max(turned, value if turned < 0 else 0)
    if not outer or type(call.wiring.modules[outer - 1]) is not Maximum:
        return None
    a, b = call.wiring.sources[outer - 1]
    if turned >= 0:
        a, b = negated(a), negated(b)
    return (Maximum if turned < 0 else Affine, a, b) if min(a, b) >= 0 else None


def _beside(call: Build, at: int, one: Operand, values: Sequence[int]) -> int:
    """Concatenate values along dimension ``at``; their other dimensions are those of ``one``."""
    # max(a, b) with min(a, b) is a permutation of the entries of (a, b): a `MaxMin`, not sqrt(2) times as large.
    first, second = (_compared(call, value) for value in values) if len(values) == 2 else (None, None)
    if not first or not second or first[0] is second[0] or {*first[1:]} != {*second[1:]}:
        return call.add(Concatenate(at), *values)
    both = apply_along(call, MaxMin(), call.add(Concatenate(at), *first[1:]), at, one.ndim)
    return both if first[0] is Maximum else call.add(Roll(at, one.shape[at - 1]), both)


@plain(torch.cat, torch.concat, torch.concatenate, place=along(1, default=0))
def _cat(call: Build, tensors: Any, dim: int = 0) -> int:
    moving = call.moving(*tensors) if call.bounding else [t for t in tensors if isinstance(t, Operand)]
    (at,) = call.dims(moving[0], dim)
    if call.bounding or len(moving) == len(tensors):
        return _beside(call, at, moving[0], [x.number for x in moving])
    # Constants are zeros before or behind a moving value, and a shift.
    call.constant([t for t in tensors if not isinstance(t, Operand)], "tensor")
    last, padded, before = max(i for i, t in enumerate(tensors) if isinstance(t, Operand)), list[int](), 0
    for i, t in enumerate(tensors):
        if not isinstance(t, Operand):
            before += t.shape[at - 1]
            continue
        behind = sum(u.shape[at - 1] for u in tensors[i + 1 :]) if i == last else 0
        around = (*(0, 0) * (len(call.shape) - at), before, behind)  # torch: the last axis first
        padded.append(call.add(Pad(*around), t) if any(around) else t.number)
        before = 0
    joined = call.add(Concatenate(at), *padded) if len(padded) > 1 else padded[0]
    numbers = [call.like.expand(t.shape) if isinstance(t, Operand) else call.number(t, "tensor") for t in tensors]
    return call.elementwise(call.result(joined), shift=torch.cat(numbers, at - 1))


plain(torch.hstack)(lambda call, tensors: _cat(call, tensors, 1))


@plain(torch.stack, place=stacked)
def _stack(call: Build, tensors: Any, dim: int = 0) -> Value:
    one = next(x for x in tensors if isinstance(x, Operand))
    at, shape = dim % (one.ndim + 1), one.shape
    call.require(at > 0, f"expected a new dimension after the batch, got {dim}")
    if len(tensors) == 2 and shape and all(isinstance(x, Operand) and _compared(call, x.number) for x in tensors):
        # Concatenated in the last dimension, which is then split in two: the new dimension is moved to its place.
        last = len(shape)
        both = _beside(call, last, one, [x.number for x in tensors])
        both = call.reshaped(both, (*shape[:-1], 2 * shape[-1]), (*shape[:-1], 2, shape[-1]))
        order = [*range(1, last), last + 1]
        order.insert(at - 1, last)
        return call.permuted(both, order)

    def with_dimension(x: Any) -> Any:
        if isinstance(x, Operand):
            longer = (*x.shape[: at - 1], 1, *x.shape[at - 1 :])
            return replace(x, shape=longer, number=call.reshaped(x.number, x.shape, longer))
        return x.unsqueeze(at - 1) if isinstance(x, Tensor) else x

    return _cat(call, [with_dimension(x) for x in tensors], at)


def _larger(call: Build, sign: int, x: Any, y: Any) -> int:
    if isinstance(x, Operand) and isinstance(y, Operand):
        if sign > 0:
            return call.add(Maximum(), call.broadcast(x), call.broadcast(y))
        minus = [call.elementwise(t, scale=-1 - call.like) for t in (x, y)]  # min(x, y) = -max(-x, -y)
        return call.times(call.add(Maximum(), *minus), -1)
    return _limited(call, sign, x, y) if isinstance(x, Operand) else _limited(call, sign, y, x)


def _limited(call: Build, sign: int, x: Operand, constant: Any) -> int:
    """max(x, limit) (sign 1) or min(x, limit) (sign -1), as limit + sign relu(sign (x - limit))."""
    limit, factor = call.number(constant, "limit"), call.like + sign
    idle = (limit == -sign * math.inf) & call.bounding  # limits nothing
    call.require(all_finite(limit[~idle]), f"expected finite numbers as limits, got {constant}")
    if call.bounding:
        return call.add(Bounded(1.0, "closed form", call.shape), call.broadcast(x))
    turned = call.add(nn.ReLU(), call.elementwise(x, scale=factor, shift=-factor * limit))
    return call.elementwise(call.result(turned), scale=factor, shift=limit)


def _pooled(call: Build, pool: nn.Module, x: Operand, value: int, dim: Any) -> int:
    """Pool all entries along ``dim``: these dimensions go to the end, and each group becomes an image of one column."""
    value, _, sizes, groups = _gathered(call, x, value, call.dims(call.same_format(x), dim))
    column = call.reshaped(value, sizes, (*groups, 1))
    return call.reshaped(call.add(pool, column), (groups[0], 1, 1), call.shape)


def _largest(call: Build, sign: int, x: Operand, dim: Any, keepdim: bool = False) -> int:
    """The largest (sign 1) or smallest (sign -1) entry along dimensions."""
    value = call.operand(x).number if sign > 0 else call.times(call.operand(x), sign)
    value = _pooled(call, nn.AdaptiveMaxPool2d(1), x, value, dim)
    return value if sign > 0 else call.times(value, sign)


@plain(torch.norm, "norm", torch.linalg.norm, torch.linalg.vector_norm, place=along(2))
def _norm(
    call: Build, x: Operand, p: Any = None, dim: Any = None, keepdim: bool = False, ord: Any = None, **unset: None
) -> int:
    kinds = {call.constant(k, "norm") for k in (p, ord)} - {"fro", None}
    alone = call.target is not torch.linalg.norm or len(flat([dim])) == 1  # of two dimensions: of matrices
    call.require(kinds <= ({2} if alone else set()), f"expected the norm p=2, got {[*kinds]}")
    call.require(set(unset.values()) <= {None}, f"expected no {', '.join(unset)}")
    return _pooled(call, L2NormPool2d(), x, call.operand(x).number, dim)


def _of_two(call: Build) -> bool:
    return len(call.args) > 1 and isinstance(call.args[1], (Operand, Tensor, Varies))


def _max(sign: int, call: Build, x: Any, *given: Any, **named: Any) -> Value:
    """The maximum (sign 1) or minimum (sign -1) of two values, or along dimensions of one (indices become -1)."""
    found = (_larger if _of_two(call) else _largest)(call, sign, x, *given, **named)
    return found if len(call.results) == 1 else (found, -1)


def _extremes(call: Build) -> Build:
    return (joined if _of_two(call) else along(1))(call)


plain(torch.max, torch.amax, torch.maximum, torch.fmax, "max", "amax", "maximum", place=_extremes)(partial(_max, 1))
plain(torch.min, torch.amin, torch.minimum, torch.fmin, "min", "amin", "minimum", place=_extremes)(partial(_max, -1))


@plain(torch.sort, "sort", place=along(1, default=-1))
def _sort(call: Build, x: Operand, dim: int = -1, descending: bool = False, stable: bool = False) -> Value:
    """`GroupSort` of all entries along a dimension; -1, no value of the network, stands for torch's indices."""
    (at,) = call.dims(call.operand(x), dim)
    if descending:
        return apply_along(call, GroupSort(None), x.number, at, x.ndim), -1
    downwards = apply_along(call, GroupSort(None), call.times(x, -1), at, x.ndim)  # GroupSort sorts downwards
    return call.times(downwards, -1), -1


@plain(torch.topk, "topk", place=along(2, default=-1))
def _topk(call: Build, input: Operand, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Value:
    call.require(sorted, "expected sorted=True, got False, for which the order is open")
    values: Any = _sort(call, input, dim, largest)
    return call.piece(replace(input, number=values[0]), call.dims(input, dim)[0], range(k)), -1


@plain(torch.mean, "mean", torch.sum, "sum", place=along(1))
def _mean(call: Build, x: Operand, dim: Any = None, keepdim: bool = False) -> int:
    dims = sorted(set(call.dims(call.operand(x), dim)))
    count = math.prod(x.shape[d - 1] for d in dims)
    if call.bounding and call.name.endswith("sum"):
        return call.scale(x, root(count))
    mean = call.add(Mean(*dims, keepdim=keepdim or not call.shape), x)
    if not call.shape:
        mean = call.reshaped(mean, (1,) * len(x.shape), ())
    if not call.name.endswith("sum"):
        return mean
    return call.times(mean, count)  # a sum is a mean times its count


@plain(torch.clamp, torch.clip, torch.clamp_min, "clamp", "clamp_", "clip", "clamp_min", "clamp_min_", place=joined)
def _clamp(call: Build, x: Operand, min: Any = None, max: Any = None) -> int:
    ends = [end.detach().item() if isinstance(end, Tensor) and not end.ndim else end for end in (min, max)]
    if ends[1] is None and type(ends[0]) in (int, float) and ends[0] == 0:
        return call.add(nn.ReLU(), x)
    if all(type(end) in (int, float) and math.isfinite(end) for end in ends):
        return call.add(nn.Hardtanh(float(ends[0]), float(ends[1])), call.broadcast(x))
    for sign, end in zip((1, -1), ends, strict=True):
        x = x if end is None else call.result(_larger(call, sign, x, end))
    return x.number


plain(torch.clamp_max, "clamp_max", "clamp_max_", place=joined)(lambda call, x, max: _clamp(call, x, None, max))


# Functions with a Lipschitz constant but without a plain form.


@function_rule(torch.logsumexp, "logsumexp")
def _logsumexp(call: Build, x: Operand, dim: Any, keepdim: bool = False) -> int:
    call.dims(call.operand(x), dim)
    return call.keep(x)  # its gradient is a softmax, of norm at most 1
