"""Every Function of the table equals its plain twin, values and derivatives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import functions


def small() -> Iterator[functions.Pair]:
    torch.manual_seed(3)
    yield from functions.convolution_pairs(4, 6, 3)
    yield from functions.first_layer_pairs(5, 6, 2)
    yield from functions.phase_pairs(4, 6, 2)
    yield from functions.matrix_pairs(6, 2)
    yield from functions.dense_pairs(6, 4)
    # The two bounds of a norm agree within 3 per cent, their gradients no better: names apart.
    yield from (pair for pair in functions.norm_pairs(8, 12) if "Lanczos" not in pair.name)


@pytest.mark.parametrize("pair", list(small()), ids=lambda pair: pair.name)
def test_twins_are_equal(pair: functions.Pair) -> None:
    y, expected = pair.function(*pair.inputs), pair.plain(*pair.inputs)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-4)
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, pair.inputs, upstream)
    plain = torch.autograd.grad(expected, pair.inputs, upstream)
    torch.testing.assert_close(found, plain, rtol=2e-3, atol=2e-3)
