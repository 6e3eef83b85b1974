r"""Carlini and Wagner's attack: Adam minimises l2 distance and margin in one objective, whose weight is searched."""

from __future__ import annotations

import torch
from torch import Tensor

from lipkit.attacks.ascent import Box, Model, check_inputs, clip, like, misclassified
from lipkit.attacks.balls import norms
from lipkit.attacks.fab import shrink
from lipkit.attacks.losses import correct_samples, nearest_rivals, rise, warn_where_flat
from lipkit.errors import finite
from lipkit.linalg.matrices import check_positive

# The search starts inside this fraction of the box, because atanh(1) is infinite.
_INSIDE = 1 - 1e-6


def carlini_wagner(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 200,
    searches: int = 9,
    rate: float = 0.01,
    weight: float = 1e-2,
    confidence: float = 0.0,
    targets: int = 2,
    box: Box = (0.0, 1.0),
) -> Tensor:
    r"""The closest adversarial example for each sample that Carlini and Wagner's objective finds; l2.

        minimise over w    ||x'(w) - x||^2 + c max( y_t(x') - y_i(x'), -confidence )

    with ``x'(w) = middle + half width tanh(w)``, which never leaves the box, or ``x' = w`` without a box. The weight c
    of each sample is searched: halved where the attack succeeded, multiplied by 10 until it does, then bisected. The
    target i is the class whose boundary is nearest by the gradients at the sample, then the next one. At the end
    bisection moves the closest point seen to the boundary.

    **Guarantee.** A returned point that is not the sample was seen to be misclassified, and lies in ``box``. Its
    distance is an upper bound of the distance to the boundary. The sample itself is returned where it is misclassified
    already or nothing was found.

    **Cost.** ``targets searches steps`` gradients. It draws nothing at random.

    Args:
        model, x, y, box: as in `lipkit.attacks.pgd`, which names the errors.
        steps: of Adam for each weight.
        searches: values of the weight c that are tried.
        rate: learning rate of Adam, for x' in units of half the width of the box (1 without a box).
        weight: the first c.
        confidence: margin, in logits, that the objective asks for.
        targets: how many classes are tried.

    Raises:
        OptionError, ShapeError: see `lipkit.attacks.pgd`.

    >>> model, x = lambda x: torch.stack([1 - x[:, 0], x[:, 1]], 1), torch.zeros(1, 2)
    >>> near = carlini_wagner(model, x, torch.tensor([0]), box=None)
    >>> 0 <= torch.linalg.vector_norm(near).item() - 0.5**0.5 < 0.01
    True

    References: Carlini & Wagner, "Towards evaluating the robustness of neural networks", S&P 2017, Sec. V and VI.A;
    Kingma & Ba, "Adam", ICLR 2015, algorithm 1.
    """
    check_inputs(x, y, 0.0, steps, 1, box)
    check_positive(searches=searches, targets=targets)
    rate, weight = finite("rate", rate, positive=True), finite("weight", weight, positive=True)
    confidence = finite("confidence", confidence, least=0)
    x = x.detach()
    best = x.clone()
    index, logits = correct_samples(model, x, y)
    if not len(index):
        return best
    centre, label = x[index], y[index]
    order = nearest_rivals(model, centre, label, logits)
    near, distance = centre, torch.full((len(index),), torch.inf, dtype=torch.float64, device=x.device)
    for target in order[:, :targets].unbind(dim=1):
        near, distance = _search(
            model, centre, label, target, near, distance, steps, searches, rate, weight, confidence, box
        )
    found = distance.isfinite()
    warn_where_flat("Carlini-Wagner", model, centre[~found], label[~found])
    if bool(found.any()):
        best[index[found]] = shrink(model, centre[found], near[found], label[found])
    return best


def _search(
    model: Model, centre: Tensor, label: Tensor, target: Tensor, near: Tensor, distance: Tensor, steps: int,
    searches: int, rate: float, weight: float, confidence: float, box: Box,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attack one ``target`` class for each sample; return the closest points so far, and their distances."""
    middle, half = (0.0, 1.0) if box is None else ((box[0] + box[1]) / 2, (box[1] - box[0]) / 2)
    origin = (centre - middle) / half
    begin = origin if box is None else torch.atanh(origin * _INSIDE)
    low, high = torch.zeros_like(distance), torch.full_like(distance, torch.inf)
    c = torch.full_like(distance, weight)
    for _ in range(searches):
        free = begin.clone()
        mean, square = torch.zeros_like(free), torch.zeros_like(free)
        done = torch.zeros_like(distance, dtype=torch.bool)  # any point of this search fooled the model
        for step in range(1, steps + 1):
            with torch.enable_grad():
                free = free.detach().requires_grad_()
                scaled = free if box is None else torch.tanh(free)
                point = clip(middle + half * scaled, box)  # the sum may round out of the box
                logits = model(point)
                gap = (-rise(logits, label, "margin", target)).clamp_min(-confidence)
                # Squared distance in units of the half width; the search for c compensates for the unit.
                far = (scaled - origin).flatten(1).square().sum(dim=1)
                slope = torch.autograd.grad(far.sum() + (c.to(gap) * gap).sum(), free)[0]
            wrong = misclassified(logits.detach(), label)
            size = norms(point.detach(), centre).to(distance)
            closer = wrong & (size < distance)
            near = torch.where(like(closer, near), point.detach(), near)
            distance = torch.where(closer, size, distance)
            done |= wrong
            # Adam, written out: torch.optim takes seconds to import.
            slope = torch.where(slope.isfinite(), slope, 0.0)
            mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope.square()
            free = free.detach() - rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        high = torch.where(done, torch.minimum(high, c), high)
        low = torch.where(done, low, torch.maximum(low, c))
        c = torch.where(high.isfinite(), (low + high) / 2, 10 * c)  # bisection once both ends are known
    return near, distance
