"""Two small runs to look at, trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lipkit.experiments import run as pipeline
from lipkit.experiments.build import load_data
from lipkit.experiments.recipe import load_recipe
from lipkit.explorer import ExploredRun, open_runs


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("explored")
    limits = ["train.epochs=4", "data.limit=400", "train.evaluate_every=9"]
    made = []
    for name, seed in (("first", 0), ("<img src=x onerror=alert(1)>", 1)):
        recipe = load_recipe(
            "digits_cayley",
            [*limits, "certify.attack_steps=2", "certify.attack_samples=8", f"train.seed={seed}"],
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lipkit.report.plots.both", lambda draw, name: "")  # most of a report's time
            assert pipeline.train(recipe, folder=base / name) is not None
        made.append(base / name)
    return made


@pytest.fixture(scope="session")
def runs(folders: list[Path]) -> list[ExploredRun]:
    opened = []
    for folder in folders:
        data = load_data(pipeline.read_recipe(folder))
        opened.append((folder, data.test, data.classes))
    return open_runs(opened)
