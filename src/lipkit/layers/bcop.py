"""BCOP and CayleyBCOP: orthogonal kernels by block convolution of projectors."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lipkit.bounds import spectral_norm
from lipkit.conv.block import bcop_kernel
from lipkit.layers import definitions
from lipkit.layers.base import Family, KernelConv2d
from lipkit.layers.cayley import CayleyLinear
from lipkit.layers.dense import BjorckLinear, orthogonal_free, orthogonal_stack
from lipkit.layers.export import export_kernel_conv
from lipkit.linalg import at_least_float32
from lipkit.linalg.table import Orthogonalize, orthogonalized, proved, resolve
from lipkit.modules import Shape, export_rule, lipschitz_rule
from lipkit.proof.roundoff import up


class BcopConv2d(KernelConv2d):
    r"""Orthogonal convolution by a kernel of kh x kw taps: two-tap projector factors times a matrix.

    .. math:: F(z_1, z_2) = \prod_{i=1}^{k_h + k_w - 2} \big(P_i + (I - P_i)\, z_{a(i)}\big)\, H, \qquad
              P_i = V_i V_i^\top,\; V_i = \mathrm{orth}(W_i),\; H = \mathrm{orth}(W_0)

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        orthogonalize: how H and the V_i are made orthonormal: a name of ``linalg.ORTHOGONALIZE`` or a function.
            'bjorck' is BCOP, 'cayley' is CayleyBCOP.

    Parameters ``free`` W_0 (out_channels, s^2 in_channels), ``projectors`` W_i (kh + kw - 2, c, c // 2) with
    c = max(out_channels, s^2 in_channels), absent for a 1 x 1 kernel or a single channel, and ``bias``. All of them
    start orthonormal.

    Guarantee:
        1-Lipschitz for the named functions, also where an iteration stops early; on convergence all singular values are
        1. For another function ``lipschitz`` computes :math:`\|H\| \prod_i \max(1, 2 \|V_i\|^2 - 1)`, the bound of
        :func:`lipkit.conv.block.bcop_kernel`, from its results.

    >>> import torch
    >>> x = torch.ones(1, 3, 7, 5)
    >>> bool(torch.isclose(BcopConv2d(3, 8, 3, bias=False)(x).norm(), x.norm()))
    True

    References:
        Li, Haque, Anil, Lucas, Grosse & Jacobsen, NeurIPS 2019, algorithm 1; CayleyBCOP: [Cayley] section 5.
    """

    projectors: nn.Parameter | None
    shown = ("orthogonalize",)

    def make_parameters(self, device: Any, dtype: Any, *, orthogonalize: str | Orthogonalize = "bjorck") -> None:
        self.orthogonalize = resolve(orthogonalize)
        self.free = orthogonal_free(self.shape[:2], device, dtype)  # every part starts orthonormal
        channels = max(self.free.shape)  # the factors act on the larger side of H
        projectors = orthogonal_stack((sum(self.kernel_size) - 2, channels, channels // 2), device, dtype)
        self.register_parameter("projectors", projectors if projectors.numel() else None)

    def factors(self) -> tuple[Tensor, Tensor]:
        """H ``(out_channels, s^2 in_channels)`` and the V_i ``(kh + kw - 2, c, r)``, in float32 or better."""
        h = orthogonalized(self.orthogonalize, at_least_float32(self.free))
        if self.projectors is None:
            # The only projectors of one channel are 0 and 1: the factors are shifts, by projectors of rank 0.
            return h, h.new_zeros(sum(self.kernel_size) - 2, max(h.shape), 0)
        return h, orthogonalized(self.orthogonalize, at_least_float32(self.projectors))

    def kernel(self) -> Tensor:
        return bcop_kernel(*self.factors(), self.kernel_size)


def cayley_bcop(*conv: Any, **named: Any) -> BcopConv2d:
    """CayleyBCOP: :class:`BcopConv2d` with ``orthogonalize='cayley'``."""
    return BcopConv2d(*conv, orthogonalize="cayley", **named)


@lipschitz_rule(BcopConv2d)
def _bcop(layer: BcopConv2d, input_shape: Shape | None) -> Tensor | float:
    if proved(layer.orthogonalize):
        return 1.0
    h, v = layer.factors()
    bound = spectral_norm(h)
    if v.numel():
        for one in v:
            bound = bound * (2 * spectral_norm(one) ** 2 - 1).clamp_min(1)
    # At most four roundings for each factor.
    return up(bound, 4 * len(v) + 4)


export_rule(BcopConv2d)(export_kernel_conv)

BCOP = Family(
    name="bcop",
    title="Block convolution of projectors, by Björck iteration",
    paper="Li et al., NeurIPS 2019",
    equation="algorithm 1",
    definition=definitions.bcop,
    conv=BcopConv2d,
    linear=BjorckLinear,
    options={"orthogonalize": ("bjorck", "cayley")},
)
CAYLEY_BCOP = replace(
    BCOP,
    name="cayley_bcop",
    title="Block convolution of projectors, by the Cayley transform",
    paper="Trockman & Kolter, ICLR 2021",
    equation="section 5; Li et al. 2019, algorithm 1",
    conv=cayley_bcop,
    linear=CayleyLinear,
    options={},
)
