"""AOL: almost-orthogonal Lipschitz layers, a rescaling of the columns by a diagonal bound."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipkit.conv.block import autocorrelation
from lipkit.layers import definitions
from lipkit.layers.base import ConstrainedLinear, Family, KernelConv2d
from lipkit.layers.dense import delta_orthogonal_free, orthogonal_free
from lipkit.layers.export import register_one_lipschitz
from lipkit.linalg import at_least_float32


def where_positive(power: Callable[[Tensor], Tensor], s: Tensor) -> Tensor:
    """A power of s; 0 with gradient 0 where s is 0, subnormal (few digits) or infinite: a zero column stays zero."""
    normal = (s >= torch.finfo(s.dtype).tiny) & s.isfinite()
    # The inner `where` keeps the power away from 0: an infinite derivative times 0 would be NaN.
    safe = torch.where(normal, s, torch.ones_like(s))
    # s^p = c^p (s / c)^p for the constant c = s: the derivative of s^p itself overflows at small s.
    return torch.where(normal, power(safe.detach()) * power(safe / safe.detach()), torch.zeros_like(s))


def aol_matrix(v: Tensor) -> Tensor:
    r"""``V diag(s)^{-1/2}``, :math:`s_i = \sum_j |V^\top V|_{ij}`: spectral norm at most 1.

    :math:`\mathrm{diag}(s) - V^\top V` is diagonally dominant, hence positive semidefinite.
    """
    return v * where_positive(torch.rsqrt, (v.mT @ v).abs().sum(-1))  # scales columns, one for each input


def aol_kernel(kernel: Tensor) -> Tensor:
    r"""The kernel, input channel i divided by the root of :math:`s_i = \sum_{j,\delta} |K^\top * K|_{ij\delta}`.

    The convolution has norm at most 1 for zero padding of any width and for circular padding of any size: on a small
    image taps of the autocorrelation add up, and the modulus of a sum is at most the sum of the moduli.
    """
    s = autocorrelation(kernel).abs().sum((1, 2, 3))  # over inputs j and lags
    return kernel * where_positive(torch.rsqrt, s)[:, None, None]


class AolLinear(ConstrainedLinear):
    """Dense layer with :func:`aol_matrix`: a contraction, nearly orthogonal after training.

    Args: as ``nn.Linear``. Parameters ``free`` V (out_features, in_features) and ``bias``.

    Guarantee:
        1-Lipschitz, by construction. A forward pass takes one Gram matrix of the weight's columns.

    >>> AolLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Prach & Lampert, ECCV 2022, theorem 1; [LBDN] section 6 compares with it.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        self.free = orthogonal_free(self.shape, device, dtype)  # where the diagonal bound is tight

    def weight(self) -> Tensor:
        return aol_matrix(at_least_float32(self.free))


class AolConv2d(KernelConv2d):
    """Circular convolution with :func:`aol_kernel`: a contraction, nearly orthogonal after training.

    Args: as ``nn.Conv2d``; stride by invertible downsampling, 'same' circular padding. Parameters ``free``
    (out_channels, s^2 in_channels, kh, kw) and ``bias``.

    Guarantee:
        1-Lipschitz for every image size. A forward pass takes one convolution of the kernel with itself.

    >>> AolConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        Prach & Lampert, ECCV 2022, theorem 2.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        self.free = delta_orthogonal_free(self.shape, device, dtype)
        with torch.no_grad():  # a little noise gives every tap its own gradient
            self.free.add_(0.1 / math.sqrt(math.prod(self.shape[1:])) * torch.randn_like(self.free))

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
