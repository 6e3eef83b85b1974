r"""Bounds of a convolution straight from its kernel, and what they share with the bounds by its symbol.

LipBound takes the norm from scalar trigonometric polynomials, one for each output channel. For
:math:`f_{ij}(w) = \sum_s K_{ij}[s] e^{i\langle s, w\rangle}`,

.. math:: \|K\|_2 \le \sqrt{\textstyle\sum_{i=1}^{c_{out}} \sup_w \sum_{j=1}^{c_{in}} |f_{ij}(w)|^2} ,

and the same with the roles of the channels exchanged. PolyGrid takes each supremum on S x S equispaced points. Here
each inner sum is evaluated as a polynomial, from the autocorrelation of its row. The bound behind AOL sums the absolute
values of the autocorrelation; the others are norms of the kernel read as a matrix, in one way or in four, times the
root of the number of windows over a pixel. No symbol is ever formed. Shared are scaling, groups, grids of frequencies
and the size of rounding errors.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lipkit.conv.block import half_autocorrelation, half_lags, row_sums
from lipkit.conv.spectrum import angles
from lipkit.conv.symbol import check_kernel, half_grid
from lipkit.errors import OptionError
from lipkit.linalg.matrices import check_integer
from lipkit.linalg.transforms import differentiated
from lipkit.proof.norms import scale_to, scaled_back, spectral_norm, spectral_norms, times_power_of_two
from lipkit.proof.roundoff import check_readable, gamma, to_double, up


def scaled_bound(kernel: Tensor, groups: int, method: Callable[[Tensor], Tensor]) -> Tensor:
    """Bound a kernel by ``method``, called with groups ``(g, cout / g, cin / g, kh, kw)``, float64, rescaled.

    A power of two brings the largest entry into [1/2, 1), so that squares stay in range. Scaling is exact except for
    entries 2^-1000 times smaller than the largest; the bound is scaled back and never rounded down. It is 0-d float64,
    ``inf`` for a kernel with entries that are not finite, and 0 for a zero kernel.
    """
    check_kernel(kernel)
    check_readable(kernel)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or kernel.shape[0] % groups:
        raise OptionError(f"groups: expected a divisor of the {kernel.shape[0]} output channels, got {groups}")
    size = float(kernel.detach().abs().amax())
    if not math.isfinite(size):
        return torch.full((), math.inf, dtype=torch.float64, device=kernel.device)
    if not size:
        return to_double(kernel).abs().sum()  # with a gradient of zeros
    exponent = torch.tensor(math.frexp(size)[1], dtype=torch.int64)
    kernels = to_double(kernel).unflatten(0, (groups, -1))  # the layer is block-diagonal
    return scaled_back(method(times_power_of_two(kernels, -exponent)), exponent)


def grid(kernel: Tensor, points: int | Callable[[int], int]) -> tuple[int, int]:
    """Points per axis of a grid: ``points``, or ``points(taps)``; 1 along an axis with a single tap."""
    check_kernel(kernel)
    first, second = (1 if k == 1 else points if isinstance(points, int) else points(k) for k in kernel.shape[-2:])
    return first, second


def grid_correction(k: int, points: int) -> float:
    r"""Factor c >= 1 with (supremum) <= c (maximum on S equispaced points), for a trigonometric polynomial of k taps.

    .. math:: c = 1 / \cos(\pi (k - 1) / (2 S)), \qquad S = \text{points} \qquad\text{(Ehlich \& Zeller 1964)}

    >>> round(grid_correction(3, 64), 4)
    1.0012
    >>> grid_correction(1, 1)
    1.0
    """
    if points < k:
        raise OptionError(f"points: expected at least the number of taps {k}, got {points}")
    # The angle carries three roundings, and tan <= 2 k / pi turns them into those of the cosine.
    return 1.0 if k == 1 else up(1.0 / math.cos(math.pi * (k - 1) / (2 * points)), 4 * k + 8)


def symbol_error(kernel: Tensor) -> Tensor:
    """Upper bound, at every frequency, of the spectral norm of the rounding error of a float64 ``symbol_at``."""
    taps = kernel.shape[-1] * kernel.shape[-2]
    # Each entry is a sum of `taps` products with cosines and sines that carry up to 8 roundings themselves.
    size = kernel.detach().abs()
    error = up(size.sum((-2, -1)).square().sum((-2, -1)).sqrt().amax(), size.numel() + 64) * gamma(2 * taps + 64)
    # Squares and products below the normal range lose an absolute amount that no relative error covers.
    return torch.where(size.amax() > 0, error + 2.0**-500, error)


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
    return scaled_bound(kernel, groups, lambda k: up(_better_side(k, partial(_rows, sizes)).sqrt() * factor, 8))


def _rows(sizes: tuple[int, int], kernels: Tensor) -> Tensor:
    r"""``sum_i max_w sum_j |f_ij(w)|^2`` of each group ``(g,)`` on the grid, rounding included."""
    groups, cout, cin, kh, kw = kernels.shape
    rows, lags = kernels.reshape(groups * cout, cin, 1, kh, kw), half_lags(kh, kw)
    waves = angles(torch.stack(half_grid(*sizes), 1), lags, *sizes).cos().to(kernels.device)
    waves[:, 1:] *= 2  # each lag but zero stands for its negative, too
    largest = (half_autocorrelation(rows).flatten(1) @ waves.mT).amax(1).clamp_min(0)
    # Inner products over channels, sums over taps and lags, cosines: all errors are relative to sums of moduli.
    absolute = up(rows.detach().abs().sum((-3, -2, -1)).square().sum(-1), kh * kw + cin + 4)
    error = absolute * gamma(2 * (cin + (kh * kw) ** 2 + len(lags)) + 64)
    return up((largest + error).unflatten(0, (groups, cout)).sum(1), cout)


def _better_side(kernels: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """The maximum over groups of the smaller of ``sums(kernels)`` and ``sums`` of the adjoints, both ``(g,)``."""
    return torch.minimum(sums(kernels), sums(kernels.transpose(1, 2))).amax()


def aol(kernel: Tensor, *, groups: int = 1) -> Tensor:
    r"""Upper bound of the spectral norm of a convolution by sums of absolute values, for every image size.

    .. math:: \|K\| \le \sqrt{\max_i \textstyle\sum_{j,\delta} |K^\top * K|_{ij\delta}}

    and the same with the roles of the channels exchanged; the smaller wins.

    Arguments and guarantee are those of :func:`lipkit.bounds.lipbound`. Tight for nearly orthogonal kernels, loose for
    others.

    Cost:
        Two autocorrelations, each of ``(kh kw)^2 / 2`` products of channel matrices.

    >>> 1.0 <= float(aol(torch.full((1, 1, 3, 3), 1 / 9))) < 1.0 + 1e-6
    True

    References:
        Prach & Lampert, ECCV 2022, theorem 2: the kernel rescaled by these sums, column by column, is 1-Lipschitz.
    """
    return scaled_bound(kernel, groups, lambda k: up(_better_side(k, _largest_row_sums).sqrt(), 2))


def _largest_row_sums(kernels: Tensor) -> Tensor:
    """The largest sums ``(g,)`` of absolute values along a row of the autocorrelation, rounding included."""
    half = half_autocorrelation(kernels)
    absolute = kernels.detach().abs().sum((-2, -1))
    worst = absolute.mT @ absolute.sum(-1, keepdim=True)  # row sums of |K|^T |K|: roundings are relative to them
    terms = kernels[0].numel() + half[0].numel()
    return (row_sums(half) + up(worst[..., 0], terms + 8) * gamma(2 * terms + 64)).amax(-1)


def reshaped(kernel: Tensor, *, groups: int = 1, stride: int | tuple[int, int] = 1) -> Tensor:
    r"""Differentiable upper bound of the spectral norm of a convolution by one matrix norm, for every image size.

    .. math:: \|K\| \le \|\mathrm{reshape}(K, c_{out} \times c_{in} k_h k_w)\|_2
              \sqrt{\lceil k_h/s_1 \rceil \lceil k_w/s_2 \rceil}

    A convolution multiplies each window by that matrix; the number under the root bounds the windows of one pixel.

    Args:
        kernel, groups: ``(cout, cin / groups, kh, kw)``; the bound is the maximum over the groups.
        stride: of the convolution; with circular padding it must divide the image (else leave it at 1).

    Guarantee:
        Upper bound, including rounding, for zero padding of any width, for circular padding of at most ``k - 1`` per
        axis in total, and any dilation (with dilation, leave the stride at 1). Exact for windows that do not overlap.

    Cost:
        One Gram matrix, eigenvalue problem and Cholesky factorisation.

    Raises:
        ShapeError, OptionError: a wrong kernel shape, groups or stride.

    >>> 1.0 <= float(reshaped(torch.full((1, 1, 2, 2), 0.5), stride=2)) < 1.0 + 1e-9
    True

    References:
        Tsuzuku, Sato & Sugiyama, NeurIPS 2018; used by RKO (Li et al. 2019) with stride 1.
    """
    pair = tuple(stride) if isinstance(stride, tuple | list) else (stride, stride)
    if len(pair) != 2 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in pair):
        raise OptionError(f"stride: expected one or two integers of at least 1, got {stride!r}")

    def bound(kernels: Tensor) -> Tensor:
        windows = math.prod(-(-k // s) for k, s in zip(kernels.shape[-2:], pair, strict=True))
        return up(spectral_norm(kernels.flatten(2)) * math.sqrt(windows), 4)

    return scaled_bound(kernel, groups, bound)


def fantastic_four(kernel: Tensor, *, groups: int = 1) -> Tensor:
    r"""Upper bound of the spectral norm of a convolution by four matrix norms, for every image size.

    .. math:: \|K\| \le \sqrt{k_h k_w} \min(\|R\|, \|S\|, \|T\|, \|U\|)

    R is ``(cout kh) x (cin kw)``, S ``(cout kw) x (cin kh)``, T ``cout x (cin kh kw)``, U ``(cout kh kw) x cin``.

    Arguments and guarantee are those of :func:`lipkit.bounds.lipbound`: the convolution may have any stride.

    Cost:
        Four Gram matrices, eigenvalue problems and Cholesky factorisations.

    >>> 1.0 <= float(fantastic_four(torch.full((1, 1, 3, 3), 1 / 9))) < 1.0 + 1e-6
    True

    References:
        Singla & Feizi, ICLR 2021, "Fantastic Four", theorem 1.
    """

    def bound(kernels: Tensor) -> Tensor:
        order = kernels.permute(0, 1, 3, 2, 4), kernels.permute(0, 1, 4, 2, 3)
        matrices = [m.flatten(3).flatten(1, 2) for m in order]
        matrices += [kernels.flatten(2), kernels.permute(0, 1, 3, 4, 2).flatten(1, 3)]
        norms, which = torch.stack([spectral_norms(m) for m in matrices]).min(0)  # of the four, for each group
        group = int(norms.argmax())
        found, chosen = norms[group], matrices[int(which[group])][group]
        found = scale_to(found, spectral_norm(chosen)) if differentiated(chosen) else found
        return up(found * math.sqrt(kernels.shape[-2] * kernels.shape[-1]), 4)

    return scaled_bound(kernel, groups, bound)
