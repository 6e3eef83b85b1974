r"""SLL and CPL: 1-Lipschitz residual layers whose weight is used twice, around a slope-restricted activation.

Both are the layers of `lipkit.layers.slope_residual`, :math:`y = x - F^* \Lambda\, \sigma(F x + b)` with
:math:`\|\Lambda^{1/2} F\|^2 \le 2`; they differ in how the diagonal is found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds import circular, spectral_norm
from lipkit.layers.aol import autocorrelation
from lipkit.layers.slope_residual import (
    SlopeResidualConv2d,
    SlopeResidualLinear,
    export_residual_conv,
    export_residual_linear,
)
from lipkit.linalg import at_least_float32
from lipkit.modules import Shape, export_rule, lipschitz_rule


def safe_reciprocal(t: Tensor) -> Tensor:
    """``1 / t``, and 0 (with gradient 0) where t is 0: a zero row of F adds nothing, whatever its multiplier.

    >>> safe_reciprocal(torch.tensor([4.0, 0.0])).tolist()
    [0.25, 0.0]
    """
    positive = t > 0
    return torch.where(positive, 1 / torch.where(positive, t, torch.ones_like(t)), torch.zeros_like(t))


def sll_multiplier(magnitudes: Tensor, log_q: Tensor) -> Tensor:
    r"""Diagonal :math:`\Lambda = 2 T^{-1}`, :math:`T_{ii} = \sum_j |F F^*|_{ij}\, q_j / q_i`.

    Args:
        magnitudes: ``(h, h)``: absolute values of :math:`F F^*`, for a convolution summed over its taps.
        log_q: ``(h,)``: logarithm of the free positive vector q.

    Returns:
        ``(h,)``. :math:`T - F F^*` is diagonally dominant after scaling by q, hence positive semidefinite.

    >>> sll_multiplier(torch.tensor([[4.0, 0.0], [0.0, 1.0]]), torch.zeros(2)).tolist()
    [0.5, 2.0]

    References:
        Araujo et al., ICLR 2023, theorem 3 (SLL).
    """
    ratio = (log_q[None, :] - log_q[:, None]).exp()
    return 2 * safe_reciprocal((magnitudes * ratio).sum(1))


def cpl_multiplier(norm: Tensor, hidden: int, like: Tensor) -> Tensor:
    r"""Diagonal :math:`\Lambda = 2 / \|F\|^2 \cdot I` from a proved upper bound of the norm.

    An estimate from below would not do: 3 % too small a norm already gives a layer of norm 1.13.

    >>> cpl_multiplier(torch.tensor(2.0, dtype=torch.float64), 2, torch.zeros(1)).tolist()
    [0.5, 0.5]

    References:
        Meunier et al., ICML 2022 (CPL), equation 8.
    """
    return (2 * safe_reciprocal(norm.square())).to(like.dtype).expand(hidden)


class SllLinear(SlopeResidualLinear):
    r"""SDP-based Lipschitz layer, dense: :math:`y = x - 2 F^\top T^{-1} \sigma(F x + b)`.

    Args: as ``nn.Linear``; ``hidden``: rows of F (default max(in, out)); ``activation``: slope in [0, 1].
    Parameters ``free`` F (hidden, n), ``log_q`` (hidden,), ``bias`` (hidden,), n = max(in, out).

    Guarantee:
        1-Lipschitz, by construction.

    Raises:
        OptionError: an activation whose slope leaves [0, 1] (MaxMin, GELU, ...), sizes below 1.

    >>> SllLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Araujo et al., ICLR 2023, theorem 3 and equation 8.
    """

    def make_multiplier(self, device: Any, dtype: Any) -> None:
        self.log_q = nn.Parameter(torch.zeros(self.hidden, device=device, dtype=dtype))

    def multiplier(self) -> Tensor:
        free = at_least_float32(self.free)
        return sll_multiplier((free @ free.mT).abs(), at_least_float32(self.log_q))


class CplLinear(SlopeResidualLinear):
    r"""Convex potential layer, dense: :math:`y = x - \tfrac{2}{\|F\|^2} F^\top \sigma(F x + b)`.

    The norm is a proved upper bound, computed at each forward pass: it can never be one step behind.

    Args: as ``nn.Linear``; ``hidden``: rows of F (default max(in, out)); ``activation``: slope in [0, 1].
    Parameters ``free`` F (hidden, n) and ``bias`` (hidden,), n = max(in, out).

    Guarantee:
        1-Lipschitz, by construction.

    Raises:
        OptionError: an activation whose slope leaves [0, 1], sizes below 1.

    >>> CplLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Meunier et al., ICML 2022, equation 8.
    """

    def multiplier(self) -> Tensor:
        free = at_least_float32(self.free)
        return cpl_multiplier(spectral_norm(free), self.hidden, free)


class SllConv2d(SlopeResidualConv2d):
    """SDP-based Lipschitz layer, circular convolution of odd kernel size.

    Args: as ``nn.Conv2d`` (stride by invertible downsampling, 'same' circular padding); ``hidden``: channels of F
    (default max of the two); ``activation``: slope in [0, 1]. Parameters ``free`` F, ``log_q`` and ``bias`` (hidden,).

    Guarantee:
        1-Lipschitz for every image size.

    Raises:
        OptionError: an even kernel, an activation whose slope leaves [0, 1].

    >>> SllConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        Araujo et al., ICLR 2023, theorem 3.
    """

    def make_multiplier(self, device: Any, dtype: Any) -> None:
        self.log_q = nn.Parameter(torch.zeros(self.hidden, device=device, dtype=dtype))

    def multiplier(self, height: int, width: int) -> Tensor:
        outputs = autocorrelation(at_least_float32(self.free).transpose(0, 1))
        return sll_multiplier(outputs.abs().sum((-2, -1)), at_least_float32(self.log_q))


class CplConv2d(SlopeResidualConv2d):
    """Convex potential layer, circular convolution of odd kernel size.

    Args: as ``nn.Conv2d`` (stride by invertible downsampling, 'same' circular padding); ``hidden``: channels of F
    (default max of the two); ``activation``: slope in [0, 1]. Parameters ``free`` F and ``bias`` (hidden,).

    Guarantee:
        1-Lipschitz: the norm is the exact circular one at the size of the input, rounded up.

    Cost:
        Eigenvalues of the smaller channel number at about H W / 2 frequencies per forward pass.

    Raises:
        OptionError: an even kernel, an activation whose slope leaves [0, 1].

    >>> CplConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        Meunier et al., ICML 2022, equation 8.
    """

    def multiplier(self, height: int, width: int) -> Tensor:
        free = at_least_float32(self.free)
        return cpl_multiplier(circular(free, height, width), self.hidden, free)


@lipschitz_rule(SllLinear, CplLinear, SllConv2d, CplConv2d)
def _one(module: nn.Module, input_shape: Shape | None) -> float:
    return 1.0


export_rule(SllLinear, CplLinear)(export_residual_linear)
export_rule(SllConv2d, CplConv2d)(export_residual_conv)
