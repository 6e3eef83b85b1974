"""``python -m papers``: repeat a published table and print its figures beside the paper's."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from lipkit.cli.console import display
from lipkit.cli.main import data_root
from lipkit.cli.main import main as program
from lipkit.cli.train import split_arguments
from lipkit.errors import OptionError, suggestion
from lipkit.files import write_atomic
from lipkit.memory import keep_freed_memory
from lipkit.report.record import hardware
from lipkit.text import table as aligned
from papers import table_runs, tables
from papers.figures import draw
from papers.table_runs import TableRecord
from papers.tables import Scale, Table, available_in


@click.command("papers", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("arguments", nargs=-1, metavar="[TABLE] [KEY=VALUE ...]")
@click.option("--list", "listed", is_flag=True, help="The tables: name, source, one line about each.")
@click.option("--all", "everything", is_flag=True, help="Every table; a run that fails does not stop the others.")
@click.option(
    "--scale",
    type=click.Choice(("full", "budget", "smoke")),
    help="full: the paper's setting (default). budget: 400 s of a CPU core. smoke: seconds, to see it run.",
)
@click.option("--row", "labels", multiple=True, metavar="LABEL", help="Make this row only; may be repeated.")
@click.option("--skip-thin", is_flag=True, help="Skip rows that differ from a neighbour in one number only.")
@click.option("--seeds", type=click.IntRange(min=1), help="Runs of each row; default: the table's at full, else 1.")
@click.option("--workers", type=click.IntRange(min=1), help="Runs at a time, one thread each; default: the table's.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of runs.")
@click.option("--root", type=click.Path(path_type=Path), metavar="DATA", help="Folder of the data sets (data.root).")
@click.option(
    "--records",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Print the records in FOLDER; train nothing.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="FOLDER", help="Copy the records of finished runs to FOLDER."
)
@click.option(
    "--figures",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Draw to FOLDER/TABLE.svg; default: OUT/TABLE/TABLE.svg, with --records no picture.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the runs in --out; train nothing.")
def command(
    arguments: tuple[str, ...],
    listed: bool,
    everything: bool,
    scale: Scale | None,
    labels: tuple[str, ...],
    skip_thin: bool,
    seeds: int | None,
    workers: int | None,
    out: Path,
    root: Path | None,
    records: Path | None,
    keep: Path | None,
    figures: Path | None,
    only_print: bool,
) -> None:
    """Make every row of TABLE and print its figures beside the published ones.

    Finished runs are kept; the same command again resumes interrupted ones. All figures are read from record.json
    files; a row without one is printed as not made. KEY=VALUE changes the recipe of every row, for example
    train.epochs=1. A figure of a paper is printed as a table of its points and drawn.
    """
    if listed:
        click.echo(aligned([], [[name, table.source, table.description] for name, table in tables.TABLES.items()]))
        return
    name, overrides = split_arguments(arguments)
    chosen = {key: only_rows(table, labels) for key, table in choose(name, everything).items()}
    if records is not None:
        if overrides or keep is not None or only_print or seeds or workers:
            raise click.UsageError(
                "--records only reads: expected no KEY=VALUE and no option but --scale, --all, --row and --figures"
            )
        for key, table in chosen.items():
            found = table_runs.kept(table, records / key, scale)
            print_table(key, table, found, figures, last=key == [*chosen][-1])
        return
    if root is not None:
        overrides.append(data_root(root))
    available = available_in(root)
    failed: list[str] = []
    with display() as show:
        for key, table in chosen.items():
            runs = table_runs.plan(
                table, out / key, overrides, seeds,
                scale=scale or "full", available=available, root=root, thin=not skip_thin,
            )  # fmt: skip
            if not only_print:
                show.note(f"{key}: {table.source}, scale {scale or 'full'}")
                at_a_time = workers or (hardware().cores if table.parallel else 1)
                problems = table_runs.make_missing(runs, workers=at_a_time, display=show, keep_going=everything)
                failed += [f"{key}: {problem}" for problem in problems]
            if keep is not None:
                show.note(f"{len(table_runs.keep(runs, keep / key))} records are in {keep / key}")
            found = {row.label: table_runs.made(runs, row) for row in table.rows}
            folder = figures or (out / key if any(found.values()) else None)
            print_table(key, table, found, folder, last=key == [*chosen][-1])
    if failed:
        raise click.ClickException(f"{len(failed)} runs failed: {'; '.join(failed)}")


def choose(name: str | None, everything: bool) -> dict[str, Table]:
    """The requested tables by name; an unknown name raises ``OptionError`` with the closest ones."""
    if everything == (name is not None):
        raise click.UsageError(f"expected a table or --all, got {'both' if everything else 'neither'}")
    if name is None:
        return dict(tables.TABLES)
    if name not in tables.TABLES:
        hint = suggestion(name, tables.TABLES) or "."
        raise OptionError(f"unknown table {name!r}{hint} python -m papers --list shows all")
    return {name: tables.TABLES[name]}


def only_rows(table: Table, labels: Sequence[str]) -> Table:
    """The table with only the rows of these labels, if any; an unknown label raises ``OptionError``."""
    known = [row.label for row in table.rows]
    if unknown := [label for label in labels if label not in known]:
        raise OptionError(f"--row: expected labels of the table ({'; '.join(known)}), got {unknown}")
    rows = tuple(row for row in table.rows if not labels or row.label in labels)
    return table.model_copy(update={"rows": rows})


def print_table(
    name: str, table: Table, found: Mapping[str, Sequence[TableRecord]], figures: Path | None, *, last: bool
) -> None:
    """Print the table, then an empty line unless it is the last; draw its picture, if any, to a file in ``figures``."""
    text = table_runs.render(table, found)
    if table.figure is not None and figures is not None:
        path = figures / f"{name}.svg"
        figures.mkdir(parents=True, exist_ok=True)
        write_atomic(path, draw(name, table, found).encode())
        text += f"\nfigure: {path}"
    click.echo(text + ("" if last else "\n\n"))


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code, as `lipkit.cli.main.main` does."""
    return program(arguments, command, "python -m papers")


if __name__ == "__main__":
    keep_freed_memory()  # training allocates tensors of the same sizes again and again
    sys.exit(main(sys.argv[1:]))
