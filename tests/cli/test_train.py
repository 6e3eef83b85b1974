"""``lipkit train``: where and how long it runs."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lipkit import modules
from lipkit.cli.main import main
from lipkit.experiments import build
from lipkit.experiments import run as pipeline
from lipkit.experiments.recipe import load_recipe, unplaced
from lipkit.experiments.recipe_schema import Recipe
from lipkit.lowering import export
from lipkit.report import read_record
from lipkit.training import checkpoints as run_folder

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("no_plots")]

QUICK = [
    "data.limit=60", "train.epochs=1", "train.batch_size=2", "train.accelerator=cpu", "certify.eps=36/255",
    "certify.attack_steps=2", "certify.attack_samples=5", "model.options.width=1", "train.evaluate_samples=20",
]  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """The recipes and keywords that the command line hands to the pipeline."""
    calls = []
    monkeypatch.setattr(pipeline, "make_fabric", lambda options: None)
    monkeypatch.setattr(pipeline, "train", lambda recipe, **options: calls.append((recipe, options)))
    return calls


def test_options_of_place_and_time_reach_the_recipe(asked):
    words = "train --accelerator cpu --devices 2 --nodes 3 --strategy ddp --max-minutes 90"
    assert main([*words.split(), "digits_cayley", "train.lr=0.1"]) == 0
    section = asked[0][0].train
    assert (section.accelerator, section.devices, section.nodes, section.strategy, section.max_minutes, section.lr) == (
        "cpu", 2, 3, "ddp", 90, 0.1,
    )  # fmt: skip
    assert main(["train", "--devices", "auto"]) == 0
    assert asked[1][0].train.devices == "auto"


def test_a_resume_may_change_place_and_time_alone(asked, tmp_path):
    recipe = load_recipe("digits_cayley", ["train.max_minutes=1"])
    (tmp_path / pipeline.RECIPE).write_text(pipeline.to_yaml(recipe))
    assert main(["train", "--resume", str(tmp_path), "--devices", "2", "--max-minutes", "7"]) == 0
    changed, options = asked[0]
    assert (changed.train.devices, changed.train.max_minutes, options["resume"]) == (2, 7, tmp_path)
    assert unplaced(changed) == pipeline.unplaced(recipe)
    other = load_recipe("digits_cayley", ["train.precision=bf16-mixed"])
    assert unplaced(other) != pipeline.unplaced(recipe)
    assert main(["train", "--resume", str(tmp_path), "--seeds", "2"]) == 2


@pytest.mark.parametrize("value", ["bf16-true", "16-true", "transformer-engine"])
def test_a_precision_that_breaks_constraints_is_refused_with_the_recipe(value, capsys):
    assert main(["train", f"train.precision={value}"]) == 2
    assert "precision: expected '32-true', " in capsys.readouterr().err


def test_time_ends_a_run_and_a_resume_certifies_the_average(tmp_path, capsys):
    options = [*QUICK, "train.ema=0.9", "train.accumulate=2"]
    assert main(["train", "--out", str(tmp_path), "--max-minutes", "1e-9", *options]) == 0
    captured = capsys.readouterr()
    folder = tmp_path / "digits_cayley-001"
    assert captured.out == ""
    assert f"minutes with 0 of 1 epochs done: lipkit train --resume {folder} continues" in captured.err
    assert not (folder / "network").exists()
    assert run_folder.newest_checkpoint(folder).name.startswith("epoch-0000-step-")  # a busy machine looks earlier

    settings = run_folder.read_json(folder / "settings.json")
    with run_folder.opened(folder, settings, resume=True), ThreadPoolExecutor(1) as other:
        assert other.submit(main, ["train", "--resume", str(folder)]).result() == 2
    expected = f"lipkit: expected a run that no process trains, got {folder}, which another process holds"
    assert expected in capsys.readouterr().err
    assert main(["train", "--resume", str(folder), "--max-minutes", "60"]) == 0
    assert "samples per second" in capsys.readouterr().err
    recipe = pipeline.read_recipe(folder)
    data = build.load_data(recipe)
    model = build.build_model(recipe, data)
    epochs, weights, state = run_folder.load_checkpoint(folder)
    assert epochs == 1
    hashes = []
    for values in (weights, weights | state["average"]):
        model.load_state_dict(values)
        hashes.append(modules.sha256(export(model, data.input_shape)))
    assert hashes[0] != hashes[1] == read_record(folder).network_sha256


def test_every_key_of_a_recipe_is_described():
    def keys(model, prefix=""):
        for name, found in model.model_fields.items():
            yield f"{prefix}{name}", found.description
            for kind in (found.annotation, *getattr(found.annotation, "__args__", ())):
                if isinstance(kind, type) and hasattr(kind, "model_fields"):
                    yield from keys(kind, f"{prefix}{name}.")

    described = dict(keys(Recipe))
    assert "train.ema" in described
    assert [key for key, text in described.items() if not text] == []


def test_the_first_line_comes_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from lipkit.cli.main import main; import lipkit.errors\n"
        "class Stop:\n def find_spec(self, name, *_):\n  assert name != 'torch', 'torch'\n"
        "sys.meta_path.insert(0, Stop()); main(sys.argv[1:])"
    )
    for arguments, first in (
        (["digits_sll"], "digits_sll: 8 x 8 digits, small SLL network"),
        (["--resume", str(tmp_path)], f"continuing {tmp_path}"),
    ):
        done = subprocess.run([sys.executable, "-c", code, "train", *arguments], capture_output=True, text=True)
        line, *rest = done.stderr.splitlines()
        assert line.startswith(first)
        assert line.endswith("; importing torch")
        assert "torch" in rest[0]
    done = subprocess.run([sys.executable, "-c", code, "train", "no_such"], capture_output=True, text=True)
    assert "importing torch" not in done.stderr


@pytest.mark.slow
def test_two_processes_from_the_command_line(tmp_path):
    command = [sys.executable, "-m", "lipkit.cli.main", "train", *QUICK, "--devices", "2", "--strategy", "ddp"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "MEMBER: 2/2" in done.stderr
    assert done.stdout.count("L <= ") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["digits_cayley-001"]
