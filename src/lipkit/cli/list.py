"""``lipkit list``: what there is to choose from."""

from __future__ import annotations

import inspect

import click

KINDS = ("layers", "models", "datasets", "recipes", "tables")


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS))
def command(kind: str) -> None:
    """List layers, models, datasets, recipes, or the published tables of lipkit reproduce."""
    from lipkit.experiments.outcome import columns

    known = {"layers": layers, "models": models, "datasets": datasets, "recipes": recipes, "tables": tables}
    click.echo(columns(known[kind]()))


def layers() -> list[list[str]]:
    """Acronym, method, what its singular values are, source."""
    from lipkit.layers.families import FAMILIES

    return [[f.name, f.title, f.claim, f"{f.paper}, {f.equation}"] for f in FAMILIES.values()]


def models() -> list[list[str]]:
    """Name and what it is."""
    from lipkit.models import MODELS

    return [[name, (inspect.getdoc(build) or "").split("\n")[0]] for name, build in MODELS.items()]


def datasets() -> list[list[str]]:
    """Name, what it is, where to get it."""
    from lipkit.data import DATASETS

    own = [
        ["folder:PATH", "your images of one size: PATH/train/CLASS/*, PATH/test/CLASS/*", ""],
        ["images:SIZE:PATH", "your images of any size, the same folders: made RGB of SIZE x SIZE", ""],
        ["npz:PATH", "your arrays: x_train, y_train, x_test, y_test", ""],
        ["pkg.mod:factory", "your function, which is run", ""],
    ]
    return [[name, entry.description, entry.source] for name, entry in DATASETS.items()] + own


def recipes() -> list[list[str]]:
    """Name and what it does."""
    from lipkit.experiments.recipe import load_recipe, names

    return [[name, load_recipe(name).description] for name in names()]


def tables() -> list[list[str]]:
    """Name, source, what it is about."""
    from lipkit.experiments.tables import TABLES

    return [[name, table.source, table.description] for name, table in TABLES.items()]
