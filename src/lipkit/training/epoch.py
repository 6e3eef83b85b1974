"""One pass over the data: batches, steps, the average, and checkpoints on the way.

A step cuts its batch in pieces, adds their gradients, and changes the parameters once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lipkit.errors import DataError, LipkitError, lacks_memory
from lipkit.layers import after_step
from lipkit.modules import Shape
from lipkit.training import saving
from lipkit.training.adversarial import Adversary, attacked_batch
from lipkit.training.clocks import Budget, Clock
from lipkit.training.options import Penalty, TrainOptions
from lipkit.training.progress import Totals
from lipkit.training.schedules import Schedule
from lipkit.training.session import Session, update
from lipkit.training.sources import Source, attack_generator, augment_generator, batches, mistake, own_part

Ended = Literal["", "stop", "end"]


@dataclass(frozen=True)
class Objective:
    """The objective of a step.

    Attributes:
        loss: mean over a batch, of (outputs, targets); ``penalty``, of the network, is added to it.
        adversary: makes the examples that are trained on.
        grad_clip: largest l2 norm of the gradient.
        pieces: how many parts of a process' part of the batch go through the network one after the other.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    penalty: Penalty | None = None
    adversary: Adversary | None = None
    grad_clip: float | None = None
    pieces: int = 1


def take_step(
    session: Session, objective: Objective, x: Tensor, y: Tensor, *, size: int, counted: int, attack: torch.Generator
) -> Tensor:
    r"""Change the parameters once, by the gradient of the mean loss of the whole batch.

    .. math:: \frac{1}{n} \sum_i \ell(x_i, y_i) = \frac{1}{R} \sum_r \sum_p \frac{R \, n_{rp}}{n} \,
              \text{mean}_{i \in (r, p)} \ell(x_i, y_i)

    over the pieces p of the R processes r, whose gradients are averaged over r. So the step is that of one process with
    the batch in one piece, up to rounding, also where the processes do not divide the batch.

    Args:
        x, y: this process' part of the batch, on its device.
        size: n, samples of the batch over all processes.
        counted: number of samples of x in the batch: all, or 0 if this process only keeps step with the others.
        attack: randomness of the adversary.

    Returns:
        (2,) float32: sum of the losses and number of correct answers of this process, still on the device.
    """
    fabric, model = session.fabric, session.model
    pieces = min(objective.pieces, max(1, size // fabric.world_size))  # the same number in every process
    parts = [(x, y)] if pieces == 1 else zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)
    sums = []
    for number, (part, targets) in enumerate(parts, 1):
        last, rows = number == pieces, len(part)
        own = rows if counted else 0
        if objective.adversary is not None:
            part, targets = attacked_batch(fabric, objective.adversary, model, part, targets, attack)
        with fabric.no_backward_sync(session.wrapped, enabled=not last):
            outputs = None
            try:
                outputs = session.wrapped(part)
                value = objective.loss(outputs, targets)
            except (RuntimeError, IndexError, ValueError) as error:
                clear = lacks_memory(error) or (isinstance(error, LipkitError) and outputs is not None)
                if clear or not (found := mistake(part, outputs, targets, objective.loss)):
                    raise
                raise DataError(found) from error
            if len(targets) > rows:  # adversarial examples follow the samples
                outputs, targets = outputs[-rows:], targets[-rows:]
            sums.append(_sums(value, outputs, targets, own))
            weight = own * fabric.world_size / size
            if weight != 1:
                value = value * weight
            if last and objective.penalty is not None:
                extra = objective.penalty(model).to(value)
                sums[-1] = sums[-1] + _sums(extra, None, None, counted)
                value = value + extra
            fabric.backward(value)
    if objective.grad_clip is not None:
        fabric.clip_gradients(
            session.wrapped, session.optimizer, max_norm=objective.grad_clip, error_if_nonfinite=False
        )
    session.optimizer.step()
    for p in session.parameters:
        p.grad = None
    return sums[0] if pieces == 1 else torch.stack(sums).sum(0)


@torch.no_grad()
def _sums(loss: Tensor, outputs: Tensor | None, y: Tensor | None, count: int) -> Tensor:
    """(loss summed over ``count`` samples, number of correct answers among them)."""
    total = loss.float() * count
    if outputs is None or y is None or y.is_floating_point():
        return torch.stack([total, torch.zeros_like(total)])
    right = (outputs.argmax(dim=1) == y).sum()
    return torch.stack([total, right if count else torch.zeros_like(total)])


def set_rate(optimizer: Any, peaks: Sequence[float], factor: float) -> None:
    """Set the learning rate of every group of parameters to ``factor`` times its peak."""
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        if isinstance(group["lr"], Tensor):  # where a recorded step reads it
            group["lr"].fill_(peak * factor)
        else:
            group["lr"] = peak * factor


@dataclass(frozen=True)
class Plan:
    """The settings that all epochs share.

    Attributes:
        data: the training set.
        rate: the factor of the learning rate, from the fraction of training done.
        folder: of the run; None writes nothing.
        clock: ends training, or asks for a checkpoint.
        input_shape: of one input as the model gets it, if a layer needs it after a step; else None.
        step: changes the parameters once.
    """

    options: TrainOptions
    data: Source
    rate: Schedule
    objective: Objective
    folder: Path | None
    clock: Clock
    budget: Budget | None
    input_shape: Shape | None
    step: Callable[..., Tensor] = take_step

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(len(self.data) / self.options.batch_size)

    @property
    def used(self) -> float:
        """Seconds or samples of the budget used so far; 0 without one."""
        return 0.0 if self.budget is None else self.budget.used

    def fraction(self, fabric: Any, number: int) -> float:
        """Fraction of training done after step ``number`` (from 1): by steps or by budget, whichever is larger.

        All processes get the fraction of the first one: they must end together.
        """
        epochs = self.options.epochs
        by_steps = 0.0 if epochs is None else number / (epochs * self.steps)
        if self.budget is None:
            return by_steps
        used = self.budget.fraction
        return max(by_steps, fabric.broadcast(used, src=0) if fabric.world_size > 1 else used)


def run_epoch(network: Session, plan: Plan, epoch: int, state: Mapping[str, Any]) -> tuple[Totals, Ended]:
    """Train for one epoch (counted from 0), or for what is left of it, or until time is up.

    ``state`` is that of the checkpoint to continue from, in this epoch or at its start; empty for none.

    Returns:
        (sums of the epoch, how it ended: "" at its last step, "stop" by the clock at a checkpoint, "end" because the
        budget is used up).

    Raises:
        Divergence: a loss, or at a checkpoint a weight, is NaN or infinite.
    """
    fabric, options, steps, done = network.fabric, plan.options, plan.steps, int(state.get("step", 0))
    rank, ranks = fabric.global_rank, fabric.world_size
    augment, attack = augment_generator(options.seed, epoch, rank), attack_generator(options.seed, epoch, rank)
    generators = {"augment": augment, "attack": attack}
    saving.restore_random(network, state, generators)
    network.model.train()
    totals = Totals(fabric, epoch, steps, progress=options.progress, before=state.get("totals"))
    indices = batches(len(plan.data), options.batch_size, seed=options.seed, epoch=epoch, rank=rank, ranks=ranks)
    if plan.budget is not None:
        plan.budget.start()
    fraction = plan.fraction(fabric, epoch * steps + done)
    for step, index in enumerate(islice(indices, done, None), done + 1):
        number = epoch * steps + step
        size = min(options.batch_size, len(plan.data) - (step - 1) * options.batch_size)
        if plan.budget is not None:
            plan.budget.begin_step(size)
        # Time is known up to this step only; steps and samples to its end.
        timed = plan.budget is not None and plan.budget.unit != "samples"
        set_rate(network.optimizer, network.rates, plan.rate(fraction if timed else plan.fraction(fabric, number)))
        x, y = _batch(plan, index, fabric.device, augment)
        counted = own_part(size, rank=rank, ranks=ranks)
        sums = plan.step(network, plan.objective, x, y, size=size, counted=counted, attack=attack)
        if plan.budget is not None:
            plan.budget.charge()
        fraction = plan.fraction(fabric, number)
        last = step == steps or fraction >= 1
        if plan.input_shape is not None:
            after_step(network.model, plan.input_shape, None if last else number)
        if options.post_step is not None:
            with torch.no_grad():
                options.post_step(network.model, number, last)
        if network.average is not None and options.ema is not None:
            update(network.average, network.parameters, options.ema, number)
        read = totals.add(step, sums, size, labelled=not y.is_floating_point(), fraction=fraction)
        if last:
            return totals, "end" if fraction >= 1 else ""
        request = plan.clock.request(fabric) if read else ""
        if request and (plan.folder is not None or request == "stop"):
            told = totals.state()
            saving.save(
                network, plan.folder, epoch=epoch, step=step, used=plan.used, totals=told, generators=generators
            )
            plan.clock.saved()
            if request == "stop":
                return totals, "stop"
            if plan.budget is not None:
                plan.budget.start()  # the checkpoint is free
    return totals, ""


def _batch(plan: Plan, index: Tensor, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    held = getattr(plan.data, "x", None)  # a Split may live on the device already
    x, y = plan.data.batch(index.to(held.device) if isinstance(held, Tensor) else index)
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    if plan.options.augment is not None:
        x = plan.options.augment(x, generator)
    last = plan.options.channels_last and x.ndim == 4
    return (x.contiguous(memory_format=torch.channels_last) if last else x), y
