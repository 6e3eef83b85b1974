"""The index of docs/reproduce.md: every numbered item of the papers, its command, its records and what they miss.

python benchmarks/reproduce_page.py    # from src/lipkit/tables and records/; nothing is trained
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lipkit.experiments.table_runs import Found, compare, kept, plan
from lipkit.experiments.tables import SCALES, TABLES, Paper, Row, load_papers
from lipkit.files import write_atomic

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "reproduce.md", ROOT / "records"
INDEX = re.compile(r"(?<=<!-- index -->\n).*?(?=<!-- end of index -->)", re.S)


def order(item: str) -> tuple[str, int, str]:
    """Tables, then figures, then the rest, by number."""
    kind, _, rest = item.partition(" ")
    number = re.match(r"\d+", rest)
    return str({"table": 0, "figure": 1}.get(kind, 2)), int(number[0]) if number else 0, item


def found_of(name: str, rows: Sequence[Row]) -> dict[str, list[Found]]:
    """The kept records of these rows of a table."""
    if not (RECORDS / name).is_dir():
        return {row.label: [] for row in rows}
    table = TABLES[name].model_copy(update={"rows": tuple(rows)})
    runs = [run for scale in SCALES for run in plan(table, Path("runs") / name, scale=scale)]
    return {row.label: kept(RECORDS / name, row, runs) for row in rows}


def recorded(name: str, found: Mapping[str, Sequence[Found]]) -> str:
    """How many rows have records, and at which scale."""
    scales = [records[0].scale for records in found.values() if records]
    counts = ", ".join(f"{scales.count(scale)} {scale}" for scale in SCALES if scale in scales)
    return f"{counts} of {len(found)} rows: `records/{name}/`" if scales else f"none of {len(found)} rows"


def differences(name: str, rows: Sequence[Row], found: Mapping[str, Sequence[Found]]) -> str:
    """Measured minus published, a range for each column and scale."""
    printed = any(value is not None for row in rows for value in row.published)
    by_column: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for _, column, scale, _, _, _, _, difference, *_ in compare(TABLES[name], row, found[row.label]):
            if difference:
                by_column.setdefault((column, scale), []).append(difference)
    texts = []
    for (column, scale), values in by_column.items():
        low, high = (choose(values, key=lambda text: float(text.split()[0])) for choose in (min, max))
        texts.append(f"{column} {low if low == high else f'{low} to {high}'} ({scale})")
    return "; ".join(texts) if printed else "no published figures at hand"


def rows_of(paper: Paper) -> Iterator[str]:
    """The lines of one paper."""
    lines = [(item, f"| {item} | not made: {reason} | | |") for item, reason in paper.not_made.items()]
    for item, arguments, name, rows in paper.rows(TABLES):
        found = found_of(name, rows)
        cells = (item, f"`lipkit reproduce {arguments}`", recorded(name, found), differences(name, rows, found))
        lines.append((item, f"| {' | '.join(cells)} |"))
    yield from (line for _, line in sorted(lines, key=lambda pair: order(pair[0])))


def index() -> str:
    """The whole index, as it stands in the page."""
    parts = []
    for paper in load_papers().values():
        head = f"### {paper.source}\n\n| item | command | records | measured - published |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(rows_of(paper)) + "\n")
    return "\n" + "\n".join(parts) + "\n"


if __name__ == "__main__":
    write_atomic(PAGE, INDEX.sub(lambda _: index(), PAGE.read_text()).encode())
