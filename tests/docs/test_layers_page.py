"""The table of docs/layers.md says what the pages say that it quotes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lipkit.layers.families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_table_quotes_its_sources() -> None:
    spec = importlib.util.spec_from_file_location("layers_page", ROOT / "benchmarks/layers_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT / "docs/layers.md").read_text()
    rows = script.table_rows(text)
    assert list(rows) == list(FAMILIES)
    costs = {name: (row[4], row[5]) for name, row in rows.items()}
    assert all(0.1 < float(cost) < 50 for pair in costs.values() for cost in pair)
    expected = script.table(costs)
    assert expected in text, "run: python benchmarks/layers_page.py --keep"
