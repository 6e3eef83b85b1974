r"""Kernels whose convolution is orthogonal or a contraction with its own stride, dilation and groups.

Window i of a convolution of stride s takes tap j of a kernel of dilation d at pixel :math:`s i + d j`. Taps meet the
same pixels if their :math:`d j` agree modulo s, and otherwise share none. So along each axis the taps fall into
:math:`s' = s / \gcd(s, d)` classes (:func:`period`), and tap j is in class :math:`j \bmod s'`.
"""

from __future__ import annotations

import math

from torch import Tensor

from lipkit.conv.block import bcop_kernel, block_convolve, half_autocorrelation
from lipkit.conv.patches import polyphase

Size = tuple[int, int]


def period(stride: Size, dilation: Size) -> Size:
    """The number of classes of taps along each axis, :math:`s / gcd(s, d)`.

    >>> period((2, 4), (3, 2))
    (2, 2)
    """
    return stride[0] // math.gcd(stride[0], dilation[0]), stride[1] // math.gcd(stride[1], dilation[1])


def aoc_kernel(h: Tensor, v: Tensor, last: Tensor | None, kernel_size: Size, stride: Size) -> Tensor:
    r"""An orthogonal kernel of stride s: one of stride 1 by projectors, then a matrix on patches of s x s pixels.

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

    >>> import torch
    >>> k = aoc_kernel(torch.eye(1), torch.zeros(2, 1, 0), torch.eye(4), (3, 3), (2, 2))
    >>> k.shape, float(k.square().sum())
    (torch.Size([4, 1, 3, 3]), 4.0)

    References:
        Boissin et al., ICML 2025 ("An adaptive orthogonal convolution scheme", AOC).
    """
    inner = bcop_kernel(h, v, (kernel_size[0] - stride[0] + 1, kernel_size[1] - stride[1] + 1))
    return inner if last is None else block_convolve(last.unflatten(1, (-1, *stride)), inner)


def aoc_channels(in_channels: int, out_channels: int, stride: Size) -> int:
    """The channels c between the two parts of :func:`aoc_kernel`.

    >>> aoc_channels(3, 32, (2, 2)), aoc_channels(16, 32, (2, 2))
    (8, 16)
    """
    return max(in_channels, out_channels // (stride[0] * stride[1]))


def rko_factor(kernel_size: Size, classes: Size) -> float:
    r"""The norm of the map from an image to its overlapping patches: the root of how often a pixel is taken.

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
    r"""The row sums s of the Gram operator's absolute values, for each input channel and class of taps.

    Dividing each tap by the root of its sum makes a contraction: :math:`\mathrm{diag}(s) - T^\top T` is diagonally
    dominant. Pixels of one class see the same kernel, so one row serves each channel and class. Kernels of groups
    ``(g, cout, cin, kh, kw)`` give ``(g, cin, kh, kw)``, the sum that belongs to each tap.

    >>> import torch
    >>> aol_scales(torch.ones(1, 1, 1, 2, 2), (2, 2)).flatten().tolist()
    [4.0, 4.0, 4.0, 4.0]
    >>> aol_scales(torch.ones(1, 1, 1, 1, 2), (1, 1)).flatten().tolist()
    [4.0, 4.0]

    References:
        Prach & Lampert, ECCV 2022, theorem 2, for stride 1; here of the polyphase kernel.
    """
    groups, cout, cin, kh, kw = kernels.shape
    phases = polyphase(kernels.flatten(0, 1), classes).unflatten(0, (groups, cout))
    half = half_autocorrelation(phases).abs()
    # Lag zero counts once, each other one also as its negative with the transposed matrix: column sums.
    sums = half.sum((1, 3)) + half[:, 1:].sum((1, 2))
    wide = sums.reshape(groups, cin, *classes).repeat(1, 1, -(-kh // classes[0]), -(-kw // classes[1]))
    return wide[..., :kh, :kw]
