"""The balls that attacks stay in, by norm: distance, projection, steepest direction, random points."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lipkit.attacks.ascent import Box, clip, like
from lipkit.errors import check_choice


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
        square, size, squares = scale.square(), aim.square(), step.square()
        for _ in range(12):  # two or three usually suffice
            clipped = result.clamp(*box)
            missing = size - norms(clipped, centre).square()
            if not bool(((missing > 1e-6 * size) & (square < 1)).any()):
                break
            held = result != clipped  # entries at the box's faces: they cannot grow
            slope = squares.masked_fill(held, 0).flatten(1).sum(dim=1).clamp_min(1e-30)
            square = (square + missing.clamp_min(0) / slope).clamp_max(1.0)  # Newton's step in s^2, from below
            result = torch.addcmul(centre, step, like(square.sqrt(), step))
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
