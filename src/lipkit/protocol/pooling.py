"""Lipschitz constants of pooling windows, overlapping ones included."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.bounds.rounding import gamma
from lipkit.bounds.verified import spectral_norm


def overlap(kernel: int, stride: int, dilation: int = 1) -> int:
    """The most windows that one pixel can lie in, on one axis.

    Taps at multiples of ``dilation`` meet a pixel only if they agree with it modulo the stride.

    >>> overlap(3, 2), overlap(2, 2), overlap(3, 1), overlap(2, 2, 2)
    (2, 1, 3, 2)
    """
    return math.ceil(kernel / (stride // math.gcd(dilation, stride)))


def max_pool_constant(kernels: list[int], strides: list[int], dilations: list[int]) -> float:
    """``sqrt`` of the overlap: each output picks one pixel, and a pixel is picked at most that often.

    >>> max_pool_constant([3, 3], [2, 2], [1, 1])
    2.0000000000000004
    """
    count = math.prod(overlap(k, s, d) for k, s, d in zip(kernels, strides, dilations, strict=True))
    root = math.sqrt(count)
    return root if count == 1 else math.nextafter(root, math.inf)


def average_matrix(n: int, kernel: int, stride: int, padding: int, ceil_mode: bool, count_pad: bool) -> Tensor:
    """The 1-D average pooling operator ``(outputs, n)`` in float64, with torch's rules for the window borders.

    >>> average_matrix(4, 2, 2, 0, False, True).tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    span = n + 2 * padding - kernel
    outputs = (-(-span // stride) if ceil_mode else span // stride) + 1
    if ceil_mode and (outputs - 1) * stride >= n + padding:
        outputs -= 1
    a = torch.zeros(max(outputs, 0), n, dtype=torch.float64)
    for i in range(outputs):
        start = i * stride - padding
        end = min(start + kernel, n + padding)
        inside = range(max(start, 0), min(end, n))
        a[i, inside.start : inside.stop] = 1 / ((end - start) if count_pad else max(len(inside), 1))
    return a


def average_norm(n: int, kernel: int, stride: int, padding: int, ceil_mode: bool, count_pad: bool) -> float:
    """Norm of :func:`average_matrix`, proved.

    >>> abs(average_norm(8, 2, 2, 0, False, True) - 0.5 ** 0.5) < 1e-9
    True
    """
    return float(spectral_norm(average_matrix(n, kernel, stride, padding, ceil_mode, count_pad)))


def average_norm_any_size(kernel: int, stride: int, padding: int, ceil_mode: bool, count_pad: bool) -> float:
    """The same for every image size: ``sqrt(row sum x column sum)`` with rows of at most 1.

    A pixel lies in at most ``overlap`` windows, each of weight ``1 / kernel``, or at most 1 where a border window may
    count fewer pixels.

    >>> average_norm_any_size(2, 2, 0, False, True) >= 0.5 ** 0.5
    True
    """
    weight = 1.0 if ceil_mode or (padding and not count_pad) else 1 / kernel
    # Three roundings of half a unit each.
    return math.sqrt(overlap(kernel, stride) * weight) * (1 + gamma(8))
