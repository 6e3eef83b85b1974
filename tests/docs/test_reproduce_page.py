"""The index of docs/reproduce.md holds every numbered item of the papers and says what tables and records say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from lipkit.errors import OptionError
from lipkit.experiments.tables import TABLES, Paper, load_papers

ROOT = Path(__file__).parents[2]
# Written down from the papers alone: the numbers of their tables and figures, and the experiments that have none.
NUMBERED = json.loads((Path(__file__).parent / "numbered.json").read_text())
PAPERS = load_papers()


@pytest.mark.parametrize("name", PAPERS)
def test_every_numbered_item_is_made_or_has_a_reason(name: str) -> None:
    paper = PAPERS[name]
    assert sorted([*paper.made, *paper.not_made]) == sorted(NUMBERED[name])
    assert all(len(reason) > 20 for reason in paper.not_made.values())
    used = {table for _, _, table, _ in paper.rows(TABLES)}
    assert used >= {table for table in TABLES if table.startswith(f"{name}_")}


@pytest.mark.thorough
def test_the_index_is_the_one_of_tables_and_records() -> None:
    spec = importlib.util.spec_from_file_location("reproduce_page", ROOT / "benchmarks/reproduce_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT / "docs/reproduce.md").read_text()
    assert script.index() in text, "run: python benchmarks/reproduce_page.py"
    assert [script.order(i)[:2] for i in ("table 10", "figure 2", "section 5.3")] == [("0", 10), ("1", 2), ("2", 5)]


@pytest.mark.parametrize("arguments", ["nowhere", "cayley_1 --row nobody", "cayley_1 --row Cayley --row nobody"])
def test_commands_name_tables_and_rows_that_exist(arguments: str) -> None:
    with pytest.raises(OptionError, match="expected a table and its rows"):
        list(Paper(source="P", made={"table 1": (arguments,)}).rows(TABLES))


def test_an_item_is_made_or_not() -> None:
    with pytest.raises(ValidationError, match="under both: table 1"):
        Paper(source="P", made={"table 1": ("cayley_1",)}, not_made={"table 1": "no GPU"})
