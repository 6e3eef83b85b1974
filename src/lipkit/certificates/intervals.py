"""Fractions of a finite test set, with exact binomial confidence intervals."""

import dataclasses
import math
import warnings
from collections.abc import Iterable
from numbers import Real
from typing import Any

from scipy.special import betaincinv
from torch import Tensor

from lipkit.errors import OptionError, finite, interval


@dataclasses.dataclass(frozen=True)
class Share:
    """``count`` of ``total`` samples, with the two-sided Clopper-Pearson interval ``low`` to ``high``."""

    count: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """``count / total``; NaN for no samples."""
        return self.count / self.total if self.total else math.nan


def share(hits: Tensor, confidence: float = 0.95) -> Share:
    """The fraction of True in a (N,) bool tensor, with its interval."""
    count, total = int(hits.sum()), len(hits)
    return Share(count, total, *clopper_pearson(count, total, confidence))


def clopper_pearson(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    r"""Two-sided Clopper-Pearson interval: it holds the true fraction with probability at least ``confidence``.

    The ends are the ``a/2`` and ``1 - a/2`` quantiles (``a = 1 - confidence``) of ``Beta(k, n - k + 1)`` and
    ``Beta(k + 1, n - k)``, for k = ``count`` of n = ``total`` independent samples; 0 and 1 where k is 0 or n.

    >>> [round(end, 4) for end in clopper_pearson(95, 100)]
    [0.8872, 0.9836]

    Reference: Clopper & Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
    Biometrika 26 (1934).
    """
    if not 0 <= count <= total:
        raise OptionError(f"expected 0 <= count <= total, got count={count}, total={total}")
    check_confidence(confidence)
    tail = (1 - confidence) / 2
    low = float(betaincinv(count, total - count + 1, tail)) if count > 0 else 0.0
    high = float(betaincinv(count + 1, total - count, 1 - tail)) if count < total else 1.0
    return low, high


def check_confidence(confidence: object) -> None:
    """Raise `OptionError` unless ``confidence`` is a number above 0 and below 1."""
    if not (isinstance(confidence, Real) and 0 < float(confidence) < 1):
        raise OptionError(f"expected a confidence between 0 and 1, got {confidence!r}")


LARGE = 8.0
"""Above this radius of images in [0, 1], a forgotten /255 is likelier than the radius."""


def as_radii(name: str, values: Any) -> tuple[float, ...]:
    """Several radii as floats; ``OptionError`` unless all are finite and at least 0, and for a single number."""
    if not isinstance(values, Iterable) or isinstance(values, str) or getattr(values, "ndim", 1) == 0:
        raise OptionError(f"{name}: expected several radii, such as (36 / 255,), got {values!r}")
    return tuple(finite(name, value, least=0) for value in values)


def check_radii(
    radii: Iterable[float],
    input_shape: tuple[int, ...],
    input_range: tuple[float, float] | None,
    *,
    seen: tuple[float, float] | None = None,
    name: str = "eps",
    norm: str = "l2",
    large: bool = False,
) -> None:
    r"""Refuse radii that are probably slips: above the diameter of the inputs' domain, or large unless ``large``.

    The diameter of the box ``[low, high]^n`` is ``sqrt(n) (high - low)`` in l2 and ``high - low`` in linf. Without an
    ``input_range``, radii far above the range ``seen`` in the samples give a warning. ``large`` allows radii above
    LARGE (times ``high - low``); ``name`` is what a message calls them.

    >>> check_radii([36 / 255, 1.0], (1, 28, 28), (0.0, 1.0))
    >>> check_radii([36], (1, 28, 28), (0.0, 1.0))
    Traceback (most recent call last):
    lipkit.errors.OptionError: eps: expected at most the diameter 28 of inputs in [0, 1], got 36: did you mean 36/255?
    >>> check_radii([16], (1, 28, 28), (0.0, 1.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lipkit.errors.OptionError: eps: got 16, did you mean 16/255? Inputs are in [0, 1]; a radius above 8 is taken ...
    >>> check_radii([16], (1, 28, 28), (0.0, 1.0), large=True)
    """
    if input_range is None:
        low, high = seen or (-math.inf, math.inf)
        for eps in radii:
            if 0 < LARGE * (high - low) < eps < math.inf and not large:
                hint = f"; did you mean {eps:g}/255?" if 0 <= low <= high <= 1 else ""
                warnings.warn(f"{name}: got {eps:g} for samples in [{low:g}, {high:g}]{hint}", stacklevel=3)
        return
    low, high = interval("input_range", input_range, finite=False)
    diameter = (high - low) * (math.sqrt(math.prod(input_shape)) if norm == "l2" else 1.0)
    for eps in radii:
        meant = f"did you mean {eps:g}/255?"
        if eps > diameter:
            raise OptionError(
                f"{name}: expected at most the diameter {diameter:.6g} of inputs in [{low:g}, {high:g}], got {eps:g}"
                + (f": {meant}" if eps <= 255 * diameter and high <= 1 else "")
            )
        if eps > LARGE * (high - low) and not large:
            raise OptionError(
                f"{name}: got {eps:g}, {meant} Inputs are in [{low:g}, {high:g}]; a radius above "
                f"{LARGE * (high - low):g} is taken with --large-eps (in Python large_eps=True)"
            )
