"""One pass over the data: batches, steps, the average, and checkpoints on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.layers import after_step
from lipkit.modules import Shape
from lipkit.training import saving
from lipkit.training.progress import Clock, Progress, Totals
from lipkit.training.randomness import attack_generator, augment_generator
from lipkit.training.schedules import Schedule
from lipkit.training.sources import Augment, Source, batches, share
from lipkit.training.step import Objective, set_rate, take_step
from lipkit.training.trainee import Trainee, update

PostStep = Callable[[nn.Module, int, bool], None]


@dataclass(frozen=True)
class Plan:
    """What is the same in all epochs: the arguments of ``fit``, see there.

    Attributes:
        input_shape: of one input as the model gets it, if a layer needs it after a step; else None.
    """

    data: Source
    epochs: int
    batch_size: int
    lr: float
    rate: Schedule
    objective: Objective
    ema: float | None
    seed: int
    augment: Augment | None
    post_step: PostStep | None
    progress: Callable[[Progress], None] | None
    channels_last: bool
    folder: Path | None
    clock: Clock
    input_shape: Shape | None

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(len(self.data) / self.batch_size)


def run_epoch(network: Trainee, plan: Plan, epoch: int, state: Mapping[str, Any]) -> tuple[Totals, bool]:
    """Train for one epoch, or for what is left of it, or until time is up.

    Args:
        network: changed in place.
        plan: of all epochs.
        epoch: counted from 0.
        state: of the checkpoint to continue from, in this epoch or at its start; empty for none.

    Returns:
        (sums of the epoch, whether it was ended by the clock, at a checkpoint).

    Raises:
        Divergence: a loss, or at a checkpoint a weight, is NaN or infinite.
    """
    fabric, steps, done = network.fabric, plan.steps, int(state.get("step", 0))
    rank, ranks = fabric.global_rank, fabric.world_size
    augment, attack = augment_generator(plan.seed, epoch, rank), attack_generator(plan.seed, epoch, rank)
    generators = {"augment": augment, "attack": attack}
    saving.restore_random(network, state, generators)
    network.stepped.train()
    totals = Totals(fabric, epoch, plan.epochs, steps, progress=plan.progress, before=state.get("totals"))
    indices = batches(len(plan.data), plan.batch_size, seed=plan.seed, epoch=epoch, rank=rank, ranks=ranks)
    for step, index in enumerate(islice(indices, done, None), done + 1):
        number = epoch * steps + step
        set_rate(network.optimizer, plan.lr * plan.rate(number / (plan.epochs * steps)))
        x, y = _batch(plan, index, fabric.device, augment)
        size = min(plan.batch_size, len(plan.data) - (step - 1) * plan.batch_size)
        counted = share(size, rank=rank, ranks=ranks)
        sums = take_step(network, plan.objective, x, y, size=size, counted=counted, attack=attack)
        if plan.input_shape is not None:
            after_step(network.stepped, plan.input_shape, number if step < steps else None)
        if plan.post_step is not None:
            with torch.no_grad():
                plan.post_step(network.stepped, number, step == steps)
        if network.average is not None and plan.ema is not None:
            update(network.average, network.parameters, plan.ema, number)
        if totals.add(step, sums, size, labelled=not y.is_floating_point()) and step < steps:
            wish = plan.clock.wish(fabric)
            if wish and (plan.folder is not None or wish == "stop"):
                saving.save(network, plan.folder, epoch=epoch, step=step, totals=totals.state(), generators=generators)
                plan.clock.saved()
                if wish == "stop":
                    return totals, True
    return totals, False


def _batch(plan: Plan, index: Tensor, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    held = getattr(plan.data, "x", None)  # a Split may live on the device already
    x, y = plan.data.batch(index.to(held.device) if isinstance(held, Tensor) else index)
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    if plan.augment is not None:
        x = plan.augment(x, generator)
    return (x.contiguous(memory_format=torch.channels_last) if plan.channels_last and x.ndim == 4 else x), y
