r"""The exponential of a skew matrix: exact, or by a Taylor polynomial whose singular values are bounded by proof.

A matrix W of any shape is padded with zeros to a square; :math:`\exp(W - W^*)` then keeps its rows and columns.
Bounds of norms by squaring, products only, serve its scale and other layers.
"""

import math
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import finite
from lipkit.linalg.matrices import at_least_float32, check_integer, check_matrix, eye_like

# Coefficients beyond this are far below any rounding, and the rational arithmetic of `taylor_range` gets slow.
MAX_TERMS = 100
# Skew matrices below this norm are not scaled up to norm 1: the scale and its gradient stay finite at zero.
SMALLEST_NORM = 1e-12


def check_terms(terms: int, name: str = "terms") -> None:
    """Raise ``OptionError`` unless ``terms`` is an integer from 1 to 100."""
    check_integer(name, terms, 1, MAX_TERMS)


def skew_part(w: Tensor) -> Tensor:
    """:math:`A = W - W^*` of ``w`` padded with zeros to a square: :math:`A^* = -A` exactly, in float32 or better."""
    check_matrix(w)
    w = at_least_float32(w)
    m, n = w.shape[-2:]
    if m != n:
        w = F.pad(w, (0, max(m - n, 0), 0, max(n - m, 0)))
    return w - w.mH


def exponential(w: Tensor) -> Tensor:
    r"""Semi-orthogonal matrix of the same shape as ``w``: a crop of :math:`\exp(W - W^*)`, ``w`` padded to a square.

    The exponential of a skew matrix is orthogonal (unitary), so its first n columns are orthonormal, and its first
    m rows. Every rotation is reached (and every semi-orthogonal rectangle); no reflection is.

    Returns:
        ``(..., m, n)`` with :math:`Q^*Q = I` (m >= n) or :math:`QQ^* = I` (m <= n), up to rounding of about
        ``eps * max(n, ||A||)`` while that is below 1; from there on the squarings of ``matrix_exp`` can overflow.
        It takes one ``torch.linalg.matrix_exp`` of size max(m, n); backward, one of twice the size.

    >>> exponential(torch.tensor([[0.0, -torch.pi / 2], [0.0, 0.0]])).round(decimals=4).abs().tolist()
    [[0.0, 1.0], [1.0, 0.0]]

    References:
        [ECO] equation 15 and Appendix D; Lezcano-Casado & Martinez-Rubio, ICML 2019.
    """
    return torch.linalg.matrix_exp(skew_part(w))[..., : w.shape[-2], : w.shape[-1]]


def taylor(a: Tensor, terms: int) -> Tensor:
    r"""The Taylor polynomial :math:`p_T(A) = \sum_{i=0}^{T} A^i / i!` of the exponential, highest power T = ``terms``.

    It takes about :math:`2\sqrt T` products: 3 for T = 5, 5 for T = 10 (Paterson & Stockmeyer, SIAM J. Comput. 2,
    1973).

    >>> taylor(torch.tensor([[1.0]]), 2).item()
    2.5
    """
    check_matrix(a, "a")
    check_terms(terms)
    block = math.isqrt(terms)
    powers = [eye_like(a), a]
    while len(powers) <= block:
        powers.append(powers[-1] @ a)
    # Chunks of `block` coefficients, highest first; the first may hold one more, for the power `block` itself.
    start = (terms - 1) // block * block
    result = _combination(powers, start, terms)
    while start > 0:
        start -= block
        result = _combination(powers, start, start + block - 1) + powers[block] @ result
    return result


def taylor_products(terms: int) -> int:
    """How many products of matrices :func:`taylor` takes: 0, 1, 3 and 5 for 1, 2, 5 and 10 terms."""
    block = math.isqrt(terms)
    return block - 1 + (terms - 1) // block


def _combination(powers: list[Tensor], first: int, last: int) -> Tensor:
    """Sum of ``A^(i - first) / i!`` for i from ``first`` to ``last``."""
    total = powers[0] * (1 / math.factorial(first))
    for i in range(first + 1, last + 1):
        total = total.add(powers[i - first], alpha=1 / math.factorial(i))
    return total


def schatten_bound(a: Tensor, squarings: int = 3) -> Tensor:
    r"""Upper bound of the spectral norm of skew (or any normal) matrices, differentiable and smooth away from 0.

    .. math:: \|A\|_2 \le \Big(\sum_i |\lambda_i|^{2p}\Big)^{1/2p} = \|A^p\|_F^{1/p}, \qquad p = 2^{\mathtt{squarings}}

    It is within a factor :math:`n^{1/2p}` (n = 512, p = 8: 1.48 at worst, 1.16 for independent normal entries), 0 for a
    zero matrix. Unlike a power iteration it never underestimates (up to rounding), unless squares of entries underflow
    (below 1e-19 in float32): callers raise it to a least norm, such as ``SMALLEST_NORM``.
    """
    check_matrix(a, "a")
    # Rescaling keeps the powers from under- and overflow. The scales of A, A^2, A^4, ... return in the bound to the
    # powers 1, 1/2, 1/4, ...; it does not depend on their values, so the gradient takes them as constants.
    bound = torch.ones((), dtype=a.real.dtype, device=a.device)
    exponent = 1.0
    for step in range(squarings + 1):
        if step:
            a = a @ a
            exponent /= 2
        scale = torch.linalg.vector_norm(a.detach(), dim=(-2, -1), keepdim=True)
        scale = torch.where(scale > 0, scale, 1)
        a = a / scale
        bound = bound * scale[..., 0, 0] ** exponent
    norm = torch.linalg.vector_norm(a, dim=(-2, -1))
    zero = norm == 0
    safe = torch.where(zero, 1, norm)  # a power of 0 has an infinite slope: keep it away from the gradient
    # Where squares overflow, a scale is infinite and what it divides 0: infinity is a bound, 0 is none.
    return torch.where(zero & bound.isfinite(), 0, bound * safe**exponent)


# Default number of squarings of `skew_bound`.
SQUARINGS = 4


def skew_bound(a: Tensor, squarings: int = SQUARINGS) -> Tensor:
    r"""Upper bound of the spectral norm of skew matrices: :func:`schatten_bound`, tightened by pairs of eigenvalues.

    .. math:: \|A\|_2 \le (\tfrac12 \|A^p\|_F^2)^{1/2p} \quad (A \text{ real}), \qquad p = 2^{\mathtt{squarings}}

    since a real skew matrix has its eigenvalues in pairs :math:`\pm i\theta`; a complex one need not.
    """
    bound = schatten_bound(a, squarings)
    return bound if a.is_complex() else bound * 0.5 ** (0.5 / 2**squarings)


# Smaller bounds of `gram_norm` are raised to this, so that slopes stay finite at zero.
SMALLEST = 1e-3


def gram_norm(a: Tensor) -> Tensor:
    r"""Upper bound of the spectral norm of a matrix by squaring its Gram matrix six times: products only.

    .. math:: \|A\|_2 \le \big\|(A A^\top)^{64}\big\|_F^{1/128} \le r^{1/256}\, \|A\|_2, \qquad r = \min(m, n)

    Args:
        a: real (m, n), of a norm not much smaller than 1 (below 1e-3 the bound is 1e-3).

    Returns:
        0-d float64, at most 3 % above the norm for 1500 rows; differentiable everywhere, without singular vectors.

    Guarantee:
        Upper bound, rounding included: all products are made in float64, seven of size r (and twelve backward).
        Source: Delattre, Barthélemy, Araujo & Allauzen, ICML 2023, theorem 1.
    """
    check_matrix(a, "a")
    a = a.double()
    gram = a @ a.mT if a.shape[0] <= a.shape[1] else a.mT @ a
    # The rounding of all squarings together is below 2 r^(3/2) float64 roundings, 1e-10 for r = 5000.
    return schatten_bound(gram, squarings=6).clamp_min(SMALLEST**2).sqrt() * (1 + 1e-9)


def taylor_range(norm: float, terms: int) -> tuple[float, float]:
    r"""Proved range of the singular values of :math:`p_T(A)` for every skew A of at most this norm.

    They are :math:`|p_T(i\theta)|` for real :math:`|\theta| \le \|A\|`, and :math:`|p_T(i\theta)|^2` is a polynomial
    :math:`1 + \sum_j c_j t^j` in :math:`t = \theta^2` with rational coefficients. It is monotone, with extremes at the
    ends, if the derivative of its first term outweighs those of the others, as it does for norm 1. Otherwise the sums
    of the positive and of the negative terms bound it. All arithmetic is rational until the smallest and the largest
    value are rounded outwards. The range is tighter than :math:`1 + \|A\|^{T+1}/(T+1)!`.

    >>> [round(high, 4) for high in taylor_range(1.0, 5)], taylor_range(1.0, 3)[1]
    ([1.0, 1.0009], 1.0)
    """
    norm = finite("norm", norm, least=0)
    check_terms(terms)
    t = Fraction(norm) ** 2
    # p_T(i theta) = R(t) + i theta I(t), so |p_T|^2 = R^2 + t I^2: the second square is shifted by one power.
    c = [Fraction(0)] * (terms + 1)
    for shift in (0, 1):
        part = [Fraction((-1) ** (i // 2), math.factorial(i)) for i in range(shift, terms + 1, 2)]
        for i, x in enumerate(part):
            for j, y in enumerate(part):
                c[i + j + shift] += x * y
    # c[0] is 1, and the powers up to T / 2 cancel.
    first = next((j for j in range(1, terms + 1) if c[j]), terms)
    rest = sum((j * abs(c[j]) * t ** (j - first) for j in range(first + 1, terms + 1)), Fraction(0))
    if first * abs(c[first]) >= rest:
        end = sum((c[j] * t**j for j in range(first, terms + 1)), Fraction(0))
        below, above = min(end, Fraction(0)), max(end, Fraction(0))
    else:
        below = sum((min(c[j], Fraction(0)) * t**j for j in range(first, terms + 1)), Fraction(0))
        above = sum((max(c[j], Fraction(0)) * t**j for j in range(first, terms + 1)), Fraction(0))
    return _root(1 + below, -math.inf), _root(1 + above, math.inf)


def _root(square: Fraction, towards: float) -> float:
    """Square root of a rational number, rounded in the direction ``towards``; exact for 0 and 1."""
    if square <= 0:
        return 0.0
    if square == 1:
        return 1.0
    # One step for the rounding of the fraction, one for that of the root.
    return math.nextafter(math.sqrt(math.nextafter(float(square), towards)), towards)
