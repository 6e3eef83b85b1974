"""Shared by all attacks: the best points seen, misclassification and margin, checks of the arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipkit.errors import OptionError, ShapeError, check_labels, interval
from lipkit.linalg.matrices import check_positive

Model = Callable[[Tensor], Tensor]
Box = tuple[float, float] | None


class Best:
    """The best point seen of each sample: a misclassified one if any, else the one of largest loss.

    Attributes:
        samples, labels: (N, ...) and (N,), as given.
        points: (N, ...), at first the samples.
        fooled: (N,) bool, whether ``points`` was seen to be misclassified.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.points = x.detach().clone()
        self.fooled = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self.samples, self.labels = x.detach(), y
        self._loss = torch.full((len(x),), -math.inf, dtype=x.dtype, device=x.device)

    def left(self, stop_early: bool) -> Tensor:
        """Indices of the samples still to attack: those not yet misclassified, or all."""
        return (~self.fooled if stop_early else torch.ones_like(self.fooled)).nonzero()[:, 0]

    def update(self, index: Tensor, points: Tensor, logits: Tensor, loss: Tensor | None = None) -> None:
        """Keep those ``points`` of the samples ``index`` that beat the present ones; ``loss=None`` compares margins."""
        wrong = misclassified(logits, self.labels[index])
        if loss is None:
            loss = margin_loss(logits, self.labels[index]).nan_to_num(nan=math.inf)  # NaN counts as misclassified
        loss = loss.to(self._loss)
        better = (wrong & ~self.fooled[index]) | ((wrong == self.fooled[index]) & (loss > self._loss[index]))
        chosen = index[better]
        self.points[chosen] = points[better]
        self._loss[chosen] = loss[better]
        self.fooled[chosen] |= wrong[better]


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


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """(N,) values shaped to broadcast over (N, ...), in the tensor's dtype unless they are bool."""
    shaped = values.view(-1, *[1] * (tensor.ndim - 1))
    return shaped if values.dtype == torch.bool else shaped.to(tensor.dtype)


def clip(points: Tensor, box: Box) -> Tensor:
    """The points with every entry moved into the box, if one is given."""
    return points if box is None else points.clamp(*box)


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The generator; None gives the default of every attack, a CPU generator with seed 0."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def check_inputs(x: Tensor, y: Tensor, eps: float | Tensor, steps: int, restarts: int, box: Box) -> Tensor:
    """Refuse arguments out of range and samples outside the box; return the radii (N,) in float64."""
    if x.dtype not in (torch.float32, torch.float64) or x.ndim < 2:
        raise OptionError(f"expected float32 or float64 inputs of shape (N, ...), got {x.dtype} {tuple(x.shape)}")
    check_labels(y, len(x))
    check_positive(steps=steps, restarts=restarts)
    low, high = (-math.inf, math.inf) if box is None else interval("box", box, finite=False)
    if box is not None and not bool(((x >= low) & (x <= high)).all()):
        found = f"values from {float(x.min()):g} to {float(x.max()):g}" if x.numel() else "no values"
        raise OptionError(f"expected inputs inside the box {box}, got {found}")
    if box is None and not bool(x.isfinite().all()):
        raise OptionError("expected finite inputs, got NaN or infinity")
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # mps has no float64
    radius = torch.as_tensor(eps, dtype=wide, device=x.device)
    if radius.ndim and radius.shape != (len(x),):
        raise ShapeError(f"expected one eps or {len(x)} of them, got shape {tuple(radius.shape)}")
    if not bool(((radius >= 0) & radius.isfinite()).all()):
        raise OptionError("expected every eps to be finite and >= 0")
    return radius.expand(len(x))


def check_logits(logits: Tensor, y: Tensor) -> None:
    """Raise unless ``logits`` is (N, K >= 2) for N labels in [0, K)."""
    if logits.ndim != 2 or logits.shape[1] < 2 or len(logits) != len(y):
        raise ShapeError(f"expected logits of shape ({len(y)}, K >= 2), got {tuple(logits.shape)}")
    check_labels(y, len(y), logits.shape[1])
