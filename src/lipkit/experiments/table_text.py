"""A table as text: the paper's figures, ours, and the difference."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lipkit.experiments.display import columns
from lipkit.experiments.table_runs import Found, figures
from lipkit.experiments.tables import Row, Scale, Table, is_fraction

NOT_MADE = "not made"


def render(table: Table, found: Mapping[str, Sequence[Found]]) -> str:
    """The whole table.

    Args:
        table: the table.
        found: the records of each row, by its label; rows without any are printed as not made.
    """
    header = ["row", "figure", "scale", "runs", "published", "measured", "deviation", "difference", *table.also]
    lines = [line for row in table.rows for line in compare(table, row, found.get(row.label, ()))]
    notes = _notes(table, found)
    return f"{table.source}: {table.description}\n\n{columns([header, *lines])}" + (f"\n\n{notes}" if notes else "")


def compare(table: Table, row: Row, found: Sequence[Found]) -> list[list[str]]:
    """Cells of one row, a line for each figure: label, figure, scale, runs, published, mean, deviation, difference."""
    measured = [figures(one.record) for one in found]
    names = dict(table.columns) or {name: name for name in (measured[0] if measured else {"": 0})}
    published = table.published(row)
    scale = ", ".join(dict.fromkeys(one.scale + ("" if one.current else "*") for one in found))
    lines = []
    for column, name in names.items():
        values = [metrics[name] for metrics in measured if name in metrics]
        mean = statistics.fmean(values) if values else None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        paper = published.get(column)
        difference = None if mean is None or paper is None else mean - paper
        extra = [_mean(other, [metrics[other] for metrics in measured if other in metrics]) for other in table.also]
        ours = NOT_MADE if not found else shown(name, mean) or "n/a"
        lines.append(
            [
                row.label, column, scale, str(len(values)) if found else "", shown(name, paper), ours,
                shown(name, deviation), shown(name, difference, sign=True), *extra,
            ]
        )  # fmt: skip
    return lines


def shown(name: str, value: float | None, sign: bool = False) -> str:
    """A figure as people write it: fractions in per cent.

    >>> shown("tightness", 0.9937), shown("test_mse", 0.01234), shown("clean", -0.005, sign=True), shown("clean", None)
    ('99.37 %', '0.01234', '-0.50 %', '')
    """
    if value is None:
        return ""
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.2f} %" if is_fraction(name) else f"{value:{plus}.4g}"


def _mean(name: str, values: Sequence[float]) -> str:
    return shown(name, statistics.fmean(values)) if values else ""


def _notes(table: Table, found: Mapping[str, Sequence[Found]]) -> str:
    """Sentences below the table: what was not the paper's, and why rows are missing."""
    lines = []
    everything = [(row, one) for row in table.rows for one in found.get(row.label, ())]
    for scale, meaning in _MEANINGS.items():
        if any(one.scale == scale for _, one in everything):
            changes = table.hour if scale == "hour" else table.smoke
            more = f" Changed in every row: {' '.join(changes)}." if changes else ""
            lines.append(f"{scale}: {meaning}{more}")
    for data in sorted({one.data for _, one in everything if one.data}):
        rows = [row.label for row, one in everything if one.data == data]
        which = "every row" if len(rows) == len(everything) else "; ".join(dict.fromkeys(rows))
        lines.append(f"data: {data}, in place of the paper's, which are not there, in {which}.")
    if any(not one.current for _, one in everything):
        lines.append("*: made with other settings than the row's recipe has now; they are in the record.")
    lines += [f"{row.label}: {row.absent}" for row in table.rows if row.absent]
    return "\n".join([*lines, *table.notes])


_MEANINGS: dict[Scale, str] = {
    "hour": "NOT the paper's setting but one for about an hour on one or two CPU cores: compare rows, not columns.",
    "smoke": "NOT the paper's setting but a few seconds on a few hundred images, to see that it runs: no result.",
}
