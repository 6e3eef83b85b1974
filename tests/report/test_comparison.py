"""``lipkit compare``: settings and their seeds, against numbers worked out here."""

from __future__ import annotations

import csv
import io
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from lipkit.cli import compare
from lipkit.cli.main import main
from lipkit.errors import RunError
from lipkit.report import comparison, read_record
from lipkit.report.record import RECORD, write_record

OLD = Path(__file__).parents[1] / "experiments" / "run_of_schema_1"


def _run(folder: Path, name: str, clean: float, seed: int = 0, **recipe: Any) -> Path:
    record = read_record(OLD)
    share = record.clean.model_copy(update={"value": clean})
    changes = {"name": name, "seed": seed, "clean": share, "recipe": record.recipe | recipe | {"train": {"seed": seed}}}
    (folder / name).mkdir(parents=True)
    write_record(record.model_copy(update=changes), folder / name / RECORD)
    (folder / name / "certificate.jsonl").write_bytes((OLD / "certificate.jsonl").read_bytes())
    return folder / name


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, clean in enumerate((0.9, 0.95, 0.97)):
        _run(tmp_path, f"a-00{number}", clean, number, model={"name": "small", "options": {"layer": "aol"}})
    _run(tmp_path, "b_100%-001", 0.8, model={"name": "small", "options": {"layer": "cayley"}})
    return tmp_path


def test_settings_are_told_apart_by_the_recipe_and_not_by_the_seed(runs: Path) -> None:
    found = comparison.settings([runs])
    assert [(one.keys, len(one.runs)) for one in found] == [
        ({"model.options.layer": "aol"}, 3),
        ({"model.options.layer": "cayley"}, 1),
    ]
    header, rows = comparison.rows(found)
    assert header[:3] == ["layer", "runs", "clean"]
    assert header[-1] == "L <="
    assert rows[0][:3] == ["aol", "3", f"{100 * 2.82 / 3:.2f} ± {100 * statistics.stdev([0.9, 0.95, 0.97]):.2f} %"]
    assert rows[1][:3] == ["cayley", "1", "80.00 %"]
    assert "standard deviation" in comparison.to_text(found)
    assert "standard deviation" not in comparison.to_text(found[1:])


def test_a_run_that_is_named_twice_counts_once(runs: Path) -> None:
    found = comparison.settings([runs, runs / "a-000", runs / "." / "b_100%-001"])
    assert [len(one.runs) for one in found] == [3, 1]


def test_runs_of_one_seed_are_said(runs: Path) -> None:
    _run(runs, "a-003", 0.9, 2, model={"name": "small", "options": {"layer": "aol"}})
    said = comparison.to_text(comparison.settings([runs]))
    assert said.endswith("over the runs of a row; runs that repeat a seed of their row: 1")


def test_runs_without_a_seed_repeat_none(runs: Path) -> None:
    for path in runs.glob(f"a-*/{RECORD}"):  # networks from elsewhere
        write_record(read_record(path.parent).model_copy(update={"seed": None}), path)
    assert comparison.to_text(comparison.settings([runs])).endswith("over the runs of a row")


def test_one_setting_and_many_keys_go_by_the_names_of_runs(runs: Path, tmp_path: Path) -> None:
    assert comparison.settings([runs / "a-000", runs / "a-001"])[0].keys == {"run": "a"}
    many = [_run(tmp_path / "many", f"c-00{i}", 0.5, **dict.fromkeys("pqrst", i)) for i in (1, 2)]
    assert [one.keys for one in comparison.settings(many)] == [{"run": "c-001"}, {"run": "c-002"}]


def test_csv_reads_back_exactly(runs: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(comparison.to_csv(comparison.settings([runs])))))
    assert [(row["model.options.layer"], row["seed"], float(row["clean"])) for row in rows] == [
        ("aol", "0", 0.9), ("aol", "1", 0.95), ("aol", "2", 0.97), ("cayley", "0", 0.8),
    ]  # fmt: skip
    for row in rows:
        assert {name: float(row[name]) for name in read_record(row["run"]).metrics()} == read_record(
            row["run"]
        ).metrics()


@pytest.mark.thorough
def test_latex_escapes_and_html_loads_nothing(runs: Path) -> None:
    found = comparison.settings([runs])
    text = comparison.to_latex(found)
    assert text.startswith(r"\begin{tabular}{lr")
    assert re.search(r"(?<!\\)[%_&#]", text.replace(" & ", "")) is None
    assert r"$\pm$" in text
    page = comparison.to_html(found)
    assert page.count('class="plot"') == 2  # wide and narrow
    assert "b_<wbr>100%-001" in page
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)


@pytest.mark.thorough
def test_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {*compare.FORMS} == {*comparison.FORMS}
    assert main(["compare", str(runs / "a-000"), str(runs / "b_100%-001")]) == 0
    assert capsys.readouterr().out.split()[:3] == ["layer", "runs", "clean"]
    assert main(["compare", str(runs), "--to", "html", "--out", str(tmp_path / "c.html")]) == 0
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(tmp_path / "empty")]) == 2
    assert "expected a finished run" in capsys.readouterr().err
    with pytest.raises(RunError):
        comparison.settings([tmp_path / "missing"])


@pytest.mark.parametrize(
    ("name", "values", "cell"),
    [
        ("apgd(36/255)", [0.5], "50.00 %"),
        ("clean", [0.9, 0.92], "91.00 ± 1.41 %"),
        ("tightness", [0.5, 0.7], "0.6 ± 0.14"),
        ("lipschitz", [1.0, 1.00000012], "1.0000002"),  # the bound of all runs
        ("pgd(36/255)", [], ""),
        ("lipschitz", [], ""),
        ("tightness", [float("nan"), 0.5], "nan"),
    ],
)
def test_a_cell_is_a_fraction_a_bound_or_a_number(name: str, values: list[float], cell: str) -> None:
    assert comparison._cell(name, values) == cell
