from __future__ import annotations

import math

import numpy as np
import pytest

from lipkit.errors import OptionError
from lipkit.training import schedules
from lipkit.training.options import chosen


def test_default_is_the_papers_schedule_in_epochs():
    epochs, lr = 100, 0.01
    reference = np.interp(np.arange(0, 101), [0, 40, 80, 100], [0, lr, lr / 20, 0])
    found = [lr * schedules.piecewise_linear(e / epochs) for e in range(101)]
    np.testing.assert_allclose(found, reference, rtol=1e-12, atol=1e-15)


def test_multistep_drops_at_the_milestones():
    found = [schedules.multistep(e / 200, milestones=(50 / 200, 150 / 200)) for e in (0, 49, 50, 149, 150, 199)]
    assert found == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_cosine_with_warmup_and_floor():
    rate = chosen("schedule", "cosine", warmup=0.1, floor=0.2)
    assert rate(0.05) == pytest.approx(0.5)
    assert rate(0.1) == pytest.approx(1)
    assert rate(0.55) == pytest.approx(0.6)
    assert rate(1.0) == pytest.approx(0.2)
    assert schedules.cosine(0.25) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))


def test_every_schedule_stays_in_0_1():
    for name in schedules.SCHEDULES:
        rate = chosen("schedule", name)
        assert all(0 <= rate(i / 97) <= 1 for i in range(98)), name
        assert max(rate(i / 1000) for i in range(1001)) == pytest.approx(1), name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", {}, "expected schedule as one of piecewise_linear, .*got 'linear'"),
        ("constant", {"gamma": 1}, r"among \(none\), got 'gamma'"),
        ("piecewise_linear", {"knots": (0, 1)}, "as many factors as knots, at least 2, got 4 and 2"),
        ("piecewise_linear", {"knots": (0, 0.5, 0.5, 1)}, "strictly ascending from 0 to 1"),
        ("piecewise_linear", {"knots": (0.1, 0.4, 0.5, 1)}, "strictly ascending from 0 to 1"),
        ("piecewise_linear", {"knots": (0, 0.4, 0.5, 0.9)}, "strictly ascending from 0 to 1"),
        ("piecewise_linear", {"knots": (0, 0.4, math.nan, 1)}, "strictly ascending from 0 to 1"),
        ("piecewise_linear", {"factors": (0, 1, -1, 0)}, "expected finite factors >= 0"),
        ("piecewise_linear", {"factors": (0, 1, math.inf, 0)}, "expected finite factors >= 0"),
        ("multistep", {"milestones": (0.5, 0.2)}, "ascending milestones"),
        ("multistep", {"milestones": (50, 150)}, r"milestones in \(0, 1\), got \[50, 150\]"),
        ("multistep", {"gamma": 0}, "gamma: expected a positive finite number"),
        ("multistep", {"gamma": math.inf}, "gamma: expected a positive finite number"),
        ("cosine", {"warmup": 1}, "expected warmup in"),
        ("cosine", {"floor": 2}, "expected floor in"),
    ],
)
def test_build_refuses(name, options, message):
    with pytest.raises(OptionError, match=message):
        chosen("schedule", name, **options)
