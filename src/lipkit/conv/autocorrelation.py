r"""The kernel of a convolution followed by its adjoint.

:math:`A[\delta] = \sum_s K[s+\delta]^\top K[s]`, so that :math:`F(w)^*F(w) = \sum_\delta A[\delta]^\top
e^{i\langle\delta,w\rangle}`: ``(2 kh - 1)(2 kw - 1)`` matrices, half of them by :math:`A[-\delta] = A[\delta]^\top`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipkit.conv.symbol import check_kernel


def half_lags(kh: int, kw: int) -> Tensor:
    """One of each pair of lags ``(delta, -delta)``, zero first: ``(L, 2)``, L = ((2 kh - 1)(2 kw - 1) + 1) / 2.

    >>> half_lags(2, 2).tolist()
    [[0, 0], [0, 1], [1, -1], [1, 0], [1, 1]]
    """
    lags = torch.cartesian_prod(torch.arange(kh), torch.arange(1 - kw, kw))
    return lags[kw - 1 :]


def half_autocorrelation(kernels: Tensor) -> Tensor:
    r"""The matrices :math:`A[\delta]` at :func:`half_lags`, for a batch of kernels.

    Args:
        kernels: ``(g, cout, cin, kh, kw)``.

    Returns:
        ``(g, L, cin, cin)`` in the dtype of ``kernels``, differentiable.

    Cost:
        One product for each pair of taps, half of them by symmetry: ``(kh kw)^2 / 2`` products of channels.

    >>> half_autocorrelation(torch.tensor([[[[[1.0, 2.0]]]]])).flatten().tolist()
    [5.0, 2.0]
    """
    groups, cout, cin, kh, kw = kernels.shape
    taps = torch.cartesian_prod(torch.arange(kh), torch.arange(kw)).reshape(-1, 2)
    stacked = kernels.permute(0, 3, 4, 2, 1).reshape(groups, kh * kw, cin, cout).contiguous()
    sums = kernels.new_zeros(groups, ((2 * kh - 1) * (2 * kw - 1) + 1) // 2, cin, cin)
    for s in range(kh * kw):
        difference = taps[s:] - taps[s]
        # Position in half_lags: the lags of one row follow each other, and the first row starts at 0.
        where = (difference[:, 0] * (2 * kw - 1) + difference[:, 1]).to(kernels.device)
        block = stacked[:, s:].reshape(groups, -1, cout) @ stacked[:, s].mT
        sums = sums.index_add_(1, where, block.unflatten(1, (kh * kw - s, cin)))
    return sums


def autocorrelation(kernel: Tensor) -> Tensor:
    """Kernel of the operator followed by its adjoint: ``(cin, cin, 2 kh - 1, 2 kw - 1)``.

    Entry ``[i, j, delta]`` is ``sum_o sum_s K[o, i, s + delta] K[o, j, s]``.

    Args:
        kernel: ``(cout, cin, kh, kw)``.

    >>> autocorrelation(torch.tensor([[[[1.0, 2.0]]]])).flatten().tolist()
    [2.0, 5.0, 2.0]
    """
    check_kernel(kernel)
    kh, kw = kernel.shape[-2:]
    half = half_autocorrelation(kernel[None])[0]
    both = torch.cat((half[1:].flip(0).mT, half))
    return both.permute(1, 2, 0).unflatten(2, (2 * kh - 1, 2 * kw - 1))
