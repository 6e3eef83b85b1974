"""``lipkit list``: the available layers, models, data sets, recipes and networks."""

from __future__ import annotations

import json
from pathlib import Path

import click

import lipkit
from lipkit.cli.source import Source
from lipkit.files import read_text
from lipkit.text import table

KINDS = ("layers", "models", "datasets", "recipes", "networks")


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS))
def command(kind: str) -> None:
    """List layers, models, datasets, recipes, or networks of lipkit.load."""
    known = {"layers": layers, "models": models, "datasets": datasets, "recipes": recipes, "networks": networks}
    click.echo(table([], known[kind]()))


def layers() -> list[list[str]]:
    """Rows of families: acronym, method, promised singular values, source."""
    families = Source("lipkit.layers.families")
    rows = [families.fields(name) for name in families.names("FAMILIES")]
    return [[row["name"], row["title"], row["claim"], f"{row['paper']}, {row['equation']}"] for row in rows]


def models() -> list[list[str]]:
    """Rows of architectures: name, first line of the docstring."""
    source = Source("lipkit.models")
    return [[name, source.summary(name)] for name in source.names("MODELS")]


def datasets() -> list[list[str]]:
    """Rows of data sets: name, description, where to get it."""
    from lipkit.data import DATASETS

    own = [
        ["folder:PATH", "your images of one size: PATH/train/CLASS/*, PATH/test/CLASS/*", ""],
        ["images:SIZE:PATH", "your images of any size, the same folders: made RGB of SIZE x SIZE", ""],
        ["idx:PATH", "four IDX files named as MNIST's in one folder: Fashion-MNIST, KMNIST, EMNIST", ""],
        ["npz:PATH", "your arrays: x_train, y_train, x_test, y_test", ""],
        ["pkg.mod:factory", "your function, which is run", ""],
    ]
    return [[name, entry.description, entry.source] for name, entry in DATASETS.items()] + own


def recipes() -> list[list[str]]:
    """Rows of recipes: name, description."""
    import yaml

    files = sorted((Path(lipkit.__file__).parent / "recipes").glob("*.yaml"))
    return [[file.stem, yaml.safe_load(read_text(file))["description"]] for file in files]


def networks() -> list[list[str]]:
    """Rows of networks: name, data, proved constant, measured accuracy, folder."""
    from lipkit.networks import folder, names

    return [[name, *_measured(folder(name)), str(folder(name))] for name in names()]


def _measured(folder: Path) -> list[str]:
    """Cells of a packaged network: data, proved constant, and two accuracies; of a critic, its bound of W1."""
    from lipkit.report import Record, read_record
    from lipkit.text import format_radius

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
