"""Functions of torch as compositions of others that have rules: a trace, and the runs beside it, hold those instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import NoRuleError


def _deviation(input: Any, dim: Any, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> Any:
    count = math.prod(input.shape[d] for d in (dim if isinstance(dim, tuple | list) else [dim]))
    free = count - (int(unbiased) if correction is None else correction)
    if isinstance(free, int | float) and free <= 0:  # otherwise it depends on the batch, which is refused
        raise NoRuleError(f"expected more numbers than the correction, got {count} for a standard deviation")
    centred = input - input.mean(dim, keepdim=True)
    return math.sqrt(1 / free) * torch.linalg.vector_norm(centred, dim=dim, keepdim=keepdim)


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
    if dropout_p or named.get("enable_gqa"):
        raise NoRuleError("expected no dropout and no grouped heads, got one of them")
    scale = named.get("scale")
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-2, -1)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if is_causal else attn_mask
    if mask is not None:  # of bools: true where it is seen
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return torch.add(input if beta == 1 else beta * input, torch.mm(mat1, mat2), alpha=alpha)


_WRITTEN: dict[str, Callable[..., Any]] = {
    "log1p": lambda input: torch.log(1 + input),
    "log2": lambda input: torch.log(input) / math.log(2),
    "log10": lambda input: torch.log(input) / math.log(10),
    "expm1": lambda input: torch.exp(input) - 1,
    "exp2": lambda input: torch.exp(math.log(2) * input),
    "std": _deviation,
    "glu": lambda input, dim=-1: input.chunk(2, dim)[0] * input.chunk(2, dim)[1].sigmoid(),
    "softmin": lambda input, dim=None, _stacklevel=3, dtype=None: F.softmax(-input, dim, dtype=dtype),
    "threshold": _threshold,
    "instance_norm": _instance_norm,
    "cosine_similarity": _cosine,
    "pairwise_distance": lambda x1, x2, p=2.0, eps=1e-6, keepdim=False: torch.norm(x1 - x2 + eps, p, -1, keepdim),
    "cdist": lambda x1, x2, p=2.0, **options: torch.norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1),
    "addmm": _addmm,
    "scaled_dot_product_attention": _attention,
}


def _targets(name: str) -> list[Any]:
    """The function of this name, and the method of tensors, also by its name."""
    function = getattr(F, name, None) or getattr(torch, name)
    return [function, name, getattr(Tensor, name)] if hasattr(Tensor, name) else [function]


COMPOSED = {target: made for name, made in _WRITTEN.items() for target in _targets(name)}
"""The composition of each function and method of tensors."""
