"""Every way to round up, for numbers and tensors, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipkit.proof.roundoff import UNIT, grow, next_down, next_up, product, up

FINITE = st.one_of(st.floats(0, allow_infinity=False), st.floats(0.5, 2))


@pytest.mark.thorough
@given(st.lists(FINITE, min_size=1, max_size=5))
def test_a_product_is_the_smallest_float64_that_is_not_below_it(factors: list[float]) -> None:
    got, exact = product(*factors), math.prod(map(Fraction, factors))
    assert got == math.inf or Fraction(got) >= exact
    assert got == 0 or Fraction(math.nextafter(got, 0)) < exact


def test_zero_absorbs_infinity_and_nothing_absorbs_nan() -> None:
    assert product(0.0, math.inf) == 0.0
    assert product(2.0, math.inf) == math.inf
    assert math.isnan(product(0.0, math.nan))
    assert product() == 1.0
    assert product(1 / 3, 1 / 3) > Fraction(1 / 3) ** 2


@pytest.mark.thorough
@given(FINITE)
def test_numbers_and_tensors_grow_alike(value: float) -> None:
    tensor = torch.tensor(value, dtype=torch.float64)
    assert (next_up(value), next_down(value), up(value, 3)) == (next_up(tensor), next_down(tensor), up(tensor, 3))
    assert next_down(value) < value < next_up(value)
    grown = grow(value)
    if value == 0:  # in a tensor it may be what underflow left
        assert (grown, float(grow(tensor))) == (0, 2.0**-1000)
    else:
        assert grown == float(grow(tensor))
        assert math.isinf(grown) or Fraction(grown) > Fraction(value) * (1 + 8 * Fraction(UNIT))


@pytest.mark.parametrize("operations", [0, 1, 100])
def test_up_covers_its_roundings(operations: int) -> None:
    low = float(Fraction(1 / 3) * (1 - Fraction(UNIT)) ** operations)
    assert 1 / 3 <= up(low, operations) <= 1 / 3 * (1 + 0.02 * operations * UNIT + 8 * UNIT)
