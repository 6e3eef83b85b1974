"""The content of checkpoints, and how a run continues from one, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipkit.training import checkpoints
from lipkit.training.devices import on_first
from lipkit.training.progress import Divergence
from lipkit.training.session import Session
from lipkit.training.sources import random_state, set_random_state

Generators = Mapping[str, torch.Generator]


def save(
    session: Session,
    *,
    epoch: int,
    step: int = 0,
    final: bool = False,
    totals: Mapping[str, float] | None = None,
    generators: Generators | None = None,
) -> Path | None:
    """Write a checkpoint and return its folder, None if the run has no folder. All processes must call it.

    ``step`` is the number of steps done in the unfinished epoch after ``epoch`` whole ones; ``totals`` and
    ``generators`` belong to it. ``final``: training is over; optimiser and random numbers are left out, older
    checkpoints deleted.

    Raises:
        Divergence: a weight is NaN or infinite; nothing is then written.
    """
    folder, fabric = session.folder, session.fabric
    if folder is None:
        return None
    nonfinite = session.nonfinite_parameter()
    if nonfinite is not None:
        raise Divergence(
            f"expected finite weights, got NaN or infinity in {nonfinite} before the checkpoint after "
            f"epoch {epoch} and {step} steps"
        )
    state: dict[str, Any] = {"step": step, "totals": dict(totals or {}), "used": session.budget.used}
    if session.average is not None:
        state["average"] = {name: value.cpu() for name, value in session.average.items()}
    if not final:
        state["optimizer"] = dict(session.optimizer.state_dict())
        state["precision"] = fabric.strategy.precision.state_dict()
        state["random"] = random_state(fabric, generators or {})
    keep = {"keep": 1} if final else {}  # a finished run is not continued
    return on_first(fabric, lambda: checkpoints.save_checkpoint(folder, epoch, session.model, state, step=step, **keep))


def open_run(
    held: ExitStack, fabric: Any, model: nn.Module, folder: Path | None, resume: bool, settings: Mapping[str, Any]
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Open and lock the run's folder until ``held`` ends, load ``model``; return (epochs done, state, history).

    Raises:
        RunError: raised in all processes if the first one fails; see `checkpoints`.
    """
    if folder is None:
        return 0, {}, []
    if resume:  # before locking, which makes a file in a folder that may hold no run
        on_first(fabric, lambda: checkpoints.check_settings(folder, settings))
    on_first(fabric, lambda: held.enter_context(checkpoints.locked(folder)))
    if not resume:
        on_first(fabric, lambda: checkpoints.write_settings(folder, settings))
        return 0, {}, []
    done, weights, state = on_first(fabric, lambda: checkpoints.load_checkpoint(folder)) or (0, None, {})
    if weights is not None:
        checkpoints.load_weights(model, weights, origin=folder)
    history = on_first(fabric, lambda: checkpoints.truncate_metrics(folder, done))
    return done, state, history


def restore(session: Session, state: dict[str, Any]) -> None:
    """Continue optimiser, averages and precision from a checkpoint's state. All processes must call it."""
    if "optimizer" in state:
        session.optimizer.load_state_dict(state["optimizer"])
    if state.get("precision"):
        session.fabric.strategy.precision.load_state_dict(state["precision"])
    if "average" in state and session.average is not None:
        for name, value in session.average.items():
            value.copy_(state["average"][name])


def restore_random(session: Session, state: Mapping[str, Any], generators: Generators) -> None:
    """Continue the random numbers from a checkpoint's state.

    They start anew if the checkpoint was made with another number of processes.
    """
    random = state.get("random")
    if random is not None and len(random["rng_cpu"]) == session.fabric.world_size:
        set_random_state(session.fabric, random, generators if state.get("step") else {})
