"""SLL and CPL: the formulas in numpy, Jacobians that never exceed 1, bounds that hold at once after a step."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipkit_check
from lipkit import export, lipschitz
from lipkit.bounds import symbol_sup
from lipkit.errors import OptionError, ShapeError
from lipkit.layers import MaxMin, base
from lipkit.layers.sll import CplConv2d, CplLinear, SllConv2d, SllLinear, cpl_multiplier
from lipkit.modules import Network, load, save
from lipkit.modules.sandwich import SlopeResidual
from lipkit.modules.storage import describe

DENSE = (SllLinear, CplLinear)
CONV = (SllConv2d, CplConv2d)


def largest_jacobian(layer: nn.Module, x: torch.Tensor) -> float:
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: layer(v[None])[0].flatten()))(x)
    return float(torch.linalg.matrix_norm(jacobians.detach().flatten(2), 2).max())


def test_sll_is_the_formula() -> None:
    layer = SllLinear(4, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.log_q.normal_()
    w = layer.free.detach().numpy().T
    q, b = np.exp(layer.log_q.detach().numpy()), layer.bias.detach().numpy()
    t = (np.abs(w.T @ w) * q[None, :] / q[:, None]).sum(1)
    x = np.random.default_rng(0).normal(size=(5, 4))
    expected = x - 2 * np.maximum(x @ w + b, 0) / t @ w.T
    assert np.allclose(layer(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-13)


def test_cpl_is_the_formula() -> None:
    layer = CplLinear(4, 4, hidden=7, dtype=torch.float64)
    w, b = layer.free.detach().numpy(), layer.bias.detach().numpy()
    x = np.random.default_rng(0).normal(size=(5, 4))
    expected = x - 2 / np.linalg.norm(w, 2) ** 2 * np.maximum(x @ w.T + b, 0) @ w
    assert np.allclose(layer(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-11)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize(("cin", "cout"), [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_dense_jacobians_and_bounds(kind: type[nn.Module], cin: int, cout: int, activation: str) -> None:
    torch.manual_seed(1)
    layer = kind(cin, cout, activation=activation, dtype=torch.float64)
    x = 2 * torch.randn(40, cin, dtype=torch.float64)
    plain = export(layer, (cin,))
    assert torch.allclose(layer(x), plain(x), atol=1e-12)
    norm = largest_jacobian(layer, x)
    assert 0.5 < norm <= float(lipschitz(plain)) <= 1 + 1e-12


@pytest.mark.thorough
@pytest.mark.usual(10)
@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize("kind", CONV)
@pytest.mark.parametrize(
    ("cin", "cout", "size", "k", "stride"),
    [(3, 8, (5, 9), 3, 1), (8, 3, (7, 7), 3, 1), (2, 3, (6, 6), 3, 2), (2, 2, (1, 1), 3, 1), (2, 2, (4, 4), 5, 1)],
)
def test_conv_jacobians_and_bounds(
    kind: type[nn.Module], cin: int, cout: int, size: tuple[int, int], k: int, stride: int, mode: str
) -> None:
    torch.manual_seed(2)
    layer = kind(cin, cout, k, stride, padding_mode=mode, dtype=torch.float64)
    with torch.no_grad():
        layer.free.mul_(3)
    x = torch.randn(4, cin, *size, dtype=torch.float64)
    plain = export(layer, (cin, *size))
    assert torch.allclose(layer(x), plain(x), atol=1e-12)
    assert 0.5 < largest_jacobian(layer, x) <= float(lipschitz(plain)) <= 1 + 1e-11


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CONV)
def test_zero_padding_is_a_convolution_and_its_adjoint(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(10)
    layer = kind(3, 3, (3, 5), padding_mode="zeros", hidden=4, dtype=torch.float64).eval()
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64)
    inside = torch.relu(F.conv2d(x, layer.free, layer.bias, padding=(1, 2))) * layer.multiplier()[:, None, None]
    expected = x - F.conv_transpose2d(inside, layer.free, padding=(1, 2))
    torch.testing.assert_close(layer(x), expected)
    (block,) = plain = export(layer, (3, 2, 6))
    torch.testing.assert_close(plain(x), expected)
    assert 1 <= float(lipschitz(block, (3, 2, 6))) <= 1 + 1e-11
    numbers = lipkit_check.Tensors({name: t.detach().numpy() for name, t in block.state_dict().items()})
    monkeypatch.setattr(lipkit_check, "ops", lipkit_check.Floats())  # what it may spend is its own
    assert 1 <= lipkit_check.build(describe(block), numbers, (3, 2, 6)).norm <= 1 + Fraction(1, 10**6)
    # The parts of one border and of another are no adjoints.
    block.second.padding_mode = "circular"
    block.second._reversed_padding_repeated_twice = [2, 2, 1, 1]
    assert float(lipschitz(block, (3, 4, 6))) > 1.5
    with pytest.raises(OptionError, match="padding_mode: expected 'circular' or 'zeros', got 'reflect'"):
        kind(3, 3, 3, padding_mode="reflect")


def test_a_border_of_zeros_has_frequencies_of_its_own() -> None:
    # The norm of this kernel is 2 on a circle of 3 pixels, and 1 + sqrt(2) with zeros around them.
    first, second = (nn.Conv2d(1, 1, (1, 3), padding="same", dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for part, sign in ((first, 1.0), (second, -0.5)):
            part.weight.copy_(sign * torch.tensor([-1.0, 1.0, -1.0]))
    block = SlopeResidual(first, nn.ReLU(), second, torch.full((1,), 0.5)).requires_grad_(False)
    truth = (1 + 2**0.5) ** 2 / 2 - 1
    assert truth <= float(lipschitz(block, (1, 1, 3))) <= 1.5 * truth


@pytest.mark.parametrize("kind", CONV)
def test_float32_bounds_stay_near_one(kind: type[nn.Module]) -> None:
    torch.manual_seed(3)
    plain = export(kind(6, 8, 3), (6, 5, 5))
    assert 1 <= float(lipschitz(plain)) < 1 + 1e-5


@pytest.mark.parametrize("make", [lambda: CplLinear(6, 6), lambda: CplConv2d(3, 3, 3)])
def test_bound_holds_in_the_first_evaluation_after_a_step(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(4)
    layer = make()
    shape = (6,) if isinstance(layer, CplLinear) else (3, 4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=50.0)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(8, *shape)).square().sum().backward()
        optimizer.step()
        assert largest_jacobian(layer, torch.randn(8, *shape)) <= 1 + 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_the_multiplier_of_a_cpl_convolution_is_that_of_its_norm_from_below(scale: float) -> None:
    torch.manual_seed(7)
    layer = CplConv2d(5, 4, 3)
    with torch.no_grad():
        layer.free.mul_(scale)
    symbols = np.fft.fft2(layer.free.detach().double().numpy(), s=(96, 96)).transpose(2, 3, 0, 1)
    norm = np.linalg.svd(symbols, compute_uv=False).max()
    for value in layer.multiplier().tolist():
        # The largest value of the grid is at most one part in a thousand below the supremum.
        assert 2 / norm**2 / 1.02**2 * (1 - 2e-3) <= value <= 2 / norm**2 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((64, 70, 3), torch.float32), ((65, 64, 1), torch.float64), ((5, 4, 3), torch.float32)]
)
def test_training_takes_the_number_that_evaluation_proves(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    layer = CplConv2d(*shape, dtype=dtype)
    x, g = torch.randn(2, shape[0], 4, 4, dtype=dtype), torch.randn(2, shape[1], 4, 4, dtype=dtype)
    outputs, gradients = [], []
    for mode in (True, False):
        y = layer.train(mode)(x)
        outputs.append(y.detach())
        gradients.append(torch.autograd.grad((g * y).sum(), layer.free)[0])
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)
    assert lipschitz(layer.train()) == lipschitz(layer.eval()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("missed", [0.5, 0.9])
def test_a_missed_norm_in_training_is_seen_by_the_bound(missed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    layer = CplConv2d(3, 3, 3, dtype=torch.float64)
    proved, x = layer.multiplier(), torch.randn(20, 3, 3, 3, dtype=torch.float64)
    monkeypatch.setattr(base, "WIDE", 3)
    monkeypatch.setattr(base, "symbol_sup_estimate", lambda k, tolerance: missed * symbol_sup(k, tolerance=tolerance))
    with torch.no_grad():
        layer.bias.fill_(9.0)  # every slope is 1
    bound = float(lipschitz(layer.train()))
    assert bound == pytest.approx(2 / missed**2 - 1, rel=0.05)
    assert 1.2 < largest_jacobian(layer, x) <= bound
    assert lipschitz(layer.eval()) == 1

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    assert torch.equal(export(layer.train(), (3, 3, 3))[0].multiplier, proved)
    for module in (layer.train(), Own()):
        plain = export(module, (3, 3, 3))
        assert float(lipschitz(plain)) <= 1 + 1e-11
        assert torch.allclose(plain(x), layer.eval()(x), atol=1e-12)
        layer.train()


@pytest.mark.parametrize("size", [1e-30, 1e-24, 1.0, 4.79e21, 1e22, 1e30])
def test_the_multiplier_is_rounded_down(size: float) -> None:
    # Twice the reciprocal of the squared norm is subnormal, or more than float32 has, at the ends of its range.
    norm = torch.tensor(size * 3.1, dtype=torch.float64)
    made = cpl_multiplier(norm, 1, torch.zeros(1)).double()
    assert made.isfinite().all()
    assert float(made * norm**2) <= 2 * (1 + 1e-15)
    if size <= 1e-24:
        assert made == torch.finfo(torch.float32).max
    elif size == 1:
        assert float(made * norm**2) >= 2 * (1 - 2e-7)


@pytest.mark.parametrize("make", [CplConv2d, SllConv2d])
@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e3, 1e9])
def test_the_scale_of_the_weight_does_not_loosen_the_bound_of_the_export(make: type[nn.Module], size: float) -> None:
    layer = make(2, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.get_parameter("free").mul_(size)
    plain = export(layer, (2, 5, 4))
    assert largest_jacobian(plain, torch.randn(20, 2, 5, 4, dtype=torch.float64)) <= float(lipschitz(plain)) < 1 + 1e-11


def test_a_wrong_multiplier_or_weight_raises_the_bound() -> None:
    torch.manual_seed(5)
    block = export(SllLinear(4, 4, dtype=torch.float64), (4,))[0]
    assert isinstance(block, SlopeResidual)
    x = torch.randn(200, 4, dtype=torch.float64)
    for change in (lambda b: b.second.weight.mul_(1.5), lambda b: b.multiplier.mul_(1.5)):
        broken = Network([SlopeResidual(*(export(m, (4,))[0] for m in block.children()), block.multiplier)], (4,))
        change(broken[0])
        assert float(lipschitz(broken)) > 1.01
        assert largest_jacobian(broken, x) <= float(lipschitz(broken))


def test_save_and_load(tmp_path: Path) -> None:
    plain = export(nn.Sequential(SllConv2d(2, 3, 3), nn.Flatten(), CplLinear(48, 5)), (2, 4, 4))
    save(plain, tmp_path)
    x = torch.randn(2, 2, 4, 4)
    assert torch.equal(load(tmp_path)(x), plain(x))


def test_refusals() -> None:
    for bad in (MaxMin(), nn.GELU(), nn.SiLU(), nn.PReLU(), "gelu", "abs"):
        with pytest.raises(OptionError, match="activation"):
            SllLinear(3, 3, activation=bad)
    with pytest.raises(OptionError, match="odd"):
        CplConv2d(3, 3, 2)
    with pytest.raises(OptionError, match="hidden"):
        SllLinear(3, 3, hidden=0)
    with pytest.raises(ShapeError, match="expected input"):
        SllLinear(3, 3)(torch.ones(1, 4))
