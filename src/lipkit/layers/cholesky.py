"""Cholesky layers: a free matrix divided by the Cholesky factor of its Gram matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lipkit.conv.patches import contraction_from_matrix, kernel_to_matrix
from lipkit.errors import OptionError
from lipkit.layers import definitions
from lipkit.layers.base import Constrained, ConstrainedLinear, Family, KernelConv2d
from lipkit.layers.dense import orthogonal_free
from lipkit.layers.export import register_one_lipschitz
from lipkit.linalg import cholesky


class Shared(Constrained):
    """What both layers share: W and e."""

    def make_parameters(self, device: Any, dtype: Any, *, share: float = 1e-3) -> None:
        if not 0 < share < float("inf"):
            raise OptionError(f"share: expected a positive finite number, got {share}")
        self.share = float(share)
        self.free = orthogonal_free(self.shape, device, dtype)


class CholeskyLinear(Shared, ConstrainedLinear):
    r"""Dense layer ``y = Q x + b`` with :math:`Q = L^{-1}W`, :math:`LL^\top = WW^\top + eI`: a contraction.

    Args:
        in_features, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedLinear`.
        share: e as a fraction of the mean squared norm of the rows of W (of its columns if W is tall).

    Parameters ``free`` W (out_features, in_features), semi-orthogonal at the start, and ``bias``.

    Guarantee:
        1-Lipschitz; singular values s of W become :math:`s / \sqrt{s^2 + e}`, so those well above e are nearly 1.

    Cost:
        One Gram matrix and one triangular solve per forward pass (`lipkit.linalg.cholesky`).

    Raises:
        OptionError: ``share`` not positive, and what the base class refuses.

    >>> import torch
    >>> CholeskyLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Hu, Leino, Wang & Fredrikson, "A Recipe for Improved Certifiable Robustness", ICLR 2024.
    """

    def weight(self) -> Tensor:
        return cholesky(self.free, self.share)


class CholeskyConv2d(Shared, KernelConv2d):
    r"""Convolution whose reshaped kernel is divided by its Cholesky factor and the root of its taps: a contraction.

    .. math:: K = \tfrac{1}{\sqrt{k_h k_w}}\, L^{-1} W, \qquad LL^\top = WW^\top + eI, \qquad
              W \in \mathbb{R}^{c_{out} \times s^2 c_{in} k_h k_w}

    Nearly orthogonal for 1 x 1 kernels, with or without a stride; larger ones shrink most inputs (`RkoConv2d`).

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        share: as in :class:`CholeskyLinear`.

    Parameters ``free`` W (out_channels, s^2 in_channels, kh, kw), semi-orthogonal as a matrix at the start, ``bias``.

    Guarantee:
        1-Lipschitz on every image size.

    >>> import torch
    >>> CholeskyConv2d(3, 48, 1, stride=4)(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 48, 2, 2])

    References:
        As :class:`CholeskyLinear`; Li et al., NeurIPS 2019, section 4.1 for the reshaped kernel.
    """

    def kernel(self) -> Tensor:
        return contraction_from_matrix(cholesky(kernel_to_matrix(self.free), self.share), *self.kernel_size)


register_one_lipschitz(CholeskyLinear, CholeskyConv2d)

CHOLESKY = Family(
    name="cholesky",
    title="reshaped kernel, divided by its Cholesky factor and the root of its taps",
    paper="Hu et al., ICLR 2024",
    equation="dense layers of its neck",
    definition=definitions.cholesky,
    conv=CholeskyConv2d,
    linear=CholeskyLinear,
    claim="contraction",
    options={"share": (1e-3, 0.1)},
)
