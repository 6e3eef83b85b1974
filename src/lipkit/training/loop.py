"""The training loop: ordinary modules, ordinary optimisers, on Lightning Fabric."""

import math
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipkit.errors import OptionError, rewording
from lipkit.shown import Shown, axes
from lipkit.text import printable
from lipkit.training import checkpoints, sources
from lipkit.training.devices import make_fabric, on_first
from lipkit.training.options import TrainOptions
from lipkit.training.progress import Totals, peak_memory
from lipkit.training.schedules import Request
from lipkit.training.session import Session, update
from lipkit.training.sources import batches, generator, own_random_state, set_random_state, source
from lipkit.training.step import CapturedStep, take_step

_COSTS = ("lr", "seconds", "cpu_seconds", "samples_per_second", "memory_mib")


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """The outcome of training.

    Attributes:
        model: the given model, trained, in eval mode, on the training device.
        history: one dict per epoch: epoch, loss, accuracy, steps, samples, cpu_seconds (of the steps, in this
            process), lr, seconds, samples_per_second, memory_mib (the peak so far, of the CUDA device or else of the
            process), and the numbers that ``evaluate`` returned.
        folder: the run's folder, or None.
        epochs_done: number of whole epochs trained, including those before a resume.
        average: with ``ema``, a copy of the model with the averaged parameters; else None.
        finished: whether training is complete; False if ``max_minutes`` ended it early.
    """

    model: nn.Module
    history: list[dict[str, Any]] = field(default_factory=list)
    folder: Path | None = None
    epochs_done: int = 0
    average: nn.Module | None = None
    finished: bool = True

    @property
    def result(self) -> nn.Module:
        """The network to export: the averaged model if there is one, else the model."""
        return self.model if self.average is None else self.average

    def describe(self) -> str:
        """Epochs and last figures; no constant, which is a mere claim until the export is proved."""
        last = self.history[-1] if self.history else {}
        # The last line is for results, not for costs.
        figures = [f"{k} {v:.4g}" for k, v in last.items() if isinstance(v, float) and k not in _COSTS]
        seconds, early = sum(row.get("seconds", 0.0) for row in self.history), ", stopped before the last one"
        count = sum(p.numel() for p in self.model.parameters())
        return "\n".join(
            [
                f"{self.epochs_done} epochs in {seconds:.1f} s{'' if self.finished else early}",
                *textwrap.wrap(f"last epoch: {', '.join(figures) or 'none'}", 98),
                f"{type(self.model).__name__}, {count:,} parameters{'' if self.average is None else ', averaged'}"
                + ("" if self.folder is None else f", in {self.folder}"),
                "nothing is proved yet: lipkit.export(run.result, input_shape), then lipkit.certify",
            ]
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw loss (left) and accuracies (right) by epoch into ``ax``, or new axes; returns the axes on the left.

        Raises:
            OptionError: matplotlib is not installed.
        """
        ax = axes(ax, "epoch", "loss")
        ax.plot([row["epoch"] for row in self.history], [row["loss"] for row in self.history], "k", label="loss")
        # Collect names from all rows, because not every epoch was evaluated.
        right, names = ax.twinx(), dict.fromkeys(name for row in self.history for name in row)
        for name in names:
            if name in ("accuracy", "clean") or name.startswith("certified("):
                points = [(row["epoch"], row[name]) for row in self.history if name in row]
                right.plot(*zip(*points, strict=True), ".-", label=name)
        right.set(ylabel="fraction of samples", ylim=(0, 1.02))
        ax.figure.legend(loc="outside upper center", ncols=4)
        return ax


def fit(
    model: nn.Module,
    data: object,
    options: TrainOptions | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    fabric: Any = None,
    **changes: Any,
) -> Run:
    r"""Train ``model`` in place.

    After each step, layers that need it are updated, such as by SVCM's projection: see `lipkit.layers.after_step`.

    Step s of S has the rate ``lr * schedule(s / S)``, s = 1..S. With a ``budget`` the fraction is that of the samples
    seen, this step included, or of the time used before it; runs with a time budget cannot be repeated bit for bit.

    Shuffling and augmentation of an epoch are drawn from generators seeded by (seed, epoch); torch's global random
    state is seeded at the start, saved with each checkpoint and restored at the end. So on a CPU, the same call with
    the same number of processes gives the same weights, bit for bit, even if it was resumed. Other randomness (numpy in
    a Dataset) is up to the caller. With another number of processes or of pieces (``accumulate``) the steps are the
    same up to rounding, except for random numbers and for layers such as batch norm.

    Args:
        model: any module that maps x (n, *shape) to outputs (n, K) or (n, K, ...); K = 1 is a logit of 1 against 0.
        data: a `data.Split`; a pair (x, y) of tensors or arrays; or a map-style torch Dataset of items (x, y).
        options: how to train, see `lipkit.training.TrainOptions`; None for its defaults.
        run_dir: folder for settings, metrics and the last two checkpoints; must not hold a run yet, unless ``resume``.
        resume: continue the run in ``run_dir`` from its last whole checkpoint.
        fabric: a launched `lightning_fabric.Fabric` to use instead of the options accelerator, devices, nodes,
            strategy and precision.
        changes: options by name, in place of those of ``options``: ``fit(model, data, epochs=10, lr=0.01)``.

    Raises:
        DataError: ``data`` is none of the above, or does not fit the model or the loss.
        RunError: the run folder is taken, missing, or was started with other settings; or the loss or a weight became
            NaN or infinite (the last checkpoint is from before that).

    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> run = fit(nn.Linear(1, 1), (x, 3 * x), loss="mse", epochs=40, batch_size=8, lr=0.2, accelerator="cpu")
    >>> run.epochs_done, abs(run.model.weight.item() - 3) < 0.1
    (40, True)
    """
    for given, kind in ((model, nn.Module), (options, TrainOptions | None)):
        if not isinstance(given, kind):
            raise OptionError(f"expected fit(module, (x, y), epochs=10), options by name, got {type(given).__name__}")
    if options is None or changes:
        options = TrainOptions(**changes) if options is None else options.changed(**changes)
    for name, wanted in (("resume", resume), ("tensorboard", options.tensorboard)):
        if wanted and run_dir is None:
            raise OptionError(f"expected run_dir with {name}=True, got None")
    found = source(data)
    session = Session(fabric or make_fabric(options), model, options, found)
    if changes.get("batch_size", 0) > (count := len(found)):
        warnings.warn(f"batch_size: {options.batch_size} for {count} samples is one step an epoch", stacklevel=2)
    with session.opened(None if run_dir is None else Path(run_dir), resume):
        return train(session)


def train(session: Session) -> Run:
    """Train an opened session to the end, or until the clock stops it at a checkpoint."""
    fabric, options, clock, optimizer = session.fabric, session.options, session.clock, session.optimizer
    take = CapturedStep(take_step, session) if options.cuda_graph else take_step
    rank, ranks = fabric.global_rank, fabric.world_size
    due: Request = ""
    with own_random_state(fabric.device, options.seed, 0, sources.NETWORK, rank):
        while session.fraction() < 1:
            state, session.resumed = session.resumed, {}  # of the checkpoint; later epochs of this call start anew
            augment = generator(options.seed, session.epoch, sources.AUGMENT, rank)
            attack = generator(options.seed, session.epoch, sources.ATTACK, rank)
            session.generators = {"augment": augment, "attack": attack}
            random = state.get("random")
            if random is not None and len(random["rng_cpu"]) == ranks:  # of as many processes
                set_random_state(fabric, random, session.generators if session.step else {})
            totals = Totals(fabric, session.epoch, session.steps, options.progress, **state.get("totals", {}))
            session.totals = totals
            session.model.train()
            clock.since = clock.now()
            place = {"seed": options.seed, "epoch": session.epoch, "rank": rank, "ranks": ranks}
            indices = batches(len(session.data), options.batch_size, **place)
            for index, size, own in islice(indices, session.step, None):
                factor = session.rate(session.fraction(size))
                for group, peak in zip(optimizer.param_groups, session.peaks, strict=True):
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].fill_(peak * factor)  # in place: recorded steps read this tensor
                    else:
                        group["lr"] = peak * factor
                x, y = session.batch(index, augment)
                sums = take(session, x, y, size=size, counted=own, attack=attack)
                clock.spend(size)
                session.step, session.number = session.step + 1, session.number + 1
                fraction = session.fraction()
                last = session.step == session.steps or fraction >= 1
                session.finish_step(session.model, last)
                if session.average is not None and options.ema is not None:
                    update([*session.average.values()], [*session.parameters.values()], options.ema, session.number)
                read = totals.add(session.step, sums, size, labelled=not y.is_floating_point(), fraction=fraction)
                if last:
                    break
                due = clock.due() if read else ""  # equal in all processes, which read at the same steps
                if due:
                    session.save()
                if due == "stop":
                    break
            if due == "stop":
                break
            session.epoch, session.step = session.epoch + 1, 0
            complete = session.fraction() >= 1
            row = _row(session, complete or session.epoch % options.evaluate_every == 0)
            session.history.append(row)
            if session.folder is not None and fabric.is_global_zero:
                checkpoints.append_metrics(session.folder, row)
                if session.events is not None:
                    numbers = {k: v for k, v in row.items() if k != "epoch" and math.isfinite(v)}
                    session.events.log_metrics(numbers, session.epoch)
            due = clock.due()
            if complete or session.epoch % options.checkpoint_every == 0 or due:
                session.save(final=complete)
            totals.report(session.steps, row)
            if due == "stop":
                break
        average = None if session.average is None else session.measured()
    session.model.eval()
    return Run(session.model, session.history, session.folder, session.epoch, average, session.fraction() >= 1)


def _row(session: Session, evaluated: bool) -> dict[str, Any]:
    """The line of metrics of the epoch that has ended."""
    fabric, options, totals = session.fabric, session.options, session.totals
    pace = totals.pace()  # without evaluation
    session.check_finite(f"at the end of epoch {session.epoch}")  # after a finite loss the last step may still make NaN
    rate = float(session.optimizer.param_groups[0]["lr"])
    row: dict[str, Any] = {"epoch": session.epoch, **totals.row(), "lr": rate}
    if options.penalty is not None:
        row["penalty"] = float(options.penalty(session.model).detach())
    if evaluated and options.evaluate is not None:
        # As it will be used; in training mode, batch norm would learn from the test data.
        measured, evaluate, own = session.measured().eval(), options.evaluate, {*row, *_COSTS}

        def values() -> dict[str, float]:
            with torch.no_grad(), own_random_state(fabric.device):  # evaluation must not change the training
                found = evaluate(measured)
                if not isinstance(found, Mapping):
                    raise OptionError(f"evaluate: expected numbers by name, a dict, got {type(found).__name__}")
                if taken := [name for name in found if not isinstance(name, str) or name in own]:
                    kept, name = ", ".join(sorted(own)), taken[0]
                    raise OptionError(f"evaluate: expected names beside {kept}, got {name!r}: call it 'test_{name}'")
                got = f"evaluate: expected numbers, got {printable(repr(dict(found)), 80)}: "
                with rewording(OptionError, got, TypeError, ValueError, RuntimeError):
                    return {name: float(value) for name, value in found.items()}

        row |= on_first(fabric, values)
    row["seconds"] = round(totals.state()["seconds"], 3)
    row["samples_per_second"] = round(pace, 1)
    memory = peak_memory(fabric.device)
    return row if memory is None else row | {"memory_mib": round(memory)}
