"""Lists, defaults and names in the documents are those of the code."""

from __future__ import annotations

import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
from papers.tables import TABLES
from tests.checker.mutations import HARMLESS, MUTATIONS

from lipkit.attacks import ATTACKS
from lipkit.cli.export import FORMS
from lipkit.cli.main import VERBS
from lipkit.experiments.recipe import load_recipe
from lipkit.interop.onnx_operators import OPERATORS, STORED
from lipkit.layers.families import FAMILIES
from lipkit.testing import LAWS

ROOT = Path(__file__).parents[2]
# What a finished run holds; tests/experiments/test_run.py sees that it does.
RUN = {
    "recipe.yaml", "settings.json", "metrics.jsonl", "checkpoints/", "network/", "record.json",
    "certificate.jsonl", "examples.safetensors", "report.html",
}  # fmt: skip


def _first_cells(page: str, heading: str) -> list[str]:
    """The code in the first cells of the table under a heading of that start."""
    section = (ROOT / page).read_text().partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [code for row in section.splitlines()[2:] for code in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.mark.parametrize(
    ("page", "heading", "expected"),
    [
        ("docs/guide/interop.md", "form", FORMS),
        ("docs/guide/evaluation.md", "file", RUN),
        ("docs/attacks.md", "attack", ATTACKS),
        ("docs/lab/reproduce.md", "table", TABLES),
        ("docs/layers.md", "family", FAMILIES),
    ],
)
def test_tables_list_what_there_is(page: str, heading: str, expected: Any) -> None:
    found = _first_cells(page, heading)
    assert sorted(found) == sorted(expected)


def test_the_first_page_names_every_family() -> None:
    listed = (
        (ROOT / "README.md").read_text().partition("[docs/families.md](docs/families.md)): ")[2].partition(".\n")[0]
    )
    assert {name.strip().lower() for name in listed.split(",")} == {name.replace("_", "") for name in FAMILIES}


@pytest.mark.thorough
def test_figures_of_the_first_page_are_those_of_the_records() -> None:
    text = (ROOT / "README.md").read_text()
    attacks = {}  # by network: rows of several tables share a run, whose examples count once
    for path in (ROOT / "records").rglob("*.json"):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and "compared" in (record.get("attack") or ()):
            attacks[record["network_sha256"]] = record["attack"]
    found = re.search(r"none of ([\d,]+) for (\d+) networks .* at ([\d.]+) radii", text)
    assert found is not None
    assert int(found[1].replace(",", "")) <= sum(attack["compared"] for attack in attacks.values())
    assert int(found[2]) <= len(attacks)
    assert 1 < float(found[3]) <= min(attack["closest"] for attack in attacks.values() if attack["compared"])
    hour = json.loads((ROOT / "records/budget/patchnet-1h/full-seed0.json").read_text())
    clean, certified = (100 * share["value"] for share in (hour["clean"], hour["certified"][0]["share"]))
    assert f"clean {clean:.1f} %, certified {certified:.1f} % at l2 radius 36/255" in text


def test_operators_of_onnx_are_all_listed() -> None:
    section = (ROOT / "docs/networks.md").read_text().partition("- **ONNX**: ")[2].partition(". An activation")[0]
    moving, _, stored = section.partition(". Of stored values and sizes also ")
    listed = OPERATORS.keys() - {"LogSoftmax"}  # has a rule that refuses it with advice
    for text, moves in ((moving, True), (stored, False)):
        assert re.findall(r"\w+", text) == sorted(kind for kind in listed if (kind not in STORED) is moves)


def test_verbs_and_laws_are_all_listed() -> None:
    verbs = [code.split()[1] for code in _first_cells("docs/guide/command_line.md", "verb")]
    assert sorted(verbs) == sorted(VERBS)
    laws = (ROOT / "docs/guide/testing.md").read_text().partition("\n1. ")
    assert [int(n) for n in re.findall(r"(?:^|[.\n] ?)(\d+)\. ", laws[1] + laws[2])] == list(LAWS)


def test_changes_of_the_checker_are_counted() -> None:
    text = (ROOT / "docs/trust.md").read_text()
    assert f"{len(MUTATIONS)} single changes of the checker" in text
    assert f"must find all but {len(HARMLESS)}," in text


def test_stated_defaults_of_recipes_are_theirs() -> None:
    settings = load_recipe("digits_cayley", ["train.evaluate_every=1"]).train
    rows = re.findall(r"^\| (`train\.[^|]*) \| ([^|]*) \|", (ROOT / "docs/training.md").read_text(), re.M)
    assert len(rows) == 6
    for names, values in rows:
        stated = values.split(", ")
        actual = [getattr(settings, name) for name in re.findall(r"`train\.(\w+)`", names)]
        assert stated == [{None: "null", False: "false"}.get(value, str(value)) for value in actual]


def test_dotted_names_exist() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for name in re.findall(r"`(lipkit(?:\.\w+)+)", prose):
            try:
                pkgutil.resolve_name(name)
            except (AttributeError, ImportError) as missing:
                pytest.fail(f"{page.relative_to(ROOT)}: {name}: {missing}")
