r"""Attention as a gradient step, so that it never expands: :math:`y = x - s\, A^\top F(A x + c)` for every token.

Let F be the gradient of a convex function, with Lipschitz constant :math:`\ell`. Its Jacobian H is symmetric with
:math:`0 \preceq H \preceq \ell I`, so the Jacobian :math:`I - s A^\top H A` of y has its eigenvalues in
:math:`[1 - s \ell \|A\|^2, 1]`. The constant of y is therefore :math:`\max(1, s \ell \|A\|^2 - 1)`, which is 1 for all
:math:`s \le 2 / (\ell \|A\|^2)`. Softmax has :math:`\ell = \tfrac12`, `attraction` has :math:`\ell = 1`
(`docs/mathematics/attention.md`, with sources).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.matrices import check_positive
from lipkit.linalg.precision import autocast_off
from lipkit.modules.activations import LIBRARY, slope_restricted
from lipkit.modules.dense import Affine, linear
from lipkit.modules.graph import Add, Graph
from lipkit.modules.machine import local_error, proportional
from lipkit.modules.plain import COUNT, Plain, RoundingError, Shape, Stored, add_plain, submodule, within_one
from lipkit.modules.registry import export_parts, lipschitz, output_shape
from lipkit.proof.roundoff import Arithmetic, grow, to_double, up


class _Distances(torch.autograd.Function):
    """Squared distances, differentiated by products: torch.cdist's is wrong under vmap, and not differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return torch.cdist(u, u, compute_mode="donot_use_mm_for_euclid_dist").square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (u,), both = ctx.saved_tensors, g + g.mT
        with autocast_off(u):
            return 2 * (both.sum(-1, keepdim=True) * u - both @ u)  # sum over j of (g_ij + g_ji) (u_i - u_j)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        own, cross = (u * t).sum(-1), u @ t.mT
        return 2 * (own[..., :, None] + own[..., None, :] - cross - cross.mT)


def distances(u: Tensor) -> Tensor:
    """Squared distances (..., n, n) between tokens (..., n, e), computed from differences: products would cancel."""
    if torch.compiler.is_compiling():  # other runtimes have no cdist
        return (u[..., :, None, :] - u[..., None, :, :]).square().sum(-1)
    return _Distances.apply(u)


def attraction(u: Tensor, heads: int) -> Tensor:
    r""":math:`\frac1n \sum_j (u_i - u_j) / \sqrt{1 + |u_i - u_j|^2}` for tokens u (..., n, heads e), in each head."""
    parts = u.unflatten(-1, (heads, -1)).movedim(-2, -3)  # (..., heads, n, e)
    weights = (1 + distances(parts)).rsqrt()
    moved = parts * weights.mean(-1, keepdim=True) - weights @ parts / u.shape[-2]
    return moved.movedim(-3, -2).flatten(-2)


class Attraction(nn.Module):
    """:func:`attraction` as a module: 1-Lipschitz, the gradient of a convex function, all values in (-1, 1).

    Raises:
        OptionError: no head. ShapeError: an input that is not (B, ..., n, heads * e).

    >>> Attraction(2)(torch.ones(1, 3, 4)).abs().max().item()
    0.0
    """

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        check_positive(heads=heads)
        self.heads = heads

    def forward(self, u: Tensor) -> Tensor:
        if u.ndim < 3 or u.shape[-1] % self.heads:
            raise ShapeError(f"Attraction: expected (B, n, features), a multiple of {self.heads}, got {tuple(u.shape)}")
        return attraction(u, self.heads)


class GradientStep(nn.Module):
    r"""``y = x - step * A^T force(A x + c)`` on the last dimension.

    Args:
        first: A and c.
        force: keeps the size of its input, with constant :math:`\ell`. If it is the gradient of a convex function
            (`Attraction`, ``nn.Softmax``, an activation of slope in [0, 1]) and s >= 0, the constant is :math:`\max(1,
            s \ell \|A\|^2 - 1)`, proved from stored numbers; otherwise :math:`1 + |s| \ell \|A\|^2`.
        step: s, 0-d.

    Raises:
        OptionError: ``first`` is not an ``nn.Linear``. ShapeError: ``step`` is not 0-d.

    >>> step = GradientStep(nn.Linear(1, 1), nn.Softmax(-1), torch.tensor(0.0))
    >>> step(torch.ones(1, 1)).item(), lipschitz(step).item()
    (1.0, 1.0)
    """

    step: Tensor

    def __init__(self, first: nn.Linear, force: nn.Module, step: Tensor) -> None:
        super().__init__()
        if type(first) is not nn.Linear:
            raise OptionError(f"GradientStep: expected an nn.Linear first, got {type(first).__name__}")
        if step.ndim:
            raise ShapeError(f"GradientStep: expected a 0-d step, got shape {tuple(step.shape)}")
        self.first, self.force = first, force
        self.register_buffer("step", step.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x - self.step * (self.force(self.first(x)) @ self.first.weight)


def _gradient_step(module: GradientStep, input_shape: Shape | None) -> Tensor:
    inner = None if input_shape is None else output_shape(module.first, input_shape)
    norm, slope, step = lipschitz(module.first, input_shape), lipschitz(module.force, inner), to_double(module.step)
    curvature = up(step.abs() * slope * norm.square(), 4) + 2.0**-1000  # covers products below the normal range
    convex = type(module.force) in (nn.Softmax, Attraction) or slope_restricted(module.force)
    return up(curvature - 1, 1).clamp_min(1.0) if convex and bool(step >= 0) else up(1 + curvature, 1)


def _export_gradient_step(module: GradientStep, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    first, force = export_parts((module.first, module.force), input_shape)
    return GradientStep(first, force, module.step)  # type: ignore[arg-type]


def _gradient_step_error(module: GradientStep, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    weight, step = module.first.weight.detach(), module.step.detach().reshape(1)
    parts = [module.first, module.force, linear(weight.mT), Affine(-step, torch.zeros_like(step)), Add(1, 1)]
    return local_error(Graph(parts, [[0], [1], [2], [3], [0, 4]]), input_shape, arithmetic)


def _attraction_error(module: Attraction, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    tokens, features = input_shape[-2:]
    # A weight is made of differences, their squares, a sum of e squares and the root of 1 + it, all positive: its
    # relative error is at most gamma. |W/n| <= 1 in the l2 norm, so each of the two products adds gamma |u|.
    gamma = arithmetic.gamma(2 * features + 2 * tokens + LIBRARY + 24)
    floor = math.sqrt(math.prod(input_shape)) * 8 * (features + tokens) * arithmetic.tiny
    # Squares of differences must not overflow: for inputs that large, this line puts the peak out of range.
    rising = grow(arithmetic.room / (math.sqrt(arithmetic.largest) / 16))
    return proportional(2 * gamma, floor, rising, 2.0)


add_plain(Plain(Attraction, 1.0, _attraction_error, {"heads": COUNT}, within_one, dims=(2, 9)))
_parts = {"first": submodule, "force": submodule}
_stored = Stored(_parts, make=lambda first, force: GradientStep(first, force, torch.zeros(())))
add_plain(Plain(GradientStep, _gradient_step, _gradient_step_error, _stored, export=_export_gradient_step))
