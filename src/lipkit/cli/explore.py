"""``lipkit explore``: look at one run, or at two side by side, in a browser on this machine."""

from pathlib import Path

import click

from lipkit.cli.main import ALLOW_CODE, ROOT


@click.command("explore")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path), metavar="[RUN]")
@ROOT
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; 0, the default, takes a free one.")
@ALLOW_CODE
@click.option("--allow-remote", is_flag=True, help="Listen beyond loopback: anyone who reaches the host can look.")
def command(
    run: Path, other: Path | None, root: list[str], host: str, port: int, allow_code: bool, allow_remote: bool
) -> None:
    """Serve a page that shows RUN: images, certified radii, and adversarial examples at a radius set by a slider.

    RUN is the folder of a run, or a name of lipkit list networks. Two runs on the same test samples are compared side
    by side. Stop it with Ctrl-C.
    """
    from lipkit.explorer import listen
    from lipkit.networks import resolved
    from lipkit.text import printable

    runs = [resolved(path) for path in (run, other) if path is not None]
    for path in runs:
        if not path.is_dir():
            raise click.UsageError(f"expected the folder of a run, got {path}")
    listener, address = listen(host, port, allow_remote)
    with listener:
        # The port is open before torch is imported and data are read, so an early browser waits for its answer.
        click.echo(f"{address} shows {', '.join(map(printable, runs))} as soon as it is read; Ctrl-C stops it")
        from lipkit.experiments import run as pipeline
        from lipkit.experiments.build import load_data
        from lipkit.explorer import open_runs, serve

        opened = []
        for path in runs:
            data = load_data(pipeline.read_recipe(path, root, allow_code=allow_code, build=False))
            opened.append((path, data.test, data.classes))
        serve(open_runs(opened), listener, host)
