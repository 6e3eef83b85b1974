"""The training loop: ordinary modules, ordinary optimisers, on Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipkit.errors import OptionError, RunError
from lipkit.layers import after_step
from lipkit.layers.steps import after_step_layers
from lipkit.modules import Shape
from lipkit.training import checkpoints as run_folder
from lipkit.training import losses, saving, schedules
from lipkit.training import progress as logs
from lipkit.training import trainee as trainees
from lipkit.training.adversarial import Adversary
from lipkit.training.devices import (
    check_counts,
    check_folder,
    check_numbers,
    check_precision,
    make_fabric,
    name_of,
    on_first,
    optimizer_factory,
)
from lipkit.training.epoch import Plan, PostStep, run_epoch
from lipkit.training.progress import Clock, Divergence, Progress, Totals, peak_memory
from lipkit.training.randomness import derived_seed, kept_random_state, own_random_state
from lipkit.training.sources import Augment, Source, source
from lipkit.training.step import Objective, Penalty
from lipkit.training.trainee import Trainee

Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class Run:
    """What training left.

    Attributes:
        model: the model given, trained, in eval mode, on the training device.
        history: one dict per epoch: epoch, loss, accuracy, lr, seconds, samples_per_second, memory_mib (the
            most so far: of the CUDA device, else of the process), and what ``evaluate`` returned.
        folder: the run's folder, or None.
        epochs_done: number of whole epochs trained, those before a resume included.
        average: with ``ema``, a copy of the model with the averaged parameters; else None.
        finished: whether all epochs are done; False if ``max_minutes`` ended training before.
    """

    model: nn.Module
    history: list[dict[str, Any]] = field(default_factory=list)
    folder: Path | None = None
    epochs_done: int = 0
    average: nn.Module | None = None
    finished: bool = True

    @property
    def result(self) -> nn.Module:
        """What to export: the averaged model if there is one, else the model."""
        return self.model if self.average is None else self.average


def fit(
    model: nn.Module,
    train: object,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    loss: str | losses.Loss = "hinge",
    optimizer: str = "adam",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: str | schedules.Schedule = "piecewise_linear",
    grad_clip: float | None = None,
    accumulate: int = 1,
    ema: float | None = None,
    seed: int = 0,
    augment: Augment | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    post_step: PostStep | None = None,
    penalty: Penalty | None = None,
    adversary: Adversary | None = None,
    progress: Callable[[Progress], None] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    checkpoint_seconds: float | None = None,
    max_minutes: float | None = None,
    tensorboard: bool = False,
    compiled: bool = False,
    channels_last: bool = False,
    accelerator: str = "auto",
    devices: int | str | list[int] = 1,
    nodes: int = 1,
    strategy: str = "auto",
    precision: str = "32-true",
    fabric: Any = None,
) -> Run:
    r"""Train ``model`` in place.

    After each step the layers of ``model`` that need it do their work, such as SVCM's projection: see
    `lipkit.layers.after_step`.

    Step s of S changes the parameters at the rate ``lr * schedule(s / S)``, s = 1..S. Shuffling and
    augmentation of an epoch are drawn from generators seeded by (seed, epoch); torch's global random state
    is seeded at the start, saved with each checkpoint and given back as it was found. So on a CPU, the same
    call with as many processes gives the same weights, bit for bit, whether or not it was interrupted and
    resumed. Randomness from elsewhere (numpy in a Dataset) is the caller's. With another number of processes
    or of pieces (``accumulate``) the steps are the same up to rounding, but for random numbers and for layers
    that look at a whole batch, such as batch norm.

    Args:
        model: any module that maps a batch x (n, *shape) to outputs (n, K).
        train: a `data.Split`; a pair (x, y) of tensors or arrays; or a map-style torch Dataset of items (x,
            y).
        epochs: number of passes over the data.
        batch_size: samples of one step, all devices together.
        lr: peak learning rate.
        loss: a name of `losses.LOSSES`, or a function of (outputs, targets) that returns a mean.
        optimizer: "adam", "adamw" or "sgd".
        momentum: of "sgd"; the others ignore it.
        weight_decay: as the optimiser defines it.
        schedule: a name of `schedules.SCHEDULES`, or a function of the share of training done.
        grad_clip: largest l2 norm of the gradient; None for no limit.
        accumulate: pieces in which each device takes its share of a batch, to save memory: batch_size and
            the number of steps stay as they are.
        ema: decay of a moving average of the parameters, see `average.update`; the averaged model is what is
            evaluated, and ``Run.average``. None for none. ``post_step`` sees the copy too, as at an epoch's end.
        seed: not negative.
        augment: a function of (x, generator), applied to each batch on the training device; the
            generator lives on the CPU.
        evaluate: called with the model, under no_grad and without effect on torch's random state, after
            every ``evaluate_every``-th epoch and the last; the numbers it returns join the metrics.
        evaluate_every: see there.
        post_step: called as ``post_step(model, step, epoch_end)`` under no_grad after each optimiser step,
            the steps counted from 1 and the layers' own work (`lipkit.layers.after_step`) done.
        penalty: called with the model in training mode at each step; the number is added to the loss (see
            `LipschitzPenalty`). Its value at the end of each epoch joins the metrics.
        adversary: called as ``adversary(model, x, y, generator)`` with the model in evaluation mode, after
            the augmentation; the step trains on what it returns (see `PgdAdversary`).
        progress: called with a `Progress` every few steps and at the end of each epoch.
        run_dir: folder for settings, metrics and checkpoints; must not hold a run yet, unless ``resume``.
        resume: continue the run in ``run_dir`` from its last whole checkpoint.
        checkpoint_every: epochs between checkpoints; the last epoch always has one. The last two are kept;
            of a finished run the last one, without the optimiser's state.
        checkpoint_seconds: seconds between checkpoints within an epoch, besides those; None for none there.
        max_minutes: of this call, after which training ends at a checkpoint within `progress.READ_EVERY`
            steps, to be resumed later; None for no limit.
        tensorboard: write TensorBoard events to the run's folder too; needs the package tensorboard.
        compiled: whether ``torch.compile`` makes the forward pass of the steps.
        channels_last: whether images and 4-dimensional parameters are stored channels last.
        accelerator: "auto", "cpu", "cuda", "mps", ...; this and the next four are Lightning Fabric's.
        devices: how many, or which, on each machine.
        nodes: number of machines. torchrun sets both.
        strategy: "auto", "ddp", "fsdp" (see `sharding`), ...
        precision: "32-true", "64-true", "bf16-mixed", ...: parameters stay in float32 at least.
        fabric: a launched `lightning_fabric.Fabric` to use instead of the last five.

    Returns:
        The `Run`; its model is ``model`` itself, without any wrapper.

    Raises:
        OptionError: an argument is outside its documented values.
        DataError: ``train`` is not what it should be.
        RunError: the run folder is taken, missing, or was started with other settings; or the loss or a
            weight became NaN or infinite: the last checkpoint is then from before that.

    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> run = fit(nn.Linear(1, 1), (x, 3 * x), loss="mse", epochs=40, batch_size=8, lr=0.2, accelerator="cpu")
    >>> run.epochs_done, abs(run.model.weight.item() - 3) < 0.1
    (40, True)
    """
    loss_function = losses.build(loss) if isinstance(loss, str) else loss
    rate = schedules.build(schedule) if isinstance(schedule, str) else schedule
    check_counts(
        epochs=epochs, batch_size=batch_size, seed=seed, evaluate_every=evaluate_every, accumulate=accumulate,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip
    check_numbers(lr=lr, momentum=momentum, weight_decay=weight_decay, grad_clip=grad_clip, ema=ema)
    check_folder(run_dir, resume=resume, tensorboard=tensorboard)
    clock = Clock(max_minutes, checkpoint_seconds)
    if tensorboard:
        logs.require_tensorboard()
    data = source(train)
    make_optimizer = optimizer_factory(optimizer, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if not any(p.requires_grad for p in model.parameters()):
        raise OptionError(f"expected a model with parameters to train, got {type(model).__name__} without any")
    settings = {
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "loss": loss if isinstance(loss, str) else name_of(loss),
        "optimizer": optimizer, "momentum": momentum, "weight_decay": weight_decay,
        "schedule": schedule if isinstance(schedule, str) else name_of(schedule), "grad_clip": grad_clip,
        "seed": seed, "augment": name_of(augment), "samples": len(data), "precision": precision,
        "penalty": name_of(penalty), "adversary": name_of(adversary), "accumulate": accumulate, "ema": ema,
    }  # fmt: skip

    fabric = fabric or make_fabric(
        accelerator=accelerator, devices=devices, strategy=strategy, precision=precision, nodes=nodes
    )
    check_precision(fabric.strategy.precision.precision)
    rank, ranks = fabric.global_rank, fabric.world_size
    if batch_size < ranks:
        raise OptionError(f"expected batch_size >= the number of devices {ranks}, got {batch_size}")
    if trainees.is_sharded(fabric):
        from lipkit.training.sharding import check_whole

        acting = next(iter(after_step_layers(model).values()), None)
        check_whole((
            (f"layer that acts after a step ({type(acting).__name__})", acting), ("post_step", post_step),
            ("penalty", penalty), ("adversary", adversary),
        ))  # fmt: skip
    folder = None if run_dir is None else Path(run_dir)
    done, state, history = saving.open_run(fabric, model, folder, resume, settings)
    plan = Plan(
        data, epochs, batch_size, lr, rate, Objective(loss_function, penalty, adversary, grad_clip, accumulate), ema,
        seed, augment, post_step, progress, channels_last, folder, clock,
        _input_shape(data, augment, fabric.device) if after_step_layers(model) else None,
    )  # fmt: skip
    with own_random_state(fabric.device, derived_seed(seed, 0, 2, rank)):
        network = trainees.prepare(
            fabric, model, make_optimizer, compiled=compiled, channels_last=channels_last, averaged=ema is not None
        )
        saving.restore(network, state)
        stopped = False
        with logs.board(folder if fabric.is_global_zero else None, tensorboard, done) as board:
            try:
                for epoch in range(done, epochs):
                    totals, stopped = run_epoch(network, plan, epoch, state)
                    state = {}
                    if stopped:
                        break
                    done, last = epoch + 1, epoch + 1 == epochs
                    row = _row(network, plan, epoch, totals, evaluate if last or done % evaluate_every == 0 else None)
                    history.append(row)
                    if folder is not None and fabric.is_global_zero:
                        run_folder.append_metrics(folder, row)
                        logs.write_csv(folder, history)
                        board.add(row)
                    wish = clock.wish(fabric)
                    if last or done % checkpoint_every == 0 or wish:
                        saving.save(network, folder, epoch=done, final=last)
                        clock.saved()
                    totals.report(plan.steps, row)
                    stopped = wish == "stop" and not last
                    if stopped:
                        break
            except Divergence as error:
                raise RunError(f"{error}: training stopped, {_kept(folder)}; a smaller lr may help") from None
        average = None if ema is None else _measured(network, plan, done)
        trainees.whole(network)
    model.eval()
    return Run(model, history, folder, done, average, not stopped)


def _row(network: Trainee, plan: Plan, epoch: int, totals: Totals, evaluate: Evaluate | None) -> dict[str, Any]:
    """The epoch's line of metrics."""
    fabric, pace = network.fabric, totals.pace()
    spoilt = trainees.spoilt_parameter(network)  # the last step may spoil the weights after a loss that was finite
    if spoilt is not None:
        raise Divergence(f"expected finite weights, got NaN or infinity in {spoilt} at the end of epoch {epoch + 1}")
    row: dict[str, Any] = {"epoch": epoch + 1, **totals.row(), "lr": network.optimizer.param_groups[0]["lr"]}
    if plan.objective.penalty is not None:
        row["penalty"] = float(plan.objective.penalty(network.model).detach())
    if evaluate is not None:
        measured = _measured(network, plan, epoch + 1)

        def values() -> dict[str, float]:
            with torch.no_grad(), kept_random_state(fabric.device):  # measuring must not change what is trained
                return {name: float(value) for name, value in evaluate(measured).items()}

        row |= on_first(fabric, values)
    row["seconds"] = round(totals.seconds(), 3)
    row["samples_per_second"] = round(pace, 1)
    memory = peak_memory(fabric.device)
    return row if memory is None else row | {"memory_mib": round(memory)}


def _measured(network: Trainee, plan: Plan, epochs: int) -> nn.Module:
    """The network, or the copy with its averages, finished as the network was at the end of an epoch."""

    def finish(twin: nn.Module) -> None:
        if plan.input_shape is not None:
            after_step(twin, plan.input_shape)
        if plan.post_step is not None:
            plan.post_step(twin, epochs * plan.steps, True)

    return trainees.measured_model(network, finish)


def _input_shape(data: Source, augment: Augment | None, device: torch.device) -> Shape:
    """The shape of one input as the model gets it: the first sample's, augmented."""
    with kept_random_state(device):
        x = data.batch(torch.zeros(1, dtype=torch.int64))[0].to(device)
        return tuple((x if augment is None else augment(x, torch.Generator().manual_seed(0))).shape[1:])


def _kept(folder: Path | None) -> str:
    newest = None if folder is None else run_folder.newest_checkpoint(folder)
    return "no checkpoint was written" if newest is None else f"the last good checkpoint is kept in {newest}"
