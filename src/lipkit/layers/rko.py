"""RKO, CRKO and Cholesky: the kernel, reshaped to a matrix, becomes a contraction and is divided by sqrt(kh kw)."""

from functools import partial
from typing import Any

from torch import Tensor

from lipkit.bounds import circular, reshaped, symbol_sup
from lipkit.conv.patches import contraction_from_matrix
from lipkit.errors import finite
from lipkit.layers import definitions
from lipkit.layers.base import Constrained, ConstrainedLinear, Family, KernelConv2d
from lipkit.layers.cayley import CayleyLinear
from lipkit.layers.dense import BjorckLinear, orthogonal_free
from lipkit.layers.export import export_kernel_conv, register_one_lipschitz, resampled_size
from lipkit.linalg import cholesky
from lipkit.linalg.table import Orthogonalize, orthogonalized, proved, resolve
from lipkit.modules import Shape, export_rule, lipschitz_rule


class RkoConv2d(KernelConv2d):
    r"""Reshaped kernel orthogonalisation: a contraction, orthogonal for 1 x 1 kernels only.

    .. math:: K = \tfrac{1}{\sqrt{k_h k_w}}\, \mathrm{orthogonalize}(W), \qquad
              W \in \mathbb{R}^{c_{out} \times s^2 c_{in} k_h k_w}

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        orthogonalize: 'bjorck' (RKO), 'cayley' (CRKO), another name of ``linalg.ORTHOGONALIZE``, or a function
            ``(m, n) -> (m, n)``.

    Parameters ``free`` W (out_channels, s^2 in_channels, kh, kw), semi-orthogonal as a matrix at the start, and
    ``bias``.

    Guarantee:
        1-Lipschitz on every image size (proof: ``conv.patches.contraction_from_matrix``) for named functions; for any
        other, ``lipschitz`` computes the norm of the resulting kernel. The layer shrinks most inputs: for
        ``out_channels <= s^2 in_channels`` the mean squared singular value is 1 / (kh kw); the least may be 0.

    >>> import torch
    >>> x = torch.randn(1, 3, 7, 5)
    >>> bool(RkoConv2d(3, 8, 3, bias=False)(x).norm() <= x.norm())
    True

    References:
        Li et al., NeurIPS 2019, section 4.1; [Cayley] section 5 (CRKO).
    """

    shown = ("orthogonalize",)

    def make_parameters(self, device: Any, dtype: Any, *, orthogonalize: str | Orthogonalize = "bjorck") -> None:
        self.orthogonalize = resolve(orthogonalize)
        self.free = orthogonal_free(self.shape, device, dtype)  # as a matrix (c_out, the rest)

    def kernel(self) -> Tensor:
        matrix = orthogonalized(self.orthogonalize, self.free.flatten(1))
        return contraction_from_matrix(matrix, *self.kernel_size)


@lipschitz_rule(RkoConv2d)
def _rko(layer: RkoConv2d, input_shape: Shape | None) -> Tensor | float:
    if proved(layer.orthogonalize):
        return 1.0
    kernel = layer.kernel()
    if input_shape is not None:
        return circular(kernel, *resampled_size(layer, input_shape))
    return reshaped(kernel).minimum(symbol_sup(kernel))  # both hold for every image


export_rule(RkoConv2d)(export_kernel_conv)


class Divided(Constrained):
    """Base of both Cholesky layers: the parameter W and the option ``ridge``."""

    def make_parameters(self, device: Any, dtype: Any, *, ridge: float = 1e-3) -> None:
        self.ridge = finite("ridge", ridge, positive=True)
        self.free = orthogonal_free(self.shape, device, dtype)


class CholeskyLinear(Divided, ConstrainedLinear):
    r"""Dense layer ``y = Q x + b`` with :math:`Q = L^{-1}W`, :math:`LL^\top = WW^\top + eI`: a contraction.

    Args:
        in_features, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedLinear`.
        ridge: e as a fraction of the mean squared norm of the rows of W (of its columns if W is tall); positive.

    Parameters ``free`` W (out_features, in_features), semi-orthogonal at the start, and ``bias``.

    Guarantee:
        1-Lipschitz; singular values s of W become :math:`s / \sqrt{s^2 + e}`, nearly 1 well above :math:`\sqrt e`.

    >>> CholeskyLinear(3, 5).weight().shape
    torch.Size([5, 3])

    References:
        Hu, Leino, Wang & Fredrikson, "A Recipe for Improved Certifiable Robustness", ICLR 2024.
    """

    def weight(self) -> Tensor:
        return cholesky(self.free, self.ridge)


class CholeskyConv2d(Divided, KernelConv2d):
    r"""Convolution whose reshaped kernel is divided by a Cholesky factor and the root of the tap count: a contraction.

    .. math:: K = \tfrac{1}{\sqrt{k_h k_w}}\, L^{-1} W, \qquad LL^\top = WW^\top + eI, \qquad
              W \in \mathbb{R}^{c_{out} \times s^2 c_{in} k_h k_w}

    Nearly orthogonal for 1 x 1 kernels, with or without a stride; larger ones shrink most inputs (`RkoConv2d`).

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        ridge: as in :class:`CholeskyLinear`.

    Parameters ``free`` W (out_channels, s^2 in_channels, kh, kw), semi-orthogonal as a matrix at the start, ``bias``.

    Guarantee:
        1-Lipschitz on every image size.

    >>> CholeskyConv2d(3, 48, 1, stride=4).kernel().shape
    torch.Size([48, 48, 1, 1])
    """

    def kernel(self) -> Tensor:
        return contraction_from_matrix(cholesky(self.free.flatten(1), self.ridge), *self.kernel_size)


register_one_lipschitz(CholeskyLinear, CholeskyConv2d)

RKO = Family(
    name="rko",
    title="reshaped kernel, Björck orthonormalisation, divided by the root of its taps",
    paper="Li et al., NeurIPS 2019",
    equation="section 4.1",
    definition=definitions.rko,
    conv=RkoConv2d,
    linear=BjorckLinear,
    claim="contraction",
    options={"orthogonalize": ("bjorck", "polar", "exponential")},
)
CRKO = Family(
    name="crko",
    title="reshaped kernel, Cayley transform, divided by the root of its taps",
    paper="Trockman & Kolter, ICLR 2021",
    equation="section 5",
    definition=definitions.rko,
    conv=partial(RkoConv2d, orthogonalize="cayley"),  # as the default: a given function wins
    linear=CayleyLinear,
    claim="contraction",
    options={"orthogonalize": ("cayley", "householder")},
)
CHOLESKY = Family(
    name="cholesky",
    title="reshaped kernel, divided by its Cholesky factor and the root of its taps",
    paper="Hu et al., ICLR 2024",
    equation="dense layers of its neck",
    definition=definitions.cholesky,
    conv=CholeskyConv2d,
    linear=CholeskyLinear,
    claim="contraction",
    options={"ridge": (1e-3, 0.1)},
)
