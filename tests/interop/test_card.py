"""The model card: its front matter is YAML with the record's figures, and names stay text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tests.interop.test_read_back import traced_once

from lipkit.cli.export import command
from lipkit.experiments import run as pipeline
from lipkit.experiments.recipe import load_recipe
from lipkit.interop import from_pretrained, model_card, robustbench_info
from lipkit.report import Record, read_record

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("no_plots")]


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    with traced_once():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = ["model.options.width=1", "data.limit=200", "certify.attack_steps=2", "certify.attack_samples=20"]
    recipe = load_recipe("digits_sll", ["train.epochs=1", *small])
    folder = tmp_path_factory.mktemp("runs") / "a"
    outcome = pipeline.train(recipe, folder=folder)
    assert outcome is not None
    return folder


def test_the_card_holds_the_figures_of_the_record(run: Path) -> None:
    record = read_record(run)
    assert isinstance(record, Record)
    text = model_card(record, licence="MIT")
    _, front, body = text.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert (facts["license"], facts["library_name"], facts["datasets"]) == ("MIT", "lipkit", ["digits"])
    metrics = facts["model-index"][0]["results"][0]["metrics"]
    values = {row["name"]: row["value"] for row in metrics}
    assert values["clean accuracy"] == record.clean.value
    assert values["certified accuracy, l2 radius 36/255"] == record.certified[0].share.value
    assert f"{100 * record.certified[0].share.value:.2f} %" in body
    assert record.network_sha256 in body
    assert f"cores, {record.hardware.threads} threads, cpu." in body
    # A printed bound is rounded up: to nearest, this one would be 1.
    near = record.model_copy(update={"lipschitz": record.lipschitz.model_copy(update={"computed": 1 + 2.0**-40})})
    assert "| proved l2 Lipschitz constant | 1.00000001 |" in model_card(near)
    assert robustbench_info(near)["footnote"].endswith("Constant 1.00001.")
    evil = record.model_copy(update={"name": "a\n---\n<script>|x"})
    page = model_card(evil)
    assert "<script>" not in page.split("---\n", 2)[2]
    assert (
        yaml.safe_load(page.split("\n---\n")[0].removeprefix("---\n"))["model-index"][0]["name"] == "a --- <script>|x"
    )
    info = robustbench_info(record)
    assert info["clean_acc"] == f"{100 * record.clean.value:.2f}"
    assert info["autoattack_acc"] is None
    named = [name for name, value in info.items() if "36/255" in str(value)]
    assert named == re.findall(r"they stand in ``(\w+)``", " ".join((robustbench_info.__doc__ or "").split()))


@pytest.mark.parametrize("form", ["onnx", "torch", "safetensors", "hub", "robustbench"])
def test_the_command_writes_and_checks(run: Path, form: str, tmp_path: Path) -> None:
    out = tmp_path / "out.file"
    outcome = CliRunner().invoke(
        command, [str(run), "--to", form, "--out", str(out), "--samples", "50"], catch_exceptions=False
    )
    assert outcome.exit_code == 0
    assert "50 samples: outputs within" in outcome.output
    assert "certified(36/255)" in outcome.output
    assert out.exists()
    if form == "hub":
        assert from_pretrained(out) is not None
        assert "model-index" in (out / "README.md").read_text()
    if form == "robustbench":
        assert (out / "model_info.json").is_file()


def test_a_regression_is_written_in_c_with_the_error_of_its_outputs(tmp_path: Path) -> None:
    options = ["data.range=[-2, 2]", "model.options.hidden=[4]", "train.epochs=1"]
    assert pipeline.train(load_recipe("square_wave", options), folder=tmp_path / "a") is not None
    outcome = CliRunner().invoke(command, [str(tmp_path / "a"), "--to", "c"], catch_exceptions=False)
    stated = re.findall(
        "outputs of the C program within (.*) of the exact network's on the whole box: proved", outcome.output
    )
    assert 0 < float(stated[0]) < 1e-6
    assert "predictions" not in outcome.output
