r"""Random search in a ball: an attack that needs no gradient, for networks whose gradients mislead; l2 and l_inf."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.attacks.ascent import Best, Box, Model, check_inputs, like, margin_loss, seeded
from lipkit.attacks.balls import ball
from lipkit.attacks.losses import first_logits


def random_search(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    norm: str = "l2",
    steps: int = 500,
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
    stop_early: bool = True,
) -> Tensor:
    r"""Adversarial examples in the ball of radius ``eps``, by random changes that are kept where the margin loss rises.

    Each proposal changes a random share of the entries by ``2 eps`` times random signs (l_inf) or by a random vector of
    norm ``2 eps`` (l2), and is projected on ball and box. The share falls from 1/2 to a single entry, as the square
    root of the steps taken.

    **Guarantee.** Every returned point is within ``eps``, measured in float64, and in ``box``.

    **Cost.** ``steps`` evaluations, no gradient.

    Args:
        model, x, y, eps, norm, box, generator, stop_early: see `lipkit.attacks.apgd`.
        steps: proposals.

    Returns:
        (N, ...), the best point found for each sample. Same dtype and device as ``x``.

    Raises:
        OptionError, ShapeError: see `lipkit.attacks.apgd`.

    >>> x, y = torch.full((1, 4), 0.5), torch.tensor([0])
    >>> model = lambda x: torch.stack([x.sum(1) - 1.5, torch.zeros(len(x))], 1).sign()  # no gradient anywhere
    >>> model(random_search(model, x, y, 0.3)).argmax(1).item()
    1

    References: Andriushchenko et al., "Square Attack: a query-efficient black-box adversarial attack via random
    search", ECCV 2020 (squares of images there, any entries here).
    """
    space = ball(norm)
    radius = check_inputs(x, y, eps, steps, 1, box)
    generator = seeded(generator)
    x = x.detach()
    best = Best(x, y)
    if not len(x):
        return best.points
    logits = first_logits(model, x, y)
    best.update(torch.arange(len(x), device=x.device), x, logits, margin_loss(logits, y).nan_to_num(nan=torch.inf))
    entries = x[0].numel()
    for step in range(steps):
        index = (~best.fooled).nonzero()[:, 0] if stop_early else torch.arange(len(x), device=x.device)
        if not len(index):
            break
        centre, size = x[index], radius[index]
        share = max(0.5 * (1 - math.sqrt(step / steps)), 1 / entries)
        noise = torch.randn(centre.shape, generator=generator, device=generator.device).to(centre)
        chosen = torch.rand(centre.shape, generator=generator, device=generator.device).to(centre) < share
        noise = torch.where(chosen, noise.sign() if norm == "linf" else noise, 0.0)
        if norm == "l2":
            noise = noise / like(noise.flatten(1).norm(dim=1).clamp_min(1e-30), noise)
        proposal = space.project(best.points[index] + 2 * like(size, centre) * noise, centre, size, box)
        with torch.no_grad():
            logits = model(proposal)
        best.update(index, proposal, logits, margin_loss(logits, y[index]).nan_to_num(nan=torch.inf))
    return best.points
