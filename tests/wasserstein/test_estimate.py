"""Estimates against closed forms and exact assignment; honest about training samples, constants and diameters."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import lipkit
from lipkit.errors import DataError, NoRuleError, OptionError, ShapeError
from lipkit.models import mlp
from lipkit.modules import Network
from lipkit.wasserstein import Estimate, assignment, distance, hinge_kr_loss
from lipkit.wasserstein.critics import critic
from lipkit.wasserstein.estimate import _check_diameter, _rise
from lipkit.wasserstein.samples import as_samples


def normal(seed: int, n: int, d: int, shift: float = 0.0) -> Tensor:
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    x[:, 0] += shift
    return x


def sphere(seed: int, n: int, d: int, radius: float) -> Tensor:
    x = normal(seed, n, d)
    return radius * x / x.norm(dim=1, keepdim=True)


def quick(x, y, **options) -> Estimate:
    options = {"steps": 40, "batch_size": 64, "lr": 0.02} | options
    if "critic" not in options and isinstance(x, Tensor) and x.ndim == 2:
        torch.manual_seed(0)
        options["critic"] = mlp([16], input_shape=tuple(x.shape[1:]), classes=1)
    return distance(x, y, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("d", "family"), [(2, "cayley"), pytest.param(2, "sandwich", marks=pytest.mark.slow), (16, "cayley")]
)
def test_shifted_gaussians(d, family):
    x, y = normal(1, 4000, d), normal(2, 4000, d, 1.0)
    found = quick(x, y, critic=family, steps=80, batch_size=128)
    assert found.low <= 1
    assert found.high >= 0.95
    assert found.method == "student"
    assert not found.proved
    # The noise of the samples apart, the critics reach nearly all of it, and never more.
    fresh = normal(3, 20_000, d)
    shifted = fresh.clone()
    shifted[:, 0] += 1
    with torch.no_grad():
        reached = [float((f(fresh) - f(shifted)).mean()) / found.constant for f in found.critics]
    assert min(reached) > 0.95
    assert max(reached) <= 1 + 1e-6


@pytest.mark.thorough
def test_critics_that_still_rise_are_warned_of():
    """Two Gaussians of the plane, 3 apart: after 100 steps the whole interval lies below W1."""
    x, y = normal(0, 2000, 2), normal(1, 2000, 2, 3.0)
    with pytest.warns(UserWarning, match=r"the critics still rose by \d+\.\d % over the last third of 100 steps"):
        found = distance(x, y, steps=100)
    assert found.high < 2.9


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:the critics still rose")
def test_spheres():
    found = quick(sphere(1, 2000, 2, 1.0), sphere(2, 2000, 2, 2.0), critic="cayley", steps=150, lr=0.01)
    assert 0.8 < found.value <= found.high <= 1.01


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:the critics still rose")
def test_neither_unit_nor_origin_matters():
    """Metres or micrometres, 0 or 300 kelvin: nothing moves but the unit."""
    x, y = sphere(1, 400, 2, 1.0).double(), sphere(2, 400, 2, 2.0).double()
    found = quick(x, y, critic="cayley", steps=30)
    assert found.low > 0.5
    for scale in (2.0**-40, 2.0**40):
        scaled = quick(scale * x, scale * y, critic="cayley", steps=30)
        ends = scaled.low / scale, scaled.value / scale, scaled.high / scale
        assert ends == pytest.approx((found.low, found.value, found.high), rel=1e-6)  # rounding bounds apart
        assert scaled.constant == pytest.approx(1, abs=1e-6)
    origin = torch.tensor([300.0, -1e5])
    assert quick(x + origin, y + origin, critic="cayley", steps=30).value == pytest.approx(found.value, abs=0.02)
    x.requires_grad_()
    assert quick(x, y, critic="cayley", steps=30).value == found.value
    x.requires_grad_(False)
    hinge = functools.partial(hinge_kr_loss, margin=0.5)  # the margin is in units of the samples
    wide = functools.partial(hinge_kr_loss, margin=8.0)
    ends = [quick(s * x, s * y, critic="cayley", steps=9, loss=f).value / s for s, f in ((1, hinge), (16, wide))]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


@pytest.mark.thorough
def test_the_order_does_not_matter():
    x, y = normal(1, 500, 2), normal(2, 500, 2, 2.0)
    first, second = quick(x, y, steps=60), quick(y, x, steps=60)
    assert first.value == pytest.approx(second.value, abs=0.05)
    assert min(first.value, second.value) > 1.8


@pytest.mark.thorough
def test_equal_distributions_have_no_distance():
    found = quick(normal(1, 2000, 8), normal(2, 2000, 8))
    assert found.low <= 0 <= found.high
    assert found.train_value > found.value  # the critics learnt noise, and the held-out samples do not reward it


@pytest.mark.thorough
def test_below_the_exact_distance_of_the_samples():
    x, y = normal(1, 400, 2), 0.5 * normal(2, 400, 2, 4.0)
    exact = assignment(x, y)
    found = quick(x, y, steps=80)
    assert 0.85 * exact < found.value < found.high
    assert found.low <= exact


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), d=st.integers(1, 3), n=st.integers(4, 12), scale=st.floats(0.1, 10))
def test_a_fixed_critic_never_passes_the_exact_distance(seed, d, n, scale):
    """Of the empirical distributions, for which the mean is the expectation: sound for every critic and sample."""
    x, y = scale * normal(seed, n, d), scale * normal(seed + 1, n, d, 0.5)
    torch.manual_seed(seed)
    net = mlp([8], gamma=3.0, input_shape=(d,), classes=1)
    found = distance(x, y, critic=net, steps=0)
    assert abs(found.value) <= assignment(x, y) * (1 + 1e-6)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_fixed_critic_by_hand(steps):
    """A step of length 1e-30 moves no weight, and the folds are of one size: both halves have the same mean."""
    net = nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0, 4.0]]))
    x, y = normal(1, 50, 2), normal(2, 70, 2, 1.0)
    found = distance(x, y, critic=net, steps=steps, lr=1e-30, confidence=0.9)
    assert found.constant == pytest.approx(5, rel=1e-9)
    assert found.constant >= 5
    a, b = (t.double().numpy() @ [0.6, 0.8] for t in (x, y))
    assert found.value == pytest.approx(a.mean() - b.mean())
    assert found.held_out == (50, 70)
    assert "estimated on 50 and 70 held-out samples" in found.describe()
    assert found.critic is found.critics[0]
    if steps:
        assert found.train_value == pytest.approx(found.value)
        assert len(found.critics) == 2
    else:
        ends = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.9)
        assert (found.low, found.high) == pytest.approx((ends.low, ends.high), rel=1e-9)
        assert math.isnan(found.train_value)
        assert len(found.critics) == 1


def test_the_rounding_of_a_critic_is_no_distance():
    """x + 2^53 rounds to 2^53 below 1 and to 2^53 + 2 above: the means lie 2 apart, the samples 1."""
    y = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.98 + 0.01
    net = nn.Linear(1, 1).double()
    for bias in (2.0**53, 1.0):
        with torch.no_grad():
            net.weight.fill_(1.0), net.bias.fill_(bias)
        found = distance(y + 1, y, critic=net, steps=0, diameter=2.0)
        assert "proved for this sample size" in str(found)
        assert found.low <= 1
    assert found.low > 0.8


def test_a_rise_is_that_of_the_last_third():
    curves = torch.tensor([[9.0, -9.0, 7.0, 1.0, 1.01, 0.99, 2.0, 2.01, 1.99]]).expand(2, -1)
    assert _rise(curves) == pytest.approx(0.5)
    assert _rise(curves[:, [0, 1, 2, 6, 7, 8, 3, 4, 5]]) == 0
    assert _rise(torch.tensor([[0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 1.0, 9.0, 0.0]])) == 0  # noise


@pytest.mark.parametrize("name", ["x", "y"])
def test_every_sample_must_lie_within_the_diameter(name):
    """In any part of 4096."""
    samples = {"x": torch.ones(5000, 1, dtype=torch.float64), "y": torch.ones(5000, 1, dtype=torch.float64)}
    samples[name][100] = 4.0
    _check_diameter(**samples, diameter=3.0)
    with pytest.raises(DataError, match=f"within the diameter 2.99, got one of {name} at distance 3"):
        _check_diameter(**samples, diameter=2.99)


@pytest.mark.thorough
def test_held_out_samples_are_not_trained_on():
    """A sample that is moved changes the critics of all folds but the one that holds it out."""
    x, y = normal(1, 12, 2), normal(2, 12, 2, 1.0)
    before = quick(x, y, steps=3).critics
    for i in range(6):
        moved = x.clone()
        moved[i] = 1e3
        after = quick(moved, y, steps=3).critics
        same = [
            all(torch.equal(value, old.state_dict()[name]) for name, value in new.state_dict().items())
            for new, old in zip(after, before, strict=True)
        ]
        assert sorted(same) == [False, True]


@pytest.mark.parametrize("folds", [1, 2, 3])
def test_every_sample_is_held_out_once(folds):
    found = quick(normal(1, 31, 2), normal(2, 50, 2), steps=2, folds=folds)
    assert found.held_out == ((31, 50) if folds > 1 else (16, 25))
    assert len(found.critics) == folds


@pytest.mark.thorough
def test_the_proved_interval():
    x, y = normal(1, 400, 2).clamp(-1, 1), normal(2, 400, 2).clamp(-1, 1) + torch.tensor([0.5, 0.0])
    asymptotic, proved = quick(x, y), quick(x, y, diameter=3.3)
    assert proved.value == asymptotic.value
    assert proved.proved
    assert proved.method == "bernstein"
    assert proved.low < asymptotic.low < asymptotic.high < proved.high
    assert quick(x, y, diameter=33).high > proved.high
    with pytest.raises(DataError, match=r"within the diameter 0\.5, got one of [xy] at distance"):
        quick(x, y, diameter=0.5)


@pytest.mark.thorough
def test_reproducible_and_without_side_effects():
    x, y = normal(1, 60, 3), normal(2, 60, 3)
    before, state = x.clone(), torch.get_rng_state()
    first = distance(x, y, steps=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, before)
    torch.manual_seed(99)
    assert distance(x, y, steps=5).value == first.value
    assert distance(x, y, steps=5, seed=1).value != first.value


@pytest.mark.thorough
def test_a_module_is_copied():
    net = mlp([8], input_shape=(3,), classes=1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = quick(normal(1, 60, 3), normal(2, 60, 3, 1.0), critic=net, steps=5)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert isinstance(found.critic, Network)
    assert float(lipkit.lipschitz(found.critic)) <= found.constant


# One of each kind: symbol, kernel, power method, projection, rescaling, nonlinear block.
@pytest.mark.thorough
@pytest.mark.parametrize("family", ["cayley", "bcop", "ossn", "svcm", "aol", "sandwich"])
def test_families_on_images(family):
    x = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x * 0.5).flip(0)
    found = quick(x, y, critic=family, steps=2, batch_size=8)
    assert math.isfinite(found.value)
    assert found.low < found.value < found.high
    # The export's bound is recomputed from its numbers.
    assert all(float(lipkit.lipschitz(f, (1, 8, 8))) <= found.constant for f in found.critics)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:the critics still rose")
def test_hinge_and_other_losses():
    x, y = normal(1, 600, 2), normal(2, 600, 2, 3.0)
    found = quick(x, y, loss=hinge_kr_loss, steps=60)
    assert found.value > 2.7
    f = found.critic
    with torch.no_grad():
        share = float(((f(x) > 0).float().mean() + (f(y) < 0).float().mean()) / 2)
    assert share > 0.85  # the hinge puts the decision between the two, where the best classifier has 0.93


@pytest.mark.thorough
def test_inputs():
    x = np.random.default_rng(0).normal(size=50)
    found = quick(x, x + 2, steps=40)
    assert found.value == pytest.approx(2, abs=0.5)


def test_samples_are_numbers_of_one_range():
    images = torch.randint(0, 256, (4, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(as_samples(images, "x"), images.float() / 255)
    for values, message in ((images[:3], r"4 samples .* got \(3, 3, 4, 4\)"), (torch.zeros(5, 0), r"got \(5, 0\)")):
        with pytest.raises(DataError, match=message):
            as_samples(values, "x")


X = normal(1, 20, 2)


@pytest.mark.parametrize(
    ("x", "y", "options", "error", "message"),
    [
        (X, normal(1, 20, 3), {}, ShapeError, r"x and y of one shape, got \(2,\) and \(3,\)"),
        (X, X[:3], {}, DataError, "y: expected at least 4 samples"),
        (X * math.nan, X, {}, DataError, "x: expected finite samples"),
        ((255 * X.abs()).byte(), 3 + X.abs(), {}, DataError, "the same units .*got uint8 images and values up to"),
        (2 + X.abs(), (255 * X.abs()).byte().numpy(), {}, DataError, "in the same units"),
        (X.int(), X, {}, DataError, "x: expected floating-point samples or uint8 images, got dtype"),
        (np.zeros(5, np.int64), X, {}, DataError, "got dtype torch.int64"),
        ([1.0], X, {}, DataError, "x: expected a tensor or a numpy array, got list"),
        (np.ma.zeros(5), X, {}, DataError, "x: expected a tensor or a numpy array, got MaskedArray"),
        (np.zeros(5, np.longdouble), X, {}, DataError, "x: expected an array of numbers of at most 64 bits, got dtype"),
        (torch.tensor(1.0), X, {}, ShapeError, "got a single number"),
        (X, X, {"folds": 11}, DataError, "at least 22 samples of each for 11 folds"),
        (X, X, {"folds": 0}, OptionError, "folds: expected an integer of at least 1, got 0"),
        (X, X, {"steps": 0, "critic": None}, OptionError, "steps >= 1 for a new critic, got 0"),
        (X, X, {"batch_size": 0}, OptionError, "batch_size: expected an integer of at least 1"),
        (X, X, {"lr": -1.0}, OptionError, "lr: expected a positive finite number"),
        (X, X, {"confidence": 1.0}, OptionError, "confidence between 0 and 1, got 1"),
        (X, X, {"diameter": 0.0}, OptionError, "diameter: expected a positive finite number, got 0"),
        (X, X, {"critic": "cauchy"}, OptionError, "cauchy"),
        (X, X, {"critic": nn.Linear(2, 3)}, OptionError, r"critic of one output, 128 values, got the shape \(128, 3\)"),
        (X, X, {"critic": nn.RNN(2, 1)}, OptionError, "critic of one output, 128 values, got the shape of a tuple"),
        (X, X, {"critic": nn.ReLU()}, OptionError, "a critic with parameters to train, got ReLU"),
        (X, X, {"critic": nn.Sequential(nn.Linear(2, 1), nn.LogSoftmax(1))}, NoRuleError, "LogSoftmax"),
        (X, X, {"loss": lambda a, b: (a - b).mean() * math.nan}, OptionError, "finite loss, got nan at step 1"),
        (X, X, {"loss": lambda a, b: a - b}, OptionError, r"loss: expected one number that depends .*, got tensor\("),
        (X, X, {"loss": lambda a, b: 1.0}, OptionError, "loss: expected one number that depends .*, got 1.0"),
        (X, X, {"loss": lambda a, b: a.detach().mean()}, OptionError, "loss: expected one number that depends"),
        (X, X, {"device": "toaster"}, OptionError, "expected a device of this machine, got 'toaster'"),
        (
            X.double() * 1e40,
            X,
            {"critic": "cayley"},
            OptionError,
            r"samples: expected a spread from 1e-37 to 1e38, .* got about 5e\+39: choose another unit",
        ),
        (
            X.double() * 1e-60,
            X * 0,
            {"critic": "cayley"},
            OptionError,
            "samples: expected a spread from 1e-37 to 1e38, .* got about 3e-61: choose another unit",
        ),
    ],
)
def test_refusals(x, y, options, error, message):
    with pytest.raises(error, match=message):
        quick(x, y, **options)


def test_assignment_by_trying_all():
    x, y = normal(1, 5, 2).double(), normal(2, 5, 2).double()
    cost = np.linalg.norm(x.numpy()[:, None] - y.numpy()[None], axis=2)
    best = min(cost[range(5), p].mean() for p in map(list, itertools.permutations(range(5))))
    assert assignment(x, y) == pytest.approx(best, rel=1e-12)
    for size in (1e-200, 1e200):  # whose squares are no float64
        assert assignment(size * x, size * y) == pytest.approx(size * best, rel=1e-12)
    with pytest.raises(ShapeError, match="two samples of one shape"):
        assignment(x, y[:4])
    assert assignment(x.numpy(), y.float().numpy()) == pytest.approx(best, rel=1e-6)
    assert assignment(np.array([0.0, 1.0]), np.zeros(2)) == 0.5  # samples (n,), as `distance` takes them
    with pytest.raises(DataError, match="at least 1 samples"):
        assignment(x[:0], y[:0])
    with pytest.raises(OptionError, match="at most 4096 samples, got 4097"):
        assignment(torch.zeros(4097, 1), torch.zeros(4097, 1))
    with pytest.raises(DataError, match="finite samples"):
        assignment(x * math.nan, y)


def test_assignment_in_one_dimension_is_sorting():
    x, y = normal(1, 300, 1), normal(2, 300, 1, 0.7)
    expected = np.abs(np.sort(x.numpy().ravel()) - np.sort(y.numpy().ravel())).mean(dtype=np.float64)
    assert assignment(x, y) == pytest.approx(expected, rel=1e-6)


def test_critics_for_odd_images_are_dense():
    assert next(type(m).__name__ for m in critic((1, 5, 6))) == "Flatten"
    assert critic((3, 6, 4))(torch.zeros(2, 3, 6, 4)).shape == (2, 1)


def test_kernels_that_a_family_takes():
    net = critic((1, 8, 8), "eco")
    lipkit.export(net, (1, 8, 8))
    assert [m.kernel_size for m in net if hasattr(m, "kernel_size")] == [(2, 2), (2, 2)]
