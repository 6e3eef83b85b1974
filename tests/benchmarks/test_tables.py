"""The studies of tables, masks and detectors in small: their attacks stay in the ball, their twins are the models."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.neural_network import MLPClassifier

import lipkit
from benchmarks import tables
from lipkit.certificates import auroc, dense

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_twin_is_the_model_and_the_attack_stays_in_the_ball() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    z = (X - X.mean(0)) / X.std(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MLPClassifier((8,), max_iter=5, random_state=0).fit(z, y)
    twin, x, label = tables.torch_twin(model), torch.from_numpy(z), torch.from_numpy(y)
    np.testing.assert_allclose(twin(x).softmax(1).numpy(), model.predict_proba(z), atol=1e-12)
    moved = tables.attacked(twin, x, label, 0.3)
    assert float((moved - x).norm(dim=1).max()) <= 0.3 * (1 + 1e-12)
    assert bool((tables.score(twin(moved), label) >= tables.score(twin(x), label)).all())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["breast_cancer", "diabetes"])
def test_one_split_has_every_figure(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = tables.coverage(name, 0, max_iter=10)
    assert [(row["eps"], row["alpha"]) for row in rows] == [(0.1, 0.05), (0.1, 0.1), (0.3, 0.05), (0.3, 0.1)]
    for row in rows:
        assert row["coverage"] > 1 - row["alpha"] - 0.1
        assert row["mlp_coverage"] <= row["mlp_clean_coverage"]
    assert json.loads(tables.written(tables.summary(rows)))["eps"] == pytest.approx(0.2)


@pytest.mark.parametrize("path", sorted((ROOT / "records/tables").glob("coverage-*.json")), ids=lambda p: p.stem)
def test_kept_sets_cover_under_attack(path: Path) -> None:
    for row in json.loads(path.read_text())["rows"]:
        mean, deviation = row["coverage"]
        assert mean >= 1 - row["alpha"] - 2 * deviation / 3, row


@pytest.mark.thorough
def test_scenes_are_segmented_with_a_bound_below_the_attack() -> None:
    program = example("segmentation")
    x, y = program.scenes(lipkit.data.load("digits").test, 4, 0)
    assert x.shape == (4, 3, 16, 16)
    assert 0.2 < float(y.double().mean()) < 0.6
    network = program.trained((x, y), 20)
    found = dense(network, x, y, 0.2)
    left = program.attacked(lipkit.modules.storage.float64_copy(network), x.double(), y, 0.2, 5)
    assert bool((left >= found.worst).all())


@pytest.mark.thorough
def test_a_detector_meets_no_stranger() -> None:
    program = example("one_class")
    x = torch.rand(10, 1, 28, 28)
    made = program.strangers(x, torch.Generator().manual_seed(0))
    torch.testing.assert_close(made[0, 0], torch.rot90(x[0, 0]))
    assert made.shape == x.shape
    network = program.detector(x, 1)
    assert auroc(network, x, made, 0.1).worst_auroc <= auroc(network, x, made, 0.0).auroc
