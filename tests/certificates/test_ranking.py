"""Certified AUROC against an enumeration of pairs, and monotone networks against their derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lipkit
from lipkit.certificates import auroc, certify_regression, monotone
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules import Affine, GroupSort, MaxMin, Network


def scale(factor: float = 1.0) -> Network:
    layer = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(factor)
    return Network([layer], (1,))


@pytest.mark.thorough
@pytest.mark.parametrize(("moves", "times"), [("both", 2), ("positives", 1), ("negatives", 1)])
def test_exact_against_enumeration_on_200_samples(moves: str, times: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 120), rng.normal(0, 1, 80)
    a[:5], b[:5] = 0.5, 0.5  # ties
    for eps in (0.0, 0.1, 0.5):
        found = auroc(scale(2.0), torch.tensor(a)[:, None], torch.tensor(b)[:, None], eps, moves=moves)
        worst = np.mean([[2 * p > 2 * q + times * 2 * eps * (1 + 1e-12) for q in b] for p in a])
        assert found.worst_auroc == pytest.approx(worst, abs=1e-12)
        clean = np.mean([[(p > q) + 0.5 * (p == q) for q in b] for p in a])
        assert found.auroc == pytest.approx(clean, abs=1e-12)
    assert f"at least {found.worst_auroc:.4f}" in str(found)


def test_what_is_no_score_is_refused() -> None:
    x = torch.zeros(2, 1)
    with pytest.raises(ShapeError, match="one score"):
        auroc(Network([nn.Linear(1, 2)], (1,)), x, x, 0.1)
    with pytest.raises(ShapeError, match="one score"):
        auroc(Network([nn.Linear(1, 1)], (1, 1)), x[:, None], x[:, None], 0.1)
    with pytest.raises(OptionError, match="finite scores"):
        auroc(scale(1e200), x.double() + 1e200, x, 0.1)
    with pytest.raises(OptionError, match=r"proof: expected the result of lipkit\.prove, got int"):
        auroc(scale(), torch.ones(1, 1), torch.ones(1, 1), 0.1, proof=3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="moves: expected one of"):
        auroc(scale(), x, x, 0.1, moves="all")


@pytest.mark.parametrize(("part", "worst"), [(0.9, 0.0), (1.1, 1.0)])
def test_errors_of_scores_and_of_the_machine_count_on_both_sides(part: float, worst: float) -> None:
    net, zero = Network([nn.Linear(1, 1)], (1,)), torch.zeros(1, 1)
    net[0].weight.fill_(1.0), net[0].bias.fill_(1e6)
    moved = certify_regression(net, zero, zero, delta=0.1, evaluator="float32")
    apart = 2 * float(moved.moved + moved.prediction_error + moved.rounding_error)
    assert float(moved.prediction_error) < 0.7 * apart / 2
    found = auroc(net, zero + part * apart, zero, 0.1, proof=lipkit.prove(net, evaluator="float32"))
    assert (found.auroc, found.worst_auroc) == (1.0, worst)


@pytest.mark.parametrize(("sorting", "signs"), [(MaxMin(), [1, -1, 1, -1]), (GroupSort(2), [1, 1, -1, -1])])
def test_only_what_is_sorted_together_shares_its_signs(sorting: nn.Module, signs: list[int]) -> None:
    net = Network([nn.Linear(1, 4), sorting], (1,))
    net[0].weight.copy_(torch.tensor(signs, dtype=torch.float32)[:, None])
    assert monotone(net)[:, 0].tolist() == signs
    assert monotone(Network([Affine(torch.tensor([0.0]), torch.ones(1))], (1,))).tolist() == [[1]]  # a constant


@pytest.mark.parametrize("sorting", [MaxMin(), GroupSort(2), GroupSort(None), nn.Tanh()])
def test_monotone_says_what_derivatives_do(sorting: nn.Module) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
    with torch.no_grad():
        first.weight[:, 0].abs_()
        first.weight[:, 1].abs_().neg_()
        last.weight.abs_()
    net = Network(
        [Affine(torch.tensor([1.0, -2.0, 1.0]).double(), torch.zeros(3).double()), first, sorting, last], (3,)
    )
    assert monotone(net).tolist() == [[1, 1, 0]]
    x = torch.randn(200, 3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(net(x).sum(), x)
    assert bool((slope[:, :2] >= 0).all())
    assert bool((slope[:, 2] < 0).any())


def test_a_proof_that_ignores_rounding_counts_scores_as_exact() -> None:
    net = Network([nn.Linear(1, 1, bias=False)], (1,))
    net[0].weight.data.fill_(1.0)
    found = auroc(net, torch.ones(1, 1), torch.zeros(1, 1), 0.25, proof=lipkit.prove(net, rounding="ignore"))
    assert (found.worst_auroc, found.proof.rounding) == (1.0, "ignore")
    found = auroc(net, torch.ones(1, 1), torch.zeros(1, 1), 0.5, moves="both", proof=found.proof)
    assert found.worst_auroc == 0.0


def test_one_wrong_sign_is_seen() -> None:
    net = Network([nn.Linear(2, 4), MaxMin(), nn.Linear(4, 1)], (2,))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[2].weight.fill_(1.0)
        net[0].weight[3, 1] = -1e-30
    assert monotone(net).tolist() == [[1, 0]]
    with pytest.raises(NoRuleError, match="never fall"):
        monotone(Network([nn.Linear(2, 2), nn.GELU()], (2,)))
    # Channels are sorted, not neighbours in memory: the first output falls with the third input.
    with pytest.raises(NoRuleError, match=r"vectors, got the shape \(2, 2\)"):
        monotone(Network([Affine(-torch.ones(1), torch.zeros(1)), GroupSort(2)], (2, 2)))
    broken = Network([nn.Linear(2, 2)], (2,))
    broken[0].weight[0, 0] = torch.nan
    with pytest.raises(NoRuleError, match="expected finite numbers"):
        monotone(broken)
    with pytest.raises(NoRuleError, match="expected an exported network"):
        monotone(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_signs_of_small_weights_are_read_or_refused() -> None:
    network = Network([nn.Linear(2, 1)], (2,))
    network[0].weight.copy_(torch.tensor([[1.0, -1e-40]]))
    assert monotone(network).tolist() == [[1, -1]]
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(OptionError, match="set_flush_denormal"):
            monotone(network)
    finally:
        torch.set_flush_denormal(False)
