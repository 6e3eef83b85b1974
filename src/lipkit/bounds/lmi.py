r"""The block-tridiagonal LMI of a feed-forward network: a proof that its gain is at most gamma.

For :math:`h_{k+1} = \sigma(W_k h_k + b_k)`, k < L, :math:`y = W_L h_L + b_L`, with slopes of :math:`\sigma` in [0, 1]
and positive diagonal multipliers :math:`\Lambda_k`, the network is gamma-Lipschitz if

.. math:: H = \begin{pmatrix} \gamma I & -W_0^\top \Lambda_0 \\ -\Lambda_0 W_0 & 2\Lambda_0 & \ddots \\
          & \ddots & 2\Lambda_{L-1} & -W_L^\top \\ & & -W_L & \gamma I \end{pmatrix} \succeq 0 .

With one activation, two Schur complements turn the gain into one spectral norm (`sandwich_gain`). For
:math:`y = W_2\, \sigma(W_1 x + b)` with slopes of :math:`\sigma` in [0, 1] and a positive diagonal
:math:`\Lambda`,

.. math:: \|y - y'\| \le \tfrac12 \|M\|_2^2\, \|x - x'\|, \qquad
          M = [\, R \;|\; P \,],\quad R = \Lambda^{1/2} W_1,\ P = \Lambda^{-1/2} W_2^* .

Proof. The difference of the activations is :math:`D W_1 (x - x')` with a diagonal :math:`D`, entries in [0, 1], which
commutes with :math:`\Lambda`: so :math:`W_2 D W_1 = P^* D R`. For real unit vectors u, v, with :math:`p = Pu` and
:math:`r = Rv`,

.. math:: u^\top P^\top D R v = \sum_i d_i p_i r_i \le \sum_i \max(0, p_i r_i) \le \tfrac14 \|p + r\|^2
          = \tfrac14 \|M (v; u)\|^2 \le \tfrac12 \|M\|_2^2 .

Source: Fazlyab et al., NeurIPS 2019 (LipSDP-neuron); [LBDN] section 2 and Appendix for this form.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lipkit.errors import OptionError, ShapeError
from lipkit.proof.norms import largest_eigenpair, power_of_two, spectral_norm
from lipkit.proof.roundoff import UNIT, gamma, to_double, up

# A diagonal between this and its inverse keeps the effect of underflow in products under 1e-60.
_SMALL = 1e-250


def is_positive_semidefinite(h: Tensor, error: float = 0.0) -> bool:
    r"""True if a symmetric float64 matrix is proved positive semidefinite, rounding of the proof included.

    Runs Cholesky on :math:`H - cI`, :math:`c = \gamma_{n+1}/(1-\gamma_{n+1})\,\mathrm{tr}(H) + e`: success proves that
    every symmetric matrix within spectral distance ``error`` (e) of ``h`` is positive semidefinite (Rump, BIT Numerical
    Mathematics 46, 2006, theorem 2.3). False says nothing.
    """
    if not bool(torch.isfinite(h).all()):
        return False
    n = h.shape[0]
    diagonal = h.diagonal()
    g = gamma(2 * (n + 2))
    shift = (g / (1 - g)) * float(diagonal.clamp_min(0).sum()) * (1 + gamma(n)) + error
    shifted = h.clone()
    # The subtraction itself rounds the diagonal by at most u times its size.
    shifted.diagonal().sub_(shift * (1 + 8 * UNIT)).sub_(2 * UNIT * (diagonal.abs() + shift))
    return int(torch.linalg.cholesky_ex(shifted)[1]) == 0


def _checked(weights: Sequence[Tensor], multipliers: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    if not weights or len(multipliers) != len(weights) - 1:
        raise ShapeError(
            f"expected L multipliers for L + 1 >= 1 weights, got {len(multipliers)} for {len(weights)} weights"
        )
    for k, (a, b) in enumerate(pairwise(weights)):
        seen = a.shape[0] + sum(w.shape[0] for w in weights[:k]) + weights[0].shape[-1]
        if a.ndim != 2 or b.ndim != 2 or b.shape[1] not in (a.shape[0], seen):
            raise ShapeError(f"weights {k} and {k + 1} do not chain: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    for k, m in enumerate(multipliers):
        if tuple(m.shape) != (weights[k].shape[0],):
            raise ShapeError(f"multiplier {k}: expected shape ({weights[k].shape[0]},), got {tuple(m.shape)}")
        if m.is_complex():
            raise OptionError(f"multiplier {k}: expected real entries, got {m.dtype}")
    diagonals = [to_double(m.detach()) for m in multipliers]
    for k, m in enumerate(diagonals):
        if not bool((torch.isfinite(m) & (m > 0)).all()):
            raise OptionError(f"multiplier {k}: expected positive finite entries, got {m.min():g} to {m.max():g}")
    return [to_double(w.detach()) for w in weights], diagonals


def lmi_matrix(weights: Sequence[Tensor], multipliers: Sequence[Tensor], gain: float) -> Tensor:
    """The block-tridiagonal matrix H of this module's LMI ``H >= 0`` for a gain, dense, float64.

    Weights W_0 .. W_L are ``(n_{k+1}, n_k)``, or ``(n_{k+1}, n_0 + ... + n_k)``, which read all values before.
    Multipliers are the diagonals of Lambda_0 .. Lambda_{L-1}, each ``(n_{k+1},)``.

    >>> lmi_matrix([torch.eye(1)], [], 2.0).tolist()
    [[2.0, -1.0], [-1.0, 2.0]]
    """
    weights, multipliers = _checked(weights, multipliers)
    sizes = [weights[0].shape[1], *(w.shape[0] for w in weights)]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    h = torch.zeros(starts[-1], starts[-1], dtype=torch.float64, device=weights[0].device)
    diagonal = torch.full((starts[-1],), float(gain), dtype=torch.float64, device=h.device)
    for k, w in enumerate(weights):
        block = w if k == len(multipliers) else multipliers[k][:, None] * w
        rows, cols = slice(starts[k + 1], starts[k + 2]), slice(starts[k + 1] - w.shape[1], starts[k + 1])
        h[rows, cols], h[cols, rows] = -block, -block.mT  # columns of h_k, or of all values before
        if k < len(multipliers):
            diagonal[rows] = 2 * multipliers[k]
    h.diagonal().copy_(diagonal)
    return h


def proves_gain(
    weights: Sequence[Tensor], multipliers: Sequence[Tensor], gain: float, errors: Sequence[Tensor] = ()
) -> bool:
    """True if ``H >= 0`` (see `lmi_matrix`) is proved in floating point, by one Cholesky factorisation.

    ``errors`` bound, entry by entry, how far each weight may be from the exact one, such as a product before its
    rounding; none for stored weights.

    Guarantee:
        True is a proof that the network with these stored weights, and any activations with slopes in [0, 1], is
        ``gain``-Lipschitz in l2, in exact arithmetic. False says nothing.

    >>> proves_gain([0.9 * torch.eye(2)], [], 1.0), proves_gain([1.1 * torch.eye(2)], [], 1.0)
    (True, False)
    """
    return _Blocks(*_checked(weights, multipliers), errors).proves(gain)


def _with_errors(
    weights: Sequence[Tensor], multipliers: Sequence[Tensor], gain: float, errors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The matrix H of `lmi_matrix`, and bounds of the errors of its entries."""
    h = lmi_matrix(weights, multipliers, gain)
    bound = 2 * UNIT * h.abs()  # off the diagonal, Lambda W is rounded once, possibly to a subnormal
    if errors:
        # H is linear in the weights: the same matrix made of their errors bounds the errors of H, entry by entry.
        off = lmi_matrix(errors, multipliers, 0.0).abs()
        off.diagonal().zero_()
        bound += off
    return h, bound


def _parts(weights: Sequence[Tensor], multipliers: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Any]:
    """Split the weights: those between hidden units; that from x to y; and the couplings of x and of y.

    A coupling is (indices of the hidden units that are coupled, their rows of the coupling matrix up to sign).
    """
    starts = [0, *accumulate(map(len, multipliers))]
    units = torch.arange(starts[-1], device=weights[0].device)
    places = [max(0, w.shape[1] - start) for w, start in zip(weights, starts, strict=True)]  # columns that read x
    middle = [w[:, place:] for w, place in zip(weights, places, strict=True)]
    direct = weights[-1][:, : places[-1]]
    reads = [k for k, place in enumerate(places[:-1]) if place]
    first = torch.cat([multipliers[k][:, None] * weights[k][:, : places[k]] for k in reads])
    from_x, to_y = torch.cat([units[starts[k] : starts[k + 1]] for k in reads]), units[-middle[-1].shape[1] :]
    return [*middle[:-1], middle[-1][:0]], direct, ((from_x, first), (to_y, middle[-1].mT))  # [:0]: no rows of y


class _Blocks:
    r"""H after elimination of its first and last block, which are :math:`\gamma I`: fewer rows to factorise.

    ``H >= 0`` iff :math:`M \ge C^\top C / \gamma`, where M is the middle of H, and C couples it to the two blocks. The
    object holds M and the Gram matrix of C, with bounds of their errors.
    """

    def __init__(self, weights: Sequence[Tensor], multipliers: Sequence[Tensor], errors: Sequence[Tensor]) -> None:
        errors = errors if any(bool(error.any()) for error in errors) else ()
        self.given = weights, multipliers, errors
        self.eliminated = False
        if not multipliers:
            return
        between, direct, ends = _parts(weights, multipliers)
        between_errors, direct_errors, end_errors = _parts(errors, multipliers) if errors else ([], direct[:0], ())
        self.middle, self.middle_errors = _with_errors(between, multipliers, 0.0, between_errors)
        count = len(self.middle)
        self.gram, lost = self.middle.new_zeros(count, count), self.middle.new_zeros(count)
        self.ends = []  # rows with the Gram matrix of an end, and the units coupled to it
        for units, rows in ends:
            live = rows.any(1)
            units, rows = units[live], rows[live]
            square = rows @ rows.mT
            self.gram[units[:, None], units] += square
            factor, info = torch.linalg.cholesky_ex(square)
            self.ends.append((units, factor if rows.shape[1] > len(rows) and not int(info) else rows))
        for units, rows in end_errors:
            lost[units] += up(torch.linalg.vector_norm(rows, dim=1), rows.shape[1] + 4)
        self.sizes = up(self.gram.diagonal().sqrt(), sum(len(rows) + rows.shape[1] for _, rows in ends)) + 2.0**-500
        self.errors = up(2 * UNIT * self.sizes + lost, 4) + 2.0**-500  # of the columns of C, as vectors
        self.eliminated = not bool(direct.any() | direct_errors.any()) and bool(self.gram.isfinite().all())

    def guess(self) -> float:
        """Nearly the smallest gain, the largest eigenvalue of ``C M^-1 C^T``; nan where M is close to singular."""
        live = self.gram.diagonal() > 0
        count = int(live.sum())
        order = torch.argsort(live, stable=True)  # eliminates what is not coupled to the ends, the factor's last rows
        middle = self.middle[order[:, None], order]
        scale = middle.diagonal().rsqrt()
        lower, info = torch.linalg.cholesky_ex(scale[:, None] * middle * scale)
        if not (self.eliminated and count) or int(info) or float(lower.diagonal().amin()) < 0.01:
            return math.nan
        ends = [lower.new_zeros(len(live), rows.shape[1]).index_copy_(0, units, rows) for units, rows in self.ends]
        some = scale[-count:, None] * torch.cat(ends, 1)[order[-count:]]
        half = torch.linalg.solve_triangular(lower[-count:, -count:], some, upper=False)
        half = half.mT if some.shape[1] > count else half  # the smaller of two Gram matrices
        return float(largest_eigenpair(half.mT @ half)[0])

    def proves(self, gain: float) -> bool:
        if not (math.isfinite(gain) and gain > 0):
            return False
        if not (self.eliminated and 1e-100 < gain < 1e100):
            weights, multipliers, errors = self.given
            return is_positive_within(*_with_errors(weights, multipliers, gain, errors))
        # The Gram matrix is off by gamma_n |c_i| |c_j|, and column i of C by a vector of norm e_i.
        square, c, e = self.gram / gain, self.sizes, self.errors  # C^T C / gamma
        terms = len(c) + sum(w.numel() for w in (self.given[0][0][0], self.given[0][-1][:, 0]))
        off = torch.outer(c, gamma(terms + 8) * c + e).addr_(e, c + e).mul_((1 + 2.0**-40) / gain)
        h = self.middle - square
        off.add_(square.abs_().add_(h.abs()), alpha=4 * UNIT).add_(self.middle_errors)
        return is_positive_within(h, off)


def is_positive_within(h: Tensor, error: Tensor) -> bool:
    """True if every symmetric matrix within ``error`` of ``h``, entry by entry, is proved positive semidefinite.

    Underflow may have put each float64 entry off by another 1e-320.
    """
    # Congruence by powers of two is exact (barring underflow) and makes the diagonal nearly constant, so that the
    # allowance, which is relative to the trace, is small against every block.
    diagonal = h.diagonal()
    if not bool(((diagonal > _SMALL) & (diagonal < 1 / _SMALL)).all()):
        return False  # products off the diagonal may have underflowed
    _, exponent = torch.frexp(diagonal)
    scale = power_of_two(-torch.div(exponent, 2, rounding_mode="floor"))
    h = (scale[:, None] * h).mul_(scale)
    size = float(torch.linalg.matrix_norm((scale[:, None] * error).mul_(scale)))
    size = size * (1 + gamma(h.shape[0] ** 2 + 8)) + 1e-60
    return math.isfinite(size) and is_positive_semidefinite(h, size)


def couplings(weights: Sequence[Tensor], multipliers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Matrices S (for x) and T (for y) with nearly :math:`(S; T)(S; T)^\top = C M^+ C^\top`; they only propose gains.

    M holds the middle blocks of H, and C couples them to the first and the last block. :math:`H \succeq 0` iff
    :math:`M \succeq 0` and :math:`\gamma I \succeq C M^+ C^\top`.
    """
    h, n0 = lmi_matrix(weights, multipliers, 0.0), weights[0].shape[1]
    inner = slice(n0, h.shape[0] - weights[-1].shape[0])
    middle = h[inner, inner]
    scale = middle.diagonal().rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * middle * scale[None, :])
    # Directions on which M vanishes carry no coupling when H >= 0 is feasible: the pseudo-inverse drops them.
    keep = values > 1e-11
    half = (vectors[:, keep] * values[keep].rsqrt()) * scale[:, None]
    return h[:n0, inner] @ half, h[inner.stop :, inner] @ half


def _guess(blocks: _Blocks, weights: Sequence[Tensor], multipliers: Sequence[Tensor]) -> float:
    """Nearly the smallest gain that the multipliers prove."""
    guess = blocks.guess() if multipliers else float(torch.linalg.matrix_norm(weights[0], 2))
    if not guess >= 0:
        coupling, inputs = torch.cat(couplings(weights, multipliers)), weights[0].shape[1]
        joint = coupling @ coupling.mT
        if weights[-1].shape[1] > weights[-2].shape[0]:  # y reads x directly, too
            joint[inputs:, :inputs] += weights[-1][:, :inputs]
            joint[:inputs, inputs:] += weights[-1][:, :inputs].mT
        if not bool(joint.isfinite().all()):
            return math.inf
        guess = float(torch.linalg.eigvalsh(joint)[-1])
    return guess


def gain_bound(weights: Sequence[Tensor], multipliers: Sequence[Tensor], errors: Sequence[Tensor] = ()) -> float:
    r"""Nearly the smallest gain that these multipliers prove, or ``inf``. Arguments: see `proves_gain`.

    Guarantee:
        Upper bound, proved in floating point: an eigenvalue proposes gamma, then :func:`proves_gain` decides.
    """
    weights, multipliers = _checked(weights, multipliers)
    if not all(bool(torch.isfinite(w).all()) for w in weights):
        return math.inf
    blocks = _Blocks(weights, multipliers, errors)
    try:
        guess = _guess(blocks, weights, multipliers)
    except torch.linalg.LinAlgError:  # of multipliers at the ends of float64
        return math.inf
    if not math.isfinite(guess):
        return math.inf
    guess = max(guess, 1e-240)  # a diagonal below `_SMALL` proves nothing
    width = sum(len(m) for m in multipliers) + (0 if blocks.eliminated else weights[0].shape[1] + len(weights[-1]))
    # A factorisation needs an allowance of gamma_2n times the trace: smaller slacks are hopeless.
    for exponent in range(max(-13, math.ceil(math.log10(2 * UNIT * width**2))), 1):
        candidate = guess * (1 + 10.0**exponent)
        if blocks.proves(candidate):
            return candidate
    return math.inf


def sandwich_gain(first: Tensor, second: Tensor, multiplier: Tensor, transform: float = 1.0) -> Tensor:
    r"""Proved gain :math:`\tfrac12 \|M\|^2` of a sandwich, :math:`M = [\Lambda^{1/2} W_1,\ \Lambda^{-1/2} W_2^*]`.

    Args:
        first: W_1 ``(..., q, p)``, real or complex; a batch holds the blocks of a block-diagonal operator
            ``T^* diag(W) T`` whose transform T acts on each channel alike (and so commutes with Lambda).
        second: W_2 ``(..., m, q)``.
        multiplier: diagonal of Lambda ``(q,)``, any floating dtype.
        transform: proved bound of ``||T||^2``.

    Guarantee:
        Upper bound for the stored numbers, all rounding included. The Lambda of the proof is the square of the rounded
        square root of ``multiplier``: every positive diagonal proves a gain. ``inf`` if ``multiplier`` is not positive
        and finite.
    """
    multiplier = to_double(multiplier.detach())
    if not bool((torch.isfinite(multiplier) & (multiplier > 0)).all()):
        return torch.full((), math.inf, dtype=torch.float64, device=multiplier.device)
    root = multiplier.sqrt()[:, None]
    both = torch.cat((root * to_double(first), to_double(second).mH / root), -1)
    # Each entry was rounded once, relative to itself or into the subnormal range.
    size = torch.linalg.vector_norm(both, dim=(-2, -1)).amax() if both.numel() else both.new_zeros(()).real
    count = both.shape[-1] * both.shape[-2]
    error = 2 * UNIT * up(size.detach(), count + 2) + count * 2.0**-1070
    return up((up(spectral_norm(both) + error, 2) * transform).square() / 2, 4)
