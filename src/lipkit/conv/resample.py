"""Strided layers: invertible downsampling before a layer of stride 1, and the same as one product per patch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import ShapeError


def check_divides(height: int, width: int, stride: int) -> None:
    """Raise ``ShapeError`` unless ``stride`` divides both sides of an image.

    >>> check_divides(4, 7, 2)
    Traceback (most recent call last):
    lipkit.errors.ShapeError: emulated stride 2: expected an image whose height and width are multiples of 2, got 4 x 7
    """
    if height % stride or width % stride:
        raise ShapeError(
            f"emulated stride {stride}: expected an image whose height and width are multiples of {stride}, "
            f"got {height} x {width}"
        )


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
    check_divides(x.shape[-2], x.shape[-1], stride)
    return F.pixel_unshuffle(x, stride)


def patch_kernel(matrix: Tensor, stride: int) -> Tensor:
    """The kernel whose convolution of stride s multiplies each s x s patch by a matrix.

    It is :func:`downsample` and a 1 x 1 convolution in one pass. The patches do not overlap, so the convolution has
    the singular values of the matrix.

    Args:
        matrix: ``(cout, s^2 cin)``, its columns in the order of :func:`downsample`.
        stride: s.

    Returns:
        ``(cout, cin, s, s)``, a view.

    >>> import torch
    >>> x, matrix = torch.arange(16.0).reshape(1, 1, 4, 4), torch.arange(8.0).reshape(2, 4)
    >>> apart = F.conv2d(downsample(x, 2), matrix[..., None, None])
    >>> torch.equal(F.conv2d(x, patch_kernel(matrix, 2), stride=2), apart)
    True
    """
    return matrix.unflatten(1, (-1, stride, stride))
