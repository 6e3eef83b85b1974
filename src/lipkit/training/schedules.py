"""Learning-rate schedules: pure functions from the fraction of training done, in [0, 1], to a factor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from lipkit.errors import OptionError

Schedule = Callable[[float], float]

KNOTS = (0.0, 2 / 5, 4 / 5, 1.0)
FACTORS = (0.0, 1.0, 1 / 20, 0.0)


def piecewise_linear(fraction: float, *, knots: Sequence[float] = KNOTS, factors: Sequence[float] = FACTORS) -> float:
    """Interpolate linearly between ``factors`` >= 0, one at each of the ``knots``, which ascend strictly from 0 to 1.

    >>> [round(piecewise_linear(e / 10), 3) for e in (0, 2, 4, 6, 8, 9, 10)]
    [0.0, 0.5, 1.0, 0.525, 0.05, 0.025, 0.0]

    Source: Trockman, Kolter, "Orthogonalizing Convolutional Layers with the Cayley Transform", ICLR 2021, Sec. 5; Wang,
    Manchester, "Direct Parameterization of Lipschitz-Bounded Deep Networks", ICML 2023, App. E.
    """
    if len(knots) != len(factors) or len(knots) < 2:
        raise OptionError(f"expected as many factors as knots, at least 2, got {len(factors)} and {len(knots)}")
    if knots[0] != 0 or knots[-1] != 1 or not all(a < b for a, b in itertools.pairwise(knots)):  # refuses NaN, too
        raise OptionError(f"expected knots strictly ascending from 0 to 1, got {list(knots)}")
    if not all(0 <= f < math.inf for f in factors):
        raise OptionError(f"expected finite factors >= 0, got {list(factors)}")
    return float(np.interp(fraction, knots, factors))


def multistep(fraction: float, *, milestones: Sequence[float] = (0.25, 0.75), gamma: float = 0.1) -> float:
    """``gamma ** n`` once n of the ``milestones`` are reached; gamma is positive.

    ``milestones`` are ascending fractions of training in (0, 1): epochs 50 and 150 of 200 are 0.25 and 0.75.

    >>> [round(multistep(f), 4) for f in (0.0, 0.2, 0.25, 0.5, 1.0)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    if not 0 < gamma < math.inf:
        raise OptionError(f"expected a finite gamma > 0, got {gamma}")
    if list(milestones) != sorted(milestones) or any(not 0 < m < 1 for m in milestones):
        raise OptionError(f"expected ascending milestones in (0, 1), got {list(milestones)}")
    return gamma ** sum(fraction >= m for m in milestones)  # a milestone counts at its own step


def cosine(fraction: float, *, warmup: float = 0.0, floor: float = 0.0) -> float:
    """Rise linearly from 0 to 1 until ``warmup`` in [0, 1), then fall along half a cosine to ``floor`` in [0, 1].

    >>> [round(cosine(f), 3) for f in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    if not 0 <= warmup < 1:
        raise OptionError(f"expected warmup in [0, 1), got {warmup}")
    if not 0 <= floor <= 1:
        raise OptionError(f"expected floor in [0, 1], got {floor}")
    if fraction < warmup:
        return fraction / warmup
    done = min(1.0, (fraction - warmup) / (1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def constant(fraction: float) -> float:
    """Always 1.

    >>> constant(0.3)
    1.0
    """
    return 1.0


SCHEDULES: dict[str, Callable[..., float]] = {f.__name__: f for f in (piecewise_linear, multistep, cosine, constant)}
