"""PGD in l2 and l_inf against closed forms on linear models, and its promise never to leave ball or box."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from torch import Tensor, nn

from lipkit.attacks import pgd
from lipkit.attacks.ascent import ball, margin_loss, misclassified, norms, project_l2, project_linf
from lipkit.errors import OptionError, ShapeError


def linear(features: int = 5, classes: int = 4, scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(features, classes).requires_grad_(False)
    layer.weight *= scale
    layer.bias *= scale
    return layer


def points(count: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def boundary_distance(layer: nn.Linear, x: Tensor, y: Tensor, norm: str = "l2") -> Tensor:
    """Distance to the nearest boundary: the gap over the dual norm."""
    logits, rows = layer(x).double(), layer.weight.double()
    gaps = logits.gather(1, y[:, None]) - logits
    apart = (rows[y][:, None] - rows[None]).norm(2 if norm == "l2" else 1, dim=2)
    return (gaps / apart).nan_to_num(math.inf).amin(dim=1)


@pytest.mark.thorough
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e4])
def test_linear_model_falls_exactly_beyond_the_distance_to_its_boundary(scale: float, norm: str) -> None:
    # at scale 1e4 the gradient of cross-entropy vanishes in float32; the margin loss has no such blind spot
    layer = linear(scale=scale)
    x = points(60, 5)
    y = layer(x).argmax(dim=1)
    distance = boundary_distance(layer, x, y, norm)
    near = pgd(layer, x, y, eps=0.999 * distance, norm=norm, steps=60, restarts=4, box=None)
    far = pgd(layer, x, y, eps=1.02 * distance + 1e-5, norm=norm, steps=60, restarts=4, box=None)
    assert not misclassified(layer(near), y).any()
    assert misclassified(layer(far), y).all()


@pytest.mark.parametrize("loss", ["margin", "ce"])
def test_both_losses_fool_a_small_network(loss: str) -> None:
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
    x = points(50, 5)
    y = network(x).argmax(dim=1)
    assert misclassified(network(pgd(network, x, y, eps=1.5, loss=loss, restarts=2)), y).float().mean() > 0.9
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.thorough
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
    found = pgd(model, x, y, eps=eps, steps=4, restarts=2, box=box, generator=generator, stop_early=stop_early)
    assert (found.double() - x.double()).flatten(1).norm(dim=1).le(eps).all()
    assert found.dtype == dtype
    if box is not None:
        assert found.min() >= 0
        assert found.max() <= 1


def test_a_ball_of_a_few_float32_steps_is_still_used() -> None:
    centre = points(20, 50) / 2 + 0.5
    radius = torch.full((20,), 1e-6, dtype=torch.float64)
    result = project_l2(centre + 1e-5 * torch.randn_like(centre), centre, radius, None)
    assert norms(result, centre).le(1e-6).all()
    assert norms(result, centre).ge(5e-7).all()


@pytest.mark.parametrize("box", [(0.0, 1.0), None])
@pytest.mark.parametrize("eps", [1e20, 1e37, 1e300])
def test_a_radius_whose_square_overflows_gives_points_inside(eps: float, box: tuple[float, float] | None) -> None:
    x = points(8, 5)
    attacked = pgd(linear(), x, linear()(x).argmax(1), eps=eps, steps=3, restarts=2, box=box)
    assert bool((norms(attacked, x) <= eps).all())
    assert box is None or bool(((attacked >= 0) & (attacked <= 1)).all())


def test_projection_is_the_euclidean_one() -> None:
    generator = np.random.default_rng(0)
    for _ in range(30):
        centre, radius = generator.random(4), generator.uniform(0.1, 1.0)
        point = centre + generator.normal(size=4)
        start, end = torch.tensor(centre[None]), torch.tensor(point[None])
        ours = project_l2(end, start, torch.tensor([radius]), (0.0, 1.0))[0].numpy()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["grey", "binary"])
def test_projection_of_images_uses_the_whole_ball(kind: str, dtype: torch.dtype) -> None:
    """Against bisection for the scale, where most entries meet a face of the box, some or none of them."""
    torch.manual_seed(0)
    start = points(40, 1, 28, 28, dtype=dtype)
    start = start if kind == "grey" else start.round()
    radius = torch.linspace(0.05, 15.0, 40, dtype=torch.float64)
    away = torch.randn_like(start) * (torch.rand_like(start) ** 4 + 1e-3)  # entries of all sizes
    away *= (3 * radius / norms(start + away, start)).to(dtype).view(-1, 1, 1, 1)
    end = start + away
    result = project_l2(end, start, radius, (0.0, 1.0))
    assert norms(result, start).le(radius).all()
    assert ((result >= 0) & (result <= 1)).all()
    moved, met = 0, 0
    for found, centre, point, size in zip(result, start, end, radius.tolist(), strict=True):
        c, p = centre.double().numpy(), point.double().numpy()

        def at(scale: float, c=c, p=p) -> np.ndarray:
            return (c + scale * (p - c)).clip(0, 1)

        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.linalg.norm(at(middle) - c) <= size else (low, middle)
        # A length within 1e-6 of the whole one, and entries within what that and the rounding allow.
        np.testing.assert_allclose(np.linalg.norm(found.double().numpy() - c), np.linalg.norm(at(low) - c), rtol=2e-6)
        np.testing.assert_allclose(found.double().numpy(), at(low), atol=4e-6 * max(size, 1.0))
        moved += low < 0.999
        met += bool(((at(low) == 0) | (at(low) == 1)).any())
    assert min(moved, met) > 5


def test_a_misclassified_sample_costs_one_evaluation_and_stays() -> None:
    seen = []

    def model(x: Tensor) -> Tensor:
        seen.append(len(x))
        return torch.stack([x.sum(dim=1), -x.sum(dim=1)], dim=1)

    x = points(4, 3)
    y = torch.tensor([1, 0, 1, 0])  # half of them wrong from the start
    found = pgd(model, x, y, eps=1e-3, steps=5)
    assert torch.equal(found[[0, 2]], x[[0, 2]])
    assert seen == [4, 2, 2, 2, 2, 2]


def test_without_early_stop_the_loss_keeps_rising() -> None:
    layer = linear()
    x = points(30, 5)
    y = layer(x).argmax(dim=1)
    quick = pgd(layer, x, y, eps=2.0, box=None)
    full = pgd(layer, x, y, eps=2.0, box=None, stop_early=False)
    assert (margin_loss(layer(full), y) >= margin_loss(layer(quick), y)).all()
    assert margin_loss(layer(full), y).mean() > margin_loss(layer(quick), y).mean()
    assert norms(full, x).min() > 1.99


@pytest.mark.thorough
def test_same_generator_same_points_and_global_randomness_untouched() -> None:
    layer, x = linear(), points(8, 5)
    y = layer(x).argmax(dim=1)

    def attack(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return pgd(layer, x, y, eps=0.01, steps=2, restarts=3, loss="ce", generator=generator)

    before = torch.get_rng_state()
    assert torch.equal(attack(1), attack(1))
    assert torch.equal(pgd(layer, x, y, eps=0.01, restarts=2), pgd(layer, x, y, eps=0.01, restarts=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_leaves_a_plateau() -> None:
    def model(x: Tensor) -> Tensor:  # flat around the sample: the gradient is 0 there
        rise = ((x[:, 0] - x[:, 1]).abs() - 0.3).clamp_min(0)
        return torch.stack([0.1 - rise, rise], dim=1)

    found = pgd(model, torch.zeros(1, 2), torch.tensor([0]), eps=1.0, steps=60, box=None)
    assert misclassified(model(found), torch.tensor([0])).all()


def test_survives_nan_gradients_and_counts_nan_logits_as_wrong() -> None:
    def model(x: Tensor) -> Tensor:
        root = (x[:, :1] - 1.0).sqrt()  # NaN in value and gradient
        return torch.cat([root * 0 + 1, root * 0], dim=1)

    x = torch.zeros(2, 3)
    found = pgd(model, x, torch.tensor([0, 0]), eps=0.1, steps=3, box=None)
    assert found.isfinite().all()
    assert misclassified(model(found), torch.tensor([0, 0])).all()


def test_one_radius_for_each_sample_zero_included() -> None:
    layer, x = linear(), points(3, 5)
    y = layer(x).argmax(dim=1)
    eps = torch.tensor([0.0, 1e-3, 10.0])
    found = pgd(layer, x, y, eps=eps, box=None, stop_early=False)
    assert torch.equal(found[0], x[0])
    torch.testing.assert_close(norms(found, x), eps.double(), rtol=1e-4, atol=0)


def test_works_under_no_grad_and_on_an_empty_batch() -> None:
    layer, x = linear(), points(3, 5)
    with torch.no_grad():
        found = pgd(layer, x, layer(x).argmax(dim=1), eps=3.0, box=None)
    assert misclassified(layer(found), layer(x).argmax(dim=1)).all()
    assert pgd(layer, x[:0], torch.zeros(0, dtype=torch.int64), eps=3.0).shape == (0, 5)


@pytest.mark.thorough
def test_in_the_box_a_linear_programme_finds_no_more() -> None:
    layer = linear(classes=2)
    x = points(20, 5)
    y = layer(x).argmax(dim=1)
    eps = 0.3
    found = pgd(layer, x, y, eps=eps, norm="linf", steps=40, stop_early=False)
    slope = (layer.weight[1] - layer.weight[0]).double().numpy()
    for i in range(len(x)):
        rising = slope if y[i] == 0 else -slope
        limits = [(max(0.0, v - eps), min(1.0, v + eps)) for v in x[i].double().tolist()]
        best = linprog(-rising, bounds=limits)
        assert found[i].double().numpy() @ rising == pytest.approx(-best.fun, abs=1e-5)


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(
    st.floats(-12, 3),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([(0.0, 1.0), None]),
    st.sampled_from([None, 0.2, 3.0]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_never_outside_cube_or_box(
    exponent: float,
    dtype: torch.dtype,
    box: tuple[float, float] | None,
    step: float | None,
    start: bool,
    seed: int,
) -> None:
    eps = 10.0**exponent
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).to(dtype)
    x = points(6, 3, 2, 2, seed=seed, dtype=dtype).round(decimals=1)
    y = torch.zeros(6, dtype=torch.int64)
    found = pgd(
        model,
        x,
        y,
        eps=eps,
        norm="linf",
        steps=4 if step is None else [step] * 4,
        restarts=2,
        box=box,
        random_start=start,
    )
    assert np.abs(found.numpy().astype(np.float64) - x.numpy().astype(np.float64)).max() <= eps
    assert found.dtype == dtype
    if box is not None:
        assert found.min() >= 0
        assert found.max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projection_on_the_cube_clips_each_entry_and_uses_the_whole_ball(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    centre = generator.random((40, 7))
    radius = generator.uniform(1e-9, 1.0, 40)
    point = centre + generator.normal(size=(40, 7))
    start, end = torch.tensor(centre, dtype=dtype), torch.tensor(point, dtype=dtype)
    result = project_linf(end, start, torch.tensor(radius), (0.0, 1.0)).double().numpy()
    start64 = start.double().numpy()
    expected = np.clip(end.double().numpy(), start64 - radius[:, None], start64 + radius[:, None]).clip(0, 1)
    assert np.abs(result - expected).max() <= 2 * torch.finfo(dtype).eps
    assert (np.abs(result - start64) <= radius[:, None]).all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_steps_of_given_lengths_and_random_starts(norm: str) -> None:
    layer = linear(classes=2)
    x, y = points(30, 5), torch.zeros(30, dtype=torch.int64)
    common = {"eps": 0.1, "norm": norm, "box": None, "stop_early": False}
    order = math.inf if norm == "linf" else 2
    for size in (0.25, 0.5):
        for steps in ([size], [size - 0.125, 0.125]):  # two classes: every step goes the same way
            moved = (pgd(layer, x, y, steps=steps, **common) - x).norm(order, dim=1)
            assert torch.allclose(moved, torch.full_like(moved, 0.1 * size), rtol=1e-4)
    tiny = pgd(layer, x, y, steps=[1e-6], random_start=True, **common) - x
    assert (tiny.norm(order, dim=1) > 1e-4).all()  # far from the sample, without a step that led there
    again = pgd(layer, x, y, steps=[1e-6], random_start=True, **common) - x
    assert torch.equal(tiny, again)
    other = torch.Generator().manual_seed(7)
    assert not torch.equal(tiny, pgd(layer, x, y, steps=[1e-6], random_start=True, generator=other, **common) - x)


def test_a_sample_without_gradient_moves_at_random() -> None:
    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.stack([x.sum(1), 0 * x.sum(1)], 1)

        @staticmethod
        def backward(ctx, gradient):
            slope = torch.zeros(len(gradient), 4)
            slope[1] = math.nan
            return slope

    seen = []

    def model(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return Flat.apply(x)

    pgd(model, torch.full((2, 4), 0.5), torch.tensor([0, 0]), eps=0.25, norm="linf", steps=2, stop_early=False)
    assert torch.isfinite(torch.cat(seen)).all()
    assert ((seen[1] - 0.5).abs() == 0.25).all()
    assert len(seen[1].unique()) == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": 0}, OptionError, "steps: expected an integer of at least 1, got 0"),
        ({"eps": None}, OptionError, "eps: expected one number or 3 of them, got NoneType"),
        ({"eps": "a"}, OptionError, "eps: expected one number or 3 of them, got str"),
        ({"steps": []}, OptionError, "steps: expected an integer of at least 1, got 0"),
        ({"steps": [0.2, 0.0]}, OptionError, "lengths > 0 .fractions of eps., got the length 0.0"),
        ({"steps": [-1.0]}, OptionError, "got the length -1.0"),
        ({"steps": [math.nan]}, OptionError, "got the length nan"),
        ({"steps": [math.inf]}, OptionError, "got the length inf"),
        ({"norm": "l1"}, OptionError, "norm: expected one of l2, linf, got 'l1'"),
        ({"restarts": 0}, OptionError, "restarts: expected an integer of at least 1, got 0"),
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
    attack: Callable = pgd
    with pytest.raises(error, match=message):
        attack(**(arguments | change))


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_random_points_are_uniform_in_the_ball(norm: str) -> None:
    """The fraction of the volume within a point's distance is then uniform in [0, 1]."""
    zero = torch.zeros(4000, 3)
    found = ball(norm).distance(ball(norm).random(zero, torch.Generator().manual_seed(0)), zero) ** 3
    assert float(found.max()) <= 1 + 1e-6
    assert found.quantile(torch.tensor([0.1, 0.5, 0.9]).double()).tolist() == pytest.approx([0.1, 0.5, 0.9], abs=0.03)
