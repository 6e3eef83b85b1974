"""``lipkit list``: the available layers, models, data sets, recipes and networks.

Tables of the package are read from its source text, because importing them would load torch, which takes seconds. A
test compares them with the imported tables.
"""

import ast
import json
from collections.abc import Iterable
from pathlib import Path

import click

import lipkit
from lipkit.files import read_text
from lipkit.text import table


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
    from lipkit.shown import lower, upper
    from lipkit.text import format_radius

    if (folder / "estimate.json").exists():
        found = json.loads(read_text(folder / "estimate.json"))
        return [found["data"], f"L {upper(found['constant'])}", f"W1 >= {lower(found['low'], 4)} at 95 %", ""]
    record = read_record(folder)
    assert isinstance(record, Record)
    first = record.certified[0]
    return [
        record.data.name,
        f"L {upper(record.lipschitz.computed)}",
        f"clean {100 * record.clean.value:.2f} %",
        f"certified({format_radius(first.eps)}) {100 * first.share.value:.2f} %",
    ]


KINDS = {"layers": layers, "models": models, "datasets": datasets, "recipes": recipes, "networks": networks}


@click.command("list")
@click.argument("kind", type=click.Choice(list(KINDS)))
def command(kind: str) -> None:
    """List layers, models, datasets, recipes, or networks of lipkit.load."""
    click.echo(table([], KINDS[kind]()))


class Source:
    """The statements of one module of the package, given by its full name."""

    def __init__(self, module: str) -> None:
        path = Path(lipkit.__file__).parent.joinpath(*module.split(".")[1:])
        found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self._statements: dict[str, ast.AST] = {}
        self._imported: dict[str, str] = {}  # name -> module that it is imported from
        for node in ast.parse(found.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                self._imported |= {name.name: str(node.module) for name in node.names}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._statements[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self._statements[node.target.id] = node.value
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self._statements[node.name] = node

    def find(self, name: str) -> ast.AST:
        """The value or definition of a name, followed through its imports."""
        return self._statements[name] if name in self._statements else Source(self._imported[name]).find(name)

    def names(self, table: str) -> list[str]:
        """The imported names that a table lists, in order."""
        found = [node for node in ast.walk(self.find(table)) if isinstance(node, ast.Name)]
        found.sort(key=lambda node: (node.lineno, node.col_offset))  # ast.walk goes level by level
        return [node.id for node in found if node.id in self._imported]

    def keys(self, table: str) -> list[str]:
        """The keys of a table that is a dictionary of strings."""
        node = self.find(table)
        assert isinstance(node, ast.Dict)
        return [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]

    def summary(self, name: str) -> str:
        """The first line of the docstring of a function."""
        node = self.find(name)
        assert isinstance(node, ast.FunctionDef)
        return (ast.get_docstring(node) or "").split("\n")[0]

    def fields(self, name: str) -> dict[str, str]:
        """The texts of ``name = Class(field="...")`` or ``name = replace(other, field="...")``, defaults included."""
        if name in self._imported:
            return Source(self._imported[name]).fields(name)
        node = self.find(name)
        assert isinstance(node, ast.Call)
        if isinstance(node.args[0] if node.args else None, ast.Name):
            known = self.fields(ast.unparse(node.args[0]))
        else:
            kind = self.find(ast.unparse(node.func))
            assert isinstance(kind, ast.ClassDef)
            known = _strings((ast.unparse(s.target), s.value) for s in kind.body if isinstance(s, ast.AnnAssign))
        return known | _strings((str(k.arg), k.value) for k in node.keywords)


def _strings(fields: Iterable[tuple[str, ast.AST | None]]) -> dict[str, str]:
    """The fields whose value is a string."""
    return {key: v.value for key, v in fields if isinstance(v, ast.Constant) and isinstance(v.value, str)}
