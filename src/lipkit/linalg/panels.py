"""Batches of matrices in parts that stay in the cache, and products of which one triangle is computed and mirrored."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Rows of a panel.
PANEL = 64
# Bytes of matrices that are worked on together, so that what is made of them in between stays in the cache.
CACHED = 2**19


def cached_parts(count: int, each: int, device: torch.device) -> list[slice]:
    """Parts of ``count`` matrices of ``each`` bytes that pass through a processor's cache; all where that is unknown.

    >>> cached_parts(5, 200_000, torch.device("cpu"))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, CACHED // each)
    if torch.compiler.is_compiling() or device.type != "cpu":
        step = max(1, count)
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


Mirror = Literal["transpose", "negative", "adjoint"]


def mirrored_product(x: Tensor, y: Tensor, out: Tensor, mirror: Mirror = "transpose") -> Tensor:
    """The product ``x @ y`` in ``out``, of which one triangle is enough: of large ones the panels above the diagonal.

    Such are the products of commuting symmetric or skew matrices, and of a matrix by its transpose.

    Args:
        x, y: ``(..., c, n)`` and ``(..., n, c)`` of the same dimensions, at most three.
        out: ``(..., c, c)``, overwritten.
        mirror: what the product equals: its transpose, the negative of it (real skew matrices), or its adjoint.

    >>> a = torch.arange(6.0).reshape(2, 3)
    >>> mirrored_product(a, a.mT, torch.empty(2, 2))
    tensor([[ 5., 14.],
            [14., 50.]])
    """
    c = out.shape[-1]
    step = max(PANEL, -(-c // 4))
    if c < 4 * PANEL or torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch.matmul(x, y, out=out)
    for first in range(0, c, step):
        last = min(first + step, c)
        torch.matmul(x[..., first:last, :], y[..., first:], out=out[..., first:last, first:])
        above = out[..., first:last, last:].mT
        if mirror != "transpose":
            above = above.neg() if mirror == "negative" else above.conj()
        out[..., last:, first:last] = above
    return out
