r"""Projected gradient ascent in an l2 ball (PGD), with a margin loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import OptionError, ShapeError

Model = Callable[[Tensor], Tensor]
Box = tuple[float, float] | None

LOSSES = ("margin", "ce")


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
    radius = _check(x, y, eps, steps, restarts, box, loss)
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
        if restart > 0:
            point = project(centre + _random_ball(centre, generator) * _like(size, centre), centre, size, box)
        for step in range(steps + 1):
            if not len(index):
                break
            value, logits, gradient = _loss_and_gradient(model, point, y[index], loss, target, gradient=step < steps)
            remember(index, point, logits, value)
            if rivals is None and loss == "margin" and restarts > 1:  # the first evaluation, of all samples as they are
                rivals = logits.scatter(1, y[:, None], -math.inf).argsort(dim=1, descending=True)[:, :-1]
            if step == steps:
                break
            if stop_early and bool(fooled[index].any()):
                keep = ~fooled[index]
                index, centre, size = index[keep], centre[keep], size[keep]
                point, gradient = point[keep], gradient[keep]
                target = None if target is None else target[keep]
            length = 0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2
            direction = _unit(gradient, generator)
            point = project(point + direction * _like(size * length, point), centre, size, box)
    return best


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
    result = centre + (step * share[:, None]).view_as(centre)
    result = result if box is None else result.clamp(*box)
    # shrinking towards a centre inside the box never leaves it; the extra part covers the rounding of the sum
    for attempt in range(8):
        length = norms(result, centre)
        outside = length > radius
        if not bool(outside.any()):
            return result
        smaller = radius / length.clamp_min(1e-30) * (1 - 10.0 ** (attempt - 8))
        shrunk = centre + (result - centre) * _like(smaller, result)
        shrunk = shrunk if box is None else shrunk.clamp(*box)
        result = torch.where(_like(outside, result), shrunk, result)
    return torch.where(_like(norms(result, centre) > radius, result), centre, result)


def norms(point: Tensor, centre: Tensor) -> Tensor:
    """(N,) l2 distances, computed in float64 from the numbers as they are (on the CPU where a device has none).

    >>> norms(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).tolist()
    [5.0]
    """
    if point.device.type == "mps":
        return norms(point.cpu(), centre.cpu()).float().to(point.device)
    return torch.linalg.vector_norm((point.double() - centre.double()).flatten(1), dim=1)


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


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """(N,) values shaped to broadcast over (N, ...), in the tensor's dtype unless they are bool."""
    shaped = values.view(-1, *[1] * (tensor.ndim - 1))
    return shaped if values.dtype == torch.bool else shaped.to(tensor.dtype)


def _check(x: Tensor, y: Tensor, eps: float | Tensor, steps: int, restarts: int, box: Box, loss: str) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64) or x.ndim < 2:
        raise OptionError(f"expected float32 or float64 inputs of shape (N, ...), got {x.dtype} {tuple(x.shape)}")
    if y.shape != x.shape[:1]:
        raise ShapeError(f"expected {len(x)} labels of shape ({len(x)},), got {tuple(y.shape)}")
    if steps < 1 or restarts < 1:
        raise OptionError(f"expected steps >= 1 and restarts >= 1, got steps={steps}, restarts={restarts}")
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
