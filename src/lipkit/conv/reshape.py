r"""A kernel as one matrix, and the norm of the convolution in terms of it (RKO)."""

from __future__ import annotations

import math

from torch import Tensor

from lipkit.conv.symbol import check_kernel
from lipkit.errors import ShapeError


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
