"""Steps on the manifold against numpy and scipy: tangents, signs, rotations, and what the closing step leaves."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg import orthogonality_residual
from lipkit.linalg.stiefel import retract, spectral_step, tangent

SHAPES = [(4, 4), (3, 3), (3, 7), (7, 3), (1, 5), (5, 1), (16, 24), (2, 3, 5)]


def point(shape: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A semi-orthogonal matrix and a gradient, in float64."""
    generator = torch.Generator().manual_seed(seed)
    w, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    return u @ vh, g


def sign(t: np.ndarray) -> np.ndarray:
    u, s, vh = np.linalg.svd(t, full_matrices=False)
    return (u * (s > 1e-9)) @ vh


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tangent_is_the_orthogonal_projection(shape: tuple[int, ...]) -> None:
    w, g = point(shape)
    t = tangent(w, g)
    short = w @ t.mT if shape[-2] <= shape[-1] else w.mT @ t
    assert (short + short.mT).abs().max() < 1e-13  # in the tangent space,
    torch.testing.assert_close(tangent(w, t), t, rtol=0, atol=1e-13)  # where nothing moves,
    assert abs(float((t * (g - t)).sum())) < 1e-12  # and what is taken off is orthogonal to it


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_follows_the_matrix_sign(shape: tuple[int, ...]) -> None:
    w, g = point(shape)
    moved = (spectral_step(w, g, 1e-6, steps=12) - w).numpy() / 1e-6
    t = tangent(w, g)
    signs = np.stack([sign(part) for part in t.reshape(-1, *shape[-2:]).numpy()]).reshape(shape)
    exact = tangent(w, torch.from_numpy(signs)).numpy()
    # The quintic ends between 0.68 and 1.14 of every singular value.
    assert float((moved * -exact).sum()) > 0.97 * np.linalg.norm(moved) * np.linalg.norm(exact)
    assert 0.65 < np.linalg.norm(moved) / np.linalg.norm(exact) < 1.2
    assert float((moved * g.numpy()).sum()) < 0  # downhill


def test_a_square_step_is_the_rotation_of_scipy() -> None:
    w, g = point((6, 6))
    skew = tangent(w, g) @ w.mT
    turned = scipy.linalg.expm(-np.arctan(0.03) * sign(skew.numpy())) @ w.numpy()
    change, exact = spectral_step(w, g, 0.03, steps=12).numpy() - w.numpy(), turned - w.numpy()
    assert float((change * exact).sum()) > 0.97 * np.linalg.norm(change) * np.linalg.norm(exact)
    assert np.linalg.norm(change - exact, 2) < 0.35 * np.linalg.norm(exact, 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("angle", [0.1, 0.3])
def test_the_closing_step_leaves_the_sixth_power(shape: tuple[int, ...], angle: float) -> None:
    w, g = point(shape)
    u = (spectral_step(w, g, 1e-6, steps=4) - w) / 1e-6
    largest = angle * float(torch.linalg.matrix_norm(u, 2).max())
    left = float(orthogonality_residual(spectral_step(w, g, angle, steps=4)).max())
    assert left <= 0.64 * largest**6 + 1e-14
    assert left > 1e-2 * largest**6 or largest < 1e-3  # not idle: a closing step of a higher order would be seen here


@pytest.mark.thorough
def test_long_walks_stay_on_the_manifold() -> None:
    w = point((8, 20))[0].float()
    for seed in range(300):
        w = spectral_step(w, point((8, 20), seed)[1].float(), 0.03)
    assert float(orthogonality_residual(w)) < 2e-5
    assert float(orthogonality_residual(retract(w))) < 1e-6


@pytest.mark.parametrize("scale", [1.01, 0.8, 30.0, 1e-3])
@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3)])
def test_retraction_is_the_polar_factor(shape: tuple[int, int], scale: float) -> None:
    w, g = point(shape)
    near = scale * (w + 0.01 * g)
    u, _, vh = np.linalg.svd(near.numpy(), full_matrices=False)
    atol = 1e-3 if 0.5 < scale < 2 else 1e-12  # two cubic steps, or exact
    np.testing.assert_allclose(retract(near).numpy(), u @ vh, rtol=0, atol=atol)


def test_without_a_gradient_nothing_moves() -> None:
    w, g = point((3, 5))
    for still in (torch.zeros_like(g), w.clone()):  # along a normal direction there is no way on the manifold
        assert torch.isfinite(spectral_step(w, still, 0.1)).all()
    torch.testing.assert_close(spectral_step(w, torch.zeros_like(g), 0.1), w, rtol=0, atol=1e-14)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="expected a matrix"):
        spectral_step(torch.ones(3), torch.ones(3), 0.1)
    with pytest.raises(OptionError, match="steps: expected an integer of at least 1, got 0"):
        spectral_step(torch.eye(2), torch.eye(2), 0.1, steps=0)
