"""Several attacks after each other, each on what survived those before; it runs where AutoAttack cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from lipkit.attacks.apgd import apgd
from lipkit.attacks.ascent import Box, Model, check_inputs, like, misclassified, seeded
from lipkit.attacks.balls import ball
from lipkit.attacks.fab import fab
from lipkit.attacks.losses import first_logits
from lipkit.attacks.random_search import random_search

PARTS = ("apgd-margin", "apgd-targeted", "fab", "random search")


def ensemble(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    norm: str = "l2",
    steps: int = 100,
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Adversarial examples in the ball of radius ``eps``: APGD, targeted APGD, FAB, random search.

    Any number of classes, any shape of input, any box. FAB takes half the ``steps`` for each class, random search five
    times as many.

    **Guarantee.** Every returned point is within ``eps``, measured in float64 on the returned numbers, and in ``box``.

    Args:
        model, x, y, eps, norm, box, generator: see `lipkit.attacks.apgd`.
        steps: of each start of APGD.

    Returns:
        (N, ...): an adversarial example where one was found, else what APGD ended with. Same dtype and device.

    Raises:
        OptionError, ShapeError: see `lipkit.attacks.apgd`.

    >>> x, y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    >>> model = lambda x: x * torch.tensor([1.0, -1.0]) + 0.1
    >>> model(ensemble(model, x, y, 0.75, steps=10, box=None)).argmax(1).item()
    1
    """
    space = ball(norm)
    radius = check_inputs(x, y, eps, steps, 1, box)
    generator = seeded(generator)
    found = x.detach().clone()
    if not len(x):
        return found
    fooled = misclassified(first_logits(model, x, y), y)
    for part in PARTS:
        index = (~fooled).nonzero()[:, 0]
        if not len(index):
            break
        centre, label, size = x[index].detach(), y[index], radius[index]
        if part == "fab":
            points = fab(model, centre, label, norm=norm, steps=max(steps // 2, 1), box=box, generator=generator)
            points = torch.where(like(space.distance(points, centre) <= size, points), points, found[index])
        elif part == "random search":
            points = random_search(model, centre, label, size, norm=norm, steps=5 * steps, box=box, generator=generator)
        else:
            targeted = part == "apgd-targeted"
            points = apgd(
                model, centre, label, size, norm=norm, targeted=targeted, steps=steps, box=box, generator=generator
            )
        with torch.no_grad():
            wrong = misclassified(model(points), label)
        taken = wrong | torch.full_like(wrong, part == PARTS[0])
        found[index[taken]] = points[taken]
        fooled[index[wrong]] = True
    return found
