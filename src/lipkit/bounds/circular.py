"""The exact norm of a circular convolution from its symbol, and a strided convolution as one of stride 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.bounds.kernels import largest, split_groups, symbol_error
from lipkit.conv import symbol_at
from lipkit.conv.symbol import check_kernel
from lipkit.errors import OptionError
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import to_double


def polyphase(kernel: Tensor, stride: tuple[int, int]) -> Tensor:
    r"""The kernel that acts after pixel-unshuffle as ``kernel`` acts with this stride.

    .. math:: P[o, (c, i, j), a, b] = K[o, c, s_1 a + i, s_2 b + j] \quad (0 \text{ beyond the kernel})

    Pixel-unshuffle is a permutation, so on the plane the two have the same norm; the kernel's own symbol, which knows
    nothing of the stride, only gives an upper bound, up to :math:`\sqrt{s_1 s_2}` above it.

    Args:
        kernel: ``(cout, cin / groups, kh, kw)``.
        stride: (s1, s2).

    Returns:
        ``(cout, cin / groups * s1 s2, ceil(kh / s1), ceil(kw / s2))``, differentiable. Windows that do not overlap
        (kernel at most the stride) give a 1 x 1 kernel: one matrix, whose norm is that of the convolution.

    >>> import torch
    >>> polyphase(torch.ones(4, 3, 7, 7), (2, 2)).shape, polyphase(torch.ones(4, 3, 2, 2), (2, 2)).shape
    (torch.Size([4, 12, 4, 4]), torch.Size([4, 12, 1, 1]))

    References:
        The polyphase decomposition of multirate filters; derived here for kernels of many channels.
    """
    check_kernel(kernel)
    if min(stride) < 1:
        raise OptionError(f"stride: expected integers of at least 1, got {stride}")
    s1, s2 = stride
    kh, kw = kernel.shape[-2:]
    filled = F.pad(kernel, (0, -kw % s2, 0, -kh % s1))
    split = filled.unflatten(3, (-1, s2)).unflatten(2, (-1, s1))
    return split.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def circular(kernel: Tensor, h: int, w: int, *, groups: int = 1) -> Tensor:
    r"""Spectral norm of the circular convolution on an ``h x w`` image: exact up to rounding, never below.

    .. math:: \max_f \|F(f)\|_2 \quad\text{over the } h \times w \text{ frequencies}

    Args:
        kernel: ``(cout, cin / groups, kh, kw)``; larger than the image is allowed (taps wrap around).
        h, w: image size.
        groups: number of groups; the result is the maximum over them.

    Returns:
        0-d float64, differentiable.

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
    check_kernel(kernel)
    f1 = torch.arange(h).repeat_interleave(w // 2 + 1)
    f2 = torch.arange(w // 2 + 1).repeat(h)
    split_groups(kernel, groups)
    symbols = symbol_at(to_double(kernel), f1, f2, h, w).unflatten(1, (groups, -1))
    # The error of all groups together covers that of each.
    return largest([spectral_norm(symbols) + symbol_error(to_double(kernel))])
