"""Patches of images: strided layers as invertible downsampling or one product per patch, kernels as one matrix."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.symbol import check_kernel
from lipkit.errors import OptionError, ShapeError


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
    """The kernel ``(cout, cin, s, s)`` whose convolution of stride s multiplies each s x s patch by a matrix.

    It is :func:`downsample` and a 1 x 1 convolution in one pass: the columns of the matrix ``(cout, s^2 cin)`` have
    that order. The patches do not overlap, so the convolution has the singular values of the matrix.

    >>> import torch
    >>> x, matrix = torch.arange(16.0).reshape(1, 1, 4, 4), torch.arange(8.0).reshape(2, 4)
    >>> apart = F.conv2d(downsample(x, 2), matrix[..., None, None])
    >>> torch.equal(F.conv2d(x, patch_kernel(matrix, 2), stride=2), apart)
    True
    """
    return matrix.unflatten(1, (-1, stride, stride))


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
    filled = F.pad(kernel, (0, -kw % s2, 0, -kh % s1))  # to multiples of the stride
    split = filled.unflatten(3, (-1, s2)).unflatten(2, (-1, s1))
    return split.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)  # (o, c, i, j, a, b): the channel order of pixel-unshuffle


def kernel_to_matrix(kernel: Tensor) -> Tensor:
    """The kernel ``(cout, cin, kh, kw)`` as the matrix ``(cout, cin kh kw)`` that acts on patches.

    >>> import torch
    >>> kernel_to_matrix(torch.zeros(4, 2, 3, 3)).shape
    torch.Size([4, 18])
    """
    check_kernel(kernel)
    return kernel.flatten(1)


def contraction_from_matrix(matrix: Tensor, kh: int, kw: int) -> Tensor:
    r"""The kernel ``matrix / sqrt(kh kw)``, whose convolution has at most the norm of ``matrix``.

    Args:
        matrix: ``(cout, cin kh kw)``.
        kh, kw: kernel size.

    Returns:
        Kernel ``(cout, cin, kh, kw)``.

    Guarantee:
        :math:`\|K\|_2 \le \|\text{matrix}\|_2` for circular padding on an image of **any** size, kernels larger than
        the image included, and for zero padding. Proof: the layer is the matrix M applied to the patch
        :math:`(Px)(p) = (x(p + s))_s` at each pixel p. Each of the kh kw taps s is a shift of the whole image, on a
        circle a permutation of its pixels (also where taps wrap around and coincide), so
        :math:`\|Px\|^2 = k_h k_w \|x\|^2` and :math:`\|MPx\| \le \|M\| \sqrt{k_h k_w}\, \|x\|`. Zero padding drops
        entries of the shifted images: at most the same. The factor is attained (equal blocks on a constant image).

    Raises:
        ShapeError: the columns of ``matrix`` are no multiple of kh kw.

    >>> import torch
    >>> contraction_from_matrix(torch.ones(1, 9), 3, 3)[0, 0, 0]
    tensor([0.3333, 0.3333, 0.3333])

    References:
        Li et al., NeurIPS 2019, section 4.1 (RKO); Tsuzuku, Sato & Sugiyama, NeurIPS 2018, section 4 (the factor).
    """
    if matrix.ndim != 2 or matrix.shape[1] % (kh * kw):
        raise ShapeError(f"matrix: expected shape (cout, cin * {kh} * {kw}), got {tuple(matrix.shape)}")
    return (matrix / math.sqrt(kh * kw)).unflatten(1, (-1, kh, kw))
