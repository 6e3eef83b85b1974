"""``lipkit attack`` on a run trained for a moment: figures, files, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file

import lipkit.certificates
from lipkit import modules
from lipkit.cli import attack
from lipkit.cli.main import main
from lipkit.experiments import run as pipeline
from lipkit.experiments.recipe import load_recipe

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = load_recipe(
        "digits_cayley",
        ["data.limit=40", "train.epochs=1", "train.batch_size=20", "train.accelerator=cpu", "train.evaluate_every=1",
         "certify.eps=36/255", "certify.attack_steps=2", "certify.attack_samples=5"],
    )  # fmt: skip
    return pipeline.train(recipe, out=tmp_path_factory.mktemp("runs")).folder


def written(run):
    return {path.name for path in run.glob("attack_*")}


def test_figures_examples_and_page_are_written_and_kept(run, capsys):
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert main(["attack", str(run), "--attack", "pgd", "--steps", "5", "--eps", "36/255,2", "--images", "3"]) == 0
    out = capsys.readouterr().out
    assert "36/255" in out
    assert "none inside" in out
    first = written(run)
    assert len(first) == 3
    path = next(run.glob("attack_pgd_l2_*.json"))
    record = json.loads(path.read_text())
    assert [row["eps"] for row in record["attacked"]] == [36 / 255, 2.0]
    for row in record["attacked"]:
        assert row["certified"]["count"] <= row["robust"]["count"] <= record["clean"]["count"]
        assert row["robust"]["total"] == record["clean"]["total"] == 40
    assert record["network_sha256"] == modules.sha256(modules.load(run / "network"))
    assert record["ran"] == ["PGD, margin loss"]
    assert all(row["l2"] >= row["radius"] for row in record["examples"])
    assert all(row["prediction"] != row["label"] for row in record["examples"])
    tensors = load_file(path.with_suffix(".safetensors"))
    assert tensors["image"].shape == tensors["adversarial"].shape == (3, 1, 8, 8)
    change = (tensors["adversarial"] - tensors["image"].double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(change, tensors["l2"], rtol=1e-12, atol=0)
    page = path.with_suffix(".html").read_text()
    assert page.count("data:image/png;base64,") == 9
    assert "http" not in page.replace("http-equiv", "")

    assert main(["attack", str(run), "--attack", "pgd", "--norm", "linf", "--steps", "5", "--samples", "10"]) == 0
    assert "8/255" in capsys.readouterr().out
    assert written(run) > first
    assert {name: (run / name).read_bytes() for name in before} == before
    figures = path.read_text()
    assert main(["attack", str(run), "--attack", "pgd", "--steps", "5", "--eps", "36/255,2", "--images", "3"]) == 0
    again = json.loads(path.read_text())
    changing = ("created", "seconds")
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in json.loads(figures).items() if k not in changing
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_fits_every_screen(run, flaws):
    assert main(["attack", str(run), "--attack", "pgd", "--steps", "6", "--eps", "36/255,2", "--images", "3"]) == 0
    page = max(run.glob("attack_*.html"), key=lambda path: path.stat().st_mtime)
    for width in (390, 768, 1280):
        assert flaws(page.as_uri(), width) == [], width


def test_an_example_inside_a_radius_is_an_error_and_nothing_is_written(run, monkeypatch, capsys):
    before = written(run)

    right = lipkit.certificates.certify
    monkeypatch.setattr(lipkit.certificates, "certify", lambda *a, **o: _wide(right(*a, **o)))
    assert main(["attack", str(run), "--attack", "pgd", "--steps", "9", "--eps", "3"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "expected no adversarial example within its certified radius 5" in line
    assert written(run) == before


def _wide(certificate):
    return dataclasses.replace(certificate, radius=torch.where(certificate.correct, 5.0, 0.0).double())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "fgsm"], "'fgsm' is not one of 'pgd', 'apgd', 'fab', 'cw', 'autoattack'"),
        (["--attack", "cw", "--norm", "linf"], "expected --norm l2 for --attack cw, got linf"),
        (["--norm", "l1"], "'l1' is not one of"),
        (["--eps", "-1"], "expected radii that are finite and >= 0, got '-1'"),
        (["--eps", "inf"], "expected a number such as"),
        (["--eps", "1e999"], "finite and >= 0|expected a number"),
        (["--eps", ","], "expected radii"),
        (["--eps", "much"], "expected a number such as 0.5 or 36/255, got 'much'"),
        (["--samples", "0"], "0 is not in the range"),
        (["--device", "abacus"], "expected a device of this machine, got 'abacus'"),
    ],
)
def test_wrong_usage_is_one_line(run, arguments, message, capsys):
    assert main(["attack", str(run), *arguments]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("lipkit: ")
    assert "\n" not in line
    assert re.search(message, line), line


def test_a_folder_that_is_no_finished_run(tmp_path, run, capsys):
    assert main(["attack", str(tmp_path)]) == 2
    assert "expected a run folder with recipe.yaml" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_bytes((run / "recipe.yaml").read_bytes())
    assert main(["attack", str(tmp_path)]) == 2
    assert "expected a finished run with a folder network" in capsys.readouterr().err


def test_radii():
    assert attack.read_radii("36/255, 1") == (36 / 255, 1.0)
