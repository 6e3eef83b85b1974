r"""A search for what rounding does to a certificate: floating-point inputs just inside a radius, with another argmax.

A radius proved for real arithmetic says nothing of the numbers that a computer gets: close to the boundary the margin
is smaller than the rounding errors of the logits, and floating-point neighbours of one point land on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lipkit.attacks.ascent import Box, Model, check_inputs, clip, margin_loss, misclassified, norms, seeded
from lipkit.attacks.losses import first_logits, value_and_gradient
from lipkit.attacks.minimum_norm import nearest_rivals
from lipkit.errors import OptionError

# Distances from the radius that are tried along the gradient, as powers of two of its share.
_SHARES = 24


@dataclass(frozen=True, eq=False)
class RoundingExample:
    """A point inside the radius that the network, in its own arithmetic and on its own, classifies otherwise.

    Attributes:
        point: of the sample's shape and dtype.
        distance: l2 distance from the sample, the exact one rounded up to float64; it is below the radius.
        prediction: the network's argmax at the point.
    """

    point: Tensor
    distance: float
    prediction: int


def rounding_attack(
    model: Model,
    x: Tensor,
    label: int,
    radius: float,
    *,
    rounds: int = 30,
    candidates: int = 256,
    targets: int = 3,
    box: Box = None,
    generator: torch.Generator | None = None,
) -> RoundingExample | None:
    r"""Search the floating-point numbers just inside ``radius`` for one that the model classifies otherwise.

    For each of the nearest rival classes i, by the gradients g of ``y_i - y_t`` at the sample: points
    ``x + s g / ||g||`` with s a little below the radius, then ``rounds`` of random changes: of some entries by a few
    units in the last place, or small steps along the sphere. The candidates of largest margin loss inside the radius
    are changed further.

    **Guarantee.** A returned point has ``||point - x|| < radius`` in exact (rational) arithmetic on the two tensors as
    they are, lies in ``box``, and the model evaluated on it alone gives another argmax. None proves nothing.

    **Cost.** ``targets (rounds + 1)`` evaluations of ``candidates`` points; the exact norm of one point.

    Args:
        model: any callable from (N, ...) to logits (N, K >= 2) in the dtype of ``x`` (modules: ``eval()``).
        x: one sample, without a batch, float32 or float64, which the model classifies as ``label``.
        label: its class.
        radius: l2 radius that is claimed, finite.
        rounds: of changes, for each rival.
        candidates: points in each round.
        targets: how many rival classes are tried.
        box: smallest and largest value of an input entry, or None.
        generator: randomness; None is a CPU generator with seed 0.

    Raises:
        OptionError: an option outside the documented values, or a sample that is misclassified already.
        ShapeError: the model does not fit ``x``.

    The difference of these two logits is ``2 x_0``, so the sample is 1/4 away from the boundary; but float32 numbers
    near ``2^20`` lie 1/16 apart:

    >>> model = lambda x: torch.stack([2.0**20 - x[:, 0], 2.0**20 + x[:, 0]], 1)
    >>> found = rounding_attack(model, torch.tensor([0.25, 0.0]), 1, 0.25 * (1 - 1e-6))
    >>> found.prediction, found.distance < 0.25 * (1 - 1e-6)
    (0, True)

    References: Jin, Ohrimenko, Rubinstein, "Getting a-round guarantees: floating-point attacks on certified
    robustness", AISec 2024.
    """
    if not (0 <= radius < math.inf):
        raise OptionError(f"expected a radius that is finite and >= 0, got {radius}")
    if candidates < 1 or targets < 1:
        raise OptionError(f"expected candidates >= 1 and targets >= 1, got {candidates} and {targets}")
    sample, y = x.detach()[None], torch.tensor([label], device=x.device)
    check_inputs(sample, y, radius, max(rounds, 1), 1, box)
    logits = first_logits(model, sample, y)
    if bool(misclassified(logits, y)):
        raise OptionError(f"expected a sample that the model classifies as {label}, got {int(logits.argmax())}")
    if radius == 0:
        return None
    generator = seeded(generator)
    for target in nearest_rivals(model, sample, y, logits)[0, :targets]:
        slope = value_and_gradient(model, sample, y, "margin", target[None])[2]
        length = norms(slope, torch.zeros_like(slope))
        if not (0 < float(length) < math.inf):
            continue
        direction = slope.double() / length
        shares = torch.arange(1, _SHARES * (2 if x.dtype == torch.float64 else 1) + 1, device=x.device)
        reach = radius * (1 - 2.0 ** -shares.double())
        points = (sample.double() + reach.view(-1, *[1] * x.ndim) * direction).to(x.dtype)
        for turn in range(rounds + 1):
            points = clip(points, box)
            points = points[_surely_inside(points, sample, radius)]
            if not len(points):
                break
            with torch.no_grad():
                logits = model(points)
            labels = y.expand(len(points))
            wrong = misclassified(logits, labels)
            for candidate in points[wrong][norms(points, sample.expand_as(points))[wrong].argsort()][:16]:
                found = _confirmed(model, candidate, x, label, radius)
                if found is not None:
                    return found
            if turn < rounds:
                best = points[margin_loss(logits, labels).nan_to_num(nan=-math.inf).argsort(descending=True)[:16]]
                points = _changed(best, sample, radius, candidates, generator)
    return None


def exact_distance(point: Tensor, centre: Tensor) -> tuple[Fraction, float]:
    """The squared l2 distance of two tensors, exactly, and the distance rounded up to float64.

    >>> exact_distance(torch.tensor([3.0, 4.0]), torch.zeros(2))
    (Fraction(25, 1), 5.0)
    """
    pairs = zip(point.flatten().tolist(), centre.flatten().tolist(), strict=True)
    square = sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs), Fraction(0))
    # an integer root of the square scaled by 4^shift: 64 bits and more, whatever its size
    shift = max(0, 96 - (square.numerator.bit_length() - square.denominator.bit_length()) // 2)
    root = Fraction(math.isqrt(square.numerator * 4**shift // square.denominator), 2**shift)
    up = float(root)
    while Fraction(up) ** 2 < square:
        up = math.nextafter(up, math.inf)
    return square, up


def _surely_inside(points: Tensor, sample: Tensor, radius: float) -> Tensor:
    """Whether the distance is below the radius, all roundings of its computation allowed for."""
    slack = 1 + (sample.numel() + 8) * torch.finfo(torch.float64).eps
    return norms(points, sample.expand_as(points)) * slack < radius


def _confirmed(model: Model, candidate: Tensor, x: Tensor, label: int, radius: float) -> RoundingExample | None:
    """The candidate if it is misclassified on its own (other batches may be summed otherwise) and exactly inside."""
    with torch.no_grad():
        logits = model(candidate[None])
    if not bool(misclassified(logits, torch.tensor([label], device=x.device))):
        return None
    square, distance = exact_distance(candidate, x)
    if square >= Fraction(radius) ** 2:
        return None
    return RoundingExample(candidate.clone(), distance, int(logits.argmax()))


def _changed(points: Tensor, sample: Tensor, radius: float, count: int, generator: torch.Generator) -> Tensor:
    """``count`` changes of the points: of some entries by up to 64 last places, or of all by a share of the radius.

    A layer that adds a large number leaves the same logits on whole cells of inputs: last places stay in one cell, and
    a step along the boundary that costs a share s^2 / 2 of the margin leads to others. What leaves the ball is pulled
    back along the ray to the sample.
    """
    chosen = torch.randint(len(points), (count,), generator=generator, device=generator.device).to(points.device)
    base = points[chosen]

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device).to(points)

    wide = (count, *[1] * (points.ndim - 1))
    moves = ((2 * uniform(*base.shape) - 1) * 2 ** (6 * uniform(*wide))).round()
    moves = torch.where(uniform(*base.shape) < uniform(*wide), moves, 0.0)
    unit = torch.nextafter(base.abs(), torch.full_like(base, math.inf)) - base.abs()
    noise = torch.randn(base.shape, generator=generator, device=generator.device).to(points)
    noise = noise / noise.flatten(1).norm(dim=1).clamp_min(1e-30).view(wide)
    digits = -math.log2(torch.finfo(points.dtype).eps)
    far = radius * 2 ** -(1 + digits / 2 * uniform(*wide)) * noise
    result = base + torch.where(uniform(*wide) < 0.5, moves * unit, far)
    # kept inside by a random share, down to what the dtype can tell apart
    inside = radius * (1 - 2 ** -(digits / 2 * (1 + uniform(count)))).double()
    length = norms(result, sample.expand_as(result))
    share = (inside / length.clamp_min(1e-300)).view(wide)
    back = (sample.double() + (result.double() - sample.double()) * share).to(points.dtype)
    return torch.where((length >= radius).view(wide), back, result)
