r"""The sandwich layer as a convolution: a sandwich at each frequency [LBDN]."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv import Symbol, kernel_symbol
from lipkit.conv.cayley_conv import solve_form
from lipkit.conv.normal_matrices import normal_matrices_of, prepare
from lipkit.conv.spectrum import as_complex, as_pair
from lipkit.layers._base import SymbolConv2d, half_through_float32
from lipkit.layers._export import (
    export_symbol_conv,
    in_float64,
    patch_module,
    placed_like,
    resampled_size,
    stride_modules,
)
from lipkit.layers.activations import slope_activation
from lipkit.layers.cayley import free_and_scale, rescaled
from lipkit.layers.cayley_pair import BALANCED, BIRTH_TURN
from lipkit.layers.sandwich import SQRT2, add_log_psi, bound_with_activation, plain_activation
from lipkit.linalg import at_least_float32, cayley
from lipkit.linalg.precision import autocast_off
from lipkit.modules import FourierConv2d, SandwichBlock, Shape, export_rule, lipschitz_rule


class SandwichConv2d(SymbolConv2d):
    r"""Circular convolution with its activation inside: the sandwich layer at each frequency.

    .. math:: \hat v = \sqrt2\, \Psi^{-1} \hat B\, \hat x, \qquad
              \hat y = \sqrt2\, \hat A^* \Psi\, \widehat{\sigma(v + b)}, \qquad
              [\hat A\ \hat B] = \mathrm{cayley}([\hat X^*; \hat Y^*])^*,\quad \hat A \hat A^* + \hat B \hat B^* = I

    Without activation it is the linear form :math:`\hat y = 2 \hat A^* \hat B \hat x` plus bias.

    Args:
        in_channels, out_channels, kernel_size: as ``nn.Conv2d``; the kernel may be as large as the image or larger.
        stride: s, emulated by invertible downsampling; ``kernel_size`` applies after it.
        padding: 'same', or the integer that preserves the size.
        dilation, groups: 1.
        bias: whether a bias is added.
        padding_mode: 'circular'.
        device, dtype: of the parameters (float32 or float64).
        activation: as :class:`SandwichLinear`.

    Parameters ``x_free`` (out_channels, out_channels, kh, kw), ``y_free`` (out_channels, s^2 in_channels, kh, kw),
    their norms ``x_scale`` and ``y_scale`` (0-d), ``log_psi`` (out_channels; not in the linear form) and ``bias``.

    Shapes:
        ``(B, in_channels, H, W) -> (B, out_channels, H / s, W / s)``, any H and W that s divides.

    Guarantee:
        1-Lipschitz. Exports as a :class:`lipkit.modules.SandwichBlock` of two Fourier convolutions (of two
        ``nn.Conv2d`` for a 1 x 1 kernel), whose bound is proved from its
        numbers with the multiplier :math:`\Psi^2`; the linear form
        as one of them.

    Cost:
        At each of about H W / (2 s^2) frequencies LU factors of size out_channels, shared by the solves of two Cayley
        convolutions in solve form (``lipkit.conv.cayley_conv``). A 1 x 1 kernel has one pair of matrices for all
        frequencies: one inverse, and two products for each s x s patch.

    Raises:
        OptionError: an argument that is not supported, an activation that does not qualify. ShapeError: an input that
            does not fit.

    >>> SandwichConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        [LBDN] Wang & Manchester, ICML 2023, algorithm 1, Appendix B.
    """

    log_psi: nn.Parameter | None

    def __init__(self, *conv: Any, activation: str | nn.Module | None = "relu", **named: Any) -> None:
        module = None if activation is None else slope_activation(activation)
        self.linear_form = module is None
        super().__init__(*conv, **named)
        self.activation = module

    def make_parameters(self, device: Any, dtype: Any) -> None:
        q, p = self.out_channels, self.inner_channels
        self.x_free, size = free_and_scale((q, q, *self.kernel_size), device, dtype)
        self.x_scale = nn.Parameter(BIRTH_TURN * size.detach())
        self.y_free, _ = free_and_scale((q, p, *self.kernel_size), device, dtype)
        # The mean square of Y's singular values, over all frequencies, is then that of the dense layer.
        self.y_scale = nn.Parameter(torch.tensor(BALANCED * math.sqrt(min(p, q)), device=device, dtype=dtype))
        add_log_psi(self, self.linear_form, q, device, dtype)

    def free_kernels(self) -> tuple[Tensor, Tensor]:
        """X (out_channels, out_channels, kh, kw), Y (out_channels, s^2 in_channels, kh, kw), in float32 or better."""
        return rescaled(self.x_free, self.x_scale), rescaled(self.y_free, self.y_scale)

    def factors(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """``[A B]`` at the self-conjugate frequencies (n_r, q, q + p) and, complex, at the pairs (n_p, q, q + p)."""
        raw = kernel_symbol(torch.cat(self.free_kernels(), 1), height, width)
        return cayley(raw.real), cayley(as_complex(raw.pair))

    def symbol(self, height: int, width: int) -> Symbol:
        """:math:`2 A^* B`: the layer itself in its linear form."""
        q = self.out_channels
        return _symbol(*(2 * (both[..., :q].mH @ both[..., q:]) for both in self.factors(height, width)))

    def psi(self) -> Tensor:
        """The diagonal of Psi (out_channels,), in float32 or better."""
        assert self.log_psi is not None
        return at_least_float32(self.log_psi).exp()

    def halves(self, height: int, width: int) -> tuple[Symbol, Symbol]:
        """The symbols around the activation, :math:`\\sqrt2 \\Psi^{-1} B` and :math:`\\sqrt2 A^* \\Psi`."""
        q, psi = self.out_channels, self.psi()
        both = self.factors(height, width)
        first = _symbol(*(SQRT2 * m[..., q:] / psi[:, None] for m in both))
        return first, _symbol(*(SQRT2 * m[..., :q].mH * psi for m in both))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Of a 1 x 1 kernel: the two halves as the matrices that all frequencies share."""
        first, second = self.halves(1, 1)
        return first.real[0], second.real[0]

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None:
            return super().forward(x)
        if self.pointwise:
            self.check_input(x)
            with autocast_off(x):
                first, second = self.matrices()
                inside = self.on_patches(x.to(first.dtype), first)
                return F.conv2d(self.activation(inside), second[..., None, None])
        x = self.resample(x)
        with autocast_off(x):
            kernels, psi = self.free_kernels(), self.psi()
            x = x.to(psi.dtype)
            normal = normal_matrices_of(*kernels, *x.shape[-2:], wide=True)
            # Both maps solve with the same matrices.
            factors = prepare(normal, 2 * len(x))
            bias = None if self.bias is None else self.bias.to(psi.dtype)
            v = solve_form("second", x, normal, factors, bias, SQRT2 / psi)
            return solve_form("first adjoint", self.activation(v), normal, factors, scale=SQRT2 * psi)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", activation=None" if self.activation is None else "")


def _symbol(real: Tensor, pair: Tensor) -> Symbol:
    return Symbol(real, as_pair(pair))


lipschitz_rule(SandwichConv2d)(bound_with_activation)


@export_rule(SandwichConv2d)
def _export_conv(layer: SandwichConv2d, input_shape: Shape) -> nn.Module:
    if layer.activation is None:
        return export_symbol_conv(layer, input_shape)
    size = resampled_size(layer, input_shape)
    exact = in_float64(layer)
    activation, multiplier = plain_activation(layer.activation), placed_like(layer, exact.psi().square())
    if layer.pointwise:
        one, two = (placed_like(layer, half) for half in exact.matrices())
        first, second = patch_module(one, layer.stride, layer.bias), patch_module(two, 1, None)
        return SandwichBlock(first, activation, second, multiplier)
    before, after = (Symbol(*(placed_like(layer, part) for part in half)) for half in exact.halves(*size))
    block = SandwichBlock(
        FourierConv2d.from_symbol(before, *size, layer.bias),
        activation,
        FourierConv2d.from_symbol(after, *size, None),
        multiplier,
    )
    return nn.Sequential(*stride_modules(layer), block)
