r"""The normalised Taylor polynomial of a skew matrix, with a backward pass that exploits the symmetry.

The powers of a skew :math:`A^* = -A` commute and are self-adjoint (even) or skew (odd). So the products for the
norm serve the polynomial too, and the gradient of a square :math:`X^2` is one product, :math:`SX` and its adjoint,
where S is the part of the upstream gradient that shares the symmetry of the square. Forward and backward take thirteen
products of size c with the norm of the 32nd power, where differentiating the plain functions takes twenty-four.

For a wide W products of its smaller side are enough. Padded to a square, W of m x n has the skew matrix

.. math:: A = \begin{pmatrix} S & V \\ -V^* & 0 \end{pmatrix}, \qquad S = W_1 - W_1^*,\quad V = W_2,

of rank at most 2 m. The first m rows of its powers are :math:`[X_i,\; X_{i-1} V]` with

.. math:: X_0 = I,\quad X_1 = S,\quad X_{i+1} = X_i S - X_{i-1} G,\qquad G = V V^* .

The bound of its norm takes such products, too: with :math:`U = \mathrm{diag}(I, V^*)` and
:math:`H = U^* U = \mathrm{diag}(I, G)`, even powers are :math:`U C_k U^*` and :math:`C_{2k} = C_k H C_k`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.linalg.exponential import SMALLEST_NORM, SQUARINGS, check_terms, skew_bound, skew_part, taylor
from lipkit.linalg.matrices import at_least_float32, check_integer, check_matrix, eye_like, mirrored_product
from lipkit.linalg.transforms import plain_gradients, transformed

# From this ratio of columns to rows on, `wide_taylor_exponential` takes fewer products than the square matrix.
WIDE = 2.5


def _size(x: Tensor) -> Tensor:
    """The square of the Frobenius norm ``(..., 1, 1)``."""
    return x.abs().square().sum((-2, -1), keepdim=True)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """The real part of the inner product ``(..., 1, 1)``."""
    made = x * y.conj()
    return (made.real if made.is_complex() else made).sum((-2, -1), keepdim=True)


def wide_taylor_exponential(w: Tensor, terms: int, squarings: int = SQUARINGS) -> Tensor:
    r"""The first m rows of :math:`p_T(A / \beta)` for ``w`` (..., m, n); A and :math:`\beta`: see `taylor_exponential`.

    Equals :func:`taylor_exponential` up to rounding, without its checks; differentiable any number of times. It takes
    25 products of size m for T = 5, and two of m x m by m x (n - m).
    """
    m = w.shape[-2]
    s = w[..., :m] - w[..., :m].mH
    v = w[..., m:]
    # With this divisor nonzero eigenvalues have a mean square of about 1, so no power under- or overflows. It cancels.
    scale = ((_size(s) + 2 * _size(v)) / (2 * m)).detach().sqrt().clamp_min(SMALLEST_NORM)
    s, v = s / scale, v / scale
    # Powers of A = [S V; -V* 0] depend on V through G = V V* only, so every product below is m x m.
    g = v @ v.mH
    sg = s @ g
    # The second power, its product by S (the third), and the fourth: C_2 = [D S; -S -I], C_4 = [E F; F* -D].
    d = s @ s - g
    f = d @ s - sg
    e = d @ d - sg @ s
    fg, dg = f @ g, d @ g
    # C_k = [a b; b* c] of the powers k, each divided by its norm, and the product of the roots of those norms.
    a, b, c, bg, cg = e, f, -d, fg, -dg
    beta, degree = torch.ones_like(scale), 4
    for step in range(squarings - 2):
        a, b, c = a @ a + bg @ b.mH, a @ b + bg @ c, b.mH @ b + cg @ c
        bg, cg, degree = b @ g, c @ g, 2 * degree
        square_norm = _size(a) + 2 * _inner(bg, b) + _inner(cg, cg.mH)  # of U C_k U^*
        if step < squarings - 3:  # the norm of the last power stays, and carries the gradient of beta
            norm = square_norm.detach().sqrt()
            norm = torch.where(norm > 0, norm, 1.0)
            a, b, c, bg, cg = (x / norm for x in (a, b, c, bg, cg))
            beta = beta * norm ** (1 / degree)
    vanished = square_norm <= torch.finfo(square_norm.dtype).tiny
    # A real skew matrix has its eigenvalues in pairs. The root at 0 has an infinite slope: the gradient avoids it.
    half = 1.0 if w.is_complex() else 0.5
    beta = torch.where(vanished, 0.0, beta * torch.where(vanished, 1.0, half * square_norm) ** (0.5 / degree))
    angle = 1 / beta.clamp_min(SMALLEST_NORM / scale)
    eye = eye_like(s, m)
    # X_0, X_1, ...: X_{i+1} = X_i S - X_{i-1} G, where X_3 = F, so the product X_3 G is known already.
    powers = [eye.expand_as(s), s, d, f, f @ s - dg]
    while len(powers) <= terms:
        powers.append(powers[-1] @ s - (fg if len(powers) == 5 else powers[-2] @ g))
    first, second = torch.zeros_like(s), torch.zeros_like(s)
    for i in range(terms + 1):
        coefficient = angle**i / math.factorial(i)
        first = first + coefficient * powers[i]
        if i:
            second = second + coefficient * powers[i - 1]
    return torch.cat((first, second @ v), -1)


# Degrees that need no power of A beyond those of the norm.
MAX_DEGREE = 5


class Powers(NamedTuple):
    r"""Powers 1, 2, 4, 8, ... of matrices a ``(n, c, c)`` of norm about 1; those from 8 on are divided by their norms.

    ``scale`` and ``share`` ``(n, 1, 1)``: A = scale a is the skew matrix, and :math:`A / \beta(A)` = share a.
    """

    scale: Tensor
    share: Tensor
    squares: Sequence[Tensor]


def _powers(a: Tensor, squarings: int) -> Powers:
    r"""The powers of a skew A ``(n, c, c)``.

    With p the highest one, ``share`` is :math:`(\|a^p\|_F^2 / 2)^{-1/2p}`, so that the norm of share a is at most 1;
    near A = 0 it is limited to ``scale / SMALLEST_NORM``.
    """
    norm = torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True)
    # The eigenvalues get the mean square 1, so no power up to the eighth under- or overflows.
    scale = (norm / math.sqrt(a.shape[-1])).clamp_min(SMALLEST_NORM)
    squares, degree, beta = [a * (1 / scale)], 1, torch.ones_like(norm)
    for _ in range(squarings):
        degree *= 2
        power = mirrored_product(squares[-1], squares[-1])
        if degree >= 8:
            norm = torch.linalg.vector_norm(power, dim=(-2, -1), keepdim=True)
            beta = beta * norm ** (1 / degree)  # ||a^p||^(1/p) as a product over the divisors
            power.mul_(torch.where(norm > 0, 1 / norm, 1.0))
        squares.append(power)
    # Eigenvalues of a real skew matrix come in pairs: half of ||a^p||^2 bounds ||a||^2p, whence 2^(1/2p).
    return Powers(scale, torch.minimum(2 ** (0.5 / degree) / beta, scale / SMALLEST_NORM), squares)


def _coefficients(t: Tensor, terms: int) -> list[Tensor]:
    """``t^i / i!`` for i up to ``MAX_DEGREE``; zero for i above ``terms``."""
    return [t**i * (1 / math.factorial(i) if i <= terms else 0.0) for i in range(MAX_DEGREE + 1)]


def _combination(p: Powers, constant: Tensor, second: Tensor, fourth: Tensor) -> Tensor:
    """``constant + second a^2 + fourth a^4``."""
    made = torch.mul(p.squares[1], second).addcmul_(p.squares[2], fourth)
    made.diagonal(dim1=-2, dim2=-1).add_(constant[..., 0])
    return made


def _value(p: Powers, terms: int) -> Tensor:
    """The polynomial of ``share a``, see `Powers`."""
    c = _coefficients(p.share, terms)
    odd = mirrored_product(p.squares[0], _combination(p, c[1], c[3], c[5]), negative=True)
    return _combination(p, c[0], c[2], c[4]).add_(odd)


def _gradient(p: Powers, g: Tensor, terms: int) -> Tensor:
    """The gradient of W, where A = W - W^T, for the upstream gradient ``g`` ``(n, c, c)``."""
    t, (a, a2, a4, *higher) = p.share, p.squares
    c = _coefficients(t, terms)
    # Twice the even part: the halves below go into the coefficients.
    even = g + g.mT
    skew = torch.sub(g, even, alpha=0.5)  # (G - G^T) / 2
    odd = skew @ _combination(p, c[1], c[3], c[5])
    # The gradient of the factor is a^T skew = -a skew (the sign is in the coefficients), of which only the
    # self-adjoint part acts, since the factor is self-adjoint.
    product = a @ skew
    around = product + product.mT
    g2 = (even * (c[2] / 2)).addcmul_(around, c[3] / -2)
    g4 = even.mul_(c[4] / 2).addcmul_(around, c[5] / -2)
    # The derivative along A itself weighs each power by its exponent. It acts through share = ||a^p||^(-1/p), unless
    # share is at its upper limit, and adds a multiple of a^(2p - 4) to the gradient of a^4.
    along = _inner(odd, a) + 2 * _inner(g2, a2) + 4 * _inner(g4, a4)
    slope = torch.where(t < p.scale / SMALLEST_NORM, along / -4, 0.0)
    # 4 + 8 + ... + p = 2 p - 4: the product of the stored powers is a^(2p - 4).
    chain = a4
    for power in higher:
        chain = mirrored_product(power, chain)
    trace = _inner(chain, a4)  # ||a^p||^2, but for the norms that were divided out
    g4.addcmul_(chain, torch.where(trace > 0, slope / trace, 0.0))
    product = g4 @ a2
    g2.add_(product).add_(product.mT)
    # The gradient of a^2 = a a is -(g2 a + a g2): g2 a here, a g2 = -(g2 a)^T by the last line.
    odd.baddbmm_(g2, a, beta=0.5, alpha=-1)
    # The gradient of A is the skew part of odd / scale, twice of which reaches W.
    odd.mul_(2 / p.scale)
    return odd - odd.mT


def taylor_exponential(w: Tensor, terms: int = 10, squarings: int = SQUARINGS) -> Tensor:
    r"""Nearly semi-orthogonal matrix of the same shape as ``w``, by the Taylor polynomial of a normalised skew matrix.

    .. math:: A = W - W^*, \qquad \bar A = A / \beta(A), \qquad Q = p_T(\bar A) \text{ cropped to } m \times n

    with :math:`\beta(A) \ge \|A\|_2` of :func:`skew_bound`. So :math:`\|\bar A\| \le 1` is proved, which the power
    iteration of [ECO] algorithm 1 cannot give. Rotations are at most 1 rad; the scale of ``w`` has no effect.

    Args:
        terms: T, the highest power.
        squarings: of the bound of the norm, from 3 to 6; more squarings come closer to 1 rad.

    Returns:
        ``(..., m, n)`` with singular values inside :func:`taylor_range` of ``(1, terms)``, up to rounding. For
        ``w = 0`` it is the identity (cropped).

    Cost:
        For real matrices and T up to 5, squarings + 1 products of size max(m, n) forward and two more backward, else
        squarings + :math:`2 \sqrt T` and twice as many backward. Beyond an aspect ratio of 2.5 their size is min(m, n).

    Raises:
        OptionError: ``terms`` or ``squarings`` out of range.

    >>> q = taylor_exponential(torch.arange(6.0).reshape(3, 2))
    >>> torch.allclose(q.mT @ q, torch.eye(2), atol=1e-6)
    True
    """
    check_matrix(w)
    check_terms(terms)
    check_integer("squarings", squarings, 3, 6)
    w = at_least_float32(w)
    m, n = w.shape[-2:]
    if max(m, n) > WIDE * min(m, n):
        # The skew matrix of the adjoint is -A, and its polynomial the adjoint.
        made = wide_taylor_exponential(w if n > m else w.mH, terms, squarings)
        return made if n > m else made.mH
    if terms > MAX_DEGREE or w.is_complex() or w.numel() == 0 or transformed():
        return _taylor_exponential(w, terms, squarings)
    return _TaylorExponential.apply(w, terms, squarings)


def _taylor_exponential(w: Tensor, terms: int, squarings: int = SQUARINGS) -> Tensor:
    """:func:`taylor_exponential` in operations of torch, which are differentiable any number of times."""
    a = skew_part(w)
    scale = skew_bound(a, squarings).clamp_min(SMALLEST_NORM)
    return taylor(a / scale[..., None, None], terms)[..., : w.shape[-2], : w.shape[-1]]


class _TaylorExponential(torch.autograd.Function):
    """:func:`_taylor_exponential` of real matrices for a small degree, with half of its products.

    On an AMD EPYC 1.6 to 2.2 times as fast from c = 128 on; ECO's training step 1.2 (128 x 12 x 12), 2.0 (512 x 3 x 3).
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, terms: int, squarings: int) -> Tensor:
        (m, n), a = w.shape[-2:], skew_part(w)
        powers = _powers(a.flatten(0, -3) if a.ndim > 2 else a[None], squarings)
        ctx.terms, ctx.squarings = terms, squarings
        ctx.save_for_backward(w, powers.scale, powers.share, *powers.squares)
        return _value(powers, terms).view_as(a)[..., :m, :n].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        w, scale, share, *squares = ctx.saved_tensors
        if torch.is_grad_enabled() or transformed(g):
            plain = partial(_taylor_exponential, terms=ctx.terms, squarings=ctx.squarings)
            return plain_gradients(plain, (w,), g)[0], None, None
        m, n = w.shape[-2:]
        c = max(m, n)
        square = F.pad(g, (0, c - n, 0, c - m)).reshape(-1, c, c)
        made = _gradient(Powers(scale, share, squares), square, ctx.terms)
        return made.view(*w.shape[:-2], c, c)[..., :m, :n].contiguous(), None, None
