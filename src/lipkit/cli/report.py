"""``lipkit report``: write the page of a run again."""

from pathlib import Path

import click


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    """Write report.html of RUN anew from what the folder holds, and print its tables."""
    from lipkit.report import Record, read_record, write_report
    from lipkit.report.tables import class_rows, summary
    from lipkit.text import printable, table

    path = write_report(run)
    record = read_record(run)
    tables = [summary(record)]
    if isinstance(record, Record):
        tables.append(table(*class_rows(record)))
    click.echo("\n\n".join([*tables, f"report  {printable(path)}"]))
