"""What training reports while it runs: loss and accuracy summed over steps and devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipkit.errors import RunError

# Losses are read back from the device once in so many steps: each reading waits for all work queued there.
READ_EVERY = 20


@dataclass(frozen=True)
class Progress:
    """Where training stands: sent every few steps and, with ``row``, at the end of each epoch.

    Attributes:
        epoch: the epoch in progress, counted from 1.
        epochs: number of epochs in all.
        step: steps done in this epoch.
        steps: steps of one epoch.
        loss: mean over the samples of this epoch so far.
        accuracy: share of them classified correctly at the time; None for regression.
        row: the epoch's line of metrics, at its end; None before.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float | None
    row: Mapping[str, Any] | None = None


class Totals:
    """Loss and accuracy of one epoch, summed over steps and devices; stops at a loss that is not finite."""

    def __init__(
        self, fabric: Any, epoch: int, epochs: int, steps: int, progress: Callable[[Progress], None] | None
    ) -> None:
        self.fabric, self.epoch, self.epochs, self.steps, self.progress = (
            fabric,
            epoch,
            epochs,
            steps,
            progress,
        )
        self.pending: list[Tensor] = []
        self.loss = self.correct = 0.0
        self.samples = self.classified = 0

    def add(self, step: int, loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        labelled = not y.is_floating_point()
        correct = (outputs.argmax(dim=1) == y).sum() if labelled else torch.zeros((), device=loss.device)
        self.pending.append(torch.stack([loss.float() * len(y), correct.float()]))
        self.samples += len(y) * self.fabric.world_size
        self.classified += len(y) * self.fabric.world_size * labelled
        if len(self.pending) == READ_EVERY or step == self.steps:
            self._read(step)
            if step < self.steps:
                self.report(step)

    def _read(self, step: int) -> None:
        pending = torch.stack(self.pending)
        if self.fabric.world_size > 1:  # a NaN on one device then shows on all, and all stop together
            pending = self.fabric.all_reduce(pending, reduce_op="sum")
        first = step - len(self.pending) + 1
        for number, (loss, correct) in enumerate(pending.tolist(), first):
            if not math.isfinite(loss):
                raise RunError(
                    f"expected a finite loss, got {loss} at epoch {self.epoch + 1}, "
                    f"step {number} of {self.steps}: "
                    "training stopped, the last checkpoint is of the epoch before; a smaller lr may help"
                )
            self.loss += loss
            self.correct += correct
        self.pending.clear()

    def row(self) -> dict[str, float]:
        accuracy = {"accuracy": self.correct / self.classified} if self.classified else {}
        return {"loss": self.loss / self.samples, **accuracy}

    def report(self, step: int, row: Mapping[str, Any] | None = None) -> None:
        if self.progress is not None and self.fabric.is_global_zero:
            mean = self.row()
            self.progress(
                Progress(self.epoch + 1, self.epochs, step, self.steps, mean["loss"], mean.get("accuracy"), row)
            )
