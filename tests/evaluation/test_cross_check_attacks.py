"""The cross-check with each attack and in each norm: what falls, what is compared, and what stops it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from lipkit import evaluation, modules
from lipkit.attacks import AttackResult
from lipkit.attacks.ascent import misclassified
from lipkit.certificates import certify
from lipkit.data import Split
from lipkit.errors import CertificateViolation, OptionError
from lipkit.evaluation import Attack, attack_samples, evaluate
from lipkit.modules.storage import float64_copy


def network() -> modules.Network:
    torch.manual_seed(0)
    return modules.Network([nn.Flatten(), nn.Linear(16, 3)], (1, 4, 4))


def split(count: int = 24) -> Split:
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    y = network()(x).argmax(dim=1)
    y[:3] = (y[:3] + 1) % 3
    return Split(x, y)


def attack(name: str, norm: str = "l2", eps: tuple[float, ...] = (0.05, 0.3)) -> Attack:
    steps = {"cw": 60}.get(name, 15)
    return Attack(eps, steps, None, None, None, 0, name, norm)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "norm"), [(n, m) for n in ("pgd", "apgd", "fab", "cw") for m in ("l2", "linf") if (n, m) != ("cw", "linf")]
)
def test_every_attack_finds_what_lies_within_reach_of_a_linear_network(name: str, norm: str) -> None:
    net, data = network(), split()
    certificate = certify(net, data.x, data.y)
    found = attack_samples(net, certificate, data.x, data.y, attack(name, norm))
    weight = net[1].weight.double()
    logits = net.double()(data.x.double())
    apart = weight[data.y][:, None] - weight[None]
    size = apart.norm(dim=2) if norm == "l2" else apart.abs().sum(dim=2)
    distance = ((logits.gather(1, data.y[:, None]) - logits) / size).nan_to_num(math.inf).amin(dim=1)
    for row in found.rows:
        # nothing out of reach falls, and all that is clearly within reach does
        slack = 1.1 if name == "cw" else 1.01
        beyond, near = (int((certificate.correct & (slack_ * distance > row.eps)).sum()) for slack_ in (1, slack))
        assert beyond <= row.share.count <= near
        assert row.certified.count <= row.share.count
        assert row.share.total == len(data)
    examples = found.examples
    assert len(examples) >= len(data) - found.rows[-1].share.count - 3 > 0
    exact, wide = float64_copy(network()), data.x.double()
    assert misclassified(exact(examples.point), data.y[examples.index]).all()
    assert torch.equal(examples.prediction, exact(examples.point).argmax(dim=1))
    change = (examples.point - wide[examples.index]).flatten(1)
    torch.testing.assert_close(examples.l2, change.norm(dim=1), rtol=1e-12, atol=0)
    torch.testing.assert_close(examples.linf, change.abs().amax(dim=1), rtol=1e-12, atol=0)
    assert (examples.l2 >= certificate.radius[examples.index]).all()
    assert found.cross_check.closest >= 1
    assert found.clean.count == 21
    assert found.ran


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pgd", "apgd", "fab"])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_radius_too_large_stops_every_attack(name: str, norm: str) -> None:
    net, data = network(), split()
    certificate = certify(net, data.x, data.y)
    wrong = dataclasses.replace(certificate, radius=certificate.radius * (1.05 if norm == "l2" else 3.0))
    with pytest.raises(CertificateViolation, match=r"sample 1\d\d: .* got one at l2 norm"):
        attack_samples(net, wrong, data.x, data.y, attack(name, norm), numbers=torch.arange(100, 124))


def test_in_linf_the_certificate_counts_where_its_ball_holds_the_cube() -> None:
    net, data = network(), split()
    certificate = certify(net, data.x, data.y)
    eps = 0.05
    row = attack_samples(net, certificate, data.x, data.y, attack("pgd", "linf", (eps,))).rows[0]
    assert row.certified.count == int((certificate.correct & (certificate.radius > 4 * eps * (1 + 1e-12))).sum())
    assert 0 < row.certified.count < 21


@pytest.mark.parametrize(
    ("name", "norm", "box", "ran"),
    [
        ("pgd", "l2", None, ["pgd", "pgd", "pgd"]),
        ("pgd", "linf", (-1.0, 3.0), ["pgd", "pgd"]),
        ("autoattack", "l2", "auto", ["autoattack", "autoattack", "apgd"]),  # it knows one radius for all samples
        ("fab", "l2", (0.0, 1.0), ["fab"]),
    ],
)
def test_what_runs_at_which_radii_in_which_box(
    name: str, norm: str, box: Any, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any, Any]] = []

    def nothing(name: str, model: Any, x: torch.Tensor, y: torch.Tensor, **given: Any) -> AttackResult:
        calls.append((name, given["eps"], given["box"]))
        return AttackResult(x, name)

    monkeypatch.setattr(evaluation.attack, "run_attack", nothing)
    net, data = network(), split()
    certificate = certify(net, data.x, data.y)
    certificate.radius[certificate.correct.nonzero()[0]] = math.inf
    options = Attack((0.3, 0.05), samples=None, box=box, name=name, norm=norm)
    attack_samples(net, certificate, data.x, data.y, options)
    assert [call[0] for call in calls] == ran
    assert {call[2] for call in calls} == {(0.0, 1.0) if box == "auto" else box}
    assert [call[1] for call in calls[:2]] == ([None] if name == "fab" else [0.05, 0.3])  # small ones first
    if len(calls) > 2:  # an infinite radius cannot be attacked
        assert torch.equal(calls[2][1], certificate.radius[certificate.correct].nan_to_num(posinf=0.3))
    # Local radii hold inside of the range alone, up to what rounding did to the samples.
    calls.clear()
    data.x[-1, 0, 0, 0] = 1.25
    wide = dataclasses.replace(certificate, method="local", input_range=(-0.5, 1.0))
    attack_samples(net, wide, data.x, data.y, options)
    assert {call[2] for call in calls} == {(-0.5, 1.25)}


@pytest.mark.parametrize(
    ("box", "entries", "expected"),
    [
        ("auto", (0.0, 1.0), (0.0, 1.0)),
        ("auto", (-1e-7, 1.0), None),
        ("auto", (0.0, 1.0000001), None),
        (None, (0.0, 1.0), None),
        ((-2, 5), (0.0, 1.0), (-2.0, 5.0)),
    ],
)
def test_the_box_is_given_or_that_of_images(box: Any, entries: tuple[float, float], expected: Any) -> None:
    assert evaluation.attack.resolved_box(box, torch.tensor([entries])) == expected


def test_float64_samples_are_attacked_in_float32() -> None:
    net, data = network(), split()
    x = data.x.double() * (1 - 1e-9)
    found = attack_samples(net, certify(net, x, data.y), x, data.y, attack("pgd"))
    assert found.cross_check.compared > 10
    assert found.examples.point.dtype == torch.float64


def test_points_are_moved_by_a_ten_thousandth_at_most() -> None:
    net = modules.Network([nn.Linear(1, 2).double()], (1,))
    net[0].weight.copy_(torch.tensor([[-1.0], [1.0]])), net[0].bias.copy_(torch.tensor([1.0, -1.0]))  # boundary: 1
    before = torch.tensor([1.5, 1 - 5e-7, 1 - 5e-6, 1 - 5e-5, 0.9], dtype=torch.float64)[:, None]
    zero, labels = torch.zeros_like(before), torch.zeros(5, dtype=torch.int64)
    after = evaluation.attack._confirmed(net, zero, before, labels, None)
    assert misclassified(net(after), labels).tolist() == [True] * 4 + [False]
    assert (after / before)[:, 0].tolist() == pytest.approx([1, 1 + 1e-6, 1 + 1e-5, 1 + 1e-4, 1 + 1e-4], abs=1e-9)
    assert float(evaluation.attack._confirmed(net, zero[1:], before[1:], labels[1:], (0.0, 1.0)).max()) == 1


@pytest.mark.thorough
def test_evaluate_takes_the_attack_by_name_and_says_so() -> None:
    data = split()
    default, chosen = (
        evaluate(network(), data, eps=(0.1,), attack=Attack(steps=10, name=name)) for name in ("pgd", "apgd")
    )
    assert set(default.metrics()) == {"clean", "certified(0.1)", "pgd(0.1)", "lipschitz"}
    assert set(chosen.metrics()) == {"clean", "certified(0.1)", "apgd(0.1)", "lipschitz"}
    assert chosen.attacked[0].share.count <= default.attacked[0].share.count
    with pytest.raises(OptionError, match="attack: expected one of"):
        evaluate(network(), data, eps=(0.1,), attack=Attack(name="fgsm"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pgd", "fab"])
def test_without_radii_samples_are_attacked_at_their_own(name: str) -> None:
    net, data = network(), split()
    certificate = certify(net, data.x, data.y)
    found = attack_samples(net, certificate, data.x, data.y, attack(name, eps=()))
    assert found.rows == ()
    assert (found.clean.count, found.clean.total) == (21, 24)
    assert found.ran
    assert found.cross_check.compared == len(found.examples) > 10
    assert torch.equal(found.examples.prediction, float64_copy(net)(found.examples.point).argmax(1))
    both = attack_samples(net, certificate, data.x, data.y, attack(name))
    if name != "pgd":  # one run serves both radii
        assert both.cross_check.compared == len(both.examples)
    with pytest.raises(OptionError, match="the 24 samples that were certified, in this order, got other labels"):
        attack_samples(net, certificate, data.x, data.y.flip(0), attack(name))
    with pytest.raises(OptionError, match="the 24 samples that were certified, in this order, got 9"):
        attack_samples(net, certificate, data.x[:9], data.y[:9], attack(name))


def test_a_minimum_norm_attack_needs_no_radii_in_linf_either() -> None:
    net, data = network(), split()
    found = attack_samples(net, certify(net, data.x, data.y), data.x, data.y, attack("fab", "linf", ()))
    assert (found.rows, found.ran) == ((), ("FAB",))
    assert len(found.examples) > 10
