"""PGD against closed forms on linear models, and its promise never to leave ball or box."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn

from lipkit.attacks import pgd_l2
from lipkit.attacks.pgd import margin_loss, misclassified, norms, project
from lipkit.errors import OptionError, ShapeError


def linear(features: int = 5, classes: int = 4, scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(features, classes).requires_grad_(False)
    layer.weight *= scale
    layer.bias *= scale
    return layer


def points(count: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def boundary_distance(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    logits, rows = layer(x).double(), layer.weight.double()
    gaps = logits.gather(1, y[:, None]) - logits
    apart = (rows[y][:, None] - rows[None]).norm(dim=2)
    return (gaps / apart).nan_to_num(math.inf).amin(dim=1)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e4])
def test_linear_model_falls_exactly_beyond_the_distance_to_its_boundary(scale: float) -> None:
    # at scale 1e4 the gradient of cross-entropy vanishes in float32; the margin loss has no such blind spot
    layer = linear(scale=scale)
    x = points(60, 5)
    y = layer(x).argmax(dim=1)
    distance = boundary_distance(layer, x, y)
    near = pgd_l2(layer, x, y, 0.999 * distance, steps=60, box=None)
    far = pgd_l2(layer, x, y, 1.02 * distance + 1e-5, steps=60, restarts=4, box=None)
    assert not misclassified(layer(near), y).any()
    assert misclassified(layer(far), y).all()


@pytest.mark.parametrize("loss", ["margin", "ce"])
def test_both_losses_fool_a_small_network(loss: str) -> None:
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
    x = points(50, 5)
    y = network(x).argmax(dim=1)
    assert misclassified(network(pgd_l2(network, x, y, 1.5, loss=loss, restarts=2)), y).float().mean() > 0.9
    assert all(parameter.grad is None for parameter in network.parameters())


@settings(deadline=None, max_examples=60)
@given(
    st.floats(-12, 3),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([(0.0, 1.0), None]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_never_outside_ball_or_box(
    exponent: float, dtype: torch.dtype, box: tuple[float, float] | None, stop_early: bool, seed: int
) -> None:
    eps = 10.0**exponent
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).to(dtype)
    x = points(6, 3, 2, 2, seed=seed, dtype=dtype).round(decimals=1)  # some samples on the faces of the box
    generator = torch.Generator().manual_seed(seed)
    y = torch.zeros(6, dtype=torch.int64)
    found = pgd_l2(model, x, y, eps, steps=4, restarts=2, box=box, generator=generator, stop_early=stop_early)
    assert (found.double() - x.double()).flatten(1).norm(dim=1).le(eps).all()
    assert found.dtype == dtype
    if box is not None:
        assert found.min() >= 0
        assert found.max() <= 1


def test_a_ball_of_a_few_float32_steps_is_still_used() -> None:
    centre = points(20, 50) / 2 + 0.5
    radius = torch.full((20,), 1e-6, dtype=torch.float64)
    result = project(centre + 1e-5 * torch.randn_like(centre), centre, radius, None)
    assert norms(result, centre).le(1e-6).all()
    assert norms(result, centre).ge(5e-7).all()


def test_projection_is_the_euclidean_one() -> None:
    generator = np.random.default_rng(0)
    for _ in range(30):
        centre, radius = generator.random(4), generator.uniform(0.1, 1.0)
        point = centre + generator.normal(size=4)
        start, end = torch.tensor(centre[None]), torch.tensor(point[None])
        ours = project(end, start, torch.tensor([radius]), (0.0, 1.0))[0].numpy()
        best = minimize(
            lambda z, p=point: ((z - p) ** 2).sum(),
            centre,
            jac=lambda z, p=point: 2 * (z - p),
            bounds=[(0, 1)] * 4,
            constraints={
                "type": "ineq",
                "fun": lambda z, c=centre, r=radius: r**2 - ((z - c) ** 2).sum(),
                "jac": lambda z, c=centre: -2 * (z - c),
            },
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        np.testing.assert_allclose(ours, best.x, atol=1e-5)
        assert ((ours - point) ** 2).sum() <= best.fun * (1 + 1e-6) + 1e-8


def test_a_misclassified_sample_costs_one_evaluation_and_stays() -> None:
    seen = []

    def model(x: Tensor) -> Tensor:
        seen.append(len(x))
        return torch.stack([x.sum(dim=1), -x.sum(dim=1)], dim=1)

    x = points(4, 3)
    y = torch.tensor([1, 0, 1, 0])  # half of them wrong from the start
    found = pgd_l2(model, x, y, 1e-3, steps=5)
    assert torch.equal(found[[0, 2]], x[[0, 2]])
    assert seen == [4, 2, 2, 2, 2, 2]


def test_without_early_stop_the_loss_keeps_rising() -> None:
    layer = linear()
    x = points(30, 5)
    y = layer(x).argmax(dim=1)
    quick = pgd_l2(layer, x, y, 2.0, box=None)
    full = pgd_l2(layer, x, y, 2.0, box=None, stop_early=False)
    assert (margin_loss(layer(full), y) >= margin_loss(layer(quick), y)).all()
    assert margin_loss(layer(full), y).mean() > margin_loss(layer(quick), y).mean()
    assert norms(full, x).min() > 1.99


def test_same_generator_same_points_and_global_randomness_untouched() -> None:
    layer, x = linear(), points(8, 5)
    y = layer(x).argmax(dim=1)

    def attack(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return pgd_l2(layer, x, y, 0.01, steps=2, restarts=3, loss="ce", generator=generator)

    before = torch.get_rng_state()
    assert torch.equal(attack(1), attack(1))
    assert torch.equal(pgd_l2(layer, x, y, 0.01, restarts=2), pgd_l2(layer, x, y, 0.01, restarts=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_leaves_a_plateau() -> None:
    def model(x: Tensor) -> Tensor:  # flat around the sample: the gradient is 0 there
        rise = ((x[:, 0] - x[:, 1]).abs() - 0.3).clamp_min(0)
        return torch.stack([0.1 - rise, rise], dim=1)

    found = pgd_l2(model, torch.zeros(1, 2), torch.tensor([0]), 1.0, steps=60, box=None)
    assert misclassified(model(found), torch.tensor([0])).all()


def test_survives_nan_gradients_and_counts_nan_logits_as_wrong() -> None:
    def model(x: Tensor) -> Tensor:
        root = (x[:, :1] - 1.0).sqrt()  # NaN in value and gradient
        return torch.cat([root * 0 + 1, root * 0], dim=1)

    x = torch.zeros(2, 3)
    found = pgd_l2(model, x, torch.tensor([0, 0]), 0.1, steps=3, box=None)
    assert found.isfinite().all()
    assert misclassified(model(found), torch.tensor([0, 0])).all()


def test_one_radius_for_each_sample_zero_included() -> None:
    layer, x = linear(), points(3, 5)
    y = layer(x).argmax(dim=1)
    eps = torch.tensor([0.0, 1e-3, 10.0])
    found = pgd_l2(layer, x, y, eps, box=None, stop_early=False)
    assert torch.equal(found[0], x[0])
    torch.testing.assert_close(norms(found, x), eps.double(), rtol=1e-4, atol=0)


def test_works_under_no_grad_and_on_an_empty_batch() -> None:
    layer, x = linear(), points(3, 5)
    with torch.no_grad():
        found = pgd_l2(layer, x, layer(x).argmax(dim=1), 3.0, box=None)
    assert misclassified(layer(found), layer(x).argmax(dim=1)).all()
    assert pgd_l2(layer, x[:0], torch.zeros(0, dtype=torch.int64), 3.0).shape == (0, 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": 0}, OptionError, "steps=0"),
        ({"restarts": 0}, OptionError, "restarts=0"),
        ({"loss": "dlr"}, OptionError, "got 'dlr'"),
        ({"eps": -1.0}, OptionError, "finite and >= 0"),
        ({"eps": math.nan}, OptionError, "finite and >= 0"),
        ({"eps": torch.ones(2)}, ShapeError, r"or 3 of them, got shape \(2,\)"),
        ({"y": torch.zeros(2, dtype=torch.int64)}, ShapeError, "expected 3 labels"),
        ({"x": torch.full((3, 5), 1.5)}, OptionError, "got values from 1.5 to 1.5"),
        ({"x": torch.full((3, 5), math.nan)}, OptionError, "inside the box"),
        ({"x": torch.zeros(3, 5, dtype=torch.uint8)}, OptionError, "float32 or float64"),
        ({"model": lambda x: x[:, 0]}, ShapeError, r"got \(3,\)"),
    ],
)
def test_refusals(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict = {"model": linear(), "x": points(3, 5), "y": torch.zeros(3, dtype=torch.int64), "eps": 0.1}
    attack: Callable = pgd_l2
    with pytest.raises(error, match=message):
        attack(**(arguments | change))
