"""Normalisations: constants against dense Jacobians, running statistics against the affine map, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipkit
from lipkit import export, lipschitz, modules
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules import ROWS, Range, local_error
from lipkit.proof.roundoff import FLOAT32

EPS = 1e-3


def drawn(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.3 if name.endswith("var") else torch.randn_like(tensor))
    return module.double().eval()


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(5, EPS), (5,)),
    "layer, without weights": (lambda: nn.LayerNorm((2, 3), EPS, elementwise_affine=False), (2, 2, 3)),
    "layer on rows": (lambda: nn.LayerNorm(4, EPS, bias=False), (3, 4)),
    "group": (lambda: nn.GroupNorm(2, 4, EPS), (4, 3)),
    "group, one": (lambda: nn.GroupNorm(1, 3, EPS, affine=False), (3,)),
    "instance 1d": (lambda: nn.InstanceNorm1d(2, EPS), (2, 4)),
    "instance 2d": (lambda: nn.InstanceNorm2d(3, EPS, affine=True), (3, 2, 2)),
    "instance 3d": (lambda: nn.InstanceNorm3d(2, EPS, affine=True), (2, 2, 1, 2)),
}


def jacobian_norm(module: nn.Module, x: torch.Tensor) -> float:
    n = x.numel()
    dense = torch.autograd.functional.jacobian(lambda flat: module(flat.view(1, *x.shape)).flatten(), x.flatten())
    return float(np.linalg.norm(dense.reshape(n, n).numpy(), 2))


@pytest.mark.parametrize("name", OWN)
def test_the_constant_is_above_every_jacobian_and_nearly_reached(name: str) -> None:
    torch.manual_seed(0)
    maker, shape = OWN[name]
    module = drawn(maker())
    weight = 1.0 if module.weight is None else float(module.weight.detach().abs().max())
    bound = float(lipschitz(module, shape).detach())
    assert weight / math.sqrt(EPS) <= bound <= weight / math.sqrt(EPS) * (1 + 1e-12)
    found = [
        jacobian_norm(module, size * torch.randn(shape).double()) for size in (1e-3, 0.03, 1.0, 30.0) for _ in "ab"
    ]
    assert max(found) <= bound
    # All numbers equal: the exact constant || diag(w) (I - 1 1^T / n) || / sqrt(eps), within sqrt(1 - 1 / n) of ours.
    reached = jacobian_norm(module, torch.full(shape, 2.0).double())
    assert max(found) <= reached * (1 + 1e-9)
    terms = {"layer": 5, "layer, without weights": 6, "layer on rows": 4, "group": 6, "group, one": 3}.get(name, 4)
    assert math.sqrt(1 - 1 / terms) * bound * (1 - 1e-9) <= reached <= bound


@pytest.mark.parametrize("name", OWN)
def test_equal_weights_reach_it(name: str) -> None:
    maker, shape = OWN[name]
    module = maker().double().eval()
    assert jacobian_norm(module, torch.zeros(shape).double()) == pytest.approx(
        float(lipschitz(module, shape).detach()), rel=1e-9
    )


def test_the_default_is_316_and_the_weight_has_a_gradient() -> None:
    module = nn.LayerNorm(3)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
    bound = lipschitz(module)
    assert float(bound.detach()) == pytest.approx(2 * 316.22776601683796, rel=1e-12)
    bound.backward()
    assert module.weight.grad.tolist() == pytest.approx([0.0, -316.22776601683796, 0.0], rel=1e-6)


@pytest.mark.parametrize("name", OWN)
def test_exports_compute_the_same_and_save_and_load(name: str, tmp_path) -> None:
    maker, shape = OWN[name]
    module = drawn(maker())
    network = export(nn.Sequential(module), shape)
    assert {type(part) for part in network} <= {nn.LayerNorm, modules.Reshape, modules.Affine}
    x = torch.randn(3, *shape).double()
    torch.testing.assert_close(network(x), module(x), rtol=1e-12, atol=1e-12)
    assert float(lipschitz(network)) == pytest.approx(float(lipschitz(module, shape).detach()), rel=1e-14)
    modules.save(network, tmp_path)
    back = modules.load(tmp_path)
    assert torch.equal(back(x), network(x))
    assert torch.equal(lipschitz(back), lipschitz(network))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.InstanceNorm1d(2, EPS, track_running_stats=True), (2, 4)),
        (nn.InstanceNorm2d(3, EPS, affine=True, track_running_stats=True), (3, 2, 2)),
        (nn.InstanceNorm3d(2, EPS, affine=True, track_running_stats=True), (2, 2, 1, 2)),
    ],
)
def test_running_statistics_are_an_affine_map(module: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    with pytest.raises(NoRuleError, match=r"expected evaluation mode.*got training=True"):
        lipschitz(module.train(), shape)
    drawn(module)
    network = export(module, shape)
    assert [type(m) for m in network] == [modules.Affine]
    x = torch.randn(4, *shape).double()
    assert torch.allclose(network(x), module(x), rtol=1e-13, atol=1e-13)
    scale = (module.running_var + EPS).rsqrt() * (1.0 if module.weight is None else module.weight.detach().abs())
    assert float(scale.max()) <= float(lipschitz(module, shape).detach()) <= float(scale.max()) * (1 + 1e-12)


@pytest.mark.parametrize("eps", [0.0, -1e-5, math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda eps: nn.LayerNorm(4, eps), (4,)),
        (lambda eps: nn.GroupNorm(2, 4, eps), (4, 3)),
        (lambda eps: nn.InstanceNorm2d(2, eps), (2, 3, 3)),
    ],
)
def test_without_eps_there_is_no_constant(
    make: Callable[[float], nn.Module], shape: tuple[int, ...], eps: float
) -> None:
    for call in (lambda: lipschitz(make(eps), shape), lambda: export(make(eps).eval(), shape)):
        with pytest.raises(NoRuleError, match="expected eps a positive finite number, got"):
            call()


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm((2, 5)), (5,)),  # would take a batch of 2 for its first dimension
        (nn.LayerNorm(4), (4, 3)),
        (nn.InstanceNorm1d(2), (5,)),
        (nn.InstanceNorm2d(2), (2, 5)),
        (nn.InstanceNorm2d(2, track_running_stats=True).eval(), (2, 5)),
    ],
)
def test_what_would_mix_samples_is_refused(module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        lipschitz(module, shape)
    with pytest.raises(ShapeError):
        export(module, shape)


@pytest.mark.parametrize(("weight", "variance"), [(1e-200, 1e300), (5e-324, 4.0), (1e-310, 1e4)])
def test_a_scale_below_the_normal_range_is_no_zero(weight: float, variance: float) -> None:
    module = nn.BatchNorm1d(2, eps=0.0, dtype=torch.float64).eval()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.0, weight], dtype=torch.float64))
        module.running_var.fill_(variance)
    assert Fraction(float(lipschitz(module).detach())) ** 2 >= Fraction(weight) ** 2 / Fraction(variance)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["weight", "bias"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Conv2d(1, 1, 3),
        lambda: nn.BatchNorm2d(1),
        lambda: nn.LayerNorm(4),
        lambda: nn.GroupNorm(1, 1),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        lambda: modules.SandwichBlock(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), torch.ones(4)),
        lambda: modules.SlopeResidual(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), torch.ones(4)),
        lambda: modules.Network([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)], (4,), {1: torch.ones(4)}),
    ],
)
def test_numbers_that_are_not_finite_bound_nothing(make: Callable[[], nn.Module], where: str, value: float) -> None:
    module = make().eval()
    next(t for name, t in module.state_dict().items() if name.endswith(where)).view(-1)[0] = value
    assert float(lipschitz(module).detach()) == math.inf


class Cosines(nn.Module):
    """A cosine head: the angles to stored directions, times a temperature."""

    def __init__(self, eps: float, dim: int = -1) -> None:
        super().__init__()
        self.directions, self.eps, self.dim = nn.Parameter(torch.randn(3, 4)), eps, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.normalize(x, dim=self.dim, eps=self.eps)
        return 10 * F.linear(x, F.normalize(self.directions, dim=1))


@pytest.mark.thorough
def test_the_constant_of_normalize_is_one_over_eps_and_reached() -> None:
    layer = modules.UnitNorm(1, 3, eps=0.125)
    assert float(lipschitz(layer, (2, 3, 4))) == 8.0
    torch.manual_seed(0)
    x = (
        torch.randn(500, 2, 3, 4, dtype=torch.float64)
        * torch.logspace(-3, 1, 500, dtype=torch.float64)[:, None, None, None]
    )
    for one in x[::10]:
        jacobian = torch.autograd.functional.jacobian(layer, one[None]).reshape(24, 24)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= 8 * (1 + 1e-12)
    slopes = (layer(x) - layer(x.roll(1, 0))).flatten(1).norm(dim=1) / (x - x.roll(1, 0)).flatten(1).norm(dim=1)
    assert float(slopes.max()) <= 8
    near = 1e-3 * x[:1] / x[:1].norm()
    assert torch.allclose(layer(near), 8 * near)
    groups = x.numpy().transpose(0, 2, 1, 3).reshape(500, 3, 8)
    expected = groups / np.maximum(np.linalg.norm(groups, axis=2, keepdims=True), 0.125)
    assert np.allclose(layer(x).numpy().transpose(0, 2, 1, 3).reshape(500, 3, 8), expected)


@pytest.mark.thorough
def test_a_cosine_head_is_bounded_exported_and_certified() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), Cosines(0.5))
    x = torch.randn(20, 6)
    plain = export(net, (6,))
    assert torch.allclose(plain(x), net(x), atol=1e-5)
    directions = net[1].directions.detach() / net[1].directions.detach().norm(dim=1, keepdim=True)
    norms = [float(torch.linalg.matrix_norm(m.double(), 2)) for m in (net[0].weight.detach(), directions)]
    assert float(lipschitz(plain)) == pytest.approx(20 * math.prod(norms), rel=1e-5)
    assert lipkit.analyze(net, (6,), restarts=0).upper == pytest.approx(20 * math.prod(norms), rel=1e-5)
    found = lipkit.certify(plain, x, plain(x).argmax(1))
    assert (found.radius > 0).all()
    default = export(nn.Sequential(Cosines(1e-12)), (4,))
    assert float(lipschitz(default)) > 1e12


@pytest.mark.thorough
def test_on_a_box_eps_is_the_smallest_norm() -> None:
    net = nn.Sequential(Cosines(1e-6))
    torch.manual_seed(0)
    plain = export(net, (4,), box=(0.5, 2.0))
    assert plain[0].eps == pytest.approx(1.0, rel=2e-6)
    assert plain[0].eps < 1
    x = 0.5 + 1.5 * torch.rand(50, 4)
    assert torch.allclose(plain(x), net(x), atol=1e-6)
    assert export(net, (4,), box=(-1.0, 2.0))[0].eps == 1e-6
    assert lipkit.analyze(net, (4,), box=(0.5, 2.0)).upper < 1e-5 * lipkit.analyze(net, (4,), restarts=0).upper


def test_of_several_groups_the_smallest_norm_counts() -> None:
    x = Range(torch.tensor([[[0.5, 0.5], [5.0, 5.0]]]).double(), torch.full((1, 2, 2), 9.0).double())
    assert modules.UnitNorm(2, eps=1e-6).within(x).eps == pytest.approx(0.5**0.5, rel=2e-6)


def test_squares_that_underflow_count_in_the_error() -> None:
    layer, x = modules.UnitNorm(1, eps=1e-23), torch.full((1, 4), 2e-23)
    lost = float((layer(x).double() - layer(x.double())).norm())
    assert 1 < lost <= float(local_error(layer, (4,), FLOAT32)(x.double()).error.at)


def test_the_range_of_a_layer_norm_holds_its_values_and_is_reached() -> None:
    layer = nn.LayerNorm(4, 1e-9, dtype=torch.float64).requires_grad_(False)
    layer.weight.copy_(torch.tensor([-2.0, 1.0, -0.5, 0.0])), layer.bias.copy_(torch.arange(4.0))
    found = ROWS[nn.LayerNorm].range(layer, Range(*torch.tensor([[[-1.0] * 4], [[1.0] * 4]]).double()))
    y = layer(torch.cat((torch.eye(4), -torch.eye(4))).double())
    torch.testing.assert_close(y.amin(0), found.low[0])
    torch.testing.assert_close(y.amax(0), found.high[0])


@pytest.mark.parametrize(
    ("dims", "eps", "error", "message"),
    [((), 1.0, OptionError, "different dimensions"), ((0,), 1.0, OptionError, "after the batch"),
     ((1,), 0.0, OptionError, "UnitNorm: eps: expected a positive"), ((1,), math.inf, OptionError, "positive finite")],
)  # fmt: skip
def test_other_normalisations_are_refused(dims: Any, eps: float, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        modules.UnitNorm(*dims, eps=eps)


@pytest.mark.parametrize(
    ("head", "message"),
    [(Cosines(0.5, dim=0), "mixes samples"), (Cosines(0.0), "positive finite number, got 0")],
)
def test_a_cosine_head_without_a_constant_is_refused(head: nn.Module, message: str) -> None:
    with pytest.raises((NoRuleError, OptionError), match=message):
        export(head, (4,))


def test_other_norms_are_refused() -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.normalize(x, p=1, eps=1.0)

    with pytest.raises(NoRuleError, match="expected the norm p=2, got 1"):
        lipschitz(Other(), (4,))
