"""Projected gradient ascent in a ball, the loop that the attacks share; the norm is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import OptionError, ShapeError

Model = Callable[[Tensor], Tensor]
Box = tuple[float, float] | None

LOSSES = ("margin", "ce")


@dataclass(frozen=True)
class Ball:
    """What ascent needs to know of a norm.

    Attributes:
        direction: (gradient (n, ...), generator) -> steepest ascent at size 1; random where there is no gradient.
        random: (like (n, ...), generator) -> random points of the unit ball.
        project: (point, centre, radius (n,), box) -> the nearest point in ball and box, kept inside after rounding.
    """

    direction: Callable[[Tensor, torch.Generator], Tensor]
    random: Callable[[Tensor, torch.Generator], Tensor]
    project: Callable[[Tensor, Tensor, Tensor, Box], Tensor]


def ascend(
    ball: Ball,
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    steps: int,
    restarts: int,
    box: Box,
    loss: str,
    generator: torch.Generator | None,
    stop_early: bool,
    step_size: float | None,
    random_start: bool,
) -> Tensor:
    """See `lipkit.attacks.pgd_l2` and `lipkit.attacks.pgd_linf`, whose arguments these are.

    Raises:
        OptionError: an option outside the documented values, or ``x`` outside ``box``.
        ShapeError: ``y`` or ``eps`` does not fit ``x``.
    """
    radius = _check(x, y, eps, steps, restarts, box, loss, step_size)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    best = x.detach().clone()
    best_loss = torch.full((len(x),), -math.inf, dtype=x.dtype, device=x.device)
    fooled = torch.zeros(len(x), dtype=torch.bool, device=x.device)

    def remember(index: Tensor, points: Tensor, logits: Tensor, value: Tensor) -> None:
        wrong = misclassified(logits, y[index])
        value = value.to(best_loss)
        better = (wrong & ~fooled[index]) | ((wrong == fooled[index]) & (value > best_loss[index]))
        chosen = index[better]
        best[chosen] = points[better]
        best_loss[chosen] = value[better]
        fooled[chosen] |= wrong[better]

    rivals: Tensor | None = None
    for restart in range(restarts):
        index = (~fooled).nonzero()[:, 0] if stop_early else torch.arange(len(x), device=x.device)
        centre, size = x[index].detach(), radius[index]
        point = centre.clone()
        target = None if rivals is None else rivals[index, (restart - 1) % rivals.shape[1]]
        if restart > 0 or random_start:
            start = centre + ball.random(centre, generator) * like(size, centre)
            point = ball.project(start, centre, size, box)
        for step in range(steps + 1):
            if not len(index):
                break
            value, logits, gradient = _loss_and_gradient(model, point, y[index], loss, target, gradient=step < steps)
            remember(index, point, logits, value)
            if rivals is None and loss == "margin" and restarts > 1:  # the first evaluation, of all samples
                rivals = logits.scatter(1, y[:, None], -math.inf).argsort(dim=1, descending=True)[:, :-1]
            if step == steps:
                break
            if stop_early and bool(fooled[index].any()):
                keep = ~fooled[index]
                index, centre, size = index[keep], centre[keep], size[keep]
                point, gradient = point[keep], gradient[keep]
                target = None if target is None else target[keep]
            length = _length(step, steps) if step_size is None else step_size
            direction = ball.direction(gradient, generator)
            point = ball.project(point + direction * like(size * length, point), centre, size, box)
    return best


def _length(step: int, steps: int) -> float:
    """The step's share of the radius: from 1 down to 0.01, half a cosine."""
    return 0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2


def misclassified(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) bool: the first largest logit is not the label's, or a logit is NaN.

    >>> misclassified(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0])).tolist()
    [True, False]
    """
    return (logits.argmax(dim=1) != labels) | logits.isnan().any(dim=1)


def margin_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) ``max_{i != t} y_i - y_t``: positive where the sample is misclassified.

    >>> margin_loss(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])).item()
    -1.0
    """
    return logits.scatter(1, labels[:, None], -math.inf).amax(dim=1) - logits.gather(1, labels[:, None])[:, 0]


def _loss_and_gradient(
    model: Model, point: Tensor, labels: Tensor, loss: str, target: Tensor | None, *, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each sample, its logits, and the gradient of the loss, or of ``y_target - y_label``."""
    with torch.set_grad_enabled(gradient):
        point = point.detach().requires_grad_(gradient)
        logits = model(point)
        if logits.ndim != 2 or logits.shape[1] < 2 or len(logits) != len(point):
            raise ShapeError(f"expected logits of shape ({len(point)}, K >= 2), got {tuple(logits.shape)}")
        value = margin_loss(logits, labels) if loss == "margin" else F.cross_entropy(logits, labels, reduction="none")
        rising = value if target is None else (logits.gather(1, target[:, None]) - logits.gather(1, labels[:, None]))
        slope = torch.zeros_like(point)
        if gradient and rising.requires_grad:
            slope = torch.autograd.grad(rising.sum(), point)[0]
    return value.detach().nan_to_num(nan=math.inf), logits.detach(), slope


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """(N,) values shaped to broadcast over (N, ...), in the tensor's dtype unless they are bool."""
    shaped = values.view(-1, *[1] * (tensor.ndim - 1))
    return shaped if values.dtype == torch.bool else shaped.to(tensor.dtype)


def _check(
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    steps: int,
    restarts: int,
    box: Box,
    loss: str,
    step_size: float | None,
) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64) or x.ndim < 2:
        raise OptionError(f"expected float32 or float64 inputs of shape (N, ...), got {x.dtype} {tuple(x.shape)}")
    if y.shape != x.shape[:1]:
        raise ShapeError(f"expected {len(x)} labels of shape ({len(x)},), got {tuple(y.shape)}")
    if steps < 1 or restarts < 1:
        raise OptionError(f"expected steps >= 1 and restarts >= 1, got steps={steps}, restarts={restarts}")
    if step_size is not None and not (step_size > 0 and math.isfinite(step_size)):
        raise OptionError(f"expected step_size > 0 (a share of eps) or None, got {step_size}")
    if loss not in LOSSES:
        raise OptionError(f"expected loss 'margin' or 'ce', got {loss!r}")
    if box is not None and not (box[0] < box[1] and bool(((x >= box[0]) & (x <= box[1])).all())):
        raise OptionError(
            f"expected inputs inside the box {box}, got values from {float(x.min()):g} to {float(x.max()):g}"
        )
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    radius = torch.as_tensor(eps, dtype=wide, device=x.device)
    if radius.ndim and radius.shape != (len(x),):
        raise ShapeError(f"expected one eps or {len(x)} of them, got shape {tuple(radius.shape)}")
    if not bool(((radius >= 0) & radius.isfinite()).all()):
        raise OptionError("expected every eps to be finite and >= 0")
    return radius.expand(len(x))
