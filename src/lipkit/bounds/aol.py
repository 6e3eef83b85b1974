"""The bound behind AOL: row sums of the kernel's autocorrelation."""

from __future__ import annotations

from torch import Tensor

from lipkit.bounds.kernels import better_side, scaled_bound
from lipkit.conv.block import half_autocorrelation
from lipkit.proof.roundoff import gamma, up


def aol(kernel: Tensor, *, groups: int = 1) -> Tensor:
    r"""Upper bound of the spectral norm of a convolution by sums of absolute values, for every image size.

    .. math:: \|K\| \le \sqrt{\max_i \textstyle\sum_{j,\delta} |K^\top * K|_{ij\delta}}

    and the same with the roles of the channels exchanged; the smaller wins.

    Arguments and guarantee are those of :func:`lipkit.bounds.lipbound`. Tight for nearly orthogonal kernels, loose for
    others.

    Cost:
        Two autocorrelations, each of ``(kh kw)^2 / 2`` products of channel matrices.

    >>> import torch
    >>> 1.0 <= float(aol(torch.full((1, 1, 3, 3), 1 / 9))) < 1.0 + 1e-6
    True

    References:
        Prach & Lampert, ECCV 2022, theorem 2: the kernel rescaled by these sums, column by column, is 1-Lipschitz.
    """

    return scaled_bound(kernel, groups, lambda kernels: up(better_side(kernels, _row_sums).sqrt(), 2))


def _row_sums(kernels: Tensor) -> Tensor:
    """The largest sums ``(g,)`` of absolute values along a row of the autocorrelation, rounding included."""
    size = half_autocorrelation(kernels).abs()
    # The other half of the lags has the transposed matrices: their row sums are column sums here.
    rows = size.sum((1, 3)) + size[:, 1:].sum((1, 2))
    absolute = kernels.detach().abs().sum((-2, -1))
    worst = absolute.mT @ absolute.sum(-1, keepdim=True)  # row sums of |K|^T |K|: roundings are relative to them
    terms = kernels[0].numel() + size[0].numel()
    return (rows + up(worst[..., 0], terms + 8) * gamma(2 * terms + 64)).amax(-1)
