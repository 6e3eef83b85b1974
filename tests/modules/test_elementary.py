"""Exponentials, logarithms, roots, reciprocals and waves of values: constants, limits from ranges, rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnx import helper as H
from torch import Tensor, nn

from lipkit import analyze, certify, export, interop, lipschitz
from lipkit.certificates.evaluators import arithmetic, machine
from lipkit.errors import NoRuleError, OptionError
from lipkit.modules import Affine, Arcsinh, Arctan, Cosine, Elementary, Graph, Network, Product, Sine, local_error
from lipkit.modules.limits import CURVES, limited
from lipkit.proof.roundoff import FLOAT32

# Functions and their derivatives, by numpy.
EXACT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "exp": (np.exp, np.exp),
    "log": (np.log, lambda x: 1 / x),
    "sqrt": (np.sqrt, lambda x: 0.5 * x**-0.5),
    "reciprocal": (np.reciprocal, lambda x: -(x**-2.0)),
}


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


@pytest.mark.thorough
@given(st.sampled_from(sorted(CURVES)), st.floats(1e-3, 5), st.floats(1e-6, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_constant_is_the_steepest_slope_between_the_limits(name: str, low: float, wide: float, below: bool) -> None:
    ends = sorted((-low, -low - wide)) if below and name in ("exp", "reciprocal") else [low, low + wide]
    module = Elementary(name, torch.tensor(ends, dtype=torch.float64))
    function, derivative = EXACT[name]
    truth = np.abs(derivative(np.linspace(ends[0], ends[1], 2001))).max()
    assert truth * (1 - 1e-15) <= float(lipschitz(module)) <= truth * (1 + 1e-13)
    far = torch.tensor([[-1e9, ends[0], ends[1], 1e9]], dtype=torch.float64)
    np.testing.assert_allclose(module(far)[0], function(np.array(ends))[[0, 0, 1, 1]], rtol=1e-15)


def test_slopes_below_and_above_all_numbers_stay_positive() -> None:
    # d/dx 1e600 exp(x - 800) is 4e252 at x = 0; of exp alone the slope rounds to 0.
    large = nn.Linear(1, 1, dtype=torch.float64)
    nn.init.constant_(large.requires_grad_(False).weight, 1e300)
    assert float(lipschitz(nn.Sequential(Elementary("exp", torch.tensor([-900.0, -800.0])), large, large))) >= 4e252
    wide = Elementary("reciprocal", torch.tensor([1.0, 1e200], dtype=torch.float64))
    assert 1 <= float(lipschitz(wide)) <= 1 + 1e-13
    assert float(lipschitz(Elementary("reciprocal", wide.limits.clamp_min(1e170)))) > 0


# A function on a box, and the supremum of its slope there in closed form.
BOXES: dict[str, tuple[Callable[[Tensor], Tensor], int, tuple[float, float], float]] = {
    "exp": (torch.exp, 1, (-1, 2), math.exp(2)),
    "log": (lambda x: x.log(), 1, (0.5, 3), 2),
    "sqrt": (torch.sqrt, 1, (0.25, 4), 1),
    "log1p": (lambda x: torch.log1p(x), 1, (-0.5, 3), 2),
    "log1p of what is not negative": (lambda x: x.relu().log1p(), 1, (-1, 3), 1),
    "log2": (lambda x: x.log2(), 1, (0.5, 3), 2 / math.log(2)),
    "log10": (torch.log10, 1, (0.5, 3), 2 / math.log(10)),
    "expm1": (lambda x: x.expm1(), 1, (-1, 2), math.exp(2)),
    "exp2": (torch.exp2, 1, (-1, 2), 4 * math.log(2)),
    "rsqrt": (torch.rsqrt, 1, (0.25, 1), 4),
    "power": (lambda x: x**-1, 1, (-3, -0.5), 4),
    "root": (lambda x: x ** np.float64(0.5), 1, (0.25, 1), 1),
    "stored exponent": (lambda x: x ** torch.tensor(0.5), 1, (0.25, 1), 1),
    "inverse square": (lambda x: x**-2, 1, (1, 2), 2),
    "inverse root": (lambda x: x.pow(-0.5), 1, (0.25, 1), 4),
    "constant over input": (lambda x: 3 / x, 1, (0.5, 1), 12),
    "quotient": (lambda x: x[:, :1] / x[:, 1:], 2, (1, 2), math.sqrt(5)),
    "sine": (lambda x: torch.sin(3 * x), 1, (-1, 1), 3),
    "cosine": (torch.cos, 1, (-2, 2), 1),
    "a square keeps away from the pole": (lambda x: torch.sqrt(x * x + 0.25), 1, (-1, 1), 2),
    "a wave is at most 1": (lambda x: 1 / (2 + torch.cos(9 * x)), 1, (-4, 4), 9),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOXES)
def test_bounded_and_exported_on_a_box(name: str) -> None:
    function, n, (low, high), truth = BOXES[name]
    model = Lambda(function)
    plain, found = export(model, (n,), box=(low, high)), analyze(model, (n,), box=(low, high), restarts=0)
    x = low + (high - low) * torch.rand(400, n, dtype=torch.float64)
    torch.testing.assert_close(plain.double()(x), model(x), rtol=1e-6, atol=1e-9)
    # Limits are a millionth wider than the box; of a product each factor is bounded alone.
    assert truth <= found.upper <= truth * (2 if n == 2 else 1 + 1e-5)
    assert float(lipschitz(plain)) == pytest.approx(found.upper, rel=1e-7)  # its factors are rounded to float32
    slopes = torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0]))(x)
    assert float(torch.linalg.matrix_norm(slopes, 2).max()) <= found.upper


@pytest.mark.parametrize("bounded", [nn.Sigmoid(), nn.Tanh(), nn.Hardsigmoid(), nn.Softsign()])
def test_a_gate_is_at_most_one_however_large_its_input(bounded: nn.Module) -> None:
    gate = Graph([Affine(torch.tensor([1e18]), torch.zeros(1)), bounded, Product()], [[0], [1], [0, 2]])
    found = limited(Network([gate], (1,)), (-2.0, 3.0))[0].nodes[2].limits.tolist()
    assert found == pytest.approx([3.0, 1.0], rel=1e-5)
    assert min(found) >= 1.0


def test_ranges_beyond_float64_are_no_limits() -> None:
    large = Affine(torch.tensor([1e200], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(NoRuleError, match=r"bounded on the box, got ranges without end, or beyond the format"):
        limited(Network([large, large, Graph([Product()], [[0, 0]])], (1,)), (0.0, 1.0))
    with pytest.raises(NoRuleError, match="or beyond the format"):  # float32, that of the product
        limited(Network([large, Graph([Product()], [[0, 0]])], (1,)), (0.0, 1.0))


def test_a_graph_of_plain_modules_is_limited_on_a_box() -> None:
    graph = Graph([Elementary("exp"), Product()], [[0], [0, 1]])  # x e^x, steepest at 1
    assert 2 * math.e <= analyze(graph, (1,), box=(0.0, 1.0), restarts=0).upper <= 2 * math.e * (1 + 1e-5)


@pytest.mark.thorough
def test_written_networks_on_a_box() -> None:
    torch.manual_seed(0)
    centres = torch.randn(7, 2)

    def radial(x: Tensor, out: nn.Module) -> Tensor:
        return out(torch.exp(-((x[:, None, :] - centres) ** 2).sum(-1)))

    def cart(x: Tensor) -> Tensor:  # a pendulum on a cart: force, angle, speed
        angle, speed, force = x.split(1, 1)
        s, c = torch.sin(angle), torch.cos(angle)
        return (force + 0.1 * s * (0.5 * speed**2 + 9.81 * c)) / (1 + 0.1 * s**2)

    def softmax(x: Tensor) -> Tensor:
        e = torch.exp(x)
        return e / e.sum(1, keepdim=True)

    for model, n, most in ((Lambda(radial, nn.Linear(7, 3)), 2, 150), (Lambda(cart), 3, 2), (Lambda(softmax), 3, 60)):
        box = (-1.0, 1.0)
        plain = export(model, (n,), box=box)
        x = 2 * torch.rand(300, n) - 1
        torch.testing.assert_close(plain(x), model(x), rtol=1e-5, atol=1e-6)
        found = analyze(model, (n,), box=box, restarts=2, steps=10)
        assert 0 < found.lower <= found.upper <= most * found.lower


@pytest.mark.thorough
def test_a_classifier_of_waves_is_certified_and_written(tmp_path: Path) -> None:
    torch.manual_seed(1)

    def waves(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
        return last(torch.sin(2 * first(x)) + torch.exp(-(first(x) ** 2)))

    model = Lambda(waves, nn.Linear(4, 16), nn.Linear(16, 3))
    plain = export(model, (4,), box=(0.0, 1.0))
    x = torch.rand(20, 4)
    found = certify(plain, x, plain(x).argmax(1))
    assert bool((found.radius > 0).all())
    back = interop.load_onnx(interop.write_onnx(plain, tmp_path / "waves.onnx"))
    assert torch.equal(back(x), plain(x))


ROUNDED: list[nn.Module] = [
    Sine(),
    Cosine(),
    Arctan(),
    Arcsinh(),
    Elementary("exp", torch.tensor([-3.0, 4.0])),
    Elementary("log", torch.tensor([1e-3, 2.0])),
    Elementary("sqrt", torch.tensor([1e-4, 9.0])),
    Elementary("reciprocal", torch.tensor([-5.0, -0.01])),
]


@pytest.mark.parametrize("module", ROUNDED, ids=str)
def test_rounding_is_covered_and_not_far_above(module: nn.Module) -> None:
    torch.manual_seed(2)
    x = 3 * torch.randn(4000, 12)
    lost = (module(x).double() - module.double()(x.double())).norm(dim=1)
    bound = local_error(module, (12,), FLOAT32)(x.double()).error.at
    module.float()
    assert bool((lost <= bound).all())
    assert float((bound / lost.clamp_min(1e-30)).min()) < 2000


def test_limits_that_the_machine_rounds_are_covered() -> None:
    for name, ends in (("log", (1 + 1e-9, 1 + 5e-8)), ("exp", (0.0, 80.1 - 3e-7)), ("sqrt", (4.0, 4 + 2e-7))):
        module = Elementary(name, torch.tensor(ends, dtype=torch.float64))
        found = arithmetic("float32", Network([module], (1,)))
        x = torch.tensor([[0.0], [ends[0]], [90.0]], dtype=torch.float64)
        lost = (machine(Network([module], (1,)), "float32")(x.float()).double() - module(x)).norm(dim=1)
        assert bool((lost <= local_error(module, (1,), found)(x).error.at).all())


@pytest.mark.parametrize(
    ("function", "box", "expected"),
    [
        (torch.log, (0.0, 1.0), r"torch\.log.*values above 0 on the box, got some in \[0, 1\]"),
        (torch.sqrt, (-1.0, 1.0), "values above 0"),
        (torch.reciprocal, (-1.0, 1.0), "values of one sign"),
        (lambda x: 1 / x, (0.0, 1.0), "truediv.*values of one sign"),
        (torch.exp, (0.0, 800.0), "values at most 700"),
        (torch.log, (1.0, 3.4028234e38), r"values above 0 on the box, got some in \[0.999999, inf\]"),
        (torch.exp, None, "exp, which has no Lipschitz constant on all of space; give the range"),
        (lambda x: x / x.sum(1, keepdim=True), None, "truediv.*constant divisor, got one that depends on the input"),
    ],
)
def test_what_is_steep_without_bound_is_refused(function: Any, box: Any, expected: str) -> None:
    with pytest.raises(NoRuleError, match=expected):
        export(Lambda(function), (2,), box=box)
    if box is not None:
        with pytest.raises(NoRuleError, match=expected):
            analyze(Lambda(function), (2,), box=box, restarts=0)


def test_limits_of_a_file_that_bound_nothing_are_refused() -> None:
    for name, bad in (
        ("log", (-1.0, 2.0)), ("sqrt", (0.0, 1.0)), ("reciprocal", (-1.0, 1.0)), ("exp", (2.0, 1.0)),
        ("exp", (math.nan, 1.0)), ("exp", (-math.inf, 1.0)), ("log", (0.5, math.inf)), ("log", (1e-40, 1.0)),
    ):  # fmt: skip
        network = Network([Elementary(name, torch.tensor(bad))], (2,))
        with pytest.raises(NoRuleError, match="slope"):
            lipschitz(network)
    with pytest.raises(OptionError, match="expected one of exp, log"):
        Elementary("tan")
    for limits in (torch.zeros(3), torch.tensor([0, 1])):
        with pytest.raises(OptionError, match="a lower and an upper limit"):
            Elementary("exp", limits)


def test_limits_stay_outside_of_the_range_in_a_short_format() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        network = Network([nn.Linear(1, 1).requires_grad_(False), Elementary("log")], (1,)).to(dtype)
        network[0].weight.fill_(1.0)
        network[0].bias.fill_(0.0)
        low, high = limited(network, (0.3, 0.7))[1].limits.double().tolist()
        assert 0.3 * (1 - 2**-6) < low < 0.3
        assert 0.7 < high < 0.7 * (1 + 2**-6)
        square = Graph([Product(torch.ones(2, dtype=dtype))], [[0, 0]])
        for high in (0.3, 0.7):
            assert float(limited(Network([square], (1,)), (0.0, high))[0].nodes[0].limits.double().min()) > high
    small = limited(Network([Elementary("exp")], (1,)).half(), (-1e-8, 1e-7))[0].limits.double()
    assert bool((small.abs() > torch.tensor([1e-8, 1e-7], dtype=torch.float64)).all())  # of multiples of 6e-8


def test_a_box_whose_centre_is_rounded() -> None:
    for low, high in ((1e16, 1e16 + 2), (1e308, 1.7e308)):
        plain = export(Lambda(lambda x, _: torch.exp(torch.sin(x)), nn.Linear(1, 1)).double(), (1,), box=(low, high))
        x = torch.tensor([[low], [high]], dtype=torch.float64)
        torch.testing.assert_close(plain(x), x.sin().exp(), rtol=1e-15, atol=0)


@pytest.mark.thorough
def test_operators_of_onnx_on_a_box(tmp_path: Path) -> None:
    stored = {
        "w": np.eye(3, dtype=np.float32),
        "half": np.float32(0.5),
        "minus": np.float32(-2.0),
        "four": np.float32(4.0),
    }
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["a"]),
        H.make_node("Sin", ["a"], ["b"]),
        H.make_node("Cos", ["a"], ["c"]),
        H.make_node("Exp", ["b"], ["d"]),
        H.make_node("Log", ["a"], ["e"]),
        H.make_node("Sqrt", ["a"], ["f"]),
        H.make_node("Reciprocal", ["d"], ["g"]),
        H.make_node("Div", ["c", "a"], ["h"]),
        H.make_node("Pow", ["a", "half"], ["i"]),
        H.make_node("Pow", ["a", "minus"], ["j"]),
        H.make_node("Pow", ["a", "four"], ["k"]),
        H.make_node("Sum", [*"efghijk"], ["y"]),
    ]
    ends = [H.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    model = H.make_model(
        H.make_graph(nodes, "g", ends[:1], ends[1:], tensors), opset_imports=[H.make_opsetid("", 17)], ir_version=8
    )
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    network = interop.load_onnx(path, box=(0.5, 2.0))
    x = 0.5 + 1.5 * torch.rand(50, 3)
    torch.testing.assert_close(network(x), interop.onnx_runtime(path)(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(NoRuleError, match="no Lipschitz constant on all of space"):
        interop.load_onnx(path)
