r"""Closer adversarial examples, by bisection on the way back to the sample."""

from __future__ import annotations

import torch
from torch import Tensor

from lipkit.attacks.pgd import Model, misclassified
from lipkit.errors import OptionError, ShapeError


def shrink(model: Model, x: Tensor, adversarial: Tensor, y: Tensor, *, steps: int = 20) -> Tensor:
    r"""The closest misclassified point that bisection finds on the segment from each sample to its adversarial example.

    Keeps ``b`` misclassified in ``x + b (x' - x)`` and halves the interval below it ``steps`` times. A fixed-radius
    attack spends its whole budget; what it found lies much closer as a rule, and the closer the example, the sharper
    the comparison with a certificate.

    **Guarantee.** Every returned point is one that the model was seen to misclassify, if ``adversarial`` was; where it
    was not, ``adversarial`` is returned. In any convex box that holds both ends, up to one rounding of the sum.

    Args:
        model: any callable from (N, ...) to logits (N, K) that treats samples independently.
        x, adversarial: (N, ...) of one shape and dtype.
        y: (N,) int64 labels.
        steps: halvings; 20 leave one millionth of the distance.

    Raises:
        ShapeError: the shapes differ.
        OptionError: ``steps`` is below 1.

    >>> x, far = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    >>> near = shrink(lambda x: torch.stack([0.25 - x[:, 0], x[:, 0] - 0.25], 1), x, far, torch.tensor([0]))
    >>> 0.25 < near[0, 0].item() < 0.251
    True
    """
    if x.shape != adversarial.shape:
        raise ShapeError(f"expected adversarial examples of shape {tuple(x.shape)}, got {tuple(adversarial.shape)}")
    if steps < 1:
        raise OptionError(f"expected steps >= 1, got {steps}")
    best = adversarial.detach().clone()
    shape = (len(x), *[1] * (x.ndim - 1))
    low, high = x.new_zeros(shape), x.new_ones(shape)
    with torch.no_grad():
        for _ in range(steps):
            middle = (low + high) / 2
            point = x + middle * (adversarial - x)
            wrong = misclassified(model(point), y).view(shape)
            best = torch.where(wrong, point, best)
            low, high = torch.where(wrong, low, middle), torch.where(wrong, middle, high)
    return best
