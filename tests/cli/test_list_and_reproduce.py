from __future__ import annotations

import statistics

import pytest

from lipkit.cli import reproduce as module
from lipkit.cli import tables
from lipkit.cli.main import main
from lipkit.cli.tables import TABLES, Row, Table
from lipkit.data import DATASETS
from lipkit.layers.families import FAMILIES
from lipkit.models import MODELS
from lipkit.report import read_record
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
                known = ("clean", "certified", "pgd") if recipe.task == "classification" else ("tightness", "test_mse")
                assert name.partition("(")[0] in known, name
            assert recipe.train.epochs > 0


def test_a_table_is_trained_once_and_set_beside_the_paper(monkeypatch, tmp_path, capsys):
    table = Table(
        "Paper, table 1",
        "a test",
        (Row("small", "digits_cayley", ("train.lr=0.05",), {"clean": 0.9, "certified(72/255)": 0.8}),),
        seeds=2,
    )
    monkeypatch.setitem(tables.TABLES, "t1", table)
    quick = [
        "data.limit=60", "train.epochs=1", "train.accelerator=cpu", "certify.eps=36/255", "certify.attack_samples=8",
        "certify.attack_steps=2",
    ]  # fmt: skip
    assert main(["reproduce", "t1", *quick, "--workers", "1", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    found = [read_record(path) for path in sorted(tmp_path.rglob("record.json"))]
    assert sorted(record.seed for record in found) == [0, 1]
    assert {record.recipe["train"]["lr"] for record in found} == {0.05}
    mean = statistics.fmean(record.clean.value for record in found)
    shown = {line.split()[1]: line for line in captured.out.splitlines() if line.startswith("small")}
    for part in ("90.00 %", f"{100 * mean:.2f} %", f"{100 * (mean - 0.9):+.2f} %"):
        assert part in shown["clean"]
    assert "n/a" in shown["certified(72/255)"]
    assert captured.err.count("epoch 1/1") == 2

    assert main(["reproduce", "t1", *quick, "--workers", "1", "--out", str(tmp_path)]) == 0
    again = capsys.readouterr()
    assert again.out == captured.out
    assert "epoch 1/1" not in again.err


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
