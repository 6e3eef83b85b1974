"""Cayley: orthogonal dense layers and convolutions by the Cayley transform [Cayley]."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.conv import Symbol, cayley_conv2d, cayley_linear, kernel_symbol
from lipkit.conv.cayley_conv import solves_pay
from lipkit.conv.spread import spread_parts, spread_pays
from lipkit.layers import definitions, export
from lipkit.layers.base import ConstrainedLinear, Family, SymbolConv2d, half_through_float32
from lipkit.linalg import at_least_float32, cayley
from lipkit.linalg.precision import autocast_off, autocast_on, product_dtype
from lipkit.modules import FourierConv2d, Shape, SpreadConv2d, export_rule, lipschitz_rule
from lipkit.modules.fourier import symbol_norm


def frobenius(free: Tensor) -> Tensor:
    """The Frobenius norm, row by row: one float32 sum of millions of squares would err by about 2e-5."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(free, dim=tuple(range(1, free.ndim))))


_SMALLEST = 1e-12  # below this norm a free weight counts as zero


def rescaled(free: Tensor, scale: Tensor) -> Tensor:
    """``scale * free / ||free||_F``: the weight normalisation inside the transform; finite at zero."""
    free, scale = at_least_float32(free), at_least_float32(scale)
    return free * (scale / frobenius(free).clamp_min(_SMALLEST))


def free_and_scale(shape: tuple[int, ...], device: Any, dtype: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """A free weight with the initialisation of torch's own layers, and its Frobenius norm as the learnable scale."""
    free = nn.init.kaiming_uniform_(torch.empty(shape, device=device, dtype=dtype), a=math.sqrt(5))
    return nn.Parameter(free), nn.Parameter(frobenius(free.detach()))


SOLVED = 32  # below this size the layer forms Q: as fast, and products round less than solves


class CayleyLinear(ConstrainedLinear):
    r"""Dense layer with a semi-orthogonal matrix, :math:`y = Qx + b`, :math:`Q = \mathrm{cayley}(g\,V/\|V\|_F)`.

    Args: those of :class:`lipkit.layers.base.ConstrainedLinear`. Parameters ``free`` V (out_features, in_features),
    ``scale`` g (0-d) and ``bias``.

    Guarantee:
        1-Lipschitz; all singular values 1 up to rounding, an isometry if ``out_features >= in_features``.

    Cost:
        Let c = min(in_features, out_features). From c = 32 on, Q is not formed: LU factors of size c and solves, or
        an inverse for large batches. Layers with c < 32 form Q by one inverse. Under autocast, so do those with
        c < 384 and those with more than c samples.

    >>> x = torch.ones(1, 3)
    >>> bool(torch.isclose(CayleyLinear(3, 5, bias=False)(x).norm(), x.norm()))
    True

    References:
        [Cayley] Trockman & Kolter, ICLR 2021, section 4.1 and Appendix A.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        self.free, self.scale = free_and_scale(self.shape, device, dtype)

    def weight(self) -> Tensor:
        return cayley(rescaled(self.free, self.scale))

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        side = min(self.in_features, self.out_features)
        # Small layers form Q, as do subclasses with their own weight. Under autocast forming Q pays more often, because
        # products run in half precision and solves do not.
        formed = side < SOLVED or getattr(self.weight, "__func__", None) is not CayleyLinear.weight
        if formed or (autocast_on(x) and not solves_pay(x, side)):
            return super().forward(x)
        self.check_input(x.shape)
        dtype = product_dtype(x, self.free.dtype)
        with autocast_off(x):
            free = rescaled(self.free, self.scale)
            return cayley_linear(free, x.to(dtype), self.bias_as(free))


class CayleyConv2d(SymbolConv2d):
    r"""Orthogonal circular convolution: the Cayley transform of the kernel's symbol at each frequency.

    .. math:: \hat y(f) = \mathrm{cayley}(\hat W(f))\, \hat x(f) + b, \qquad W = g\, V / \|V\|_F

    Args: those of :class:`lipkit.layers.base.ConstrainedConv2d`. Parameters ``free`` V (out_channels, s^2 in_channels,
    kh, kw), ``scale`` g (0-d) and ``bias``.

    Guarantee:
        1-Lipschitz; all singular values 1 up to rounding, an isometry if out_channels >= s^2 in_channels.

    Cost:
        At each of about H W / (2 s^2) frequencies: LU factors of size c = min(out_channels, s^2 in_channels) and solves
        (``lipkit.conv.cayley_conv``), or an inverse and products for large batches. The layer's matrices are not
        formed. A 1 x 1 kernel has one matrix for all frequencies: one transform, then one product for each s x s patch.

    >>> x = torch.ones(1, 3, 7, 5)
    >>> bool(torch.isclose(CayleyConv2d(3, 8, 3, bias=False)(x).norm(), x.norm()))
    True

    References:
        [Cayley] Trockman & Kolter, ICLR 2021, algorithm 1, Appendices A and E.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        self.free, self.scale = free_and_scale(self.shape, device, dtype)

    def matrix(self) -> Tensor:
        return cayley(rescaled(self.free, self.scale).flatten(1))  # one tap: the symbol is the kernel, real

    def symbol(self, height: int, width: int) -> Symbol:
        return kernel_symbol(rescaled(self.free, self.scale), height, width).map(cayley)

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if self.pointwise:
            return super().forward(x)
        x, kernel = self.resample(x), rescaled(self.free, self.scale)
        dtype = product_dtype(x, kernel.dtype)
        with autocast_off(x):
            return cayley_conv2d(kernel, x.to(dtype), self.bias_as(kernel))


export.register_one_lipschitz(CayleyLinear)
lipschitz_rule(CayleyConv2d)(1.0)

WORST = 16.0  # largest accepted product of the norms of the parts of a `SpreadConv2d`: its rounding grows with it


@export_rule(CayleyConv2d)
def _export_conv(layer: CayleyConv2d, input_shape: Shape) -> nn.Module:
    """A `FourierConv2d`; with few inputs a `SpreadConv2d`, unless the product of its parts' norms exceeds ``WORST``."""
    size, exact = export.resampled_size(layer, input_shape), export.in_float64(layer)
    kernel = rescaled(exact.free, exact.scale)
    if layer.pointwise or not spread_pays(kernel, *size):
        return export.export_symbol_conv(layer, input_shape)
    small, outputs = spread_parts(kernel, *size)
    norms = symbol_norm(small), symbol_norm(kernel_symbol(outputs, *size))
    if not float(norms[0] * norms[1]) <= WORST:  # also where a norm is NaN
        return export.export_symbol_conv(layer, input_shape)
    first = FourierConv2d.from_symbol(Symbol(*(export.placed_like(layer, part) for part in small)), *size, None)
    spread = SpreadConv2d.from_parts(first, export.placed_like(layer, outputs), layer.bias)
    return nn.Sequential(*export.stride_modules(layer), spread)


CAYLEY = Family(
    name="cayley",
    title="Cayley transform at each frequency",
    paper="Trockman & Kolter, ICLR 2021",
    equation="algorithm 1, proposition A.7",
    definition=definitions.cayley,
    conv=CayleyConv2d,
    linear=CayleyLinear,
)
