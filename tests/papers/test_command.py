"""``python -m papers``: a table is made once and set beside the paper; wrong usage is one line."""

from __future__ import annotations

import re
import statistics

import pytest
from papers.__main__ import main
from papers.tables import TABLES, Row, Table

from lipkit.report import read_record
from lipkit.text import table as aligned
from papers import tables

pytestmark = pytest.mark.usefixtures("no_plots")


def test_the_list_names_every_table(capsys):
    assert main(["--list"]) == 0
    rows = [[name, table.source, table.description] for name, table in TABLES.items()]
    assert capsys.readouterr().out == aligned([], rows) + "\n"


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
    assert main(["t1", *quick, "--workers", "1", "--out", str(tmp_path)]) == 0
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

    assert main(["t1", *quick, "--workers", "1", "--out", str(tmp_path)]) == 0
    again = capsys.readouterr()
    assert again.out == captured.out
    assert "epoch 1/1" not in again.err


def test_an_unknown_table_names_the_closest(capsys):
    assert main(["square_wav"]) == 2
    error = capsys.readouterr().err
    assert "unknown table 'square_wav', did you mean 'square_wave'? python -m papers --list shows all" in error


def test_an_empty_registry_says_so(monkeypatch, capsys):
    monkeypatch.setattr(tables, "TABLES", {})
    assert main(["x"]) == 2
    assert "unknown table 'x'. python -m papers --list shows all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--seed", "3"], "written train.seed=3$"),
        (["table1"], r"unknown table 'table1'\. python -m papers --list shows all$"),
        (["nope"], r"^.{,320}$"),  # four lines of a terminal
        (["eco"], "unknown table 'eco', did you mean 'eco_2', .*'eco_3', .* or 'eco_8'"),
        (["cayley_1", "x"], "expected one recipe and changes KEY=VALUE, got 'cayley_1' and 'x'"),
        ([], "expected a table or --all, got neither"),
        (["x", "--all"], "expected a table or --all, got both"),
        (["square_wave", "train.epochs=1", "--records", "."], "--records only reads"),
        (["square_wave", "--records", "r"], "--records.*: Directory .r. does not exist"),
    ],
)
def test_usage(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err.strip())
