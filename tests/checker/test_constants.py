"""Constants of the checker that cannot be smaller: each is attained by a network of one or two numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import lipkit_check as k


@pytest.fixture(autouse=True)
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "ops", k.Floats())


def constant(config: dict[str, Any], shape: tuple[int, ...], **tensors: Any) -> float:
    stored = {name.replace("__", "."): np.asarray(value, np.float64) for name, value in tensors.items()}
    return float(k.build(config, k.Tensors(stored), shape).norm)


def linear(size: int = 1) -> dict[str, Any]:
    return {"type": "Linear", "in_features": size, "out_features": size, "bias": False}


def conv(kernel: list[int], **changes: Any) -> dict[str, Any]:
    plain = {"type": "Conv2d", "in_channels": 1, "out_channels": 1, "kernel_size": kernel, "stride": [1, 1]}
    return (
        plain | {"padding": "same", "dilation": [1, 1], "groups": 1, "padding_mode": "zeros", "bias": False} | changes
    )


def test_windows_that_overlap_share_what_a_number_loses() -> None:
    # A band of ones; of one window the root of the row sum times the column sum is 3.
    node = k.build(conv([1, 9]), k.Tensors({"weight": np.ones((1, 1, 1, 9))}), (1, 1, 40))
    band = sum(np.eye(40, k=i) for i in range(-4, 5))
    assert node.a >= k.gamma(9) * Fraction(np.linalg.norm(band, 2))


def test_errors_of_the_entries_of_a_matrix_point_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "ops", k.Integers())
    assert k.build(linear(9), k.Tensors({"weight": np.eye(9)}), (9,)).a >= 9 * k.ops.unit


def test_the_length_of_a_batch_is_that_of_its_longest_sample() -> None:
    assert 5 <= k.length(np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])) <= 5 * (1 + Fraction(1, 10**12))


def test_rows_whose_squares_underflow_are_not_equal() -> None:
    modules = [linear(), linear(), linear() | {"out_features": 2}]
    config = {"type": "Network", "input_shape": [1], "multipliers": {}, "modules": modules}
    weights = np.array([[1e85]]), np.array([[1e85]]), np.array([[1e-170], [-1e-170]])
    pairs = k.Network(config, {f"{i}.weight": w for i, w in enumerate(weights)}).constants()
    assert 2 * (1 - 1e-12) <= pairs[0][1] <= 2 * (1 + 1e-12)
    assert pairs[0][0] == 0


@pytest.mark.parametrize("n", [3, 4, 5])
def test_zero_padding_takes_frequencies_between_those_of_the_image(n: int) -> None:
    # Differences of neighbours: 2 cos(pi / (2 n + 2)), more than the circle of odd n has.
    found = constant(conv([1, 2], padding=[0, 1]), (1, 1, n), weight=[[[[1.0, -1.0]]]])
    assert 2 * math.cos(math.pi / (2 * n + 2)) <= found <= 2 * (1 + 1e-9)
    matrix = np.zeros((n + 1, n))
    matrix[range(n), range(n)], matrix[range(1, n + 1), range(n)] = -1.0, 1.0
    assert found >= np.linalg.norm(matrix, 2) * (1 - 1e-12)


@pytest.mark.parametrize("slope", [-2.0, 3.0])
def test_slopes_above_1(slope: float) -> None:
    assert constant({"type": "LeakyReLU", "negative_slope": slope}, (2,)) >= abs(slope)
    assert constant({"type": "PReLU", "num_parameters": 2}, (2,), weight=[0.1, slope]) >= abs(slope)


@pytest.mark.parametrize("eps", [0.25, 1e-4])
def test_a_norm_of_hardly_anything_divides_by_the_root_of_eps(eps: float) -> None:
    config = {"type": "LayerNorm", "normalized_shape": [2], "elementwise_affine": True, "bias": False, "eps": eps}
    x, step = np.array([[1.0, -1.0]]) * 1e-9, 3.0
    node = k.build(config, k.Tensors({"weight": np.full(2, step)}), (2,))
    quotient = np.linalg.norm(node.forward(x) - node.forward(-x)) / np.linalg.norm(2 * x)
    assert quotient == pytest.approx(step / math.sqrt(eps), rel=1e-6)
    assert quotient * (1 - 1e-9) <= float(node.norm) <= quotient * (1 + 1e-6)


def test_a_normalisation_whose_squares_underflow_beside_eps_is_refused() -> None:
    """With eps = 5e-324 numpy's own result for inputs of that size is wrong by 4 %."""
    config = {"type": "LayerNorm", "normalized_shape": [2], "elementwise_affine": False, "bias": False, "eps": 5e-324}
    with pytest.raises(k.Refused, match="eps above 2\\^-400"):
        k.build(config, k.Tensors({}), (2,))


def test_a_polynomial_of_a_skew_kernel_keeps_its_norm() -> None:
    # Of I + A alone: sqrt(1 + |A|^2); A has the eigenvalues 2 i cos(pi j / 6) of a path of five.
    config = {
        "type": "TaylorConv2d",
        "in_channels": 1,
        "out_channels": 1,
        "kernel_size": [1, 3],
        "terms": 1,
        "bias": False,
    }
    matrix = np.eye(5) + np.diag(np.ones(4), 1) - np.diag(np.ones(4), -1)
    found = constant(config, (1, 1, 5), kernel=[[[[-1.0, 0.0, 1.0]]]])
    assert np.linalg.norm(matrix, 2) * (1 - 1e-12) <= found <= math.sqrt(5) * 1.01


def block(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "channels": 1, "first": linear(), "activation": {"type": "ReLU"}, "second": linear()} | more


def test_a_sandwich_between_numbers() -> None:
    # x -> relu(2 x) / 2 has the slope 1; the matrix [sqrt(m) 2 | 1 / (2 sqrt(m))] of m = 1/4 is [1 | 1].
    found = constant(block("SandwichBlock"), (1,), first__weight=[[2.0]], second__weight=[[0.5]], multiplier=[0.25])
    assert 1 <= found <= 1 + 1e-9


def test_a_residual_that_turns_everything_around() -> None:
    # x - 4 relu(x) has the slopes 1 and -3.
    found = constant(block("SlopeResidual"), (1,), first__weight=[[1.0]], second__weight=[[-4.0]], multiplier=[4.0])
    assert 3 <= found <= 3 * (1 + 1e-9)
    # x - relu(x) / 2 + 0.1 relu(x), of which the matrix sees the first part alone.
    found = constant(block("SlopeResidual"), (1,), first__weight=[[1.0]], second__weight=[[0.1]], multiplier=[1.0])
    assert found >= 1.1


def test_joins_add_errors_as_their_values() -> None:
    beside = k.join({"type": "Concatenate", "dim": 1}, k.Tensors({}), [(2,), (3,)])
    assert 5 <= beside.error([Fraction(3), Fraction(4)]) <= 5 + Fraction(1, 10**9)
    total = k.join({"type": "Add", "signs": [1, -1]}, k.Tensors({}), [(2,), (2,)])
    assert total.error([Fraction(3), Fraction(4)]) == 7
    blend = k.join({"type": "Blend"}, k.Tensors({"share": np.array(-0.5)}), [(2,), (2,)])
    assert blend.error([Fraction(3), Fraction(4)]) == Fraction(15, 2)
    blend = k.join({"type": "Blend"}, k.Tensors({"share": np.array(1.5)}), [(2,), (2,)])
    assert blend.error([Fraction(3), Fraction(4)]) == Fraction(13, 2)
    product = k.join({"type": "Product"}, k.Tensors({"limits": np.array([2.0, 5.0])}), [(2,), (2,)])
    assert product.error([Fraction(3), Fraction(4)]) == 5 * 3 + 2 * 4
    config = {"type": "MatrixProduct", "rows": 2, "inner": 3, "cols": 4}
    product = k.join(config, k.Tensors({"limits": np.array([2.0, 5.0])}), [(2, 3), (3, 4)])
    least = 5 * math.sqrt(12) * 3 + 2 * math.sqrt(6) * 4
    assert least * (1 - 1e-12) <= float(product.error([Fraction(3), Fraction(4)])) <= least * (1 + 1e-9)


def test_joins_lose_what_their_arithmetic_loses() -> None:
    u, values = Fraction(1, 1 << 53), [np.array([[3.0, 4.0]]), np.array([[6.0, 8.0]])]
    total = k.join({"type": "Add", "signs": [1, -1]}, k.Tensors({}), [(2,), (2,)])
    assert total.forward(values)[1] >= 15 * u
    blend = k.join({"type": "Blend"}, k.Tensors({"share": np.array(0.25)}), [(2,), (2,)])
    assert blend.forward(values)[1] >= (5 + 10) * u
    product = k.join({"type": "Product"}, k.Tensors({"limits": np.array([9.0, 9.0])}), [(2,), (2,)])
    assert product.forward(values)[1] >= 50 * u


def test_thresholds_far_above_the_number_lose_their_own_places() -> None:
    node = k.build({"type": "NActivation", "channels": 1}, k.Tensors({"thresholds": np.array([[0.7], [0.7]])}), (1,))
    got, e = node.run(np.array([[1e-17]]), Fraction(0))
    off = abs(Fraction(got.item()) - (Fraction(1e-17) - 2 * Fraction(0.7)))
    assert Fraction(1, 10**18) < off <= e


def test_weights_of_one_value_add_up() -> None:
    total = k.join({"type": "Blend"}, k.Tensors({"share": np.array(-0.5)}), [(2,), (2,)])
    form = total.form([{(): Fraction(3)}, {(): Fraction(4)}], [])
    assert form == {(): k.up(Fraction(15, 2))}


def test_pieces_beside_the_whole_of_what_was_cut() -> None:
    # Each half of x, plus the same half of x again: y = 2 x.
    halves = [{"type": "Piece", "dim": 1, "start": at, "stop": at + 2, "step": 1} for at in (0, 2)]
    dense = [{"type": "Linear", "in_features": 4, "out_features": 2, "bias": False}] * 2
    ends = [{"type": "Add", "signs": [1, 1]}] * 2 + [{"type": "Concatenate", "dim": 1}]
    sources = [[0], [0], [0], [0], [1, 3], [2, 4], [5, 6]]
    config = {"type": "Graph", "modules": [*halves, *dense, *ends], "sources": sources}
    found = constant(config, (4,), nodes__2__weight=np.eye(4)[:2], nodes__3__weight=np.eye(4)[2:])
    assert 2 <= found <= 1 + math.sqrt(2) + 1e-9


def test_a_sandwich_of_an_activation_that_turns_around() -> None:
    turning = {"type": "LeakyReLU", "negative_slope": -2.0}
    stored = {"first__weight": [[2.0]], "second__weight": [[0.5]], "multiplier": [0.25]}
    assert constant(block("SandwichBlock", activation=turning), (1,), **stored) >= 2
    assert constant(block("SlopeResidual", activation=turning), (1,), **stored) >= 2


def test_units_of_integers_that_floors_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "ops", k.Integers())
    unit, n = Fraction(1, 1 << k.PLACES), 64
    small = np.full((1, n), (1 << k.PLACES // 2) - 1, np.int64)
    product = k.join({"type": "Product"}, k.Tensors({"limits": np.array([2.0**-20, 2.0**-20])}), [(n,), (n,)])
    got, lost = product.forward([small, small])
    exact = -(Fraction(int(small[0, 0])) ** 2) * unit**2
    assert abs(k.ops.number(got[0, 0]) - exact) > unit / 2
    assert lost >= abs(k.ops.number(got[0, 0]) - exact) * 8
    fold = k.build(
        {"type": "Householder", "channels": n, "order": 1}, k.Tensors({"angles": np.full((1, n // 2), 0.7)}), (n,)
    )
    off = Fraction(0)
    for a, b in ((3, -50), (-7, 11), (-29, -41), (-50, 3), (17, 5)):
        c = np.repeat(np.array([[a, b]], np.int64), n // 2, 1)
        got, lost = fold.run(c, Fraction(0))
        kept = a * math.sin(0.35) > b * math.cos(0.35)
        x, y = (a, b) if kept else (a * math.cos(0.7) + b * math.sin(0.7), a * math.sin(0.7) - b * math.cos(0.7))
        seen = math.hypot(got[0, 0] - x, got[0, -1] - y) * math.sqrt(n / 2)
        assert seen * float(unit) <= float(lost)
        off = max(off, Fraction(seen))
    assert off > 1


def test_blocks_of_a_fourier_layer_are_not_multiplied_by_those_of_a_convolution() -> None:
    # Both pass one wave along the width: together 16 where all units are active.
    # Frequencies in another order would say 8.
    wave = np.cos(2 * np.pi * np.arange(8) / 8)
    plane = {"type": "FourierConv2d", "in_channels": 1, "out_channels": 1, "height": 8, "width": 8, "bias": True}
    plane |= {"kernel_size": [8, 8], "complex_pairs": True}
    turned = conv([1, 8], padding="same", padding_mode="circular")
    config = {
        "type": "SandwichBlock",
        "channels": 1,
        "first": plane,
        "activation": {"type": "ReLU"},
        "second": turned,
    }
    pair = np.zeros((30, 2, 1, 1))
    pair[k.frequencies(8, 8)[1].index((0, 1)), 0] = 4
    tensors = {"first.real": np.zeros((4, 1, 1)), "first.pair": pair, "multiplier": np.ones(1), "first.bias": [100.0]}
    found = constant(config, (1, 8, 8), **tensors, **{"second.weight": wave.reshape(1, 1, 1, 8)})
    assert found >= 16 * (1 - 1e-12)


def skip(n: int, units: int, activation: dict[str, Any], bias: bool = False) -> dict[str, Any]:
    """x + W2 s(W1 x), as a graph."""
    first, second = ({"type": "Linear", "in_features": a, "out_features": b, "bias": bias}
                     for a, b in ((n, units), (units, n)))  # fmt: skip
    modules = [first, activation, second, {"type": "Add", "signs": [1, 1]}]
    return {"type": "Graph", "modules": modules, "sources": [[0], [1], [2], [0, 3]]}


def gain(modules: list[dict[str, Any]], shape: list[int], **tensors: Any) -> float:
    """The constant of a network whose tensors named multiplierI are those of its module I."""
    stored = {name.replace("__", "."): np.asarray(value, np.float64) for name, value in tensors.items()}
    multipliers = {name[10:]: len(value) for name, value in stored.items() if name.startswith("multiplier")}
    config = {"type": "Network", "input_shape": shape, "multipliers": multipliers, "modules": modules}
    return float(k.Network(config, stored, classes=False).gain)


RELU = {"type": "ReLU"}


@pytest.mark.parametrize("arithmetic", [k.Floats, k.Integers])
def test_one_inequality_of_a_residual_block(arithmetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # x - s(x) has slopes 0 and 1, x + s(x) slopes 1 and 2; the product takes 2 for both.
    for sign, multiplier, best in ((-1.0, 1.0, 1.0), (-1.0, 4.0, None), (1.0, 1.0, 2.0), (1.0, 0.1, 2.0)):
        monkeypatch.setattr(k, "ops", arithmetic())
        stored = {"0__nodes__0__weight": [[1.0]], "0__nodes__2__weight": [[sign]], "multiplier0": [multiplier]}
        biases = {"0__nodes__0__bias": [5.0], "0__nodes__2__bias": [-7.0]}
        for more in ({}, biases):
            found = gain([skip(1, 1, RELU, bool(more))], [1], **stored, **more)
            assert (best or 1.0) <= found <= (best or 2.0) * (1 + 1e-6)


@pytest.mark.parametrize("arithmetic", [k.Floats, k.Integers])
def test_no_multipliers_prove_less_than_the_steepest_slope(arithmetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        monkeypatch.setattr(k, "ops", arithmetic())
        draw = np.random.default_rng(seed)
        rows, n, units = int(draw.integers(1, 3)), 2, 3
        w1, w2, last = (draw.normal(size=s) for s in ((units, n), (n, units), (3, rows * n)))
        slopes = np.array([*np.ndindex(*[2] * (rows * units))], float)
        inner = np.eye(rows * n) + np.kron(np.eye(rows), w2) @ (slopes[..., None] * np.kron(np.eye(rows), w1))
        modules = (
            [skip(n, units, RELU), {"type": "Flatten", "start_dim": 1, "end_dim": -1}]
            if rows > 1
            else [skip(n, units, RELU)]
        )
        modules += [linear(rows * n) | {"out_features": 3}]
        stored = {"0__nodes__0__weight": w1, "0__nodes__2__weight": w2, f"{len(modules) - 1}__weight": last}
        shape = [rows, n] if rows > 1 else [n]
        for multiplier in np.exp(draw.normal(size=(3, rows * units))):
            found = gain(modules, shape, **stored, multiplier0=multiplier)
            true = np.linalg.norm(last @ inner, 2, (-2, -1)).max()
            assert true <= found <= gain(modules, shape, **stored) * (1 + 1e-9)


def test_a_chain_within_a_graph_is_in_its_inequality() -> None:
    chain = {"type": "Network", "input_shape": [1], "multipliers": {}, "modules": [linear(), RELU, linear()]}
    graph = {"type": "Graph", "modules": [chain, {"type": "Add", "signs": [1, 1]}], "sources": [[0], [0, 1]]}
    stored = {"0__nodes__0__0__weight": [[2.0]], "0__nodes__0__2__weight": [[-0.5]], "multiplier0": [0.25]}
    assert 1 <= gain([graph], [1], **stored) <= 1 + 1e-6


def test_shifts_are_no_part_of_an_inequality() -> None:
    # x - s(x), where x passes through two layers on its way to s; the product is 2.
    modules = [linear() | {"bias": True}] * 2 + [RELU, linear(), {"type": "Add", "signs": [1, -1]}]
    graph = {"type": "Graph", "modules": modules, "sources": [[0], [1], [2], [3], [0, 4]]}
    stored = {"0__weight": [[2.0]], "0__bias": [5.0], "1__weight": [[0.5]], "1__bias": [-7.0], "3__weight": [[1.0]]}
    stored = {f"0__nodes__{name}": value for name, value in stored.items()}
    assert 1 <= gain([graph], [1], **stored, multiplier0=[1.0]) <= 1 + 1e-6


def test_layers_by_rows_have_the_gain_of_a_row() -> None:
    relu = [linear(2), RELU, linear(2)]
    stored = {"0__weight": [[1.0, 1.0], [1.0, -1.0]], "2__weight": [[0.5, 0.5], [0.5, -0.5]], "multiplier1": [0.5, 0.5]}
    alone, rows = gain(relu, [2], **stored), gain(relu, [3, 2], **stored)
    assert 1 <= alone < 1.4
    assert alone == pytest.approx(rows, rel=1e-6)


def test_runs_count_one_by_one() -> None:
    # Between them stands a module of constant 1/2 that no inequality knows.
    softmax = {"type": "Softmax", "dim": 1}
    modules = [skip(1, 1, RELU), softmax, skip(1, 1, RELU)]
    weights = {f"{i}__nodes__{j}__weight": [[float(j - 1)]] for i in (0, 2) for j in (0, 2)}
    stored = weights | {"multiplier0": [1.0], "multiplier2": [1.0]}
    assert 0.5 <= gain(modules, [1], **stored) <= 0.5 * (1 + 1e-6)
    nested = {"type": "Network", "input_shape": [1], "multipliers": {"0": 1}, "modules": [skip(1, 1, RELU)]}
    inner = {"0__0__nodes__0__weight": [[1.0]], "0__0__nodes__2__weight": [[-1.0]], "0__multiplier0": [1.0]}
    graph = {"type": "Graph", "modules": [nested, {"type": "Add", "signs": [1, 1]}], "sources": [[0], [0, 1]]}
    inner = {f"0__nodes__{name}": value for name, value in inner.items()}
    assert 2 <= gain([graph], [1], **inner) <= 2 * (1 + 1e-6)


@pytest.mark.parametrize("steep", [{"type": "LeakyReLU", "negative_slope": 2.0}, {"type": "ELU", "alpha": 2.0}])
def test_no_inequality_for_activations_with_other_slopes(steep: dict[str, Any]) -> None:
    weights = {"0__weight": [[1.0]], "2__weight": [[1.0]], "multiplier1": [1.0]}
    assert gain([linear(), steep, linear()], [1], **weights) >= 2
    stored = {"0__nodes__0__weight": [[1.0]], "0__nodes__2__weight": [[1.0]], "multiplier0": [1.0]}
    assert gain([skip(1, 1, steep)], [1], **stored) >= 3


def test_errors_of_matrices_are_in_the_inequality() -> None:
    one, exact, known = np.ones((1, 1)), Fraction(0), Fraction(1, 10)
    assert 1.1 <= k.lmi([], [], {0: (one, known)}, Fraction(3)) <= 1.3
    for first, second in ((known, exact), (exact, known)):
        found = k.lmi([{0: (one, first)}], [np.array([0.5])], {1: (one, second)}, Fraction(3))
        assert 1.1 <= found <= 1.5
    both = k.lmi([{0: (one, exact)}, {1: (one, known)}], [np.ones(1) * 0.7] * 2, {2: (one, exact)}, Fraction(9))
    assert 1.1 <= both < 9


def system(rows: Any, phi: dict[str, Any], steps: int = 3, **changes: Any) -> float:
    """The constant of a Recurrent of one input, one output and one state, with a bias and a metric of one."""
    matrix = np.asarray(rows, np.float64)
    units = len(matrix) - 2
    config = {"type": "Recurrent", "in_features": 1, "out_features": 1, "states": 1, "units": [units, units]}
    tensors = {"matrix": matrix, "bias": np.ones(len(matrix)), "metric": np.ones((1, 1)), "multiplier": np.ones(units)}
    tensors |= {key: changes.pop(key) for key in [*changes] if key in ("multiplier", "metric", "phi__weight")}
    config |= {"block": 1, "phi": phi, "gain": 1.0, "rate": 1.0} | changes
    return constant(config, (steps, 1), **tensors)


def test_a_linear_system_has_the_gain_that_its_metric_proves() -> None:
    half = [[0.5, 1.0], [1.0, 0.0]]  # x+ = x / 2 + u, y = x: a gain of 2, at frequency 0
    assert 2 <= system(half, RELU, gain=2.0) <= 2 * (1 + 1e-6)
    with pytest.raises(k.Refused, match=r"a Recurrent whose gain of 1\.9 is not proved"):
        system(half, RELU, gain=1.9)
    # x+ = 1.1 x + u over five steps.
    toeplitz = sum(np.eye(5, k=-i) * 1.1 ** (i - 1) for i in range(1, 5))
    found = system([[1.1, 1.0], [1.0, 0.0]], RELU, 5, gain=5.0, rate=1.4)
    assert np.linalg.norm(toeplitz, 2) <= found
    assert found == pytest.approx(5 * 1.4**4)
    with pytest.raises(k.Refused, match="not proved"):
        system([[1.1, 1.0], [1.0, 0.0]], RELU, 5, gain=5.0, rate=1.0)


def test_units_of_a_system() -> None:
    through = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]  # y = s(u)
    assert 1 <= system(through, RELU) <= 1 + 1e-6
    steep = {"type": "LeakyReLU", "negative_slope": -2.0}
    assert 2 <= system(through, steep, multiplier=[0.5], gain=2.0) <= 2 * (1 + 1e-6)
    for multiplier in (0.25, 0.375, 0.5):
        with pytest.raises(k.Refused, match="not proved"):
            system(through, steep, multiplier=[multiplier], gain=1.5)
    # y = s(s(u) / 4) / 4 + s(u) / 2; above the diagonal of D11 nothing counts.
    two = [[0.0, 9.0, 0.0, 1.0], [0.25, 9.0, 0.0, 0.0], [0.0] * 4, [0.5, 0.25, 0.0, 0.0]]
    assert 0.5625 <= system(two, RELU, gain=0.58, multiplier=[0.54, 0.9]) <= 0.58 * (1 + 1e-6)
    with pytest.raises(k.Refused, match="not proved"):
        system(two, RELU, gain=0.55, multiplier=[0.54, 0.9])
    with pytest.raises(k.Refused, match="one block of units"):
        system(two, {"type": "Softmax", "dim": 1}, gain=9.0)
    # A function of two units together has one multiplier: with one for each, y = max(u, 0) would count the first alone.
    swapped = [[0.0] * 4, [0.0, 0.0, 0.0, 1.0], [0.0] * 4, [1.0, 0.0, 0.0, 0.0]]
    with pytest.raises(k.Refused, match="not proved"):
        system(swapped, {"type": "MaxMin"}, block=2, multiplier=[2.0, 0.25], gain=0.5)
    assert 1 <= system(swapped, {"type": "MaxMin"}, block=2, multiplier=[1.0, 0.25]) <= 1 + 1e-6


@pytest.mark.parametrize("arithmetic", [k.Floats, k.Integers])
def test_what_a_product_loses_is_multiplied_by_a_steep_slope(arithmetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # y = c s(v u), s of slope L; the multiplier times v is lost in rounding, L times it is not.
    monkeypatch.setattr(k, "ops", arithmetic())
    integers = -32, 17, -12.1, -32.5, -32, -32  # powers of two
    powers = integers if arithmetic is k.Integers else (-98.5, 980, -975, -100.5, -100, -99)
    claim, steep, v, c, multiplier, metric = (2.0**power for power in powers)
    assert steep * v * c > 4 * claim
    changes = {"gain": claim, "multiplier": [multiplier], "metric": [[metric]], "phi__weight": [steep]}
    with pytest.raises(k.Refused, match="not proved"):
        system([[0.0, 0.0, v], [0.0, 0.0, 0.0], [c, 0.0, 0.0]], {"type": "PReLU", "num_parameters": 1}, **changes)
