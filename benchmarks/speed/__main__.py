"""``python -m benchmarks.speed``: how fast the layers are beside a plain convolution, on this machine."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import click
from benchmarks.speed.others import DEFAULT, read_others
from benchmarks.speed.run import QUICK, Plan, Result, measure
from benchmarks.speed.shapes import parse
from benchmarks.speed.table import sections, write_document
from click.core import ParameterSource

from lipkit.files import read_text, write_atomic


@click.command("python -m benchmarks.speed")
@click.option("--family", "families", multiple=True, help="Acronym of a family; several times for several.")
@click.option("--shape", "shapes", multiple=True, help="IN->OUTsSTRIDE@SIDE such as 128@16; several times for several.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), help="Images in a batch [32 and 128].")
@click.option("--part", "parts", multiple=True, type=click.Choice(("layers", "memory", "networks")), help="[all]")
@click.option("--repeats", type=click.IntRange(1), help="Most samples of each contender [20].")
@click.option("--seconds", type=click.FloatRange(0), help="Budget of each contender at each shape [0.6].")
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda.")
@click.option("--compiled", is_flag=True, help="Time torch.compile of each layer, too.")
@click.option("--autocast", is_flag=True, help="All under autocast to bfloat16; beside it, exported bfloat16 weights.")
@click.option("--quick", is_flag=True, help="A few shapes only.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all samples there.")
@click.option("--doc", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Put the tables in there.")
@click.option(
    "--from", "source", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Measure nothing: show this."
)
@click.option(
    "--others",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=DEFAULT,
    show_default="others.csv",
    help="Ratios of other libraries that were measured elsewhere, shown beside these.",
)
@click.pass_context
def command(
    ctx: click.Context, json_file: Path | None, doc: Path | None, source: Path | None, others: Path, **given: Any
) -> None:
    """Time the layers: training step, exported forward, memory, whole networks.

    Everything is a ratio to nn.Conv2d with circular padding, the same channels and a 3 x 3 kernel, on one thread; next
    to it the same with zero padding, the layers as their papers print them, and, where they are installed, those of
    orthogonium and deel-torchlip. Layers that are not what they promise are refused before anything is timed. The
    tables go to stdout.
    """
    text, ratios = command_line(ctx), read_others(others)

    def keep(result: Result) -> None:
        if json_file is not None:
            write_atomic(json_file, json.dumps({"command": text, **result}, indent=1).encode())

    if source is not None:
        result = read(source)
    else:
        result = {"command": text, **measure(plan_of(given), lambda line: click.echo(line, err=True), keep)}
    for part, table in sections(result, ratios).items():
        click.echo(f"## {part}\n\n{table}\n")
    if doc is not None:
        click.echo(f"{doc}: wrote {', '.join(write_document(doc, result, ratios))}", err=True)


def plan_of(given: dict[str, Any]) -> Plan:
    """The plan that the options describe; what they leave open comes from the full plan or the quick one."""
    base = QUICK if given["quick"] else Plan()
    asked: dict[str, Any] = {name: tuple(given[name]) for name in ("families", "batches", "parts") if given[name]}
    asked |= {name: given[name] for name in ("repeats", "seconds") if given[name] is not None}
    if given["shapes"]:
        asked |= {"shapes": tuple(map(parse, given["shapes"])), "own_only": False}
    if (given["shapes"] or given["families"]) and not given["parts"]:
        asked["parts"] = ("layers",)
    asked |= {name: given[name] for name in ("device", "compiled", "autocast")}
    return dataclasses.replace(base, keep_memory=True, **asked)


def read(path: Path) -> dict[str, Any]:
    """A result that ``--json`` wrote."""
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--from: expected a file written by --json, got {path} ({error})") from None
    if not isinstance(found, dict) or found.get("schema") != 1 or "cells" not in found:
        raise click.UsageError(f"--from: expected a file written by --json with schema 1, got {path}")
    return found


def command_line(ctx: click.Context) -> str:
    """The command as it was given, without the places where it writes."""
    words = ["python", "-m", "benchmarks.speed"]
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE or name in (
            "json_file",
            "source",
            "others",
        ):
            continue
        value = ctx.params[name]
        if isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(parameter.opts[0])
        else:
            for one in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], str(one)]
    return shlex.join(words)


if __name__ == "__main__":
    command()
