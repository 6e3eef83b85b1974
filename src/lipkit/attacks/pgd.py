r"""Projected gradient ascent in an l2 ball (PGD), with a margin loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lipkit.attacks.ascent import LOSSES, Ball, Box, Model, ascend, clip, like, margin_loss, misclassified


def pgd_l2(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 50,
    restarts: int = 1,
    box: Box = (0.0, 1.0),
    loss: str = "margin",
    generator: torch.Generator | None = None,
    stop_early: bool = True,
    step_size: float | None = None,
    random_start: bool = False,
) -> Tensor:
    r"""Adversarial examples in the l2 ball of radius ``eps`` around each sample.

    From a start ``x_0``

        x_{k+1} = P( x_k + alpha_k g_k / ||g_k|| ),    alpha_k = eps (0.01 + 0.99 (1 + cos(pi k / steps)) / 2)

    where ``g_k`` is the gradient of the loss and ``P`` the Euclidean projection on ball and box. A vanishing or
    non-finite gradient is replaced by a random direction.

    The first start is the sample itself, with the margin loss ``max_{i != t} y_i - y_t``. Each further start is a
    random point of the ball; with the margin loss it raises ``y_i - y_t`` for one class i, the second start for the
    largest wrong logit at the sample, the third for the next, and so on: the maximum over classes has local maxima
    even for a linear model, so ``restarts`` = K covers all of them. Cross-entropy alone overstates robustness: its
    gradient vanishes where the margin is large.

    **Guarantee.** Every returned point satisfies ``||x' - x|| <= eps``, measured in float64 on the returned numbers,
    and lies in ``box``. Not finding an adversarial example proves nothing.

    Args:
        model: any callable from (N, ...) to logits (N, K >= 2) that treats samples independently (modules: ``eval()``).
        x: (N, ...) float32 or float64.
        y: (N,) int64 labels.
        eps: radius, one number or (N,), in units of the input's l2 norm.
        steps: gradient steps per restart.
        restarts: number of starts, at least 1.
        box: smallest and largest value of an input entry, or None.
        loss: ``"margin"`` or ``"ce"``.
        generator: randomness of starts and directions; None is a CPU generator with seed 0. The global random state is
            never used. A CPU generator gives the same start on every device.
        stop_early: leave a sample alone once it is misclassified (one that already is costs a single evaluation);
            False keeps on raising the loss, as adversarial training wants it.
        step_size: the same length for all steps, as a share of eps; None for the cosine above.
        random_start: whether the first start is a random point of the ball too.

    Returns:
        (N, ...), the best point found for each sample: a misclassified one if there was one, else the one of largest
        loss. Same dtype and device as ``x``.

    Raises:
        OptionError: an option outside the documented values, or ``x`` outside ``box``.
        ShapeError: ``y`` or ``eps`` does not fit ``x``.

    >>> x, y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    >>> attacked = pgd_l2(lambda x: x * torch.tensor([1.0, -1.0]) + 0.1, x, y, 0.3, steps=10)
    >>> torch.dist(attacked, torch.tensor([[0.5 - 0.3 / 2**0.5] * 2])).item() < 1e-3
    True

    References: Madry et al., "Towards deep learning models resistant to adversarial attacks", ICLR 2018, Sec. 2.1;
    Carlini & Wagner, "Towards evaluating the robustness of neural networks", S&P 2017, Sec. V (loss f6); Gowal et al.,
    "An alternative surrogate loss for PGD-based adversarial testing", 2019 (one class after the other).
    """
    return ascend(
        BALL, model, x, y, eps, steps=steps, restarts=restarts, box=box, loss=loss, generator=generator,
        stop_early=stop_early, step_size=step_size, random_start=random_start,
    )  # fmt: skip


def project(point: Tensor, centre: Tensor, radius: Tensor, box: Box) -> Tensor:
    r"""Euclidean projection on the l2 ball around ``centre`` and the box, then kept inside both after rounding.

    The projection is ``clip(c + s (p - c))`` with the largest ``s <= 1`` within the radius. Its squared length
    ``sum_j min(s^2 d_j^2, room_j^2)`` is concave and piecewise linear in ``s^2``, so Newton's method from the scaling
    without box grows towards it and never passes it.

    Args:
        point, centre: (N, ...); ``centre`` lies in ``box``.
        radius: (N,) float64.
        box: (low, high) or None.

    Returns:
        (N, ...) with ``||result - centre|| <= radius`` in float64; ``centre`` itself where the radius is too small for
        any other number of this dtype.

    >>> inside = project(torch.tensor([[0.5, 4.0]]), torch.zeros(1, 2), torch.tensor([0.8]).double(), (0, 0.7))
    >>> [round(value, 4) for value in inside[0].tolist()]
    [0.3873, 0.7]
    """
    step = (point - centre).flatten(1)
    aim = radius * (1 - 1e-7)  # so that the rounding of the sum stays inside, as a rule
    share = (aim / norms(point, centre).clamp_min(1e-30)).clamp_max(1.0).to(step)
    if box is not None and bool((share < 1).any()):
        room = torch.where(step > 0, box[1] - centre.flatten(1), centre.flatten(1) - box[0])
        size = aim.square().to(step)
        square = share.square()
        for _ in range(6):
            free = square[:, None] * step.square() < room.square()
            length = torch.where(free, square[:, None] * step.square(), room.square()).sum(dim=1)
            slope = torch.where(free, step.square(), 0).sum(dim=1).clamp_min(1e-30)
            square = (square + (size - length).clamp_min(0) / slope).clamp_max(1.0)
        share = square.sqrt()
    result = clip(centre + (step * share[:, None]).view_as(centre), box)
    # shrinking towards a centre inside the box never leaves it; the extra part covers the rounding of the sum
    for attempt in range(8):
        length = norms(result, centre)
        outside = length > radius
        if not bool(outside.any()):
            return result
        smaller = radius / length.clamp_min(1e-30) * (1 - 10.0 ** (attempt - 8))
        shrunk = clip(centre + (result - centre) * like(smaller, result), box)
        result = torch.where(like(outside, result), shrunk, result)
    return torch.where(like(norms(result, centre) > radius, result), centre, result)


def norms(point: Tensor, centre: Tensor) -> Tensor:
    """(N,) l2 distances, computed in float64 from the numbers as they are (on the CPU where a device has none).

    >>> norms(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).tolist()
    [5.0]
    """
    if point.device.type == "mps":
        return norms(point.cpu(), centre.cpu()).float().to(point.device)
    return torch.linalg.vector_norm((point.double() - centre.double()).flatten(1), dim=1)


def _unit(gradient: Tensor, generator: torch.Generator) -> Tensor:
    """Each sample's gradient at length 1; a random direction where it has none."""
    flat = gradient.flatten(1)
    scaled = flat / flat.abs().amax(dim=1, keepdim=True)  # first to size 1: tiny gradients must not underflow
    length = scaled.norm(dim=1)
    bad = ~length.isfinite()
    if bool(bad.any()):
        noise = _normal(flat, generator)
        scaled = torch.where(bad[:, None], noise, scaled)
        length = scaled.norm(dim=1)
    return (scaled / length[:, None]).view_as(gradient)


def _random_ball(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in the unit ball: a uniform direction times U^(1/n)."""
    noise = _normal(like.flatten(1), generator)
    size = torch.rand(len(like), 1, generator=generator, device=generator.device).to(like) ** (1 / noise.shape[1])
    return (noise / noise.norm(dim=1, keepdim=True) * size).view_as(like)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device=generator.device).to(like)


BALL = Ball(direction=_unit, random=_random_ball, project=project, distance=norms)

__all__ = ["LOSSES", "Box", "Model", "margin_loss", "misclassified", "norms", "pgd_l2", "project"]
