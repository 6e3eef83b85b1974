"""The runs of a table: what is missing is trained, what was cut is resumed, the figures come from the files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from papers.__main__ import main
from papers.table_runs import MeasurementRecord, TableRecord, compare, plan, read_any_record
from papers.tables import DIGITS, After, Row, Table, available_in
from torch import nn

from lipkit import modules
from lipkit.data import Split
from lipkit.errors import ShapeError
from lipkit.evaluation import evaluate_regression
from lipkit.experiments import run as pipeline
from lipkit.report import read_record, write_record
from lipkit.report.record import SeenRecord, from_regression
from papers import tables

QUICK = (
    "model={name: mlp, options: {layer: cayley, hidden: [4], activation: relu}}",
    "train.epochs=2",
    "train.lr=0.03",
)


def save_record(folder: Path, tightness: float, recipe: dict[str, Any] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    network = modules.Network([nn.Linear(1, 1)], (1,))
    x = torch.linspace(-1, 1, 5)[:, None]
    evaluation = evaluate_regression(network, Split(x, network(x)), restarts=2, steps=2)
    search = {"restarts": 2, "steps": 2, "seed": 0}
    record = from_regression(evaluation, name=folder.name, data="line", search=search, recipe=recipe)
    write_record(record.model_copy(update={"tightness": tightness, "mse": 0.25}), folder / "record.json")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table(
        source="Paper, table 1",
        description="a test",
        recipe="square_wave",
        columns={"tightness": "tightness"},
        rows=(
            Row(label="Small net, gamma 1", set=QUICK, published=(90.0,)),
            Row(label="other", set=(*QUICK, "train.lr=0.5")),
            Row(label="elsewhere", absent="not in the paper", published=(12.5,)),
        ),
        seeds=2,
        smoke=("train.epochs=1",),
        also=("test_mse",),
    )
    monkeypatch.setitem(tables.TABLES, "t1", made)
    return made


@pytest.mark.thorough
def test_what_is_missing_is_trained_and_what_was_cut_is_resumed(table, monkeypatch, tmp_path, capsys):
    seen = []

    def train(recipe, *, folder=None, resume=None, display=None):
        seen.append((recipe.train.seed, recipe.train.lr, recipe.train.epochs, "resumed" if resume else "new"))
        save_record(folder or resume, 0.5 + 0.1 * recipe.train.seed)

    monkeypatch.setattr(pipeline, "train", train)
    arguments = ["t1", "train.epochs=3", "--workers", "1", "--out", str(tmp_path)]
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
    assert "1 of 4 runs are finished, 3 to make" in captured.err
    shown = [re.split(r"  +", line) for line in captured.out.splitlines()]
    assert ["Small net, gamma 1", "tightness", "full", "2", "90.00 %", "55.00 %", "7.07 %", "-35.00 %", "0.25"] in shown
    assert ["other", "tightness", "full", "2", "55.00 %", "7.07 %", "0.25"] in shown
    assert ["elsewhere", "tightness", "12.50 %", "not made"] in shown
    assert "elsewhere: not in the paper" in captured.out

    seen.clear()
    save_record(runs[0].folder, 0.7)
    assert main(arguments) == 0
    assert not seen
    assert "65.00 %" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_changed_recipe_never_passes_for_the_one_before(table, tmp_path):
    folders = [run.folder for change in ([], ["train.lr=0.1"]) for run in plan(table, tmp_path, change, 1)]
    assert len(set(folders)) == 4
    assert folders[0].name.startswith("small-net-gamma-1-seed0-")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_smoke_run_in_two_processes(table, tmp_path, capsys):
    change = ["certify.search_restarts=2", "certify.search_steps=2", "train.evaluate_every=9"]
    arguments = ["t1", *change, "--scale", "smoke", "--workers", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "2/2  " in captured.err
    folders = sorted(path.name for path in (tmp_path / "t1").iterdir())
    assert len(folders) == 2
    assert all((tmp_path / "t1" / name / "report.html").is_file() for name in folders)
    record = read_record(tmp_path / "t1" / folders[1])
    assert f"{100 * record.tightness:.2f} %" in captured.out
    assert "smoke: NOT the paper's setting" in captured.out
    assert "train.epochs=1" in captured.out
    assert record.recipe["train"]["epochs"] == 1


def test_with_all_a_failing_run_does_not_stop_the_others(table, monkeypatch, tmp_path, capsys):
    def train(recipe, *, folder=None, resume=None, display=None):
        if recipe.train.lr == 0.03:
            raise ShapeError("expected luck, got none")
        save_record(folder, 0.5)

    monkeypatch.setattr(pipeline, "train", train)
    monkeypatch.setattr(tables, "TABLES", {"t1": table})
    assert main(["--all", "--scale", "smoke", "--workers", "1", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "1 runs failed: t1: Small net, gamma 1, seed 0: ShapeError: expected luck, got none" in captured.err
    shown = [re.split(r"  +", line) for line in captured.out.splitlines()]
    assert ["Small net, gamma 1", "tightness", "90.00 %", "not made"] in shown
    assert ["other", "tightness", "smoke", "1", "50.00 %", "0.25"] in shown


@pytest.mark.thorough
def test_records_are_kept_and_printed_without_training(table, monkeypatch, tmp_path, capsys):
    def train(recipe, *, folder=None, resume=None, display=None):
        save_record(folder, 0.25 + 0.5 * recipe.train.seed, recipe=recipe.model_dump(mode="json"))

    monkeypatch.setattr(pipeline, "train", train)
    runs, kept = tmp_path / "runs", tmp_path / "records"
    assert main(["t1", "--out", str(runs), "--keep", str(kept), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    files = sorted(str(p.relative_to(kept)) for p in kept.rglob("*") if p.is_file())
    assert files == [f"t1/{row}/full-seed{s}.json" for row in ("other", "small-net-gamma-1") for s in (0, 1)]

    monkeypatch.setattr(pipeline, "train", None)  # nothing is trained from here on
    assert main(["t1", "--records", str(kept)]) == 0
    assert capsys.readouterr().out == printed
    # What is there of another scale is not shown as this one.
    assert main(["t1", "--records", str(kept), "--scale", "budget"]) == 0
    assert capsys.readouterr().out.count("not made") == 3
    # A record of another recipe is marked, whether it differs in a value or in a section that the row has not.
    path = kept / "t1" / "other" / "full-seed1.json"
    record = read_record(path)
    for section in ({"train": {**record.recipe["train"], "lr": 0.25}}, {"adversary": {"name": "pgd", "eps": 0.1}}):
        write_record(record.model_copy(update={"recipe": {**record.recipe, **section}}), path)
        assert main(["t1", "--records", str(kept)]) == 0
        marked = capsys.readouterr().out
        assert "full, full*" in marked
        assert "*: made with other settings" in marked
    # What the record's recipe did not have yet is not compared.
    fewer = {key: value for key, value in record.recipe.items() if key != "adversary"}
    write_record(record.model_copy(update={"recipe": fewer}), path)
    assert main(["t1", "--records", str(kept)]) == 0
    assert "*: made with other settings" not in (printed := capsys.readouterr().out)
    # What training saw is a column, and a run that saw far less than its row's reference is named.
    assert "epochs" not in printed
    saw = SeenRecord(steps=10, samples=890, epochs=2.5, samples_per_cpu_second=100.0)
    write_record(record.model_copy(update={"recipe": fewer, "seen": saw}), path)
    for samples, slow in ((988, False), (990, True)):
        counted = table.rows[1].model_copy(update={"samples": samples})
        row = next(line for line in compare(table, counted, [TableRecord("full", 1, read_record(path))], ["epochs"]))
        assert (row[2], row[-1]) == ("full" + ", slow machine" * slow, "2.5")


def test_a_run_of_another_table_is_taken_from_there(table, tmp_path):
    first = plan(table, tmp_path / "t1", seeds=1)[0]
    save_record(first.folder, 0.5)
    again = plan(table.model_copy(update={"rows": (table.rows[0].model_copy(update={"label": "same"}),)}),
                 tmp_path / "t2", seeds=1)  # fmt: skip
    assert [run.folder for run in again] == [first.folder]
    assert again[0].done


@pytest.mark.thorough
def test_measurements_and_what_follows_a_training(monkeypatch, tmp_path, capsys):
    table = Table(
        source="Paper, table 2",
        description="a test",
        columns={"error": "error", "norms": "norm_product"},
        after={"norms": After(measure="layer_norms", skip=("budget",))},
        rows=(
            Row(label="measured", measure="truncation", options={"terms": 3, "width": 0.125}, published=(0.04, None)),
            Row(label="trained", recipe="square_wave", set=(*QUICK, "train.epochs=1", "certify.search_steps=2")),
        ),
    )
    monkeypatch.setitem(tables.TABLES, "t2", table)
    arguments = ["t2", "--workers", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    shown = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    record = read_any_record(next((tmp_path / "t2").glob("measured-seed0-*")))
    assert isinstance(record, MeasurementRecord)
    error = record.figures["error"]
    assert 0 < error < 0.042
    assert ["measured", "error", "full", "1", "0.04", f"{error:.4g}", f"{error - 0.04:+.4g}"] in shown
    folder = next((tmp_path / "t2").glob("trained-seed0-*"))
    network = modules.load(folder / "network")
    expected = 1.0
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            expected *= float(torch.linalg.matrix_norm(layer.weight.double(), 2))
    assert read_record(folder).further["norm_product"] == pytest.approx(expected, rel=1e-5)
    assert ["trained", "norms", "full", "1", f"{expected:.4g}", "1"] in shown  # after one epoch
    before = (folder / "record.json").read_bytes()
    assert main(arguments) == 0
    assert (folder / "record.json").read_bytes() == before


@pytest.mark.thorough
def test_where_data_are_missing_smoke_takes_others_and_full_says_so(monkeypatch, tmp_path, capsys):
    table = Table(source="P", description="d", columns={"clean": "clean"},
                  rows=(Row(label="a", recipe="cifar10_cayley"), Row(label="w", measure="wasserstein",
                        options={"family": "cayley", "data": "stl10"}, smoke_options={"data": "digits"})))  # fmt: skip
    here = available_in(tmp_path)  # an empty folder
    smoke = plan(table, tmp_path, scale="smoke", available=here)
    assert (smoke[0].recipe.data.spec, smoke[0].data) == (DIGITS, "digits enlarged to 3 x 32 x 32")
    assert not smoke[0].missing
    assert not smoke[1].missing
    full = plan(table, tmp_path, available=here)
    assert [run.missing for run in full] == ["cifar10", "stl10"]
    monkeypatch.setitem(tables.TABLES, "t3", table)
    assert main(["t3", "--root", str(tmp_path), "--out", str(tmp_path / "runs")]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("not made") == 2
    assert "data set cifar10 not found: its rows are skipped" in captured.err


@pytest.mark.thorough
def test_a_failing_worker_stops_the_table_with_its_error(table, tmp_path, capsys):
    arguments = ["t1", "data=npz:/nowhere.npz", "--workers", "2", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert "nowhere.npz" in capsys.readouterr().err
