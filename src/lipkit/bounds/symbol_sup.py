r"""Bounds of a convolution by its matrix symbol: at the frequencies of one image size, or at all frequencies.

With the symbol :math:`F(w) = \sum_s K[s] e^{i\langle s, w\rangle}` of a kernel K, :math:`\sup_w \|F(w)\|_2` bounds the
norm of its convolution, strided or dilated, with zero padding of any width or circular on images of any size. Finitely
many frequencies prove a bound of the supremum. Gram iteration bounds the norm at each of them, too:
:math:`\|F\|^{2^{t+1}} = \|G_t\| \le \|G_t\|_F` with :math:`G_0 = F^*F`, :math:`G_{t+1} = G_t^2`.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lipkit.bounds.cover import Cover, choose_periods, cover
from lipkit.bounds.gram_symbol import GramSymbol
from lipkit.bounds.kernels import grid, grid_correction, scaled_bound, symbol_error
from lipkit.bounds.peak import Peak, find_peak
from lipkit.conv.symbol import half_grid, symbol, symbol_at
from lipkit.errors import OptionError, ShapeError, finite
from lipkit.linalg.exponential import schatten_bound
from lipkit.linalg.matrices import check_integer, check_positive
from lipkit.linalg.transforms import differentiated, outside
from lipkit.proof.norms import gram_matrix, largest_singular_value, scale_to, spectral_norm
from lipkit.proof.roundoff import UNIT, gamma, up

# Bytes of the symbols that Gram iteration holds at once.
_CHUNK_BYTES = 1 << 26
# Largest number of tests that a tighter bound may cost.
_FEW = 32


def circular(kernel: Tensor, h: int, w: int, *, groups: int = 1) -> Tensor:
    r"""Differentiable spectral norm of the circular convolution on ``h x w``: exact up to rounding, never below.

    .. math:: \max_f \|F(f)\|_2 \quad\text{over the } h \times w \text{ frequencies}

    Args:
        kernel, groups: ``(cout, cin / groups, kh, kw)``; larger than the image is allowed (taps wrap around).
        h, w: image size.

    Guarantee:
        Upper bound, including rounding, for circular padding on this image size only. A zero-padded convolution of an
        ``n x n`` image with p rows of padding in total is a part of the circular one of size n + p.

    Cost:
        h (w // 2 + 1) Gram matrices, eigenvalue problems and Cholesky factorisations.

    >>> float(circular(torch.ones(1, 1, 3, 3), 6, 6)) - 9.0 < 1e-10
    True

    References:
        Sedghi, Gupta & Long, ICLR 2019.
    """
    check_positive(h=h, w=w)

    def bound(kernels: Tensor) -> Tensor:
        symbols = symbol(kernels.flatten(0, 1), h, w).flatten(0, 1).unflatten(1, (groups, -1))
        return up(spectral_norm(symbols) + symbol_error(kernels), 1)  # that of all groups covers each

    return scaled_bound(kernel, groups, bound)


def symbol_sup(
    kernel: Tensor, *, groups: int = 1, tolerance: float = 0.01, points: int | None = None, finer: bool = True
) -> Tensor:
    r"""Upper bound of the spectral norm of a convolution, for every image size.

    .. math:: \|K\| \le \sup_w \|F(w)\|_2 \le \text{bound} \le (1 + \text{tolerance}) \sup_w \|F(w)\|_2

    A search proposes a level just above the supremum; Cholesky factorisations prove it, cell by cell
    (:mod:`lipkit.bounds.cover`).

    Args:
        kernel, groups: ``(cout, cin / groups, kh, kw)``; the bound is the maximum over the groups.
        tolerance: how far above the supremum the bound may be, relative, in [1e-4, 1]. The number of cells grows
            like 1 / tolerance.
        finer: prove nearly constant symbols, like those of orthogonal kernels, to more digits where that costs
            little. If False, the bound equals :func:`symbol_sup_estimate` where that can be proved.
        points: S: instead of cells, a grid of S equispaced points per axis with the correction of
            :func:`grid_correction` (``tolerance`` is then not used).

    Returns:
        0-d float64, differentiable with respect to ``kernel``: the gradient is that of the largest singular value at
        the frequency found, times the ratio of the bound to it.

    Guarantee:
        Upper bound, including rounding, for zero padding of any width, for circular padding of at most ``k - 1`` per
        axis in total, for any stride and dilation, and for the transposed convolutions, which are the adjoints. Not
        for reflect or replicate padding.

    Cost:
        ``(kh kw)^2 / 2`` products of channel matrices for the autocorrelation, then about 100 to 500 (3 x 3) Cholesky
        factorisations of the smaller channel number; with ``points``, ``S^2 / 2`` of them.

    Raises:
        ShapeError, OptionError: a wrong kernel shape, groups, tolerance or points.

    >>> k = torch.full((1, 1, 3, 3), 1 / 9)
    >>> 1.0 <= float(symbol_sup(k)) <= 1.01
    True

    References:
        [LipBound] section 4 for the matrix symbol; Ehlich & Zeller, Mathematische Zeitschrift 86 (1964) for grids;
        Rump, BIT 46 (2006) for the proof by Cholesky. Cells are new here.
    """
    if points is not None:
        check_positive(points=points)
        return on_grid(kernel, groups, grid(kernel, points), lambda one, *at: spectral_norm(symbol_at(one, *at)))
    return _by_cells(kernel, groups, tolerance, finer)


def symbol_sup_estimate(kernel: Tensor, *, tolerance: float = 0.01) -> Tensor:
    r"""ESTIMATE: the level that :func:`symbol_sup` tries to prove first, without the proof.

    .. math:: (1 + 0.99\, \text{tolerance})\, \|F(w)\|_2

    at the frequency w that its search finds. Unless the search is further from the supremum than the tolerance allows,
    ``symbol_sup(kernel, tolerance=tolerance, finer=False)`` is the same number, bit for bit.

    Arguments (without groups), gradient and errors are those of :func:`symbol_sup`. Costs a third of it for 3 x 3
    kernels with 128 channels and a tolerance of 2 %.

    >>> k = torch.full((1, 1, 3, 3), 1 / 9)
    >>> bool(symbol_sup_estimate(k) == symbol_sup(k, finer=False))
    True
    """
    return _by_cells(kernel, 1, tolerance, None)


def _by_cells(kernel: Tensor, groups: int, tolerance: float, finer: bool | None) -> Tensor:
    if not 1e-4 <= finite("tolerance", tolerance) <= 1:
        raise OptionError(f"tolerance: expected a number in [1e-4, 1], got {tolerance}")
    return scaled_bound(kernel, groups, lambda kernels: _supremum(kernels, tolerance, finer))


def _relative(tolerance: float) -> float:
    """The r of the level that a proof tries first: 1 + r times the largest eigenvalue found of G = F* F."""
    return (1 + 0.99 * tolerance) ** 2 - 1


def _supremum(kernels: Tensor, tolerance: float, finer: bool | None) -> Tensor:
    """The proved bound, or the estimate if ``finer`` is None, with the gradient of the largest singular value."""
    if kernels.shape[-2:] == (1, 1):
        return spectral_norm(kernels[..., 0, 0])
    with outside(kernels) as values:
        peak = find_peak(values)
    value = _norm_at(kernels, peak.group, peak.point, peak.periods)
    squared = float(value.detach()) ** 2  # levels are of G = F* F
    level = squared * (1 + _relative(tolerance))  # the level tried first
    if finer is not None:
        with outside(kernels) as values:
            proved = _proved(values, peak, squared, tolerance, finer)
        level = proved.level
        if differentiated(kernels) and proved[1:] != peak[:3]:
            value = _norm_at(kernels, *proved[1:])
    bound = torch.full((), up(math.sqrt(level), 2), dtype=torch.float64, device=kernels.device)
    return scale_to(bound, value) if differentiated(kernels) else bound


def _norm_at(kernels: Tensor, group: int, point: tuple[int, int], periods: tuple[int, int]) -> Tensor:
    """The largest singular value at one frequency, in float64."""
    f1, f2 = (torch.tensor([p], dtype=torch.int64) for p in point)
    return largest_singular_value(symbol_at(kernels[group], f1, f2, *periods)[0])


def _proved(values: Tensor, peak: Peak, squared: float, tolerance: float, finer: bool) -> Cover:
    """A proved upper bound of ``sup ||G||``, G = F* F: its root is at most ``(1 + tolerance) sup ||F||``.

    ``squared`` is the largest eigenvalue of G at the ``peak``; ``finer`` tries smaller tolerances first.
    """
    symbol = GramSymbol(values)
    sample = peak.sample.double()
    # Start from a positive finite level: no other one could ever be proved.
    squared = squared if 0 < squared < math.inf else 1.0
    # Nearly constant symbols are proved to many digits by a few cells.
    for closer in (1e-9, 1e-7, 1e-5, 1e-3) if finer else ():
        # At such levels, only a small curvature allows large cells.
        if symbol.curvature > 100 * closer * squared or closer >= tolerance:
            continue
        if choose_periods(symbol, sample, squared * (1 + 2 * closer))[1] <= _FEW:
            tolerance = closer
            break
    relative = _relative(tolerance)
    start = Cover(squared * (1 + relative), peak.group, peak.point, peak.periods)
    return cover(symbol, start, sample, relative)


def on_grid(
    kernel: Tensor, groups: int, sizes: tuple[int, int], norm: Callable[..., Tensor], *, every_size: bool = True
) -> Tensor:
    """Upper bound of a convolution's norm: the largest norm at equispaced frequencies, times `grid_correction`.

    The correction holds because u* F(w) v, for fixed u and v, is a trigonometric polynomial of k taps per axis.

    Args:
        sizes: points per axis.
        norm: maps a group, frequencies and these sizes to the largest proved norm of the symbols computed there.
        every_size: True for a bound for all image sizes, False for images of exactly ``sizes`` pixels.
    """
    pairs = zip(kernel.shape[-2:], sizes, strict=True)
    correction = math.prod(grid_correction(k, n) for k, n in pairs) if every_size else 1.0

    def bound(kernels: Tensor) -> Tensor:
        # F(-w) is the conjugate of F(w) for a real kernel: half of the grid is enough.
        points, norms = half_grid(*sizes), []
        for one in kernels:
            found = norm(one, *points, *sizes)
            proved = up((found.detach() + symbol_error(one)) * correction, 4)
            norms.append(scale_to(proved, found) if bool(found > 0) else proved + 0 * found)
        return torch.stack(norms).amax()

    return scaled_bound(kernel, groups, bound)


def gram(kernel: Tensor, *, groups: int = 1, size: tuple[int, int] | None = None, iterations: int = 6) -> Tensor:
    r"""Differentiable upper bound of the spectral norm of a convolution, by Gram iteration at each frequency.

    .. math:: \|K\| \le \max_f \|G_t(f)\|_F^{2^{-(t+1)}}

    Args:
        kernel, groups: ``(cout, cin / groups, kh, kw)``; the bound is the maximum over the groups.
        size: (h, w) of a circular image, whose frequencies are used. By default a grid of 8 (k - 1) points per axis,
            with the correction of :func:`lipkit.bounds.grid_correction` (4 % in two dimensions).
        iterations: t, at least 0; the bound is at most ``c^(2^-(t+2))`` times the norm at that frequency, c the smaller
            number of channels.

    Guarantee:
        Upper bound, including rounding, for any number of iterations. Without ``size``: for the convolutions of
        :func:`lipkit.bounds.symbol_sup`. With ``size``: for the circular convolution on images of that size; for
        zero-padded ones, with any stride, on n x n images with p rows and columns of padding in total, if
        ``size >= n + p`` and the kernel fits into ``size``; for no others.

    Cost:
        t + 1 matrix products of the smaller side at each frequency.

    Raises:
        ShapeError, OptionError: a wrong kernel shape, groups, size or iterations.

    >>> 1.0 <= float(gram(torch.full((1, 1, 3, 3), 1 / 9), size=(6, 6))) < 1.0 + 1e-6
    True

    References:
        Delattre, Barthelemy, Araujo & Allauzen, ICML 2023.
    """
    every = grid(kernel, lambda k: 8 * (k - 1))
    check_integer("iterations", iterations, 0)
    whole = isinstance(size, tuple | list) and all(hasattr(n, "__index__") and n >= 1 for n in size)  # not floats
    if size is not None and not (whole and len(size) == 2):
        raise ShapeError(f"size: expected (height, width), integers of at least 1, got {size}")
    return on_grid(kernel, groups, size or every, partial(_gram_norm, iterations), every_size=size is None)


def _gram_norm(iterations: int, kernel: Tensor, f1: Tensor, f2: Tensor, h: int, w: int) -> Tensor:
    each = 16 * (kernel.shape[0] * kernel.shape[1] + 4 * min(kernel.shape[:2]) ** 2)  # bytes per frequency
    step = max(1, _CHUNK_BYTES // each)
    with torch.no_grad():
        parts = zip(f1.split(step), f2.split(step), strict=True)
        norms = torch.cat([_gram_norms(symbol_at(kernel, a, b, h, w), iterations) for a, b in parts])
    best = int(norms.argmax())
    if not differentiated(kernel):
        return norms[best]
    if not float(norms[best]) > 0:
        return norms[best] + 0 * kernel.sum()
    one = symbol_at(kernel, f1[best, None], f2[best, None], h, w)[0]
    near_one = one / torch.linalg.vector_norm(one.detach())
    return scale_to(norms[best], schatten_bound(gram_matrix(near_one), iterations).sqrt())


def _gram_norms(a: Tensor, iterations: int) -> Tensor:
    """Upper bounds ``(F,)`` of the spectral norms of matrices ``(F, m, n)``, all rounding included."""
    side, inner = min(a.shape[-2:]), max(a.shape[-2:])
    frobenius = up(a.abs().square().sum((-2, -1)), 4 + side * inner)
    g, norms = gram_matrix(a), []
    for t in range(iterations + 1):
        norm = torch.linalg.vector_norm(g, dim=(-2, -1)).clamp_min(1e-300)
        norms.append(norm)
        if t < iterations:
            g = g / norm[:, None, None]
            g = g @ g
    # Backwards, with G_t = norm_t N_t and G_{t+1} = N_t^2 but for rounding: ||N_t||^2 <= ||G_{t+1}|| + slack.
    slack = 1.5 * gamma(2 * side + 16)
    bound = torch.full_like(norms[-1], 1 + gamma(side * side + 16), dtype=torch.float64)
    for norm in reversed(norms[1:]):
        bound = up((norm * (bound + 8 * UNIT) + slack).sqrt(), 4)
    squared = norms[0] * (bound + 8 * UNIT) + 1.5 * gamma(2 * inner + 4) * frobenius
    return torch.where(frobenius > 0, up(squared.sqrt(), 4), 0)
