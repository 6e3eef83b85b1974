"""Shares of a finite test set, with exact binomial confidence intervals."""

from __future__ import annotations

import dataclasses
import math

from scipy.special import betaincinv
from torch import Tensor

from lipkit.errors import OptionError


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
    """The share of True in a (N,) bool tensor.

    >>> import torch
    >>> share(torch.tensor([True, True, False, True])).value
    0.75
    """
    count, total = int(hits.sum()), len(hits)
    return Share(count, total, *clopper_pearson(count, total, confidence))


def clopper_pearson(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    r"""Two-sided Clopper-Pearson interval of a binomial share: it covers the true share with at least ``confidence``.

    The ends are the ``a/2`` and ``1 - a/2`` quantiles (``a = 1 - confidence``) of ``Beta(k, n - k + 1)`` and
    ``Beta(k + 1, n - k)``, for k of n; 0 and 1 where k is 0 or n.

    Args:
        count: k, how many of the samples.
        total: n, how many samples, drawn independently.
        confidence: between 0 and 1.

    Raises:
        OptionError: not ``0 <= count <= total``, or ``confidence`` outside (0, 1).

    >>> [round(end, 4) for end in clopper_pearson(95, 100)]
    [0.8872, 0.9836]

    Reference: Clopper & Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
    Biometrika 26 (1934).
    """
    if not 0 <= count <= total:
        raise OptionError(f"expected 0 <= count <= total, got count={count}, total={total}")
    if not 0 < confidence < 1:
        raise OptionError(f"expected a confidence between 0 and 1, got {confidence}")
    tail = (1 - confidence) / 2
    low = float(betaincinv(count, total - count + 1, tail)) if count > 0 else 0.0
    high = float(betaincinv(count + 1, total - count, 1 - tail)) if count < total else 1.0
    return low, high
