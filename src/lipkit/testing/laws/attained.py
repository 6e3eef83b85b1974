"""Law 2: the constant is reached, so a bound or a target gain is not wasted."""

from __future__ import annotations

import torch

from lipkit.modules import lipschitz
from lipkit.testing.case import Case, require, states
from lipkit.testing.reference import operators, singular_values


def attained(case: Case) -> dict[str, float]:
    """Law 2, at every input shape: all singular values for an orthogonal layer, the largest for others."""
    smallest, largest = float("inf"), 0.0
    for shape in case.input_shapes:
        for layer in states(case):
            claimed = float(lipschitz(layer, shape).detach())
            x = case.x(shape, batch=4)
            # Far from the origin no bias decides which side of a kink every unit is on.
            values = singular_values(operators(layer, torch.cat((x[:2], 30 * x[2:]))))
            low, high = float(values.min()), float(values.max())
            smallest, largest = min(smallest, low), max(largest, high)
            if case.claim == "orthogonal":
                # What a declared truncation adds to the bound it may also take from below.
                allowed = case.eps(shape) + min(max(claimed / case.gamma - 1, 0.0), case.slack)
                require(
                    case.gamma * (1 - allowed) <= low and high <= case.gamma * (1 + allowed),
                    f"input {shape}: expected every singular value in {case.gamma:.6g} * (1 +- {allowed:.2g}) "
                    f"(training={layer.training}), got {low:.9g} to {high:.9g}",
                )
            else:
                aim = case.attained * (case.gamma if case.claim == "contraction" else claimed) * (1 - case.eps(shape))
                require(
                    high >= aim,
                    f"input {shape}: expected a largest singular value of at least {aim:.6g}, "
                    f"{case.attained:.3g} of the bound (training={layer.training}), got {high:.9g}",
                )
    return {"smallest": smallest, "largest": largest}
