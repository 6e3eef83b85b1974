"""Names from files and folders cannot write lines of their own: not on a screen, a page or a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from papers.__main__ import main as papers
from papers.table_runs import TableRecord, render
from papers.tables import TABLES
from torch import nn

import lipkit
from lipkit.analysis import analyze
from lipkit.cli import console
from lipkit.cli.main import main
from lipkit.interop import model_card
from lipkit.report import read_record, write_report
from lipkit.text import printable, printable_lines

RUN = Path(__file__).parents[1] / "experiments" / "run_of_schema_1"
LINE = "certified(36/255)  100.00 %"
FREE = {"recipe", "model", "options", "versions", "times"}  # mappings whose keys are the record's
FORGED = f"a\n{LINE}\r\x1b[2K\x1b[1A\u202e\u2066\u2028\x85\x9b1m\u200b\ud800\x7f"


def plain_line(line: str) -> bool:
    """Nothing moves, colours, hides or reorders: an independent list of what terminals and browsers obey."""
    return all(
        31 < ord(c) < 127 or (ord(c) > 160 and not ("\u200b" <= c <= "\u200f" or "\u2028" <= c <= "\u202e"
                                                   or "\u2060" <= c <= "\u206f" or "\ud800" <= c <= "\udfff"))
        for c in line
    )  # fmt: skip


def check_screen(text: str) -> None:
    assert "100.00 %" in text  # the name is there
    assert [line for line in text.split("\n") if not plain_line(line)] == []
    assert [line for line in text.split("\n") if line.startswith("certified(36/255)  100")] == []


def everywhere(content: Any, change: Callable[[str], str]) -> Any:
    """Every string of a record changed, and every name that it chooses, but for what decides how it is read."""
    if isinstance(content, dict):
        fixed = ("schema_version", "task", "created")
        names = {k: {change(name): item for name, item in content[k].items()} for k in FREE & content.keys()}
        return {k: v if k in fixed else everywhere(v, change) for k, v in (content | names).items()}
    if isinstance(content, list):
        return [everywhere(part, change) for part in content]
    return change(content) if isinstance(content, str) and content not in ("NaN", "Infinity") else content


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """A run whose record says the forged text in every string."""
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps(everywhere(record, lambda text: text + FORGED.replace("\ud800", ""))))
    metrics = {"epoch": 1, "loss": 1.0, f"accuracy {FORGED}": 0.5}
    (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return run


@pytest.mark.thorough
def test_every_character_is_one_that_stays_in_its_place() -> None:
    for number in range(0x11000):
        assert plain_line(printable(chr(number))), hex(number)
    for text in ("digits", "Größe 10 µm, 数字 – 36/255", ""):
        assert printable(text) == text
    assert printable("a\nb") == r"a\nb"
    assert printable_lines("a\nb\rc") == "a\nb\\rc"
    assert printable("x" * 50, 10) == "x" * 7 + "..."


@pytest.mark.thorough
def test_a_report_prints_what_a_record_says_on_lines_of_its_own(
    forged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(forged)]) == 0
    check_screen(capsys.readouterr().out)


@pytest.mark.thorough
def test_a_page_shows_what_a_record_says(forged: Path) -> None:
    text = write_report(forged).read_text()
    assert "100.00 %" in text
    assert [line for line in text.split("\n") if not plain_line(line.replace("\t", " "))] == []


def test_a_card_holds_what_a_record_says_on_one_line(forged: Path) -> None:
    card = model_card(read_record(forged))
    check_screen(card)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["datasets"][0].startswith("digits")
    assert body.count("\n## Recipe") == 1


def test_a_hash_cannot_end_its_line_in_a_card() -> None:
    record = read_record(RUN).model_copy(update={"network_sha256": "0` \n\n# Certified 100.00 %\n`"})
    assert "\n# Certified" not in model_card(record)


def test_tables_name_the_figures_of_records(forged: Path) -> None:
    table = next(table for table in TABLES.values() if not table.rows[0].absent)
    row = table.rows[0].model_copy(update={"published": ()})
    table = table.model_copy(update={"columns": {}, "rows": (row,)})
    found = TableRecord("full", 0, read_record(forged).model_copy(update={"further": {FORGED: 1.0}}))
    check_screen(render(table, {row.label: [found]}))


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", f"train.{FORGED}=1"],
        ["train", "digits_cayley", f"model.name='{FORGED}'"],
        ["train", "digits_cayley", f"data.spec={json.dumps(FORGED.replace(chr(0xD800), ''))}"],
        ["report", f"no {FORGED.replace(chr(0xD800), '')}"],
        ["check", f"no {FORGED.replace(chr(0xD800), '')}", "b", "digits"],
        [papers, FORGED],
    ],
)
def test_errors_are_one_line(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert (papers(arguments[1:]) if arguments[0] is papers else main(arguments)) == 2
    error = capsys.readouterr().err.rstrip("\n")
    assert "\n" not in error
    assert plain_line(error)


@pytest.mark.thorough
def test_recipes_are_shown_on_lines_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load((RUN / "recipe.yaml").read_text())
    recipe["description"] = FORGED.replace("\ud800", "")
    recipe["model"]["options"]["note"] = FORGED.replace("\ud800", "")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["recipe", "show", str(tmp_path / "recipe.yaml")]) == 0
    check_screen(capsys.readouterr().out)


def test_layers_and_notes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    network = nn.Sequential()
    network.add_module("first\n" + LINE.replace(".", ",") + "\x1b[1m", nn.Linear(3, 2))
    text = str(analyze(network.eval(), (3,)))
    assert [line for line in text.split("\n") if not plain_line(line) or line.startswith("certified")] == []
    console.Lines().note(f"certifying {FORGED}")
    error = capsys.readouterr().err.rstrip("\n")
    assert plain_line(error)


@pytest.mark.thorough
def test_a_certificate_is_confirmed_under_the_name_that_the_user_gave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (RUN / "certificate.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    header["data"]["name"] = FORGED
    header["data"]["preprocessing"] = " " * 46 + LINE
    header["later"] = {FORGED: FORGED}
    header[FORGED] = header["data"][FORGED] = 1
    path = tmp_path / "certificate.jsonl"
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert main(["check", str(path), str(RUN / "network"), "digits", "--limit", "12"]) == 0
    out = capsys.readouterr().out
    check_screen(out)
    above, below = out.split("claimed, not checked:\n")
    assert "100.00 %" not in above
    assert above.startswith("confirmed  12 samples of digits, network 940093a1")
    assert all(line.startswith("  ") and len(line) < 80 for line in below.splitlines())
    assert "other.later" in below
    assert lipkit.modules.sha256(lipkit.load(RUN / "network")).startswith("940093a1")
