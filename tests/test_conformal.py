"""Conformal sets against a computation by hand in numpy, their growth with eps, and their coverage under attack."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lipkit import conformal, export, load, models, prove
from lipkit.data import load as load_data
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules import Network


def classifier(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return export(models.mlp([16], "cayley", 2.0, input_shape=(4,), classes=3), (4,))


def scores(outputs: np.ndarray) -> np.ndarray:
    """max over i != y of f_i - f_y for every y."""
    return np.stack([np.delete(outputs, k, 1).max(1) - outputs[:, k] for k in range(outputs.shape[1])], 1)


def test_sets_are_those_of_the_definition() -> None:
    net = classifier()
    torch.manual_seed(1)
    x, y, new = torch.randn(60, 4), torch.randint(3, (60,)), torch.randn(40, 4)
    found = conformal.calibrate(net, x, y)
    wide = Network(list(net), (4,)).double()
    own = np.sort(scores(wide(x.double()).numpy())[np.arange(60), y])
    for alpha in (0.05, 0.1, 0.3, 0.5):
        q = own[math.ceil(round(61 * (1 - alpha), 9)) - 1]
        sets = found.predict_set(new, alpha).sets.numpy()
        np.testing.assert_array_equal(sets, scores(wide(new.double()).numpy()) <= q + 1e-12)
    rows = wide[-1].weight
    pairs = torch.cdist(rows, rows).numpy() * 2.0  # the two roots of the gain stand in the body
    f, eps = wide(new.double()).numpy(), 0.3
    q = own[math.ceil(61 * 0.9) - 1]
    expected = [
        [all(f[n, i] - f[n, k] - min(pairs[i, k], 2 * math.sqrt(2)) * eps <= q for i in range(3) if i != k)
         for k in range(3)]
        for n in range(len(f))
    ]  # fmt: skip
    moved = found.predict_set(new, 0.1, eps)
    np.testing.assert_array_equal(moved.sets.numpy(), expected)
    assert moved.mean_size > found.predict_set(new, 0.1).mean_size
    assert "probability at least 0.9 (" in str(moved)
    assert "probability at least 0.9999999 (" in str(dataclasses.replace(moved, alpha=1e-7))  # :g would print 1


@pytest.mark.thorough
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.4])
def test_coverage_of_exchangeable_samples_is_what_was_asked_for(alpha: float) -> None:
    # With (n + 1)(1 - alpha) whole and continuous scores, the coverage is exactly 1 - alpha.
    torch.manual_seed(0)
    net, draws = Network([nn.Linear(2, 1)], (2,)), 3000
    x = torch.randn(draws, 20, 2)
    y = net(x.flatten(0, 1)).view(draws, 20) + torch.randn(draws, 20)
    proof, distances = prove(net), (y - net(x.flatten(0, 1)).view(draws, 20)).abs().double()
    scores = distances[:, :19].sort(1).values[..., None]
    found = [conformal.Calibration(s, False, proof).quantile(alpha).item() for s in scores]
    covered = float((distances[:, 19] <= torch.tensor(found)).double().mean())
    assert abs(covered - (1 - alpha)) < 4 * math.sqrt(alpha * (1 - alpha) / draws)
    one = conformal.calibrate(net, x[0, :19], y[0, :19]).predict_interval(x[:1, 19], alpha)
    assert one.mean_width == pytest.approx(2 * found[0], rel=1e-5)


def test_what_the_plain_set_holds_stays_under_every_move() -> None:
    net = classifier()
    torch.manual_seed(2)
    found = conformal.calibrate(net, torch.randn(50, 4), torch.randint(3, (50,)))
    x = torch.randn(200, 4, dtype=torch.float64)
    plain = found.predict_set(x, 0.2).sets
    for _ in range(5):
        step = torch.randn_like(x)
        moved = x + 0.4 * step / step.norm(dim=1, keepdim=True)
        assert bool((found.predict_set(moved, 0.2, 0.4).sets | ~plain).all())
    assert bool((plain & ~found.predict_set(moved, 0.2).sets).any())  # plain sets lose some


def regression() -> Network:
    net = Network([nn.Linear(2, 2, bias=False).double()], (2,))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    return net


def test_intervals_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    net, x = regression(), torch.randn(19, 2, dtype=torch.float64)
    y = net(x) + torch.randn(19, 2, dtype=torch.float64)
    found, new = conformal.calibrate(net, x, y), torch.randn(5, 2, dtype=torch.float64)
    q = (net(x) - y).abs().sort(0).values[17]
    inside = found.predict_interval(new, 0.1, 0.2)
    half = q + 0.2 * torch.tensor([5.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(inside.low, net(new) - half, rtol=0, atol=1e-12)
    torch.testing.assert_close(inside.high, net(new) + half, rtol=0, atol=1e-12)
    assert bool((inside.high > net(new) + half - 1e-13).all())
    assert inside.coverage(net(new)) == 1.0
    assert found.predict_interval(new, 0.1).mean_width == pytest.approx(float(2 * q.mean()))


def test_rounding_errors_are_on_the_safe_side() -> None:
    """Outputs that cancel: float64 is off by 1e-3, behind the 19th sample by 1; all holds for the exact ones."""
    torch.manual_seed(0)
    net = Network([nn.Linear(3, 2, bias=False).double()], (3,))
    net[0].weight.copy_(torch.tensor([[1.7e13, -1.7e13, 1.0], [0.6e13, -0.6e13, -1.0]]))
    a = (1 + torch.rand(79, 1, dtype=torch.float64)) * torch.tensor([1.0] * 19 + [500.0] * 60)[:, None]
    beside = a + 2.0**-44 * torch.rand(79, 1)
    beside[19:] = a[19:].nextafter(torch.tensor(math.inf).double())  # not a: sums in pairs would lose nothing
    x = torch.cat([a, beside, torch.randn(79, 1)], 1)
    rows, points = ([[Fraction(v) for v in row] for row in t.tolist()] for t in (net[0].weight, x))
    f = np.array([[sum(w * v for w, v in zip(row, point, strict=True)) for row in rows] for point in points])
    assert np.abs(net(x).numpy() - f)[19:].max() > 0.1

    y = torch.from_numpy(f[:19].astype(np.float64)).abs()
    found = conformal.calibrate(net, x[:19], y)
    exact = np.sort(np.abs(np.vectorize(Fraction)(y.numpy()) - f[:19]), 0)
    assert bool((found.scores.numpy() >= exact).all())
    inside = found.predict_interval(x[19:], 0.1)
    assert bool((inside.low.numpy() <= f[19:] - exact[17]).all())
    assert bool((inside.high.numpy() >= f[19:] + exact[17]).all())

    y = torch.randint(2, (19,))
    found, gaps = conformal.calibrate(net, x[:19], y), f[:, ::-1] - f  # of each class: the other one's lead
    exact = np.sort(gaps[np.arange(19), y])
    assert bool((found.scores[:, 0].numpy() >= exact).all())
    assert not bool((found.predict_set(x, 0.5).sets.numpy() < (gaps <= exact[9])).any())


def test_outputs_that_overflow_may_be_anything() -> None:
    net = Network([nn.Linear(2, 2, bias=False).double()], (2,))
    net[0].weight.copy_(torch.tensor([[1e150, 0.0], [-1e150, 0.0]], dtype=torch.float64))
    x, y = torch.tensor([[1e-150, 0.0]] * 8 + [[1e160, 0.0]], dtype=torch.float64), torch.ones(9, 2).double()
    regressed = conformal.calibrate(net, x, y)
    assert bool(regressed.scores[-1].isinf().all())
    found = regressed.predict_interval(x[7:], 0.5)
    assert found.high.isfinite().tolist() == found.low.isfinite().tolist() == [[True] * 2, [False] * 2]
    labels = conformal.calibrate(net, x[:8], torch.zeros(8, dtype=torch.int64))
    assert labels.predict_set(x[7:], 0.5).sets.tolist() == [[True, False], [True, True]]
    assert conformal.calibrate(net, x, torch.zeros(9, dtype=torch.int64)).scores[-1, 0] == math.inf
    net[0].weight.mul_(1e158)  # the outputs are finite, but squares of the weights are not
    net[0].weight[:, 1] = 1e308
    x[-1, 0] = 1e-150
    found = conformal.calibrate(net, x * 1e-158, y)
    inside = found.predict_interval(x * 1e-158, 0.5)
    assert bool(net(x * 1e-158).isfinite().all())
    assert bool(found.scores.isinf().all() and inside.low.isneginf().all() and inside.high.isposinf().all())


@pytest.mark.thorough
def test_sets_made_for_eps_keep_their_coverage_under_attack() -> None:
    split = load_data("digits").test
    x, y = split.batch(slice(None))
    net = load("digits-cayley")
    sets, wide = conformal.calibrate(net, x[:60], y[:60]), load("digits-cayley").double()
    moved, label = x[60:].double().requires_grad_(), y[60:]
    outputs = wide(moved)
    margin = outputs.gather(1, label[:, None])[:, 0] - outputs.scatter(1, label[:, None], -9.0).amax(1)
    (slope,) = torch.autograd.grad(margin.sum(), moved)
    attacked = (moved - 0.2 * slope / slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).detach().clamp(0, 1)
    assert sets.predict_set(attacked, 0.1, 0.2).coverage(label) >= sets.predict_set(x[60:], 0.1).coverage(label)


@pytest.mark.parametrize("alpha", [0.0, 0.01, 1.0, float("nan"), True, "a"])
def test_an_alpha_that_no_calibration_reaches_is_refused(alpha: object) -> None:
    net, x = classifier(), torch.randn(9, 4)
    found = conformal.calibrate(net, x, torch.randint(3, (9,)))
    with pytest.raises(OptionError, match=r"alpha: expected a number from 1/\(n \+ 1\) = 0.1"):
        found.predict_set(x, alpha)  # type: ignore[arg-type]
    assert found.predict_set(x, 0.1).sets.shape == (9, 3)
    # 1 / 31 is rounded down to a float; the limit in the message is one that is accepted.
    found = conformal.calibrate(net, x[:1].expand(30, 4), torch.zeros(30, dtype=torch.int64))
    with pytest.raises(OptionError, match=r"= 0\.032258065 \(of 30 calibration samples\)"):
        found.predict_set(x, 1 / 31)
    assert found.predict_set(x, 0.032258065).sets.shape == (9, 3)


@pytest.mark.thorough
def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(9, 4)
    found = conformal.calibrate(classifier(), x, torch.randint(3, (9,)))
    with pytest.raises(OptionError, match="use predict_set"):
        found.predict_interval(x)
    with pytest.raises(OptionError, match="eps: expected"):
        found.predict_set(x, 0.2, -1.0)
    with pytest.raises(ShapeError, match="expected targets of shape"):
        conformal.calibrate(classifier(), x, torch.randn(9))
    with pytest.raises(OptionError, match="expected labels from 0 to 2"):
        conformal.calibrate(classifier(), x, torch.full((9,), 3))
    sets, labels = found.predict_set(x, 0.2), torch.randint(3, (9,))
    assert sets.coverage(labels.numpy()) == sets.coverage(labels)
    for wrong, error in ((labels[:3], ShapeError), (labels.float(), OptionError), (labels + 3, OptionError)):
        with pytest.raises(error, match="expected"):
            sets.coverage(wrong)
    intervals = conformal.calibrate(classifier(), x, torch.randn(9, 3)).predict_interval(x, 0.2)
    assert intervals.coverage(intervals.low.numpy()) == 1.0
    with pytest.raises(ShapeError, match="expected targets of shape"):
        intervals.coverage(intervals.low.T)


def test_outputs_that_are_not_vectors_are_refused() -> None:
    torch.manual_seed(0)
    net, x = Network([nn.Linear(5, 3)], (4, 5)), torch.rand(4, 4, 5)  # as many samples as positions: bounds would mix
    with pytest.raises(ShapeError, match=r"expected outputs of shape \(N,\) or \(N, d\), got \(4, 4, 3\)"):
        conformal.calibrate(net, x, torch.zeros(4, 4, 3))


def test_a_proof_that_ignores_rounding_is_refused() -> None:
    net = Network([nn.Linear(1, 2)], (1,))
    with pytest.raises(OptionError, match="expected one with rounding='sound', got rounding='ignore'"):
        conformal.calibrate(
            net, torch.rand(5, 1), torch.zeros(5, dtype=torch.int64), proof=prove(net, rounding="ignore")
        )


def test_samples_stay_as_they_are_where_a_module_works_in_place() -> None:
    net = Network([nn.ReLU(inplace=True), nn.Linear(2, 2)], (2,))
    x = torch.randn(30, 2, dtype=torch.float64)
    kept = x.clone()
    conformal.calibrate(net, x, torch.zeros(30, dtype=torch.int64)).predict_set(x, alpha=0.2)
    assert torch.equal(x, kept)


def test_a_calibration_is_not_used_under_hooks() -> None:
    x = torch.randn(9, 4)
    found = conformal.calibrate(classifier(), x, torch.randint(3, (9,)))
    handle = register_module_forward_hook(lambda module, given, output: output * 0)
    try:
        with pytest.raises(NoRuleError, match="global forward hooks"):
            found.predict_set(x, 0.2)
    finally:
        handle.remove()
