"""The training loop: ordinary modules, ordinary optimisers, on Lightning Fabric."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import OptionError, RunError
from lipkit.training import losses, run_folder, schedules
from lipkit.training.adversarial import Adversary, attacked_batch
from lipkit.training.progress import Progress, Totals
from lipkit.training.randomness import (
    attack_generator,
    augment_generator,
    derived_seed,
    kept_random_state,
    own_random_state,
    random_state,
    set_random_state,
)
from lipkit.training.sources import Augment, Source, batches, source

Evaluate = Callable[[nn.Module], Mapping[str, float]]
PostStep = Callable[[nn.Module, int, bool], None]
Penalty = Callable[[nn.Module], Tensor]
OPTIMIZERS = ("adam", "adamw", "sgd")


@dataclass(frozen=True)
class Run:
    """What training left.

    Attributes:
        model: the model given, trained, in eval mode, on the training device.
        history: one dict per epoch: epoch, loss, accuracy, lr, seconds, and what ``evaluate`` returned.
        folder: the run's folder, or None.
        epochs_done: number of epochs trained, those before a resume included.
    """

    model: nn.Module
    history: list[dict[str, Any]] = field(default_factory=list)
    folder: Path | None = None
    epochs_done: int = 0


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
    accelerator: str = "auto",
    devices: int | str | list[int] = 1,
    strategy: str = "auto",
    precision: str = "32-true",
    fabric: Any = None,
) -> Run:
    r"""Train ``model`` in place.

    Step s of S changes the parameters at the rate ``lr * schedule(s / S)``, s = 1..S. Shuffling and
    augmentation of an epoch are drawn from generators seeded by (seed, epoch); torch's global random state
    is seeded at the start, saved with each checkpoint and given back as it was found. So on one device, the
    same call gives the same weights, bit for bit, whether or not it was interrupted and resumed. Randomness
    from elsewhere (numpy in a Dataset) is the caller's.

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
        seed: not negative.
        augment: a function of (x, generator), applied to each batch on the training device; the
            generator lives on the CPU.
        evaluate: called with the model, under no_grad and without effect on torch's random state, after
            every ``evaluate_every``-th epoch and the last; the numbers it returns join the metrics.
        evaluate_every: see there.
        post_step: called as ``post_step(model, step, epoch_end)`` under no_grad after each optimiser step,
            the steps counted from 1; for projections.
        penalty: called with the model in training mode at each step; the number is added to the loss (see
            `LipschitzPenalty`). Its value at the end of each epoch joins the metrics.
        adversary: called as ``adversary(model, x, y, generator)`` with the model in evaluation mode, after
            the augmentation; the step trains on what it returns (see `PgdAdversary`).
        progress: called with a `Progress` every few steps and at the end of each epoch.
        run_dir: folder for settings, metrics and checkpoints; must not hold a run yet, unless ``resume``.
        resume: continue the run in ``run_dir`` from its last whole checkpoint.
        accelerator: "auto", "cpu", "cuda", "mps", ...; this and the next three are Lightning Fabric's.
        devices: how many, or which.
        strategy: "auto", "ddp", ...
        precision: "32-true", "bf16-mixed", "64-true", ...
        fabric: a launched `lightning_fabric.Fabric` to use instead of the last four.

    Returns:
        The `Run`; its model is ``model`` itself, without any wrapper.

    Raises:
        OptionError: an argument is outside its documented values.
        DataError: ``train`` is not what it should be.
        RunError: the run folder is taken, missing, or was started with other settings; or the loss became
            NaN or infinite: the last checkpoint is then the one before.

    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> run = fit(nn.Linear(1, 1), (x, 3 * x), loss="mse", epochs=40, batch_size=8, lr=0.2, accelerator="cpu")
    >>> run.epochs_done, abs(run.model.weight.item() - 3) < 0.1
    (40, True)
    """
    loss_name = loss if isinstance(loss, str) else _name_of(loss)
    schedule_name = schedule if isinstance(schedule, str) else _name_of(schedule)
    loss_function = losses.build(loss) if isinstance(loss, str) else loss
    rate = schedules.build(schedule) if isinstance(schedule, str) else schedule
    _check(epochs, batch_size, lr, momentum, weight_decay, grad_clip, seed, evaluate_every, run_dir, resume)
    data = source(train)
    make_optimizer = _optimizer_factory(optimizer, lr=lr, momentum=momentum, weight_decay=weight_decay)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise OptionError(f"expected a model with parameters to train, got {type(model).__name__} without any")
    settings = {
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "loss": loss_name, "optimizer": optimizer,
        "momentum": momentum, "weight_decay": weight_decay, "schedule": schedule_name, "grad_clip": grad_clip,
        "seed": seed, "augment": None if augment is None else _name_of(augment), "samples": len(data),
        "precision": precision, "penalty": None if penalty is None else _name_of(penalty),
        "adversary": None if adversary is None else _name_of(adversary),
    }  # fmt: skip

    fabric = fabric or make_fabric(accelerator=accelerator, devices=devices, strategy=strategy, precision=precision)
    rank, ranks = fabric.global_rank, fabric.world_size
    if batch_size < ranks:
        raise OptionError(f"expected batch_size >= the number of devices {ranks}, got {batch_size}")
    folder = None if run_dir is None else Path(run_dir)
    done, state, history = _start(fabric, model, folder, resume, settings)

    with own_random_state(fabric.device, derived_seed(seed, 0, 2, rank)):
        wrapped, stepper = fabric.setup(model, make_optimizer(parameters))
        if state is not None:
            stepper.load_state_dict(state["optimizer"])
            set_random_state(fabric.device, state)
        steps = math.ceil(len(data) / batch_size)
        for epoch in range(done, epochs):
            start = time.perf_counter()
            model.train()
            totals = Totals(fabric, epoch, epochs, steps, progress)
            generator, attack = augment_generator(seed, epoch, rank), attack_generator(seed, epoch, rank)
            indices = batches(len(data), batch_size, seed=seed, epoch=epoch, rank=rank, ranks=ranks)
            for step, index in enumerate(indices, 1):
                _set_rate(stepper, lr * rate((epoch * steps + step) / (epochs * steps)))
                x, y = (t.to(fabric.device, non_blocking=True) for t in _batch(data, index))
                if augment is not None:
                    x = augment(x, generator)
                if adversary is not None:
                    x = attacked_batch(fabric, adversary, model, x, y, attack)
                outputs = wrapped(x)
                value = loss_function(outputs, y)
                if penalty is not None:
                    value = value + penalty(model).to(value)
                fabric.backward(value)
                if grad_clip is not None:
                    fabric.clip_gradients(wrapped, stepper, max_norm=grad_clip, error_if_nonfinite=False)
                stepper.step()
                stepper.zero_grad(set_to_none=True)
                if post_step is not None:
                    with torch.no_grad():
                        post_step(model, epoch * steps + step, step == steps)
                totals.add(step, value.detach(), outputs.detach(), y)
            _check_weights(model, epoch)
            row = {"epoch": epoch + 1, **totals.row(), "lr": stepper.param_groups[0]["lr"]}
            if penalty is not None:
                row["penalty"] = float(penalty(model).detach())
            if evaluate is not None and ((epoch + 1) % evaluate_every == 0 or epoch + 1 == epochs):
                row |= _evaluate(fabric, evaluate, model)
            row["seconds"] = round(time.perf_counter() - start, 3)
            history.append(row)
            if folder is not None and fabric.is_global_zero:
                run_folder.append_metrics(folder, row)
                state = {"optimizer": stepper.state_dict(), **random_state(fabric.device)}
                run_folder.save_checkpoint(folder, epoch + 1, model, state)
            fabric.barrier()
            totals.report(steps, row)
    model.eval()
    return Run(model, history, folder, max(done, epochs))


def _start(
    fabric: Any, model: nn.Module, folder: Path | None, resume: bool, settings: Mapping[str, Any]
) -> tuple[int, dict[str, Any] | None, list[dict[str, Any]]]:
    """Open the run's folder: (epochs done, the checkpoint's state, history), the weights loaded into ``model``."""
    done, state, history = 0, None, []
    if folder is not None and resume:
        run_folder.check_settings(folder, settings)
        checkpoint = run_folder.load_checkpoint(folder)
        if checkpoint is not None:
            done, weights, state = checkpoint
            run_folder.load_weights(model, weights, origin=folder)
        fabric.barrier()  # all have read before the first one writes
        if fabric.is_global_zero:
            history = run_folder.truncate_metrics(folder, done)
    elif folder is not None and fabric.is_global_zero:
        run_folder.write_settings(folder, settings)
    return done, state, history


def make_fabric(*, accelerator: str, devices: int | str | list[int], strategy: str, precision: str) -> Any:
    """A launched Fabric; what it refuses becomes an OptionError."""
    from lightning_fabric import Fabric  # two seconds to import: paid by those who train

    chosen: dict[str, Any] = {
        "accelerator": accelerator, "devices": devices, "strategy": strategy, "precision": precision,
    }  # fmt: skip
    try:
        fabric = Fabric(**chosen)
    except (ValueError, TypeError, RuntimeError) as error:
        got = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
        raise OptionError(f"expected devices that Lightning Fabric can use, got {got}: {error}") from error
    fabric.launch()
    return fabric


def _batch(data: Source, index: Tensor) -> tuple[Tensor, Tensor]:
    if hasattr(data, "x") and isinstance(data.x, Tensor):  # a Split may live on the device already
        index = index.to(data.x.device)
    return data.batch(index)


def _optimizer_factory(
    name: str, *, lr: float, momentum: float, weight_decay: float
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    if name == "adam":
        return functools.partial(torch.optim.Adam, lr=lr, weight_decay=weight_decay)
    if name == "adamw":
        return functools.partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay)
    if name == "sgd":
        return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay)
    raise OptionError(f"expected optimizer as one of {', '.join(OPTIMIZERS)}, got {name!r}")


def _set_rate(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _evaluate(fabric: Any, evaluate: Evaluate, model: nn.Module) -> dict[str, float]:
    values: dict[str, float] = {}
    if fabric.is_global_zero:
        with torch.no_grad(), kept_random_state(fabric.device):  # what is measured must not change what is trained
            values = {name: float(value) for name, value in evaluate(model).items()}
    return fabric.broadcast(values, src=0) if fabric.world_size > 1 else values


def _check_weights(model: nn.Module, epoch: int) -> None:
    """The last step of an epoch may spoil the weights after a loss that was still finite."""
    for name, value in model.named_parameters():
        if not bool(torch.isfinite(value.detach()).all()):
            raise RunError(
                f"expected finite weights, got NaN or infinity in {name} at the end of epoch {epoch + 1}: "
                "training stopped, the last checkpoint is of the epoch before; a smaller lr may help"
            )


def _check(
    epochs: int, batch_size: int, lr: float, momentum: float, weight_decay: float, grad_clip: float | None,
    seed: int, evaluate_every: int, run_dir: str | Path | None, resume: bool,
) -> None:  # fmt: skip
    for name, count, least in (
        ("epochs", epochs, 1), ("batch_size", batch_size, 1), ("seed", seed, 0),
        ("evaluate_every", evaluate_every, 1),
    ):  # fmt: skip
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise OptionError(f"expected {name} as an integer >= {least}, got {count!r}")
    if not (math.isfinite(lr) and lr > 0):
        raise OptionError(f"expected lr as a finite number > 0, got {lr}")
    if not 0 <= momentum < 1:
        raise OptionError(f"expected momentum in [0, 1), got {momentum}")
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise OptionError(f"expected weight_decay as a finite number >= 0, got {weight_decay}")
    if grad_clip is not None and not grad_clip > 0:
        raise OptionError(f"expected grad_clip > 0 or None, got {grad_clip}")
    if resume and run_dir is None:
        raise OptionError("expected run_dir with resume=True, got None")


def _name_of(function: object) -> str:
    """How settings record a function: its name and, for a partial or a dataclass, the options bound to it."""
    if is_dataclass(function):
        return repr(function)
    if isinstance(function, functools.partial):
        bound = [repr(value) for value in function.args] + [f"{k}={v!r}" for k, v in function.keywords.items()]
        return f"{_name_of(function.func)}({', '.join(bound)})"
    return str(getattr(function, "__qualname__", type(function).__qualname__))
