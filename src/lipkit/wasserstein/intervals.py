r"""Confidence intervals of a difference of means, :math:`E\,g(x) - E\,g(y)`, from two independent samples of g."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import stdtrit
from torch import Tensor

from lipkit.certificates.intervals import check_confidence
from lipkit.errors import OptionError, finite


@dataclass(frozen=True)
class Moments:
    """Number, mean and unbiased variance of a sample."""

    count: int
    mean: float
    variance: float


def moments(values: Tensor) -> Moments:
    """The moments of an (n,) tensor of two values or more, in float64.

    >>> import torch
    >>> moments(torch.tensor([1.0, 3.0]))
    Moments(count=2, mean=2.0, variance=2.0)
    """
    if len(values) < 2:
        raise OptionError(f"expected at least 2 values for a variance, got {len(values)}")
    values = values.double()
    return Moments(len(values), float(values.mean()), float(values.var()))


def student(pairs: list[tuple[Moments, Moments]], confidence: float) -> float:
    r"""Half the width of Welch's interval for the average over K folds of the difference of two means.

    .. math:: \frac1K \sum_k t_{\nu_k,(1 + c)/2} \sqrt{\frac{v_k}{n_k} + \frac{w_k}{m_k}}

    for sizes n, m, variances v, w, c = ``confidence``, and Welch and Satterthwaite's degrees of freedom :math:`\nu_k`.
    Standard deviations of folds are added, not their squares, because the errors of two folds are dependent: each
    critic was trained on the other's samples. If P = Q the two errors even agree (both are the product of the folds'
    random differences), and the root of summed squares would be too small by a factor of :math:`\sqrt2`.

    Guarantee:
        None for a finite sample: the coverage is at least c in the limit of large samples, if the variances are finite.

    >>> round(student([(Moments(100, 1.0, 1.0), Moments(100, 0.0, 1.0))], 0.95), 4)
    0.2789

    References:
        Welch, "The generalization of 'Student's' problem when several different population variances are involved",
        Biometrika 34 (1947).
    """
    check_confidence(confidence)
    half = 0.0
    for pair in pairs:
        terms = [(m.variance / m.count, m.count - 1) for m in pair]  # squared error, degrees of freedom
        if (total := sum(t for t, _ in terms)) != 0:
            # Divide by the total first, so that no square under- or overflows.
            freedom = 1 / sum((t / total) ** 2 / df for t, df in terms)
            half += float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(total)
    return half / len(pairs)


def bernstein(pairs: list[tuple[Moments, Moments]], confidence: float, width: float) -> float:
    r"""Half the width of an interval that is proved for every sample size, if the critic has a bounded range.

    .. math:: \frac1K \sum_k \sum_{v \in \{v_k, w_k\}}
              \sqrt{\frac{2 v \ln(2/\delta)}{n}} + \frac{7 D \ln(2/\delta)}{3 (n - 1)},
              \qquad \delta = \frac{1 - c}{4 K}

    Each of the 2 K means exceeds its bound with probability at most delta on either side (Maurer and Pontil). The union
    bound adds these probabilities, so the folds need not be independent.

    Guarantee:
        Covers :math:`E f(x) - E f(y)`, averaged over the folds, with probability at least c, whatever the
        distributions, if the held-out samples are independent draws and each critic f takes values in an interval of
        length D (``width``).

    >>> round(bernstein([(Moments(100, 1.0, 0.0), Moments(100, 0.0, 0.0))], 0.95, 1.0), 4)
    0.2392

    References:
        Maurer & Pontil, "Empirical Bernstein bounds and sample-variance penalization", COLT 2009, theorem 4.
    """
    check_confidence(confidence)
    width = finite("width", width, positive=True)
    log = math.log(2 / ((1 - confidence) / (4 * len(pairs))))  # union bound: K folds, two means, two sides
    means = [m for pair in pairs for m in pair]
    each = (math.sqrt(2 * m.variance * log / m.count) + 7 * width * log / (3 * (m.count - 1)) for m in means)
    return sum(each) / len(pairs)
