"""Projected gradient ascent in a ball, the loop that the attacks share; the norm is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
        distance: (point, centre) -> (n,) the norm of the difference, in float64.
    """

    direction: Callable[[Tensor, torch.Generator], Tensor]
    random: Callable[[Tensor, torch.Generator], Tensor]
    project: Callable[[Tensor, Tensor, Tensor, Box], Tensor]
    distance: Callable[[Tensor, Tensor], Tensor]


class Best:
    """The best point seen of each sample: a misclassified one before any other, then the one of largest loss.

    Attributes:
        points: (N, ...), at first the samples.
        fooled: (N,) bool, whether ``points`` was seen to be misclassified.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.points = x.detach().clone()
        self.fooled = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self._labels = y
        self._loss = torch.full((len(x),), -math.inf, dtype=x.dtype, device=x.device)

    def update(self, index: Tensor, points: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Take what is better of ``points``, which belong to the samples ``index``."""
        wrong = misclassified(logits, self._labels[index])
        loss = loss.to(self._loss)
        better = (wrong & ~self.fooled[index]) | ((wrong == self.fooled[index]) & (loss > self._loss[index]))
        chosen = index[better]
        self.points[chosen] = points[better]
        self._loss[chosen] = loss[better]
        self.fooled[chosen] |= wrong[better]


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
    check_choice("loss", loss, LOSSES)
    if step_size is not None and not (step_size > 0 and math.isfinite(step_size)):
        raise OptionError(f"expected step_size > 0 (a share of eps) or None, got {step_size}")
    radius = check_inputs(x, y, eps, steps, restarts, box)
    generator = seeded(generator)
    best = Best(x, y)
    fooled = best.fooled
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
            value, logits, gradient = _loss_and_gradient(
                model, point, y[index], loss, target, gradient=step < steps, first=restart == step == 0
            )
            best.update(index, point, logits, value)
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
    return best.points


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
    model: Model, point: Tensor, labels: Tensor, loss: str, target: Tensor | None, *, gradient: bool, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each sample, its logits, and the gradient of the loss, or of ``y_target - y_label``."""
    with torch.set_grad_enabled(gradient):
        point = point.detach().requires_grad_(gradient)
        logits = model(point)
        check_logits(logits, len(point))
        if first:
            check_labels(labels, logits.shape[1])
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


def clip(points: Tensor, box: Box) -> Tensor:
    """The points with every entry moved into the box, or as they are without one.

    >>> clip(torch.tensor([-1.0, 0.5, 2.0]), (0, 1)).tolist()
    [0.0, 0.5, 1.0]
    """
    return points if box is None else points.clamp(*box)


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The generator, or for None the one that stands for it in every attack: on the CPU, with seed 0.

    >>> seeded(None).initial_seed()
    0
    """
    return torch.Generator().manual_seed(0) if generator is None else generator


def check_inputs(x: Tensor, y: Tensor, eps: float | Tensor, steps: int, restarts: int, box: Box) -> Tensor:
    """What every attack asks of its arguments; the radius of each sample, (N,) float64.

    Raises:
        OptionError: a value outside its range, or samples outside the box.
        ShapeError: ``y`` or ``eps`` does not fit ``x``.
    """
    if x.dtype not in (torch.float32, torch.float64) or x.ndim < 2:
        raise OptionError(f"expected float32 or float64 inputs of shape (N, ...), got {x.dtype} {tuple(x.shape)}")
    if y.shape != x.shape[:1]:
        raise ShapeError(f"expected {len(x)} labels of shape ({len(x)},), got {tuple(y.shape)}")
    if y.dtype != torch.int64:
        raise OptionError(f"expected integer class labels (int64), got {str(y.dtype).removeprefix('torch.')}")
    if steps < 1 or restarts < 1:
        raise OptionError(f"expected steps >= 1 and restarts >= 1, got steps={steps}, restarts={restarts}")
    if box is not None and not (box[0] < box[1] and bool(((x >= box[0]) & (x <= box[1])).all())):
        found = f"values from {float(x.min()):g} to {float(x.max()):g}" if x.numel() else "no values"
        raise OptionError(f"expected inputs inside the box {box}, got {found}")
    if box is None and not bool(x.isfinite().all()):
        raise OptionError("expected finite inputs, got NaN or infinity")
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    radius = torch.as_tensor(eps, dtype=wide, device=x.device)
    if radius.ndim and radius.shape != (len(x),):
        raise ShapeError(f"expected one eps or {len(x)} of them, got shape {tuple(radius.shape)}")
    if not bool(((radius >= 0) & radius.isfinite()).all()):
        raise OptionError("expected every eps to be finite and >= 0")
    return radius.expand(len(x))


def check_logits(logits: Tensor, count: int) -> None:
    """Raise unless ``logits`` is (count, K >= 2)."""
    if logits.ndim != 2 or logits.shape[1] < 2 or len(logits) != count:
        raise ShapeError(f"expected logits of shape ({count}, K >= 2), got {tuple(logits.shape)}")


def check_labels(y: Tensor, classes: int) -> None:
    """Raise unless every label is in [0, classes)."""
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < classes:
        found = f"labels from {int(y.min())} to {int(y.max())}"
        raise OptionError(f"expected labels from 0 to {classes - 1} for {classes} logits, got {found}")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise unless ``value`` is one of the names."""
    if value not in known:
        raise OptionError(f"expected {name} {' or '.join(map(repr, known))}, got {value!r}")
