r"""Gram iteration: :math:`\|F\|^{2^{t+1}} = \|G_t\| \le \|G_t\|_F` with :math:`G_0 = F^*F`, :math:`G_{t+1} = G_t^2`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lipkit.bounds.kernels import grid
from lipkit.bounds.symbol_sup import on_grid
from lipkit.conv.symbol import symbol_at
from lipkit.errors import ShapeError
from lipkit.linalg.matrices import check_integer
from lipkit.linalg.transforms import differentiated
from lipkit.proof.norms import gram_matrix, scale_to
from lipkit.proof.roundoff import UNIT, gamma, up

_CHUNK_BYTES = 1 << 26


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
    return on_grid(kernel, groups, size or every, partial(_largest, iterations), every_size=size is None)


def _largest(iterations: int, kernel: Tensor, f1: Tensor, f2: Tensor, h: int, w: int) -> Tensor:
    each = 16 * (kernel.shape[0] * kernel.shape[1] + 4 * min(kernel.shape[:2]) ** 2)  # bytes per frequency
    step = max(1, _CHUNK_BYTES // each)
    with torch.no_grad():
        parts = zip(f1.split(step), f2.split(step), strict=True)
        norms = torch.cat([_proved(symbol_at(kernel, a, b, h, w), iterations) for a, b in parts])
    best = int(norms.argmax())
    if not differentiated(kernel):
        return norms[best]
    if not float(norms[best]) > 0:
        return norms[best] + 0 * kernel.sum()
    return scale_to(norms[best], _iterated(symbol_at(kernel, f1[best, None], f2[best, None], h, w)[0], iterations))


def _iterated(a: Tensor, iterations: int) -> Tensor:
    """Gram iteration of one matrix, differentiable; `scale_to` passes this gradient on to the proved bound."""
    size = torch.linalg.vector_norm(a.detach())
    g, log = gram_matrix(a / size), torch.zeros((), dtype=torch.float64, device=a.device)
    for t in range(iterations + 1):
        norm = torch.linalg.vector_norm(g)
        log = log + norm.log() / 2 ** (t + 1)  # the value is n_0^(1/2) n_1^(1/4) n_2^(1/8) ...
        if t < iterations:
            g = (g / norm) @ (g / norm)
    return size * log.exp()


def _proved(a: Tensor, iterations: int) -> Tensor:
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
    # Backwards: ||N_t||^2 <= ||G_{t+1}|| + eps and ||G_t|| <= norm_t (||N_t|| + 4 u), N_t of Frobenius norm about 1.
    slack = 1.5 * gamma(2 * side + 16)
    bound = torch.full_like(norms[-1], 1 + gamma(side * side + 16), dtype=torch.float64)
    for norm in reversed(norms[1:]):
        bound = up((norm * (bound + 8 * UNIT) + slack).sqrt(), 4)
    squared = norms[0] * (bound + 8 * UNIT) + 1.5 * gamma(2 * inner + 4) * frobenius
    return torch.where(frobenius > 0, up(squared.sqrt(), 4), 0)
