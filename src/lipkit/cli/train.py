"""``lipkit train``: from a recipe to a certified network with its report."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lipkit.cli.list import Source, recipes
from lipkit.cli.main import ALLOW_CODE, LARGE_EPS, ROOT, once
from lipkit.memory import importing
from lipkit.text import printable

if TYPE_CHECKING:
    from lipkit.experiments.run import Outcome


@click.command("train")
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [KEY=VALUE ...]")
@click.option("--seeds", type=click.IntRange(min=1), help="Train with N seeds; prints mean and standard deviation.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Continue the run in this folder.")
@click.option("--out", type=click.Path(path_type=Path), metavar="RUNS", help="Folder of the runs; default: runs.")
@ROOT
@click.option("--accelerator", metavar="NAME", help="auto, cpu, cuda or mps (train.accelerator).")
@click.option("--devices", metavar="N", help="Devices on each machine: a number, or auto (train.devices).")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of machines (train.nodes); torchrun sets it.")
@click.option("--strategy", metavar="NAME", help="Such as ddp (train.strategy).")
@click.option("--max-minutes", metavar="M", help="Stop a run at a checkpoint after M minutes (train.max_minutes).")
@LARGE_EPS
@ALLOW_CODE
def command(
    arguments: tuple[str, ...], seeds: int | None, resume: Path | None, out: Path | None, root: list[str],
    large_eps: bool, allow_code: bool, **placement: str | int | None,
) -> None:  # fmt: skip
    """Train a network, certify and attack it, and write its report.

    RECIPE is a packaged name (lipkit list recipes; without one: digits_cayley) or the path of a YAML file. KEY=VALUE
    changes it: train.epochs=5 model.options.width=2 certify.eps=36/255,1

    The options from --accelerator to --max-minutes also apply to a resumed run.
    """
    name, overrides = split_arguments(arguments)
    overrides += root
    placed = [f"train.{key}={value}" for key, value in placement.items() if value is not None]
    # Importing torch takes seconds: say first what is going on. torchrun's other processes stay silent.
    if "torch" not in sys.modules and os.environ.get("LOCAL_RANK", "0") == "0" and (line := started(name, resume)):
        click.echo(f"{line}; importing torch", err=True)
    if resume is None:
        with importing():
            from lipkit.experiments.recipe import DEFAULT, load_recipe

        recipe = load_recipe(DEFAULT if name is None else name, once(overrides + placed))
    elif name is not None or overrides or seeds is not None or out is not None:
        raise click.UsageError(
            "--resume takes all from the run: expected no RECIPE, KEY=VALUE, --seeds, --out or --root"
        )
    with importing():
        from lipkit.cli.console import display
        from lipkit.experiments import run as pipeline  # slow to import, so after the recipe was checked
        from lipkit.experiments.recipe import seeded

    outcomes: list[Outcome] = []
    with display() as show:
        if resume is not None:
            recipe = pipeline.read_recipe(resume, placed, allow_code=allow_code)
            where: dict[str, Any] = {"resume": resume}
        else:
            with importing():
                # One Fabric for all seeds: its processes start once.
                where = {"out": out or Path("runs"), "fabric": pipeline.make_fabric(recipe.train)}
        for seed in range(recipe.train.seed, recipe.train.seed + (seeds or 1)):
            outcome = pipeline.train(seeded(recipe, seed), display=show, large_eps=large_eps, **where)
            if outcome is not None:
                outcomes.append(outcome)
                if seeds:
                    show.note(f"seed {seed}: {', '.join(f'{k} {v:.4f}' for k, v in outcome.metrics.items())}")
    if seeds and outcomes:
        from lipkit.report.comparison import settings, to_text

        folders = [outcome.folder for outcome in outcomes]
        click.echo(f"{to_text(settings(folders))}\n\nruns  {', '.join(printable(folder) for folder in folders)}")
    elif outcomes:
        click.echo(result(outcomes[0]))


def started(name: str | None, resume: Path | None) -> str:
    """A line about the run to print before torch is imported; empty if the recipe or run does not exist.

    >>> started("digits_sll", None)[:41], started("no_such_recipe", None)
    ('digits_sll: 8 x 8 digits, small SLL netwo', '')
    """
    known = {row[0]: ": ".join(row) for row in recipes()}
    if resume is not None:
        return f"continuing {printable(resume)}" if resume.is_dir() else ""
    if name is None:
        name = str(ast.literal_eval(ast.unparse(Source("lipkit.experiments.recipe").find("DEFAULT"))))
    return known.get(name, printable(name) if Path(name).is_file() else "")


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """(recipe or None, overrides): an argument with ``=`` is an override; at most one has none.

    >>> split_arguments(["mnist_cayley", "train.epochs=5"])
    ('mnist_cayley', ['train.epochs=5'])
    """
    names = [a for a in arguments if "=" not in a]
    if len(names) > 1:
        raise click.UsageError(f"expected one recipe and changes KEY=VALUE, got {' and '.join(map(repr, names))}")
    return (names[0] if names else None), [a for a in arguments if "=" in a]


def result(outcome: Outcome) -> str:
    """The text printed at the end of a run."""
    from lipkit.report.html import REPORT
    from lipkit.report.tables import summary

    folder = printable(outcome.folder)
    return f"{summary(outcome.record)}\n\nrun     {folder}\nreport  {printable(outcome.folder / REPORT)}"
