"""``lipkit compare``: runs beside each other."""

from pathlib import Path

import click

FORMS = ("text", "csv", "latex", "html")


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--to", "form", type=click.Choice(FORMS), default="text", help="Form of the table; html has curves, too.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the table to FILE.")
def command(runs: tuple[Path, ...], form: str, out: Path | None) -> None:
    """Show runs beside each other: one row for each setting, mean and standard deviation over its seeds.

    RUN is the folder of a finished run, or a folder of finished runs. The rows are named by the keys in which the
    recipes differ. The form csv has one line for each run.
    """
    from lipkit.files import write_atomic
    from lipkit.report import comparison
    from lipkit.text import printable

    made = comparison.FORMS[form](comparison.settings(runs))
    if out is None:
        click.echo(made)
    else:
        write_atomic(out, f"{made}\n".encode())
        click.echo(f"comparison  {printable(out)}")
