"""What print says of a result: at most a screen, bounds rounded up, a claim not like a proof; and its pictures."""

from __future__ import annotations

import dataclasses
import sys
import types
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lipkit
from lipkit.certificates import certify_regression, lipsdp
from lipkit.data import Split
from lipkit.errors import OptionError
from lipkit.evaluation import Attack, evaluate, evaluate_regression
from lipkit.modules import Network
from lipkit.report.schema import OutputRecord, RegressionRecord
from lipkit.report.tables import output_rows
from lipkit.shown import COLUMNS, LINES, figures, lower, screen, upper
from lipkit.training import Run
from lipkit.wasserstein import distance


def _network(*layers: nn.Module, shape: tuple[int, ...] = (4,)) -> Network:
    torch.manual_seed(0)
    return lipkit.export(nn.Sequential(*layers), shape)


@pytest.fixture(scope="module")
def classifier() -> Network:
    return _network(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3), shape=(1, 4, 4))


@pytest.fixture(scope="module")
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(40, 1, 4, 4, generator=generator), torch.randint(0, 3, (40,), generator=generator)


@pytest.fixture(scope="module")
def results(classifier: Network, samples: Any) -> dict[str, Any]:
    x, y = samples
    mlp = _network(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    deep = _network(*(layer for _ in range(40) for layer in (nn.Linear(4, 4), nn.ReLU())))
    points, targets = torch.rand(20, 4), torch.rand(20, 2)
    history = [{"epoch": i + 1, "loss": 1 / (i + 1), "accuracy": i / 40, "lr": 0.1, "seconds": 1.0} for i in range(40)]
    certificate = lipkit.certify(classifier, x, y)
    estimate = distance(points, points + 3, steps=2)
    return {
        "certificate": certificate,
        "proof": lipkit.prove(classifier),
        "regression": certify_regression(mlp, points, targets, delta=0.1),
        "gain": lipsdp.solve(mlp),
        "bound": lipkit.analyze(deep, (4,), restarts=0),
        "estimate": estimate,
        "evaluation": evaluate(classifier, (x, y), attack=Attack(eps=(0.1,), steps=1, samples=2)),
        "fit": evaluate_regression(mlp, Split(points, targets), delta=0.1, restarts=1, steps=1),
        "run": Run(classifier, history, None, 40),
        "network": deep,
    }


@pytest.mark.thorough
def test_print_takes_at_most_a_screen(results: dict[str, Any]) -> None:
    for name, result in results.items():
        lines = str(result).splitlines()
        assert 1 < len(lines) <= LINES == 25, name
        assert max(map(len, lines)) <= COLUMNS == 100, name
        assert result._repr_html_() == f"<pre>{str(result).replace('<', '&lt;').replace(chr(39), '&#x27;')}</pre>"
        assert name == "network" or repr(result) == str(result)


def test_a_proof_is_marked_and_a_claim_is_not_like_it(results: dict[str, Any]) -> None:
    for name in ("certificate", "proof", "regression", "gain", "bound", "estimate", "evaluation"):
        text = str(results[name])
        assert "<= " in text, name
        assert "proved" in text, name
    assert "nothing is proved" in str(results["run"])
    assert "<=" not in str(results["run"])
    claimed = Network([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)], (2,), {1: torch.ones(2)})
    assert "claimed at 1: checked" in str(claimed)
    assert "claimed" not in str(results["network"])


@pytest.mark.parametrize("value", [1.00000012, 1.00000014999, 0.1, 1 / 3, 2e-310, 123456789.4, 1.0])
@pytest.mark.parametrize("digits", [8, 4])
def test_a_printed_bound_is_a_bound(value: float, digits: int) -> None:
    above, below, near = Fraction(upper(value, digits)), Fraction(lower(value, digits)), Fraction(20, 10**digits)
    assert Fraction(value) * (1 - near) <= below <= Fraction(value) <= above <= Fraction(value) * (1 + near)
    record = OutputRecord(rmse=1.0, constant=value, deviation=value, steepest=value)
    row = output_rows(RegressionRecord.model_construct(delta=0.1, outputs=[record]))[1][0]
    deviation, constant, steepest = map(Fraction, row[2:5])
    assert steepest <= Fraction(value) <= min(deviation, constant)
    assert figures({"lipschitz": value}).split()[1] == upper(value)


def test_a_certificate_says_its_figures(results: dict[str, Any]) -> None:
    found = results["certificate"]
    clean, certified = (f"{100 * share:.1f} %" for share in (found.clean_accuracy, found.accuracy(36 / 255)))
    first = str(found).splitlines()[0]
    assert first.startswith(f"40 samples: clean {clean}, certified(36/255) {certified}, L <= ")
    assert first.endswith("rounding included")
    assert "nothing certified" in str(dataclasses.replace(found, radius=0 * found.radius, input_shape=(16,)))
    table = dataclasses.replace(found, radius=0 * found.radius + 1.6, input_shape=(16,))  # of no 8-bit image
    assert "certified(1.6) " in str(table)
    assert "/255" not in str(table)
    assert "rounding ignored" in str(dataclasses.replace(found, rounding="ignore"))


def test_long_results_are_cut_and_others_cannot_move_the_cursor() -> None:
    assert screen("a\x1b[2J\n" + "b" * 200) == "a\\x1b[2J\n" + "b" * 97 + "..."
    assert len(screen("a\n" * 25).splitlines()) == 25
    assert "75 lines more" not in screen("a\n" * 25)


@pytest.mark.thorough
def test_the_plots_are_the_figures(results: dict[str, Any]) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    try:
        found = results["certificate"]
        line = found.plot().lines[0]
        x, y = (np.asarray(each) for each in line.get_data())
        for eps in (0.0, 0.01, 0.05, 0.2):  # the step that starts at or before eps
            assert y[np.flatnonzero(x <= eps)[-1]] == pytest.approx(found.accuracy(eps))
        bars = results["bound"].plot().patches
        assert len(bars) == 20
        assert {bar.get_width() for bar in bars} <= {layer.bound for layer in results["bound"].layers}
        _, given = pyplot.subplots()
        assert results["run"].plot(given) is given
        assert list(given.lines[0].get_ydata()) == [1 / (i + 1) for i in range(40)]
    finally:
        pyplot.close("all")


def test_a_frame_holds_what_the_file_holds(
    results: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results["certificate"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(OptionError, match="package pandas"):
        found.to_frame()

    class Frame(dict):
        def rename_axis(self, name: str) -> Frame:
            assert name == "index"
            return self

    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=Frame))
    frame = found.to_frame()
    found.save_csv(tmp_path / "radii.csv")
    head, *rows = (tmp_path / "radii.csv").read_text().splitlines()
    assert head.split(",") == ["index", *frame]
    assert [[float(cell) for cell in row.split(",")[1:]] for row in rows] == [
        [float(value) for value in row] for row in zip(*frame.values(), strict=True)
    ]


def test_without_matplotlib_a_sentence(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for name in ("certificate", "bound", "run"):
        with pytest.raises(OptionError, match="expected matplotlib"):
            results[name].plot()
