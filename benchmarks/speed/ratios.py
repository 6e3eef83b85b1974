"""The arithmetic of a measurement: medians over the rounds that two contenders share, and geometric means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

Samples = Sequence[float | None]
"""Seconds of one contender by round; None where it sat a round out."""


def median(samples: Samples) -> float:
    """Median of the rounds that were run; nan if there are none.

    >>> median([3.0, None, 1.0, 2.0])
    2.0
    """
    present = [value for value in samples if value is not None]
    return statistics.median(present) if present else math.nan


def ratio(samples: Samples, reference: Samples) -> float:
    """Median of ``samples`` over median of ``reference``, both over the rounds in which both ran.

    A slow contender runs in the first rounds only; what the machine did later does not enter its ratio.

    >>> ratio([4.0, 6.0, None, None], [2.0, 2.0, 9.0, 9.0])
    2.5
    """
    pairs = [(a, b) for a, b in zip(samples, reference, strict=True) if a is not None and b is not None]
    if not pairs:
        return math.nan
    above, below = (statistics.median(values) for values in zip(*pairs, strict=True))
    return above / below if below > 0 else math.nan


def geometric_mean(values: Iterable[float]) -> float:
    """Exponential of the mean logarithm; nan for no values, or for one that is not positive.

    >>> geometric_mean([0.5, 2.0, 8.0])
    2.0
    """
    logs = [math.log(value) if value > 0 else math.nan for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan
