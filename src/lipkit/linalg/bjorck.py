"""Björck orthonormalisation: the polar factor by a polynomial iteration that never leaves the unit ball."""

import math

import torch
from torch import Tensor

from lipkit.linalg.matrices import check_positive, eye_like, near_one, on_tall

# Largest number of steps on the Gram matrix alone, for matrices at least twice as tall as wide. Eight raise a singular
# value of 1/25 of the largest to 0.8. Its rounding error grows 25-fold at most, as in any polar factor.
_GRAM_STEPS = 8


def into_unit_ball(w: Tensor) -> tuple[Tensor, Tensor]:
    r"""A tall ``w`` divided by a proved upper bound of its spectral norm, so of norm at most 1, and its Gram matrix.

    .. math:: \|W\|_2^4 = \|G^2\|_2 \le \min\big(\|G^2\|_F,\; \max_i \sum_j |G^2|_{ij}\big), \qquad G = W^*W

    The first bound is at most a factor :math:`n^{1/8}` too large, the second exact for orthogonal columns. 0 stays 0.
    """
    w = near_one(w)
    gram = w.mH @ w
    fourth = gram @ gram
    schatten = torch.linalg.vector_norm(fourth, dim=(-2, -1))  # ||G^2||_F, the fourth power of the Schatten 8-norm
    rows = fourth.abs().sum(-1).amax(-1)  # ||G^2||_inf, at least the spectral norm of G^2
    bound = torch.minimum(schatten, rows)[..., None, None]
    bound = torch.where(bound > 0, bound, 1).sqrt()  # at least ||W||^2: W is divided by its root, W^* W by itself
    return w / bound.sqrt(), gram / bound


def inverse_root_coefficients(order: int) -> list[float]:
    r"""The first terms of :math:`(1-q)^{-1/2} = \sum_j \binom{2j}{j} (q/4)^j`: all positive."""
    return [math.comb(2 * j, j) / 4**j for j in range(order + 1)]


def bjorck_step(x: Tensor) -> Tensor:
    """One step of :func:`bjorck`, of order 1, on a tall ``x`` of norm at most 1."""
    return x + x @ (0.5 * (eye_like(x) - x.mH @ x))


def _polynomial(q: Tensor, order: int) -> Tensor:
    """The series of (I - Q)^(-1/2) without its first term 1, up to Q^order."""
    eye = eye_like(q)
    *lower, last = inverse_root_coefficients(order)
    polynomial = last * q
    for coefficient in lower[:0:-1]:  # Horner from the highest power down
        polynomial = (polynomial + coefficient * eye) @ q
    return polynomial


def _all_below(q: Tensor, limit: float) -> bool:
    if torch.compiler.is_compiling():
        return False
    try:
        return bool(q.detach().abs().amax() < limit)
    except RuntimeError:  # from torch.func.vmap and from meta tensors: they take all steps
        return False


@on_tall
def bjorck(w: Tensor, iterations: int = 20, order: int = 1) -> Tensor:
    r"""Semi-orthogonal polar factor of ``w`` by the Björck-Bowie iteration; a contraction however early it stops.

    After division by a proved upper bound of the spectral norm,

    .. math:: X \leftarrow X \sum_{j=0}^{p} \binom{2j}{j} 4^{-j} Q^j, \qquad Q = I - X^*X, \qquad p = \text{order}

    for tall matrices, and the same on :math:`W^*` for wide ones. Order 1 is :math:`X(\tfrac32 I - \tfrac12 X^*X)`.

    Args:
        iterations: largest number of steps, at least 1. A small singular value grows by 1.5 per step (order 1), then
            converges with order p + 1. The iteration ends after a step in which no entry of Q exceeds a sixteenth of
            the root of eps: the error left is its square, below rounding.
        order: p, the degree of the truncated series, at least 1.

    Returns:
        ``(..., m, n)``: the singular vectors of ``w`` with singular values in [0, 1], all 1 on convergence, which
        :func:`orthogonality_residual` measures. Zero gives zero.

    Guarantee:
        Spectral norm at most 1 up to the rounding of the last product, for every ``iterations`` and ``order``. A step
        maps a singular value x to :math:`x\,s_p(1 - x^2)`, where :math:`s_p(q) \le (1-q)^{-1/2}` because all
        coefficients are positive and 0 <= q <= 1; so :math:`x \le x\,s_p(1-x^2) \le x\,(x^2)^{-1/2} = 1`. Order 1 is
        increasing on [0, 1] and maps all of :math:`[0, \sqrt3]` into [0, 1]: rounding is repaired, not amplified.

    Cost:
        ``1 + order`` products of size m n min(m, n) per step (if one side is twice the other or more, the first eight
        steps multiply matrices of the smaller side only). Trained weights take 2 to 7 steps.

    Raises:
        OptionError: ``iterations`` or ``order`` below 1.

    >>> bjorck(torch.tensor([[3.0, 0.0], [0.0, -0.5]])).round(decimals=5).tolist()
    [[1.0, 0.0], [0.0, -1.0]]

    References:
        Björck & Bowie, SIAM J. Numer. Anal. 8 (1971), equations 3.1 and 3.3; Anil, Lucas & Grosse, ICML 2019,
        section 4.2.
    """
    check_positive(iterations=iterations, order=order)
    x, gram = into_unit_ball(w)
    eye = eye_like(x)
    limit = torch.finfo(x.dtype).eps ** 0.5 / 16  # a step squares the error, which is then below rounding
    done = 0
    if x.shape[-2] >= 2 * x.shape[-1] and iterations > 1:
        # (X S)^* (X S) = S^* G S: the same polynomials by small products, and X is multiplied once, at the end.
        factor = eye
        while done < min(_GRAM_STEPS, iterations - 1):
            q = eye - gram
            if done > 0 and _all_below(q, limit):
                break
            step = eye + _polynomial(q, order)
            factor, gram = factor @ step, step.mH @ gram @ step
            done += 1
        x = x @ factor  # the only product of the larger side
    while done < iterations:
        q = eye - x.mH @ x
        x = x + x @ _polynomial(q, order)
        done += 1
        # At least two steps: the first removes the scale of W, the second what the first leaves in the gradient.
        if done > 1 and _all_below(q, limit):
            break
    return x
