r"""Rules of residual blocks with slope-restricted activations, from the stored numbers.

For :math:`y = x + W_2\,\sigma(W_1 x + b)` and a positive diagonal :math:`\Lambda`: if :math:`W_2 = -W_1^*\Lambda` and
:math:`\|\Lambda^{1/2}W_1\|^2 \le 2`, then y is 1-Lipschitz (Araujo et al., ICLR 2023, theorem 1). Stored weights
satisfy neither exactly. With :math:`s = \max(1, \|\Lambda^{1/2}W_1\|^2/2)` the multiplier :math:`\Lambda/s` qualifies,
and :math:`W_2` differs from the matrix that belongs to it by
:math:`(W_2 + W_1^*\Lambda) - (1 - 1/s) W_1^*\Lambda`, so

.. math:: L \le 1 + \|W_1\| \big( \|W_2 + W_1^*\Lambda\| + (1 - 1/s)\,\|W_1^*\Lambda\| \big) .
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipkit.bounds.rounding import gamma, to_double, up
from lipkit.bounds.symbol_sup import symbol_error
from lipkit.bounds.verified import spectral_norm
from lipkit.conv import symbol_at
from lipkit.plain.slope_residual import ResizeChannels, SlopeResidual
from lipkit.protocol.guarding import guard
from lipkit.protocol.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.protocol.slopes import slope_restricted


@lipschitz_rule(ResizeChannels)
def _resize(module: ResizeChannels, input_shape: Shape | None) -> float:
    return 1.0


@export_rule(ResizeChannels)
def _export_resize(module: ResizeChannels, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return ResizeChannels(module.in_channels, module.out_channels)


def slope_residual_bound(w1: Tensor, w2: Tensor, multiplier: Tensor, entry_error: float = 0.0) -> Tensor:
    """The bound of the module docstring for matrices (or batches of them, one for each frequency).

    Args:
        w1: ``(..., h, n)``, float64 or complex128. w2: ``(..., n, h)``. multiplier: ``(h,)``, positive.
        entry_error: bound of the spectral norm of the rounding error already in w1 and w2, each.

    >>> w = torch.eye(2, dtype=torch.float64)
    >>> 1 <= slope_residual_bound(w, -2 * w, 2 * torch.ones(2)).item() < 1 + 1e-9
    True
    """
    lam = to_double(multiplier)
    largest = float(lam.max())
    forward = spectral_norm(w1) + entry_error
    scaled = spectral_norm(lam.sqrt()[:, None] * w1) + math.sqrt(largest) * (entry_error + float(forward) * gamma(4))
    back = w1.mH * lam
    # Products and sums here carry one rounding per entry; the Frobenius norm turns that into a norm.
    rounding = gamma(4) * float(torch.linalg.matrix_norm(back).amax() + torch.linalg.matrix_norm(w2).amax())
    gap = spectral_norm(w2 + back) + rounding + entry_error * (1 + largest)
    s = up(scaled.square() / 2, 4).clamp_min(1.0)
    excess = (1 - 1 / s + gamma(4)).clamp_min(0) if float(s) > 1 else torch.zeros_like(s)
    return up(1 + forward * (gap + excess * (spectral_norm(back) + rounding + largest * entry_error)), 12)


def _convolution_matrices(layer: nn.Conv2d, shape: Shape) -> tuple[Tensor, float] | None:
    """Matrices of a circular 'same' convolution at the frequencies of the image, and their rounding error."""
    plain = layer.padding == "same" and layer.padding_mode == "circular" and layer.groups == 1
    if not plain or tuple(layer.stride) != (1, 1) or tuple(layer.dilation) != (1, 1) or len(shape) != 3:
        return None
    _, h, w = shape
    if h < layer.kernel_size[0] or w < layer.kernel_size[1]:
        return None
    kernel = to_double(layer.weight)
    f1 = torch.arange(h).repeat_interleave(w // 2 + 1)
    f2 = torch.arange(w // 2 + 1).repeat(h)
    return symbol_at(kernel, f1, f2, h, w), float(symbol_error(kernel))


@lipschitz_rule(SlopeResidual)
def _slope_residual(module: SlopeResidual, input_shape: Shape | None) -> Tensor:
    """The smaller of what the multiplier proves and 1 + the product of the three constants."""
    parts = (module.first, module.activation, module.second)
    for part in parts:
        guard(part)
    product = up(1 + torch.stack([lipschitz(part) for part in parts]).prod(), 5)
    lam, one, two = module.multiplier, module.first, module.second
    usable = slope_restricted(module.activation) and bool((torch.isfinite(lam) & (lam >= 0)).all())
    if not usable or not bool(product.isfinite()):
        return product
    if type(one) is nn.Linear and type(two) is nn.Linear and one.out_features == len(lam) == two.in_features:
        return torch.minimum(product, slope_residual_bound(to_double(one.weight), to_double(two.weight), lam))
    if type(one) is nn.Conv2d and type(two) is nn.Conv2d and input_shape and one.out_channels == len(lam):
        first, second = (_convolution_matrices(layer, input_shape) for layer in (one, two))
        if first is not None and second is not None:
            error = max(first[1], second[1])
            return torch.minimum(product, slope_residual_bound(first[0], second[0], lam, error))
    return product


@export_rule(SlopeResidual)
def _export_slope_residual(module: SlopeResidual, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    inner = output_shape(module.first, input_shape)
    parts = [
        export(part, shape)[0]
        for part, shape in ((module.first, input_shape), (module.activation, inner), (module.second, inner))
    ]
    return SlopeResidual(parts[0], parts[1], parts[2], module.multiplier)
