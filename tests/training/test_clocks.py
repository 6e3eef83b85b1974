"""A budget of time: what it reads, when it ends training, and that a resumed run goes on as if it had not been cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lipkit.errors import OptionError
from lipkit.experiments.recipe import load_recipe, to_yaml
from lipkit.training import Progress, Run, TrainOptions, fit, schedules


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor clock that moves by one second each time it is read: a step takes one second."""
    monkeypatch.setattr(schedules.time, "process_time", itertools.count().__next__)


def train(rates: list[float] | None = None, **options: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.rand(200, 3, generator=torch.Generator().manual_seed(1))
    seen = [] if rates is None else rates

    def schedule(fraction: float) -> float:
        seen.append(fraction)
        return 1 - fraction / 2

    return fit(model, (x, (x[:, 0] > 0.5).long()), batch_size=4, schedule=schedule, accelerator="cpu", **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", (90.0, "cpu")),
        ("1h wall", (3600.0, "wall")),
        (" 2.5 min cpu", (150.0, "cpu")),
        ("7s", (7.0, "cpu")),
        ("1.5M images", (1.5e6, "samples")),
        ("20k samples", (2e4, "samples")),
        ("7 images", (7.0, "samples")),
    ],
)
def test_texts(text: str, expected: tuple[float, str]) -> None:
    assert schedules.parse_budget(text) == expected


@pytest.mark.parametrize(
    "text", ["", "h", "-1s", "0", "1d", "1h30", "1 s s", "1e999h", "inf", "9" * 400, "0 images", "1.5M", "2G images"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="budget: expected a time such as 400s"):
        TrainOptions(budget=text)


def test_something_has_to_end_training() -> None:
    with pytest.raises(OptionError, match="expected epochs, or a budget, got neither"):
        TrainOptions()
    assert TrainOptions(budget=400).budget == "400s"
    with pytest.raises(OptionError, match="budget"):
        TrainOptions(budget=True)


def test_the_rate_follows_the_time_and_training_ends_with_it() -> None:
    rates: list[float] = []
    run = train(rates, budget="75s")  # 50 steps are an epoch
    assert rates == [step / 75 for step in range(75)]
    assert run.finished
    assert [row["epoch"] for row in run.history] == [1, 2] == list(range(1, run.epochs_done + 1))


def test_checkpoints_take_no_time_of_the_budget(tmp_path: Path) -> None:
    rates: list[float] = []
    train(rates, budget="75s", run_dir=tmp_path, checkpoint_seconds=1e-9)  # writing one reads the clock
    assert rates == [step / 75 for step in range(75)]


def test_epochs_end_training_before_the_budget() -> None:
    rates: list[float] = []
    assert train(rates, budget="1000s", epochs=1).epochs_done == 1
    assert rates == [step / 50 for step in range(50)]


def test_the_last_step_is_expected_where_it_comes() -> None:
    events: list[Progress] = []
    train(budget="75s", progress=events.append)
    assert (events[0].epoch, events[0].step, events[0].epochs) == (1, 20, 2)
    assert all(e.epochs == 2 for e in events)


@pytest.mark.thorough
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = train(budget="130s")
    options: dict[str, Any] = {"budget": "130s", "run_dir": tmp_path}
    part = train(**options, max_minutes=1e-9)
    for cut in range(20):
        if part.finished:
            break
        part = train(**options, resume=True, **({"max_minutes": 1e-9} if cut < 3 else {}))
    assert part.finished
    assert part.epochs_done == whole.epochs_done == 3
    for one, other in zip(whole.model.parameters(), part.model.parameters(), strict=True):
        assert torch.equal(one, other)
    # A finished run has nothing left to do.
    again = train(**options, resume=True)
    assert torch.equal(again.model.weight, whole.model.weight)


@pytest.mark.thorough
def test_a_budget_of_samples_is_that_many_epochs_to_the_bit(tmp_path: Path) -> None:
    rates: list[float] = []
    one, other = train(epochs=2), train(rates, budget="400 images")
    assert torch.equal(one.model.weight, other.model.weight)
    assert rates == [step / 100 for step in range(1, 101)]
    # It ends within an epoch, and a run that is cut and resumed is the run that was not.
    whole = train(budget="0.25k samples")
    assert [(row["steps"], row["samples"]) for row in whole.history] == [(50, 200), (13, 52)]
    part = train(budget="0.25k samples", run_dir=tmp_path, max_minutes=1e-9)
    assert not part.finished
    again = train(budget="0.25k samples", run_dir=tmp_path, resume=True)
    assert torch.equal(again.model.weight, whole.model.weight)
    assert [(row["steps"], row["samples"]) for row in again.history] == [(50, 200), (13, 52)]


def test_the_budget_is_a_setting(tmp_path: Path) -> None:
    train(budget="30s", run_dir=tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text())["budget"] == "30s"


def test_recipes_without_a_budget_keep_their_text() -> None:
    assert "budget" not in to_yaml(load_recipe("digits_cayley"))
    recipe = load_recipe("digits_cayley", ["train.budget=10min", "train.epochs=null"])
    assert (recipe.train.budget, recipe.train.epochs) == ("10min", None)
    assert "epochs: null\n  budget: 10min\n" in to_yaml(recipe)
