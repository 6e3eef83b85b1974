"""Learning-rate schedules: pure functions from the fraction of training done, in [0, 1], to a factor.

With a budget of time or samples, `Clock` gives that fraction; it also limits the time of one call.
"""

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from lipkit.errors import OptionError, finite
from lipkit.text import printable

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
    finite("gamma", gamma, positive=True)
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


Request = Literal["", "save", "stop"]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?)\s*(s|m|min|h)?\s*(cpu|wall)?", re.ASCII)
_SAMPLES = re.compile(r"(\d+(?:\.\d*)?)\s*([kM]?)\s*(?:images|samples)", re.ASCII)


def parse_budget(text: str) -> tuple[float, Literal["cpu", "wall", "samples"]]:
    """A budget as (seconds, clock) or (samples, "samples"); ``ValueError`` for another text, or less than one sample.

    A time is a number, a unit (s, m or min, h; default s) and a clock: cpu (CPU time of this process, the default) or
    wall. Samples are written as in 1.5M images; "images" and "samples" mean the same.

    >>> parse_budget("400s"), parse_budget("1.5h"), parse_budget("10 min wall"), parse_budget("1.5M images")
    ((400.0, 'cpu'), (5400.0, 'cpu'), (600.0, 'wall'), (1500000.0, 'samples'))
    """
    if match := _SAMPLES.fullmatch(text.strip()):
        amount = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]]  # thousands, millions
        if 1 <= amount < math.inf:
            return amount, "samples"
    elif match := _TIME.fullmatch(text.strip()):
        amount = float(match[1]) * _UNITS[match[2] or ""]
        if 0 < amount < math.inf:
            return amount, "wall" if match[3] == "wall" else "cpu"
    examples = "400s, 10min, 1h or 1h wall, or a number of samples such as 1.5M images"
    raise ValueError(f"expected a time such as {examples}, got {printable(repr(text), 80)}")


class Clock:
    """Limits of time and samples: the budget that the schedule follows, and when to save or stop.

    A budget of time counts from ``since`` to `spend` only, so evaluations and checkpoints are free. Steps that an
    interruption lost do not count, because they are made again. All processes use the clock of the first one, because
    they must save and stop together.

    Attributes:
        amount, unit: size of the budget, infinite without one, and its unit.
        used: how much of the budget is spent, resumes included; the same in all processes. 0 without a budget.
        timed: whether the budget is one of time: what a step costs is known only after it.
        since: reading of ``now`` up to which ``used`` counts. saved: time of the last checkpoint.
    """

    def __init__(
        self, fabric: Any, budget: str | None, max_minutes: float | None, checkpoint_seconds: float | None
    ) -> None:
        self.fabric = fabric
        self.amount, self.unit = (math.inf, "") if budget is None else parse_budget(budget)
        self.timed, self.used, self.since = self.unit in ("cpu", "wall"), 0.0, 0.0
        self.now = time.process_time if self.unit == "cpu" else time.monotonic
        self.saved = time.monotonic()
        self.end = math.inf if max_minutes is None else self.saved + 60 * max_minutes
        self.pause = math.inf if checkpoint_seconds is None else checkpoint_seconds

    def spend(self, samples: int) -> None:
        """Count a step of ``samples`` samples, and the time since ``since``, which becomes now."""
        if self.unit == "samples":
            self.used += samples
        elif self.timed:
            before, self.since = self.since, self.now()
            self.used = self._of_first(self.used + self.since - before)

    def due(self) -> Request:
        """``"stop"`` after ``max_minutes``, ``"save"`` if ``checkpoint_seconds`` have passed, else ``""``."""
        if min(self.end, self.pause) == math.inf:
            return ""  # saves a broadcast
        now = time.monotonic()
        return self._of_first("stop" if now >= self.end else "save" if now - self.saved >= self.pause else "")

    def _of_first(self, value: Any) -> Any:
        return self.fabric.broadcast(value, src=0) if self.fabric.world_size > 1 else value
