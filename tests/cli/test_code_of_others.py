"""A run that somebody sent executes nothing, whatever verb reads it: no module that it names, no pickle it holds."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from lipkit import explorer
from lipkit.cli.main import VERBS, main
from lipkit.errors import DataError, RunError
from lipkit.experiments import load_recipe, read_recipe, train
from lipkit.experiments.build import load_data

pytestmark = pytest.mark.usefixtures("no_plots")
RUN = Path(__file__).parents[1] / "experiments" / "run_of_schema_1"
QUICK = ["certify.attack_steps=1", "certify.attack_samples=2"]
# With the run in the folder "their" of the working directory.
COMMANDS = {
    "train": [["--resume", "their"]],
    "certify": [["their", *QUICK], ["their", "digits", *QUICK], ["their/network", "npz:their/data.npz", *QUICK]],
    "check": [["their/certificate.jsonl", "their/network", "npz:their/data.npz"]],
    "attack": [["their", "--samples", "2", "--steps", "1"]],
    "report": [["their"]],
    "compare": [["their"], ["their", "--to", "html"]],
    "bound": [["their", "--restarts", "0"], ["their/model.pt", "--input-shape", "1,8,8"]],
    "wasserstein": [["their/samples.npy", "their/samples.npy", "--steps", "1"]],
    "list": [["networks"]],
    "recipe": [["show", "their/recipe.yaml"]],
    "export": [["their", "--to", form] for form in ("safetensors", "hub")],
    "explore": [["their"]],
}
SOURCE = """
import os
if not os.path.exists("executed"):
    os.mkdir("executed")
def load():
    from lipkit.data import load
    return load("digits", limit=12)
def model(input_shape, classes):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(explorer, "serve", lambda *_: None, raising=False)
    yield Path(shutil.copytree(RUN, "their"))
    for name in ("their", "their.helper"):
        sys.modules.pop(name, None)


def plant(run: Path, **changes: object) -> None:
    """The run's recipe, with other data or another model, and pickles in place of every file that may hold numbers."""
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))
    (run / "helper.py").write_text(SOURCE)
    evil = pickle.dumps(Evil(), protocol=2)
    (run / "model.pt").write_bytes(evil)
    np.save(run / "samples.npy", np.array([Evil()] * 4), allow_pickle=True)
    objects = {name: np.array([Evil()] * 4) for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(run / "data.npz", allow_pickle=True, **objects)
    (run / "cifar-10-batches-py").mkdir()
    for name in ("data_batch_1", "test_batch"):
        (run / "cifar-10-batches-py" / name).write_bytes(evil)
    checkpoint = run / "checkpoints" / "epoch-0020"
    (checkpoint / "state.pt").write_bytes(evil)
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    manifest["sha256"]["state.pt"] = hashlib.sha256(evil).hexdigest()
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))


DATA = {"spec": "digits", "root": None, "limit": 12}
PLANTED: dict[str, dict[str, object]] = {
    "data": {"data": DATA | {"spec": "their.helper:load"}},
    "model": {"model": "their.helper:model"},
    "pickles": {"data": {"spec": "cifar10", "root": "their"}},
    "checkpoint": {"data": DATA},  # of a run that is not finished
}


@pytest.mark.thorough
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", PLANTED)
def test_no_verb_executes_what_a_run_names_or_holds(run: Path, kind: str, verb: str) -> None:
    plant(run, **PLANTED[kind])
    if kind == "checkpoint":
        (run / "record.json").unlink()
    before = list(sys.path)
    for arguments in COMMANDS[verb]:
        assert main([verb, *arguments]) in (0, 2)
        assert not Path("executed").exists()
        assert "their.helper" not in sys.modules
        assert sys.path == before


@pytest.mark.parametrize("verb", ["train", "certify", "attack", "export", "explore"])
def test_the_refusal_names_the_module(run: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    plant(run, **PLANTED["data"])
    assert main([verb, *COMMANDS[verb][0]]) == 2
    error = capsys.readouterr().err
    assert "lipkit: their/recipe.yaml: data.spec: expected a name of lipkit's, got 'their.helper:load'" in error
    assert "runs the module their.helper: read that module, then give --allow-code" in error
    with pytest.raises(RunError, match=r"their\.helper"):
        read_recipe(run)


@pytest.mark.thorough
def test_code_that_is_allowed_is_executed(run: Path) -> None:
    plant(run, **PLANTED["data"])
    assert main(["certify", "their", "--allow-code", *QUICK]) == 0
    assert Path("executed").exists()


@pytest.mark.thorough
def test_a_model_that_is_not_built_needs_no_leave(run: Path) -> None:
    plant(run, **PLANTED["model"])
    (run / "record.json").unlink()
    assert main(["attack", "their", "--samples", "2", "--steps", "1"]) == 0
    assert main(["export", "their", "--to", "hub"]) == main(["train", "--resume", "their"]) == 2
    assert not Path("executed").exists()


@pytest.mark.thorough
def test_a_recipe_of_the_users_own_says_what_it_imports(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(run, **PLANTED["data"])
    assert main(["train", "their/recipe.yaml", "train.epochs=1", "train.accelerator=cpu", *QUICK]) == 0
    assert "importing their.helper:load: this runs the code of its module" in capsys.readouterr().err


def test_the_working_folder_is_searched_for_code_alone(run: Path) -> None:
    before = list(sys.path)
    for spec in ("npz:absent", "folder:absent", "images:8:absent"):
        with pytest.raises(DataError):
            load_data(load_recipe("digits_cayley", [f"data.spec='{spec}'"]))
    assert sys.path == before


def test_a_resume_in_python_takes_no_recipe_that_names_code_either(run: Path) -> None:
    plant(run, **PLANTED["model"])
    with pytest.raises(RunError, match=r"model\.name"):
        train(read_recipe(run), resume=run)
