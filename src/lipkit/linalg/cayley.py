r"""The Cayley transform of a matrix: formed, or its products with vectors by one solve forward, one backward.

The product y of x with the transform of a wide :math:`W = [W_1\ W_2]`, or a tall :math:`W = [W_1; W_2]`, is

.. math:: \text{wide:}\quad y = 2h - x_1,\; N h = x_1 - W_2 x_2,\; N = I + W_1 - W_1^\top + W_2 W_2^\top \\
          \text{tall:}\quad y = [2h - x;\, -2 W_2 h],\; N h = x,\; N = I + W_1 - W_1^\top + W_2^\top W_2

The derivative is written out: it saves calls, which dominate small layers, and products, which dominate large ones.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import ShapeError
from lipkit.linalg.matrices import at_least_float32, eye_like, mirrored_product, on_tall
from lipkit.linalg.precision import autocast_off, without_autocast
from lipkit.linalg.transforms import plain_gradients, transformed


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
    r"""The inverse of matrices with :math:`N + N^* \succeq 2 I` in float32 or better, without pivots.

    .. math:: N = \begin{bmatrix} A & B \\ C & D \end{bmatrix}, \quad S = D - C A^{-1} B, \qquad
              N^{-1} = \begin{bmatrix} A^{-1} + A^{-1} B S^{-1} C A^{-1} & -A^{-1} B S^{-1} \\
                                       -S^{-1} C A^{-1} & S^{-1} \end{bmatrix}

    No pivots are needed: the Hermitian part of A, a compression of N, is at least I again, and so is that of S. For
    :math:`z = N^{-1} [0; y]`, whose lower half is :math:`u = S^{-1} y`,
    :math:`\mathrm{Re}\, u^* S u = \mathrm{Re}\, z^* N z \ge \|z\|^2 \ge \|u\|^2`.

    Its norm is at most 1, up to a small multiple of ``eps (1 + ||N||^2)``. Nearly all of the n^3 multiplications are in
    products of whole batches: 0.35 to 0.6 of the time of ``torch.linalg.inv`` (one core of an AMD EPYC).
    """
    side = n.shape[-1]
    if side < SMALL:
        return torch.linalg.inv(n)
    halves = n.reshape(-1, side, side).tensor_split([side // 2], 1)
    (a, b), (c, d) = (rows.tensor_split([side // 2], 2) for rows in halves)
    corner = inverse_by_blocks(a)
    below, beside = torch.bmm(c, corner), torch.bmm(corner, b)
    # The Schur complement S = D - C A^-1 B keeps S + S* >= 2 I, so no level of the recursion needs pivots.
    s = inverse_by_blocks(torch.baddbmm(d, below, b, alpha=-1))
    left, right = torch.bmm(s, below).neg_(), torch.bmm(beside, s).neg_()
    # left has the minus sign already: this adds A^-1 B S^-1 C A^-1.
    top = torch.baddbmm(corner, beside, left, alpha=-1)
    return torch.cat((torch.cat((top, right), 2), torch.cat((left, s), 2)), 1).view(n.shape)


class Factors(NamedTuple):
    """Factors of matrices N to solve with: LU factors and pivots, or the transposed inverse if pivots is None."""

    matrix: Tensor
    pivots: Tensor | None


def factorize(transposed: Tensor, rows: int) -> Factors:
    r"""Factorise N, given its transpose, for :func:`solve_rows` with about ``rows`` right-hand sides. No derivative.

    N needs :math:`N + N^* \succeq 2 I`. A contiguous transpose ``(F, n, n)`` is factorised without a reordered copy.

    Solves with an inverse are products, which run at a higher rate than those with LU factors: on one core an inverse
    by blocks (:func:`inverse_by_blocks`) pays from about ``rows = n / 2`` on, LAPACK's from ``3 n / 2``.
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


def cayley_linear(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product of ``x`` with the Cayley transform of ``weight``, without forming the transform.

    Args:
        weight: ``(m, n)``, real.
        x: ``(..., n)``, of the dtype of the weight or of half precision. In half precision only the matrices that
            multiply x, or gradients of y, are rounded to its dtype; N is formed and solved with in that of the weight.
        bias: ``(m,)``.

    Returns:
        ``(..., m)``, of the dtype of x. It takes one product of size max(m, n) min(m, n)^2 forward, at most one
        backward; forming the transform takes two and three. Up to min(m, n) / 2 vectors need LU factors, no inverse.

    Raises:
        ShapeError: ``weight`` is not a matrix, or x does not have its columns.

    >>> w, x = torch.arange(6.0).reshape(2, 3), torch.ones(4, 3)
    >>> torch.allclose(cayley_linear(w, x), x @ cayley(w).mT, atol=1e-6)
    True
    """
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ShapeError(
            f"expected a matrix (m, n) and inputs (..., n), got {tuple(weight.shape)} and {tuple(x.shape)}"
        )
    weight = at_least_float32(weight)
    with autocast_off(x):
        if torch.compiler.is_compiling() or transformed():
            return _plain(weight, x, bias)
        rows: Tensor = _Product.apply(weight, x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), bias)
    return rows.view(*x.shape[:-1], len(weight))


def _plain(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The function of :class:`_Product`, in operations that torch can trace and differentiate to any order."""
    return F.linear(x, cayley(weight).to(x.dtype), None if bias is None else bias.to(x.dtype))


def _parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W_1 and W_2; W_2 of a square matrix is empty."""
    m, n = weight.shape
    own, rest = weight.split([m, n - m], 1) if m < n else weight.split([n, m - n])
    return own, rest


class _Product(torch.autograd.Function):
    """``y = Q x + b`` for rows x, with second derivatives from :func:`_plain`.

    On an AMD EPYC, 1.2 (256 x 256) to 1.7 (1024 x 1024) times as fast as :func:`_plain`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        m, n = weight.shape
        first, rest = _parts(weight)
        normal = first.mT - first  # the transpose of N, I - W_1 + W_1^T + G for the symmetric G
        if m != n:
            one, two = (rest, rest.mT) if m < n else (rest.mT, rest)
            normal += mirrored_product(one, two)
        normal.diagonal().add_(1)
        factors = factorize(normal, len(x))
        # Features are multiplied in their own dtype; N is factorised, and solved with, in that of the weight.
        rest, exact = rest.to(x.dtype), weight.dtype
        own, other = x.tensor_split([m], 1)  # all of x if tall
        own = own.to(exact)
        h = solve_rows(factors, own - other @ rest.mT if m < n else own)
        y = torch.lerp(own, h, 2.0).to(x.dtype)  # own + 2 (h - own) = 2 h - own, in one pass
        if m > n:
            y = torch.cat((y, -2 * (h.to(x.dtype) @ rest.mT)), 1)
        ctx.save_for_backward(weight, x, bias, h, rest, *factors)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, bias, h, rest, *factors = ctx.saved_tensors
        if torch.is_grad_enabled() or transformed(g):
            return plain_gradients(_plain, (weight, x, bias), g)
        for_weight, for_x = _gradients(weight, x, h, rest, Factors(*factors), g, asked=ctx.needs_input_grad[:2])
        for_bias = g.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return for_weight, for_x, for_bias


def _gradients(
    weight: Tensor, x: Tensor, h: Tensor, rest: Tensor, factors: Factors, g: Tensor, *, asked: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    r"""The gradients of W and x, from the output's gradient g = :math:`g_1` (tall: :math:`[g_1;\, g_2]`).

    With :math:`N^\top k = g_1` (tall: :math:`g_1 - W_2^\top g_2`), x gets :math:`[2k - g_1;\, -2 W_2^\top k]` (tall:
    :math:`2k - g_1`). :math:`\nabla_N = -2 k h^\top` has the rank of the batch, and so have the parts for W_2:

    .. math:: \text{wide:}\quad -2 k (h^\top W_2 + x_2^\top) - 2 h (k^\top W_2), \qquad
              \text{tall:}\quad -2 (W_2 k + g_2) h^\top - 2 (W_2 h) k^\top .
    """
    (m, n), wide = weight.shape, len(weight) < weight.shape[1]
    first = (g if wide else g[:, :n]).to(weight.dtype)
    top = first if m <= n else first - g[:, n:] @ rest
    k = solve_rows(factors, top, transposed=True)
    # rounded_k is -2 k: the factor 2 adds no rounding.
    rounded_h, rounded_k = h.to(x.dtype), (k * -2).to(x.dtype)
    for_x, moved_k = None, None
    if asked[1]:
        for_x = torch.lerp(first, k, 2.0).to(x.dtype)  # 2 k - g_1
        if wide:
            moved_k = rounded_k @ rest
            for_x = torch.cat((for_x, moved_k), 1)
    if not asked[0]:
        return None, for_x
    normal = (rounded_k.mT @ rounded_h).to(weight.dtype)  # the gradient of N, -2 k h^T
    for_own = normal - normal.mT  # N holds W_1 - W_1^T
    if m == n:
        return for_own, for_x
    # W_2, or its transpose if tall, has the gradient (normal + normal^T) W_2 + beside^T other.
    across, beside, other = (rest, rounded_k, x[:, m:]) if wide else (rest.mT, rounded_h, -2 * g[:, n:])
    if x.dtype == weight.dtype and 2 * len(x) > min(m, n):
        # A large batch has no low rank to exploit: products of full size, if no factor is rounded to half precision.
        for_rest = torch.addmm((normal + normal.mT) @ across, beside.mT, other)
    else:
        # All terms as one product, joined along the batch axis.
        moved_h, moved_k = rounded_h @ across, rounded_k @ across if moved_k is None else moved_k
        images = (moved_h + other, moved_k) if wide else (moved_h, moved_k + other)
        for_rest = torch.cat((rounded_k, rounded_h)).mT @ torch.cat(images)
    for_rest = for_rest.to(weight.dtype)
    return torch.cat((for_own, for_rest), 1) if wide else torch.cat((for_own, for_rest.mT)), for_x
