"""Accumulation, averages, limits of time, checkpoints within an epoch, logs: in one process."""

from __future__ import annotations

import itertools
import math
import sys
import types
from typing import ClassVar

import pytest
import torch
from torch import nn

from lipkit import training
from lipkit.data import random_flip
from lipkit.errors import OptionError, RunError
from lipkit.training import checkpoints as run_folder
from lipkit.training import progress
from lipkit.training import session as average
from lipkit.training.schedules import Clock


def samples(n=90):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, 1, 4, 4, generator=generator), torch.arange(n) % 3


def network(dropout=0.3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def fit(model=None, **options):
    options = {"epochs": 3, "batch_size": 3, "lr": 0.05, "augment": random_flip, "accelerator": "cpu"} | options
    return training.fit(network() if model is None else model, samples(), **options)


def same(a, b):
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.thorough
@pytest.mark.parametrize("pieces", [2, 3, 50])
def test_pieces_of_a_batch_add_up_to_its_gradient(pieces):
    def run(accumulate):
        return fit(network(0.0), batch_size=7, optimizer="sgd", grad_clip=0.3, accumulate=accumulate).model

    one, other = run(1), run(pieces)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert not same(one, network(0.0))


def test_a_penalty_counts_once_however_many_pieces():
    calls = []

    def penalty(model):
        calls.append(1)
        return model[1].weight.square().sum()

    def run(accumulate):
        return fit(network(0.0), batch_size=90, epochs=1, penalty=penalty, accumulate=accumulate)

    one, three = run(1), run(3)
    assert len(calls) == 4  # a step and the end of the epoch of each run
    assert three.history[0]["loss"] == pytest.approx(one.history[0]["loss"], rel=1e-6)
    torch.testing.assert_close(one.model[1].weight, three.model[1].weight, rtol=0, atol=1e-6)


def test_the_average_is_that_of_the_formula_and_is_what_is_evaluated():
    model, raw, copies, evaluated = network(), [], [], []
    expected = model[1].weight.detach().clone().double()

    def watch(given, step, epoch_end):
        (raw if given is model else copies).append((step, epoch_end, given[1].weight.detach().clone()))

    def evaluate(given):
        evaluated.append(given[1].weight.detach().clone())
        return {}

    run = fit(model, epochs=2, batch_size=5, ema=0.8, post_step=watch, evaluate=evaluate)
    for step, _, weight in raw:
        decay = min(0.8, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.double()
    assert len(raw) == 36
    torch.testing.assert_close(run.average[1].weight.double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(evaluated[-1], run.average[1].weight)
    assert [(step, end) for step, end, _ in copies] == [(18, True), (36, True), (36, True)]
    assert run.result is run.average
    assert not torch.equal(run.average[1].weight, run.model[1].weight)
    assert not any(p.data_ptr() == q.data_ptr() for p in run.model.parameters() for q in run.average.parameters())


@pytest.mark.thorough
def test_an_average_leaves_the_training_as_it_was():
    assert same(fit(ema=0.9).model, fit().model)
    assert fit().average is None


def test_update_is_exact_in_float64():
    a, p = torch.rand(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    expected = 0.75 * a + 0.25 * p
    average.update([a], [p], 0.75, step=1000)
    torch.testing.assert_close(a, expected, rtol=1e-14, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"max_minutes": 1e-9}, {"max_minutes": 1e-9, "ema": 0.9, "accumulate": 2}])
def test_calls_that_time_ends_add_up_to_one_run_bit_for_bit(tmp_path, options):
    evaluate = {"evaluate": lambda model: {"sum": sum(float(p.sum()) for p in model.parameters())}}
    whole = fit(run_dir=tmp_path / "whole", **{k: v for k, v in options.items() if k != "max_minutes"}, **evaluate)
    places, run = [], None
    while run is None or not run.finished:
        run = fit(run_dir=tmp_path / "part", resume=run is not None, **options, **evaluate)
        places.append(run_folder.newest_checkpoint(tmp_path / "part").name)
        assert len(places) < 10
    assert places == [
        "epoch-0000-step-000020", "epoch-0001", "epoch-0001-step-000020", "epoch-0002", "epoch-0002-step-000020",
        "epoch-0003",
    ]  # fmt: skip
    assert same(whole.model, run.model)
    assert whole.average is None or same(whole.average, run.average)
    rows = [[(r["loss"], r["accuracy"], r["sum"]) for r in history] for history in (whole.history, run.history)]
    assert rows[0] == rows[1]
    assert (run.epochs_done, whole.finished) == (3, True)


@pytest.mark.thorough
def test_checkpoints_do_not_pile_up_and_a_finished_run_keeps_its_weights_alone(tmp_path):
    sizes, kept = [], []

    def watch(model, step, epoch_end):
        folder = tmp_path / "checkpoints"
        kept.append(len(list(folder.iterdir())) if folder.exists() else 0)
        if folder.exists():
            sizes.append(max(p.stat().st_size for p in folder.rglob("state.pt")))

    fit(run_dir=tmp_path, epochs=4, checkpoint_seconds=1e-9, post_step=watch)
    assert max(kept) == 2
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["epoch-0004"]
    epoch, weights, state = run_folder.load_checkpoint(tmp_path)
    assert (epoch, "optimizer" in state, len(weights)) == (4, False, 4)


def test_checkpoints_within_an_epoch_keep_their_distance(tmp_path, monkeypatch):
    steps, save = [], run_folder.save_checkpoint

    def saved(*args, step, **options):
        steps.append(step)
        return save(*args, step=step, **options)

    monkeypatch.setattr("lipkit.training.progress.READ_SECONDS", 0.0)  # asks the clock after each step
    monkeypatch.setattr("time.monotonic", itertools.count().__next__)
    monkeypatch.setattr(run_folder, "save_checkpoint", saved)
    fit(run_dir=tmp_path, epochs=1, checkpoint_seconds=10)
    assert 2 <= len(steps) <= 4
    assert steps[1] - steps[0] > 5


@pytest.mark.thorough
def test_checkpoints_every_few_epochs(tmp_path):
    names = []

    def progress(event):
        if event.row is not None:
            folder = tmp_path / "checkpoints"
            names.append(sorted(p.name for p in folder.iterdir()) if folder.exists() else [])

    fit(run_dir=tmp_path, epochs=5, checkpoint_every=2, progress=progress)
    assert names == [[], ["epoch-0002"], ["epoch-0002"], ["epoch-0002", "epoch-0004"], ["epoch-0005"]]


@pytest.mark.thorough
def test_divergence_names_the_checkpoint_that_is_kept(tmp_path):
    steps = []

    def loss(outputs, targets):
        steps.append(1)
        value = nn.functional.cross_entropy(outputs, targets)
        return value * math.nan if len(steps) == 45 else value

    with pytest.raises(RunError, match=r"got nan at epoch 2, step 15 of 30: training stopped, the last good .*0001; a"):
        fit(run_dir=tmp_path, loss=loss)
    steps.clear()
    with pytest.raises(RunError, match="training stopped, no checkpoint was written; a smaller lr may help"):
        fit(loss=loss)
    assert run_folder.load_checkpoint(tmp_path)[0] == 1


@pytest.mark.thorough
def test_the_metrics_have_a_line_for_each_epoch(tmp_path):
    run = fit(run_dir=tmp_path, evaluate=lambda model: {"clean": 0.5}, evaluate_every=2)
    rows = run_folder.read_metrics(tmp_path)
    assert rows == run.history
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row.get("clean") for row in rows] == [None, 0.5, 0.5]
    assert all(row["samples_per_second"] > 0 for row in rows)


@pytest.mark.thorough
def test_progress_knows_pace_and_time_left():
    events = []
    fit(progress=events.append)
    assert [(e.epoch, e.step) for e in events] == [(e, s) for e in (1, 2, 3) for s in (20, 30)]
    for event in events:
        assert event.samples_per_second > 0
        left = 3 * ((3 - event.epoch) * 30 + 30 - event.step)
        assert event.seconds_left == pytest.approx(left / event.samples_per_second)
    memory = progress.peak_memory(torch.device("cpu"))
    assert memory is None or 10 < memory < 1e6


class Board:
    written: ClassVar[list] = []

    def __init__(self, log_dir, purge_step):
        self.written.append(("open", log_dir, purge_step))

    def add_scalar(self, name, value, step):
        self.written.append((name, value, step))

    def flush(self): ...

    def close(self):
        self.written.append(("close",))


def test_tensorboard_gets_every_number_of_an_epoch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Board))
    monkeypatch.setattr(torch.utils, "tensorboard", sys.modules["torch.utils.tensorboard"], raising=False)
    monkeypatch.setattr("lightning_fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE", True)
    monkeypatch.setattr(Board, "written", [])
    run = fit(run_dir=tmp_path, tensorboard=True, epochs=1)
    names = {entry[0]: entry[1:] for entry in Board.written}
    assert names["open"] == (str(tmp_path / "tensorboard"), 1)
    assert names["loss"] == (run.history[0]["loss"], 1)
    assert "close" in names
    assert "epoch" not in names


def test_without_the_package_tensorboard_is_refused_before_training(tmp_path, monkeypatch):
    for name in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning_fabric.loggers.tensorboard.{name}", False)
    with pytest.raises(OptionError, match=r"expected the package tensorboard .*pip install tensorboard"):
        fit(run_dir=tmp_path, tensorboard=True)
    assert not list(tmp_path.iterdir())


def test_channels_last_changes_the_layout_alone():
    def images(channels_last):
        seen = []

        class Watch(nn.Conv2d):
            def forward(self, x):
                seen.append(x.is_contiguous(memory_format=torch.channels_last))
                return super().forward(x)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(Watch(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        generator = torch.Generator().manual_seed(1)
        data = (torch.rand(30, 2, 4, 4, generator=generator), torch.arange(30) % 3)
        training.fit(model, data, epochs=2, batch_size=10, lr=0.01, accelerator="cpu", channels_last=channels_last)
        return model, seen

    (plain, before), (last, after) = images(False), images(True)
    assert all(after)
    assert not any(before)
    for a, b in zip(plain.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_compiled_steps_do_what_plain_ones_do():
    plain, compiled = fit(network(0.0)), fit(network(0.0), compile=True)
    for a, b in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert type(compiled.model) is nn.Sequential


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 0}, "accumulate: expected greater than or equal to 1, got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every: expected greater than or equal to 1, got 0"),
        ({"ema": 1.0}, "ema: expected less than 1, got 1.0"),
        ({"max_minutes": 0.0}, "max_minutes: expected greater than 0, got 0.0"),
        ({"checkpoint_seconds": math.nan}, "checkpoint_seconds: expected greater than 0, got nan"),
        ({"tensorboard": True}, "expected run_dir with tensorboard=True, got None"),
        ({"precision": "bf16-true"}, "precision: expected .*'64-true', 'bf16-mixed' or '16-mixed', got 'bf16-true'"),
        ({"precision": "16-true"}, "precision: expected '32-true', "),
    ],
)
def test_refusals(change, message):
    with pytest.raises(OptionError, match=message):
        fit(**change)


def test_the_clock():
    alone = types.SimpleNamespace(world_size=1)
    assert Clock(alone, None, None, None).due() == ""
    assert Clock(alone, None, 1e-9, None).due() == "stop"
    assert Clock(alone, None, 100, 1e-9).due() == "save"
    assert Clock(alone, None, None, 1000).due() == ""
    # In several processes the first one's clock decides.
    led = types.SimpleNamespace(world_size=2, broadcast=lambda value, src: "stop")
    assert Clock(led, None, 100, None).due() == "stop"


def test_the_budget():
    clock = Clock(types.SimpleNamespace(world_size=1), "10s wall", None, None)
    clock.used, clock.now = 4.0, iter([0.0, 1.0, 5.0, 5.5]).__next__
    clock.since = clock.now()
    clock.spend(7)
    assert clock.used == 5.0
    clock.since = clock.now()  # what lay between is free
    clock.spend(7)
    assert clock.used == 5.5
    samples = Clock(types.SimpleNamespace(world_size=1), "20 images", None, None)
    samples.spend(5)
    assert (samples.timed, samples.used, samples.amount) == (False, 5, 20)
