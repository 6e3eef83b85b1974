"""Law 8: an option that is accepted and ignored is a defect."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lipkit.errors import LipkitError
from lipkit.modules import lipschitz
from lipkit.testing.case import Case, forward, require


def _observe(case: Case, option: str, value: Any) -> list[Tensor] | None:
    """Outputs and claims in both modes at one seed, or None if the value is refused."""
    try:
        # Moved: the initial weights may be special (already orthogonal, say), so that options agree there.
        layer = case.moved(case.layer(**{option: value}))
        x = case.x(dtype=value if isinstance(value, torch.dtype) else None)
        seen = []
        for training in (True, False):
            layer.train(training)
            seen += [forward(layer, x), lipschitz(layer, case.shape).detach()]
    except LipkitError:
        return None
    return seen


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(s.dtype == t.dtype and torch.equal(s, t) for s, t in zip(a, b, strict=True))


def options_act(case: Case) -> dict[str, float]:
    """Law 8: any two values of an option differ in an output or a claim, to the last bit, or one is refused."""
    refused = 0
    for option, values in case.options.items():
        require(len(values) > 1, f"option {option}: expected at least two values to compare, got {values}")
        seen = [(value, _observe(case, option, value)) for value in values]
        accepted = [(value, found) for value, found in seen if found is not None]
        refused += len(seen) - len(accepted)
        require(bool(accepted), f"option {option}: expected at least one value that is accepted, got none of {values}")
        for (v, a), (w, b) in combinations(accepted, 2):
            require(
                not _same(a, b),
                f"option {option}: expected {v!r} and {w!r} to act differently (or to be refused), "
                "got the same outputs and claims",
            )
    return {"options": float(len(case.options)), "refused": float(refused)}
