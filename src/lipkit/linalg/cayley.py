"""The Cayley transform of any matrix to a semi-orthogonal one, and the solves that apply it without forming it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lipkit.linalg.accretive import blocks_pay, inverse_by_blocks
from lipkit.linalg.matrices import eye_like, on_tall


@on_tall
def cayley(w: Tensor) -> Tensor:
    r"""Semi-orthogonal matrix of the same shape as ``w``, by the Cayley transform.

    For a tall or square :math:`W = [U; V]`, :math:`U` of n x n and :math:`V` of (m-n) x n,

    .. math:: Z = U - U^* + V^*V, \qquad Q = [\,(I+Z)^{-1}(I-Z);\; -2V(I+Z)^{-1}\,], \qquad Q^*Q = I,

    and for a wide one the transform of :math:`W^*`, transposed back. With :math:`X = (I+Z)^{-1}` this is
    :math:`[2X - I; -2VX]`: one inverse.

    Returns:
        ``(..., m, n)`` with :math:`Q^*Q = I` (m >= n) or :math:`QQ^* = I` (m <= n), up to rounding of about
        ``n * eps * (1 + ||Z||)``. The inverse always exists: the Hermitian part of :math:`I + Z` is at least I.
        A square Q never has the eigenvalue -1.
        It takes one inverse of size min(m, n) and two products.

    >>> cayley(torch.tensor([[0.0, 1.0], [0.0, 0.0]])).tolist()
    [[0.0, -1.0], [1.0, 0.0]]

    References:
        [Cayley] Trockman & Kolter, ICLR 2021, equation 2 and Proposition A.7.
    """
    m, n = w.shape[-2:]
    u, v = w.split([n, m - n], -2) if m > n else (w, None)
    eye, z = eye_like(w), u - u.mH
    if v is not None:
        z = z + v.mH @ v
    # Never singular, so without the check of `inv`, which waits for the device.
    x = torch.linalg.inv_ex(z + eye).inverse
    top = 2 * x - eye
    return top if v is None else torch.cat((top, -2 * (v @ x)), dim=-2)


class Factors(NamedTuple):
    """Factors of matrices N to solve with: LU factors and pivots, or the transposed inverse if pivots is None."""

    matrix: Tensor
    pivots: Tensor | None


def factorize(transposed: Tensor, rows: int) -> Factors:
    r"""Factorise N, given its transpose, for :func:`solve_rows` with about ``rows`` right-hand sides. No derivative.

    N needs :math:`N + N^* \succeq 2 I`. A contiguous transpose ``(F, n, n)`` is factorised without a reordered copy.

    Solves with an inverse are products, which run at a higher rate than those with LU factors: on one core an inverse
    by blocks (:mod:`lipkit.linalg.accretive`) pays from about ``rows = n / 2`` on, LAPACK's from ``3 n / 2``.
    """
    n = transposed.shape[-1]
    if 2 * rows >= n and blocks_pay(transposed):
        return Factors(inverse_by_blocks(transposed), None)  # of N^T: a row of h is a row of b times N^-T
    if 2 * rows > 3 * n:
        return Factors(torch.linalg.inv_ex(transposed).inverse, None)
    return Factors(*torch.linalg.lu_factor_ex(transposed.mT)[:2])  # by columns, the order of a contiguous N^T


def solve_rows(factors: Factors, b: Tensor, *, transposed: bool = False) -> Tensor:
    r"""Rows h with :math:`N h = b`, or :math:`N^\top h = b`, for every row b of ``(F, B, n)``. No derivative."""
    matrix, pivots = factors
    if pivots is None:
        return b @ (matrix.mT if transposed else matrix)
    if transposed or not b.is_complex():
        # Rows from the right: h^T N = b^T is N^T h = b, and h^T N^T = b^T is N h = b.
        return torch.linalg.lu_solve(matrix, pivots, b, left=False, adjoint=not transposed)
    return torch.linalg.lu_solve(matrix, pivots, b.mT).mT
