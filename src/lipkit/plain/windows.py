"""Convolutions that are one matrix on separate windows of the image."""

from __future__ import annotations

from torch import nn


def windows_overlap(conv: nn.Conv1d | nn.Conv2d) -> bool:
    """Whether some pixel lies in two windows of the convolution: its kernel reaches further than its stride.

    Where none does, the layer is a product of matrices, and no fast algorithm has anything to share between windows.

    >>> windows_overlap(nn.Conv2d(3, 8, 2, stride=2)), windows_overlap(nn.Conv2d(3, 8, 3, stride=2))
    (False, True)
    """
    reach = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    return any(one >= step for one, step in zip(reach, conv.stride, strict=True))
