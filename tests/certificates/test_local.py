"""Local certificates: a reference in numpy, exact truth on small networks, rounding that decides, attacks inside."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.local_certificates import attacks as attacks_on
from benchmarks.local_certificates import nearest_flip, truth
from torch import Tensor, nn

import lipkit_check
from lipkit import export, modules
from lipkit.certificates import certify, local, relaxation
from lipkit.certificates.certificate_file import describe, read_certificate, verify, write_certificate
from lipkit.certificates.circuit import _RULES, Circuit, Leaf, Linear, Noise, circuit_rule
from lipkit.certificates.local import Ball, Bounds
from lipkit.certificates.relaxation import Relaxation
from lipkit.errors import CertificateViolation, DataError, NoRuleError, OptionError
from lipkit.evaluation import Attack, evaluate
from lipkit.modules.activations import ACTIVATIONS
from lipkit.proof.roundoff import FLOAT32, FLOAT64

Array = Any


def mlp(sizes: Sequence[int], seed: int, activation: nn.Module | None = None) -> modules.Network:
    """In float64."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU() if activation is None else activation]
    return modules.Network(layers[:-1], (sizes[0],)).double()


def joined(seed: int) -> modules.Network:
    """A network with every join, in float32."""
    torch.manual_seed(seed)

    def graph() -> nn.Module:
        nodes = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), modules.Add(1, -1), modules.MaxMin()]
        nodes += [modules.Blend(torch.rand(())), modules.Concatenate(1), modules.Piece(1, 0, 16, 2), modules.Maximum()]
        return modules.Graph(nodes, [[0], [1], [2], [0, 3], [4], [5, 0], [6, 1], [7], [8, 0]])

    return modules.Network([nn.Linear(6, 8), graph(), nn.Tanh(), graph(), nn.GELU(), nn.Linear(8, 3)], (6,))


def images(seed: int) -> modules.Network:
    """Convolutions of all kinds, pooling, views, in float32."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [
        modules.Affine(torch.tensor([2.0, 0.5]), torch.tensor([0.1, -0.2])),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.MaxPool2d((3, 2), 2, (1, 0)),
        nn.Conv2d(2, 4, 3, padding="same", dilation=2, groups=2, bias=False),
        modules.MaxMin(),
        nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
        nn.Softplus(),
        modules.LayerCenter(1),
        modules.EnlargeBilinear(2, 1),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.AdaptiveAvgPool2d((3, 2)),
        modules.Permute(2, 1, 3),
        nn.Flatten(),
        nn.LazyLinear(6),
        modules.GroupSort(2),
        modules.Affine(torch.rand(6), torch.rand(6)),
        nn.Hardtanh(-1, 2),
        nn.Linear(6, 3),
    ]
    with torch.no_grad():
        nn.Sequential(*layers)(torch.zeros(1, 2, 4, 4))
    layers[14] = nn.Linear(layers[14].in_features, 6)  # type: ignore[arg-type]
    return modules.Network(layers, (2, 4, 4))


# --- the same bounds, written from the papers ---------------------------------------------------------------------


def crown(weights: list[tuple[Array, Array]], x: Array, label: int, r: float) -> tuple[list[Array], Array, Array]:
    """Zhang et al. (2018) in l2 for a ReLU network: bounds of each pre-activation; base and norm of each margin."""
    low: list[Array] = []
    high: list[Array] = []

    def back(rows: Array, k: int) -> tuple[Array, Array]:
        w, b = weights[k]
        a, const = rows @ w, rows @ b
        for j in reversed(range(k)):
            lo, hi = low[j], high[j]
            mixed = (lo < 0) & (hi > 0)
            gap = np.where(mixed, hi - lo, 1.0)
            steep = np.where(mixed, hi / gap, (lo >= 0) * 1.0)
            flat = np.where(mixed, (hi > -lo) * 1.0, (lo >= 0) * 1.0)
            const = const + np.minimum(a, 0) @ np.where(mixed, -lo * steep, 0.0)
            a = np.maximum(a, 0) * flat + np.minimum(a, 0) * steep
            w, b = weights[j]
            const, a = const + a @ b, a @ w
        return a @ x + const, np.linalg.norm(a, axis=1)

    for k in range(len(weights) - 1):
        one = np.eye(len(weights[k][1]))
        for sign, kept in ((1, low), (-1, high)):
            base, norm = back(sign * one, k)
            kept.append(sign * (base - r * norm))
    eye = np.eye(len(weights[-1][1]))
    rows = np.delete(eye[label] - eye, label, 0)
    return [np.stack(pair) for pair in zip(low, high, strict=True)], *back(rows, len(weights) - 1)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_those_of_the_reference(seed: int) -> None:
    network = mlp((6, 9, 8, 7, 4), seed)
    x = torch.randn(3, 6, dtype=torch.float64)
    labels = network(x).argmax(1)
    weights = [(m.weight.numpy(), m.bias.numpy()) for m in network if isinstance(m, nn.Linear)]
    bounds = Bounds(network, FLOAT64, None)
    for r in (1e-3, 0.1, 0.7):
        radius = torch.full((3,), r, dtype=torch.float64)
        ball = Ball(bounds.circuit, x, radius, None, {})
        allowed = bounds.proved(x, labels, radius)[1]
        for i in range(3):
            ranges, base, norm = crown(weights, x[i].numpy(), int(labels[i]), r)
            for (low, high), found in zip(list(ball.ranges.values())[1:], ranges, strict=True):
                assert np.abs(np.stack([low[i], high[i]]) - found).max() < 1e-9
            assert abs(float(allowed[i]) - (base / norm).min()) < 1e-9


# --- the truth ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_exact_distance_is_that_of_a_grid_and_of_a_plane() -> None:
    for seed in range(3):
        network = mlp((2, 4, 3, 3), seed)
        x = torch.randn(2, dtype=torch.float64)
        label = int(network(x[None]).argmax(1))
        weights = [(m.weight.numpy(), m.bias.numpy()) for m in network if isinstance(m, nn.Linear)]
        exact = nearest_flip(weights, x.numpy(), label)
        reach = min(exact, 5.0)
        grid = torch.cartesian_prod(*2 * [torch.linspace(-1.1, 1.1, 400, dtype=torch.float64)]) * reach
        flipped = grid[network(x + grid).argmax(1) != label].norm(dim=1)
        assert exact == reach or not len(flipped)
        if len(flipped):
            assert 0 <= float(flipped.min()) - exact <= 0.02 * reach
    plane, x = mlp((3, 2), 1), torch.randn(3, dtype=torch.float64)
    gap = plane(x[None])[0] @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    exact = nearest_flip([(plane[0].weight.numpy(), plane[0].bias.numpy())], x.numpy(), int(gap < 0))
    assert exact == pytest.approx(abs(float(gap)) / float((plane[0].weight[0] - plane[0].weight[1]).norm()))


@pytest.mark.thorough
def test_no_radius_is_above_the_truth() -> None:
    found = truth(18, seed=1000)
    assert found["above the exact distance"] == 0
    assert found["radius / exact distance"]["median"] > 0.6
    assert found["radius / exact distance"]["largest"] > 0.999


@pytest.mark.thorough
def test_no_attack_succeeds_on_any_module_or_where_rounding_decides() -> None:
    with torch.backends.nnpack.flags(enabled=False):
        found = attacks_on(networks=1, points=200, seed=1000)
    for each in found.values():
        assert each["succeeded"] == 0
        assert each["points inside"] > 100
    assert found["float64"]["succeeded within 4 times the radii"] > 10


def test_a_linear_network_has_its_own_radius() -> None:
    network = mlp((5, 3), 0)
    x = torch.randn(9, 5, dtype=torch.float64)
    y = network(x)
    labels = y.argmax(1)
    rows = network[0].weight
    apart = (rows[labels][:, None] - rows).norm(dim=2)
    exact = ((y.amax(1, keepdim=True) - y) / apart).nan_to_num(math.inf).amin(1)
    bounds = Bounds(network, FLOAT64, None)
    found = bounds.radii(x, labels, torch.zeros(9, dtype=torch.float64))
    assert (found <= exact).all()
    assert (found >= exact * (1 - 2e-3)).all()


@pytest.mark.parametrize("kind", list(ACTIVATIONS), ids=lambda kind: kind.__name__)
def test_lines_enclose_their_activation(kind: type[nn.Module]) -> None:
    if kind in (modules.LPReLU,):
        pytest.skip("it is exported as PReLU")
    module = kind(1) if kind in (nn.PReLU, modules.NActivation) else kind()
    relaxation_of = Relaxation(module.double().requires_grad_(False))
    torch.manual_seed(0)
    middle = torch.cat([torch.linspace(-4, 4, 200), torch.randn(100), torch.tensor([3.0, -3.0, 1.414, 2.4, 25.0])])
    width = torch.rand(305) * torch.tensor([1e-9, 0.1, 1.0, 8.0, 40.0]).repeat(61)
    low, high = ((middle + sign * width).double()[:, None, None] for sign in (-1, 1))
    lines = relaxation_of(low, high)
    for share in torch.linspace(0, 1, 81).tolist():
        z = low + share * (high - low)
        with torch.no_grad():
            s = module(z)
        slack = 1e-13 * (1 + z.abs() + s.abs()) + (1e-8 if kind is nn.Softplus else 0)
        assert (lines.low_slope * z + lines.low <= s + slack).all()
        assert (lines.high_slope * z + lines.high >= s - slack).all()
        assert ((lines.least <= s + slack) & (s <= lines.most + slack)).all()
    # Two lines touch what they enclose: never more than half of the width times the range of slopes apart.
    gap = (lines.high_slope - lines.low_slope) * (low + high) / 2 + lines.high - lines.low
    assert (gap <= 1.3 * (high - low) + (1e-5 if kind is nn.Hardswish else 1e-7)).all()  # of a rounded sixth on CUDA


# --- rounding -----------------------------------------------------------------------------------------------------


def moved(x: Tensor, step: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Points of x's format near x + step, and which of them lie in the open balls (measured in float64)."""
    point = (x.double() + step).to(x.dtype)
    return point, (point.double() - x.double()).flatten(1).norm(dim=1) < radius


def attacks(network: modules.Network, x: Tensor, radius: Tensor, labels: Tensor, count: int, seed: int = 0) -> int:
    """How many of ``count`` tries a sample leave their class in the evaluator's arithmetic; none may."""
    generator, flips = torch.Generator().manual_seed(seed), 0
    radius = radius.clamp_max(1e3)
    box = network.input_range
    wide = radius.reshape(-1, *[1] * (x.ndim - 1))
    direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    for trial in range(count):
        if trial % 4:
            point = (x.double() + direction).to(x.dtype).requires_grad_()
            with torch.enable_grad():
                y = network(point)
                other = y.scatter(1, labels[:, None], -math.inf).amax(1)
                gradient = torch.autograd.grad((other - y.gather(1, labels[:, None])[:, 0]).sum(), point)[0].double()
            direction = direction + gradient / _size(gradient) * wide
        else:
            direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        direction = direction / _size(direction) * wide * (1 if trial % 3 else 0.999999)
        if box is not None:
            direction = (x.double() + direction).clamp(*box) - x.double()
        point, inside = moved(x, direction, radius)
        if box is not None:
            inside &= ((point >= box[0]) & (point <= box[1])).flatten(1).all(1)
        with torch.no_grad():
            flips += int((inside & (network(point).argmax(1) != labels)).sum())
    return flips


def _size(values: Tensor) -> Tensor:
    return values.flatten(1).norm(dim=1).clamp_min(1e-300).reshape(-1, *[1] * (values.ndim - 1))


@pytest.mark.thorough
@pytest.mark.parametrize("evaluator", ["float64", "float32"])
@pytest.mark.parametrize("make", [joined, images])
def test_attacks_inside_never_succeed(make: Callable[[int], modules.Network], evaluator: str) -> None:
    dtype = torch.float64 if evaluator == "float64" else torch.float32
    with torch.backends.nnpack.flags(enabled=False):
        seed = int((evaluator == "float32") != (make is joined))
        network = make(seed).to(dtype)
        if seed:
            network.input_range = (0.0, 1.0)
        count = 5 if make is joined else 2
        x = torch.rand(count, *network.input_shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        labels = network(x).argmax(1)
        found = certify(network, x, labels, method="local", evaluator=evaluator)
        assert (found.radius > 0).sum() > count - 2
        assert attacks(network, x, found.radius, labels, 30) == 0
        plain = certify(network, x, labels, evaluator=evaluator)
        assert (found.radius >= plain.radius).all()
        assert found.radius.median() > plain.radius.median()


def graph_of(*nodes: nn.Module, sources: list[list[int]], inputs: int) -> modules.Network:
    return modules.Network([modules.Graph(nodes, sources)], (inputs,))


def dense(weight: list[list[float]], bias: list[float] | None = None, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=dtype))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias, dtype=dtype))
    return layer


@pytest.mark.thorough
def test_a_skip_that_rounds_away_its_branch_decides() -> None:
    # y = x - 2^-25 x, which float32 rounds to x: on the exact side of 1 - 2^-25 lies a float32 that the machine puts
    # on the other one.
    bias = 1 - 2.0**-24
    network = graph_of(
        dense([[2.0**-25]]),
        modules.Add(1, -1),
        dense([[0.0], [1.0]], [bias, 0.0]),
        sources=[[0], [0, 1], [2]],
        inputs=1,
    )
    x = torch.tensor([[1 - 2.0**-24]])
    with torch.no_grad():
        y = network(x)
    assert y[0, 0] == y[0, 1]  # the machine has a tie, exact numbers have none
    exact = certify(network, x, torch.tensor([0]), method="local", rounding="ignore")
    assert exact.radius.item() > 0
    for evaluator in ("float32", "float64"):
        found = certify(network, x, torch.tensor([0]), method="local", evaluator=evaluator).radius.item()
        assert (found > 0) == (evaluator == "float64")


def swallowed(bits: int, dtype: torch.dtype) -> modules.Network:
    """x + 2^bits - 2^bits behind a ReLU: 0 for the machine, x in real arithmetic."""
    body = dense([[1.0], [0.0]], [2.0**bits, 2.0**bits], dtype)
    return modules.Network(
        [body, nn.ReLU(), dense([[1.0, -1.0]], None, dtype), dense([[0.0], [1.0]], [0.25, 0.0], dtype)], (1,)
    )


@pytest.mark.parametrize(("name", "bits"), [("float32", 25), ("float64", 54)])
def test_a_bias_that_swallows_the_input_decides(name: str, bits: int) -> None:
    dtype = getattr(torch, name)
    network = swallowed(bits, dtype)
    x, y = torch.ones(1, 1, dtype=dtype), torch.tensor([1])
    assert network(x).argmax().item() == 0
    assert certify(network, x, y, method="local", evaluator=name).radius.item() == 0
    if name == "float32":  # the bias is exact in float64, and so is the sum
        assert certify(network, x, y, method="local").radius.item() > 0.5


@pytest.mark.thorough
def test_each_term_of_rounding_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rational arithmetic the bound of rounded rows holds, and without what is taken off it does not."""

    def exact(values: Tensor) -> list[Fraction]:
        return [Fraction(v) for v in values.flatten().tolist()]

    def margin(network: modules.Network, point: list[Fraction]) -> Fraction:
        """y_0 - y_1 in rational numbers."""
        values: list[list[Fraction]] = [point]
        graph = network[0]
        for node, read in zip(graph.nodes, graph.sources, strict=True):
            given = [values[i] for i in read]
            if isinstance(node, nn.Linear):
                rows = [exact(row) for row in node.weight]
                bias = [Fraction(0)] * len(rows) if node.bias is None else exact(node.bias)
                pairs = zip(rows, bias, strict=True)
                values.append([sum((w * v for w, v in zip(row, given[0], strict=True)), b) for row, b in pairs])
            elif isinstance(node, nn.ReLU | nn.LeakyReLU):
                slope = Fraction(getattr(node, "negative_slope", 0.0))
                values.append([v if v > 0 else slope * v for v in given[0]])
            else:
                signs = node.signs
                values.append(
                    [sum(s * v for s, v in zip(signs, each, strict=True)) for each in zip(*given, strict=True)]
                )
        return values[-1][0] - values[-1][1]

    def case(seed: int) -> tuple[modules.Network, Tensor]:
        torch.manual_seed(seed)
        wide = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)]
        nodes = [wide[0], nn.LeakyReLU(1 / 3), wide[1], modules.Add(1, 1, -1), wide[2]]
        network = graph_of(*nodes, sources=[[0], [1], [2], [0, 2, 3], [4]], inputs=3)
        return network, torch.randn(1, 3, dtype=torch.float64) * 1e3

    def broken(bounds_of: Callable[[modules.Network], Circuit], seeds: range) -> int:
        """How often a bound of the margin, at radius 0, is above the exact margin."""
        count = 0
        for seed in seeds:
            network, x = case(seed)
            ball = Ball(bounds_of(network), x, torch.zeros(1, dtype=torch.float64), None, {})
            rows = torch.tensor([[[1.0, -1.0, 0.0]]], dtype=torch.float64)
            base, _ = ball.below(ball.circuit.output, rows)
            count += Fraction(float(base)) > margin(network, exact(x[0]))
        return count

    def plain(network: modules.Network) -> Circuit:
        return Circuit(network, None)

    assert broken(plain, range(40)) == 0
    with monkeypatch.context() as patch:  # nothing is taken off: rounding to nearest is above as often as below
        patch.setattr(local, "grow", torch.zeros_like)
        assert broken(plain, range(40)) > 5


def test_each_term_is_found_where_nothing_else_is_taken_off() -> None:
    """Networks in which all cancels but for one step: what is taken off is what that step may lose."""
    unit, double = 2.0**-53, torch.float64
    zeros, first = [[0.0, 0.0], [0.0, 0.0]], dense([[1.0], [0.0]], [1.0, 0.0], torch.float64)
    scale = modules.Affine(torch.tensor([2.0**-30 / 3] * 2, dtype=double), torch.zeros(2, dtype=double))
    less = torch.tensor([-0.4 * unit], dtype=double)
    steps: list[nn.Module] = [modules.Affine(torch.ones(1).double(), less)] * 60
    # Name: modules, sources, inputs, the least that is taken off.
    cases: dict[str, tuple[list[nn.Module], list[list[int]], list[float], float]] = {
        "map": ([dense([[1 / 3, 1 / 7]] * 2, None, double)], [[0]], [3.0, 3.0], 4 * unit * (3 / 3 + 3 / 7)),
        "bias": ([dense(zeros, [1 / 3, 1 / 3], double)], [[0]], [3.0, 3.0], 2 * unit / 3),
        "meeting": (
            [modules.Add(1, -1), scale, modules.Add(1, 1)], [[0, 0], [1], [1, 2]], [3.0, 3.0], 2 * unit * 6.0
        ),
        "constant": ([*steps, first], [[i] for i in range(61)], [0.0], 24 * unit),
        "input": ([dense([[1.0] * 20 + [-1.0] * 20, [0.0] * 40], None, double)], [[0]], [3.0] * 40, 30 * unit * 120),
    }  # fmt: skip
    for term, (nodes, sources, at, expected) in cases.items():
        network = graph_of(*nodes, sources=sources, inputs=len(at)).double()
        x = torch.tensor([at], dtype=double)
        ball = Ball(Circuit(network, None), x, torch.zeros(1, dtype=double), None, {})
        base, _ = ball.below(ball.circuit.output, torch.tensor([[[1.0, -1.0]]], dtype=double))
        exact = 1.0 if term == "constant" else 0.0
        assert exact - 100 * expected <= float(base) <= exact - expected, term
    # Slopes count beside intercepts, whose own rounding is as large.
    network = modules.Network([nn.LeakyReLU(1 / 3)], (2,))
    ball = Ball(Circuit(network, None), x[:, :2], torch.full((1,), 0.5, dtype=double), None, {})
    assert bool((ball.lines[1].low_slope > 0.9).all())
    assert (ball.errors[0] >= 2 * unit * ball.lines[1].low_slope * 3.0).all()


def test_what_a_machine_flushes_counts() -> None:
    tiny = modules.Network([dense([[1e-40, 0.0], [0.0, 1e-40]])], (2,))
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    bounds = [Bounds(tiny.double(), arithmetic, None) for arithmetic in (FLOAT64, FLOAT32)]
    double, single = (b.radii(x.double(), y, torch.zeros(1, dtype=torch.float64)).item() for b in bounds)
    assert double > 0.5
    assert single == 0


@pytest.mark.thorough
def test_numbers_below_the_normal_range_and_overflow() -> None:
    tiny = 1e-40
    network = modules.Network([dense([[tiny, 0.0], [0.0, tiny]]), nn.ReLU(), dense([[1.0, 0.0], [0.0, 1.0]])], (2,))
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert certify(network, x, y, method="local").radius.item() > 0.5
    assert certify(network, x, y, method="local", evaluator="float32").radius.item() == 0
    big = modules.Network([dense([[1e37, 0.0], [0.0, 1e37]]), nn.ReLU(), dense([[1.0, 0.0], [0.0, 1.0]])], (2,))
    x = torch.tensor([[300.0, 1.0]])
    assert certify(big, x, y, method="local").radius.item() > 20
    assert certify(big, x, y, method="local", evaluator="float32").radius.item() == 0


@pytest.mark.thorough
def test_an_evaluator_in_float32_costs_little() -> None:
    network = mlp((20, 60, 60, 60, 5), 1).float()
    x = torch.randn(20, 20)
    labels = network(x).argmax(1)
    double, single = (certify(network, x, labels, method="local", evaluator=e).radius for e in ("float64", "float32"))
    assert (single <= double * (1 + 1e-2)).all()
    assert single.median() >= 0.95 * double.median()


def test_every_number_that_enters_is_rounded_outward() -> None:
    network = mlp((3, 4, 2), 0)
    x = torch.rand(2, 3, dtype=torch.float64)
    ball = Ball(Circuit(network, None), x, torch.full((2,), 0.1, dtype=torch.float64), (0.0, 1.0), {})
    low, high = ball.moves or (x, x)
    for i, j in itertools.product(range(2), range(3)):
        at, r = Fraction(float(x[i, j])), Fraction(0.1)
        assert Fraction(float(low[i, j])) <= max(Fraction(0), at - r) - at
        assert Fraction(float(high[i, j])) >= min(Fraction(1), at + r) - at
        assert Fraction(float(ball.sizes[0][i, j])) >= min(Fraction(1), at + r)


# --- the box ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_ball_and_box_together() -> None:
    # y = x_0 + 1 - 1.5: from x = (0, 1) towards 0 nothing moves, towards larger x_0 nothing flips.
    network = modules.Network([dense([[1.0, 0.0], [0.0, 0.5]], [0.6, 0.0], torch.float64)], (2,))
    x, y = torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([0])
    free = certify(network, x, y, method="local").radius.item()
    network.input_range = (0.0, 1.0)
    boxed = certify(network, x, y, method="local")
    assert free == pytest.approx(0.1 / math.hypot(1, 0.5), rel=2e-3)
    assert boxed.radius.item() > 100  # no input in the box has another class
    assert boxed.input_range == (0.0, 1.0)
    torch.manual_seed(0)
    network = mlp((12, 20, 20, 3), 3)
    x = torch.rand(10, 12, dtype=torch.float64).round()
    labels = network(x).argmax(1)
    plain = certify(network, x, labels, method="local").radius
    network.input_range = (0.0, 1.0)
    inside = certify(network, x, labels, method="local").radius
    assert (inside >= plain * (1 - 1e-2)).all()
    assert inside.median() > 1.1 * plain.median()
    assert attacks(network, x, inside, labels, 30) == 0


@pytest.mark.thorough
def test_an_attack_stays_where_local_radii_hold() -> None:
    # Beyond the range, at x = 1.24, lies another class.
    layers = [dense([[1.0]]), nn.ReLU(), dense([[0.0], [0.25]], [0.31, 0.0])]
    network = modules.Network(layers, (1,))
    network.input_range = (-1.0, 1.0)
    x = torch.tensor([[0.9], [-0.5], [1 + 5e-7]])
    for box in ("auto", None, (-2.0, 2.0)):
        attack = Attack(eps=(0.5,), steps=5, box=box)
        found = evaluate(network, (x, torch.tensor([0, 0, 0])), method="local", eps=(0.5,), attack=attack)
        assert (found.certificate.radius > 1).all()


# --- the rest -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_rows_in_blocks_and_samples_in_groups_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d((3, 2), 2, (1, 0)), nn.Flatten(), nn.Linear(8, 3)]
    network = modules.Network(layers, (1, 4, 4)).double()
    x = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    labels = network(x).argmax(1)
    whole = certify(network, x, labels, method="local").radius
    monkeypatch.setattr(local, "_BLOCK", 1_500)
    assert torch.allclose(certify(network, x, labels, method="local").radius, whole, rtol=1e-9, atol=0)
    assert torch.allclose(certify(network, x[2:], labels[2:], method="local").radius, whole[2:], rtol=1e-9, atol=0)


@pytest.mark.thorough
def test_what_has_no_rule_is_a_ball_by_its_constant() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5), modules.GroupSort(5), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)]
    network = modules.Network(layers, (5,)).double()
    circuit = Circuit(network, None)
    assert [type(node) for node in circuit.nodes][:2] == [Linear, Leaf]
    x = torch.randn(20, 5, dtype=torch.float64)
    labels = network(x).argmax(1)
    found = certify(network, x, labels, method="local")
    assert found.radius.median() > certify(network, x, labels).radius.median()
    assert attacks(network, x, found.radius, labels, 40) == 0
    assert Circuit(joined(0).double(), FLOAT32).leaves is False
    assert Circuit(images(0).double(), FLOAT32).leaves is False


def test_a_module_from_outside_joins_by_one_rule() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x

    @circuit_rule(Twice)
    def _(circuit: Circuit, module: Twice, value: int) -> int:
        return circuit.total((value, value), (1.0, 1.0), Noise(depth=1, terms=2))

    modules.add_plain(modules.Plain(Twice, 2.0, lambda module, *at: modules.local_error(nn.ReLU(), *at)))
    try:
        network = modules.Network([nn.Linear(3, 3), Twice(), nn.ReLU(), nn.Linear(3, 2)], (3,)).double()
        assert not Circuit(network, FLOAT64).leaves
        with pytest.raises(NoRuleError, match="already has a rule"):
            circuit_rule(nn.ReLU)(lambda circuit, module, value: value)
    finally:
        del _RULES[Twice], modules.ROWS[Twice]


@pytest.mark.thorough
def test_modules_that_work_in_place_change_nothing() -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
    x, found = torch.randn(6, 3, dtype=torch.float64), []
    before = x.clone()
    for inplace in (False, True):
        layers = [layer for part in parts for layer in (nn.ReLU(inplace), part)]
        network = modules.Network(layers, (3,)).double()
        found.append(certify(network, x, network(x.clone()).argmax(1), method="local").radius)
    assert torch.equal(x, before)
    assert torch.equal(*found)
    assert (found[0] > 0).all()


@pytest.mark.thorough
def test_gradients_are_taken_in_inference_mode_too() -> None:
    network = mlp((2, 3, 2), 0, nn.Tanh())
    x = torch.randn(2, 2, dtype=torch.float64)
    labels = network(x).argmax(1)
    found = certify(network, x, labels, method="local").radius
    with torch.inference_mode():
        for at, y in ((x, labels), (x.clone(), labels.clone())):
            assert torch.equal(certify(network, at, y, method="local").radius, found)


def test_a_share_that_is_no_number_certifies_nothing() -> None:
    blend = graph_of(nn.Linear(3, 3), modules.Blend(torch.tensor(math.nan)), sources=[[0], [0, 1]], inputs=3)
    assert Circuit(blend, FLOAT32).leaves
    assert certify(blend, torch.rand(1, 3), torch.tensor([0]), method="local").radius.item() == 0


LINEAR: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv2d(2, 4, (1, 3), stride=(1, 2), padding=(0, 1), groups=2), (2, 1, 7)),
    (nn.Conv2d(2, 3, (1, 2), padding="same", padding_mode="reflect"), (2, 1, 6)),
    (nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2)), (2, 6, 7)),
    (nn.Conv2d(1, 2, 3, padding=2, padding_mode="replicate"), (1, 4, 5)),
    (nn.ConvTranspose2d(4, 2, (1, 3), stride=(1, 2), groups=2), (4, 1, 5)),
    (nn.ConvTranspose2d(2, 3, 3, stride=(1, 2), dilation=(2, 1), output_padding=(1, 1)), (2, 4, 3)),
    (nn.AvgPool2d(3, 2, 1, divisor_override=-5), (2, 6, 5)),
    (nn.AvgPool2d((2, 3), ceil_mode=True, count_include_pad=False, padding=1), (1, 5, 5)),
    (nn.AdaptiveAvgPool2d((None, 2)), (2, 3, 4)),
    (modules.Mean(1, 3, keepdim=True), (3, 4, 2)),
    (modules.LayerCenter(2, 3), (2, 3, 4)),
    (modules.EnlargeBilinear(2, 4), (1, 1, 3)),
    (modules.Enlarge(2, 3), (2, 2, 2)),
    (modules.Expand(2, 3, 4), (2, 1, 4)),
    (modules.Pad(2, -1, -1, 1), (2, 3, 4)),
    (modules.Roll(2, -2), (2, 3)),
    (nn.ZeroPad2d((1, 0, -1, 2)), (1, 3, 3)),
    (modules.Affine(torch.randn(3, 1), torch.randn(1, 2)), (3, 2, 2)),
    (nn.Linear(3, 5), (2, 3)),
]


@pytest.mark.parametrize(("module", "shape"), LINEAR, ids=lambda part: str(part)[:40])
def test_adjoints_moduli_and_biases_are_those_of_the_module(module: nn.Module, shape: tuple[int, ...]) -> None:
    network = export(module, shape).double()
    circuit = Circuit(network, None)
    x, y = torch.randn(3, *shape, dtype=torch.float64), network(torch.zeros(1, *shape, dtype=torch.float64))
    matrix = torch.func.jacrev(lambda v: network(v[None])[0].flatten())(x[0]).flatten(1)
    a = rows = torch.randn(4, *y.shape[1:], dtype=torch.float64)
    size, bias = x.abs(), 0.0
    for node in reversed(circuit.nodes):
        assert isinstance(node, Linear)
        bias = bias if node.bias is None else node.bias
        a = node.adjoint(a)
    for node in circuit.nodes:
        size = node.moduli(size) if isinstance(node, Linear) else size
    assert torch.allclose(a.flatten(1), rows.flatten(1) @ matrix, atol=1e-12)
    assert (size.flatten(1) >= x.abs().flatten(1) @ matrix.abs().mT * (1 - 1e-12)).all()
    assert torch.allclose(y - bias, torch.zeros_like(y), atol=1e-15)
    # Every sum that the adjoint takes has at most as many terms as it says.
    terms = math.prod(max(node.terms, 1) for node in circuit.nodes if isinstance(node, Linear))
    assert int((matrix != 0).sum(0).max()) <= terms


def test_derivatives_are_those_of_float64() -> None:
    z = torch.linspace(-4, 4, 500, dtype=torch.float64)[:, None]
    for a in (0.3, 0.7, 3.3):
        for module, left, right in (
            (nn.CELU(a), torch.exp(z / a), torch.ones_like(z)),
            (nn.ELU(a), a * torch.exp(z), torch.ones_like(z)),
            (nn.Softplus(a, 30.7), torch.sigmoid(a * z), torch.sigmoid(a * z)),
        ):
            assert (Relaxation(module)._slope(z) - torch.where(z > 0, right, left)).abs().max() < 2.0**-41


@pytest.mark.thorough
def test_lines_lie_where_their_interval_lies() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for module in (nn.ReLU(), nn.Hardtanh()):
        relaxation_of = Relaxation(module)
        with FakeTensorMode():
            ends = (torch.empty(2, 3, dtype=torch.float64, device="cuda") for _ in range(2))
            assert {line.device.type for line in relaxation_of(*ends)} == {"cuda"}


@pytest.mark.thorough
def test_absolute_values_of_half_of_the_channels_have_lines() -> None:
    torch.manual_seed(0)
    network = modules.Network([nn.Linear(3, 7), modules.HalfAbs(), nn.Linear(7, 3)], (3,)).double()
    assert not Circuit(network, FLOAT32).leaves
    x = torch.randn(10, 3, dtype=torch.float64)
    labels = network(x).argmax(1)
    found = certify(network, x, labels, method="local")
    assert found.radius.median() > 1.2 * certify(network, x, labels).radius.median()
    assert attacks(network, x, found.radius, labels, 40) == 0


def test_options_that_make_no_sense() -> None:
    network = mlp((3, 4, 2), 0)
    x, y = torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(OptionError, match=r"method: expected one of global, local, best, got 'crown'"):
        certify(network, x, y, method="crown")
    with pytest.raises(OptionError, match=r"method: expected 'global' for an integer program, got 'local'"):
        certify(network, x, y, method="local", evaluator="integer")


@pytest.mark.thorough
def test_methods_and_wrong_labels() -> None:
    network = mlp((6, 10, 10, 3), 0)
    x = torch.randn(12, 6, dtype=torch.float64)
    labels = network(x).argmax(1)
    labels[:4] = (labels[:4] + 1) % 3
    plain, best, near = (certify(network, x, labels, method=m) for m in ("global", "best", "local"))
    assert (plain.method, best.method, near.method) == ("last layer", "local", "local")
    assert near.radius[:4].eq(0).all()
    assert torch.equal(best.radius, near.radius)
    assert (near.radius >= plain.radius).all()
    assert (near.radius_ignored >= near.radius).all()
    one = modules.Network([nn.Linear(3, 2)], (3,)).double()
    at = torch.randn(4, 3, dtype=torch.float64)
    assert certify(one, at, one(at).argmax(1), method="best").method == "last layer"


@pytest.mark.thorough
def test_a_constant_network_and_equal_rows_end_the_search() -> None:
    network = modules.Network([dense([[0.0, 0.0]] * 2, [1.0, 0.0]), nn.ReLU(), dense([[1.0, 0.0], [0.0, 1.0]])], (2,))
    x = torch.rand(2, 2)
    assert certify(network, x, torch.tensor([0, 1]), method="local").radius.tolist()[1] == 0
    nan = modules.Network([dense([[math.nan, 0.0]] * 2, [1.0, 0.0]), nn.ReLU(), dense([[1.0, 0.0], [0.0, 1.0]])], (2,))
    assert certify(nan, x, torch.tensor([0, 1]), method="local").radius.eq(0).all()


@pytest.mark.thorough
def test_files_and_checkers(tmp_path: Path) -> None:
    network = mlp((6, 10, 10, 3), 0)
    network.input_range = (-3.0, 3.0)
    x = torch.randn(8, 6).clamp(-3, 3)
    labels = network(x.double()).argmax(1)
    found = certify(network, x, labels, method="local")
    path = write_certificate(describe(found, network, x, labels, "random"), tmp_path / "certificate.jsonl")
    file = read_certificate(path)
    assert (file.certificate.method, file.certificate.input_range, dict(file.other)) == ("local", (-3.0, 3.0), {})
    assert torch.equal(verify(file, network, x, labels).radius, found.radius)
    text = path.read_text()
    path.write_text(text.replace('"input_range":[-3.0,3.0]', '"input_range":[-2.0,3.0]'))
    with pytest.raises(CertificateViolation, match="input_range"):
        verify(read_certificate(path), network, x, labels)
    for told in ('"input_range":["NaN",3.0]', f'"input_range":[0,{10**400}]'):
        path.write_text(text.replace('"input_range":[-3.0,3.0]', told))
        with pytest.raises(DataError, match=r"input_range|float64"):
            read_certificate(path)
    path.write_text(text.replace('"method":"local"', '"method":"last layer"'))
    with pytest.raises(DataError, match="proof"):
        read_certificate(path)
    network.input_range = (-3.0, math.inf)
    half = certify(network, x, labels, method="local")
    write_certificate(describe(half, network, x, labels, "random"), path)
    assert read_certificate(path).certificate.input_range == (-3.0, math.inf)
    network.input_range = (-3.0, 3.0)
    # The independent checker proves constants: it takes no local radius for its own.
    path.write_text(text)
    modules.save(network, tmp_path / "network")
    np.savez(tmp_path / "data.npz", x_test=x.numpy(), y_test=labels.numpy())
    said: list[str] = []
    confirmed, left = lipkit_check.check(tmp_path, str(tmp_path / "data.npz"), say=said.append)
    assert (confirmed, left) == (0, 8)
    assert any("claimed, not checked: 8 local radii" in line for line in said)
    assert said[-1].startswith("UNCHECKED")


def test_relaxation_refuses_what_is_no_activation() -> None:
    with pytest.raises(NoRuleError, match="expected a scalar activation"):
        relaxation.curve_of(nn.Softmax(1))


@pytest.mark.thorough
def test_progress_names_the_samples_that_are_done() -> None:
    net = modules.Network([nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)], (2,))
    x, told = torch.randn(70, 2), list[tuple[str, int, int]]()
    certify(net, x, net(x).argmax(1), method="local", progress=lambda *now: told.append(now))
    assert told == [("evaluated", 70, 70), *(("with local radii", n, 70) for n in (32, 64, 70))]
