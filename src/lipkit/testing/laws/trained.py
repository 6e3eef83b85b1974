"""Law 10: no optimiser step, however large, breaks a bound, and neither does the work that a layer wants after it."""

from __future__ import annotations

import torch

from lipkit.layers import after_step
from lipkit.testing.case import Case, require
from lipkit.testing.laws.sound import check_bounds

STEPS, RATE = 5, 1.0


def trained(case: Case) -> dict[str, float]:
    """Law 10: law 1 after Adam steps of rate 1 that push the outputs away from zero, without and with `after_step`."""
    layer = case.layer()
    if any(p.requires_grad for p in layer.parameters()):
        optimiser = torch.optim.Adam(layer.parameters(), lr=RATE)
        for step in range(STEPS):
            optimiser.zero_grad()
            y = layer(case.x(extra=37 + step))
            (-y.square().mean() + y.mean()).backward()
            optimiser.step()
        broken = [name for name, p in layer.named_parameters() if not bool(torch.isfinite(p).all())]
        require(
            not broken, f"expected finite parameters after {STEPS} Adam steps of rate {RATE}, got others in {broken}"
        )
    before = {**check_bounds(layer, case, case.shape), **check_bounds(layer.eval(), case, case.shape)}
    if not after_step(layer, case.shape):
        return before
    finished = check_bounds(layer, case, case.shape)
    return {name: max(value, finished[name]) for name, value in before.items()}
