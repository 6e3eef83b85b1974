from __future__ import annotations

import inspect

import pytest

from lipkit.attacks import ATTACKS
from lipkit.cli.main import main
from lipkit.data import DATASETS
from lipkit.experiments.recipe import load_recipe, names
from lipkit.layers.families import FAMILIES
from lipkit.models import MODELS
from lipkit.text import table as aligned


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("layers", FAMILIES), ("models", MODELS), ("datasets", DATASETS), ("recipes", names())],
)
def test_list_names_everything(kind, expected, capsys):
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line for line in lines}
    for name in expected:
        assert len(found[name].split()) > 2, found[name]


@pytest.mark.thorough
def test_what_is_read_from_the_source_is_what_is_imported(capsys):
    expected = {
        "layers": [[f.name, f.title, f.claim, f"{f.paper}, {f.equation}"] for f in FAMILIES.values()],
        "models": [[name, (inspect.getdoc(build) or "").split("\n")[0]] for name, build in MODELS.items()],
        "recipes": [[name, load_recipe(name).description] for name in names()],
    }
    for kind, rows in expected.items():
        assert main(["list", kind]) == 0
        assert capsys.readouterr().out == aligned([], rows) + "\n"
    assert main(["attack", "--help"]) == 0
    assert f"[{'|'.join(ATTACKS)}]" in capsys.readouterr().out
