"""BCOP and CayleyBCOP: dense singular values, unconverged iterations, functions of which nothing is known."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from lipkit import export, lipschitz
from lipkit.errors import OptionError
from lipkit.layers.bcop import BcopConv2d, cayley_bcop
from lipkit.linalg import ORTHOGONALIZE, bjorck, cayley, orthogonality_residual
from lipkit.testing import dense_matrix

# in, out, kernel, stride, height, width
LAYERS = [
    (3, 5, 3, 1, 6, 6),
    (5, 3, 3, 1, 5, 7),
    (2, 6, 3, 2, 6, 8),
    (3, 5, 3, 2, 6, 6),
    (1, 9, 3, 3, 6, 3),
    (4, 6, 2, 1, 5, 4),
    (3, 3, 5, 1, 3, 4),
    (1, 1, 3, 1, 4, 4),
    (4, 4, 3, 1, 1, 1),
    (3, 4, (4, 5), 1, 4, 6),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def singular_values(layer: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    return np.linalg.svd(dense_matrix(layer, shape, dtype), compute_uv=False)


def disturb(layer: BcopConv2d) -> BcopConv2d:
    """Parameters far from orthonormal."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    return layer


@pytest.mark.usual(16)
@pytest.mark.parametrize("make", [BcopConv2d, cayley_bcop], ids=["bcop", "cayley_bcop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_singular_values_and_export(sizes, dtype: torch.dtype, make) -> None:
    cin, cout, k, s, h, w = sizes
    layer = make(cin, cout, k, stride=s, dtype=dtype)
    values = singular_values(layer, (cin, h, w), dtype)
    np.testing.assert_allclose(values, 1, atol=1e-5 if dtype == torch.float32 else 1e-13)
    plain = export(layer, (cin, h, w))
    x = torch.randn(3, cin, h, w, dtype=dtype)
    torch.testing.assert_close(plain(x), layer(x))
    assert type(plain[-1]) is torch.nn.Conv2d
    proved = float(lipschitz(plain))
    assert values.max() <= proved * (1 + 64 * torch.finfo(dtype).eps)
    assert proved <= 1 + (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("name", ORTHOGONALIZE)
def test_any_named_function_is_orthogonal_from_any_parameters(name: str) -> None:
    layer = disturb(BcopConv2d(3, 5, 3, orthogonalize=name, dtype=torch.float64))
    converged = max(float(orthogonality_residual(f.detach()).max()) for f in layer.factors())
    values = singular_values(layer, (3, 4, 5), torch.float64)
    assert values.max() <= 1 + 1e-12
    assert values.min() >= 1 - 8 * converged - 1e-12
    assert lipschitz(layer) == 1


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_an_unconverged_iteration_contracts_and_its_bound_is_sound(iterations: int) -> None:
    few = partial(bjorck, iterations=iterations)
    layer = disturb(BcopConv2d(4, 4, 3, orthogonalize=few, dtype=torch.float64))
    values = singular_values(layer, (4, 4, 5), torch.float64)
    assert values.min() < 0.9
    bound, proved = float(lipschitz(layer).detach()), float(lipschitz(export(layer, (4, 4, 5))))
    assert values.max() <= proved * (1 + 1e-12)
    assert proved <= bound * (1 + 1e-12)
    assert bound <= 1 + 1e-12


@pytest.mark.parametrize("factor", [1.05, 1.4])
def test_a_function_that_is_too_large_shows_in_the_bound(factor: float) -> None:
    layer = BcopConv2d(4, 4, 3, orthogonalize=lambda w: factor * cayley(w), dtype=torch.float64)
    norm = singular_values(layer, (4, 4, 6), torch.float64).max()
    bound = float(lipschitz(layer).detach())
    assert 1.05 < norm <= bound
    assert np.isclose(bound, factor * (2 * factor**2 - 1) ** 4)
    assert norm <= float(lipschitz(export(layer, (4, 4, 6)))) * (1 + 1e-12)


@pytest.mark.parametrize("make", [BcopConv2d, cayley_bcop], ids=["bcop", "cayley_bcop"])
def test_zero_parameters(make) -> None:
    layer = make(2, 3, 3)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    y = layer(torch.randn(2, 2, 4, 4))
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.thorough
def test_training_moves_every_parameter_and_keeps_the_constraint() -> None:
    layer = BcopConv2d(3, 6, 3)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
    x, target = torch.randn(8, 3, 5, 5), torch.randn(8, 6, 5, 5)
    for _ in range(5):
        optimiser.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimiser.step()
    assert all((p - before[name]).norm() > 1e-4 for name, p in layer.named_parameters())
    np.testing.assert_allclose(singular_values(layer, (3, 5, 5), torch.float32), 1, atol=1e-5)


def test_refusals() -> None:
    with pytest.raises(OptionError, match=r"orthogonalize: expected one of .*got 3"):
        BcopConv2d(3, 3, 3, orthogonalize=3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"padding: expected 'same' for kernel_size \(2, 2\), got 1"):
        BcopConv2d(3, 3, 2, padding=1)
