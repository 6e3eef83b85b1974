r"""Convolutions whose symbol has a period of k frequencies: dilated kernels, and the phase form [ECO].

Take a circular convolution on H x W images with kh x kw taps and the dilations H / kh and W / kw. Its matrices at the
frequencies f and f + (kh, kw) agree: kh kw are distinct. Equivalently, each of the (H / kh)(W / kw) phase images of
kh x kw pixels (p, p + H/kh, p + 2H/kh, ...) is convolved separately, by a circular convolution of its own size.
:mod:`lipkit.conv.phase_product` evaluates it there.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.circular import circular_pad, circular_pads
from lipkit.conv.patches import Size
from lipkit.conv.spectrum import Symbol
from lipkit.conv.symbol import angles, check_kernel
from lipkit.conv.transform import count_real, frequencies
from lipkit.errors import ShapeError


def check_fits(height: int, width: int, kernel_size: Size, name: str = "kernel_size") -> None:
    """Raise ``ShapeError`` unless the kernel divides the image; the message names the sizes that do.

    >>> check_fits(32, 32, (3, 3))
    Traceback (most recent call last):
    lipkit.errors.ShapeError: kernel_size: expected sizes that divide the image, got 3 x 3 for 32 x 32; ...
    """
    kh, kw = kernel_size
    if height % kh or width % kw:
        fitting = ", ".join(str(k) for k in range(1, height + 1) if math.gcd(height, width) % k == 0)
        got = f"{kh} x {kw} for {height} x {width}; these fit: {fitting}"
        raise ShapeError(f"{name}: expected sizes that divide the image, got {got}")


def distinct_frequencies(kernel_size: Size) -> tuple[int, int]:
    """Number of self-conjugate frequencies and of conjugate pairs of a kh x kw grid.

    >>> [sum(distinct_frequencies((k, k))) for k in (1, 2, 3, 4, 5)]
    [1, 4, 5, 10, 13]
    """
    real = count_real(*kernel_size)
    return real, (math.prod(kernel_size) - real) // 2


def frequency_map(kernel_size: Size) -> Tensor:
    r"""The index I of each frequency's distinct matrix: :math:`I[p, q] = I[(k_h - p) \% k_h, (k_w - q) \% k_w]`.

    Self-conjugate frequencies come first, then one index for each pair, in the order of :func:`frequencies` ([ECO]
    equation 18 and algorithm 2, where 0 also marks entries that are not yet set).

    >>> frequency_map((3, 3))
    tensor([[0, 1, 1],
            [2, 3, 4],
            [2, 4, 3]])
    """
    kh, kw = kernel_size
    table = torch.full((kh, kw), -1, dtype=torch.int64)
    for number, (p, q) in enumerate(torch.cat(frequencies(kh, kw)).tolist()):
        table[p % kh, q % kw] = table[-p % kh, -q % kw] = number
    return table


def kernel_of_symbol(symbol: Symbol, kernel_size: Size) -> Tensor:
    r"""The kernel ``(cout, cin, kh, kw)`` of a symbol on kh x kw: W0 of [ECO] equation 16, centred at c = (k - 1) // 2.

    .. math:: W_0[s] = \frac{1}{k_h k_w} \sum_f F(f)\, e^{-2\pi i \langle f, (s - c)/k \rangle}

    summed over conjugate pairs, so that it is real. Inverse of :func:`lipkit.conv.kernel_symbol`; the identity at
    every frequency gives one tap of 1 at the centre, the identity map. Pairs may be real: ``(n_p, 1, cout, cin)``.
    """
    kh, kw = kernel_size
    cout, cin = symbol.real.shape[-2:]
    taps = torch.cartesian_prod(*(torch.arange(k) - (k - 1) // 2 for k in kernel_size))  # from the centre
    real, pair = (angles(grid, taps, kh, kw) for grid in frequencies(kh, kw))
    # Re((R + iS) e^{-i a}) = R cos a + S sin a, twice for the pair f and -f.
    waves = [real.cos(), 2 * pair.cos()]
    parts = [symbol.real.flatten(1), symbol.pair[:, 0].flatten(1)]
    if symbol.pair.shape[1] == 2:
        waves.append(2 * pair.sin())
        parts.append(symbol.pair[:, 1].flatten(1))
    table = (torch.cat(waves) / (kh * kw)).to(symbol.real)
    return (table.mT @ torch.cat(parts)).reshape(kh, kw, cout, cin).permute(2, 3, 0, 1)


def dilated_conv2d(x: Tensor, kernel: Tensor) -> Tensor:
    """Circular convolution with the dilations H / kh and W / kw: the layer as [ECO] evaluates it.

    The padding is asymmetric for an even kernel, so that tap ``(k - 1) // 2`` is the centre for every dilation. The
    sides of the kernel divide those of the image.

    >>> shift = torch.tensor([[[[1.0, 0.0, 0.0]]]])
    >>> dilated_conv2d(torch.arange(6.0).reshape(1, 1, 1, 6), shift).flatten().tolist()
    [4.0, 5.0, 0.0, 1.0, 2.0, 3.0]
    """
    check_kernel(kernel)
    kh, kw = kernel.shape[-2:]
    check_fits(x.shape[-2], x.shape[-1], (kh, kw))
    dh, dw = x.shape[-2] // kh, x.shape[-1] // kw
    pads = [d * p for d, p in zip((dw, dw, dh, dh), circular_pads(kh, kw), strict=True)]
    return F.conv2d(circular_pad(x, pads), kernel, dilation=(dh, dw))


def split_phases(x: Tensor, kernel_size: Size) -> Tensor:
    """The phase images ``(B H W / (kh kw), C, kh, kw)`` of ``x`` ``(B, C, H, W)``, each pixel's channels contiguous.

    Copies once, unless the memory order is (kh, kw, B, H / kh, W / kw, C) already.

    >>> split_phases(torch.arange(6.0).reshape(1, 1, 1, 6), (1, 3)).flatten(1).tolist()
    [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """
    kh, kw = kernel_size
    b, c, h, w = x.shape
    pixels = b * (h // kh) * (w // kw)
    return phase_order(x, kernel_size).reshape(kh, kw, pixels, c).permute(2, 3, 0, 1)


def phase_order(x: Tensor, kernel_size: Size) -> Tensor:
    """The view ``(kh, kw, B, H / kh, W / kw, C)`` of ``x`` ``(B, C, H, W)``."""
    kh, kw = kernel_size
    b, c, h, w = x.shape
    return x.reshape(b, c, kh, h // kh, kw, w // kw).permute(2, 4, 0, 3, 5, 1)  # pixel p + i H / kh: i leads


def merge_phases(phases: Tensor, height: int, width: int) -> Tensor:
    """Inverse of :func:`split_phases`: images ``(B, C, height, width)`` in the ``channels_last`` memory format."""
    n, c, kh, kw = phases.shape
    dh, dw = height // kh, width // kw
    grid = phases.permute(2, 3, 0, 1).reshape(kh, kw, n // (dh * dw), dh, dw, c)
    return grid.permute(2, 0, 3, 1, 4, 5).reshape(-1, height, width, c).permute(0, 3, 1, 2)
