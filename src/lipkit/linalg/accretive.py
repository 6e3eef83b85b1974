r"""Inverses of matrices whose Hermitian part is at least I, by products of their blocks instead of LU factors.

.. math:: N = \begin{bmatrix} A & B \\ C & D \end{bmatrix}, \quad S = D - C A^{-1} B, \qquad
          N^{-1} = \begin{bmatrix} A^{-1} + A^{-1} B S^{-1} C A^{-1} & -A^{-1} B S^{-1} \\
                                   -S^{-1} C A^{-1} & S^{-1} \end{bmatrix}

No pivots are needed: the Hermitian part of A, a compression of N, is at least I again, and so is that of S. For
:math:`z = N^{-1} [0; y]`, whose lower half is :math:`u = S^{-1} y`,
:math:`\mathrm{Re}\, u^* S u = \mathrm{Re}\, z^* N z \ge \|z\|^2 \ge \|u\|^2`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Matrices of fewer rows go to LAPACK, whose calls then cost less than products of their blocks.
SMALL = 32
# Batches of fewer numbers in all go to LAPACK, too, such as a single matrix of up to 45 rows.
FEW = 2**11
# Largest root mean square of the singular values. Without pivots errors grow with the square of the norm, with pivots
# with the norm; up to this limit both meet the tolerances of the layers. In float32, n from 32 to 256, the worst skew
# parts found (of rank 2, one block, a few entries) had errors of 7e-5, dense ones of 4e-6: no more than with pivots.
TAME = 10.0


def blocks_pay(n: Tensor) -> bool:
    """True if :func:`inverse_by_blocks` is safe for every matrix of ``(..., n, n)``, and faster than LAPACK."""
    side = n.shape[-1]
    # On an accelerator the test would wait for all queued work.
    if side < SMALL or n.numel() < FEW or n.device.type != "cpu":
        return False
    reals = torch.view_as_real(n.resolve_conj()) if n.is_complex() else n
    squares = torch.linalg.vector_norm(reals.reshape(n.shape[:-2].numel(), -1), dim=1).square().amax()
    # A comparison with NaN is false, so LAPACK gets such matrices.
    return bool(squares <= TAME**2 * side)


def inverse_by_blocks(n: Tensor) -> Tensor:
    r"""The inverse of matrices with :math:`N + N^* \succeq 2 I` in float32 or better, without pivots. No derivative.

    Its norm is at most 1, up to a small multiple of ``eps (1 + ||N||^2)``. Nearly all of the n^3 multiplications are in
    products of whole batches: 0.35 to 0.6 of the time of ``torch.linalg.inv`` (one core of an AMD EPYC).
    """
    side = n.shape[-1]
    made = torch.empty(n.shape, dtype=n.dtype, device=n.device)
    _invert(n.resolve_conj().reshape(-1, side, side), made.view(-1, side, side))
    return made


def _invert(n: Tensor, out: Tensor) -> None:
    """``out = n^-1``."""
    side = n.shape[-1]
    if side < SMALL:
        out.copy_(torch.linalg.inv(n))
        return
    half = side // 2
    (a, b, c, d), (top, upper, lower, s) = _blocks(n, half), _blocks(out, half)
    # Every write goes into a block of out; with beta=0 the old content, NaN included, has no effect.
    _invert(a, top)
    below = torch.bmm(c, top)
    # The Schur complement S = D - C A^-1 B keeps S + S* >= 2 I, so no level of the recursion needs pivots.
    _invert(torch.baddbmm(d, below, b, alpha=-1), s)
    torch.baddbmm(lower, s, below, beta=0, alpha=-1, out=lower)
    beside = torch.bmm(top, b)
    torch.baddbmm(upper, beside, s, beta=0, alpha=-1, out=upper)
    # lower has the minus sign already: this adds A^-1 B S^-1 C A^-1.
    top.baddbmm_(beside, lower, alpha=-1)


def _blocks(n: Tensor, half: int) -> tuple[Tensor, ...]:
    upper, lower = n.tensor_split([half], 1)
    return (*upper.tensor_split([half], 2), *lower.tensor_split([half], 2))
