"""Invertible downsampling: a strided layer as a permutation of pixels followed by a layer of stride 1."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import ShapeError


def downsample(x: Tensor, stride: int) -> Tensor:
    """Move each ``stride x stride`` patch into the channels: ``(B, C, H, W) -> (B, s^2 C, H/s, W/s)``.

    A permutation of the entries (pixel-unshuffle), so every norm is kept exactly.

    Raises:
        ShapeError: ``stride`` does not divide both sides.

    >>> import torch
    >>> downsample(torch.arange(4.0).reshape(1, 1, 2, 2), 2).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    if stride == 1:
        return x
    h, w = x.shape[-2:]
    if h % stride or w % stride:
        raise ShapeError(
            f"emulated stride {stride}: expected an image whose height and width are multiples of {stride}, "
            f"got {h} x {w}"
        )
    return F.pixel_unshuffle(x, stride)
