"""The study of true norms on a few layers of each kind."""

from __future__ import annotations

import pytest
from benchmarks.true_norms import KINDS, measured


@pytest.mark.thorough
def test_no_norm_is_above_one_and_exact_ones_are_reached() -> None:
    found = measured(2 * len(KINDS), seed=1)
    assert all(row["layers"] == 2 and row["own_max"] <= 1 for row in found.values())
    assert min(found[kind]["own_min"] for kind in ("circular, of one size", "dense")) >= 0.98
    assert max(row["torch_max"] for row in found.values()) > 1.3
