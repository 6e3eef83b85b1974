"""Progress of training: loss and accuracy summed over steps and devices, pace and memory."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipkit.errors import OptionError, RunError

# Losses are read from the device once in this many steps, because reading waits for all queued work; or after so many
# seconds, but only in a single process, since several processes must read at the same step.
READ_EVERY, READ_SECONDS = 20, 2.0


@dataclass(frozen=True)
class Progress:
    """The state of training, reported every few steps and, with ``row``, at the end of each epoch.

    Attributes:
        epoch: the epoch in progress, counted from 1.
        epochs: number of epochs in all; with a budget, estimated from the pace so far.
        step: steps done in this epoch.
        steps: steps of one epoch.
        loss: mean over the samples of this epoch so far.
        accuracy: fraction of them classified correctly when they were trained on; None for regression.
        row: the epoch's line of metrics, at its end; None before.
        samples_per_second: pace of this epoch so far, all devices together.
        seconds_left: of training at that pace, evaluations not counted.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float | None
    row: Mapping[str, Any] | None = None
    samples_per_second: float = math.nan
    seconds_left: float = math.nan


class Divergence(RunError):
    """The loss or a weight became NaN or infinite."""


@dataclass
class Totals:
    """Loss and accuracy of the epoch number ``epoch``, counted from 0, summed over steps and devices.

    The fields from ``loss`` to ``cpu`` are sums, which after an interruption start at the numbers of `state`.
    """

    fabric: Any
    epoch: int
    steps: int
    progress: Callable[[Progress], None] | None
    loss: float = 0.0
    correct: float = 0.0
    samples: int = 0
    seconds: InitVar[float] = 0.0
    cpu: InitVar[float] = 0.0
    epochs: int = 0  # estimate of all epochs, see `add`
    step: int = 0
    labelled: bool = False
    pending: list[Tensor] = field(default_factory=list)  # sums not yet read from the device
    read: float = field(default_factory=time.perf_counter)  # time of the last reading

    def __post_init__(self, seconds: float, cpu: float) -> None:
        self.start, self.cpu_start = time.perf_counter() - seconds, time.process_time() - cpu

    def add(self, step: int, sums: Tensor, size: int, *, labelled: bool, fraction: float = 0.0) -> bool:
        """Add one step, counted from 1; True if sums were read from the device.

        ``sums`` (2,) are the sum of the losses and the number of correct predictions (if ``labelled``) in this process,
        ``size`` the samples of all processes, ``fraction`` the part of training that is done. A loss that is not finite
        raises `Divergence` in all processes.
        """
        self.labelled = labelled
        self.pending.append(sums)
        self.samples += size
        self.step = step
        last = step == self.steps or fraction >= 1
        overdue = self.fabric.world_size == 1 and time.perf_counter() - self.read >= READ_SECONDS
        if len(self.pending) < READ_EVERY and not last and not overdue:
            return False
        self._read(step)
        done = self.epoch + step / self.steps  # epochs
        self.epochs = max(self.epoch + 1, round(done / fraction)) if fraction > 0 else self.epoch + 1
        if not last:
            self.report(step)
        return True

    def _read(self, step: int) -> None:
        pending = torch.stack(self.pending)
        if self.fabric.world_size > 1:  # spreads a NaN on one device to all, so that all stop
            pending = self.fabric.all_reduce(pending, reduce_op="sum")
        first = step - len(self.pending) + 1  # the step of the oldest sums
        for number, (loss, correct) in enumerate(pending.tolist(), first):
            if not math.isfinite(loss):
                raise Divergence(
                    f"expected a finite loss, got {loss} at epoch {self.epoch + 1}, step {number} of {self.steps}"
                )
            self.loss += loss
            self.correct += correct
        self.pending.clear()
        self.read = time.perf_counter()

    def pace(self) -> float:
        """Samples per second of this epoch so far, all devices together."""
        return self.samples / max(time.perf_counter() - self.start, 1e-9)  # a coarse clock may stand still

    def row(self) -> dict[str, float]:
        """Mean loss, accuracy if there are labels, steps, samples, and CPU seconds of this process, all so far."""
        accuracy = {"accuracy": self.correct / self.samples} if self.labelled else {}
        counts = {"steps": self.step, "samples": self.samples, "cpu_seconds": round(self.state()["cpu"], 3)}
        return {"loss": self.loss / self.samples, **accuracy, **counts}

    def state(self) -> dict[str, float]:
        """The numbers to continue the epoch from. Call it right after `add` has read the sums, when none is pending."""
        times = {"seconds": time.perf_counter() - self.start, "cpu": time.process_time() - self.cpu_start}
        return {"loss": self.loss, "correct": self.correct, "samples": self.samples, **times}

    def report(self, step: int, row: Mapping[str, Any] | None = None) -> None:
        """Call ``progress`` with the present state, in the first process."""
        if self.progress is None or not self.fabric.is_global_zero:
            return
        loss, accuracy = self.loss / self.samples, self.correct / self.samples if self.labelled else None
        pace = float(row["samples_per_second"]) if row else self.pace()
        steps_left = (self.epochs - self.epoch) * self.steps - step  # of training
        left = steps_left * self.samples / step / pace if pace > 0 else math.nan
        self.progress(Progress(self.epoch + 1, self.epochs, step, self.steps, loss, accuracy, row, pace, left))


def peak_memory(device: torch.device) -> float | None:
    """Peak memory so far in MiB, of the CUDA device or resident in this process; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, Linux KiB


def tensorboard(folder: Path, epochs_done: int = 0) -> Any:
    """Fabric's logger of TensorBoard events in ``folder``; events that a resumed run repeats are hidden."""
    from lightning_fabric.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(folder, name="", version="tensorboard", purge_step=epochs_done + 1)
    except ModuleNotFoundError as error:
        wanted = "expected the package tensorboard for tensorboard=True (pip install tensorboard)"
        raise OptionError(f"{wanted}, got none") from error
