"""Law 7: no cache outlives a change of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lipkit.testing.case import Case, distance, forward, require, require_same


def _optimiser_step(case: Case, layer: nn.Module) -> None:
    layer(case.x()).square().mean().backward()
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    with case.random(17):
        for p in layer.parameters():
            # Whatever the loss says: every parameter moves, by about half of its size.
            p.grad = torch.randn(p.shape, dtype=p.dtype).to(p.device) * (p.detach().square().mean().sqrt() + 0.1)
    optimiser.step()
    optimiser.zero_grad()


def _load(case: Case, layer: nn.Module) -> None:
    layer.load_state_dict(case.moved(case.layer(extra=19), extra=19).state_dict())


def _in_place(case: Case, layer: nn.Module) -> None:
    case.moved(layer, extra=23)


def _data(case: Case, layer: nn.Module) -> None:
    for p, q in zip(layer.parameters(), case.moved(case.layer(extra=29), extra=29).parameters(), strict=True):
        p.data = q.data.clone()


CHANGES: dict[str, Callable[[Case, nn.Module], None]] = {
    "an optimiser step": _optimiser_step,
    "load_state_dict": _load,
    "an in-place edit": _in_place,
    "an assignment of .data": _data,
}


def never_stale(case: Case) -> dict[str, float]:
    """Law 7: after each change the output is that of a new layer with the same state, in both modes."""
    x, eps = case.x(), case.eps()
    worst = 0.0
    for training in (True, False):
        for what, change in CHANGES.items():
            layer = case.moved(case.layer()).train(training)
            if not any(p.requires_grad for p in layer.parameters()):
                return {"difference": 0.0}
            before = forward(layer, x)
            change(case, layer)
            after = forward(layer, x)
            place = f"output after {what} (training={training})"
            require(distance(before, after) > eps, f"{place}: expected one that follows the change, got the old one")
            fresh = case.layer(extra=7).train(training)
            fresh.load_state_dict(layer.state_dict())
            worst = max(worst, require_same(after, forward(fresh, x), eps, f"{place} against a new layer"))
    return {"difference": worst}
