"""Law 1: true norm <= bound computed from the exported numbers <= claimed bound."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from lipkit.modules import Shape, export, lipschitz
from lipkit.testing.case import Case, require, states
from lipkit.testing.reference import operators, singular_values, steepest_secant
from lipkit.testing.tolerance import tolerance


def true_norm(layer: nn.Module, case: Case, shape: Shape, dtype: torch.dtype) -> float:
    """The norm of the matrix of an affine layer, or of the Jacobians of another one; never less than a secant."""
    x = case.x(shape, batch=4, dtype=dtype)
    return max(float(singular_values(operators(layer, x[:2])).max()), steepest_secant(layer, x))


def check_bounds(layer: nn.Module, case: Case, shape: Shape) -> dict[str, float]:
    """The chain of inequalities for a layer as it is now, at one input shape."""
    eps = case.eps(shape)
    claimed = float(lipschitz(layer, shape).detach())
    require(math.isfinite(claimed), f"input {shape}: expected a finite lipschitz(layer), got {claimed}")
    reached = true_norm(layer, case, shape, case.dtype)
    require(
        reached <= claimed * (1 + eps),
        f"input {shape}: expected a norm of at most lipschitz(layer) = {claimed:.9g} (training={layer.training}), "
        f"got {reached:.9g}",
    )
    network = export(layer, shape)
    proved = float(lipschitz(network))
    # The proof adds its own rounding allowance, of the order n^2 u times the condition of a diagonal scaling.
    proof = tolerance(max(8, math.prod(shape)) ** 2, torch.float64, c=256.0)
    require(
        proved <= claimed * (1 + case.slack + eps + proof),
        f"input {shape}: expected lipschitz(export(layer)) of at most lipschitz(layer) = {claimed:.12g}, "
        f"got {proved / claimed - 1:.3g} (relative) above it",
    )
    exported = true_norm(network, case, shape, case.dtype)
    require(
        exported <= proved * (1 + eps),
        f"input {shape}: expected the exported layer to have a norm of at most its bound {proved:.9g}, "
        f"got {exported:.9g}",
    )
    # The same numbers in float64 arithmetic: the bound must hold to float64 rounding, whatever dtype they had.
    double = copy.deepcopy(network).double()
    exact, bound = true_norm(double, case, shape, torch.float64), float(lipschitz(double))
    allowed = tolerance(max(8, math.prod(shape)), torch.float64)
    require(
        exact <= bound * (1 + allowed),
        f"input {shape}: expected the exported layer in float64 to have a norm of at most its bound {bound:.17g}, "
        f"got {exact:.17g}",
    )
    return {"norm": reached, "claimed": claimed, "proved": proved, "exported": exported}


def sound(case: Case) -> dict[str, float]:
    """Law 1, at every input shape: a new layer in training mode and one with moved weights in evaluation mode."""
    measured: dict[str, float] = {}
    for shape in case.input_shapes:
        for layer in states(case):
            found = check_bounds(layer, case, shape)
            measured = {key: max(value, measured.get(key, 0.0)) for key, value in found.items()}
            if case.claim != "none":
                limit = case.gamma * (1 + case.slack) * (1 + case.eps(shape))
                require(
                    found["claimed"] <= limit,
                    f"input {shape}: expected lipschitz(layer) of at most the claimed {limit:.9g} "
                    f"(training={layer.training}), got {found['claimed']:.9g}",
                )
    return measured
