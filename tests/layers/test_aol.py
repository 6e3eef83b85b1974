"""AOL against its definition in numpy, its guarantee against dense singular values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lipkit import export, lipschitz
from lipkit.layers.aol import AolConv2d, AolLinear, aol_kernel, aol_matrix, autocorrelation
from lipkit.layers.sll import SllLinear


def dense(layer: nn.Module, shape: tuple[int, int, int]) -> np.ndarray:
    """The matrix of a convolution, column by column."""
    n = int(np.prod(shape))
    with torch.no_grad():
        columns = layer(torch.eye(n, dtype=torch.float64).reshape(n, *shape))
    return columns.flatten(1).T.numpy()


def test_matrix_is_the_formula() -> None:
    v = np.random.default_rng(0).normal(size=(4, 6))
    expected = v @ np.diag(np.abs(v.T @ v).sum(1) ** -0.5)
    assert np.allclose(aol_matrix(torch.from_numpy(v)).numpy(), expected, rtol=1e-13)
    assert np.linalg.norm(expected, 2) <= 1


def test_orthogonal_columns_are_only_normalised() -> None:
    q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    scaled = aol_matrix(q * torch.tensor([1e-3, 1.0, 7.0, 1e4, 2.0], dtype=torch.float64))
    assert torch.allclose(scaled, q, atol=1e-12)


def test_autocorrelation_is_the_gram_kernel() -> None:
    kernel = torch.randn(3, 2, 3, 2, dtype=torch.float64)
    corr = autocorrelation(kernel)
    assert corr.shape == (2, 2, 5, 3)
    for dy in range(-2, 3):
        for dx in range(-1, 2):
            expected = np.zeros((2, 2))
            for y in range(3):
                for x in range(2):
                    if 0 <= y + dy < 3 and 0 <= x + dx < 2:
                        expected += kernel[:, :, y + dy, x + dx].numpy().T @ kernel[:, :, y, x].numpy()
            assert np.allclose(corr[:, :, 2 + dy, 1 + dx].numpy(), expected)


@pytest.mark.parametrize(("cin", "cout"), [(3, 8), (8, 3), (4, 4)])
@pytest.mark.parametrize(("size", "k"), [((5, 9), 3), ((2, 2), 5), ((1, 1), 3), ((6, 4), 2)])
def test_norm_at_most_one_for_every_size(cin: int, cout: int, size: tuple[int, int], k: int) -> None:
    torch.manual_seed(cin * k)
    layer = AolConv2d(cin, cout, k, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.free.normal_()
    norm = np.linalg.norm(dense(layer, (cin, *size)), 2)
    assert 0.05 < norm <= 1 + 1e-12
    assert norm <= float(lipschitz(export(layer, (cin, *size)))) <= norm * (1 + 1e-9)


def test_zero_padding_is_a_contraction_too() -> None:
    torch.manual_seed(0)
    kernel = aol_kernel(torch.randn(4, 3, 3, 3, dtype=torch.float64))
    x = torch.eye(3 * 25, dtype=torch.float64).reshape(-1, 3, 5, 5)
    assert torch.linalg.matrix_norm(torch.conv2d(x, kernel, padding=1).flatten(1), 2) <= 1


@pytest.mark.parametrize("make", [lambda: AolLinear(4, 3), lambda: AolConv2d(2, 3, 3)])
def test_zero_columns_stay_finite(make: Callable[[], nn.Module]) -> None:
    layer = make()
    with torch.no_grad():
        layer.free.zero_()
    x = torch.ones(1, 4) if isinstance(layer, AolLinear) else torch.ones(1, 2, 4, 4)
    layer(x).sum().backward()
    assert torch.isfinite(layer.free.grad).all()


@pytest.mark.parametrize(
    ("make", "size"),
    [(lambda: AolConv2d(2, 3, 3), 1e-17), (lambda: AolLinear(2, 3), 1e-16), (lambda: SllLinear(2, 3), 1e-11)],
)
def test_gradients_at_tiny_weights_are_those_of_float64(make: Callable[[], nn.Module], size: float) -> None:
    layer = make()
    with torch.no_grad():
        layer.free.copy_(torch.randn(layer.free.shape) * size)
    found = []
    for one in (layer, copy.deepcopy(layer).double()):
        x = torch.linspace(-1, 1, 36, dtype=one.free.dtype).reshape((2, 2, 3, 3) if one.free.ndim == 4 else (18, 2))
        y = one(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
        found.append(one.free.grad.double())
    assert bool((found[0] - found[1]).norm() <= 1e-4 * found[1].norm())


def test_bounds_hold_for_weights_whose_squares_are_hardly_there() -> None:
    # Squares of 2e-45 are stored as 1.4e-45: their roots are a fifth too small.
    layers: list[AolLinear | AolConv2d] = [AolLinear(1, 1, bias=False), AolConv2d(1, 1, 1, bias=False)]
    for layer in layers:
        torch.nn.init.constant_(layer.free, 4.5e-23)
        x = torch.ones(1, 1) if isinstance(layer, AolLinear) else torch.ones(1, 1, 1, 1)
        assert layer(x).abs().max() <= 1
    residual = SllLinear(2, 2)
    torch.nn.init.constant_(residual.free, 1e-21)
    assert residual(torch.ones(1, 2)).isfinite().all()
