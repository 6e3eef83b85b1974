"""``lipkit reproduce``: repeat a published table and print it beside the paper's figures."""

from __future__ import annotations

import difflib
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lipkit.cli.tables import Row, Table

# Figures that are shares, written as percentages; the names of records' metrics, without a radius.
_SHARES = ("clean", "certified", "pgd", "tightness")


@click.command("reproduce")
@click.argument("table")
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--scale", type=click.Choice(("full", "smoke")), default="full", help="smoke: a first look, one seed.")
@click.option("--seeds", type=click.IntRange(min=1), help="Runs of each row; the table's own number by default.")
@click.option("--workers", type=click.IntRange(min=1), help="Runs at a time, one thread each; default: as it fits.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of runs.")
@click.option("--root", type=click.Path(path_type=Path), metavar="DATA", help="Folder of the data sets (data.root).")
def command(
    table: str,
    changes: tuple[str, ...],
    scale: str,
    seeds: int | None,
    workers: int | None,
    out: Path,
    root: Path | None,
) -> None:
    """Train every row of TABLE and print its figures beside the published ones.

    Runs that are there are kept, those that were cut are resumed: start it again after an interruption. The figures
    are read from the record.json files alone. KEY=VALUE changes the recipe of every row, for example train.epochs=1.
    """
    from lipkit.cli.tables import TABLES
    from lipkit.cli.train import data_root, split_arguments
    from lipkit.errors import OptionError

    if table not in TABLES:
        known = "; ".join(f"{name} ({t.description})" for name, t in TABLES.items()) or "none yet"
        similar = difflib.get_close_matches(table, TABLES, 1)
        hint = f", did you mean {similar[0]!r}?" if similar else ""
        raise OptionError(f"unknown table {table!r}{hint}; known: {known}")
    name, overrides = split_arguments(changes)
    if name is not None:
        raise click.UsageError(f"expected changes KEY=VALUE, got {name!r}")
    if root is not None:
        overrides.append(data_root(root))
    chosen = TABLES[table]
    if scale == "smoke":
        overrides, seeds = [*chosen.smoke, *overrides], seeds or 1
    workers = workers or (cores() if chosen.parallel else 1)
    click.echo(run_table(chosen, overrides, seeds, workers, out / table))


def run_table(table: Table, overrides: Sequence[str], seeds: int | None, workers: int, out: Path) -> str:
    """Train the runs that are missing and return the table as text."""
    from lipkit.cli.console import display
    from lipkit.cli.table_runs import plan, records, train_missing

    runs = plan(table, out, overrides, seeds)
    with display() as show:
        train_missing(runs, workers=workers, display=show)
    lines = []
    for row in table.rows:
        lines += compare(row, [record.metrics() for record in records(runs, row)], table.also)
    return render(table, lines)


def compare(row: Row, measured: Sequence[Mapping[str, float]], also: Sequence[str] = ()) -> list[list[str]]:
    """Cells of one row, a line for each figure: label, figure, runs, published, mean, deviation, difference, `also`."""
    lines = []
    for name in row.published or (measured[0] if measured else ()):
        values = [metrics[name] for metrics in measured if name in metrics]
        mean = statistics.fmean(values) if values else None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        published = row.published.get(name)
        difference = None if mean is None or published is None else mean - published
        extra = [_mean([metrics[other] for metrics in measured if other in metrics]) for other in also]
        lines.append(
            [
                row.label,
                name,
                str(len(values)),
                shown(name, published),
                shown(name, mean) or "n/a",
                shown(name, deviation),
                shown(name, difference, sign=True),
                *extra,
            ]
        )
    return lines


def shown(name: str, value: float | None, sign: bool = False) -> str:
    """A figure as people write it: shares in per cent.

    >>> shown("tightness", 0.9937), shown("test_mse", 0.01234), shown("clean", -0.005, sign=True), shown("clean", None)
    ('99.37 %', '0.01234', '-0.50 %', '')
    """
    if value is None:
        return ""
    plus = "+" if sign else ""
    if name.partition("(")[0] in _SHARES:
        return f"{100 * value:{plus}.2f} %"
    return f"{value:{plus}.4g}"


def render(table: Table, lines: list[list[str]]) -> str:
    """The table as text."""
    from lipkit.cli.console import columns

    header = ["row", "figure", "runs", "published", "measured", "deviation", "difference", *table.also]
    return f"{table.source}: {table.description}\n\n{columns([header, *lines])}"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g}" if values else "n/a"
