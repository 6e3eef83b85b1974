"""Recurrent layers of prescribed gain: gain, contraction and proof after wild training, phi of every kind, masks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.modules.test_recurrent import ascended
from torch import Tensor, nn

from lipkit import export, lipschitz, models
from lipkit.certificates import lipsdp
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import CayleyLinear, LinearSystem, R2dn, Ren, Residual, Scale
from lipkit.layers.recurrent import RecurrentLayer, unfolded
from lipkit.linalg.scan import simulate
from lipkit.modules import HalfAbs, MaxMin, Recurrent, contraction

Make = Callable[..., RecurrentLayer]


def phi(kind: str) -> nn.Module:
    if kind == "lbdn":
        return models.lbdn([6, 8, 4, 5])
    if kind == "residual":
        return Residual(models.mlp([6], "cayley", input_shape=(6,), classes=6))
    if kind == "maxmin":
        return nn.Sequential(CayleyLinear(6, 8), MaxMin(), CayleyLinear(8, 8), MaxMin(), CayleyLinear(8, 4))
    return models.mlp([8, 4], "sandwich", input_shape=(6,), classes=5, activation="tanh")


LAYERS: dict[str, Make] = {
    "linear": lambda **options: LinearSystem(2, 3, 4, **options),
    "r2dn": lambda **options: R2dn(2, 3, 4, 6, **options),
    "r2dn, relu": lambda **options: R2dn(2, 3, 4, 6, "relu", **options),
    "ren": lambda **options: Ren(2, 3, 4, 6, "tanh", **options),
    "ren, more inputs": lambda **options: Ren(3, 1, 4, 5, **options),
    "r2dn, lbdn": lambda **options: R2dn(2, 3, 4, 6, phi("lbdn"), **options),
    "r2dn, residual": lambda **options: R2dn(2, 3, 4, 6, phi("residual"), **options),
    "r2dn, maxmin": lambda **options: R2dn(2, 3, 4, 6, phi("maxmin"), **options),
    "r2dn, sandwich": lambda **options: R2dn(2, 3, 4, 6, phi("sandwich"), **options),
}

# Without a network inside.
PLAIN = ("linear", "r2dn, relu", "ren")


def shaken(make: Make, dtype: torch.dtype, seed: int, **options: Any) -> RecurrentLayer:
    """A layer after five steps of an optimiser at a large rate, towards a gain that it cannot have."""
    torch.manual_seed(seed)
    layer = make(**options).to(dtype)
    optimiser, u = torch.optim.Adam(layer.parameters(), lr=0.6), torch.randn(8, 6, layer.in_features, dtype=dtype)
    for _ in range(5):
        loss = -(layer(u) - layer(-u)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return layer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in LAYERS), *((name, torch.float64) for name in PLAIN)]
)
def test_gain_and_contraction_are_proved_from_stored_numbers(name: str, dtype: torch.dtype) -> None:
    gamma, rate = 0.7, 0.9
    layer = shaken(LAYERS[name], dtype, 0, gamma=gamma, rate=rate)
    plain = export(layer, (6, layer.in_features))[0]
    assert isinstance(plain, Recurrent)
    assert float(lipschitz(plain)) == gamma == float(lipschitz(layer))
    assert contraction(plain) == rate
    assert torch.equal(plain.metric, torch.eye(4, dtype=dtype))
    exact = copy.deepcopy(plain).double()
    assert 0.05 * gamma < ascended(exact, 6, 10) <= gamma * (1 + 1e-6)
    x = torch.randn(2, 64, 4, dtype=torch.float64)
    now = torch.randn(64, layer.in_features, dtype=torch.float64)
    after = torch.stack([exact.step(one, now)[0] for one in x])
    assert ((after[0] - after[1]).norm(dim=1) <= rate * (x[0] - x[1]).norm(dim=1) * (1 + 1e-12)).all()
    u = torch.randn(5, 6, layer.in_features, dtype=dtype)
    assert torch.allclose(plain(u), layer(u), atol=2e-5 if dtype is torch.float32 else 1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_gains_of_every_size(scale: float) -> None:
    for make in (LAYERS["linear"], LAYERS["r2dn"], LAYERS["ren"]):
        layer = shaken(make, torch.float32, 1, gamma=scale)
        assert float(lipschitz(export(layer, (6, layer.in_features)))) == scale


def by_definition(layer: R2dn, u: Tensor) -> Tensor:
    """The equations of the paper, with phi called as it is."""
    (at_v, v), (at_w, w) = layer.read.factors(), layer.write.factors()
    z, root, x, found = at_w.mT @ layer.through.weight() @ at_v, layer.gamma**0.5, u.new_zeros(len(u), 4), []
    call = layer.inner if layer.inner is not None else layer.phi
    for now in u.unbind(1):
        h = torch.cat((layer.rate * x, root * now), 1)
        out = call(h @ v + layer.unit_bias) @ w.mT + h @ z.mT
        x = out[:, :4] + layer.state_bias
        found.append(root * out[:, 4:] + layer.output_bias)
    return torch.stack(found, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in LAYERS if "r2dn" in name])
def test_r2dn_is_its_definition_with_its_gradients(name: str) -> None:
    layer = shaken(LAYERS[name], torch.float64, 2, gamma=1.5, rate=0.8)
    assert isinstance(layer, R2dn)
    u = torch.randn(3, 5, 2, dtype=torch.float64)
    a, b = layer(u), by_definition(layer, u)
    assert torch.allclose(a, b, atol=1e-9)
    mine, theirs = (torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (a, b))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-8 * (1 + float(other.abs().max())))


def test_what_phi_unfolds_to() -> None:
    assert unfolded(phi("residual"), 6) is None
    assert unfolded(nn.Sequential(CayleyLinear(6, 8), nn.ReLU(), CayleyLinear(8, 4), nn.Tanh()), 6) is None
    halves = unfolded(phi("maxmin"), 6)
    assert halves is not None
    assert isinstance(halves.activation, HalfAbs)
    assert [tuple(w.shape) for w in halves.weights] == [(8, 6), (8, 8), (4, 8)]
    assert export(LAYERS["r2dn, lbdn"](), (3, 2))[0].block == 4


@pytest.mark.thorough
def test_second_derivatives_are_those_of_the_plain_loop() -> None:
    # Two blocks of two units that read each other, three states and two inputs.
    torch.manual_seed(0)
    matrix = (0.4 * torch.randn(8, 9, dtype=torch.float64)).requires_grad_()
    bias, u = torch.randn(8, dtype=torch.float64, requires_grad=True), torch.randn(2, 4, 2, dtype=torch.float64)

    def outputs(matrix: Tensor, bias: Tensor, u: Tensor) -> Tensor:
        return simulate(matrix, bias, 3, (4, 4), 2, nn.Tanh(), u, alone=True)[0]

    assert torch.autograd.gradgradcheck(outputs, (matrix, bias, u.requires_grad_()), fast_mode=True)


@pytest.mark.thorough
def test_a_linear_system_reaches_its_gain() -> None:
    torch.manual_seed(0)
    layer = LinearSystem(1, 1, 3, gamma=2.0, dtype=torch.float64)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    u = torch.sin(0.7 * torch.arange(60.0, dtype=torch.float64))[None, :, None]
    for _ in range(60):
        y = layer(torch.cat((u, 0 * u)))
        loss = -(y[0] - y[1]).norm() / u.norm()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert 1.85 < -float(loss.detach()) <= 2.0


def test_padding_does_not_count() -> None:
    torch.manual_seed(0)
    layer, u = R2dn(2, 3, 4, 6), torch.randn(2, 7, 2)
    mask = torch.arange(7)[None] < torch.tensor([[7], [4]])
    padded = torch.where(mask[..., None], u, torch.nan)
    y = layer(padded, mask)
    assert torch.equal(y[0], layer(u)[0])
    assert torch.allclose(y[1, :4], layer(u[1:, :4])[0], atol=1e-6)
    assert (y[1, 4:] == 0).all()
    with pytest.raises(ShapeError, match=r"mask: expected booleans \(2, 7\)"):
        layer(u, mask.float())


@pytest.mark.parametrize(("make", "match"), [
    (lambda: R2dn(2, 3, 4, 0), "units"), (lambda: R2dn(2, 3, 4, 6, gamma=0.0), "gamma: expected a positive"),
    (lambda: Ren(2, 3, 4, 6, rate=1.1), r"rate: expected a number in"), (lambda: Ren(2, 3, 4, 6, "abs"), "slope in"),
    (lambda: R2dn(2, 3, 4, 6, Scale(2.0)), "phi: expected a 1-Lipschitz network"),
    (lambda: R2dn(2, 3, 4, 6, dtype=torch.float16), "dtype"),
])  # fmt: skip
def test_arguments_that_do_not_fit(make: Callable[[], nn.Module], match: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(OptionError, match=match):
        make()
    with pytest.raises(TypeError, match=r"Layer.__init__\(\) got an unexpected keyword argument 'activation'"):
        R2dn(2, 3, 4, 6, activation="relu")


def test_a_phi_that_was_replaced_is_refused() -> None:
    layer = R2dn(2, 3, 4, 6)
    layer.phi = nn.SELU()
    with pytest.raises(NoRuleError, match="expected the phi that it was made with"):
        lipschitz(layer)
    other = Ren(2, 3, 4, 6)
    other.phi = nn.LeakyReLU(-1.0)
    with pytest.raises(NoRuleError, match="expected the phi that it was made with"):
        export(other, (5, 2))


def test_a_part_that_was_changed_is_refused() -> None:
    layer = LinearSystem(2, 2, 2)
    weight = layer.through.weight
    layer.through.weight = lambda: 10 * weight()  # type: ignore[method-assign]
    with pytest.raises(NoRuleError, match="instance-level 'weight'"):
        lipschitz(layer)


def test_an_exported_step_is_a_network_as_any_other() -> None:
    torch.manual_seed(0)
    step = export(R2dn(2, 3, 4, 6, "relu"), (5, 2))[0].one_step()
    assert step.input_shape == (6,)
    # From state and input to both, at one step: of the joint system, not of the sequence.
    assert float(lipsdp.solve(step).gain) < 4
