r"""LipBound: the norm of a convolution from scalar trigonometric polynomials, one for each output channel.

For :math:`f_{ij}(w) = \sum_s K_{ij}[s] e^{i\langle s, w\rangle}`,

.. math:: \|K\|_2 \le \sqrt{\textstyle\sum_{i=1}^{c_{out}} \sup_w \sum_{j=1}^{c_{in}} |f_{ij}(w)|^2} ,

and the same with the roles of the channels exchanged. PolyGrid takes each supremum on S x S equispaced points. Here
each inner sum is evaluated as a polynomial, from the autocorrelation of its row: no symbol is ever formed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lipkit.bounds.kernels import better_side, grid, scaled_bound
from lipkit.bounds.symbol_sup import grid_correction
from lipkit.conv.block import half_autocorrelation, half_lags
from lipkit.conv.symbol import angles, half_grid
from lipkit.errors import OptionError
from lipkit.linalg.matrices import check_integer
from lipkit.proof.roundoff import gamma, up


def lipbound(kernel: Tensor, *, groups: int = 1, points: int | None = None, correction: str = "exact") -> Tensor:
    r"""Differentiable upper bound of the norm of a convolution, for every image size: LipBound by PolyGrid, corrected.

    .. math:: \min_{\text{rows, columns}} \sqrt{\textstyle\sum_i \max_{w \in \text{grid}} \sum_j |f_{ij}(w)|^2}
              \; \prod_{\text{axes}} \cos(\pi (k-1) / (2S))^{-1}

    Args:
        kernel, groups: ``(cout, cin / groups, kh, kw)``; the bound is the maximum over the groups.
        points: S, points per axis (default 5 (k - 1), which is the paper's 10 for a 3 x 3 kernel: a factor 1.106).
        correction: 'exact', as above, or 'paper', the factor ``1 / (1 - 2 d / S)``, ``d = k // 2``, of the longer side.

    Guarantee:
        Upper bound, including rounding, for zero padding of any width, for circular padding of at most ``k - 1`` per
        axis in total, for any stride and dilation, and for the transposed convolutions. With many channels it is
        several times the norm: :func:`lipkit.bounds.symbol_sup` is tighter.

    Cost:
        ``(kh kw)^2 / 2`` multiplications for each pair of channels; the rest grows linearly with the channels.

    Raises:
        ShapeError, OptionError: a wrong kernel shape, groups, points or correction.

    >>> k = torch.full((1, 1, 3, 3), 1 / 9)
    >>> 1.0 <= float(lipbound(k)) <= 1.106
    True

    References:
        [LipBound] theorem 5 and algorithm 1 (the factor of 'paper': its lemma on grids, after Pfister & Bresler 2018);
        Ehlich & Zeller, Mathematische Zeitschrift 86 (1964) for 'exact'.
    """
    if correction not in ("exact", "paper"):
        raise OptionError(f"correction: expected 'exact' or 'paper', got {correction!r}")
    if points is not None:
        check_integer("points", points, 1)
    sizes = grid(kernel, points or (lambda k: 5 * (k - 1)))
    kh, kw = kernel.shape[-2:]
    if correction == "exact":
        factor = grid_correction(kh, sizes[0]) * grid_correction(kw, sizes[1])
    else:
        factor = 1.0
        for degree, s in ((kh // 2, sizes[0]), (kw // 2, sizes[1])):
            if degree and s <= 2 * degree:
                raise OptionError(f"points: expected more than 2 d = {2 * degree} for correction 'paper', got {s}")
            factor = max(factor, 1 / (1 - 2 * degree / s)) if degree else factor
    return _polygrid(kernel, groups, sizes, factor)


def lipbound_estimate(kernel: Tensor, *, groups: int = 1, points: int = 10) -> Tensor:
    r"""ESTIMATE: LipBound on a grid without correction, [LipBound] algorithm 1. It can lie below the norm.

    Arguments are those of :func:`lipbound`.

    Guarantee:
        None: between the points of the grid the polynomials can be higher.

    >>> k = torch.tensor([1.0, 0.0, -1.0]).reshape(1, 1, 1, 3)  # norm 2, at a frequency between the points
    >>> float(lipbound_estimate(k)) < 2.0 <= float(lipbound(k))
    True
    """
    check_integer("points", points, 1)
    return _polygrid(kernel, groups, grid(kernel, points), 1.0)


def _polygrid(kernel: Tensor, groups: int, sizes: tuple[int, int], factor: float) -> Tensor:
    def bound(kernels: Tensor) -> Tensor:
        return up(better_side(kernels, partial(_rows, sizes)).sqrt() * factor, 8)

    return scaled_bound(kernel, groups, bound)


def _rows(sizes: tuple[int, int], kernels: Tensor) -> Tensor:
    r"""``sum_i max_w sum_j |f_ij(w)|^2`` of each group ``(g,)`` on the grid, rounding included."""
    groups, cout, cin, kh, kw = kernels.shape
    rows, lags = kernels.reshape(groups * cout, cin, 1, kh, kw), half_lags(kh, kw)
    coefficients = half_autocorrelation(rows).flatten(1)
    waves = angles(torch.stack(half_grid(*sizes), 1), lags, *sizes).cos().to(kernels.device)
    waves[:, 1:] *= 2  # each lag but zero stands for its negative, too
    largest = (coefficients @ waves.mT).amax(1).clamp_min(0)
    # Inner products over channels, sums over taps and lags, cosines: all errors are relative to sums of moduli.
    absolute = up(rows.detach().abs().sum((-3, -2, -1)).square().sum(-1), kh * kw + cin + 4)
    error = absolute * gamma(2 * (cin + (kh * kw) ** 2 + len(lags)) + 64)
    total = (largest + error).unflatten(0, (groups, cout)).sum(1)
    return up(total, cout)
