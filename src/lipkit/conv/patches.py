r"""Matrices on patches of images: downsampling, and kernels whose convolution with a stride keeps or shrinks norms.

Window i of a convolution of stride s takes tap j of a kernel of dilation d at pixel :math:`s i + d j`. Taps meet the
same pixels if their :math:`d j` agree modulo s, and otherwise share none. So along each axis the taps fall into
:math:`s' = s / \gcd(s, d)` classes (:func:`period`), and tap j is in class :math:`j \bmod s'`.
"""

import math

import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.block import bcop_kernel, block_convolve, half_autocorrelation, row_sums
from lipkit.conv.symbol import check_kernel
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.matrices import check_positive

Size = tuple[int, int]


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

    A permutation (pixel-unshuffle), so every norm is kept exactly. ``ShapeError`` unless the stride divides both sides,
    ``OptionError`` for a stride below 1.

    >>> import torch
    >>> downsample(torch.arange(4.0).reshape(1, 1, 2, 2), 2).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    check_positive(stride=stride)
    if stride == 1:
        return x
    check_divides(x.shape[-2], x.shape[-1], stride)
    return F.pixel_unshuffle(x, stride)


def patch_kernel(matrix: Tensor, stride: int) -> Tensor:
    """The kernel ``(cout, cin, s, s)`` whose convolution of stride s multiplies each s x s patch by a matrix.

    It is :func:`downsample` and a 1 x 1 convolution in one pass: the columns of the matrix ``(cout, s^2 cin)`` are in
    the order of its channels. The patches do not overlap, so the convolution has the singular values of the matrix.
    """
    return matrix.unflatten(1, (-1, stride, stride))


def polyphase(kernel: Tensor, stride: tuple[int, int]) -> Tensor:
    r"""The kernel that acts after pixel-unshuffle as ``kernel`` acts with this stride: its polyphase form.

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
    """
    check_kernel(kernel)
    if min(stride) < 1:
        raise OptionError(f"stride: expected integers of at least 1, got {stride}")
    s1, s2 = stride
    kh, kw = kernel.shape[-2:]
    filled = F.pad(kernel, (0, -kw % s2, 0, -kh % s1))  # to multiples of the stride
    split = filled.unflatten(3, (-1, s2)).unflatten(2, (-1, s1))
    return split.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)  # (o, c, i, j, a, b): the channel order of pixel-unshuffle


def contraction_from_matrix(matrix: Tensor, kh: int, kw: int) -> Tensor:
    r"""The kernel ``matrix / sqrt(kh kw)``, whose convolution has at most the norm of ``matrix``.

    The matrix is ``(cout, cin kh kw)``, the kernel ``(cout, cin, kh, kw)``.

    Guarantee:
        :math:`\|K\|_2 \le \|\text{matrix}\|_2` for circular padding on an image of **any** size, kernels larger than
        the image included, and for zero padding. Proof: the matrix acts on kh kw shifted images. On a circle each is
        a permutation of the pixels, also where taps coincide, so together they have the norm
        :math:`\sqrt{k_h k_w}\, \|x\|`; zero padding drops entries. Attained for equal blocks on a constant image.

    References:
        Li et al., NeurIPS 2019, section 4.1 (RKO); Tsuzuku, Sato & Sugiyama, NeurIPS 2018, section 4 (the factor).
    """
    if matrix.ndim != 2 or matrix.shape[1] % (kh * kw):
        raise ShapeError(f"matrix: expected shape (cout, cin * {kh} * {kw}), got {tuple(matrix.shape)}")
    return (matrix / rko_factor((kh, kw), (1, 1))).unflatten(1, (-1, kh, kw))


def period(stride: Size, dilation: Size) -> Size:
    """The number of classes of taps along each axis, :math:`s / gcd(s, d)`.

    >>> period((2, 4), (3, 2))
    (2, 2)
    """
    return stride[0] // math.gcd(stride[0], dilation[0]), stride[1] // math.gcd(stride[1], dilation[1])


def aoc_kernel(h: Tensor, v: Tensor, last: Tensor | None, kernel_size: Size, stride: Size) -> Tensor:
    r"""An orthogonal kernel of stride s: the BCOP kernel of stride 1, then a matrix on patches of s x s pixels.

    .. math:: K = R \,\square\, B, \qquad B = \text{bcop}(H, V),\quad R \in \mathbb{R}^{c_{out} \times c s_1 s_2}

    The patches of R do not overlap: its convolution of stride s has the singular values of the matrix R, without the
    factor that reshaped kernels need. Both parts are of one kind (both isometric or both co-isometric) for
    :math:`c = \max(c_{in}, \lfloor c_{out} / s_1 s_2 \rfloor)`.

    Args:
        h: ``(c, cin)``. v: ``(F, max(c, cin), r)``, F = kh - s1 + kw - s2. Semi-orthogonal, as in ``bcop_kernel``.
        last: R, ``(cout, c * s1 * s2)``, semi-orthogonal; None for stride 1.
        kernel_size: kh >= s1, kw >= s2.

    Guarantee:
        All singular values 1 on images that the stride divides, with circular padding; norm at most
        :math:`\|H\| \|R\| \prod_i \max(1, 2 \|V_i\|^2 - 1)` always. A dilation d changes nothing where
        :math:`\gcd(s, d) = 1`: the patches then still cover each pixel once.

    References:
        Boissin et al., ICML 2025 ("An adaptive orthogonal convolution scheme", AOC).
    """
    inner = bcop_kernel(h, v, (kernel_size[0] - stride[0] + 1, kernel_size[1] - stride[1] + 1))
    return inner if last is None else block_convolve(last.unflatten(1, (-1, *stride)), inner)


def rko_factor(kernel_size: Size, classes: Size) -> float:
    r"""The norm of the map from an image to its overlapping patches: the root of the most patches that hold one pixel.

    A pixel lies in one window for each tap of its class (:func:`period`), at most :math:`\lceil k / s' \rceil` along
    an axis: :math:`\|P\| = \sqrt{\lceil k_h / s'_1 \rceil \lceil k_w / s'_2 \rceil}`, and a matrix on patches divided
    by it is a contraction. For k = s the factor is 1.

    >>> rko_factor((3, 3), (1, 1)), rko_factor((3, 2), (2, 2)) ** 2
    (3.0, 2.0000000000000004)

    References:
        Li et al., NeurIPS 2019, section 4.1, for stride 1; derived here for the others.
    """
    return math.sqrt(-(-kernel_size[0] // classes[0]) * -(-kernel_size[1] // classes[1]))


def aol_scales(kernels: Tensor, classes: Size) -> Tensor:
    r"""The row sums s of :math:`|T^\top T|`, T the convolution, for each tap of kernels ``(g, cout, cin, kh, kw)``.

    Dividing each tap by the root of its sum makes a contraction: :math:`\mathrm{diag}(s) - T^\top T` is diagonally
    dominant. All pixels of one input channel and one class (:func:`period`) have the same row sum. The result is
    ``(g, cin, kh, kw)``, for g groups.

    References:
        Prach & Lampert, ECCV 2022, theorem 2, for stride 1; here of the polyphase kernel.
    """
    groups, cout, cin, kh, kw = kernels.shape
    phases = polyphase(kernels.flatten(0, 1), classes).unflatten(0, (groups, cout))
    sums = row_sums(half_autocorrelation(phases))
    wide = sums.reshape(groups, cin, *classes).repeat(1, 1, -(-kh // classes[0]), -(-kw // classes[1]))
    return wide[..., :kh, :kw]
