"""One optimiser step: a batch cut in pieces, their gradients added, one change of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipkit.training.adversarial import Adversary, attacked_batch
from lipkit.training.options import Penalty
from lipkit.training.trainee import Trainee


@dataclass(frozen=True)
class Objective:
    """What a step lowers.

    Attributes:
        loss: mean over a batch, of (outputs, targets).
        penalty: of the network, added to the loss; None for none.
        adversary: makes the examples that are trained on; None for none.
        grad_clip: largest l2 norm of the gradient; None for no limit.
        pieces: how many parts of a process' share of the batch go through the network one after the other.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    penalty: Penalty | None = None
    adversary: Adversary | None = None
    grad_clip: float | None = None
    pieces: int = 1


def take_step(
    trainee: Trainee, objective: Objective, x: Tensor, y: Tensor, *, size: int, counted: int, attack: torch.Generator
) -> Tensor:
    r"""Change the parameters once, by the gradient of the mean loss of the whole batch.

    .. math:: \frac{1}{n} \sum_i \ell(x_i, y_i) = \frac{1}{R} \sum_r \sum_p \frac{R \, n_{rp}}{n} \,
        \text{mean}_{i \in (r, p)} \ell(x_i, y_i)

    over the pieces p of the R processes r, whose gradients are averaged over r. So the step is that of one process with
    the batch in one piece, up to rounding, also where the processes do not divide the batch.

    Args:
        trainee: the network.
        objective: what is lowered.
        x, y: this process' share of the batch, on its device.
        size: n, samples of the batch over all processes.
        counted: how many of x belong to the batch: all of them, or none if x is there only for company.
        attack: randomness of the adversary.

    Returns:
        (2,) float32: sum of the losses and number of correct answers of this process, still on the device.
    """
    fabric, model = trainee.fabric, trainee.stepped
    pieces = min(objective.pieces, max(1, size // fabric.world_size))  # as many in every process
    sums = []
    for number, (part, targets) in enumerate(zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True), 1):
        last = number == pieces
        if objective.adversary is not None:
            part = attacked_batch(fabric, objective.adversary, model, part, targets, attack)
        with fabric.no_backward_sync(trainee.wrapped, enabled=not last):
            outputs = trainee.wrapped(part)
            value = objective.loss(outputs, targets)
            own = len(part) if counted else 0
            sums.append(_sums(value.detach(), outputs.detach(), targets, own))
            weight = own * fabric.world_size / size
            if weight != 1:
                value = value * weight
            if last and objective.penalty is not None:
                extra = objective.penalty(model).to(value)
                sums[-1] = sums[-1] + _sums(extra.detach(), None, None, counted)
                value = value + extra
            fabric.backward(value)
    _finish(trainee, objective)
    return sums[0] if pieces == 1 else torch.stack(sums).sum(0)


def _finish(trainee: Trainee, objective: Objective) -> None:
    fabric, optimizer = trainee.fabric, trainee.optimizer
    if trainee.sharded:
        from lipkit.training import sharding

        sharding.sync_scalars(fabric, trainee.stepped)
        if objective.grad_clip is not None:
            sharding.clip_gradients(trainee.stepped, objective.grad_clip)
    elif objective.grad_clip is not None:
        fabric.clip_gradients(trainee.wrapped, optimizer, max_norm=objective.grad_clip, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _sums(loss: Tensor, outputs: Tensor | None, y: Tensor | None, count: int) -> Tensor:
    """(loss summed over ``count`` samples, number of correct answers among them)."""
    total = loss.float() * count
    if outputs is None or y is None or y.is_floating_point():
        return torch.stack([total, torch.zeros_like(total)])
    return torch.stack([total, (outputs.argmax(dim=1) == y).sum().float() * (count > 0)])


def set_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr
