"""The LMI of a feed-forward network: a proof for any multipliers, also for hostile ones."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound, is_positive_semidefinite, lmi_matrix, proves_gain
from lipkit.errors import OptionError, ShapeError
from lipkit.lowering import lipschitz
from lipkit.modules import Network
from lipkit.modules.slope_runs import slope_runs


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def steepest(weights: list[Tensor]) -> float:
    """Largest norm of W_L D W_{L-1} ... over every pattern of slopes in {0, 1}: a lower bound of the gain."""
    sizes = [len(w) for w in weights[:-1]]
    best = 0.0
    for pattern in itertools.product([0.0, 1.0], repeat=sum(sizes)):
        product, at = weights[0].numpy(), 0
        for w, n in zip(weights[1:], sizes, strict=True):
            product = w.numpy() @ (np.array(pattern[at : at + n])[:, None] * product)
            at += n
        best = max(best, float(np.linalg.norm(product, 2)))
    return best


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 3), min_size=3, max_size=4),
    log_scale=st.floats(-4, 4),
    spread=st.floats(0, 3),
    seed=st.integers(0, 10**6),
)
def test_no_multipliers_prove_less_than_the_steepest_pattern(
    widths: list[int], log_scale: float, spread: float, seed: int
) -> None:
    weights = [random(n, m, seed=seed + i) for i, (m, n) in enumerate(itertools.pairwise(widths))]
    truth = steepest(weights)
    multipliers = [10 ** (log_scale + spread * random(n, seed=seed - 1)) for n in widths[1:-1]]
    assert gain_bound(weights, multipliers) >= truth * (1 - 1e-12)
    assert not proves_gain(weights, multipliers, truth * (1 - 1e-6))


def test_good_multipliers_prove_nearly_the_product() -> None:
    a, b = torch.eye(3, dtype=torch.float64) * 2, torch.eye(3, dtype=torch.float64) * 0.25
    assert 0.5 <= gain_bound([a, b], [torch.full((3,), 0.125, dtype=torch.float64)]) <= 0.5 * (1 + 1e-8)


def test_the_least_gain_of_a_schur_complement_is_that_of_numpy() -> None:
    weights, multipliers = [random(5, 4), random(6, 5, seed=1), random(3, 6, seed=2)], [torch.full((5,), 40.0).double()]
    multipliers.append(torch.full((6,), 10.0, dtype=torch.float64))
    h = lmi_matrix(weights, multipliers, 0.0).numpy()
    middle, ends = h[4:-3, 4:-3], np.concatenate((h[:4, 4:-3], h[-3:, 4:-3]))
    least = float(np.linalg.eigvalsh(ends @ np.linalg.solve(middle, ends.T))[-1])
    assert proves_gain(weights, multipliers, least * (1 + 1e-10))
    assert not proves_gain(weights, multipliers, least * (1 - 1e-11))


def test_every_entry_of_a_schur_complement_is_within_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    first = random(2, 40)
    first[1] -= first[0] * (first[0] @ first[1]) / first[0].square().sum()  # products that cancel lose most
    seen: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr("lipkit.bounds.lmi.is_positive_within", lambda h, error: bool(seen.append((h, error))))
    proves_gain([first, random(1, 2, seed=1)], [torch.ones(2, dtype=torch.float64)], 100.0)
    ((found, error),) = seen
    rows = [[Fraction(v) for v in row] for row in (*first.T.tolist(), *random(1, 2, seed=1).tolist())]
    for i, j in itertools.product(range(2), repeat=2):
        exact = 2 * (i == j) - sum(row[i] * row[j] for row in rows) / 100
        assert abs(Fraction(float(found[i, j])) - exact) <= Fraction(float(error[i, j]))


def test_one_weight_is_its_norm() -> None:
    w = random(4, 3)
    truth = np.linalg.norm(w.numpy(), 2)
    assert truth * (1 - 1e-13) <= gain_bound([w], []) <= truth * (1 + 1e-9)
    assert proves_gain([w], [], truth * (1 + 1e-9))
    assert not proves_gain([w], [], truth * (1 - 1e-12))


def test_errors_of_weights_are_inside_the_proof() -> None:
    """Every matrix within the errors has the gain: the largest one does, the one next to it is refused."""
    one, error = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 1e-3, dtype=torch.float64)
    true = (1 + 1e-3) * 1.0  # of two positive layers, the first off by its error
    assert not proves_gain([one, one], [one[0]], true * (1 - 1e-9), [error, 0 * error])
    assert proves_gain([one, one], [one[0]], 1.01, [error, 0 * error])
    assert true <= gain_bound([one, one], [one[0]], [error, 0 * error]) <= 1.1
    assert gain_bound([one, one], [one[0]], [0 * error, 0 * error]) == gain_bound([one, one], [one[0]])
    assert gain_bound([one, one], [one[0]], [error * math.inf, error]) == math.inf


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_multipliers_that_are_not_positive_are_refused(bad: float) -> None:
    with pytest.raises(OptionError, match="positive finite"):
        gain_bound([random(2, 2), random(2, 2)], [torch.tensor([1.0, bad])])


def test_shapes_that_do_not_chain_are_refused() -> None:
    for weights, multipliers in (
        ([random(2, 3), random(2, 3)], [torch.ones(2)]),
        ([random(2, 3), random(1, 2)], []),
        ([random(2, 3), random(1, 2)], [torch.ones(3)]),
        ([], []),
    ):
        with pytest.raises(ShapeError):
            lmi_matrix(weights, multipliers, 1.0)


@pytest.mark.parametrize("gain", [0.0, -1.0, math.nan, math.inf])
def test_gains_that_prove_nothing(gain: float) -> None:
    assert not proves_gain([torch.eye(2)], [], gain)


def test_undefined_weights_have_no_gain() -> None:
    for bad in (math.nan, math.inf):
        assert gain_bound([torch.tensor([[bad]]), torch.eye(1)], [torch.ones(1)]) == math.inf


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 6),
    rank=st.integers(1, 6),
    shift=st.sampled_from([0.0, 1e-18, -1e-6, 1e-6]),
    seed=st.integers(0, 999),
)
def test_positive_semidefinite_is_never_claimed_wrongly(n: int, rank: int, shift: float, seed: int) -> None:
    a = random(n, min(rank, n), seed=seed)
    h = a @ a.mT + shift * torch.eye(n, dtype=torch.float64)
    lowest = float(np.linalg.eigvalsh(h.numpy())[0])
    if is_positive_semidefinite(h):
        assert lowest > 0
    if lowest > 1e-7:
        assert is_positive_semidefinite(h)
        assert not is_positive_semidefinite(h, error=1.01 * lowest)


def test_a_network_takes_the_better_of_both_bounds_and_never_trusts_a_multiplier() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(3, 4), nn.Linear(4, 2)
    plain = float(lipschitz(Network([a, nn.ReLU(), b], (3,))))
    truth = steepest([a.weight.detach().double(), b.weight.detach().double()])
    for size in (1e-8, 1e-3, 0.1, 0.3, 1.0, 10.0, 1e8):
        net = Network([a, nn.ReLU(), b], (3,), {1: torch.full((4,), size)})
        assert len(slope_runs(net)) == 1
        assert truth * (1 - 1e-12) <= float(lipschitz(net)) <= plain * (1 + 1e-12)


@pytest.mark.parametrize(
    "activation", [nn.GELU(), nn.SELU(), nn.LeakyReLU(2.0), nn.LeakyReLU(-0.5), nn.ELU(3.0), nn.Softmax(1)]
)
def test_a_multiplier_of_a_steep_activation_is_ignored(activation: nn.Module) -> None:
    net = Network([nn.Linear(3, 4), activation, nn.Linear(4, 2)], (3,), {1: torch.ones(4)})
    assert slope_runs(net) == []
    bare = Network([net[0], activation, net[2]], (3,))
    assert float(lipschitz(net)) == pytest.approx(float(lipschitz(bare)), rel=1e-12)


def test_nothing_is_proved_where_products_fall_below_the_normal_range() -> None:
    one, two, multiplier, gain = 2.3871957909490367, 1.5e-323, 5e-324, 3.5e-323
    assert Fraction(gain) < Fraction(one) * Fraction(two)  # reached where both layers are positive
    weights = [torch.tensor([[w]], dtype=torch.float64) for w in (one, two)]
    assert not proves_gain(weights, [torch.tensor([multiplier], dtype=torch.float64)], gain)
    assert not proves_gain([1e-300 * torch.eye(2, dtype=torch.float64)], [], 1e-299)
    assert proves_gain([1e-200 * torch.eye(2, dtype=torch.float64)], [], 1.001e-200)
