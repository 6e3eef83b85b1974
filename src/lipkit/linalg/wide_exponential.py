r"""The normalised Taylor polynomial of the skew matrix of a wide W, in products of W's smaller side.

Padded to a square, W of m x n has the skew matrix

.. math:: A = \begin{pmatrix} S & V \\ -V^* & 0 \end{pmatrix}, \qquad S = W_1 - W_1^*,\quad V = W_2,

of rank at most 2 m. The first m rows of its powers are :math:`[X_i,\; X_{i-1} V]` with

.. math:: X_0 = I,\quad X_1 = S,\quad X_{i+1} = X_i S - X_{i-1} G,\qquad G = V V^* ,

so the polynomial takes products of m x m matrices and one by V. So does the bound of its norm: with
:math:`U = \mathrm{diag}(I, V^*)` and :math:`H = U^* U = \mathrm{diag}(I, G)`, even powers are :math:`U C_k U^*` and
:math:`C_{2k} = C_k H C_k`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.linalg._common import eye_like
from lipkit.linalg.exponential import SMALLEST_NORM

# From this many columns for each row on, the products below are fewer than those of the square matrix.
WIDE = 2.5


def _size(x: Tensor) -> Tensor:
    """The square of the Frobenius norm ``(..., 1, 1)``."""
    return x.abs().square().sum((-2, -1), keepdim=True)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """The real inner product ``(..., 1, 1)``."""
    made = x * y.conj()
    return (made.real if made.is_complex() else made).sum((-2, -1), keepdim=True)


def wide_taylor_exponential(w: Tensor, terms: int) -> Tensor:
    r"""The first m rows of :math:`p_T(A / \beta)`, :math:`\beta = \|A^8\|_F^{1/8} \ge \|A\|_2`, for ``w`` (..., m, n).

    The same as the general way (:func:`lipkit.linalg.skew_polynomial.taylor_exponential`), which checks its arguments,
    up to rounding. Differentiable any number of times.

    Cost:
        About 17 products of size m for T = 5 and two products of m x m by m x (n - m), whatever n is.

    >>> q = wide_taylor_exponential(torch.arange(8.0).reshape(1, 8), 10)
    >>> torch.allclose(q @ q.mT, torch.ones(1, 1))
    True
    """
    m = w.shape[-2]
    s = w[..., :m] - w[..., :m].mH
    v = w[..., m:]
    # Nonzero eigenvalues then have about the mean square 1: no power under- or overflows. A factor that cancels below.
    share = ((_size(s) + 2 * _size(v)) / (2 * m)).detach().sqrt().clamp_min(SMALLEST_NORM)
    s, v = s / share, v / share
    g = v @ v.mH
    sg = s @ g
    # The second power, its product by S (the third), and the fourth: C_2 = [D S; -S -I], C_4 = [E F; F* -D].
    d = s @ s - g
    f = d @ s - sg
    e = d @ d - sg @ s
    fg, dg = f @ g, d @ g
    # C_8 = [a b; b* c], and the square of the norm of U C_8 U*.
    a, b, c = e @ e + fg @ f.mH, e @ f - fg @ d, f.mH @ f + dg @ d
    cg = c @ g
    power = _size(a) + 2 * _inner(b @ g, b) + _inner(cg, cg.mH)
    none = power <= torch.finfo(power.dtype).tiny
    # A root of 0 has an infinite slope: it is kept away from the gradient.
    beta = torch.where(none, 0.0, torch.where(none, 1.0, power) ** (1 / 16))
    angle = 1 / beta.clamp_min(SMALLEST_NORM / share)
    eye = eye_like(s, m)
    powers = [eye.expand_as(s), s, d, f, f @ s - dg]
    after = fg
    while len(powers) <= terms:
        powers.append(powers[-1] @ s - after)
        after = powers[-2] @ g if len(powers) <= terms else after
    first, second = torch.zeros_like(s), torch.zeros_like(s)
    for i in range(terms + 1):
        share_of_power = angle**i / math.factorial(i)
        first = first + share_of_power * powers[i]
        if i:
            second = second + share_of_power * powers[i - 1]
    return torch.cat((first, second @ v), -1)
