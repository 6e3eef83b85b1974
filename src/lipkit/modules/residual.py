"""Branches that read one input and are joined: sums, convex residuals, residuals of slope-restricted layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipkit.bounds.symbol_sup import symbol_error
from lipkit.conv.symbol import symbol
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.activations import slope_restricted
from lipkit.modules.configuration import stored, submodule, submodules
from lipkit.modules.guarding import guard
from lipkit.modules.machine import (
    Local,
    Measure,
    Runner,
    entries,
    nothing,
    reach,
    rounding_rule,
    runner,
)
from lipkit.modules.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.modules.sandwich import _parts, stored_block
from lipkit.proof.arithmetic import Arithmetic, Line, flat, size
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import gamma, multiply_up, to_double, up


def refuse_inplace(module: nn.Module) -> None:
    """Raise ``NoRuleError`` if a branch can overwrite the input that the other branch reads."""
    for name, child in module.named_modules():
        if getattr(child, "inplace", False):
            raise NoRuleError(
                f"{type(module).__name__}: expected branches that leave their input as it is, got the in-place "
                f"{type(child).__name__} at {name!r}: set its inplace=False"
            )


class Sum(nn.Module):
    r"""``y = f_1(x) + ... + f_k(x)``.

    Its constant is the sum of those of its branches: a residual connection around a 1-Lipschitz body has 2
    (`lipkit.layers.Residual` keeps it at 1).

    Args:
        branches: one or more modules that end in the same shape; ``nn.Identity()`` is a skip connection.

    Raises:
        OptionError: no branch. ShapeError: branches that end in different shapes (one would be repeated).

    >>> import torch
    >>> Sum(nn.ReLU(), nn.Identity())(torch.tensor([[-2.0, 2.0]])).tolist()
    [[-2.0, 4.0]]
    """

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        if not branches or not all(isinstance(branch, nn.Module) for branch in branches):
            raise OptionError(f"Sum: expected one or more modules, got {[type(b).__name__ for b in branches]}")
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.branches[0](x)
        for branch in self.branches[1:]:
            y = branch(x)
            if y.shape != total.shape:
                raise ShapeError(
                    f"Sum: expected branches that end in one shape, got {tuple(total.shape)} and {tuple(y.shape)}"
                )
            total = total + y
        return total


@lipschitz_rule(Sum)
def _sum(module: Sum, input_shape: Shape | None) -> Tensor:
    guard(module.branches)
    refuse_inplace(module)
    parts = torch.stack([lipschitz(branch, input_shape) for branch in module.branches])
    return parts[0] if len(parts) == 1 else up(parts.sum(), len(parts))


@export_rule(Sum)
def _export_sum(module: Sum, input_shape: Shape) -> nn.Module:
    guard(module.branches)
    refuse_inplace(module)
    output_shape(module, input_shape)
    return Sum(*(export(branch, input_shape) for branch in module.branches))


class ConvexResidual(nn.Module):
    """``y = s f(x) + (1 - s) g(x)`` with a constant fraction s in [0, 1]; the shortcut g is the identity by default.

    Args:
        body: f.
        share: s, 0-d.
        shortcut: g, with the output shape of f.

    Raises:
        ShapeError: ``share`` is not 0-d, or body and shortcut end in different shapes (one would be repeated).

    >>> import torch
    >>> ConvexResidual(nn.Identity(), torch.tensor(0.25))(torch.ones(1, 2)).tolist()
    [[1.0, 1.0]]
    """

    share: Tensor

    def __init__(self, body: nn.Module, share: Tensor, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        if share.ndim:
            raise ShapeError(f"ConvexResidual: expected a 0-d share, got shape {tuple(share.shape)}")
        self.body = body
        self.shortcut = nn.Identity() if shortcut is None else shortcut
        self.register_buffer("share", share.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y, kept = self.body(x), self.shortcut(x)
        if y.shape != kept.shape:
            raise ShapeError(
                f"ConvexResidual: expected a body that ends in the shape of its shortcut {tuple(kept.shape)}, "
                f"got {tuple(y.shape)}"
            )
        return self.share * y + (1 - self.share) * kept


@lipschitz_rule(ConvexResidual)
def _convex_residual(module: ConvexResidual, input_shape: Shape | None) -> Tensor:
    refuse_inplace(module)
    share = to_double(module.share)
    # As stored and evaluated the two weights are `share` and `1 - share`; negative ones count by absolute value.
    body, shortcut = (lipschitz(branch, input_shape) for branch in (module.body, module.shortcut))
    return up(multiply_up(share.abs(), body) + multiply_up((1 - share).abs(), shortcut), 4)


@export_rule(ConvexResidual)
def _export_residual(module: ConvexResidual, input_shape: Shape) -> nn.Module:
    refuse_inplace(module)
    output_shape(module, input_shape)
    return ConvexResidual(export(module.body, input_shape), module.share, export(module.shortcut, input_shape))


class SlopeResidual(nn.Module):
    r"""``y = x + second(activation(first(x)))`` with a multiplier that proves its constant.

    With linear parts W1, W2 and an activation of slope in [0, 1], a positive diagonal :math:`\Lambda` with
    :math:`W_2 = -W_1^\top \Lambda` and :math:`\|\Lambda^{1/2} W_1\|^2 \le 2` proves that y is 1-Lipschitz.

    Args:
        first, second: both ``nn.Linear``, or both ``nn.Conv2d`` (circular, stride 1).
        activation: a scalar activation.
        multiplier: diagonal of Lambda, ``(hidden,)``.

    >>> import torch
    >>> zero = nn.Linear(2, 3), nn.Linear(3, 2, bias=False)
    >>> _ = [nn.init.zeros_(layer.weight) for layer in zero]
    >>> SlopeResidual(zero[0], nn.ReLU(), zero[1], torch.ones(3))(torch.ones(1, 2)).tolist()
    [[1.0, 1.0]]
    """

    multiplier: Tensor

    def __init__(self, first: nn.Module, activation: nn.Module, second: nn.Module, multiplier: Tensor) -> None:
        super().__init__()
        if multiplier.ndim != 1:
            raise ShapeError(f"multiplier: expected shape (hidden,), got {tuple(multiplier.shape)}")
        self.first, self.activation, self.second = first, activation, second
        self.register_buffer("multiplier", multiplier.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.activation(self.first(x)))
        if y.shape != x.shape:
            raise ShapeError(f"SlopeResidual: expected parts that keep shape {tuple(x.shape)}, got {tuple(y.shape)}")
        return x + y


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
    return symbol(kernel, h, w).flatten(0, 1), float(symbol_error(kernel))


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


def joined(
    branches: list[tuple[Runner, float]], operations: int, outputs: int, arithmetic: Arithmetic, lost: float = 0.0
) -> Measure:
    """Branches times factors, added up: that many chained operations on the way of each.

    Args:
        branches: walks, with the modulus of their factors.
        outputs: numbers in one output.
        lost: what a factor may be off by, absolutely.
    """
    rounding = arithmetic.gamma(operations)

    def measure(x: Tensor) -> Local:
        error = flat(nothing(x).at, 4 * operations * math.sqrt(outputs) * arithmetic.tiny)
        peak = Line(size(x), 1.0)
        total = nothing(x)
        for run, factor in branches:
            walk = run(x)
            reached = reach(walk)
            error = error.plus(walk.error.times(factor)).plus(reached.times(rounding * factor + lost))
            peak = peak.most(walk.peak)
            total = total.plus(reached.times(factor + lost))
        return Local(error, peak.most(total.times(2.0)))

    return measure


@rounding_rule(SlopeResidual)
def _slope_residual_error(module: SlopeResidual, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    identity = runner(nn.Identity(), input_shape, arithmetic)
    branches = [(identity, 1.0), (_parts(module, input_shape, arithmetic), 1.0)]
    return joined(branches, 1, entries(input_shape), arithmetic)


@rounding_rule(Sum)
def _sum_error(module: Sum, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    branches = [(runner(branch, input_shape, arithmetic), 1.0) for branch in module.branches]
    return joined(branches, len(branches), entries(output_shape(module, input_shape)), arithmetic)


@rounding_rule(ConvexResidual)
def _convex_residual_error(module: ConvexResidual, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    share = float(module.share)
    branches = [
        (runner(module.body, input_shape, arithmetic), abs(share)),
        (runner(module.shortcut, input_shape, arithmetic), abs(1 - share) * (1 + 2.0**-50)),
    ]
    # 1 - share: a rounded share is off by u |share|, and one below the normal range by all of it.
    lost = arithmetic.stored * arithmetic.unit * abs(share) + arithmetic.tiny
    run = joined(branches, 3, entries(output_shape(module, input_shape)), arithmetic, lost)

    def measure(x: Tensor) -> Local:
        local = run(x)
        return local._replace(peak=Line(local.peak.at + abs(share), local.peak.slope))

    return measure


stored(Sum, lambda m: {"modules": tuple(m.branches)}, lambda modules: Sum(*modules), modules=submodules)
stored(
    ConvexResidual,
    make=lambda body, shortcut: ConvexResidual(body, torch.zeros(()), shortcut),
    body=submodule,
    shortcut=submodule,
)

stored_block(SlopeResidual)
