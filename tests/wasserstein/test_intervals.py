"""The intervals against SciPy's tests, their formulas, and by how often they cover."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from lipkit.wasserstein.estimate import Moments, bernstein, moments, student


def pair(a: np.ndarray, b: np.ndarray) -> tuple[Moments, Moments]:
    return moments(torch.from_numpy(a)), moments(torch.from_numpy(b))


@pytest.mark.parametrize(("n", "m"), [(5, 40), (30, 30), (2, 3)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_student_is_welch(n, m, confidence):
    rng = np.random.default_rng(n)
    a, b = rng.normal(1, 2, n), rng.normal(0, 0.5, m)
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(confidence)
    half = student([pair(a, b)], confidence)
    middle = a.mean() - b.mean()
    assert (middle - half, middle + half) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_folds_average_their_half_widths():
    rng = np.random.default_rng(0)
    pairs = [pair(rng.normal(size=n), rng.normal(size=2 * n)) for n in (10, 20, 30)]
    assert student(pairs, 0.9) == pytest.approx(np.mean([student([one], 0.9) for one in pairs]), rel=1e-12)


@pytest.mark.thorough
def test_folds_whose_critics_learnt_each_others_noise_are_covered():
    """P = Q and f_k linear, along the mean difference of the other fold: the errors of both folds are equal in sign."""
    rng = np.random.default_rng(2)
    runs, n, hits, naive = 600, 40, 0, 0
    for _ in range(runs):
        x, y = rng.normal(size=(2, n, 3)), rng.normal(size=(2, n, 3))
        shift = x.mean(1) - y.mean(1)
        direction = shift[::-1] / np.linalg.norm(shift[::-1], axis=1, keepdims=True)
        pairs = [pair(x[k] @ direction[k], y[k] @ direction[k]) for k in range(2)]
        value = sum(a.mean - b.mean for a, b in pairs) / 2
        half = student(pairs, 0.9)
        hits += abs(value) <= half
        naive += abs(value) <= half / 2**0.5
    assert hits / runs >= 0.88
    assert naive / runs < 0.85  # adding squares would not have been honest


def test_bernstein_is_the_formula():
    rng = np.random.default_rng(0)
    a, b, c, d = (rng.uniform(size=n) for n in (10, 20, 30, 40))
    log = np.log(2 * 4 * 2 / 0.1)
    expected = 0.0
    for v in (a, b, c, d):
        expected += np.sqrt(2 * v.var(ddof=1) * log / len(v)) + 7 * 1.5 * log / (3 * (len(v) - 1))
    assert bernstein([pair(a, b), pair(c, d)], 0.9, 1.5) == pytest.approx(expected / 2, rel=1e-12)


@pytest.mark.thorough
def test_coverage():
    """1000 draws of a skewed law: Bernstein never misses more than it says, Student about as often as it says."""
    rng = np.random.default_rng(1)
    runs, n, p = 1000, 40, 0.1
    hits = {"student": 0, "bernstein": 0}
    for _ in range(runs):
        a, b = (rng.random(n) < p).astype(float), (rng.random(n) < 0.5).astype(float)
        middle = a.mean() - b.mean()
        hits["student"] += abs(middle - (p - 0.5)) <= student([pair(a, b)], 0.8)
        hits["bernstein"] += abs(middle - (p - 0.5)) <= bernstein([pair(a, b)], 0.8, 1.0)
    assert hits["bernstein"] / runs >= 0.8
    assert abs(hits["student"] / runs - 0.8) < 0.05  # four standard errors of the share


def test_wider_for_more_confidence_and_a_larger_range():
    rng = np.random.default_rng(0)
    one = [pair(rng.normal(size=9), rng.normal(size=9))]
    assert student(one, 0.9) < student(one, 0.99)
    assert bernstein(one, 0.9, 1.0) < bernstein(one, 0.99, 1.0) < bernstein(one, 0.99, 2.0)


def test_no_variance():
    point = (Moments(5, 1.0, 0.0), Moments(5, 0.0, 0.0))
    assert student([point], 0.95) == 0
    assert bernstein([point], 0.95, 1.0) > 0  # a sample without variance proves nothing about the law
