r"""Products of kernels: block convolution, orthogonal kernels from projectors (BCOP), and autocorrelation.

A kernel :math:`K` is the polynomial :math:`F(z_1, z_2) = \sum_s K[s] z_1^{s_1} z_2^{s_2}`; composing two convolutions
multiplies the polynomials. For a projector :math:`P` the two taps :math:`(P, I - P)` are the factor
:math:`P + (I - P) z`, unitary on the circle: products of such factors and one semi-orthogonal matrix are orthogonal
convolutions of any kernel size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.symbol import check_kernel
from lipkit.errors import ShapeError
from lipkit.linalg.matrices import check_matrix


def block_convolve(a: Tensor, b: Tensor) -> Tensor:
    r"""The kernel of "first b, then a": :math:`(A \square B)[s] = \sum_t A[t]\, B[s - t]`, a product at each tap.

    From ``(m, n, ha, wa)`` and ``(n, p, hb, wb)`` follows ``(m, p, ha + hb - 1, wa + wb - 1)``; ``ShapeError`` if the
    channels in between differ.

    >>> a = torch.tensor([[[[1.0, 2.0]]]])
    >>> block_convolve(a, a).flatten().tolist()
    [1.0, 4.0, 4.0]

    References:
        Xiao et al., ICML 2018, definition 2.3; Li et al., NeurIPS 2019, section 4.1.
    """
    check_kernel(a)
    check_kernel(b)
    if a.shape[1] != b.shape[0]:
        raise ShapeError(f"a and b: expected a.shape[1] == b.shape[0], got {tuple(a.shape)} and {tuple(b.shape)}")
    ha, wa = a.shape[-2:]
    return F.conv2d(b.transpose(0, 1), a.flip(2, 3), padding=(ha - 1, wa - 1)).transpose(0, 1)


def two_taps(kernel: Tensor, v: Tensor, dim: int, swap: bool = False) -> Tensor:
    r"""The kernel of "first ``kernel``, then the taps :math:`(P, I - P)` along one axis", :math:`P = V V^\top`.

    .. math:: K'[s] = P K[s] + (I - P) K[s - 1] \qquad (\text{swap: } P \leftrightarrow I - P)

    P is never formed, only multiplied as two products with the thin V ``(c, r)``; the factor is orthogonal if V has
    orthonormal columns. The axis ``dim``, 2 or 3, of the kernel ``(c, p, kh, kw)`` gets one more tap.

    >>> two_taps(torch.eye(2)[:, :, None, None], torch.tensor([[1.0], [0.0]]), dim=3)[:, :, 0].tolist()
    [[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]
    """
    before = (0, 0) * (3 - dim)  # F.pad counts axes from the last one
    near, far = F.pad(kernel, (*before, 0, 1)), F.pad(kernel, (*before, 1, 0))
    if swap:
        near, far = far, near
    change = (near - far).flatten(1)
    return far + (v @ (v.mT @ change)).reshape_as(far)  # P near + (I - P) far = far + V V^T (near - far)


def bcop_kernel(h: Tensor, v: Tensor, kernel_size: tuple[int, int]) -> Tensor:
    r"""Orthogonal kernel from a semi-orthogonal matrix and projectors, by block convolution.

    .. math:: F(z_1, z_2) = \prod_i \big(P_i + (I - P_i)\, z_{a(i)}\big)\, H, \qquad P_i = V_i V_i^\top

    with one factor for each tap beyond the first. Factors alternate between the axes until one axis is complete. Along
    each axis the first, third, ... factor has its taps exchanged, :math:`(I - P) + P z`: the kernel stays centred for
    every rank, and without projectors (r = 0) it is ``h`` at the centre tap. For m < n the kernel of ``h.mT`` is made
    and its channels exchanged.

    Args:
        h: ``(m, n)``, semi-orthogonal.
        v: ``(kh + kw - 2, max(m, n), r)``, each with orthonormal columns; r may be 0 (a pure shift).
        kernel_size: kh, kw of the result ``(m, n, kh, kw)``.

    Guarantee:
        Orthonormal inputs give a convolution with all singular values 1, on a circular image of any size.
        In general, with :math:`\sigma_i = \|V_i\|`, its norm is at most
        :math:`\|H\| \prod_i \max(1, 2\sigma_i^2 - 1)`: the factor is a normal matrix with eigenvalues
        :math:`\lambda + (1 - \lambda) z`, :math:`0 \le \lambda \le \sigma_i^2`, and :math:`|\lambda + (1-\lambda)z|`
        is at most 1 for :math:`\lambda \le 1` (a convex combination) and at most :math:`2\lambda - 1` above.
        So :math:`\|V_i\| \le 1` and :math:`\|H\| \le 1` suffice for a contraction, projectors or not.

    Cost:
        kh + kw - 2 pairs of products ``(c, r)`` by ``(r, min(m, n) kh kw)``.

    Raises:
        ShapeError: wrong shapes of ``h`` or ``v``.

    >>> bcop_kernel(torch.eye(2), torch.zeros(4, 2, 0), (3, 3))[:, :, 1, 1].tolist()
    [[1.0, 0.0], [0.0, 1.0]]

    References:
        Li et al., NeurIPS 2019, algorithm 1 (there in pairs of axes, so for square kernels).
    """
    check_matrix(h, "h")
    kh, kw = kernel_size
    expected = (kh + kw - 2, max(h.shape))
    if h.ndim != 2 or v.ndim != 3 or tuple(v.shape[:2]) != expected:
        wanted, got = f"(m, n) and ({expected[0]}, {expected[1]}, r)", f"{tuple(h.shape)} and {tuple(v.shape)}"
        raise ShapeError(f"h and v: expected shapes {wanted}, got {got}")
    if h.shape[0] < h.shape[1]:
        return bcop_kernel(h.mT, v, kernel_size).transpose(0, 1)
    kernel = h[:, :, None, None]
    axes = [2, 3] * (min(kh, kw) - 1) + [2 if kh > kw else 3] * abs(kh - kw)
    for one, dim in zip(v, axes, strict=True):
        kernel = two_taps(kernel, one, dim, swap=kernel.shape[dim] % 2 == 1)  # the first, third, ... along an axis
    return kernel


def half_lags(kh: int, kw: int) -> Tensor:
    """One of each pair of lags ``(delta, -delta)``, zero first: ``(L, 2)``, L = ((2 kh - 1)(2 kw - 1) + 1) / 2.

    >>> half_lags(2, 2).tolist()
    [[0, 0], [0, 1], [1, -1], [1, 0], [1, 1]]
    """
    # Row 0 holds both signs: its negative lags come first and are dropped.
    return torch.cartesian_prod(torch.arange(kh), torch.arange(1 - kw, kw))[kw - 1 :]


def half_autocorrelation(kernels: Tensor) -> Tensor:
    r"""The matrices :math:`A[\delta]` at :func:`half_lags` of kernels ``(g, cout, cin, kh, kw)``: ``(g, L, cin, cin)``.

    .. math:: A[\delta] = \sum_s K[s+\delta]^\top K[s], \qquad A[-\delta] = A[\delta]^\top, \qquad
              F(w)^*F(w) = \sum_\delta A[\delta]^\top e^{i\langle\delta,w\rangle}

    The cost is ``(kh kw)^2 / 2`` products of channel matrices: one for each pair of taps, and symmetry saves half.
    """
    groups, cout, cin, kh, kw = kernels.shape
    taps = torch.cartesian_prod(torch.arange(kh), torch.arange(kw)).reshape(-1, 2)
    stacked = kernels.permute(0, 3, 4, 2, 1).reshape(groups, kh * kw, cin, cout).contiguous()
    sums = kernels.new_zeros(groups, ((2 * kh - 1) * (2 * kw - 1) + 1) // 2, cin, cin)
    for s in range(kh * kw):
        difference = taps[s:] - taps[s]  # earlier taps would give the negative lags, which are transposes
        # Position in half_lags: rows of 2 kw - 1 lags follow each other, and lag (0, 0) is the first.
        where = (difference[:, 0] * (2 * kw - 1) + difference[:, 1]).to(kernels.device)
        block = stacked[:, s:].reshape(groups, -1, cout) @ stacked[:, s].mT
        sums = sums.index_add_(1, where, block.unflatten(1, (kh * kw - s, cin)))
    return sums


def row_sums(half: Tensor) -> Tensor:
    """Row sums ``(g, c)`` of the moduli of all matrices of :func:`half_autocorrelation`, negative lags included."""
    size = half.abs()
    return size.sum((1, 3)) + size[:, 1:].sum((1, 2))  # lag zero counts once; the others' negatives are transposes


# Up to this many columns one product of all pairs of taps is faster than a call for each tap.
FEW_COLUMNS = 300


def autocorrelation(kernel: Tensor) -> Tensor:
    """Kernel of the operator ``(cout, cin, kh, kw)`` followed by its adjoint: ``(cin, cin, 2 kh - 1, 2 kw - 1)``.

    Entry ``[i, j, delta]`` is ``sum_o sum_s K[o, i, s + delta] K[o, j, s]``.

    >>> autocorrelation(torch.tensor([[[[1.0, 2.0]]]])).flatten().tolist()
    [2.0, 5.0, 2.0]
    """
    check_kernel(kernel)
    cout, cin, kh, kw = kernel.shape
    size, count = (2 * kh - 1, 2 * kw - 1), kh * kw
    if cin * count <= FEW_COLUMNS:
        flat = kernel.permute(2, 3, 1, 0).reshape(count * cin, cout)
        pairs = (flat @ flat.mT).view(count, cin, count, cin).transpose(1, 2).reshape(count**2, cin, cin)
        tap = (torch.arange(kh)[:, None] * size[1] + torch.arange(kw)).flatten()
        # Taps are numbered in rows of 2 kw - 1, so that differences number lags; the last tap makes them start at 0.
        lag = (tap[:, None] - tap + tap[-1]).flatten().to(kernel.device)
        sums = kernel.new_zeros(size[0] * size[1], cin, cin).index_add(0, lag, pairs)
        return sums.permute(1, 2, 0).unflatten(2, size)
    half = half_autocorrelation(kernel[None])[0]
    both = torch.cat((half[1:].flip(0).mT, half))  # A[-delta] = A[delta]^T, and lag zero once
    return both.permute(1, 2, 0).unflatten(2, size)
