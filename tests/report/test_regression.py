"""Records and pages of regressions: figures, the curve with its cone, tables for vector outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from lipkit import modules
from lipkit.data import Split
from lipkit.errors import RunError
from lipkit.evaluation import evaluate_regression, latency
from lipkit.report import RegressionRecord, read_record, save_evaluation, write_report
from lipkit.report.curve import CURVE, curve_of, load_curve, zoom
from lipkit.report.record import from_regression
from lipkit.report.tables import output_rows, summary
from lipkit.shown import upper

pytestmark = pytest.mark.thorough

SEARCH = {"restarts": 4, "steps": 10, "seed": 0}


def make_run(folder: Path, inputs: int = 1, outputs: int = 1) -> tuple[modules.Network, RegressionRecord]:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    network = modules.Network([nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)], (inputs,))
    x = torch.randn(40, inputs)
    split = Split(x, network(x) + 0.1)
    evaluation = evaluate_regression(network, split, delta=0.2, **SEARCH)
    record = from_regression(
        evaluation, name="toy-001", data="toy", search=SEARCH, latency=latency(network), claimed=2.0, seed=0
    )
    save_evaluation(folder, evaluation, network, split, record)
    return network, record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "toy-001")
    return tmp_path / "toy-001"


def test_the_record_reads_back(run: Path) -> None:
    record = read_record(run)
    assert isinstance(record, RegressionRecord)
    assert record.task == "regression"
    assert record.mse == pytest.approx(0.01, rel=1e-3)
    assert record.tightness == record.lower / record.lipschitz.computed
    claimed = record.lipschitz.claimed
    assert record.metrics().get("reached") == (None if claimed is None else record.lower / claimed)
    assert 0 < record.lower <= record.lipschitz.computed
    assert record.deviation == pytest.approx(0.2 * record.lipschitz.computed, rel=1e-12)
    assert len(record.outputs) == 1
    assert record.outputs[0].constant <= record.lipschitz.computed
    assert record.latency is not None
    assert (record.latency.threads, record.latency.runs) == (1, 100)
    assert record.lipschitz.claimed == 2.0
    assert record.metrics()["test_mse"] == record.mse
    assert abs(record.search.x[0] - record.search.y[0]) > 0


def test_a_record_of_another_kind_is_refused(run: Path) -> None:
    content = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps(content | {"outputs": None}))
    with pytest.raises(RunError, match="outputs: Input should be a valid list"):
        read_record(run)


def test_the_page_has_the_curve_and_the_figures(run: Path) -> None:
    text = write_report(run).read_text("utf-8")
    record = read_record(run)
    assert isinstance(record, RegressionRecord)
    plain_text = re.sub(r"<[^>]+>", " ", text)
    for expected in (
        f"{record.mse:.4g}",
        upper(record.deviation, 4),
        f"outputs together by more than {upper(record.deviation, 6)} (l2): proved",
        f"{100 * record.tightness:.2f} %",
        "Latency, batch 1",
        "1 thread",
        record.network_sha256,
        "The network against the data",
    ):
        assert expected in plain_text, expected
    assert text.count("<svg") == 2  # for wide and for narrow pages
    assert 'id="curve-wide-cone"' in text
    assert text.count(f"proved slope {upper(record.outputs[0].constant, 4)}<") == 2
    assert "Clean accuracy" not in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_cut_small_or_covered(flaws: Callable[..., list[str]], run: Path) -> None:
    page = write_report(run).as_uri()
    for width in (390, 768, 1280):
        assert flaws(page, width) == [], width


def test_vector_valued_runs_get_a_table_instead_of_a_curve(tmp_path: Path) -> None:
    make_run(tmp_path / "v", inputs=3, outputs=4)
    assert load_curve(tmp_path / "v") is None
    text = write_report(tmp_path / "v").read_text("utf-8")
    assert "<svg" not in text
    record = read_record(tmp_path / "v")
    assert isinstance(record, RegressionRecord)
    header, rows = output_rows(record)
    assert header[2] == "deviation for 0.2"
    assert len(rows) == 4
    for row in rows:
        assert all(f">{cell}<" in text for cell in row)
    shown = summary(record)
    assert f"tightness {100 * record.tightness:.2f} %" in shown
    assert rows[3][2] in shown
    assert "batch 1: " in shown


def test_several_outputs_of_one_input_are_one_curve(tmp_path: Path) -> None:
    make_run(tmp_path / "v", outputs=2)
    text = write_report(tmp_path / "v").read_text("utf-8")
    assert "network, output 1" in text


def test_the_curve_is_the_network_and_stays_in_the_cone(run: Path) -> None:
    network, record = make_run(run)
    curve = load_curve(run)
    assert curve is not None
    with torch.no_grad():
        expected = network.double()(curve.x[:, None])
    torch.testing.assert_close(curve.y, expected)
    assert bool((curve.x.diff() >= 0).all())
    assert float(curve.x[0]) < float(curve.sample_x.min())
    centre = float(curve.centre)
    x, y = curve.x.numpy(), curve.y.numpy()[:, 0]
    middle = float(np.interp(centre, x, y))
    assert (np.abs(y - middle) <= record.outputs[0].constant * np.abs(x - centre) + 1e-9).all()
    # Around the steepest place the grid is fine enough to see it.
    reach = zoom(float(curve.sample_y.max() - curve.sample_y.min()), record.lipschitz.computed, 4.0)
    assert int((np.abs(x - centre) <= reach).sum()) >= 400
    assert curve.sample_y.shape == (40, 1)


def test_errors_during_training_are_drawn(run: Path) -> None:
    rows = [{"epoch": e, "loss": 1 / e, "test_mse": 2 / e} for e in range(1, 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(run).read_text("utf-8")
    assert text.count("<svg") == 2 * 2
    assert "test mse" in text


def test_a_corrupt_curve_is_one_clear_line(run: Path) -> None:
    (run / CURVE).write_bytes(b"nonsense")
    with pytest.raises(RunError, match=r"curve\.safetensors: expected the tensors x, y, sample_x, sample_y, centre"):
        write_report(run)
    tensors = {name: torch.zeros(3) for name in ("x", "y", "sample_x", "sample_y", "centre")}
    (run / CURVE).write_bytes(save(tensors))
    with pytest.raises(RunError, match=r"curve\.safetensors: expected the graph of a network"):
        write_report(run)


def test_a_constant_network_has_a_page(tmp_path: Path) -> None:
    layer = nn.Linear(1, 1)
    nn.init.zeros_(layer.weight)
    network = modules.Network([layer], (1,))
    split = Split(torch.randn(5, 1), torch.ones(5, 1))
    evaluation = evaluate_regression(network, split, **SEARCH)
    record = from_regression(evaluation, name="flat", data="toy", search=SEARCH)
    save_evaluation(tmp_path, evaluation, network, split, record)
    assert "n/a" in write_report(tmp_path).read_text("utf-8")
    assert curve_of(network, evaluation, split) is not None


def test_the_folder_must_exist(tmp_path: Path) -> None:
    network, record = make_run(tmp_path / "a")
    split = Split(torch.randn(5, 1), torch.ones(5, 1))
    with pytest.raises(RunError, match="expected a run folder"):
        save_evaluation(tmp_path / "b", evaluate_regression(network, split, **SEARCH), network, split, record)
