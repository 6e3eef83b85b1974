"""Shared by all attacks: the balls that they stay in, the best points seen, misclassification, margin, checks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lipkit.errors import OptionError, ShapeError, check_choice, check_labels, interval, rewording
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

    def improve(self, index: Tensor, points: Tensor, logits: Tensor, loss: Tensor | None = None) -> None:
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
    with rewording(
        OptionError, f"eps: expected one number or {len(x)} of them, got {type(eps).__name__}: ", TypeError, ValueError
    ):
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


@dataclass(frozen=True)
class Ball:
    """The operations of ascent in the ball of one norm.

    Attributes:
        direction: (gradient (n, ...), generator) -> direction of steepest ascent, of norm 1; random if it vanishes.
        random: (like (n, ...), generator) -> random points of the unit ball.
        nearest: (point, centre, radius (n,), box) -> the nearest point in ball and box, up to rounding.
        project: the same, but inside even after rounding.
        distance: (point, centre) -> (n,) the norm of the difference, in float64.
    """

    direction: Callable[[Tensor, torch.Generator], Tensor]
    random: Callable[[Tensor, torch.Generator], Tensor]
    nearest: Callable[[Tensor, Tensor, Tensor, Box], Tensor]
    project: Callable[[Tensor, Tensor, Tensor, Box], Tensor]
    distance: Callable[[Tensor, Tensor], Tensor]

    def start(self, centre: Tensor, radius: Tensor, box: Box, generator: torch.Generator) -> Tensor:
        """A random point within (n,) ``radius`` of each centre, and in the box."""
        return self.project(centre + self.random(centre, generator) * like(radius, centre), centre, radius, box)


def ball(norm: str) -> Ball:
    """The ball of this norm, ``"l2"`` or ``"linf"``; ``OptionError`` for another."""
    check_choice("norm", norm, BALLS)
    return BALLS[norm]


def norms(point: Tensor, centre: Tensor, order: float = 2) -> Tensor:
    """(N,) distances, l2 or of another order, computed in float64; on the CPU if the device (mps) has no float64."""
    if point.device.type == "mps":
        return norms(point.cpu(), centre.cpu(), order).float().to(point.device)
    return torch.linalg.vector_norm((point.double() - centre.double()).flatten(1), order, dim=1)


def nearest_l2(point: Tensor, centre: Tensor, radius: Tensor, box: Box) -> Tensor:
    """Euclidean projection on the l2 ball around ``centre`` and the box, up to rounding.

    The projection is ``clip(c + s (p - c))`` with the largest ``s <= 1`` within the radius. Its squared length
    ``sum_j min(s^2 d_j^2, room_j^2)`` is concave and piecewise linear in ``s^2``, so Newton's method from the scaling
    without box grows towards the solution and never passes it.

    It ends when the relative error of the squared length is at most 1e-6. ``centre`` (N, ...) lies in ``box``.
    """
    aim = radius * (1 - 4 * torch.finfo(point.dtype).eps)  # usually keeps the rounded sum inside
    step = point - centre
    scale = (aim / norms(point, centre).clamp_min(1e-30)).clamp_max(1.0)
    result = torch.addcmul(centre, step, like(scale, step))
    if box is not None and bool((scale < 1).any()):
        scale_square, aim_square, step_squares = scale.square(), aim.square(), step.square()
        for _ in range(12):  # two or three usually suffice
            clipped = result.clamp(*box)
            missing = aim_square - norms(clipped, centre).square()
            if not bool(((missing > 1e-6 * aim_square) & (scale_square < 1)).any()):
                break
            held = result != clipped  # entries at the box's faces: they cannot grow
            slope = step_squares.masked_fill(held, 0).flatten(1).sum(dim=1).clamp_min(1e-30)
            scale_square = (scale_square + missing.clamp_min(0) / slope).clamp_max(1.0)  # Newton's step, from below
            result = torch.addcmul(centre, step, like(scale_square.sqrt(), step))
    return clip(result, box)


def project_l2(point: Tensor, centre: Tensor, radius: Tensor, box: Box) -> Tensor:
    """`nearest_l2`, but inside the box and with ``||result - centre|| <= radius`` in float64, even after rounding.

    The result is ``centre`` where the dtype has no other point within the radius.
    """
    result = nearest_l2(point, centre, radius, box)
    # Shrinking towards a centre inside the box stays in it. Shrink a little more, to cover the rounding of the sum.
    for attempt in range(8):
        length = norms(result, centre)
        outside = ~(length <= radius)  # NaN, from numbers whose squares overflow, is outside, too
        if not bool(outside.any()):
            return result
        smaller = radius / length.clamp_min(1e-30) * (1 - 10.0 ** (attempt - 8))  # 1e-8 less, at last a tenth
        shrunk = clip(centre + (result - centre) * like(smaller, result), box)
        result = torch.where(like(outside, result), shrunk, result)
    return torch.where(like(norms(result, centre) <= radius, result), result, centre)


def project_linf(point: Tensor, centre: Tensor, radius: Tensor, box: Box) -> Tensor:
    """Clip to the cube around ``centre`` and to the box: the Euclidean projection, inside even after rounding."""
    wide = centre.to(radius.dtype)  # float64, so that the faces are rounded only once, to the dtype of the points
    size = like(radius, wide)
    result = torch.minimum(torch.maximum(point, (wide - size).to(point)), (wide + size).to(point))
    # A face that was rounded outwards: the next number towards the centre is inside.
    outside = (result.to(radius.dtype) - wide).abs() > size
    result = torch.where(outside, torch.nextafter(result, centre), result)
    return clip(result, box)


def _unit(gradient: Tensor, generator: torch.Generator) -> Tensor:
    """Each sample's gradient scaled to length 1; a random direction where it vanishes or is not finite."""
    flat = gradient.flatten(1)
    scaled = flat / flat.abs().amax(dim=1, keepdim=True)  # first to size 1: tiny gradients must not underflow
    length = scaled.norm(dim=1)
    bad = ~length.isfinite()
    if bool(bad.any()):
        scaled = torch.where(bad[:, None], _normal(flat, generator), scaled)  # any direction is as good
        length = scaled.norm(dim=1)
    return (scaled / length[:, None]).view_as(gradient)


def _signs(gradient: Tensor, generator: torch.Generator) -> Tensor:
    """The sign of each entry; random signs for samples whose gradient vanishes or is not finite."""
    flat = gradient.flatten(1)
    bad = ~flat.isfinite().all(dim=1) | (flat == 0).all(dim=1)
    if bool(bad.any()):
        flat = torch.where(bad[:, None], _cube(flat, generator), flat)
    return flat.sign().view_as(gradient)


def _random_ball(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in the unit ball: a uniform direction times U^(1/n)."""
    noise = _normal(like.flatten(1), generator)
    size = torch.rand(len(like), 1, generator=generator, device=generator.device).to(like) ** (1 / noise.shape[1])
    return (noise / noise.norm(dim=1, keepdim=True) * size).view_as(like)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device=generator.device).to(like)


def _cube(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1]^n."""
    return (2 * torch.rand(like.shape, generator=generator, device=generator.device) - 1).to(like)


BALLS = {
    "l2": Ball(_unit, _random_ball, nearest_l2, project_l2, norms),
    "linf": Ball(_signs, _cube, project_linf, project_linf, partial(norms, order=math.inf)),
}
