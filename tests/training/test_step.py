"""Recorded steps, by a stand-in for a CUDA graph: the list of torch's operations, run again without Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lipkit
from lipkit.errors import OptionError
from lipkit.training import optim, session, step


class Tape(TorchDispatchMode):
    """As a graph: fixed operations on fixed tensors, numbers as they were. The first replay is the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[tuple[Tensor, int]]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else [out]
        # Only the tensors that the operation makes: a view, or what is changed in place, lies where it lay.
        fresh = not any(a.alias_info for a in func._schema.arguments)
        made = [(t, i) for i, t in enumerate(outputs) if fresh and isinstance(t, Tensor)]
        self.operations.append((func, args, kwargs or {}, made))
        return out

    def replay(self) -> None:
        self.replays += 1
        if self.replays == 1:
            return
        with torch.no_grad():
            for func, args, kwargs, made in self.operations:
                out = func(*args, **kwargs)
                for tensor, i in made:
                    tensor.detach().copy_((out if isinstance(out, tuple | list) else [out])[i])


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The graphs that are recorded."""
    found: list[Tape] = []

    def record(run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        with Tape() as tape:
            result = run()
        found.append(tape)
        return tape, result

    def beside(self: Any, session: Any, x: Tensor, y: Tensor, more: Any) -> Tensor:
        return self.step(session, x, y, **more)

    monkeypatch.setattr(step, "_recorded", record)
    monkeypatch.setattr(step.CapturedStep, "_beside", beside)
    monkeypatch.setattr(session, "check_recordable", lambda *_: None)
    return found


class Net(nn.Module):
    """Dropout, and a factor that Python holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.factor


class Counts(Net):
    """Counts its forward passes, as power iterations and warm-ups do."""

    def forward(self, x: Tensor) -> Tensor:
        self.factor = self.factor * 0.9
        return super().forward(x)


class Remembers(Net):
    """Replaces a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.mean = 0.5 * self.mean + out.detach().mean(0)
        return out - self.mean


def trained(model: nn.Module, graph: bool, **options: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = copy.deepcopy(model).double()
    data = torch.rand(70, 3).double(), torch.arange(70) % 2
    options = {"epochs": 5, "batch_size": 16, "lr": 0.125, "loss": "cross_entropy", "precision": "64-true"} | options
    run = lipkit.fit(model, data, accelerator="cpu", cuda_graph=graph, schedule="constant", **options)
    return run.result, run.history


def same(model: nn.Module, **options: Any) -> None:
    """The weights of recorded steps are those of plain ones."""
    (a, rows), (b, others) = trained(model, False, **options), trained(model, True, **options)
    for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-9)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in others], rel=1e-6)


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def stiefel() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(lipkit.layers.StiefelLinear(3, 4), nn.Tanh(), nn.Linear(4, 2))


SPECTRAL = {"optimizer": "spectral", "manifold_lr": 2**-6}


@pytest.mark.thorough
def test_options(tapes: list[Tape]) -> None:
    """Smaller last batches, pieces, clipping, averages, evaluations, decay and dropout."""
    more = {"accumulate": 2, "grad_clip": 0.5, "ema": 0.9, "optimizer": "adamw", "weight_decay": 0.1}
    same(net(), evaluate=lambda model: {"norm": float(model(torch.zeros(1, 3).double()).norm())}, **more)
    assert [tape.replays for tape in tapes] == [17, 2]


@pytest.mark.thorough
def test_large_matrices_of_two_phases(tapes: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "LARGE", 10)
    same(stiefel(), **SPECTRAL)
    assert sum(tape.replays for tape in tapes) > 10


def change_factor(model: nn.Module, step: int, end: bool) -> None:
    model.factor = 1.0 if step < 12 else 0.5


def freeze(model: nn.Module, step: int, end: bool) -> None:
    model.body[0].weight.requires_grad_(step < 12)


def replace(model: nn.Module, step: int, end: bool) -> None:
    if step == 12:
        model.body[0].weight.data = model.body[0].weight.data / 2


def without_dropout(model: nn.Module, step: int, end: bool) -> None:
    model.body[2].train(step % 5 != 1)  # each epoch begins with model.train()


@pytest.mark.thorough
@pytest.mark.parametrize("change", [change_factor, freeze, replace, without_dropout])
def test_what_changes_between_steps_is_recorded_anew(tapes: list[Tape], change: Any) -> None:
    same(net(), post_step=change)


@pytest.mark.thorough
def test_a_loss_that_changes(tapes: list[Tape]) -> None:
    class Loss:
        def __init__(self) -> None:
            self.scale = 1.0

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return self.scale * nn.functional.cross_entropy(outputs, targets)

    def run(graph: bool) -> Tensor:
        loss = Loss()

        def anneal(model: nn.Module, step: int, end: bool) -> None:
            loss.scale = 1.0 if step < 12 else -1.0

        return trained(net(), graph, loss=loss, post_step=anneal)[0].body[0].weight.detach()

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("kind", "name"), [(Counts, "network.factor"), (Remembers, "network.mean")])
def test_steps_that_change_attributes_are_refused(tapes: list[Tape], kind: type[nn.Module], name: str) -> None:
    with pytest.raises(OptionError, match=f"change tensors in place, got a new value of {name}"):
        trained(net(kind), True)
    assert not tapes


@pytest.mark.thorough
@pytest.mark.parametrize(("make", "more"), [(net, {}), (stiefel, SPECTRAL)])
def test_resume(tapes: list[Tape], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, make: Any, more: Any) -> None:
    """An epoch has five steps, so that large matrices wait when the run is cut."""
    monkeypatch.setattr(optim, "LARGE", 10)
    plain, _ = trained(make(), False, **more)
    trained(make(), True, run_dir=tmp_path / "r", max_minutes=1e-9, **more)
    resumed, rows = trained(make(), True, run_dir=tmp_path / "r", resume=True, **more)
    assert len(rows) == 5
    assert tapes
    for p, q in zip(plain.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-9)
    assert {row["lr"] for row in rows} == {more.get("manifold_lr", 0.125)}


def test_a_refusal_leaves_no_run(tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="expected one CUDA device, got cpu"):
        trained(net(), True, run_dir=tmp_path / "r")
    trained(net(), False, run_dir=tmp_path / "r", epochs=1)
