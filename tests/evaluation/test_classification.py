"""Accuracies that add up, and an attack that stops the command when a constant is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import nn

from lipkit import evaluation, modules
from lipkit.attacks import AttackResult, run_attack
from lipkit.attacks.ascent import Model
from lipkit.certificates import certify, format_radius
from lipkit.certificates.intervals import clopper_pearson, share
from lipkit.data import Data, Split
from lipkit.errors import CertificateViolation, DataError, NoRuleError, OptionError
from lipkit.evaluation import (
    Attack,
    attack,
    attack_samples,
    check_examples,
    evaluate,
    per_class,
)
from lipkit.lowering import lipschitz
from lipkit.modules import chains


def network(*, deep: bool = False) -> modules.Network:
    torch.manual_seed(0)
    body = [nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3)] if deep else [nn.Flatten(), nn.Linear(16, 3)]
    return modules.Network(body, (1, 4, 4))


def split(count: int = 60) -> Split:
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    y = network()(x).argmax(dim=1)
    y[:6] = (y[:6] + 1) % 3  # a few mistakes
    return Split(x, y)


EPS = (0.02, 0.1, 0.5)


@pytest.mark.thorough
def test_accuracies_add_up() -> None:
    result = evaluate(network(), split(), eps=EPS, attack=Attack(samples=None), classes=("a", "b", "c"))
    assert result.clean.count == 54
    counts = [certified.count for certified in result.certified]
    assert counts == [int((result.certificate.radius > eps).sum()) for eps in EPS]
    assert counts[0] >= counts[1] >= counts[2]
    assert [row.eps for row in result.attacked] == list(EPS)
    for attacked, certified in zip(result.attacked, result.certified, strict=True):
        assert attacked.certified == certified  # the same samples: all of them
        assert certified.count <= attacked.share.count <= result.clean.count
    assert [row.name for row in result.per_class] == ["a", "b", "c"]
    assert sum(row.clean.count for row in result.per_class) == 54
    assert [sum(row.certified[i].count for row in result.per_class) for i in range(3)] == counts
    assert set(result.times) == {"certify", "attack"}
    metrics = result.metrics()
    assert metrics["clean"] == 0.9
    assert metrics["certified(0.02)"] == counts[0] / 60
    assert set(metrics) == {
        "clean",
        *(f"{kind}({eps:g})" for kind in ("certified", "pgd") for eps in EPS),
        "lipschitz",
    }


@pytest.mark.thorough
def test_on_a_linear_network_the_closest_example_lies_just_outside_the_radius() -> None:
    result = evaluate(network(), split(), eps=(0.5,), attack=Attack(samples=None, box=None))
    assert result.cross_check.compared > 10
    assert 1.0 <= result.cross_check.closest < 1.001


def test_examples_are_moved_close_before_they_are_compared() -> None:
    torch.manual_seed(0)
    net = modules.Network([nn.Linear(5, 2)], (5,))
    x = torch.rand(20, 5)
    result = evaluate(net, Split(x, net(x).argmax(dim=1)), eps=(5.0,), attack=Attack(steps=1, box=None))
    assert result.attacked[0].share.count == 0  # every one overshoots by far in its single step
    assert 1.0 <= result.cross_check.closest < 1.0001


@pytest.mark.thorough
def test_the_closest_example_of_all_batches_counts() -> None:
    whole, parts = (
        evaluate(network(), split(), eps=(0.5,), attack=Attack(steps=10), batch_size=size) for size in (60, 13)
    )
    assert whole.cross_check.closest == pytest.approx(parts.cross_check.closest, rel=1e-6)
    assert whole.cross_check.compared == parts.cross_check.compared


@pytest.mark.thorough
def test_what_fell_at_a_smaller_radius_has_fallen_at_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_small(name: str, model: Model, x: torch.Tensor, y: torch.Tensor, **options: Any) -> AttackResult:
        small = isinstance(options["eps"], float) and options["eps"] == 0.5
        return run_attack(name, model, x, y, **options) if small else AttackResult(x, "nothing")

    monkeypatch.setattr(attack, "run_attack", only_small)
    large, small = evaluate(network(), split(), eps=(0.9, 0.5)).attacked
    assert (large.eps, small.eps) == (0.9, 0.5)
    assert large.share == small.share
    assert small.share.count < 54


@pytest.mark.thorough
@pytest.mark.parametrize("deep", [False, True])
def test_a_wrong_constant_stops_the_evaluation(deep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # the linear certificate is tight: two per cent off must show; the deep one is not, so it takes more
    factor = 0.2 if deep else 0.98
    monkeypatch.setattr(chains, "lipschitz", lambda module, shape=None: factor * lipschitz(module, shape))
    net = network(deep=deep)
    if not deep:  # an identity for a body, so that there is a constant to get wrong
        net = modules.Network([modules.Affine(torch.ones(1), torch.zeros(1)), *net], (1, 4, 4))
    data = split()
    labels = net(data.x).argmax(dim=1)
    with pytest.raises(CertificateViolation, match=r"sample \d+: .* radius [\d.e-]+, got one at l2 norm [\d.e-]+"):
        evaluate(net, Split(data.x, labels), eps=(0.05,), attack=Attack(samples=None, box=None))


def test_a_violation_names_sample_norm_and_radius() -> None:
    data = split()
    certificate = certify(network(), data.x, data.y)
    index = torch.tensor([10, 20, 30])
    radius = certificate.radius[index]
    assert check_examples(certificate, index, radius * torch.tensor([1.5, 1.0, 2.0], dtype=torch.float64)) == 1.0
    with pytest.raises(CertificateViolation) as caught:
        check_examples(certificate, index, radius * torch.tensor([1.5, 0.9, 0.99], dtype=torch.float64))
    message = str(caught.value)
    assert "sample 20" in message
    assert f"{float(radius[1]):.9g}" in message
    assert f"{float(radius[1] * 0.9):.9g}" in message
    assert "2 such examples" in message
    assert check_examples(certificate, index[:0], radius[:0]) == math.inf


@pytest.mark.thorough
def test_the_attack_runs_on_a_drawn_subset_of_the_right_size() -> None:
    data = split()
    first, again, other = (
        evaluate(network(), data, eps=EPS, attack=Attack(samples=20, seed=seed, steps=10)) for seed in (1, 1, 2)
    )
    assert {row.share.total for row in first.attacked} == {20}
    assert first.attacked == again.attacked
    assert first.clean.total == 60
    assert other.attacked != first.attacked


def test_nothing_to_attack() -> None:
    result = evaluate(network(), split(), eps=EPS, attack=Attack(eps=()))
    assert result.attacked == ()
    assert (result.cross_check.compared, result.cross_check.closest) == (0, math.inf)
    none = evaluate(network(), split(), eps=EPS, attack=Attack(samples=0))
    assert all(row.share.total == 0 and math.isnan(row.share.value) for row in none.attacked)


@pytest.mark.thorough
def test_the_box_is_that_of_images_only_if_the_samples_are_in_it() -> None:
    data = split()
    assert evaluate(network(), data, eps=(0.1,)).attack.box == (0.0, 1.0)
    wide = Split(data.x * 3, network()(data.x * 3).argmax(dim=1))
    assert evaluate(network(), wide, eps=(0.1,)).attack.box is None


def test_uint8_images_are_certified_in_units_of_0_to_1() -> None:
    x = torch.randint(0, 256, (20, 1, 4, 4), dtype=torch.uint8)
    y = torch.zeros(20, dtype=torch.int64)
    result = evaluate(network(), Split(x, y), eps=(0.1,))
    assert torch.equal(result.certificate.radius, certify(network(), x.float() / 255, y).radius)


@pytest.mark.thorough
def test_the_network_of_the_caller_is_not_changed() -> None:
    net = network(deep=True)
    before = modules.sha256(net)
    evaluate(net, split(), eps=(0.1,))
    assert modules.sha256(net) == before
    assert {tensor.dtype for tensor in net.state_dict().values()} == {torch.float32}


def test_an_attack_survives_infinite_radii() -> None:
    last = nn.Linear(2, 2)
    last.weight.data, last.bias.data = torch.zeros(2, 2), torch.tensor([1.0, 0.0])
    net = modules.Network([last], (2,))
    x, y = torch.rand(5, 2), torch.zeros(5, dtype=torch.int64)
    attack = Attack(eps=(0.5,), steps=3, restarts=1, samples=None, box=(0.0, 1.0), seed=0)
    told = list[tuple[str, int, int]]()
    certificate = certify(net, x, y, batch_size=2, progress=lambda *now: told.append(now))
    found = attack_samples(net, certificate, x, y, attack, batch_size=2, progress=lambda *now: told.append(now))
    assert told == [*(("evaluated", n, 5) for n in (2, 4, 5)), *(("attacked", n, 5) for n in (2, 4))]
    assert found.rows[0].share.value == found.rows[0].certified.value == 1.0
    assert found.cross_check.compared == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": (-0.1,)}, "eps: expected a finite number >= 0, got -0.1"),
        ({"eps": 0.1}, r"eps: expected several radii, such as \(36 / 255,\), got 0.1"),
        ({"attack": Attack(eps=0.1)}, r"eps of the attack: expected several radii, .* got 0.1"),  # type: ignore[arg-type]
        ({"attack": Attack(eps=(math.inf,))}, "eps of the attack: expected a finite number >= 0, got inf"),
        ({"attack": Attack(norm="linf")}, "an attack in l2, got 'linf'"),
        ({"classes": ("a", "b")}, "at least 3 class names, got 2"),
        ({"confidence": 1.0}, "between 0 and 1, got 1.0"),
        ({"confidence": "0.9"}, "between 0 and 1, got '0.9'"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    for samples in (-1, "3", 1.5):
        with pytest.raises(OptionError, match=f"samples: expected an integer of at least 0, got {samples!r}"):
            Attack(samples=samples)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"seed: expected an integer .*, got 1.5"):
        Attack(seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=message):
        evaluate(network(), split(), **({"eps": (0.1,), "attack": Attack(eps=())} | options))


def test_refuses_regression_targets() -> None:
    with pytest.raises(OptionError, match="regression targets"):
        evaluate(network(), Split(torch.rand(3, 1, 4, 4), torch.rand(3, 2)), eps=(0.1,))


@pytest.mark.parametrize(("count", "total"), [(0, 10), (10, 10), (1, 1), (37, 50), (9_876, 10_000)])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_clopper_pearson_is_scipys_exact_interval(count: int, total: int, confidence: float) -> None:
    truth = scipy.stats.binomtest(count, total).proportion_ci(confidence, method="exact")
    assert clopper_pearson(count, total, confidence) == pytest.approx(tuple(truth), rel=1e-9, abs=1e-12)


def test_clopper_pearson_of_nothing_and_of_nonsense() -> None:
    assert clopper_pearson(0, 0) == (0.0, 1.0)
    with pytest.raises(OptionError, match="count=3, total=2"):
        clopper_pearson(3, 2)


def test_a_class_without_samples_has_no_accuracy() -> None:
    data = split()
    rows = per_class(certify(network(), data.x, data.y), EPS, ("a", "b", "c", "unseen"))
    assert rows[-1].clean.total == 0
    assert math.isnan(rows[-1].clean.value)
    assert share(torch.zeros(0, dtype=torch.bool)).low == 0


def test_format_radius() -> None:
    assert [format_radius(eps) for eps in evaluation.EPS] == ["36/255", "72/255", "108/255", "1"]
    shown = [format_radius(eps) for eps in (36 / 255, 108 / 255, 255 / 255, 0.0, 0.1, 1.5, 2, 1e-5, 510.5 / 255)]
    assert shown == ["36/255", "108/255", "1", "0", "0.1", "1.5", "2", "1e-05", "2.00196"]


def test_a_pair_is_taken_and_a_data_set_is_named() -> None:
    torch.manual_seed(0)
    network = modules.Network([nn.Linear(2, 3)], (2,))
    x, y = torch.rand(5, 2), torch.arange(5) % 3
    found = evaluate(network, (x.numpy(), y), eps=(0.1,), attack=Attack(eps=()))
    assert all(0 <= seconds < 600 for seconds in found.times.values())
    assert found.metrics() == evaluate(network, Split(x, y), eps=(0.1,), attack=Attack(eps=())).metrics()
    with pytest.raises(DataError, match=r"expected a pair \(x, y\) .*, got Data"):
        evaluate(network, Data("d", Split(x, y), Split(x, y), ("a", "b", "c")), eps=(0.1,))
    with pytest.raises(NoRuleError, match=r"expected an exported network .*, got Linear: evaluate lipkit\.export"):
        evaluate(network[0], (x, y))
