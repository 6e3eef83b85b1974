"""The exact norm of a circular convolution from its symbol, and a strided convolution as one of stride 1."""

from __future__ import annotations

from torch import Tensor

from lipkit.bounds.kernels import largest, split_groups, symbol_error
from lipkit.conv.patches import polyphase as polyphase
from lipkit.conv.symbol import check_kernel, symbol
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import to_double


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

    >>> import torch
    >>> float(circular(torch.ones(1, 1, 3, 3), 6, 6)) - 9.0 < 1e-10
    True

    References:
        Sedghi, Gupta & Long, ICLR 2019.
    """
    check_kernel(kernel)
    split_groups(kernel, groups)
    symbols = symbol(to_double(kernel), h, w).flatten(0, 1).unflatten(1, (groups, -1))
    # The error of all groups together covers that of each.
    return largest([spectral_norm(symbols) + symbol_error(to_double(kernel))])
