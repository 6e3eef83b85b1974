"""Forward passes of all kinds: never bounded where the truth refuses, and refused only where they were before.

The kept bodies, their truth and the verdicts before the tracer was mended are in `forward_passes.json`
(`benchmarks.forward_passes --keep`).
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.forward_bodies import SHAPES

import lipkit
from benchmarks import forward_passes
from lipkit.errors import NoRuleError

ROWS = json.loads((Path(__file__).parent / "forward_passes.json").read_text())
# What people write: where these were bounded they still are. The others may be refused for what they look at.
LEGAL = ("innocent", "image", "in place", "casts")
# State in closures and iterators, and the identity of an integer, leave no trace: found by luck at most.
# Every body that was once judged wrongly, and every fourth one of the rest.
SEEN = [row for i, row in enumerate(ROWS) if not row["name"].startswith("hidden") and ("wrong" in row or i % 4 == 1)]
EVERY = 6


@pytest.fixture(autouse=True)
def quiet() -> Any:
    # The bodies are the users', and warn of what they like; some draw random numbers.
    np.random.seed(0)  # noqa: NPY002
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        yield


def judged(row: dict[str, Any]) -> dict[str, Any]:
    varies, slope = row.get("varies", ""), row.get("slope", float("nan"))
    known = forward_passes.reference(row["body"], SHAPES[row["shape"]], varies, slope)
    said = forward_passes.verdict(row["body"], SHAPES[row["shape"]], known)
    assert forward_passes.faults(said, varies, slope) == [], row["body"]
    return said


def marked(rows: list[dict[str, Any]]) -> list[Any]:
    """Some of the rows for the fast tests, all for the thorough ones."""
    slow = pytest.mark.thorough
    return [pytest.param(row, id=row["name"], marks=[slow] if i % EVERY else []) for i, row in enumerate(rows)]


@pytest.mark.thorough
@pytest.mark.parametrize("row", marked([row for row in SEEN if "varies" in row]))
def test_refused_where_the_output_is_no_function_of_one_sample(row: dict[str, Any]) -> None:
    judged(row)


# x + a(x) has the strides of x, so contiguous() copies it for some inputs alone; a leaf is not changed in place.
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = x + s.a(x)\ny = x.contiguous()\ny.mul_(0)\nx = x + y", "for an input that is not contiguous"),
        (
            "try:\n    x.add_(0)\n    x = 101 * x\nexcept RuntimeError:\n    pass",
            "for an input that requires a gradient",
        ),
    ],
)
def test_what_depends_on_how_the_input_is_stored_is_refused(body: str, message: str) -> None:
    network = forward_passes.build(body)
    for ask in (lipkit.analyze, lipkit.export):
        with pytest.raises(NoRuleError, match=message):
            ask(network, (4,))


@pytest.mark.parametrize("row", marked([row for row in SEEN if "varies" not in row]))
def test_bounded_from_above_and_exported_as_it_is(row: dict[str, Any]) -> None:
    said = judged(row)
    if row["name"].startswith(LEGAL):
        newly = [key for key in ("analyze", "export") if said[key] == "refused" != row["before"][key]]
        assert newly == [], row["body"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row["name"], marks=[pytest.mark.slow] * (i % 6 > 0)) for i, row in enumerate(ROWS[::12])],
)
def test_the_truth_is_found_again(row: dict[str, Any]) -> None:
    found = forward_passes.truth(row["body"], SHAPES[row["shape"]])
    assert bool(found.varies) == ("varies" in row)
    if not found.varies:
        assert found.slope == pytest.approx(row["slope"], rel=1e-3, abs=1e-5)


def test_the_kept_bodies_are_many_and_of_every_kind() -> None:
    kinds = {row["name"].rstrip(" 0123456789") for row in ROWS}
    assert kinds == set(forward_passes.KINDS)
    assert len(ROWS) >= 300
    assert len({row["body"] for row in ROWS}) == len(ROWS)
    assert sum("wrong" in row for row in ROWS) >= 50


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = x * (1 + 100 * (x.shape[0] // 4))", "batch of 4"),
        ("x = x - x.mean(0)", "batch of 2"),
        ("s.log.append(1)\nx = x if len(s.log) < 30 else 9 * x", "call 30"),
        ("if torch.is_inference_mode_enabled():\n    x = 9 * x", "inference mode"),
        ("if s.w.requires_grad:\n    x = 9 * x", "frozen weights"),
        ("y = x.contiguous()\ny.mul_(3)\nx = x + y", "strided"),
        ("x = x if x.shape[0] != 1 else 1 / 0", "for one sample: ZeroDivisionError"),
    ],
)
def test_the_truth_sees_what_varies(source: str, reason: str) -> None:
    assert reason in forward_passes.truth(source, (4,)).varies


@pytest.mark.thorough
def test_the_truth_of_a_residual_is_its_norm() -> None:
    network = forward_passes.build("x = x + s.a(x)")
    norm = np.linalg.norm(np.eye(4) + network.a.weight.detach().numpy(), 2)
    found = forward_passes.truth("x = x + s.a(x)", (4,))
    assert found.varies == ""
    assert 0.999 * norm < found.slope <= norm * (1 + 1e-5)


@pytest.mark.thorough
def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lipkit.analyze

    def half(*given: Any, **options: Any) -> Any:
        found = right(*given, **options)
        return dataclasses.replace(found, upper=0.5 * found.upper)

    def other(model: torch.nn.Module, shape: tuple[int, ...]) -> Any:
        return lipkit.modules.Network([torch.nn.Linear(4, 4)], shape)

    source = "x = x + s.a(x)"
    known = forward_passes.truth(source, (4,))
    monkeypatch.setattr(lipkit, "analyze", half, raising=False)
    monkeypatch.setattr(lipkit, "export", other, raising=False)
    said = forward_passes.verdict(source, (4,), known)
    found = forward_passes.faults(said, known.varies, known.slope)
    assert len(found) >= 2
    assert "analyze: bound" in found[0]
    assert "below the slope" in found[0]
    assert "the export is another function" in found
    assert len(forward_passes.faults({"analyze": 1.0, "export": "raw KeyError: 0"}, "another output", 0.0)) == 2
