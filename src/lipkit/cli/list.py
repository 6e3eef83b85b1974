"""``lipkit list``: what there is to choose from."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import click

from lipkit.files import read_text

KINDS = ("layers", "models", "datasets", "recipes", "tables", "networks")


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS))
def command(kind: str) -> None:
    """List layers, models, datasets, recipes, the published tables of lipkit reproduce, or networks of lipkit.load."""
    from lipkit.experiments.outcome import columns

    known = {
        "layers": layers,
        "models": models,
        "datasets": datasets,
        "recipes": recipes,
        "tables": tables,
        "networks": networks,
    }
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


def networks() -> list[list[str]]:
    """Name, data, proved constant, what was measured, folder."""
    from lipkit.networks import folder, names

    return [[name, *_measured(folder(name)), str(folder(name))] for name in names()]


def _measured(folder: Path) -> list[str]:
    from lipkit.certificates import format_radius
    from lipkit.report import Record, read_record

    if (folder / "estimate.json").exists():
        found = json.loads(read_text(folder / "estimate.json"))
        return [found["data"], f"L {found['constant']:.4g}", f"W1 >= {found['low']:.4g} at 95 %", ""]
    record = read_record(folder)
    assert isinstance(record, Record)
    first = record.certified[0]
    return [
        record.data.name,
        f"L {record.lipschitz.computed:.4g}",
        f"clean {100 * record.clean.value:.2f} %",
        f"certified({format_radius(first.eps)}) {100 * first.share.value:.2f} %",
    ]
