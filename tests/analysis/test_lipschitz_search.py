"""The search finds known constants, stays in its box, and never exceeds a proved bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipkit import export, lipschitz
from lipkit.analysis.lipschitz_search import lipschitz_lower_bound
from lipkit.errors import OptionError, ShapeError
from lipkit.layers import CayleyConv2d, CayleyLinear, MaxMin


@pytest.mark.thorough
def test_linear_maps_are_found_exactly() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1)
    columns = conv(torch.eye(2 * 25).reshape(-1, 2, 5, 5)) - conv(torch.zeros(1, 2, 5, 5))
    true = torch.linalg.matrix_norm(columns.detach().flatten(1).double(), 2).item()
    found = lipschitz_lower_bound(conv, input_shape=(2, 5, 5), restarts=16, steps=60).lower
    assert true * (1 - 1e-3) <= found <= true * (1 + 1e-6)


@pytest.mark.thorough
def test_a_steep_region_is_found() -> None:
    """Slope 1 almost everywhere, 7 on an interval of length 0.02."""

    class Step(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 6 * (x - 0.5).clamp(0, 0.02)

    found = lipschitz_lower_bound(Step(), (0.0, 1.0), input_shape=(1,), restarts=64, steps=200)
    assert 6.9 < found.lower <= 7 * (1 + 1e-6)
    assert 0 <= float(found.x) <= 1
    assert 0 <= float(found.y) <= 1


@pytest.mark.thorough
@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
def test_never_above_the_proved_bound_and_close_to_it(box: tuple[float, float] | None) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(CayleyConv2d(1, 4, 3), MaxMin(), nn.Flatten(), CayleyLinear(64, 32))
    plain = export(net, (1, 4, 4))
    found = lipschitz_lower_bound(plain, box, restarts=16, steps=60)
    assert 0.9 < found.lower <= float(lipschitz(plain)) * (1 + 1e-6)
    with torch.no_grad():
        gap = plain.double()(found.y[None]) - plain(found.x[None])
    assert float(gap.norm() / (found.y - found.x).norm()) == pytest.approx(found.lower, rel=1e-6)


def test_deterministic_and_pure() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    first, second = (lipschitz_lower_bound(model, input_shape=(3,), restarts=4, steps=5).lower for _ in range(2))
    assert first == second
    assert torch.equal(before, model.weight)
    assert model.weight.dtype == torch.float32


def test_constant_network_has_slope_zero() -> None:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    assert lipschitz_lower_bound(model, input_shape=(3,), restarts=4, steps=5).lower == 0


def test_a_network_that_ignores_its_input_has_slope_zero() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(x), 2, dtype=x.dtype)

    assert lipschitz_lower_bound(Fixed(), input_shape=(3,), restarts=4, steps=5).lower == 0


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_search_in_either_format_returns_a_secant_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    found = lipschitz_lower_bound(net, input_shape=(6,), restarts=16, steps=100, dtype=dtype)
    with torch.no_grad():
        gap = net.double()(found.y) - net(found.x)
        first, last = (layer.weight for layer in (net[0], net[2]))
        # Where every tanh is at its middle, the derivative is the product of the matrices.
        middle = float(torch.linalg.matrix_norm(last @ first, 2))
        bound = float(torch.linalg.matrix_norm(last, 2) * torch.linalg.matrix_norm(first, 2))
    assert float(gap.norm() / (found.y - found.x).norm()) == pytest.approx(found.lower, rel=1e-9)
    assert 0.7 * middle < found.lower <= bound


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="input_shape"):
        lipschitz_lower_bound(nn.Linear(3, 2))
    with pytest.raises(OptionError, match="the smaller one first"):
        lipschitz_lower_bound(nn.Linear(3, 2), (1.0, 0.0), input_shape=(3,))
    with pytest.raises(OptionError, match="the smaller one first"):
        lipschitz_lower_bound(nn.Linear(3, 2), (torch.ones(3), torch.zeros(3)), input_shape=(3,))
    with pytest.raises(ShapeError, match="box: expected ends of shape"):
        lipschitz_lower_bound(nn.Linear(3, 2), (torch.zeros(2), torch.ones(2)), input_shape=(3,))
    for options in ({"restarts": 0}, {"restarts": 1.5}, {"steps": 0}):
        with pytest.raises(OptionError, match="expected an integer of at least 1"):
            lipschitz_lower_bound(nn.Linear(3, 2), input_shape=(3,), **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="dtype: expected"):
        lipschitz_lower_bound(nn.Linear(3, 2), input_shape=(3,), dtype=torch.float16)
    with pytest.raises(ShapeError, match=r"start: expected shape \(n, 3\)"):
        lipschitz_lower_bound(nn.Linear(3, 2), input_shape=(3,), start=torch.zeros(4, 5))
