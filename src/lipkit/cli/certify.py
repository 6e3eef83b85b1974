"""``lipkit certify``: certify and attack the exported network of a run again."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("certify")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--root", type=click.Path(path_type=Path), metavar="DATA", help="Folder of the data sets (data.root).")
@click.option("--device", default="cpu", show_default=True, help="Where to compute: cpu, cuda, mps.")
@click.option("--large-eps", is_flag=True, help="Radii of images above 8 are meant: no /255 was forgotten.")
def command(run: Path, changes: tuple[str, ...], root: Path | None, device: str, large_eps: bool) -> None:
    """Certify the network of RUN once more, attack it, and write a record and a report.

    They go into a folder of their own, RUN/certify-001 and so on, beside those that RUN has; the latter stay what
    reports, tables and exports of RUN show. An adversarial example inside a certified radius stops the command with an
    error. KEY=VALUE changes the section certify or data of the run's recipe:
    certify.eps=36/255,1 certify.attack_steps=200
    """
    for change in changes:
        if "=" not in change or change.split(".")[0] not in ("certify", "data"):
            raise click.UsageError(f"expected changes certify.KEY=VALUE or data.KEY=VALUE, got {change!r}")
    from lipkit.cli.console import display
    from lipkit.cli.train import data_root, result
    from lipkit.experiments import run as pipeline

    recipe = pipeline.read_recipe(run, [*changes, *([] if root is None else [data_root(root)])])
    with display() as show:
        outcome = pipeline.certify(run, recipe, device=device, display=show, large_eps=large_eps)
    click.echo(result(outcome))
