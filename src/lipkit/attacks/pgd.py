r"""Projected gradient ascent in a ball, with a margin loss, in l2 and l_inf.

PGD takes steps of given lengths. APGD has momentum, and its steps need no tuning.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lipkit.attacks.ascent import Ball, Best, Box, Model, ball, check_inputs, like, seeded
from lipkit.attacks.losses import check_loss, first_logits, rivals, value_and_gradient
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
            best.improve(index, point, logits, value if loss == "ce" else None)
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
    return steps


_MOMENTUM, _RISES = 0.75, 0.75


def apgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | Tensor,
    norm: str = "l2",
    loss: str = "margin",
    targeted: bool | None = False,
    steps: int = 100,
    restarts: int | None = None,
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
    stop_early: bool = True,
) -> Tensor:
    r"""Adversarial examples in the ball of radius ``eps`` around each sample, without a step size to choose.

        z       = P( x_k + s_k d(g_k) )
        x_{k+1} = P( x_k + 3/4 (z - x_k) + 1/4 (x_k - x_{k-1}) )

    with P the projection on ball and box and d the steepest direction of size 1 in the norm. The step s begins at
    2 eps. At checkpoints, which grow denser, a sample's step is halved and its search returns to the best point if the
    loss rose in fewer than 3/4 of the steps, or if neither step nor best loss changed since the last checkpoint.

    The first start is the sample itself, each further one a random point of the ball. With ``targeted`` each start
    raises the loss towards one class: the first start towards the largest wrong logit at the sample, and so on. With
    ``targeted=None`` an untargeted start comes before them.

    **Guarantee.** Every returned point is within ``eps``, measured in float64 on the returned numbers, and in ``box``.
    Not finding an adversarial example proves nothing. Of several points the one with the largest margin loss is kept.

    **Cost.** ``restarts (steps + 1)`` gradients, fewer for samples that are misclassified early.

    Args:
        model, x, y, eps, norm, box, generator, stop_early: as in `lipkit.attacks.pgd`, which names the errors.
        loss: ``"margin"``, ``"dlr"`` (3 classes; 4 if targeted) or ``"ce"``, see `lipkit.attacks.losses`.
        targeted: whether each start aims at one wrong class; None for all but the first.
        steps: gradient steps of each start.
        restarts: number of starts; None is the untargeted one, if there is one, and one for each of the 9 largest wrong
            logits, if starts have targets.

    Raises:
        OptionError, ShapeError: see `lipkit.attacks.pgd`.

    >>> x, y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    >>> attacked = apgd(lambda x: x * torch.tensor([1.0, -1.0]) + 0.1, x, y, eps=0.3, steps=10, stop_early=False)
    >>> torch.dist(attacked, torch.tensor([[0.5 - 0.3 / 2**0.5] * 2])).item() < 1e-3
    True

    References: Croce & Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
    attacks", ICML 2020, algorithm 1, Sec. 3.2.
    """
    space = ball(norm)
    radius = check_inputs(x, y, eps, steps, 1 if restarts is None else restarts, box)
    generator = seeded(generator)
    if not len(x):
        return x.detach().clone()
    logits = first_logits(model, x, y)
    check_loss(loss, logits.shape[1], targeted=targeted is not False)
    best = Best(x, y)
    best.improve(best.left(False), x.detach(), logits)
    order = rivals(logits, y)
    most = min(9, order.shape[1])
    # For each start the rank of the rival that it aims at; None for no target.
    ranks: list[int | None] = [*range(restarts or most)] if targeted else [None] * (restarts or 1)
    if targeted is None:
        ranks = [None, *range(restarts - 1 if restarts else most)]
    for start, rank in enumerate(ranks):
        index = best.left(stop_early)
        if not len(index):
            break
        target = None if rank is None else order[index, rank % order.shape[1]]
        random = (start if rank is None else rank) > 0  # the first start of each kind is the sample
        climb(space, model, best, index, radius[index], random, target, loss, steps, box, generator, stop_early)
    return best.points


def _keep(state: SimpleNamespace, rows: Tensor) -> None:
    """Keep only these rows of all tensors."""
    vars(state).update({name: values[rows] for name, values in vars(state).items() if values is not None})


def climb(
    space: Ball, model: Model, best: Best, index: Tensor, radius: Tensor, random: bool, target: Tensor | None,
    loss: str, steps: int, box: Box, generator: torch.Generator, stop_early: bool, look: int | None = None,
) -> Tensor:  # fmt: skip
    """Run one start for the samples ``index`` and update ``best``; return those that were attacked to the end.

    It starts at the samples, or with ``random`` at random points. ``radius`` and ``target`` have one entry per sample.
    Every ``look`` steps hopeless samples are dropped: those whose loss is below -1/4 of its rise so far, and below -10
    times its rise in the last ``look`` steps.
    """
    centre, label = best.samples[index], best.labels[index]
    point = space.start(centre, radius, box, generator) if random else centre
    value, logits, slope = value_and_gradient(model, point, label, loss, target)
    best.improve(index, point, logits)
    s = SimpleNamespace(  # a row for each sample that is still attacked
        index=index,
        centre=centre,
        label=label,
        radius=radius,
        target=target,
        point=point,
        previous=point,
        value=value,
        slope=slope,
        top_point=point,  # where the loss was best
        top_value=value,
        top_slope=slope,
        first_value=value,  # at the start
        past_value=value,  # the best loss when hopeless rows were last dropped
        step=2 * radius,  # the diameter
        old_step=2 * radius,  # the step at the last checkpoint
        old_top=value,  # the best loss at the last checkpoint
        rises=torch.zeros_like(index),  # how often the loss rose since then
    )
    last, marks = 0, checkpoints(steps)
    for k in range(steps):
        if stop_early and bool(best.fooled[s.index].any()):
            _keep(s, ~best.fooled[s.index])  # misclassified samples are finished
            if not len(s.index):
                break
        move = space.direction(s.slope, generator) * like(s.step, s.point)
        ahead = space.nearest(s.point + move, s.centre, s.radius, box)
        if k:
            ahead = torch.add(s.point.lerp(ahead, _MOMENTUM), s.point - s.previous, alpha=1 - _MOMENTUM)
        s.previous, s.point = s.point, space.project(ahead, s.centre, s.radius, box)
        value, logits, s.slope = value_and_gradient(model, s.point, s.label, loss, s.target)
        best.improve(s.index, s.point, logits)
        s.rises = s.rises + (value > s.value)
        s.value = value
        better = value > s.top_value
        s.top_value = torch.where(better, value, s.top_value)
        s.top_point = torch.where(like(better, s.point), s.point, s.top_point)
        s.top_slope = torch.where(like(better, s.point), s.slope, s.top_slope)
        if k + 1 in marks:
            halve = (s.rises < _RISES * (k + 1 - last)) | ((s.step == s.old_step) & (s.top_value == s.old_top))
            s.old_step, s.old_top, last = s.step, s.top_value, k + 1
            s.step = torch.where(halve, s.step / 2, s.step)
            s.rises = torch.zeros_like(s.rises)
            wide = like(halve, s.point)
            s.point = torch.where(wide, s.top_point, s.point)
            s.slope = torch.where(wide, s.top_slope, s.slope)
            s.value = torch.where(halve, s.top_value, s.value)
        if look and (k + 1) % look == 0:
            gap, rise, lately = -s.top_value, s.top_value - s.first_value, s.top_value - s.past_value
            s.past_value = s.top_value
            _keep(s, (gap <= rise / 4) | (gap <= 10 * lately))
            if not len(s.index):
                break
    return s.index


def checkpoints(steps: int) -> frozenset[int]:
    """Steps after which APGD checks its progress: at 0.22 of all steps, then in gaps that shrink by 0.03, down to 0.06.

    >>> sorted(checkpoints(100))
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    gap = max(round(0.22 * steps), 1)  # at least one step
    place, marks = gap, set()
    while place <= steps:
        marks.add(place)
        gap = max(gap - max(round(0.03 * steps), 1), round(0.06 * steps), 1)
        place += gap
    return frozenset(marks)
