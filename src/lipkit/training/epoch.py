"""One epoch: batches, steps, the average, and checkpoints within it.

A step cuts its batch into pieces, adds their gradients, and changes the parameters once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from lipkit.errors import DataError, LipkitError, lacks_memory
from lipkit.training import saving
from lipkit.training.adversarial import attacked_batch
from lipkit.training.progress import Totals
from lipkit.training.session import Session, update
from lipkit.training.sources import ATTACK, AUGMENT, batches, generator, mistake, own_part

Ended = Literal["", "stop", "end"]
Step = Callable[..., Tensor]  # `take_step`, or a `CapturedStep` of it


def take_step(session: Session, x: Tensor, y: Tensor, *, size: int, counted: int, attack: torch.Generator) -> Tensor:
    r"""Change the parameters once, by the gradient of the mean loss of the whole batch.

    .. math:: \frac{1}{n} \sum_i \ell(x_i, y_i) = \frac{1}{R} \sum_r \sum_p \frac{R \, n_{rp}}{n} \,
              \text{mean}_{i \in (r, p)} \ell(x_i, y_i)

    over the pieces p of the R processes r, whose gradients are averaged over r. So the step equals that of one process
    with the batch in one piece, up to rounding, even if R does not divide the batch size.

    x, y is this process' part of the batch of n = ``size`` samples, on its device. ``counted`` of x are in the batch:
    all, or 0 if this process only keeps step with the others. ``attack`` generates the adversary's random numbers.
    Returns (2,) float32, still on the device: sum of the losses and number of correct predictions of this process.
    """
    fabric, model, options, loss = session.fabric, session.model, session.options, session.loss
    pieces = min(options.accumulate, max(1, size // fabric.world_size))  # equal in all processes
    parts = [(x, y)] if pieces == 1 else zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)
    sums = []
    for number, (part, targets) in enumerate(parts, 1):
        last, rows = number == pieces, len(part)  # rows without adversarial examples
        own = rows if counted else 0
        if options.adversary is not None:
            part, targets = attacked_batch(fabric, options.adversary, model, part, targets, attack)
        with fabric.no_backward_sync(session.wrapped, enabled=not last):
            outputs = None
            try:
                outputs = session.wrapped(part)
                value = loss(outputs, targets)
            except (RuntimeError, IndexError, ValueError) as error:
                clear = lacks_memory(error) or (isinstance(error, LipkitError) and outputs is not None)
                if clear or not (found := mistake(part, outputs, targets, loss)):
                    raise
                raise DataError(found) from error
            if len(targets) > rows:  # adversarial examples follow the samples
                outputs, targets = outputs[-rows:], targets[-rows:]
            sums.append(_sums(value, outputs, targets, own))
            weight = own * fabric.world_size / size  # R n_rp / n
            if weight != 1:
                value = value * weight
            if last and options.penalty is not None:
                extra = options.penalty(model).to(value)  # once a step, not for each piece
                sums[-1] = sums[-1] + _sums(extra, None, None, counted)
                value = value + extra
            fabric.backward(value)  # adds to the gradients of earlier pieces
    if options.grad_clip is not None:
        fabric.clip_gradients(session.wrapped, session.optimizer, max_norm=options.grad_clip, error_if_nonfinite=False)
    session.optimizer.step()
    for p in session.parameters.values():
        p.grad = None  # cheaper than writing zeros
    return sums[0] if pieces == 1 else torch.stack(sums).sum(0)


@torch.no_grad()
def _sums(loss: Tensor, outputs: Tensor | None, y: Tensor | None, count: int) -> Tensor:
    """(loss summed over ``count`` samples, number of correct predictions among them)."""
    total = loss.float() * count
    if outputs is None or y is None or y.is_floating_point():
        return torch.stack([total, torch.zeros_like(total)])
    right = (outputs.argmax(dim=1) == y).sum()
    return torch.stack([total, right if count else torch.zeros_like(total)])


def run_epoch(session: Session, take: Step, epoch: int, state: Mapping[str, Any]) -> tuple[Totals, Ended]:
    """Train for one epoch (counted from 0), the rest of it, or until time is up, by steps ``take``.

    ``state`` is that of the checkpoint to continue from, in this epoch or at its start; empty for none. Returns (sums
    of the epoch, how it ended): "" at its last step, "stop" at a checkpoint because of the clock, "end" because
    training is complete.

    Raises:
        Divergence: a loss, or at a checkpoint a weight, is NaN or infinite.
    """
    fabric, options, budget, length = session.fabric, session.options, session.budget, len(session.data)
    steps, done, seed = session.steps, int(state.get("step", 0)), options.seed
    rank, ranks = fabric.global_rank, fabric.world_size
    augment, attack = generator(seed, epoch, AUGMENT, rank), generator(seed, epoch, ATTACK, rank)
    generators = {"augment": augment, "attack": attack}
    saving.restore_random(session, state, generators)
    session.model.train()
    totals = Totals(fabric, epoch, steps, progress=options.progress, before=state.get("totals"))
    indices = batches(length, options.batch_size, seed=seed, epoch=epoch, rank=rank, ranks=ranks)
    budget.start()
    fraction = session.fraction(epoch * steps + done)
    for step, index in enumerate(islice(indices, done, None), done + 1):
        number = epoch * steps + step
        size = min(options.batch_size, length - (step - 1) * options.batch_size)
        budget.begin_step(size)
        # Used time is known up to the start of this step only, steps and samples up to its end.
        factor = session.rate(fraction if budget.timed else session.fraction(number))
        for group, peak in zip(session.optimizer.param_groups, session.peaks, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * factor)  # in place: recorded steps read this tensor
            else:
                group["lr"] = peak * factor
        x, y = _batch(session, index, augment)
        sums = take(session, x, y, size=size, counted=own_part(size, rank=rank, ranks=ranks), attack=attack)
        budget.charge()
        fraction = session.fraction(number)
        last = step == steps or fraction >= 1
        session.finish_step(session.model, number, last)
        if session.average is not None and options.ema is not None:
            update([*session.average.values()], [*session.parameters.values()], options.ema, number)
        read = totals.add(step, sums, size, labelled=not y.is_floating_point(), fraction=fraction)
        if last:
            return totals, "end" if fraction >= 1 else ""
        request = session.clock.request(fabric) if read else ""  # equal in all processes, which read at the same steps
        if request and (session.folder is not None or request == "stop"):
            saving.save(session, epoch=epoch, step=step, totals=totals.state(), generators=generators)
            session.clock.saved()
            if request == "stop":
                return totals, "stop"
            budget.start()  # the checkpoint is free
    return totals, ""


def _batch(session: Session, index: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
    """The samples at ``index`` on the device, augmented."""
    device, options = session.fabric.device, session.options
    held = getattr(session.data, "x", None)  # a Split may be on the device already
    x, y = session.data.batch(index.to(held.device) if isinstance(held, Tensor) else index)
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    if options.augment is not None:
        x = options.augment(x, augment)
    last = options.channels_last and x.ndim == 4
    return (x.contiguous(memory_format=torch.channels_last) if last else x), y
