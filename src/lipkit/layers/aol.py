"""AOL: almost-orthogonal Lipschitz layers, a rescaling of the columns by a diagonal bound."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.conv.block import autocorrelation
from lipkit.layers import definitions
from lipkit.layers.base import ConstrainedLinear, Family, KernelConv2d
from lipkit.layers.export import register_one_lipschitz
from lipkit.linalg import at_least_float32


def safe_rsqrt(s: Tensor) -> Tensor:
    """``s ** -1/2``, and 0 (with gradient 0) where s is 0: a zero column stays a zero column.

    >>> safe_rsqrt(torch.tensor([4.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    positive = s > 0
    return torch.where(positive, torch.where(positive, s, torch.ones_like(s)).rsqrt(), torch.zeros_like(s))


def aol_matrix(v: Tensor) -> Tensor:
    r"""``V diag(s)^{-1/2}``, :math:`s_i = \sum_j |V^\top V|_{ij}`: spectral norm at most 1.

    :math:`\mathrm{diag}(s) - V^\top V` is diagonally dominant, hence positive semidefinite.

    >>> aol_matrix(torch.tensor([[3.0, 0.0], [0.0, 0.5]])).tolist()
    [[1.0, 0.0], [0.0, 1.0]]

    References:
        Prach & Lampert, ECCV 2022, theorem 1.
    """
    return v * safe_rsqrt((v.mT @ v).abs().sum(-1))


def aol_kernel(kernel: Tensor) -> Tensor:
    r"""Each input channel scaled by :math:`s_i^{-1/2}`, :math:`s_i = \sum_{j,\delta} |K^\top * K|_{ij\delta}`.

    The convolution has norm at most 1 for zero padding of any width and for circular padding of any size: folding the
    autocorrelation modulo the image only adds numbers before their absolute value.

    >>> float(aol_kernel(torch.ones(1, 1, 3, 3)).sum())  # the largest gain, at frequency 0
    1.0

    References:
        Prach & Lampert, ECCV 2022, theorem 2.
    """
    s = autocorrelation(kernel).abs().sum((1, 2, 3))
    return kernel * safe_rsqrt(s)[:, None, None]


class AolLinear(ConstrainedLinear):
    """Dense layer with :func:`aol_matrix`: a contraction, nearly orthogonal after training.

    Args: as ``nn.Linear``. Parameters ``free`` V (out_features, in_features) and ``bias``.

    Guarantee:
        1-Lipschitz, by construction.

    Cost:
        One Gram matrix of the inputs per forward pass.

    >>> AolLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Prach & Lampert, ECCV 2022; [LBDN] section 6 compares with it.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        # Orthogonal at the start, where the diagonal bound is tight.
        free = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.orthogonal_(free))

    def weight(self) -> Tensor:
        return aol_matrix(at_least_float32(self.free))


class AolConv2d(KernelConv2d):
    """Circular convolution with :func:`aol_kernel`: a contraction, nearly orthogonal after training.

    Args: as ``nn.Conv2d``; stride by invertible downsampling, 'same' circular padding. Parameters ``free``
    (out_channels, s^2 in_channels, kh, kw) and ``bias``.

    Guarantee:
        1-Lipschitz for every image size.

    Cost:
        One convolution of the kernel with itself per forward pass.

    >>> AolConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        Prach & Lampert, ECCV 2022.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        shape = (self.out_channels, self.inner_channels, *self.kernel_size)
        free = torch.zeros(shape, device=device, dtype=dtype)
        with torch.no_grad():
            # An orthogonal matrix at the centre; a little noise gives every tap its own gradient.
            centre = nn.init.orthogonal_(torch.empty(shape[:2], device=device, dtype=dtype))
            free[:, :, (self.kernel_size[0] - 1) // 2, (self.kernel_size[1] - 1) // 2] = centre
            free += 0.1 / math.sqrt(shape[1] * shape[2] * shape[3]) * torch.randn_like(free)
        self.free = nn.Parameter(free)

    def kernel(self) -> Tensor:
        return aol_kernel(at_least_float32(self.free))


register_one_lipschitz(AolLinear, AolConv2d)

AOL = Family(
    name="aol",
    title="Almost-orthogonal: columns rescaled by a diagonal bound",
    paper="Prach & Lampert, ECCV 2022",
    equation="theorems 1 and 2",
    definition=definitions.aol,
    conv=AolConv2d,
    linear=AolLinear,
    claim="contraction",
    smooth=False,
)
