from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lipkit import modules
from lipkit.certificates.certificate_file import data_sha256, read_certificate
from lipkit.cli.main import main
from lipkit.data import Data, ImageFiles, Split
from lipkit.errors import DataError, NoRuleError, OptionError, RecipeError, RunError, ShapeError
from lipkit.experiments import build
from lipkit.experiments import run as pipeline
from lipkit.experiments.recipe import load_recipe, seeded
from lipkit.experiments.run import Display, finish, told
from lipkit.layers import CayleyLinear
from lipkit.report import read_record
from lipkit.report.examples import load_examples
from lipkit.training import checkpoints as run_folder
from lipkit.training import fit

pytestmark = pytest.mark.usefixtures("no_plots")

QUICK = [
    "data.limit=60", "train.epochs=2", "train.batch_size=20", "train.accelerator=cpu", "train.evaluate_every=1",
    "certify.eps=36/255", "certify.attack_steps=2", "certify.attack_samples=20",
]  # fmt: skip


def with_changes(*changes: str) -> list[str]:
    """QUICK, without the keys that these changes set."""
    keys = {change.partition("=")[0] for change in changes}
    return [*(setting for setting in QUICK if setting.partition("=")[0] not in keys), *changes]


FILES = {
    "recipe.yaml", "settings.json", "metrics.jsonl", "checkpoints", "network", "record.json",
    "certificate.jsonl", "examples.safetensors", "report.html", "lipkit_check.py", ".lock",
}  # fmt: skip


def quick(*overrides):
    return load_recipe("digits_cayley", [*QUICK, *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return pipeline.train(quick(), out=out)


@pytest.mark.thorough
def test_a_run_leaves_everything_a_report_needs(finished):
    assert {p.name for p in finished.folder.iterdir()} == FILES
    assert finished.folder.name == "digits_cayley-001"
    assert pipeline.read_recipe(finished.folder) == quick()
    with pytest.raises(RunError, match=rf"recipe\.yaml, got .*network; {finished.folder} is one$"):
        pipeline.read_recipe(finished.folder / "network")
    record = read_record(finished.folder)
    assert record == finished.record
    assert record.seed == 0
    assert record.parameters > 1000
    assert (record.seen.steps, record.seen.samples, record.seen.epochs) == (6, 120, 2.0)
    assert record.seen.samples_per_cpu_second > 0
    assert record.data.train_samples == record.data.test_samples == 60
    assert record.recipe["data"]["limit"] == 60
    assert record.lipschitz.claimed == pytest.approx(1, abs=1e-5)
    assert set(record.times) >= {"train", "certify", "attack"}
    assert modules.sha256(modules.load(finished.folder / "network")) == record.network_sha256
    rows = run_folder.read_metrics(finished.folder)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {"loss", "accuracy", "clean", "certified(36/255)", "lipschitz", "lr", "seconds"} <= rows[1].keys()
    assert rows[1]["clean"] == finished.metrics["clean"]


@pytest.mark.thorough
def test_the_same_recipe_gives_the_same_network_in_a_new_folder_and_another_seed_another(finished):
    out = finished.folder.parent
    again = pipeline.train(quick(), out=out)
    assert again.folder != finished.folder
    assert again.record.network_sha256 == finished.record.network_sha256
    other = pipeline.train(seeded(quick(), 1), out=out)
    assert other.record.seed == 1
    assert other.record.network_sha256 != finished.record.network_sha256


@pytest.mark.thorough
def test_certify_again_keeps_what_training_knew(finished, capsys):
    before = read_record(finished.folder)
    assert main(["certify", str(finished.folder), "certify.eps=0.1,0.25", "certify.attack_samples=null"]) == 0
    after = read_record(finished.folder / "certify-001")
    assert read_record(finished.folder) == before
    assert [row.eps for row in after.certified] == [0.1, 0.25]
    assert after.attack.samples is None
    assert (after.lipschitz.claimed, after.parameters) == (before.lipschitz.claimed, before.parameters)
    assert after.times["train"] == before.times["train"]
    assert after.network_sha256 == before.network_sha256
    assert "0.25 " in capsys.readouterr().out
    with pytest.raises(OptionError, match="expected a device of this machine, got 'abacus'"):
        pipeline.certify(finished.folder, quick(), device="abacus")


@pytest.mark.thorough
def test_image_files_are_decoded_once_for_evaluation_examples_and_certificate(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 5, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    files = ImageFiles([str(tmp_path / f"{number}.png") for number in range(7)], (3, 5, 5))
    split = Split(files, torch.arange(7) % 2)
    decoded = []
    read = ImageFiles._read
    monkeypatch.setattr(ImageFiles, "_read", lambda self, file: decoded.append(file) or read(self, file))
    torch.manual_seed(0)
    network = modules.Network([nn.Flatten(), nn.Linear(75, 2)], (3, 5, 5))
    facts = {"claimed": 1.0, "parameters": 152, "seed": 0, "train_samples": 7, "times": {}, "device": "cpu"}
    finish(tmp_path, quick(), network, Data("files", split, split, ("a", "b")), facts, Display(), torch.device("cpu"))
    assert sorted(decoded) == sorted(files.files)
    file = read_certificate(tmp_path / "certificate.jsonl")
    assert file.data["sha256"] == data_sha256(*split.batch(torch.arange(7)))
    monkeypatch.undo()
    for example in load_examples(tmp_path):
        assert torch.equal(example.image, split.batch(torch.tensor([example.index]))[0][0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "count"), [([], 7), (["certify.attack_samples=3"], 3), (["certify.attack_eps=[]"], 0)]
)
def test_the_note_before_certification_counts_the_attacked_samples(changes, count, tmp_path, monkeypatch):
    split, notes, show = Split(torch.rand(7, 1, 2, 2), torch.arange(7) % 2), [], Display()
    monkeypatch.setattr(show, "note", notes.append)
    network = modules.Network([nn.Flatten(), nn.Linear(4, 2)], (1, 2, 2))
    facts = {"claimed": 1.0, "parameters": 10, "seed": 0, "train_samples": 7, "times": {}, "device": "cpu"}
    data = Data("points", split, split, ("a", "b"))
    found = finish(tmp_path, load_recipe("digits_cayley", changes), network, data, facts, show, torch.device("cpu"))
    assert notes == [f"certifying 7 test samples, attacking {count}"]
    assert all(row.share.total == count for row in found.record.attacked)


@pytest.mark.thorough
def test_report_again(finished, capsys):
    (finished.folder / "report.html").unlink()
    assert main(["report", str(finished.folder)]) == 0
    assert (finished.folder / "report.html").exists()
    assert "clean" in capsys.readouterr().out


class Interrupted:
    """A display that presses Ctrl-C when an epoch is over."""

    def __init__(self, epoch):
        self.epoch, self.notes = epoch, []

    def note(self, text):
        self.notes.append(text)

    def progress(self, event):
        if event.row is not None and event.epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.thorough
def test_ctrl_c_then_resume_gives_the_network_of_an_uninterrupted_run(finished, tmp_path):
    display = Interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        pipeline.train(quick(), out=tmp_path, display=display)
    folder = tmp_path / "digits_cayley-001"
    assert display.notes[-1] == f"interrupted: lipkit train --resume {folder} continues"
    with pytest.raises(RunError, match="expected a finished run with a folder network"):
        pipeline.certify(folder, quick())
    assert main(["train", "--resume", str(folder)]) == 0
    assert read_record(folder).network_sha256 == finished.record.network_sha256
    assert len(run_folder.read_metrics(folder)) == 2
    assert main(["train", "--resume", str(folder)]) == 0  # already finished: its record is printed
    with pytest.raises(RunError, match="expected the recipe of the run in"):
        pipeline.train(quick("train.lr=1"), resume=folder)


@pytest.mark.thorough
def test_seeds_print_mean_and_deviation(tmp_path, capsys):
    assert main(["train", *with_changes("train.epochs=1"), "--seeds", "2", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    records = [read_record(tmp_path / f"digits_cayley-{i:03d}") for i in (1, 2)]
    assert [r.seed for r in records] == [0, 1]
    values = [r.clean.value for r in records]
    row = captured.out.splitlines()[2].split()
    assert row[:2] == ["digits_cayley", "2"]
    assert float(row[2]) == pytest.approx(100 * sum(values) / 2, abs=0.005)
    assert float(row[4]) == pytest.approx(100 * abs(values[0] - values[1]) / 2**0.5, abs=0.005)
    assert "epoch 1/1  loss" in captured.err


MODULE = """
import torch
from torch import nn
from lipkit.layers import CayleyLinear, MaxMin
from lipkit.data import Split, Data

def good(input_shape, classes, hidden=8):
    n = 1
    for k in input_shape:
        n *= k
    return nn.Sequential(nn.Flatten(), CayleyLinear(n, hidden), MaxMin(), CayleyLinear(hidden, classes))

def fixed():
    return nn.Sequential(nn.Flatten(), CayleyLinear(64, 10))

def three():
    return nn.Sequential(nn.Flatten(), CayleyLinear(64, 3))

def large():
    return nn.Sequential(nn.Flatten(), CayleyLinear(784, 10))

class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 10)
    def forward(self, x):
        return self.inner(torch.sign(x).flatten(1))

def fails():
    raise ZeroDivisionError("oops")

def number():
    return 3

value = 3

def line():
    x = torch.linspace(-1, 1, 64)[:, None]
    return Data("line", Split(x, x.abs()), Split(x, x.abs()))

def points():
    x = 3 * torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
    split = Split(x, (x[:, 0] > x[:, 1]).long())
    return Data("points", split, split, ("below", "above"))

def bounded(input_shape, classes):
    return nn.Sequential(CayleyLinear(*input_shape, 8), MaxMin(), CayleyLinear(8, classes))
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module beside the user, importable only through the working directory."""
    (tmp_path / "mine_for_tests.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "mine_for_tests"
    sys.modules.pop("mine_for_tests", None)


@pytest.mark.thorough
def test_a_factory_of_the_users_own_is_trained(mine, tmp_path):
    outcome = pipeline.train(quick(f"model={mine}:good", "model.options.hidden=6"), out=tmp_path / "runs")
    assert outcome.record.parameters == 64 * 6 + 1 + 6 + 6 * 10 + 1 + 10
    data = build.load_data(quick())
    assert isinstance(build.build_model(quick(f"model={mine}:fixed"), data), nn.Sequential)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("nowhere_at_all:f", OptionError, "expected a function to import, got ModuleNotFoundError"),
        ("{}:absent", OptionError, "expected a function to import, got AttributeError"),
        ("{}:value", OptionError, "expected a function to call, got int"),
        ("{}:fails", OptionError, "expected a network, got ZeroDivisionError: oops"),
        ("{}:number", OptionError, "expected an nn.Module, got int"),
        ("{}:three", ShapeError, r"expected outputs of shape \(n, 10\), got \(n, 3\)"),
        ("{}:large", ShapeError, "784"),
        ("{}:Unknown", NoRuleError, "torch.sign"),
        ("smal", RecipeError, "expected one of"),
        ("{{name: small, options: {{widht: 2}}}}", OptionError, "widht"),
        (
            "{{name: small, options: {{input_shape: [1, 28, 28]}}}}",
            ShapeError,
            r"expected model.options.input_shape \(1, 8, 8\)",
        ),
    ],
)
def test_models_that_are_wrong_are_refused_before_a_folder_is_made(mine, tmp_path, model, error, message):
    with pytest.raises(error, match=message):
        pipeline.train(quick(f"model={model.format(mine)}"), out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_data_that_is_wrong_is_refused_before_a_folder_is_made(mine, tmp_path):
    for override, error, message in (
        ("data=mnist", DataError, "mnist|MNIST"),
        ("data=nothing", OptionError, "expected a data set"),
        (f"data={mine}:line", RecipeError, "expected data for task classification, got .* which is for regression"),
        (f"data={mine}:points", RecipeError, r"expected images \(C, H, W\) to augment, got samples of shape \(2,\)"),
        ("augment.crop=8", RecipeError, "augment.crop: expected less than the shorter side of the images, 8, got 8"),
    ):
        with pytest.raises(error, match=message):
            pipeline.train(quick(override, f"data.root={tmp_path}", "augment.flip=true"), out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    # To certify a network from elsewhere, nothing is augmented.
    assert build.load_data(quick(f"data={mine}:points", "augment.flip=true")).input_shape == (2,)


@pytest.mark.thorough
def test_options_that_training_refuses_are_refused_before_a_folder_is_made(tmp_path):
    samples = torch.rand(4, 2), torch.arange(4) % 2
    for name, value, message in (
        ("cuda_graph", True, "expected one CUDA device, got cpu"),
        ("optimizer", "spectral", "expected Stiefel layers for optimizer spectral"),
    ):
        options = {"epochs": 1, "accelerator": "cpu", name: value}
        with pytest.raises(OptionError, match=message):
            pipeline.train(quick(f"train.{name}={value}"), out=tmp_path / "runs")
        with pytest.raises(OptionError, match=message):
            fit(nn.Linear(2, 2), samples, run_dir=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_a_run_that_diverges_in_its_first_epoch_leaves_no_folder(tmp_path):
    for place in ({"out": tmp_path / "runs"}, {"folder": tmp_path / "runs" / "mine"}):
        with pytest.raises(RunError, match=r"expected finite weights, got .* no checkpoint was written"):
            pipeline.train(quick("train.lr=1e38", "train.schedule=constant"), **place)
        assert list((tmp_path / "runs").glob("*")) == []


@pytest.mark.thorough
def test_regression_ends_with_an_error_a_bound_and_a_search(mine, tmp_path, capsys):
    changes = [
        f"data={mine}:line", "task=regression", "loss=mse", f"model={mine}:bounded", "train.epochs=40", "train.lr=0.05",
        "train.evaluate_every=20", "certify.search_steps=20", "certify.delta=0.2",
    ]  # fmt: skip
    assert main(["train", *with_changes(*changes), "--out", str(tmp_path / "runs")]) == 0
    captured = capsys.readouterr()
    assert "test mse" in captured.err
    assert "tightness" in captured.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"digits_cayley-[\w.+]+_bounded-mse-001", folder.name)
    record = read_record(folder)
    assert record.task == "regression"
    assert record.mse < 0.02
    assert record.lipschitz.computed == pytest.approx(1, abs=1e-4)
    assert record.search.steps == 20
    assert record.deviation == pytest.approx(0.2, rel=1e-3)
    x = torch.linspace(-1, 1, 64)[:, None]
    expected = (modules.load(folder / "network")(x) - x.abs()).square().mean().item()
    assert record.mse == pytest.approx(expected, rel=1e-5)
    assert run_folder.read_metrics(folder)[-1]["test_mse"] == pytest.approx(record.mse, rel=1e-5)
    assert main(["certify", str(folder), "certify.delta=0.5", "certify.search_steps=20", "--allow-code"]) == 0
    again = read_record(folder / "certify-001")
    assert (again.delta, again.lipschitz.claimed) == (0.5, record.lipschitz.claimed)
    assert read_record(folder) == record
    assert main(["report", str(folder)]) == 0
    assert "tightness" in capsys.readouterr().out


@pytest.mark.thorough
def test_inputs_that_are_no_images_are_attacked_without_a_box(mine, tmp_path):
    changes = [f"data={mine}:points", f"model={mine}:bounded", "train.epochs=20", "train.lr=0.05", "certify.eps=0.1"]
    record = pipeline.train(quick(*changes), out=tmp_path / "runs").record
    assert record.attack.box is None
    assert record.clean.value > 0.9
    assert record.certified[0].share.value > 0.8


@pytest.mark.thorough
def test_initial_weights_come_from_the_seed_alone():
    data = build.load_data(quick())
    before = torch.get_rng_state()
    models = [build.build_model(quick(f"train.seed={seed}"), data) for seed in (0, 0, 1)]
    assert torch.equal(before, torch.get_rng_state())
    weights = [next(m for m in model if isinstance(m, CayleyLinear)).free for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_augmentation_is_that_of_the_recipe():
    data = build.load_data(quick())
    x = data.test.batch(torch.arange(8))[0]
    assert pipeline.training_options(quick(), data).augment is None
    crop = pipeline.training_options(quick("augment.crop=2"), data).augment
    assert not torch.equal(crop(x, torch.Generator().manual_seed(0)), x)
    flip = pipeline.training_options(quick("augment.flip=true"), data).augment
    seen = {
        (torch.equal(a, b), torch.equal(a, b.flip(-1)))
        for a, b in zip(flip(x, torch.Generator().manual_seed(0)), x, strict=True)
    }
    assert seen == {(True, False), (False, True)}


def test_progress_is_noted_every_ten_seconds_with_the_time_left(monkeypatch) -> None:
    clock, notes = iter([0.0, 4.0, 12.0, 14.0, 21.0, 23.0, 30.0]), list[str]()
    monkeypatch.setattr("lipkit.experiments.run.time.monotonic", lambda: next(clock))
    show = Display()
    monkeypatch.setattr(show, "note", notes.append)
    tell = told(show)
    for now in (("evaluated", 1, 4), ("evaluated", 2, 4), ("evaluated", 4, 4), ("attacked", 1, 8), ("attacked", 2, 8)):
        tell(*now)
    tell("attacked", 8, 8)
    # 12 seconds for the first two of four; the attack began at 14, took 9 for two of eight.
    assert notes == ["2 of 4 samples evaluated, left 0:12", "2 of 8 samples attacked, left 0:27"]
