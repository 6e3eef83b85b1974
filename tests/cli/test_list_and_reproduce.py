from __future__ import annotations

from pathlib import Path

import pytest

from lipkit.cli import pipeline, tables
from lipkit.cli import reproduce as module
from lipkit.cli.main import main
from lipkit.cli.tables import TABLES, Row, Table
from lipkit.data import DATASETS
from lipkit.layers.families import FAMILIES
from lipkit.models import MODELS
from lipkit.training.recipe import load_recipe, names


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("layers", FAMILIES), ("models", MODELS), ("datasets", DATASETS), ("recipes", names())],
)
def test_list_names_everything(kind, expected, capsys):
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line for line in lines}
    for name in expected:
        assert len(found[name].split()) > 2, found[name]


def test_every_table_names_recipes_and_figures_that_exist():
    for table in TABLES.values():
        for row in table.rows:
            recipe = load_recipe(row.recipe, list(row.overrides))
            for name, value in row.published.items():
                assert value > 0
                assert name == "clean" or name.partition("(")[0] in ("certified", "pgd"), name
            assert recipe.train.epochs > 0


def test_a_table_is_trained_row_by_row_and_set_beside_the_paper(monkeypatch, tmp_path, capsys):
    table = Table("Paper, table 1", "a test", (
        Row("small", "digits_cayley", ("train.lr=0.5",), {"clean": 0.9, "certified(36/255)": 0.8}),
        Row("other", "mnist_cayley"),
    ), seeds=2)  # fmt: skip
    monkeypatch.setitem(tables.TABLES, "t1", table)
    seen = []

    def train(recipe, *, out, display):
        seen.append((recipe.name, recipe.train.seed, recipe.train.lr, recipe.train.epochs, recipe.data.root, out))
        return pipeline.Outcome(Path(out), {"clean": 0.5 + 0.1 * recipe.train.seed, "lipschitz": 1.0}, None)

    monkeypatch.setattr(pipeline, "train", train)
    assert main(["reproduce", "t1", "train.epochs=1", "--root", str(tmp_path), "--out", "o"]) == 0
    root = str(tmp_path.resolve())
    assert seen == [
        (name, seed, lr, 1, root, Path("o"))
        for name, lr in (("digits_cayley", 0.5), ("mnist_cayley", load_recipe("mnist_cayley").train.lr))
        for seed in (0, 1)
    ]
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["small", "clean", "0.9000", "0.5500", "0.0707"] in shown
    assert ["small", "certified(36/255)", "0.8000", "n/a"] in shown
    assert ["other", "lipschitz", "1.0000", "0.0000"] in shown


def test_an_unknown_table_names_the_closest(capsys):
    assert main(["reproduce", "cayley_kwlarg"]) == 2
    error = capsys.readouterr().err
    assert "unknown table 'cayley_kwlarg', did you mean 'cayley_kwlarge'?; known: cayley_kwlarge (" in error


def test_an_empty_registry_says_so(monkeypatch, capsys):
    monkeypatch.setattr(tables, "TABLES", {})
    assert main(["reproduce", "x"]) == 2
    assert "known: none yet" in capsys.readouterr().err


def test_measured_means_without_runs():
    assert module.compare(Row("a", "digits_cayley"), []) == []
