"""The Cayley transform: any matrix to a semi-orthogonal one, and the solves that apply it without making it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipkit.linalg.accretive import accretive_inverse, blocks_pay, inverse_by_blocks
from lipkit.linalg.matrices import at_least_float32, check_matrix, eye_like
from lipkit.linalg.transforms import plain_gradients, transformed

# Up to this side, torch's own derivative is faster for a single matrix.
SMALL = 128


def cayley(w: Tensor) -> Tensor:
    r"""Semi-orthogonal matrix of the same shape as ``w``, by the Cayley transform.

    For a tall or square :math:`W = [U; V]`, :math:`U` of n x n and :math:`V` of (m-n) x n,

    .. math:: Z = U - U^* + V^*V, \qquad Q = [\,(I+Z)^{-1}(I-Z);\; -2V(I+Z)^{-1}\,], \qquad Q^*Q = I,

    and for a wide one the transform of :math:`W^*`, transposed back. With :math:`X = (I+Z)^{-1}` this is
    :math:`[2X - I; -2VX]`: one inverse, which the derivative reuses (square: :math:`dQ = -2X\,dA\,X`).

    Args:
        w: ``(..., m, n)``, real or complex, any batch dimensions. Half precision is widened to float32.

    Returns:
        ``(..., m, n)`` with :math:`Q^*Q = I` (m >= n) or :math:`QQ^* = I` (m <= n), up to rounding of about
        ``n * eps * (1 + ||Z||)``. The inverse always exists: the Hermitian part of :math:`I + Z` is at least I.
        A square Q never has the eigenvalue -1.

    Cost:
        One inverse of size min(m, n) and two products forward; five products backward, no inverse.

    Raises:
        ShapeError: ``w`` is not a floating or complex matrix.

    >>> q = cayley(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    >>> q
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    >>> cayley(torch.zeros(3, 2)).shape
    torch.Size([3, 2])

    References:
        [Cayley] Trockman & Kolter, ICLR 2021, equation 2 and Proposition A.7.
    """
    check_matrix(w)
    w = at_least_float32(w)
    small = w.ndim == 2 and min(w.shape) <= SMALL
    if small or torch.compiler.is_compiling() or transformed():
        return _plain(w)
    made: Tensor = _Cayley.apply(w)
    return made


def _plain(w: Tensor) -> Tensor:
    """The transform by operations that every tracer and every derivative of torch knows."""
    m, n = w.shape[-2:]
    if m < n:
        return _plain(w.mH).mH
    u, v = w.split([n, m - n], -2) if m > n else (w, None)
    eye = eye_like(w)
    # Never singular, so without the check of `inv`, which waits for the device.
    x = torch.linalg.inv_ex(_normal(u, v, eye)).inverse
    top = 2 * x - eye
    return top if v is None else torch.cat((top, -2 * (v @ x)), dim=-2)


def _normal(u: Tensor, v: Tensor | None, eye: Tensor) -> Tensor:
    """I + Z of a tall or square matrix."""
    z = u - u.mH
    if v is not None:
        z = z + v.mH @ v
    return z + eye


class _Cayley(torch.autograd.Function):
    r"""The transform with its derivative in few operations; a second derivative goes by :func:`_plain`.

    Gain over it (AMD EPYC): 1.3 to 1.4 for stacks of complex matrices of 64 and 128; for one real matrix 0.6 to 0.9 up
    to 128, 1.1 at 256, 1.3 to 1.5 at 512.

    With the gradients G1 and G2 of both parts and :math:`H = 2 G_1 - 2 V^* G_2`

    .. math:: \nabla_Z = -X^* H X^*, \quad \nabla_U = \nabla_Z - \nabla_Z^*, \quad
              \nabla_V = V (\nabla_Z + \nabla_Z^*) - 2 G_2 X^* .
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        m, n = w.shape[-2:]
        tall = w.mH if m < n else w
        u, v = tall.split([min(m, n), abs(m - n)], -2) if m != n else (w, None)
        x = accretive_inverse(_normal(u, v, eye_like(u)))
        ctx.save_for_backward(w, x)
        # (I - Z)(I + Z)^-1 = 2 (I + Z)^-1 - I: one inverse serves both parts, without a product for the first.
        top = 2 * x
        top.diagonal(dim1=-2, dim2=-1).sub_(1)
        made = top if v is None else torch.cat((top, (v @ x).mul_(-2)), dim=-2)
        return made.mH.resolve_conj() if m < n else made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor | None:
        (g,) = grads
        w, x = ctx.saved_tensors
        with torch.autocast(g.device.type, enabled=False):
            if torch.is_grad_enabled() or transformed():
                return plain_gradients(_plain, (w,), g)[0]
            if w.shape[-2] < w.shape[-1]:
                return _gradient(w.mH, x, g.mH).mH.resolve_conj()
            return _gradient(w, x, g)


def _gradient(w: Tensor, x: Tensor, g: Tensor) -> Tensor:
    """The gradient of a tall or square W."""
    n, adjoint = w.shape[-1], x.mH
    if w.shape[-2] == n:
        normal = (adjoint @ g @ adjoint).mul_(-2)
        return normal - normal.mH
    v, below = w[..., n:, :], g[..., n:, :]
    normal = (adjoint @ (g[..., :n, :] - v.mH @ below) @ adjoint).mul_(-2)
    mirrored = normal.mH
    beside = (v @ (normal + mirrored)).sub_(below @ adjoint, alpha=2)
    return torch.cat((normal - mirrored, beside), dim=-2)


class Factors(NamedTuple):
    """Factors of matrices N to solve with: LU factors and pivots, or the transposed inverse if pivots is None."""

    matrix: Tensor
    pivots: Tensor | None


def factorize(transposed: Tensor, rows: int) -> Factors:
    r"""Prepare :func:`solve_rows` with N, given its transpose, for about ``rows`` right-hand sides. No derivative.

    N needs :math:`N + N^* \succeq 2 I`. A contiguous transpose ``(F, n, n)`` is factorised without a reordered copy.

    Cost:
        On one core, LU factors take 8/3 n^3 operations at a third of the rate of a matrix product; the two solves of a
        training step run at half of it. An inverse by blocks (:mod:`lipkit.linalg.accretive`) takes 8 n^3 at 0.6 to 0.7
        of that rate, and its solves are products. It pays from about ``rows = n / 2`` on, LAPACK's inverse from
        ``3 n / 2``.

    >>> solve_rows(factorize(torch.tensor([[[2.0, 0.0], [1.0, 1.0]]]), 1), torch.tensor([[[3.0, 1.0]]])).tolist()
    [[[1.0, 1.0]]]
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
