"""Products of two values: constants, limits from ranges, and what forged limits do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit import analyze, attacks, certify, export, lipschitz
from lipkit.analysis import lipschitz_lower_bound
from lipkit.data import Split
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.evaluation import Attack, evaluate
from lipkit.modules import Graph, MatrixProduct, Network, Product, local_error
from lipkit.modules.limits import limited
from lipkit.proof.roundoff import FLOAT32
from lipkit.training import PgdAdversary


def slope(module: nn.Module, scale: float, shape: tuple[int, ...], count: int = 4000) -> float:
    """The steepest secant between random points."""
    x = scale * torch.randn(count, *shape, dtype=torch.float64)
    y = x + torch.randn_like(x) * scale * 10 ** (-3 * torch.rand(count, *(1,) * len(shape), dtype=torch.float64))
    with torch.no_grad():
        moved = (module(x) - module(y)).flatten(1).norm(dim=1)
    return float((moved / (x - y).flatten(1).norm(dim=1)).max())


@pytest.mark.thorough
@given(st.floats(0.1, 5), st.floats(0.1, 5), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_no_secant_is_steeper_than_the_constant(a: float, b: float, seed: int) -> None:
    torch.manual_seed(seed)
    graph = Graph([nn.Linear(3, 3), Product(torch.tensor([a, b]))], [[0], [0, 1]]).double()
    bound = float(lipschitz(graph, (3,)).detach())
    for scale in (0.3, a, 10.0):
        assert slope(graph, scale, (3,), 500) <= bound


def test_the_constant_is_attained() -> None:
    square = Graph([Product(torch.tensor([2.0, 2.0]))], [[0, 0]]).double()
    assert float(lipschitz(square, (1,))) == pytest.approx(4.0)
    assert 3.9 < slope(square, 2.0, (1,)) <= 4.0
    product = MatrixProduct(2, 3, 2, torch.tensor([1.0, 2.0]))
    assert product.norms() == pytest.approx((math.sqrt(6), 2 * math.sqrt(6)))
    u, v = torch.ones(2, 3), 2 * torch.ones(3, 2)
    assert float(torch.linalg.matrix_norm(u, 2)) == pytest.approx(product.norms()[0])
    assert float(torch.linalg.matrix_norm(v, 2)) == pytest.approx(product.norms()[1])


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.exp(x))


def test_all_of_a_double_network_without_layers_is_double() -> None:
    plain = export(Gate().double(), (3,), box=(-1.0, 1.0))
    assert {t.dtype for t in plain.state_dict().values()} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_limits_have_room_whatever_the_default_format(dtype: torch.dtype) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    before, high = torch.get_default_dtype(), 1.0037  # in bfloat16 the number 1
    torch.set_default_dtype(dtype)
    try:
        assert 2 * high <= analyze(Square(), (1,), box=(0.0, high), restarts=0).upper < 2 * high * (1 + 1e-5)
    finally:
        torch.set_default_dtype(before)


def test_limits_are_what_the_box_can_reach() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.a(x)) * torch.tanh(self.b(x))

    torch.manual_seed(0)
    gate = Gate()
    plain = export(gate, (2, 5, 5), box=(-1, 2))
    (product,) = [m for m in plain.modules() if isinstance(m, Product)]
    # Of a linear layer the range is exact: its largest entry is attained at a corner of the box.
    weight, bias = gate.a.weight.detach(), gate.a.bias.detach()
    highest = (2 * weight.clamp_min(0) - weight.clamp_max(0)).sum((1, 2, 3)) + bias
    assert float(product.limits[0]) == pytest.approx(float(highest.max()), rel=1e-4)
    assert float(product.limits[1]) <= 1 + 1e-5
    x = -1 + 3 * torch.rand(200, 2, 5, 5)
    assert torch.allclose(plain(x), gate(x), atol=1e-5)
    far = 50 * torch.randn(50, 2, 5, 5)
    assert not torch.allclose(plain(far), gate(far), atol=1e-2)
    assert float(plain(far).abs().max()) <= float(product.limits.prod()) * (1 + 1e-6)


@pytest.mark.parametrize("shape", [(4,), (2, 4, 4)])
@pytest.mark.parametrize(
    "layer",
    [
        nn.GELU(),
        nn.SiLU(),
        nn.Sigmoid(),
        nn.Softmax(1),
        nn.ELU(),
        nn.LayerNorm(4),
        nn.Hardswish(),
        nn.LeakyReLU(-0.3),
        nn.ELU(-2.0),
        nn.PReLU(init=-1.5),
        nn.Hardtanh(0.5, 0.7),
        nn.Softshrink(1.0),
    ],
    ids=lambda m: type(m).__name__,
)
def test_ranges_hold(layer: nn.Module, shape: tuple[int, ...]) -> None:
    network = Network([layer, Graph([Product()], [[0, 0]])], shape)
    plain = limited(network, (-2.0, 3.0))
    x = torch.cat([-2 + 5 * torch.rand(500, *shape), torch.randint(0, 2, (200, *shape)) * 5.0 - 2])
    with torch.no_grad():
        assert torch.allclose(plain(x), layer(x) ** 2, rtol=1e-5, atol=1e-6)
    limit = float(plain[1].nodes[0].limits[0])
    assert float(layer(x).detach().abs().max()) <= limit <= 8.0


@pytest.mark.thorough
def test_ranges_behind_an_average_of_negative_divisor_add_up() -> None:
    class Contrast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.avg_pool2d(x[:, 1:], 2) + F.avg_pool2d(x[:, :1], 2, divisor_override=-4)
            return y * y

    # The difference of two means reaches 1, and its gradient has eight entries of 1/4.
    truth = 2 * math.sqrt(8) / 4
    found = analyze(Contrast(), (2, 2, 2), box=(0.0, 1.0), restarts=16, steps=60)
    assert 0.6 * truth < found.lower <= found.upper
    assert truth <= found.upper <= truth * (1 + 1e-5)
    x = torch.cat([torch.rand(200, 2, 2, 2), torch.eye(2)[:, :, None, None].expand(2, 2, 2, 2)])
    assert torch.allclose(export(Contrast(), (2, 2, 2), box=(0.0, 1.0))(x), Contrast()(x), atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("moving", [False, True], ids=["a constant", "a sum"])
def test_ranges_count_what_float64_loses_in_them(moving: bool) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + (0 * x + 1e16 if moving else 1e16)
            return (y - 1e16) ** 2  # x^2 in exact arithmetic, with slopes up to 2.4 on the box

    assert analyze(Square(), (1,), box=(0.2, 1.2), restarts=0).upper >= 2.4
    x = torch.linspace(0.2, 1.2, 99, dtype=torch.float64)[:, None]
    assert torch.equal(export(Square(), (1,), box=(0.2, 1.2))(x), Square()(x))  # no limit is in the way


@pytest.mark.parametrize("high", [1e-50, 1e-44, 1e-30])
def test_limits_are_not_lost_below_the_range_of_float32(high: float) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    assert 2 * high <= analyze(Square(), (1,), box=(0.0, high), restarts=0).upper <= 1e-29


def test_the_smallest_norm_in_a_range_counts_what_float64_loses() -> None:
    class Direction(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.normalize((x + 1e16) - 1e16, dim=1, eps=0.1)

    # In float64 the centre 1.5 becomes 2. The gradient at (1.1, 1.1) is 1 / norm.
    assert analyze(Direction(), (2,), box=(1.1, 1.9), restarts=0).upper >= 1 / math.hypot(1.1, 1.1)


@pytest.mark.parametrize("limits", [(1.0, 2.0), (0.0, 3.0), (100.0, 0.01)])
def test_rounding_is_covered(limits: tuple[float, float]) -> None:
    torch.manual_seed(1)
    graph = Graph([nn.Linear(6, 6), nn.Linear(6, 6), Product(torch.tensor(limits))], [[0], [0], [1, 2]])
    x = torch.randn(300, 6)
    with torch.no_grad():
        single = graph(x).double()
        lost = (single - graph.double()(x.double())).norm(dim=1)
    bound = local_error(graph, (6,), FLOAT32)(x.double()).error.at
    assert bool((lost <= bound).all())


def test_forged_limits_bound_nothing_that_is_not_so() -> None:
    """Negative ones make a factor constant; others that are no limits are refused."""
    product = Product(torch.tensor([1.0, 1.0]))
    product.limits = torch.tensor([-2.0, 3.0], dtype=torch.float64)
    graph = Graph([product], [[0, 0]])
    assert slope(graph, 2.0, (2,)) <= float(lipschitz(graph, (2,)))
    for bad in (math.nan, math.inf):
        product.limits = torch.tensor([bad, 3.0])
        with pytest.raises(NoRuleError, match="no Lipschitz constant on all of space"):
            lipschitz(graph, (2,))


def test_refusals() -> None:
    for bad in (torch.tensor([1.0]), torch.tensor([1.0, -1.0]), torch.tensor([1.0, math.nan]), torch.tensor([5, 5])):
        with pytest.raises(OptionError, match="two limits"):
            Product(bad)
    with pytest.raises(OptionError, match="sizes of at least 1"):
        MatrixProduct(0, 1, 1)
    with pytest.raises(ShapeError, match="matrices of sizes"):
        MatrixProduct(2, 2, 2)(torch.ones(1, 2, 2), torch.ones(1, 3, 2))
    with pytest.raises(OptionError, match="smaller one first"):
        export(nn.Linear(2, 2), (2,), box=(1, 0))


NO_INTERVALS = (
    5,
    "01",
    (1, 0),
    (0, 1, 2),
    (0.0, math.nan),
    ("0", None),
    torch.zeros(2, 3),
    ((0, 1), (0, 1)),
    {},
    object(),
)


@pytest.mark.parametrize("box", NO_INTERVALS, ids=[str(i) for i in range(len(NO_INTERVALS))])
def test_a_box_is_two_numbers_everywhere(box: object) -> None:
    net, x, y = export(nn.Linear(2, 2), (2,)), torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    given: dict[str, Any] = {"box": box}
    calls = [
        lambda: export(nn.Linear(2, 2), (2,), **given),
        *([] if isinstance(box, torch.Tensor) or box == ((0, 1), (0, 1)) else [lambda: analyze(net, (2,), **given)]),
        lambda: lipschitz_lower_bound(net, restarts=1, steps=1, **given),
        lambda: PgdAdversary(**given),
        lambda: attacks.autoattack(net, x, y, eps=1.0, **given),
        lambda: evaluate(net, Split(x, y), attack=Attack(eps=(0.1,), **given)),
        *(
            lambda name=name: attacks.run_attack(name, net, x, y, eps=1.0, **given)
            for name in ("pgd", "apgd", "fab", "cw")
        ),
    ]
    for call in calls:
        with pytest.raises(OptionError, match=r"^box: expected two numbers, the smaller one first, got .{,100}$"):
            call()
    net.input_range = box  # type: ignore[assignment]
    for evaluator in ("integer", "float32"):
        with pytest.raises(OptionError, match=r"^input_range: expected two numbers, the smaller one first, got"):
            certify(net, x, y, evaluator=evaluator)


@pytest.mark.thorough
def test_numbers_of_any_type_make_a_box() -> None:
    for box in ([0, 1], np.array([0.0, 1.0]), torch.tensor([0, 1]), (np.float32(0), True)):
        assert export(nn.Linear(2, 2), (2,), box=box).input_range == (0.0, 1.0)  # type: ignore[arg-type]
        assert analyze(nn.Linear(2, 2), (2,), box=box, restarts=1).box == (0.0, 1.0)  # type: ignore[arg-type]
