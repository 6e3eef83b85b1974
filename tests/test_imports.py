"""A package imports only from lines above its own, and no module from one that needs it: read from the syntax trees."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lipkit

ROOT = Path(lipkit.__file__).parent
REPOSITORY = Path(__file__).parents[1]
ORDER = [
    *("errors", "text", "shown", "files", "memory", "networks", "linalg", "conv", "proof", "bounds", "modules"),
    *("lowering", "integer"),
    *("layers", "models", "parametrize", "data"),
    "attacks",
    *(
        "training",
        "certificates",
        "analysis",
        "conformal",
        "wasserstein",
        "evaluation",
        "report",
        "interop",
        "sklearn",
        "explorer",
        "experiments",
        "cli",
        "testing",
    ),
]
FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem != "__init__")


def _home(file: Path) -> str:
    """Name of the package, or of the module at the top, that a file belongs to."""
    return file.relative_to(ROOT).with_suffix("").parts[0]


@functools.cache
def _imports(source: str, package: tuple[str, ...]) -> list[tuple[int, str]]:
    """Line and full name of every import from lipkit in a module of ``package``, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                names = [str(node.args[0].value)]
        found += [(node.lineno, name) for name in names if name.startswith("lipkit.")]
    return found


def _imported(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and first name after ``lipkit.`` of every import in a module of ``package``."""
    return ((line, name.split(".")[1]) for line, name in _imports(source, package))


def _graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules that it imports; a package is ``a.b.__init__`` and stands under ``a.b``."""
    names = {name.removesuffix(".__init__"): name for name in sources}
    graph = {}
    for name, file in names.items():
        found = {full for _, full in _imports(sources[file], tuple(file.split(".")[:-1]))}
        # ``from lipkit.a import b`` imports the module lipkit.a.b, or a name of lipkit.a.
        graph[name] = {full if full in names else full.rpartition(".")[0] for full in found} & {*names} - {name}
    return graph


def _circle(sources: dict[str, str]) -> list[str]:
    """The modules that lie on a circle of imports, or between two."""
    graph = _graph(sources)
    while graph:
        needed = set().union(*graph.values())
        free = [name for name, needs in graph.items() if name not in needed or not needs & {*graph}]
        if not free:
            break
        for name in free:
            del graph[name]
    return sorted(graph)


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_from_above(file: Path) -> None:
    home = _home(file)
    assert home in ORDER, f"expected {home} in the order of packages {ORDER}"
    package = ("lipkit", *file.relative_to(ROOT).parts[:-1])
    allowed = {*ORDER[: ORDER.index(home) + 1], "__version__"}
    wrong = [
        f"line {line}: lipkit.{name}" for line, name in _imported(file.read_text(), package) if name not in allowed
    ]
    assert not wrong, f"{home} may import {sorted(allowed)} only, got {wrong}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import lipkit.training", "training"),
        ("import torch, lipkit.cli.main as m", "cli"),
        ("from lipkit.certificates.margins import margins", "certificates"),
        ("from lipkit import report", "report"),
        ("from ..models import kwlarge", "models"),
        ("from .. import attacks", "attacks"),
        ("def f():\n    from lipkit.testing import check_layer", "testing"),
        ("import importlib\nimportlib.import_module('lipkit.data')", "data"),
    ],
)
def test_every_form_of_import_is_seen(source: str, found: str) -> None:
    assert [name for _, name in _imported(source, ("lipkit", "conv"))] == [found]


@pytest.mark.thorough
def test_programs_import_names_that_exist() -> None:
    """Tests import few of the programs beside the package, so a name that moved would show only when one is run."""
    wrong = []
    programs = [p for folder in ("benchmarks", "examples", "papers") for p in (REPOSITORY / folder).rglob("*.py")]
    for file in programs:
        for line, name in _imports(file.read_text(), ()):
            module, _, last = name.rpartition(".")
            found = importlib.import_module(module)
            if not hasattr(found, last) and not (hasattr(found, "__path__") and importlib.util.find_spec(name)):
                wrong.append(f"{file.name}:{line}: {name}")
    assert len(programs) > 50
    assert not wrong


@pytest.mark.thorough
def test_no_circle_of_imports() -> None:
    """Inside functions and for annotations neither. ``lipkit`` itself names what others import, and imports nothing."""
    assert (
        _circle({".".join(("lipkit", *f.relative_to(ROOT).with_suffix("").parts)): f.read_text() for f in FILES}) == []
    )


@pytest.mark.parametrize(
    ("b", "circle"),
    [
        ("def f():\n    from lipkit.p import a", ["lipkit.p.a", "lipkit.p.b"]),
        ("from lipkit.p import A", ["lipkit.p", "lipkit.p.a", "lipkit.p.b"]),
        ("if TYPE_CHECKING:\n    from .a import A", ["lipkit.p.a", "lipkit.p.b"]),
        ("import math", []),
    ],
)
def test_every_circle_is_seen(b: str, circle: list[str]) -> None:
    sources = {"p.__init__": "from lipkit.p.a import A", "p.a": "from lipkit.p import b", "p.c": "import lipkit.p.a"}
    assert _circle({f"lipkit.{name}": source for name, source in {**sources, "p.b": b}.items()}) == circle


def test_the_order_is_complete() -> None:
    assert {_home(file) for file in FILES} <= set(ORDER)


def test_training_never_imports_certificates() -> None:
    assert ORDER.index("training") < ORDER.index("certificates")


@pytest.mark.parametrize("name", ["lipkit", "lipkit.errors", "lipkit.files"])
def test_torch_is_not_needed(name: str) -> None:
    code = f"import sys, {name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT.parent)})


def test_the_package_imports_nothing_that_lies_beside_it() -> None:
    beside = re.compile(r"^\s*(?:from|import) (?:papers|benchmarks|tests|examples)\b", re.M)
    assert [file for file in ROOT.rglob("*.py") if beside.search(file.read_text())] == []
