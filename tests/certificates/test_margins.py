"""Radii against closed forms in exact rational arithmetic, and every way not to get one."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipkit.certificates import margins
from lipkit.errors import OptionError, ShapeError

FINITE = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=True)


def double(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def last_layer(weight: torch.Tensor, constant: float) -> torch.Tensor:
    return margins.last_layer_constants(margins.row_distances(weight), constant)


@pytest.mark.thorough
@settings(deadline=None, max_examples=200)
@given(st.lists(FINITE, min_size=2, max_size=5), st.floats(1e-6, 1e6))
def test_global_radius_is_the_exact_one_rounded_down(values: list[float], constant: float) -> None:
    label = max(range(len(values)), key=values.__getitem__)
    radius = margins.radii(
        double([values]), torch.tensor([label]), margins.global_constants(constant, len(values))
    ).item()
    margin = Fraction(values[label]) - max(Fraction(v) for i, v in enumerate(values) if i != label)
    exact_square = margin**2 / (2 * Fraction(constant) ** 2)
    assert Fraction(radius) ** 2 <= exact_square
    if margin > Fraction(1, 10**12):
        assert Fraction(radius) ** 2 >= exact_square * (1 - Fraction(1, 10**14))


@pytest.mark.thorough
@settings(deadline=None, max_examples=100)
@given(st.lists(FINITE, min_size=4, max_size=4), st.lists(FINITE, min_size=2, max_size=2), st.floats(1e-3, 1e3))
def test_last_layer_radius_is_the_exact_one_rounded_down(
    weight: list[float], values: list[float], constant: float
) -> None:
    label = int(values[1] > values[0])
    pairs = last_layer(double([weight[:2], weight[2:]]), constant)
    radius = margins.radii(double([values]), torch.tensor([label]), pairs).item()
    square = sum((Fraction(weight[j]) - Fraction(weight[2 + j])) ** 2 for j in range(2)) * Fraction(constant) ** 2
    margin = abs(Fraction(values[0]) - Fraction(values[1]))
    if square == 0 or margin == 0:
        assert radius == (math.inf if margin > 0 else 0.0)
    elif math.isfinite(radius):
        assert Fraction(radius) ** 2 * square <= margin**2
        if margin > Fraction(1, 10**9) and square > Fraction(1, 10**9):
            assert Fraction(radius) ** 2 * square >= margin**2 * (1 - Fraction(1, 10**13))


def test_subtraction_and_division_are_each_rounded_down() -> None:
    exact_division = torch.ones(2, 2, dtype=torch.float64)
    below_one = margins.radii(double([[1.0, 1e-17]]), torch.tensor([0]), exact_division).item()
    assert Fraction(below_one) < 1 - Fraction(1e-17)  # in float64, 1 - 1e-17 is 1
    below_tenth = margins.radii(double([[1.0, 0.0]]), torch.tensor([0]), 10 * exact_division).item()
    assert Fraction(below_tenth) < Fraction(1, 10)  # in float64, 1 / 10 is above it


def test_the_smaller_constant_counts_pair_by_pair() -> None:
    logits, label = double([[4.0, 1.0, 0.0]]), torch.tensor([0])
    one = double([[0, 1, 8], [1, 0, 1], [8, 1, 0]])
    two = double([[0, 6, 2], [6, 0, 1], [2, 1, 0]])
    alone = [margins.radii(logits, label, pairs).item() for pairs in (one, two)]
    both = margins.radii(logits, label, torch.minimum(one, two)).item()
    assert alone == pytest.approx([0.5, 0.5], rel=1e-14)
    assert both == pytest.approx(2.0, rel=1e-14)


@pytest.mark.parametrize(
    "logits",
    [
        [1.0, 1.0, 0.0],  # tie
        [0.0, 1.0, 0.0],  # wrong
        [math.nan, 0.0, 0.0],
        [1.0, math.nan, 0.0],
        [math.inf, 0.0, 0.0],
        [1.0, 0.0, -math.inf],
    ],
)
@pytest.mark.parametrize("constant", [0.0, 1e-300, 1.0, math.inf])
def test_no_radius(logits: list[float], constant: float) -> None:
    for pairs in (margins.global_constants(constant, 3), last_layer(torch.eye(3), constant)):
        assert margins.radii(double([logits]), torch.tensor([0]), pairs).item() == 0.0


def test_a_constant_network_is_certified_everywhere_only_by_a_real_margin() -> None:
    pairs = margins.global_constants(0.0, 2)
    logits = double([[1.0, 0.0], [0.0, 0.0]])
    labels = torch.zeros(2, dtype=torch.int64)
    assert margins.radii(logits, labels, pairs).tolist() == [math.inf, 0.0]


def test_an_unknown_constant_certifies_nothing() -> None:
    logits, label = double([[5.0, 0.0]]), torch.tensor([0])
    assert margins.radii(logits, label, margins.global_constants(math.inf, 2)).item() == 0.0
    equal_rows = torch.ones(2, 3)
    assert margins.radii(logits, label, last_layer(equal_rows, math.inf)).item() == 0.0
    unknown_rows = double([[math.nan, 0.0], [0.0, 0.0]])
    for constant in (0.0, 1.0, math.inf):
        assert margins.radii(logits, label, last_layer(unknown_rows, constant)).item() == 0.0


def test_rows_that_differ_by_less_than_the_root_of_the_smallest_number_are_not_equal() -> None:
    pairs = last_layer(double([[1e-200, 0.0], [0.0, 0.0]]), 1.0)
    assert pairs[0, 1].item() == pytest.approx(1e-200, rel=1e-12)
    assert pairs[0, 1].item() >= 1e-200


@pytest.mark.thorough
def test_distances_below_the_normal_range_are_rounded_up() -> None:
    rng = random.Random(0)
    for _ in range(300):
        scale, columns = rng.choice([-1074, -1072, -1060, -1030]), rng.choice([1, 2, 3, 7])
        rows = [[math.ldexp(rng.choice([0, 1, rng.random()]), scale) for _ in range(columns)] for _ in range(2)]
        exact = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(*rows, strict=True))
        assert Fraction(margins.row_distances(double(rows))[0, 1].item()) ** 2 >= exact


def test_margins_and_predictions() -> None:
    logits = double([[3.0, 1.0, 2.0], [1.0, 1.0, 0.0], [math.nan, 0.0, 0.0], [0.0, 2.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    assert margins.margins(logits, labels)[[0, 1, 3]].tolist() == [1.0, 0.0, -2.0]
    assert margins.margins(logits, labels)[2].isnan()
    assert margins.predictions(logits).tolist() == [0, 0, -1, 1]


@pytest.mark.parametrize("constant", [-1.0, math.nan])
def test_refuses_what_is_no_constant(constant: float) -> None:
    with pytest.raises(OptionError, match=f"expected a Lipschitz constant >= 0, got {constant}"):
        margins.global_constants(constant, 2)
    with pytest.raises(OptionError, match=f"got {constant}"):
        last_layer(torch.eye(2), constant)


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), ShapeError, r"K >= 2 classes, got \(2, 1\)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), ShapeError, r"got \(2,\)"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), ShapeError, r"expected 2 labels .* got \(3,\)"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), OptionError, "from 0 to 2 for 3 logits, got labels from 0 to 3"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), OptionError, "got labels from -1 to 0"),
        (torch.zeros(2, 3), torch.zeros(2), OptionError, "int64.*got float32"),
    ],
)
def test_refusals(logits: torch.Tensor, labels: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        margins.radii(logits, labels, torch.zeros(3, 3))


def test_refuses_constants_of_another_size() -> None:
    with pytest.raises(ShapeError, match=r"\(3, 3\), got \(2, 2\)"):
        margins.radii(torch.zeros(1, 3), torch.tensor([0]), torch.zeros(2, 2))
    with pytest.raises(ShapeError, match=r"\(K, n\), got \(3,\)"):
        last_layer(torch.zeros(3), 1.0)
