"""``lipkit reproduce``: repeat a published table and print it beside the paper's figures."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lipkit.cli.tables import Row, Table


@click.command("reproduce")
@click.argument("table")
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--seeds", type=click.IntRange(min=1), help="Runs of each row; the table's own number by default.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of runs.")
@click.option("--root", type=click.Path(path_type=Path), metavar="DATA", help="Folder of the data sets (data.root).")
def command(table: str, changes: tuple[str, ...], seeds: int | None, out: Path, root: Path | None) -> None:
    """Train every row of TABLE and print its figures beside the published ones.

    KEY=VALUE changes the recipe of every row, for example train.epochs=1 for a first look.
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
    click.echo(run_table(TABLES[table], overrides, seeds, out))


def run_table(table: Table, overrides: Sequence[str], seeds: int | None, out: Path) -> str:
    """Train the rows and return the table as text."""
    from lipkit.cli import pipeline
    from lipkit.cli.console import display
    from lipkit.training.recipe import load_recipe

    lines: list[list[str]] = []
    with display() as show:
        for row in table.rows:
            recipe = load_recipe(row.recipe, [*row.overrides, *overrides])
            first, measured = recipe.train.seed, []
            for seed in range(first, first + (seeds or table.seeds)):
                show.note(f"{row.label}, seed {seed}")
                outcome = pipeline.train(pipeline.seeded(recipe, seed), out=out, display=show)
                if outcome is not None:
                    measured.append(outcome.metrics)
            lines += compare(row, measured)
    return render(table, lines)


def compare(row: Row, measured: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Cells of one row: label, figure, published, measured mean, standard deviation."""
    cells = []
    for name in row.published or (measured[0] if measured else ()):
        values = [metrics[name] for metrics in measured if name in metrics]
        mean = f"{statistics.fmean(values):.4f}" if values else "n/a"
        deviation = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
        published = f"{row.published[name]:.4f}" if name in row.published else ""
        cells.append([row.label, name, published, mean, deviation])
    return cells


def render(table: Table, lines: list[list[str]]) -> str:
    """The table as text."""
    from lipkit.cli.console import columns

    header = ["row", "figure", "published", "measured", "deviation"]
    return f"{table.source}: {table.description}\n\n{columns([header, *lines])}"
