r"""Bound of a convolution by the supremum of its matrix symbol, on a grid with a proved correction.

For a kernel :math:`K` the norm of the convolution with zero padding of any width, of a circular one of any size,
strided or dilated, is at most :math:`\sup_w \|F(w)\|_2`, :math:`F(w) = \sum_s K[s] e^{i\langle s, w\rangle}`. For
unit vectors :math:`u^*F(w)v` is a trigonometric polynomial of width k per axis, so its supremum is at most its
maximum on S equispaced points divided by :math:`\cos(\pi(k-1)/(2S))` per axis (Ehlich & Zeller 1964).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.bounds.rounding import gamma, to_double, up
from lipkit.bounds.verified import scale_to, spectral_norm
from lipkit.conv import check_kernel, symbol_at
from lipkit.errors import OptionError


def grid_correction(k: int, points: int) -> float:
    """Factor from the maximum on ``points`` equispaced points to the supremum, for ``k`` taps: >= 1.

    >>> round(grid_correction(3, 64), 4)
    1.0012
    >>> grid_correction(1, 1)
    1.0
    """
    if points < k:
        raise OptionError(f"points: expected at least the number of taps {k}, got {points}")
    return 1.0 if k == 1 else 1.0 / math.cos(math.pi * (k - 1) / (2 * points))


def split_groups(kernel: Tensor, groups: int) -> Tensor:
    """``(cout, cin / g, kh, kw)`` as g kernels ``(g, cout / g, cin / g, kh, kw)``: the layer is block-diagonal."""
    if groups < 1 or kernel.shape[0] % groups:
        raise OptionError(f"groups: expected a divisor of the {kernel.shape[0]} output channels, got {groups}")
    return kernel.unflatten(0, (groups, -1))


def symbol_error(kernel: Tensor) -> Tensor:
    """Bound of the spectral norm of the rounding error of ``symbol_at(kernel, ...)`` in float64, at any frequency."""
    taps = kernel.shape[-1] * kernel.shape[-2]
    # Each entry is a sum of `taps` products with cosines and sines that carry up to 8 roundings themselves.
    size = kernel.detach().abs()
    error = up(size.sum((-2, -1)).square().sum((-2, -1)).sqrt().amax(), size.numel() + 64) * gamma(2 * taps + 64)
    # Squares and products below the normal range lose an absolute amount that no relative error covers.
    return torch.where(size.amax() > 0, error + 2.0**-500, error)


def _largest(norms: list[Tensor]) -> Tensor:
    """The largest of the groups; a group that is not a number (infinite or undefined entries) counts as infinite."""
    return torch.stack(norms).nan_to_num(nan=math.inf, posinf=math.inf).amax()


def symbol_sup(kernel: Tensor, *, groups: int = 1, points: int | None = None) -> Tensor:
    r"""Upper bound of the spectral norm of a convolution, for every image size.

    .. math:: \|K\| \le \max_{w \in \text{grid}} \|F(w)\|_2 \prod_{\text{axes}} \cos(\pi (k-1)/(2S))^{-1}

    Args:
        kernel: ``(cout, cin / groups, kh, kw)``, as ``nn.Conv2d.weight``.
        groups: number of groups; the bound is the maximum over them.
        points: S, grid points per axis (default: 16 (k - 1), which costs at most 1 % in two dimensions).

    Returns:
        0-d float64, differentiable with respect to ``kernel``.

    Guarantee:
        Upper bound, including rounding, for zero padding of any width, for circular padding of at most
        ``k - 1`` per axis in total, for any stride and dilation. Not for reflect or replicate padding.

    Cost:
        S^2 / 2 Gram matrices, eigenvalue problems and Cholesky factorisations of the smaller channel number.

    Raises:
        ShapeError, OptionError: a wrong kernel shape, groups or points.

    >>> k = torch.full((1, 1, 3, 3), 1 / 9)
    >>> 1.0 <= float(symbol_sup(k)) <= 1.01
    True

    References:
        Ehlich & Zeller, Mathematische Zeitschrift 86 (1964); [LipBound] section 4 for the matrix symbol.
    """
    check_kernel(kernel)
    kernels = to_double(split_groups(kernel, groups))
    kh, kw = kernel.shape[-2:]
    s1, s2 = (k if k == 1 else 16 * (k - 1) if points is None else points for k in (kh, kw))
    correction = grid_correction(kh, s1) * grid_correction(kw, s2)
    # F(-w) is the conjugate of F(w) for a real kernel: half of the grid is enough.
    f1 = torch.arange(s1).repeat_interleave(s2 // 2 + 1)
    f2 = torch.arange(s2 // 2 + 1).repeat(s1)
    norms = []
    for one in kernels:
        on_grid = spectral_norm(symbol_at(one, f1, f2, s1, s2))
        bound = up((on_grid.detach() + symbol_error(one)) * correction, 4)
        norms.append(scale_to(bound, on_grid) if on_grid.requires_grad else bound)
    return _largest(norms)


def circular(kernel: Tensor, h: int, w: int, *, groups: int = 1) -> Tensor:
    r"""Spectral norm of the circular convolution on an ``h x w`` image: exact up to rounding, never below.

    .. math:: \max_f \|F(f)\|_2 \quad\text{over the } h \times w \text{ frequencies}

    Args:
        kernel: ``(cout, cin / groups, kh, kw)``; larger than the image is allowed (taps wrap around).
        h, w: image size.
        groups: number of groups; the result is the maximum over them.

    Returns:
        0-d float64, differentiable.

    Cost:
        h (w // 2 + 1) Gram matrices, eigenvalue problems and Cholesky factorisations.

    >>> float(circular(torch.ones(1, 1, 3, 3), 6, 6)) - 9.0 < 1e-10
    True

    References:
        Sedghi, Gupta & Long, ICLR 2019.
    """
    check_kernel(kernel)
    f1 = torch.arange(h).repeat_interleave(w // 2 + 1)
    f2 = torch.arange(w // 2 + 1).repeat(h)
    norms = []
    for one in to_double(split_groups(kernel, groups)):
        norm = spectral_norm(symbol_at(one, f1, f2, h, w))
        norms.append(norm + symbol_error(one))
    return _largest(norms)
