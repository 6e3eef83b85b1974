"""One pass over the data: batches, steps, the average, and checkpoints on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipkit.layers import after_step
from lipkit.modules import Shape
from lipkit.training import saving
from lipkit.training.options import TrainOptions
from lipkit.training.progress import Clock, Totals
from lipkit.training.randomness import attack_generator, augment_generator
from lipkit.training.schedules import Schedule
from lipkit.training.sources import Source, batches, share
from lipkit.training.step import Objective, set_rate, take_step
from lipkit.training.trainee import Trainee, update


@dataclass(frozen=True)
class Plan:
    """What is the same in all epochs.

    Attributes:
        options: of training.
        data: the training set.
        rate: the factor of the learning rate, from the fraction of training done.
        objective: what a step lowers.
        folder: of the run; None writes nothing.
        clock: ends training, or asks for a checkpoint.
        input_shape: of one input as the model gets it, if a layer needs it after a step; else None.
    """

    options: TrainOptions
    data: Source
    rate: Schedule
    objective: Objective
    folder: Path | None
    clock: Clock
    input_shape: Shape | None

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(len(self.data) / self.options.batch_size)


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
    fabric, options, steps, done = network.fabric, plan.options, plan.steps, int(state.get("step", 0))
    rank, ranks = fabric.global_rank, fabric.world_size
    augment, attack = augment_generator(options.seed, epoch, rank), attack_generator(options.seed, epoch, rank)
    generators = {"augment": augment, "attack": attack}
    saving.restore_random(network, state, generators)
    network.stepped.train()
    totals = Totals(fabric, epoch, options.epochs, steps, progress=options.progress, before=state.get("totals"))
    indices = batches(len(plan.data), options.batch_size, seed=options.seed, epoch=epoch, rank=rank, ranks=ranks)
    for step, index in enumerate(islice(indices, done, None), done + 1):
        number = epoch * steps + step
        set_rate(network.optimizer, options.lr * plan.rate(number / (options.epochs * steps)))
        x, y = _batch(plan, index, fabric.device, augment)
        size = min(options.batch_size, len(plan.data) - (step - 1) * options.batch_size)
        counted = share(size, rank=rank, ranks=ranks)
        sums = take_step(network, plan.objective, x, y, size=size, counted=counted, attack=attack)
        if plan.input_shape is not None:
            after_step(network.stepped, plan.input_shape, number if step < steps else None)
        if options.post_step is not None:
            with torch.no_grad():
                options.post_step(network.stepped, number, step == steps)
        if network.average is not None and options.ema is not None:
            update(network.average, network.parameters, options.ema, number)
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
    if plan.options.augment is not None:
        x = plan.options.augment(x, generator)
    last = plan.options.channels_last and x.ndim == 4
    return (x.contiguous(memory_format=torch.channels_last) if last else x), y
