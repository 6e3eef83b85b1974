"""The table of docs/layers.md says what the pages say that it quotes."""

from __future__ import annotations

from pathlib import Path

from benchmarks import layers_page
from lipkit.layers.families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_table_quotes_its_sources() -> None:
    text = (ROOT / "docs/layers.md").read_text()
    rows = layers_page.table_rows(text)
    assert list(rows) == list(FAMILIES)
    costs = {name: (row[4], row[5]) for name, row in rows.items()}
    assert all(0.1 < float(cost) < 50 for pair in costs.values() for cost in pair)
    expected = layers_page.table(costs)
    assert expected in text, "run: python benchmarks/layers_page.py --keep"
