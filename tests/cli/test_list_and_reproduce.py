from __future__ import annotations

import inspect
import statistics

import pytest

from lipkit.attacks import ATTACKS
from lipkit.cli.main import main
from lipkit.data import DATASETS
from lipkit.experiments import tables
from lipkit.experiments.recipe import load_recipe, names
from lipkit.experiments.tables import TABLES, Row, Table
from lipkit.layers.families import FAMILIES
from lipkit.models import MODELS
from lipkit.report import read_record
from lipkit.text import table as aligned

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("layers", FAMILIES), ("models", MODELS), ("datasets", DATASETS), ("recipes", names()), ("tables", TABLES)],
)
def test_list_names_everything(kind, expected, capsys):
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line for line in lines}
    for name in expected:
        assert len(found[name].split()) > 2, found[name]


def test_what_is_read_from_the_source_is_what_is_imported(capsys):
    expected = {
        "layers": [[f.name, f.title, f.claim, f"{f.paper}, {f.equation}"] for f in FAMILIES.values()],
        "models": [[name, (inspect.getdoc(build) or "").split("\n")[0]] for name, build in MODELS.items()],
        "recipes": [[name, load_recipe(name).description] for name in names()],
        "tables": [[name, table.source, table.description] for name, table in TABLES.items()],
    }
    for kind, rows in expected.items():
        assert main(["list", kind]) == 0
        assert capsys.readouterr().out == aligned([], rows) + "\n"
    assert main(["attack", "--help"]) == 0
    assert f"[{'|'.join(ATTACKS)}]" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_table_is_trained_once_and_set_beside_the_paper(monkeypatch, tmp_path, capsys):
    table = Table(
        source="Paper, table 1",
        description="a test",
        columns={"clean": "clean", "robust": "certified(72/255)"},
        rows=(Row(label="small", recipe="digits_cayley", set=("train.lr=0.05",), published=(90, 80)),),
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
    assert "n/a" in shown["robust"]
    assert captured.err.count("epoch 1/1") == 2

    assert main(["reproduce", "t1", *quick, "--workers", "1", "--out", str(tmp_path)]) == 0
    again = capsys.readouterr()
    assert again.out == captured.out
    assert "epoch 1/1" not in again.err


def test_an_unknown_table_names_the_closest(capsys):
    assert main(["reproduce", "square_wav"]) == 2
    error = capsys.readouterr().err
    assert "unknown table 'square_wav', did you mean 'square_wave'? lipkit list tables shows all" in error


def test_an_empty_registry_says_so(monkeypatch, capsys):
    monkeypatch.setattr(tables, "TABLES", {})
    assert main(["reproduce", "x"]) == 2
    assert "unknown table 'x'. lipkit list tables shows all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a table or --all, got neither"),
        (["x", "--all"], "expected a table or --all, got both"),
        (["square_wave", "train.epochs=1", "--records", "r"], "--records only reads"),
    ],
)
def test_usage(arguments, message, capsys):
    assert main(["reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err
