"""Rules of torch's functions and tensor methods that move, combine and rescale values."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.analysis.calls import Call, Operand, Result, function_rule
from lipkit.modules.forms import Form, added, cut, stacked
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import gamma, reciprocal_up, root, to_double

ON_A_BOX = (
    "such a product has no Lipschitz constant on all of space; analyze(..., box=(0, 1)), or lipkit bound --box 0,1, "
    "bounds it for inputs in a box"
)

# Reading entries, or the same entries under another shape. Whether the samples stay apart shows in the result: its
# first dimension is the batch, and entries keep their order.


@function_rule(
    *(torch.flatten, torch.reshape, torch.clone, torch.squeeze, torch.unsqueeze, torch.detach, torch.neg),
    *("flatten", "unflatten", "view", "reshape", "clone", "contiguous", "squeeze", "unsqueeze", "detach", "neg"),
    *("view_as", "reshape_as", "neg_"),
    *(operator.neg, operator.pos),
)
def _moved(call: Call, x: Operand, *shape: Any, **options: Any) -> Form:
    return call.keep(x)


# Exact where the format holds every number of the network's own, which is checked for each tensor.
@function_rule("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu")
def _cast(call: Call, x: Operand, *format: Any, **options: Any) -> Form:
    return call.form(x)


@function_rule("permute")
def _permute(call: Call, x: Operand, *dims: Any) -> Form:
    return call.keep(x)


@function_rule(torch.flip, "flip")
def _flip(call: Call, x: Operand, *dims: Any) -> Form:
    call.dims(call.operand(x), dims[0] if len(dims) == 1 else dims)
    return call.keep(x)


@function_rule(torch.roll, "roll")
def _roll(call: Call, x: Operand, shifts: Any, dims: Any = None) -> Form:
    call.dims(call.operand(x), dims)
    return call.keep(x)


@function_rule(operator.getitem)
def _getitem(call: Call, x: Any, index: Any) -> Result:
    if isinstance(x, (tuple, list)):
        picked = x[call.constant(index, "index")]
        return tuple(call.keep(t) for t in picked) if isinstance(picked, (tuple, list)) else call.keep(picked)
    return call.keep(x)


@function_rule(torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split")
def _split(call: Call, x: Operand, parts: Any, dim: int = 0) -> Result:
    (cut_at,) = call.dims(call.operand(x), dim)
    sizes = [shape[cut_at - 1] for shape in call.shapes]
    if sum(sizes) != x.shape[cut_at - 1]:
        raise call.refuse(f"expected pieces that do not overlap, got sizes {sizes} of {x.shape[cut_at - 1]} entries")
    return cut(x.form, call.pieces)


@function_rule(torch.unbind, "unbind")
def _unbind(call: Call, x: Operand, dim: int = 0) -> Result:
    call.dims(call.operand(x), dim)
    return cut(x.form, call.pieces)


@function_rule("expand", "expand_as", "repeat", torch.broadcast_to)
def _repeated(call: Call, x: Operand, *sizes: Any) -> Form:
    copies = math.prod(call.shape) // max(math.prod(call.operand(x).shape), 1)
    return call.scale(x, root(copies))


@function_rule(F.pad)
def _pad(call: Call, x: Operand, pad: Any, mode: str = "constant", value: Any = None) -> Form:
    if mode != "constant" or len(call.constant(pad, "padding")) // 2 >= call.operand(x).ndim:
        raise call.refuse(f"expected constant padding of dimensions other than the batch, got {mode!r} by {pad!r}")
    call.constant(value, "value")
    return call.keep(x)


# Sums, products with constants.


@function_rule(
    *(operator.add, operator.sub, operator.iadd, operator.isub),
    *(torch.add, torch.sub, torch.subtract, "add", "add_", "sub", "sub_"),
)
def _add(call: Call, x: Any, y: Any, *, alpha: Any = 1) -> Form:
    weight = abs(float(call.constant(alpha, "alpha")))
    terms = [call.broadcast(t) for t in (x,) if isinstance(t, Operand)]
    if isinstance(y, Operand):
        terms.append(call.broadcast(y).scaled(torch.tensor(weight, dtype=torch.float64)))
    return added(terms)


def _largest(value: Any) -> float:
    """Largest modulus of a number or tensor, rounded up from its dtype to float64; infinite if it is no number."""
    t = to_double(value.detach()) if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    return float(t.abs().nan_to_num(nan=math.inf).amax()) if t.numel() else 0.0


def _smallest(value: Any) -> float:
    t = to_double(value.detach()) if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    return float(t.abs().nan_to_num(nan=0.0).amin()) if t.numel() else 0.0


@function_rule(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_")
def _mul(call: Call, x: Any, y: Any) -> Form:
    if isinstance(x, Operand) and isinstance(y, Operand):
        raise call.refuse(f"expected one factor to be constant, got two that depend on the input: {ON_A_BOX}")
    moving, constant = (x, y) if isinstance(x, Operand) else (y, x)
    copies = call.repetition(call.operand(moving))
    return call.scale(moving, _largest(call.constant(constant, "factor")) * copies * (1 + gamma(2)))


@function_rule(operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_")
def _div(call: Call, x: Any, y: Any) -> Form:
    divisor = call.constant(y, "divisor")
    return call.scale(x, reciprocal_up(_smallest(divisor)) * call.repetition(call.operand(x)) * (1 + gamma(2)))


@function_rule(operator.matmul, torch.matmul, "matmul", torch.mm, "mm")
def _matmul(call: Call, x: Any, y: Any) -> Form:
    if isinstance(x, Operand) and isinstance(y, Operand):
        raise call.refuse(f"expected one constant matrix, got two that depend on the input: {ON_A_BOX}")
    moving, constant = (x, y) if isinstance(x, Operand) else (y, x)
    matrix = call.constant(constant, "matrix")
    # From the left, a matrix mixes dimension -2, which is the batch of a tensor (B, n).
    if matrix.ndim != 2 or call.operand(moving).ndim < (2 if moving is x else 3):
        raise call.refuse(f"expected a matrix that leaves the batch alone, got {tuple(matrix.shape)}")
    return call.scale(moving, spectral_norm(matrix), "spectral_norm")


# Several values beside each other.


@function_rule(torch.cat, torch.concat, torch.concatenate)
def _cat(call: Call, tensors: Any, dim: int = 0) -> Form:
    moving = [t for t in tensors if isinstance(t, Operand)]
    call.dims(moving[0], dim)
    return stacked([t.form for t in moving])


@function_rule(torch.stack)
def _stack(call: Call, tensors: Any, dim: int = 0) -> Form:
    moving = [t for t in tensors if isinstance(t, Operand)]
    if dim == 0 or dim == -moving[0].ndim - 1:
        raise call.refuse(f"expected a new dimension behind the batch, got {dim}")
    return stacked([t.form for t in moving])


@function_rule(torch.maximum, torch.minimum, torch.fmax, torch.fmin, "maximum", "minimum", torch.max, torch.min)
def _maximum(call: Call, x: Any, y: Any) -> Form:
    # An entry of the maximum changes by no more than one of the two: the norm by no more than both side by side.
    if not (isinstance(x, Operand) or isinstance(y, Operand)) or isinstance(y, int):
        raise call.refuse("expected two tensors")
    return stacked([call.broadcast(t) for t in (x, y) if isinstance(t, Operand)])


# Reductions over dimensions other than the batch.


def _count(call: Call, x: Operand, dim: Any) -> int:
    return math.prod(x.shape[d - 1] for d in set(call.dims(call.operand(x), dim)))


@function_rule(torch.mean, "mean")
def _mean(call: Call, x: Operand, dim: Any = None, keepdim: bool = False) -> Form:
    return call.scale(x, 1 / math.sqrt(_count(call, x, dim)) * (1 + gamma(4)))


@function_rule(torch.sum, "sum")
def _sum(call: Call, x: Operand, dim: Any = None, keepdim: bool = False) -> Form:
    return call.scale(x, root(_count(call, x, dim)))


@function_rule(torch.amax, torch.amin, torch.logsumexp, "amax", "amin", "logsumexp")
def _extreme(call: Call, x: Operand, dim: Any = (), keepdim: bool = False) -> Form:
    # Of max: the change of the largest entry; of logsumexp: its gradient is a softmax, of norm at most 1.
    call.dims(call.operand(x), dim if dim != () else None)
    return call.keep(x)


# Slopes of at most 1.


@function_rule(torch.abs, operator.abs, "abs", "abs_", torch.sin, torch.cos, "sin", "cos", torch.atan, "atan")
def _one(call: Call, x: Operand) -> Form:
    return call.keep(x)


@function_rule(torch.clamp, torch.clip, "clamp", "clamp_", "clip")
def _clamp(call: Call, x: Operand, min: Any = None, max: Any = None) -> Form:
    for end in (min, max):
        call.constant(end, "limit")
    return call.scale(x, call.repetition(call.operand(x)))


@function_rule(torch.clamp_min, torch.clamp_max, "clamp_min", "clamp_max", "clamp_min_", "clamp_max_")
def _clamp_one(call: Call, x: Operand, limit: Any) -> Result:
    return _clamp(call, x, limit)
