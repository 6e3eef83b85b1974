"""Functions of torch as compositions of others that have rules: a trace, and the runs beside it, hold those instead."""

import math
import string
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import NoRuleError


def _spread(
    name: str, input: Any, dim: Any = None, unbiased: Any = True, keepdim: Any = False, *, correction: Any = None
) -> Any:
    """Variance (var), deviation (std), or either with the mean."""
    if dim is None or isinstance(dim, bool):
        raise NoRuleError("expected dimensions other than the batch, got none: the batch's numbers would be mixed")
    count = math.prod(input.shape[d] for d in (dim if isinstance(dim, tuple | list) else [dim]))
    free = count - (int(unbiased) if correction is None else correction)
    if isinstance(free, int | float) and free <= 0:  # otherwise it depends on the batch, which is refused
        raise NoRuleError(f"expected more numbers than the correction, got {count} for {name}")
    centred = input - input.mean(dim, keepdim=True)
    if "std" in name:
        found = math.sqrt(1 / free) * torch.linalg.vector_norm(centred, dim=dim, keepdim=keepdim)
    else:  # as normalisations write it (`lipkit.lowering.written`)
        found = centred.square().mean(dim, keepdim=keepdim)
        found = found if count == free else found * (count / free)
    return (found, input.mean(dim, keepdim=keepdim)) if "mean" in name else found


def _cosine(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    rank = max(x1.ndim, x2.ndim)  # of both, once they are broadcast
    x1, x2 = (x if x.ndim == rank else x[(None,) * (rank - x.ndim)] for x in (x1, x2))
    return (F.normalize(x1, dim=dim, eps=eps) * F.normalize(x2, dim=dim, eps=eps)).sum(dim)


def _instance_norm(input: Any, *, running_mean: Any, weight: Any, bias: Any, eps: float, **options: Any) -> Any:
    if running_mean is not None or not options["use_input_stats"]:
        raise NoRuleError("expected the statistics of the sample, got others: take the module nn.InstanceNorm2d")
    return F.group_norm(input, input.shape[1], weight, bias, eps)


def _threshold(input: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    if threshold != value:
        raise NoRuleError(f"expected the value {threshold} below the threshold, got {value}: there it jumps")
    return input.clamp_min_(threshold) if inplace else input.clamp_min(threshold)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0, is_causal: Any = False, **named: Any
) -> Any:
    if dropout_p:
        raise NoRuleError(f"expected no dropout, got dropout_p={dropout_p}")
    if named.get("enable_gqa"):  # several heads of the query share one of the key
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scale = named.get("scale")
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-2, -1)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if is_causal else attn_mask
    if mask is not None:  # of bools: true where it is seen
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return torch.add(input if beta == 1 else beta * input, torch.matmul(mat1, mat2), alpha=alpha)


def _diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    parts = [t for t in (prepend, input, append) if t is not None]
    y = torch.cat(parts, dim) if parts[1:] else input
    for _ in range(n):
        y = y.narrow(dim, 1, y.shape[dim] - 1) - y.narrow(dim, 0, y.shape[dim] - 1)
    return y


def _tensordot(a: Any, b: Any, dims: Any = 2, out: None = None) -> Any:
    first, last = ([*range(-dims, 0)], [*range(dims)]) if isinstance(dims, int) else dims
    left, right = [*string.ascii_lowercase[: a.ndim]], [*string.ascii_uppercase[: b.ndim]]
    for i, j in zip(first, last, strict=True):
        right[j] = left[i]
    kept = [letter for letter in left + right if (letter in left) != (letter in right)]
    return torch.einsum(f"{''.join(left)},{''.join(right)}->{''.join(kept)}", a, b)


def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


def _turned(input: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    flipped = [(), (dims[1],), dims, (dims[0],)][k % 4]
    y = input.flip(flipped) if flipped else input
    return y.transpose(*dims) if k % 2 else y


def _fold(input: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    size, k, d, p, by = (
        one if isinstance(one, tuple | list) else (one, one)
        for one in (output_size, kernel_size, dilation, padding, stride)
    )
    reach = [n + 2 * m - e * (w - 1) - 1 for n, m, e, w in zip(size, p, d, k, strict=True)]
    counts, taps = [r // s + 1 for r, s in zip(reach, by, strict=True)], k[0] * k[1]
    channels, more = input.shape[1] // taps, [r % s for r, s in zip(reach, by, strict=True)]
    place = torch.eye(taps).reshape(taps, 1, *k).repeat(channels, 1, 1, 1).to(input)  # of each entry in its window
    return F.conv_transpose2d(input.unflatten(-1, counts), place, None, by, p, more, channels, d)


def _local_response(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    around = (0, 0) * (input.ndim - 2) + (size // 2, (size - 1) // 2)
    squares, channels = F.pad(input.square(), around), input.shape[1]
    total = reduce(torch.add, (squares.narrow(1, i, channels) for i in range(size)))
    return input * torch.exp(-beta * torch.log(k + alpha / size * total))


def _cell(activation: Callable[[Any], Any], input: Any, hx: Any, w_ih: Any, w_hh: Any, *biases: Any) -> Any:
    """One step of a recurrent network: the activation of two affine maps, of the input and of the state."""
    first, second = biases or (None, None)
    return activation(F.linear(input, w_ih, first) + F.linear(hx, w_hh, second))


def _gru(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    ours, before = F.linear(input, w_ih, b_ih), F.linear(hx, w_hh, b_hh)
    reset, update, new = zip(ours.chunk(3, 1), before.chunk(3, 1), strict=True)
    kept = torch.sigmoid(torch.add(*update))
    return (1 - kept) * torch.tanh(new[0] + torch.sigmoid(torch.add(*reset)) * new[1]) + kept * hx


def _lstm(input: Any, hx: Any, *weights: Any) -> Any:
    write, keep, new, read = _cell(lambda sums: sums, input, hx[0], *weights).chunk(4, 1)
    state = torch.sigmoid(keep) * hx[1] + torch.sigmoid(write) * torch.tanh(new)
    return torch.sigmoid(read) * torch.tanh(state), state


_WRITTEN: dict[str, Callable[..., Any]] = {
    "log1p": lambda input: torch.log(1 + input),
    "log2": lambda input: torch.log(input) / math.log(2),
    "log10": lambda input: torch.log(input) / math.log(10),
    "expm1": lambda input: torch.exp(input) - 1,
    "exp2": lambda input: torch.exp(math.log(2) * input),
    **{name: partial(_spread, name) for name in ("std", "std_mean", "var", "var_mean")},
    "glu": lambda input, dim=-1: input.chunk(2, dim)[0] * input.chunk(2, dim)[1].sigmoid(),
    "softmin": lambda input, dim=None, _stacklevel=3, dtype=None: F.softmax(-input, dim, dtype=dtype),
    "threshold": _threshold,
    "instance_norm": _instance_norm,
    "cosine_similarity": _cosine,
    "pairwise_distance": lambda x1, x2, p=2.0, eps=1e-6, keepdim=False: torch.norm(x1 - x2 + eps, p, -1, keepdim),
    "cdist": lambda x1, x2, p=2.0, **options: torch.norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1),
    "expand_as": lambda input, other: input.expand(other.shape),
    "addcmul": lambda input, tensor1, tensor2, *, value=1: torch.add(input, tensor1 * tensor2, alpha=value),
    "diff": _diff,
    "hypot": lambda input, other: torch.linalg.vector_norm(torch.stack((input, other), -1), dim=-1),
    "addmm": _addmm,
    "baddbmm": lambda input, batch1, batch2, **named: _addmm(input, batch1, batch2, **named),
    "tensordot": _tensordot,
    "inner": lambda input, other: _tensordot(input, other, ([-1], [-1])),
    "bilinear": _bilinear,
    "rot90": _turned,
    "fliplr": lambda input: input.flip(1),
    "fold": _fold,
    "local_response_norm": _local_response,
    "rnn_tanh_cell": partial(_cell, torch.tanh),
    "rnn_relu_cell": partial(_cell, torch.relu),
    "gru_cell": _gru,
    "lstm_cell": _lstm,
    "scaled_dot_product_attention": _attention,
}


def _targets(name: str) -> list[Any]:
    """The function of this name, and the method of tensors, also by its name."""
    functions = [getattr(home, name) for home in (F, torch) if hasattr(home, name)][:1]
    return [*functions, name, getattr(Tensor, name)] if hasattr(Tensor, name) else functions


COMPOSED = {target: made for name, made in _WRITTEN.items() for target in _targets(name)}
"""The composition of each function and method of tensors."""
