"""Nothing that was measured is replaced, slips of a radius or of a scale are stopped, and old runs still open."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from papers.table_runs import TableRun
from papers.tables import TABLES
from torch import nn

import lipkit
from lipkit import modules
from lipkit.certificates.certificate_file import read_certificate
from lipkit.certificates.intervals import check_radii
from lipkit.cli.main import main
from lipkit.data import Split, load
from lipkit.errors import DataError, OptionError, RunError
from lipkit.evaluation import Attack, evaluate
from lipkit.experiments import run as pipeline
from lipkit.explorer import open_runs
from lipkit.interop import from_pretrained
from lipkit.report import read_record
from papers import table_runs as table_records

pytestmark = pytest.mark.usefixtures("no_plots")

# A run as lipkit 0.1.0 wrote it, record and certificate of schema 1.0: later versions read it.
OLD = Path(__file__).parent / "run_of_schema_1"
QUICK = ["certify.attack_steps=2", "certify.attack_samples=4"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "digits_cayley-001"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_a_second_certification_lies_beside_the_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(run)
    assert main(["certify", str(run), "certify.eps=0.1", *QUICK]) == 0
    assert f"run     {run / 'certify-001'}" in capsys.readouterr().out
    assert main(["certify", str(run), "certify.eps=0.2", *QUICK]) == 0
    assert before.items() <= files(run).items()
    names = {"recipe.yaml", "record.json", "report.html", "certificate.jsonl", "examples.safetensors"}
    names.add("lipkit_check.py")
    for number, eps in ((1, 0.1), (2, 0.2)):
        folder = run / f"certify-00{number}"
        assert {path.name for path in folder.iterdir()} == names
        record = read_record(folder)
        assert [row.eps for row in record.certified] == [eps]  # type: ignore[union-attr]
        assert record.name == f"digits_cayley-001/certify-00{number}"
        assert record.lipschitz.claimed == read_record(run).lipschitz.claimed
        assert pipeline.read_recipe(folder).certify.eps == (eps,)
        assert main(["report", str(folder)]) == 0
    again = run / "certify-002"
    assert main(["check", str(again / "certificate.jsonl"), str(run / "network"), "digits", "--limit", "12"]) == 0
    capsys.readouterr()
    assert main(["export", str(again), "--to", "onnx"]) == 2  # the folder of the run has the network
    assert f"{run.resolve()} has one" in capsys.readouterr().err
    data = load("digits", limit=12)
    shown = open_runs([(again, data.test, data.classes)])[0]
    assert torch.equal(shown.certificate.radius, read_certificate(again / "certificate.jsonl").certificate.radius)


@pytest.mark.thorough
def test_a_hub_folder_has_the_figures_of_the_run(run: Path) -> None:
    assert main(["certify", str(run), "certify.eps=0.1", *QUICK]) == 0
    assert main(["export", str(run), "--to", "hub"]) == 0
    card = (run / "export" / "hub" / "README.md").read_text()
    assert "l2 radius 36/255" in card
    assert "l2 radius 0.1" not in card
    assert lipkit.load(run / "export" / "hub" / "network").input_range == (0.0, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["certify", "RUN", "certify.eps=36"],
        ["certify", "RUN", "certify.attack_eps=36"],
        ["certify", "RUN", "certify.eps=36", "--large-eps"],  # above the diameter, whoever asks
        ["attack", "RUN", "--eps", "36"],
        ["attack", "RUN", "--norm", "linf", "--eps", "36"],
        ["check", "RUN/certificate.jsonl", "RUN/network", "digits", "--limit", "12", "--eps", "36"],
        ["train", "digits_cayley", "certify.eps=36", "--out", "RUN"],
        ["train", "digits_at", "adversary.eps=36", "--out", "RUN"],
    ],
)
def test_a_forgotten_quotient_stops_before_anything_is_done(
    run: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    assert main([part.replace("RUN", str(run)) for part in arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "expected at most the diameter" in error
    assert "did you mean 36/255?" in error
    assert files(run) == before


@pytest.mark.thorough
def test_a_large_radius_of_images_is_asked_for_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((8, 1, 12, 12), np.float32), np.arange(8) % 2
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    arguments = [
        "train", "digits_cayley", f"data=npz:{tmp_path / 'd.npz'}", "model=mlp", "model.options={hidden: [4]}",
        "train.epochs=1", "train.batch_size=8", "train.accelerator=cpu", "certify.eps=10", *QUICK,
        "--out", str(tmp_path / "runs"),
    ]  # fmt: skip
    assert main(arguments) == 2
    assert "certify.eps: got 10, did you mean 10/255?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main([*arguments, "--large-eps"]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert [row.eps for row in read_record(made).certified] == [10]  # type: ignore[union-attr]
    assert lipkit.load(made / "network").input_range == (0.0, 1.0)
    for more, code in (([], 2), (["--large-eps"], 0)):
        assert main(["attack", str(made), "--attack", "pgd", "--steps", "2", *more]) == code
        network, data = str(made / "network"), f"npz:{tmp_path / 'd.npz'}"
        assert main(["check", str(made / "certificate.jsonl"), network, data, "--eps", "10", *more]) == code
        assert main(["certify", str(made), *QUICK, *more]) == code


def test_radii_that_are_meant_pass() -> None:
    images, unit = (3, 32, 32), (0.0, 1.0)
    check_radii([0, 36 / 255, 1, 8], images, unit)
    check_radii([36], images, unit, large=True)
    check_radii([55.42], images, unit, large=True)  # the diameter is 55.4256...
    check_radii([36], images, (0.0, 255.0))
    check_radii([1e9], (2,), None)
    check_radii([8 / 255, 1.0], images, unit, norm="linf")
    for radii, options, message in (
        ([1, 36], {}, "did you mean 36/255"),
        ([55.43], {"large": True}, "at most the diameter 55.4256"),
        ([1.01], {"norm": "linf"}, "at most the diameter 1 of"),
        ([1e9], {"large": True}, "at most the diameter 55.4256 of inputs in .0, 1., got 1e.09$"),
    ):
        with pytest.raises(OptionError, match=message):
            check_radii(radii, images, unit, **options)  # type: ignore[arg-type]


def images_network() -> modules.Network:
    torch.manual_seed(0)
    network = modules.Network([nn.Flatten(), nn.Linear(144, 3)], (1, 12, 12))
    network.input_range = (0.0, 1.0)
    return network


@pytest.mark.thorough
def test_a_network_of_images_in_the_unit_interval_refuses_others(tmp_path: Path) -> None:
    network = images_network()
    x, y = torch.rand(5, 1, 12, 12), torch.arange(5) % 3
    modules.save(network, tmp_path / "network")
    loaded = lipkit.load(tmp_path / "network")
    assert loaded.input_range == (0.0, 1.0)
    unknown = modules.Network(list(network), (1, 12, 12))
    assert modules.sha256(loaded) == modules.sha256(unknown)  # what a certificate names has not changed
    assert torch.equal(lipkit.certify(loaded, x, y).radius, lipkit.certify(unknown, x, y).radius)
    for wrong in (255 * x, x - 0.5, 2 * x):
        with pytest.raises(
            OptionError, match=r"expected inputs in \[0, 1\], for which the network was made, got value"
        ):
            lipkit.certify(loaded, wrong, y)
        with pytest.raises(OptionError, match=r"expected inputs in \[0, 1\]"):
            lipkit.certificates.certify_regression(loaded, wrong, torch.rand(5, 3), delta=0.1)
        with pytest.raises(OptionError, match=r"expected inputs in \[0, 1\]"):
            evaluate(loaded, Split(wrong, y), eps=[0.1])
    for other in (2 * x, x - 0.5, 300 * x):  # of a sensor, perhaps
        lipkit.certify(unknown, other, y)
    x[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    with pytest.warns(UserWarning, match="got values up to 255: x / 255"):
        lipkit.certify(unknown, 255 * x, y)
    unknown.input_range = (0.0, 255.0)
    lipkit.certify(unknown, 255 * x, y)


def test_accuracies_at_a_slip_are_refused() -> None:
    network, x, y = images_network(), torch.rand(5, 1, 12, 12), torch.arange(5) % 3
    certificate = lipkit.certify(network, x, y)
    for eps, message in ((36, "diameter 12 .*did you mean 36/255"), (10, "got 10, did you mean 10/255")):
        with pytest.raises(OptionError, match=message):
            certificate.accuracy(eps)
        with pytest.raises(OptionError, match=message):
            evaluate(network, Split(x, y), eps=[eps])
    assert certificate.accuracy(10, large_eps=True) == 0
    network.input_range = None
    with pytest.warns(UserWarning, match="did you mean 36/255"):
        assert lipkit.certify(network, x, y).accuracy(36) == 0
    with pytest.warns(UserWarning, match=r"eps: got 36 for samples in \[\S+, (0.9\d*|1)\]; did you mean 36/255"):
        evaluate(network, Split(x, y), eps=[36], attack=Attack(eps=()))


@pytest.mark.parametrize("value", [[1, 0], [0, 0], [0], 3, "01", [0, 1e999], [0, True], [None, 1], {}])
def test_ranges_that_are_none_are_refused(tmp_path: Path, value: object) -> None:
    modules.save(images_network(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["input_range"] = value
    (tmp_path / "config.json").write_text(json.dumps(config).replace("Infinity", "1e999"))
    with pytest.raises(DataError, match="input_range: expected two numbers"):
        lipkit.load(tmp_path)


@pytest.mark.thorough
def test_a_finished_run_is_not_measured_again_by_a_resume(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").write_text("kept")
    before = files(run)
    assert main(["train", "--resume", str(run)]) == 0
    captured = capsys.readouterr()
    assert "was finished before" in captured.err
    assert "36/255" in captured.out
    assert files(run) == before
    (run / "report.html").unlink()
    assert main(["train", "--resume", str(run)]) == 0
    assert "<html" in (run / "report.html").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kept", ["settings.json", "record.json", "network/config.json", "metrics.jsonl", "recipe.yaml"]
)
def test_a_folder_with_a_run_is_left_as_it_is(run: Path, kept: str) -> None:
    folder = run.parent / "used"
    (folder / kept).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(run / kept, folder / kept)
    before = files(folder)
    recipe = pipeline.load_recipe("digits_cayley", ["train.epochs=1", "data.limit=12"])
    with pytest.raises(RunError, match="expected a new run folder"):
        pipeline.train(recipe, folder=folder)
    assert files(folder) == before


@pytest.mark.thorough
def test_attacks_never_replace_what_another_found(run: Path) -> None:
    arguments = ["attack", str(run), "--attack", "pgd", "--steps", "3", "--eps", "36/255"]
    assert main([*arguments, "--images", "2"]) == 0
    first = files(run)
    assert main([*arguments, "--images", "2"]) == 0
    assert files(run) == first  # the same figures: nothing to write
    assert main([*arguments, "--images", "1"]) == 0
    second = files(run)
    assert first.items() <= second.items()
    assert sorted(Path(name).suffix for name in second.keys() - first.keys()) == [".html", ".json", ".safetensors"]
    path = next(run.glob("attack_*.json"))
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"clean": {"count": 0, "total": 12, "low": 0, "high": 1}}))
    changed = files(run)
    assert main([*arguments, "--images", str(record["kept"])]) == 0
    assert changed.items() <= files(run).items()
    assert len(files(run)) == len(changed) + 3


def test_kept_records_of_another_run_stay(run: Path, tmp_path: Path) -> None:
    row = next(iter(TABLES.values())).rows[0]
    made = TableRun(row, "budget", 0, tmp_path / "runs" / "table")
    shutil.copytree(run, made.folder)
    paths = table_records.keep([made], tmp_path / "kept")
    assert table_records.keep([made], tmp_path / "kept") == paths  # the same run again
    content = paths[0].read_bytes()
    record = json.loads((run / "record.json").read_text())
    (made.folder / "record.json").write_text(json.dumps(record | {"created": "2030-01-01T00:00:00+00:00"}))
    with pytest.raises(RunError, match="expected no record of another run at"):
        table_records.keep([made], tmp_path / "kept")
    assert paths[0].read_bytes() == content


@pytest.mark.thorough
def test_a_run_of_the_first_schema_still_opens(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = read_record(run)
    network = lipkit.load(run / "network")
    assert network.input_range is None
    assert (
        modules.sha256(network)
        == record.network_sha256
        == read_certificate(run / "certificate.jsonl").certificate.network_sha256
    )
    assert main(["check", str(run / "certificate.jsonl"), str(run / "network"), "digits", "--limit", "12"]) == 0
    assert "certified(36/255)  25.00 %" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"36/255 +25.00 %", shown)
    assert "certified (all 12)" in shown
    assert "PGD (4 of them)" in shown
    model = from_pretrained(run / "hub")
    x = load("digits", limit=12).test.batch(slice(None))[0]
    torch.testing.assert_close(model(x), network(x), rtol=1e-5, atol=1e-6)
    assert modules.sha256(lipkit.load(run / "hub" / "network")) == record.network_sha256
    assert pipeline.read_recipe(run).certify.eps == (36 / 255,)
