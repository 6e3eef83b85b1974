r"""The gain of a linear map, a slope-restricted activation and another linear map, by one spectral norm.

For :math:`y = W_2\, \sigma(W_1 x + b)` with slopes of :math:`\sigma` in [0, 1] and a positive diagonal :math:`\Lambda`,

.. math:: \|y - y'\| \le \tfrac12 \|M\|_2^2\, \|x - x'\|, \qquad
          M = [\, R \;|\; P \,],\quad R = \Lambda^{1/2} W_1,\ P = \Lambda^{-1/2} W_2^* .

Proof. The difference of the activations is :math:`D W_1 (x - x')` with a diagonal :math:`D`, entries in [0, 1], which
commutes with :math:`\Lambda`: so :math:`W_2 D W_1 = P^* D R`. For real unit vectors u, v, with :math:`p = Pu` and
:math:`r = Rv`,

.. math:: u^\top P^\top D R v = \sum_i d_i p_i r_i \le \sum_i \max(0, p_i r_i) \le \tfrac14 \|p + r\|^2
          = \tfrac14 \|M (v; u)\|^2 \le \tfrac12 \|M\|_2^2 .

It is the block LMI of ``lipkit.bounds.lmi`` for one activation, its two Schur complements taken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import UNIT, gamma, to_double, up


def stacked_norm(first: Tensor, second: Tensor, multiplier: Tensor) -> Tensor:
    r"""Proved upper bound of :math:`\max \| [\, \Lambda^{1/2} W_1 \;|\; \Lambda^{-1/2} W_2^* \,] \|_2` over a batch.

    Args:
        first: W_1 ``(..., q, p)``, real or complex.
        second: W_2 ``(..., m, q)``.
        multiplier: diagonal of Lambda ``(q,)``, any floating dtype.

    Returns:
        0-d float64; ``inf`` if the multiplier is not positive and finite.

    Guarantee:
        Upper bound for the stored numbers, all rounding included: for *some* positive diagonal next to ``multiplier``
        (the square of its rounded square root), which serves as well.

    >>> one = torch.eye(2)
    >>> 2**0.5 <= float(stacked_norm(one, one, torch.ones(2))) < 2**0.5 + 1e-9
    True
    """
    multiplier = to_double(multiplier.detach())
    if not bool((torch.isfinite(multiplier) & (multiplier > 0)).all()):
        return torch.full((), math.inf, dtype=torch.float64, device=multiplier.device)
    root = multiplier.sqrt()[:, None]
    both = torch.cat((root * to_double(first), to_double(second).mH / root), -1)
    # Each entry was rounded once, relative to itself or into the subnormal range.
    size = torch.linalg.vector_norm(both, dim=(-2, -1)).amax() if both.numel() else both.new_zeros(()).real
    count = both.shape[-1] * both.shape[-2]
    error = 2 * UNIT * size.detach() * (1 + gamma(count + 4)) + count * 2.0**-1070
    return up(spectral_norm(both) + error, 2)


def sandwich_gain(first: Tensor, second: Tensor, multiplier: Tensor, transform: float = 1.0) -> Tensor:
    r"""Proved bound :math:`\tfrac12 \|M\|^2` of the module docstring.

    Args:
        first, second, multiplier: as :func:`stacked_norm`; with a batch, the blocks of block-diagonal operators
            ``T^* diag(W) T`` whose transform T acts on each channel alike (and so commutes with Lambda).
        transform: proved bound of ``||T||^2``.

    >>> one = torch.eye(2)
    >>> 1.0 <= float(sandwich_gain(one, one, torch.ones(2))) < 1.0 + 1e-9
    True
    """
    return up((stacked_norm(first, second, multiplier) * transform).square() / 2, 4)
