"""A recipe on other data than its own: a few samples, one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lipkit.experiments import run
from lipkit.experiments.recipe import load_recipe


@pytest.fixture
def one_recipe(tmp_path: Path, no_plots: None) -> Callable[..., int]:
    """Train and certify a small PatchNet by a packaged recipe on other data; returns the classes of its record."""
    small = ["model.options.stages=[[8, 1]]", "model.options.narrow=null", "model.options.dense=[16]"]
    short = ["train.budget=4 images", "train.batch_size=2", "certify.attack_samples=1", "certify.attack_steps=2"]

    def trained(recipe: str, data: str, root: Path | None = None, *changes: str) -> int:
        chosen = [f"data={data}", *([f"data.root={root}"] if root else []), *small, *short, *changes]
        outcome = run.train(load_recipe(recipe, chosen), out=tmp_path / "runs")
        assert outcome is not None
        assert outcome.record.seen is not None
        assert outcome.record.seen.samples == 4
        return len(outcome.record.data.classes)

    return trained
