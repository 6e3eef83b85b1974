"""Strided convolutions as ones of stride 1, on the image whose s x s patches were moved into the channels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.symbol import check_kernel
from lipkit.errors import OptionError


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
