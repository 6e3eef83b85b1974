"""The runs of a table: what is missing is trained, what was cut is resumed, the figures come from the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from lipkit import plain
from lipkit.cli import pipeline, tables
from lipkit.cli.main import main
from lipkit.cli.table_runs import plan
from lipkit.cli.tables import TABLES, Row, Table
from lipkit.data import Split
from lipkit.evaluation import evaluate_regression
from lipkit.report import read_record, write_record
from lipkit.report.record import from_regression

QUICK = (
    "model={name: mlp, options: {layer: cayley, hidden: [4], activation: relu}}",
    "train.epochs=2",
    "train.lr=0.03",
)


def save_record(folder: Path, tightness: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    network = plain.Network([nn.Linear(1, 1)], (1,))
    x = torch.linspace(-1, 1, 5)[:, None]
    evaluation = evaluate_regression(network, Split(x, network(x)), restarts=2, steps=2)
    search = {"restarts": 2, "steps": 2, "seed": 0}
    record = from_regression(evaluation, name=folder.name, data="line", search=search)
    write_record(record.model_copy(update={"tightness": tightness, "mse": 0.25}), folder / "record.json")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table(
        "Paper, table 1",
        "a test",
        (
            Row("Small net, gamma 1", "square_wave", QUICK, {"tightness": 0.9}),
            Row("other", "square_wave", (*QUICK, "train.lr=0.5")),
        ),
        seeds=2,
        smoke=("train.epochs=1",),
        also=("test_mse",),
    )
    monkeypatch.setitem(tables.TABLES, "t1", made)
    return made


def test_what_is_missing_is_trained_and_what_was_cut_is_resumed(table, monkeypatch, tmp_path, capsys):
    seen = []

    def train(recipe, *, folder=None, resume=None, display=None):
        seen.append((recipe.train.seed, recipe.train.lr, recipe.train.epochs, "resumed" if resume else "new"))
        save_record(folder or resume, 0.5 + 0.1 * recipe.train.seed)

    monkeypatch.setattr(pipeline, "train", train)
    arguments = ["reproduce", "t1", "train.epochs=3", "--workers", "1", "--out", str(tmp_path)]
    runs = plan(table, tmp_path / "t1", ["train.epochs=3"])
    save_record(runs[0].folder, 0.5)
    runs[1].folder.mkdir(parents=True)
    for name in ("recipe.yaml", "settings.json"):
        (runs[1].folder / name).write_text("{}")
    runs[2].folder.mkdir(parents=True)
    (runs[2].folder / "recipe.yaml").write_text("{}")  # cut before training began: nothing to resume
    assert main(arguments) == 0
    assert seen == [(1, 0.03, 3, "resumed"), (0, 0.5, 3, "new"), (1, 0.5, 3, "new")]
    captured = capsys.readouterr()
    assert "1 of 4 runs are there, 3 to train" in captured.err
    shown = [re.split(r"  +", line) for line in captured.out.splitlines()]
    assert ["Small net, gamma 1", "tightness", "2", "90.00 %", "55.00 %", "7.07 %", "-35.00 %", "0.25"] in shown
    assert ["other", "test_mse", "2", "0.25", "0", "0.25"] in shown

    seen.clear()
    save_record(runs[0].folder, 0.7)
    assert main(arguments) == 0
    assert not seen
    assert "65.00 %" in capsys.readouterr().out


def test_a_changed_recipe_never_passes_for_the_one_before(table, tmp_path):
    folders = [run.folder for change in ([], ["train.lr=0.1"]) for run in plan(table, tmp_path, change, 1)]
    assert len(set(folders)) == 4
    assert folders[0].name.startswith("small-net-gamma-1-seed0-")


def test_a_smoke_run_in_two_processes(table, tmp_path, capsys):
    change = ["certify.search_restarts=2", "certify.search_steps=2", "train.evaluate_every=9"]
    arguments = ["reproduce", "t1", *change, "--scale", "smoke", "--workers", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "2/2  " in captured.err
    folders = sorted(path.name for path in (tmp_path / "t1").iterdir())
    assert len(folders) == 2
    assert all((tmp_path / "t1" / name / "report.html").is_file() for name in folders)
    record = read_record(tmp_path / "t1" / folders[1])
    assert f"{100 * record.tightness:.2f} %" in captured.out
    assert record.recipe["train"]["epochs"] == 1


def test_a_failing_worker_stops_the_table_with_its_error(table, tmp_path, capsys):
    arguments = ["reproduce", "t1", "data=npz:/nowhere.npz", "--workers", "2", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert "nowhere.npz" in capsys.readouterr().err


def test_the_square_wave_table_is_the_papers():
    table = TABLES["square_wave"]
    runs = plan(table, Path("runs"))
    assert len(runs) == 36
    recipes = [run.recipe for run in runs]
    # One fixed recipe: nothing but the model and the seed differs.
    assert (
        len({(r.train.model_copy(update={"seed": 0}).model_dump_json(), r.certify.model_dump_json()) for r in recipes})
        == 1
    )
    assert all(
        (r.train.epochs, r.train.batch_size, r.loss.name, r.task) == (200, 50, "mse", "regression") for r in recipes
    )
    assert {r.model.options["gamma"] for r in recipes} == {1, 5, 10}
    widths = {run.row.label.split(",")[0]: run.recipe.model.options["hidden"] for run in runs}
    assert widths == {"AOL": [128] * 8, "orthogonal": [128] * 8, "SLL": [128] * 8, "sandwich": [86] * 8}
    # [LBDN] table 1, in per cent.
    published = {row.label: 100 * row.published["tightness"] for row in table.rows}
    paper = {
        "AOL": (77.2, 45.2, 47.9),
        "orthogonal": (74.1, 72.8, 64.5),
        "SLL": (99.9, 90.5, 67.9),
        "sandwich": (99.9, 99.3, 94.0),
    }
    for family, values in paper.items():
        for gamma, value in zip((1, 5, 10), values, strict=True):
            assert published[f"{family}, gamma {gamma}"] == pytest.approx(value)
