"""The balance of multipliers against a brute search over the factor."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from lipkit.bounds.lmi import gain_bound
from lipkit.bounds.lmi_solver import balance, minimise_gain


def feasible(seed: int, sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights with multipliers that prove some gain: norms below one make the identity feasible."""
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for n, m in pairwise(sizes):
        w = torch.randn(m, n, generator=generator, dtype=torch.float64)
        weights.append(0.9 * w / torch.linalg.matrix_norm(w, 2))
    weights[-1] = weights[-1] * 10.0 ** float(torch.randn((), generator=generator))
    return weights, [torch.ones(n, dtype=torch.float64) for n in sizes[1:-1]]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(1, 4, 1), (3, 6, 5, 2), (30, 4, 4, 3)])
def test_no_factor_of_a_grid_does_better(seed: int, sizes: tuple[int, ...]) -> None:
    weights, multipliers = feasible(seed, sizes)
    factor = balance(weights, multipliers)
    found = gain_bound(weights, [factor * m for m in multipliers])
    grid = factor * 2.0 ** np.linspace(-6, 6, 25)
    best = min(gain_bound(weights, [float(t) * m for m in multipliers]) for t in grid)
    assert found <= best * (1 + 1e-6)
    assert found <= gain_bound(weights, multipliers) * (1 + 1e-9)


def test_one_number_in_closed_form() -> None:
    # gain(t) = max(4 t / 2, 0.25 / (2 t)) plus the coupling 2 * 0.5 / 2: [[2t, 1/2], [1/2, 1/(8t)]], least at t = 1/4.
    weights = [torch.full((1, 1), 2.0), torch.full((1, 1), 0.5)]
    assert balance(weights, [torch.ones(1)]) == pytest.approx(0.25, rel=1e-4)


def test_degenerate_weights_give_one() -> None:
    assert balance([torch.zeros(2, 2), torch.ones(1, 2)], [torch.ones(2)]) == 1.0
    assert balance([torch.full((2, 2), float("inf")), torch.ones(1, 2)], [torch.ones(2)]) == 1.0
    huge, one = torch.full((2, 2), 1e200, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    assert balance([huge, one], [torch.ones(2)]) == 1.0  # its square overflows


@pytest.mark.parametrize("scale", [1.0, 1e-150])
def test_weights_that_read_all_values_have_no_product_of_norms(scale: float) -> None:
    one = torch.ones(1, 1).double()  # y = x + relu(scale x), gain 1 + scale: the norms make sqrt(2) scale
    assert minimise_gain([scale * one, torch.ones(1, 2)])[0] >= 1 + scale


def test_columns_of_zeros_for_values_that_are_not_read_change_no_gain() -> None:
    weights, _ = feasible(1, (3, 6, 5, 2))
    wide = [torch.cat((w.new_zeros(len(w), n), w), 1) for w, n in zip(weights, (0, 3, 9), strict=True)]
    chain, read = minimise_gain(weights)[0], minimise_gain(wide)[0]
    assert read == pytest.approx(chain, rel=1e-4)
    assert minimise_gain([*weights[:2], wide[2]])[0] == pytest.approx(chain, rel=1e-4)
