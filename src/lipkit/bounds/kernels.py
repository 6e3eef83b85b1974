"""Shared by the bounds of a convolution kernel: groups, exact scaling, the size of rounding errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipkit.conv.symbol import check_kernel
from lipkit.errors import OptionError
from lipkit.proof.norms import scaled_back, times_power_of_two
from lipkit.proof.roundoff import check_readable, gamma, to_double, up


def symbol_error(kernel: Tensor) -> Tensor:
    """Upper bound, at every frequency, of the spectral norm of the rounding error of a float64 ``symbol_at``."""
    taps = kernel.shape[-1] * kernel.shape[-2]
    # Each entry is a sum of `taps` products with cosines and sines that carry up to 8 roundings themselves.
    size = kernel.detach().abs()
    error = up(size.sum((-2, -1)).square().sum((-2, -1)).sqrt().amax(), size.numel() + 64) * gamma(2 * taps + 64)
    # Squares and products below the normal range lose an absolute amount that no relative error covers.
    return torch.where(size.amax() > 0, error + 2.0**-500, error)


def grid(kernel: Tensor, points: int | Callable[[int], int]) -> tuple[int, int]:
    """Points per axis of a grid: ``points``, or ``points(taps)``; 1 along an axis with a single tap."""
    check_kernel(kernel)
    first, second = (1 if k == 1 else points if isinstance(points, int) else points(k) for k in kernel.shape[-2:])
    return first, second


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
