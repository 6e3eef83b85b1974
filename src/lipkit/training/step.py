"""One step: it cuts its batch into pieces, adds their gradients, and changes the parameters once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipkit.errors import DataError, LipkitError, OptionError, lacks_memory
from lipkit.training.losses import LOSSES
from lipkit.training.session import Session

Step = Callable[..., Tensor]  # `take_step`, or a `CapturedStep` of it


def take_step(session: Session, x: Tensor, y: Tensor, *, size: int, counted: int, attack: torch.Generator) -> Tensor:
    r"""Change the parameters once, by the gradient of the mean loss of the whole batch.

    .. math:: \frac{1}{n} \sum_i \ell(x_i, y_i) = \frac{1}{R} \sum_r \sum_p \frac{R \, n_{rp}}{n} \,
              \text{mean}_{i \in (r, p)} \ell(x_i, y_i)

    over the pieces p of the R processes r, whose gradients are averaged over r. So the step equals that of one process
    with the batch in one piece, up to rounding, even if R does not divide the batch size.

    x, y are this process' part of the batch of n = ``size`` samples, on its device. ``counted`` is the number of them
    that belong to the batch: all, or 0 if this process only keeps step with the others. ``attack`` generates the
    adversary's random numbers. Returns (2,) float32, still on the device: sum of the losses and number of correct
    predictions of this process.
    """
    fabric, model, options, loss = session.fabric, session.model, session.options, session.loss
    pieces = min(options.accumulate, max(1, size // fabric.world_size))  # equal in all processes
    parts = [(x, y)] if pieces == 1 else zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)
    sums = []
    for number, (part, targets) in enumerate(parts, 1):
        last, rows = number == pieces, len(part)
        own = rows if counted else 0  # adversarial examples do not count
        if options.adversary is not None:
            model.eval()  # during the attack only
            with fabric.autocast():
                attacked = options.adversary(model, part, targets, attack).detach()
            model.train()
            beside = getattr(options.adversary, "beside", False)
            part = torch.cat((part, attacked)) if beside else attacked
            targets = torch.cat((targets, targets)) if beside else targets
        with fabric.no_backward_sync(session.wrapped, enabled=not last):
            outputs = None
            try:
                outputs = session.wrapped(part)
                value = loss(outputs, targets)
            except (RuntimeError, IndexError, ValueError) as error:
                clear = lacks_memory(error) or (isinstance(error, LipkitError) and outputs is not None)
                if clear or not (found := _mistake(part, outputs, targets, loss)):
                    raise
                raise DataError(found) from error
            if value.ndim:
                raise OptionError(f"expected one number from the loss, a mean, got shape {tuple(value.shape)}")
            if len(targets) > rows:  # the samples come first, their adversarial examples last
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


def _mistake(x: Tensor, outputs: Any, y: Tensor, loss: Any) -> str:
    """The likely cause of an error in the network (``outputs`` is None) or the loss, in words; empty if unknown."""
    if outputs is None:
        last = x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
        return f"expected (N, C, H, W), got {tuple(x.shape)} (channels last: x.permute(0, 3, 1, 2))" if last else ""
    ours = getattr(loss, "func", loss) in LOSSES.values()
    if y.is_floating_point():
        got = f"got {tuple(y.shape)} floating point (one-hot: y.argmax(1); a regression: loss='mse')"
        return f"expected labels (int64), {got}" if ours else ""
    if outputs.ndim != 2:
        return f"expected outputs of shape ({len(x)}, K), got {tuple(outputs.shape)}" if ours else ""
    wrong = int(y.max()) >= outputs.shape[1]
    return f"expected labels below the number of outputs {outputs.shape[1]}, got {int(y.max())}" if wrong else ""
