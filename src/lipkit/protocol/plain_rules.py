"""Rules of the plain modules: every bound is computed from the stored numbers, in float64."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from lipkit.bounds.rounding import gamma, multiply_up, to_double, up
from lipkit.bounds.sandwich import sandwich_gain
from lipkit.bounds.symbol_sup import symbol_sup
from lipkit.bounds.verified import spectral_norm
from lipkit.conv.kernel_exponential import adjoint, taylor_norm
from lipkit.errors import NoRuleError
from lipkit.plain import (
    Affine,
    ConvexResidual,
    FourierConv2d,
    GroupSort,
    MaxMin,
    PhaseConv2d,
    SandwichBlock,
    TaylorConv2d,
)
from lipkit.plain.windows import windows_overlap
from lipkit.protocol.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.protocol.slopes import slope_restricted
from lipkit.protocol.torch_rules import chain_constant


@lipschitz_rule(MaxMin, GroupSort)
def _sorting(module: nn.Module, input_shape: Shape | None) -> float:
    return 1.0


@lipschitz_rule(Affine)
def _affine(module: Affine, input_shape: Shape | None) -> Tensor:
    return to_double(module.scale).abs().amax()


def refuse_inplace(module: nn.Module) -> None:
    """Raise ``NoRuleError`` if a branch can overwrite the input that the other branch reads."""
    for name, child in module.named_modules():
        if getattr(child, "inplace", False):
            raise NoRuleError(
                f"{type(module).__name__}: expected branches that leave their input as it is, got the in-place "
                f"{type(child).__name__} at {name!r}: set its inplace=False"
            )


@lipschitz_rule(ConvexResidual)
def _convex_residual(module: ConvexResidual, input_shape: Shape | None) -> Tensor:
    refuse_inplace(module)
    share = to_double(module.share)
    # As stored and evaluated the two weights are `share` and `1 - share`; negative ones count by absolute value.
    body, shortcut = (lipschitz(branch, input_shape) for branch in (module.body, module.shortcut))
    return up(multiply_up(share.abs(), body) + multiply_up((1 - share).abs(), shortcut), 4)


def transform_norm(matrices: list[Tensor]) -> float:
    """Proved bound of the norm of the stored transform (and of its transpose), butterfly included."""
    norm = 1.0
    for matrix in matrices:
        t = to_double(matrix)
        n = t.shape[0]
        # ||T||^2 = ||T T^*|| <= its largest absolute row sum.
        row_sum = float((t @ t.mT).abs().sum(1).amax()) + n * gamma(n + 2) * n
        norm *= math.sqrt(row_sum) * (1 + gamma(4))
    if len(matrices) > 1:
        # The butterfly multiplies by a rounded square root of one half.
        norm *= 1 + gamma(8)
    return norm * (1 + gamma(4))


@lipschitz_rule(FourierConv2d)
def _fourier(module: FourierConv2d, input_shape: Shape | None) -> Tensor:
    norms = [spectral_norm(module.real)]
    if len(module.pair):
        norms.append(spectral_norm(torch.complex(to_double(module.pair[:, 0]), to_double(module.pair[:, 1]))))
    return up(torch.stack(norms).amax() * transform_norm(module.matrices()) ** 2, 4)


@lipschitz_rule(PhaseConv2d)
def _phase(module: PhaseConv2d, input_shape: Shape | None) -> Tensor:
    norms = [spectral_norm(module.real)]
    if module.pair.numel():
        pair = to_double(module.pair)
        norms.append(spectral_norm(torch.complex(pair[:, 0], pair[:, 1]) if module.complex_pairs else pair))
    # Splitting into phase images moves pixels; a 1 x 1 kernel has no transform.
    norm = torch.stack(norms).amax()
    return norm if module.kernel_size == (1, 1) else up(norm * transform_norm(module.matrices()) ** 2, 4)


@lipschitz_rule(TaylorConv2d)
def _taylor(module: TaylorConv2d, input_shape: Shape | None) -> float:
    """|p_T(i theta)| over the angles that the skew part reaches, and what the symmetric part can add (none: 0)."""
    kernel = to_double(module.kernel)
    mirrored = adjoint(kernel)
    skew_part, rest = (kernel - mirrored) / 2, (kernel + mirrored) / 2
    # A grid four times finer than the kernel overestimates the angle by at most 17 %: enough where p_T is flat.
    points = 4 * (max(module.kernel_size) - 1) or None
    angle = float(symbol_sup(skew_part, points=points))
    error = 0.0
    if bool((rest != 0).any()):
        # The two parts were rounded: what is lost has a norm of at most sqrt(taps) times its Frobenius norm.
        lost = gamma(4) * math.sqrt(math.prod(module.kernel_size)) * float(kernel.abs().sum())
        error = float(symbol_sup(rest, points=points)) + lost
    return taylor_norm(angle, error, module.terms)


def _matrix(module: nn.Module) -> Tensor | None:
    """The matrix of a dense layer, or of a convolution whose windows do not overlap; None for any other module."""
    if type(module) is nn.Linear:
        return module.weight
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding in ((0, 0), "valid"):
        return None if windows_overlap(module) else module.weight.flatten(1)
    return None


@lipschitz_rule(SandwichBlock)
def _sandwich(module: SandwichBlock, input_shape: Shape | None) -> Tensor:
    """The smaller of what the multiplier proves and the product of the three constants (which refuses hooks)."""
    parts = (module.first, module.activation, module.second)
    product = chain_constant(parts, None)
    if not slope_restricted(module.activation) or not bool(product.isfinite()):
        return product
    multiplier, one, two = module.multiplier, module.first, module.second
    first, second = _matrix(one), _matrix(two)
    if first is not None and second is not None and len(first) == len(multiplier) == second.shape[1]:
        return torch.minimum(product, sandwich_gain(first, second, multiplier))
    if type(one) is FourierConv2d and type(two) is FourierConv2d and one.out_channels == len(multiplier):
        transforms = one.matrices()
        if len(transforms) == two.transforms and all(map(torch.equal, transforms, two.matrices())):
            size = transform_norm(transforms) ** 2 * (1 + gamma(2))
            gains = [sandwich_gain(one.real, two.real, multiplier, size)]
            if len(one.pair):
                pairs = [torch.complex(*to_double(layer.pair).unbind(1)) for layer in (one, two)]
                gains.append(sandwich_gain(pairs[0], pairs[1], multiplier, size))
            return torch.minimum(product, torch.stack(gains).amax())
    return product


@export_rule(SandwichBlock)
def _export_sandwich(module: SandwichBlock, input_shape: Shape) -> nn.Module:
    parts: list[nn.Module] = []
    for part in (module.first, module.activation, module.second):
        plain = export(part, input_shape)
        input_shape = output_shape(plain, input_shape)
        # Unwrapped: the bound needs the two linear maps themselves.
        parts.append(plain[0] if len(plain) == 1 else plain)
    first, activation, second = parts
    return SandwichBlock(first, activation, second, module.multiplier)


@export_rule(Affine, FourierConv2d, GroupSort, MaxMin, PhaseConv2d, TaylorConv2d)
def _already_plain(module: nn.Module, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return copy.deepcopy(module)


@export_rule(ConvexResidual)
def _export_residual(module: ConvexResidual, input_shape: Shape) -> nn.Module:
    refuse_inplace(module)
    output_shape(module, input_shape)
    return ConvexResidual(export(module.body, input_shape), module.share, export(module.shortcut, input_shape))
