"""Products of matrices that are known to be symmetric, skew or Hermitian: one triangle is computed, and mirrored."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Rows of a panel.
PANEL = 64


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
