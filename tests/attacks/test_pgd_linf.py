"""PGD in the l_inf ball against closed forms on linear models, and its promise never to leave ball or box."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor, nn

from lipkit.attacks import pgd_l2, pgd_linf
from lipkit.attacks.ascent import misclassified
from lipkit.attacks.pgd_linf import project
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
    """l_inf distance to the nearest boundary: the gap over the l_1 norm, the dual one."""
    logits, rows = layer(x).double(), layer.weight.double()
    gaps = logits.gather(1, y[:, None]) - logits
    apart = (rows[y][:, None] - rows[None]).abs().sum(dim=2)
    return (gaps / apart).nan_to_num(math.inf).amin(dim=1)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e4])
def test_linear_model_falls_exactly_beyond_the_distance_to_its_boundary(scale: float) -> None:
    layer = linear(scale=scale)
    x = points(60, 5)
    y = layer(x).argmax(dim=1)
    distance = boundary_distance(layer, x, y)
    near = pgd_linf(layer, x, y, 0.999 * distance, steps=60, restarts=4, box=None)
    far = pgd_linf(layer, x, y, 1.02 * distance + 1e-5, steps=60, restarts=4, box=None)
    assert not misclassified(layer(near), y).any()
    assert misclassified(layer(far), y).all()


def test_in_the_box_a_linear_programme_finds_no_more() -> None:
    layer = linear(classes=2)
    x = points(20, 5)
    y = layer(x).argmax(dim=1)
    eps = 0.3
    found = pgd_linf(layer, x, y, eps, steps=40, stop_early=False)
    slope = (layer.weight[1] - layer.weight[0]).double().numpy()
    for i in range(len(x)):
        rising = slope if y[i] == 0 else -slope
        limits = [(max(0.0, v - eps), min(1.0, v + eps)) for v in x[i].double().tolist()]
        best = linprog(-rising, bounds=limits)
        assert found[i].double().numpy() @ rising == pytest.approx(-best.fun, abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    st.floats(-12, 3),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([(0.0, 1.0), None]),
    st.sampled_from([None, 0.2, 3.0]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_never_outside_ball_or_box(
    exponent: float,
    dtype: torch.dtype,
    box: tuple[float, float] | None,
    step_size: float | None,
    start: bool,
    seed: int,
) -> None:
    eps = 10.0**exponent
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).to(dtype)
    x = points(6, 3, 2, 2, seed=seed, dtype=dtype).round(decimals=1)
    y = torch.zeros(6, dtype=torch.int64)
    found = pgd_linf(model, x, y, eps, steps=4, restarts=2, box=box, step_size=step_size, random_start=start)
    assert np.abs(found.numpy().astype(np.float64) - x.numpy().astype(np.float64)).max() <= eps
    assert found.dtype == dtype
    if box is not None:
        assert found.min() >= 0
        assert found.max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projection_clips_each_entry_and_uses_the_whole_ball(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    centre = generator.random((40, 7))
    radius = generator.uniform(1e-9, 1.0, 40)
    point = centre + generator.normal(size=(40, 7))
    start, end = torch.tensor(centre, dtype=dtype), torch.tensor(point, dtype=dtype)
    result = project(end, start, torch.tensor(radius), (0.0, 1.0)).double().numpy()
    start64 = start.double().numpy()
    expected = np.clip(end.double().numpy(), start64 - radius[:, None], start64 + radius[:, None]).clip(0, 1)
    assert np.abs(result - expected).max() <= 2 * torch.finfo(dtype).eps
    assert (np.abs(result - start64) <= radius[:, None]).all()


@pytest.mark.parametrize("attack", [pgd_linf, pgd_l2])
def test_steps_of_one_size_and_random_starts(attack) -> None:
    layer = linear(classes=2)
    x, y = points(30, 5), torch.zeros(30, dtype=torch.int64)
    common = {"steps": 1, "box": None, "stop_early": False}
    norm = math.inf if attack is pgd_linf else 2
    for size in (0.25, 0.5):
        moved = (attack(layer, x, y, 0.1, step_size=size, **common) - x).norm(norm, dim=1)
        assert torch.allclose(moved, torch.full_like(moved, 0.1 * size), rtol=1e-4)
    tiny = attack(layer, x, y, 0.1, step_size=1e-6, random_start=True, **common) - x
    assert (tiny.norm(norm, dim=1) > 1e-4).all()  # far from the sample, without a step that led there
    again = attack(layer, x, y, 0.1, step_size=1e-6, random_start=True, **common) - x
    assert torch.equal(tiny, again)
    other = torch.Generator().manual_seed(7)
    assert not torch.equal(tiny, attack(layer, x, y, 0.1, step_size=1e-6, random_start=True, generator=other, **common))


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

    pgd_linf(model, torch.full((2, 4), 0.5), torch.tensor([0, 0]), 0.25, steps=2, stop_early=False)
    assert torch.isfinite(torch.cat(seen)).all()
    assert ((seen[1] - 0.5).abs() == 0.25).all()
    assert len(seen[1].unique()) == 2


def test_refusals() -> None:
    layer, x, y = linear(), points(3, 5), torch.zeros(3, dtype=torch.int64)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="expected step_size > 0"):
            pgd_linf(layer, x, y, 0.1, step_size=wrong)
    with pytest.raises(OptionError, match="expected inputs inside the box"):
        pgd_linf(layer, x + 1, y, 0.1)
    with pytest.raises(ShapeError, match="expected 3 labels"):
        pgd_linf(layer, x, y[:2], 0.1)
