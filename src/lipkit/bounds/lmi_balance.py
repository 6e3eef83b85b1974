r"""Multipliers of the LMI balanced between input and output: a common factor that makes the proved gain smallest.

Multiplying all multipliers by t keeps them positive and moves weight between the two ends of H (``lipkit.bounds.lmi``):
with M its middle blocks and C their coupling to input and output, :math:`G = C M^+ C^\top` becomes
:math:`D G D`, :math:`D = \mathrm{diag}(\sqrt t\, I, I / \sqrt t)`, whose largest eigenvalue is the gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipkit.bounds.lmi import lmi_matrix

_GOLDEN = (math.sqrt(5) - 1) / 2


def balance(weights: Sequence[Tensor], multipliers: Sequence[Tensor]) -> float:
    """The factor t for which ``t * multipliers`` prove nearly the smallest gain; a proposal, to be proved.

    It matters for a part of the outputs of a network whose multipliers were found for all of them.

    Args:
        weights: W_0 .. W_L, each ``(n_{k+1}, n_k)``.
        multipliers: diagonals, each ``(n_{k+1},)``, at least one.

    Returns:
        t, positive and finite.

    Raises:
        ShapeError, OptionError: weights that do not chain, multipliers that do not fit or are not positive.

    >>> one = torch.ones(1, 1)
    >>> round(balance([2 * one, 0.5 * one], [torch.ones(1)]), 3)  # the gains 4t/2 and 0.25/(2t) agree
    0.25
    """
    n0 = weights[0].shape[1]
    h = lmi_matrix(weights, multipliers, 0.0)
    if not bool(h.isfinite().all()):
        return 1.0
    inner = slice(n0, h.shape[0] - weights[-1].shape[0])
    middle = h[inner, inner]
    scale = middle.diagonal().rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * middle * scale[None, :])
    keep = values > 1e-11
    half = (vectors[:, keep] * values[keep].rsqrt()) * scale[:, None]
    source, target = h[:n0, inner] @ half, h[inner.stop :, inner] @ half
    if source.shape[0] > source.shape[1]:
        source = torch.linalg.qr(source, mode="r").R if source.shape[1] else source[:1]
    a, b, c = source @ source.mT, target @ target.mT, source @ target.mT

    def gain(exponent: float) -> float:
        t = 2.0**exponent
        joint = torch.cat((torch.cat((t * a, c), dim=1), torch.cat((c.mT, b / t), dim=1)))
        return float(torch.linalg.eigvalsh(joint)[-1])

    top_a, top_b = (float(torch.linalg.matrix_norm(m, 2)) if m.numel() else 0.0 for m in (a, b))
    if not (top_a > 0 and top_b > 0 and math.isfinite(top_a) and math.isfinite(top_b)):
        return 1.0
    # Where the two blocks alone agree; the largest eigenvalue is convex in log t, and the coupling moves it little.
    centre = 0.5 * math.log2(top_b / top_a)
    low, high = centre - 4, centre + 4
    for _ in range(32):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if gain(left) < gain(right) else (left, high)
    return 2.0 ** min(max((low + high) / 2, -500.0), 500.0)
