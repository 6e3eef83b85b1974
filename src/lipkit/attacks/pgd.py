r"""Projected gradient ascent in a ball (PGD), with a margin loss; l2 and l_inf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipkit.attacks.ascent import Best, Box, Model, ball, check_inputs, like, seeded
from lipkit.attacks.losses import rivals, value_and_gradient
from lipkit.errors import OptionError, check_choice
from lipkit.linalg.matrices import check_integer

LOSSES = ("margin", "ce")


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | Tensor,
    norm: str = "l2",
    steps: int | Sequence[float] = 50,
    restarts: int = 1,
    box: Box = (0.0, 1.0),
    loss: str = "margin",
    generator: torch.Generator | None = None,
    stop_early: bool = True,
    random_start: bool = False,
) -> Tensor:
    r"""Adversarial examples in the ball of radius ``eps`` around each sample.

    From a start ``x_0``

        x_{k+1} = P( x_k + alpha_k d(g_k) ),    alpha_k = eps (0.01 + 0.99 (1 + cos(pi k / steps)) / 2)

    where ``g_k`` is the gradient of the loss, ``d`` the steepest direction of size 1 (``g / ||g||`` in l2, ``sign(g)``
    in l_inf) and ``P`` the Euclidean projection on ball and box. A vanishing or non-finite gradient is replaced by a
    random direction.

    The first start is the sample itself, with the margin loss ``max_{i != t} y_i - y_t``. Each further start is a
    random point of the ball; with the margin loss it raises ``y_i - y_t`` for one class i, the largest logits at the
    sample first. The maximum over classes has local maxima even for a linear model; ``restarts`` = K tries each class.

    **Guarantee.** Every returned point satisfies ``||x' - x|| <= eps``, measured in float64 on the returned numbers,
    and lies in ``box``. Not finding an adversarial example proves nothing.

    Args:
        model: any callable from (N, ...) to logits (N, K >= 2) that treats samples independently (modules: ``eval()``).
        x: (N, ...) float32 or float64.
        y: (N,) int64 labels.
        eps: radius, one number or (N,), in the norm's units: 8/255 in l_inf for images in [0, 1].
        norm: ``"l2"`` or ``"linf"``.
        steps: gradient steps of each start; or, in place of the cosine, each step as a fraction of eps: ``[0.2] * 10``.
        restarts: number of starts, at least 1.
        box: smallest and largest value of an input entry, or None.
        loss: ``"margin"`` or ``"ce"``.
        generator: source of random starts and directions, never the global one; None is a CPU generator with seed 0.
        stop_early: leave a sample alone once it is misclassified; adversarial training needs False.
        random_start: whether the first start is a random point of the ball too.

    Returns:
        (N, ...), the best point found for each sample: a misclassified one if there was one, else the one of largest
        loss. Same dtype and device as ``x``.

    Raises:
        OptionError: an option outside the documented values, ``x`` outside ``box``, or labels out of range.
        ShapeError: ``y``, ``eps`` or the model does not fit ``x``.

    >>> x, y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    >>> attacked = pgd(lambda x: x * torch.tensor([1.0, -1.0]) + 0.1, x, y, eps=0.3, steps=10)
    >>> torch.dist(attacked, torch.tensor([[0.5 - 0.3 / 2**0.5] * 2])).item() < 1e-3
    True
    >>> pgd(lambda x: x * torch.tensor([1.0, -1.0]) + 0.9, x, y, eps=0.25, norm="linf", steps=10).tolist()
    [[0.25, 0.25]]

    References: Madry et al., "Towards deep learning models resistant to adversarial attacks", ICLR 2018, Sec. 2.1;
    Carlini & Wagner, "Towards evaluating the robustness of neural networks", S&P 2017, Sec. V (loss f6); Gowal et al.,
    "An alternative surrogate loss for PGD-based adversarial testing", 2019 (one class after the other).
    """
    space, lengths = ball(norm), _lengths(steps)
    check_choice("loss", loss, LOSSES)
    radius = check_inputs(x, y, eps, len(lengths), restarts, box)
    generator = seeded(generator)
    best = Best(x, y)
    order: Tensor | None = None
    for restart in range(restarts):
        index = best.left(stop_early)
        centre, size = x[index].detach(), radius[index]
        target = None if order is None else order[index, (restart - 1) % order.shape[1]]
        point = space.start(centre, size, box, generator) if restart or random_start else centre.clone()
        for length in (*lengths, None):  # None: evaluate the last point only
            if not len(index):
                break
            value, logits, slope = value_and_gradient(model, point, y[index], loss, target, gradient=length is not None)
            best.update(index, point, logits, value if loss == "ce" else None)
            if order is None and loss == "margin":  # at the first evaluation, which has all samples
                order = rivals(logits, y)
            if length is None:
                break
            if stop_early and bool(best.fooled[index].any()):
                keep = ~best.fooled[index]
                index, centre, size, point, slope = (each[keep] for each in (index, centre, size, point, slope))
                target = None if target is None else target[keep]
            direction = space.direction(slope, generator)
            point = space.project(point + direction * like(size * length, point), centre, size, box)
    return best.points


def _lengths(steps: Any) -> Sequence[float]:
    """Length of each step as a fraction of the radius: as given, or from 1 down to 0.01 along half a cosine."""
    if isinstance(steps, str) or not hasattr(steps, "__iter__"):
        check_integer("steps", steps, 1)
        return [0.01 + 0.99 * (1 + math.cos(math.pi * k / steps)) / 2 for k in range(steps)]
    if wrong := [length for length in steps if not 0 < length < math.inf]:
        raise OptionError(
            f"expected steps as a number, or as lengths > 0 (fractions of eps), got the length {wrong[0]}"
        )
    lengths: Sequence[float] = steps
    return lengths
