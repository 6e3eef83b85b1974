"""Graphs, and the modules that read, move or bend numbers: the checker against the module itself and dense matrices."""

from __future__ import annotations

import copy
import math
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.architectures import NETWORKS, SMALL, settle
from tests.checker.corruptions import Run
from tests.checker.runs import digits, verdict, write_run
from tests.checker.test_arithmetic import Bad, rational
from torch import Tensor, nn

import lipkit
import lipkit_check as k
from lipkit import layers
from lipkit.modules import HalfAbs, Householder, L2NormPool2d, Mean, NActivation
from lipkit.modules.dense import Affine
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Maximum
from lipkit.modules.limits import Elementary, MatrixProduct, Product
from lipkit.modules.storage import describe
from lipkit.modules.views import Expand, Pad, Permute, Piece, Reshape, Roll

torch.manual_seed(0)  # the modules below have the same numbers in every run
SHAPE = (2, 4, 6)
LINEAR: list[tuple[nn.Module, tuple[int, ...]]] = [
    (Reshape(6, 8), SHAPE), (Permute(3, 1, 2), SHAPE), (Piece(3, 1, 6, 2), SHAPE), (Piece(1, 1, 2), SHAPE),
    (Roll(2, -1), SHAPE), (Roll(3, 7), SHAPE), (Pad(1, 2, -1, 0), SHAPE), (Pad(0, -2), (5,)),
    (Expand(2, 3, 6), (2, 1, 6)), (Expand(4, 4), (1, 1)), (Mean(2, 3), SHAPE), (Mean(1, keepdim=True), SHAPE),
    (Affine(torch.rand(1, 4, 1) - 2, torch.rand(2, 1, 6)), SHAPE),
    (Affine(torch.rand(5), torch.ones(1)), (5,)),
    (nn.ConvTranspose2d(2, 3, 2, 2), SHAPE), (nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, groups=2), SHAPE),
    (nn.ConvTranspose2d(2, 3, (3, 1), (1, 2), (2, 0), (0, 1), dilation=(2, 1), bias=False), SHAPE),
    (nn.ConvTranspose2d(2, 3, (1, 4), (1, 3), (0, 2), (0, 1)), (2, 1, 5)), (nn.ConvTranspose2d(2, 2, 3, 1, 1), SHAPE),
    (nn.AvgPool2d(3, 2, ceil_mode=True), (2, 2, 2)), (nn.AvgPool2d(5, 1, 2), (2, 1, 2)),  # windows beyond their input
]  # fmt: skip
BENT: list[tuple[nn.Module, tuple[int, ...]]] = [
    (HalfAbs(), (5, 2)), (NActivation(4, 0.2, -0.3), (4, 3)), (Householder(6, order=3), (6, 2)),
    (L2NormPool2d(2), SHAPE), (L2NormPool2d(), SHAPE), (layers.GroupSort(None), (5,)),
    (Graph([nn.ReLU(), Maximum()], [[0], [0, 1]]), (4,)),
]  # fmt: skip


def built(module: nn.Module, *shape: int) -> Any:
    stored = {name: v.detach().double().numpy() for name, v in module.state_dict().items()}
    return k.build(as_json(describe(module)), k.Tensors(stored), shape)


def as_json(value: Any) -> Any:
    """Lists in place of tuples."""
    if isinstance(value, dict):
        return {key: as_json(v) for key, v in value.items()}
    return [as_json(v) for v in value] if isinstance(value, list | tuple) else value


@pytest.fixture(params=["floats", "integers"])
def arithmetic(request: Any) -> Any:
    k.ops = k.Floats() if request.param == "floats" else k.Integers()
    yield k.ops
    k.ops = k.Floats()


def jacobian(module: nn.Module, shape: tuple[int, ...]) -> np.ndarray:
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        return (module(basis) - module(basis * 0)).reshape(len(basis), -1).numpy()


def compare(module: nn.Module, shape: tuple[int, ...], arithmetic: Any) -> Any:
    """The checker computes what the module does, within its own ball."""
    node = built(module.double(), *shape)
    x = torch.randn(5, *shape, dtype=torch.float64)
    with torch.no_grad():
        want = module(x).numpy()
    got, e = node.run(arithmetic.of(x.numpy())[0], arithmetic.of(x.numpy())[1] * 20)
    assert got.shape[1:] == node.shape == want.shape[1:]
    off = np.array(rational(got, arithmetic), float) - want
    assert np.linalg.norm(off.reshape(5, -1), axis=1).max() <= float(e) + 1e-13
    assert e < (1e-11 if isinstance(arithmetic, k.Floats) else 1e-8)
    return node


@pytest.mark.parametrize("case", range(len(LINEAR)), ids=[type(m).__name__ for m, _ in LINEAR])
def test_linear_modules_are_bounded_by_their_dense_matrix(case: int, arithmetic: Any) -> None:
    module, shape = LINEAR[case]
    torch.manual_seed(case)
    node = compare(module, shape, arithmetic)
    norm = np.linalg.norm(jacobian(module.double(), shape), 2)
    assert norm <= float(node.norm) * (1 + 1e-12)
    loose = 1.6 if isinstance(module, nn.ConvTranspose2d) else 1
    assert float(node.norm) <= norm * loose * (1 + 1e-6)


@pytest.mark.parametrize("stride", [1, (1, 2)])
def test_padding_may_be_larger_than_the_image(stride: Any, arithmetic: Any) -> None:
    torch.manual_seed(1)
    conv = nn.Conv2d(2, 3, (3, 5), stride, (1, 2))
    norm = np.linalg.norm(jacobian(copy.deepcopy(conv).double(), (2, 1, 1)), 2)
    own = float(lipkit.lipschitz(conv.double(), (2, 1, 1)).detach())
    assert norm * (1 - 1e-12) <= float(compare(conv, (2, 1, 1), arithmetic).norm) <= own * (1 + 1e-6)


@pytest.mark.parametrize("case", range(len(BENT)), ids=[type(m).__name__ for m, _ in BENT])
def test_bent_modules_have_their_constants(case: int, arithmetic: Any) -> None:
    module, shape = BENT[case]
    torch.manual_seed(case)
    for parameter in module.parameters():
        parameter.data += torch.randn_like(parameter)
    node = compare(module, shape, arithmetic)
    x, d = torch.randn(2, 4000, *shape, dtype=torch.float64)
    with torch.no_grad():
        quotient = (module(x + 1e-5 * d) - module(x)).flatten(1).norm(dim=1) / (1e-5 * d).flatten(1).norm(dim=1)
    assert 0.4 * float(node.norm) <= float(quotient.max()) <= float(node.norm) * (1 + 1e-6)


def dense(m: int, n: int, seed: int) -> nn.Linear:
    layer = nn.Linear(n, m).double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.random.default_rng(seed).normal(size=(m, n))))
    return layer.requires_grad_(False)


def norm(layer: nn.Linear) -> float:
    return float(torch.linalg.matrix_norm(layer.weight, 2))


def test_constants_of_joins_by_hand(arithmetic: Any) -> None:
    a, b = dense(4, 4, 0), dense(4, 4, 1)
    p, q = norm(a), norm(b)
    for join, want in (
        (Add(1, -1), p + q), (Concatenate(1), math.hypot(p, q)), (Maximum(), math.hypot(p, q)),
        (Blend(torch.tensor(0.25)), 0.25 * p + 0.75 * q), (Blend(torch.tensor(-1.0)), p + 2 * q),
        (Product(torch.tensor([0.5, 2.0])), 2 * p + 0.5 * q),
    ):  # fmt: skip
        module = Graph([a, b, join], [[0], [0], [1, 2]])
        assert float(compare(module, (4,), arithmetic).norm) == pytest.approx(want, rel=1e-6), join


def test_a_value_that_a_join_reads_twice(arithmetic: Any) -> None:
    a = dense(4, 4, 0)
    for join, share in (
        (Add(1, 1), 2), (Concatenate(1), math.sqrt(2)), (Maximum(), math.sqrt(2)), (Blend(torch.tensor(0.25)), 1),
        (Blend(torch.tensor(-1.0)), 3), (Product(torch.tensor([0.5, 2.0])), 2.5),
    ):  # fmt: skip
        module = Graph([a, Add(1, 1), join], [[0], [0, 1], [2, 2]])
        assert float(compare(module, (4,), arithmetic).norm) == pytest.approx(share * (1 + norm(a)), rel=1e-6), join


def test_constants_of_matrix_products(arithmetic: Any) -> None:
    limits = torch.tensor([0.5, 2.0])
    module = Graph([Permute(2, 1), MatrixProduct(2, 3, 2, limits)], [[0], [0, 1]])
    want = 2 * math.sqrt(6) + 0.5 * math.sqrt(6)
    assert float(compare(module, (2, 3), arithmetic).norm) == pytest.approx(want, rel=1e-6)
    x, d = 3 * torch.randn(2, 4000, 2, 3, dtype=torch.float64)
    quotient = (module(x + 1e-5 * d) - module(x)).flatten(1).norm(dim=1) / (1e-5 * d).flatten(1).norm(dim=1)
    assert 0 < float(quotient.max()) < want


@pytest.mark.thorough
def test_pieces_without_common_entries_share_the_change(arithmetic: Any) -> None:
    a, b, first = dense(2, 2, 2), dense(2, 2, 3), dense(4, 4, 4)
    p, q, r = norm(a), norm(b), norm(first)
    halves = [Piece(1, 0, 2), Piece(1, 2, 4)]
    beside = Graph([first, *halves, a, b, Concatenate(1)], [[0], [1], [1], [2], [3], [4, 5]])
    assert float(compare(beside, (4,), arithmetic).norm) == pytest.approx(r * max(p, q), rel=1e-6)
    added = Graph([first, *halves, a, b, Add(1, -1)], [[0], [1], [1], [2], [3], [4, 5]])
    assert float(compare(added, (4,), arithmetic).norm) == pytest.approx(r * math.hypot(p, q), rel=1e-6)
    skip = Graph([first, *halves, a, b, Concatenate(1), Add(1, 1)], [[0], [1], [1], [2], [3], [4, 5], [0, 6]])
    assert float(compare(skip, (4,), arithmetic).norm) == pytest.approx(1 + r * max(p, q), rel=1e-6)
    common = Graph([first, Piece(1, 0, 3), Piece(1, 1, 4), Add(1, 1)], [[0], [1], [1], [2, 3]])
    assert float(compare(common, (4,), arithmetic).norm) == pytest.approx(2 * r, rel=1e-6)
    steps = Graph([Piece(1, 0, 4, 2), Piece(1, 1, 4, 2), Piece(1, 0, 4, 2), Add(1, 1, 1)], [[0], [0], [0], [1, 2, 3]])
    assert float(compare(steps, (4,), arithmetic).norm) == pytest.approx(math.sqrt(5), rel=1e-6)
    twice = Graph(
        [Piece(1, 0, 2), Piece(1, 2, 4), Piece(1, 0, 1), Piece(1, 1, 2), a, Concatenate(1), Add(1, 1), Concatenate(1)],
        [[0], [0], [1], [1], [2], [3, 4], [6, 5], [6, 7]],
    )
    assert float(compare(twice, (4,), arithmetic).norm) > np.linalg.norm(jacobian(twice, (4,)), 2)


@pytest.mark.parametrize("seed", range(12))
def test_random_linear_graphs_are_bounded_by_their_dense_matrix(seed: int) -> None:
    k.ops = k.Floats()
    rng = np.random.default_rng(seed)
    parts: list[nn.Module] = []
    sources: list[list[int]] = []

    def add(part: nn.Module, *read: int) -> int:
        parts.append(part)
        sources.append(list(read))
        return len(parts)

    values = [0]
    for turn in range(4):
        a, b = (int(rng.choice(values)) for _ in range(2))
        kind = rng.integers(4)
        if kind == 0:
            new = add(dense(4, 4, seed + 7 * turn), a)
        elif kind == 1:
            new = add(Add(*rng.choice([-1, 1], 2).tolist()), a, b)
        elif kind == 2:
            new = add(Blend(torch.tensor(rng.random())), a, b)
        else:
            cut = int(rng.integers(1, 4))
            one, two = add(Piece(1, 0, cut), a), add(Piece(1, cut, 4), a)
            new = add(Concatenate(1), add(dense(2, 4 - cut, seed + turn), two), add(dense(2, cut, seed), one))
        values.append(new)
    unread = [v for v in range(len(parts) + 1) if v in values and v not in set().union(*sources)]
    add(Concatenate(1), *unread, 0)
    module = Graph(parts, sources)
    node = compare(module, (4,), k.ops)
    assert np.linalg.norm(jacobian(module, (4,)), 2) <= float(node.norm) * (1 + 1e-12)
    assert float(node.norm) == pytest.approx(float(lipkit.lipschitz(module, (4,))), rel=1e-5)


def test_balls_of_a_bad_machine_hold_the_exact_values_of_graphs() -> None:
    torch.manual_seed(0)
    turned, limits = nn.ConvTranspose2d(2, 3, 3, 2, 1), torch.tensor([0.7, 0.9])
    with torch.no_grad():
        turned.weight.abs_()
    cases = [
        turned, Mean(2), Affine(torch.rand(2, 1, 1), torch.rand(2, 4, 1)), L2NormPool2d(2), NActivation(2),
        Householder(2, order=2), Graph([nn.ReLU(), Add(1, 1)], [[0], [0, 1]]),
        Graph([nn.ReLU(), Blend(torch.tensor(0.3))], [[0], [0, 1]]),
        Graph([nn.ReLU(), Product(limits)], [[0], [0, 1]]),
        Graph([Permute(1, 3, 2), MatrixProduct(4, 6, 4, limits)], [[0], [0, 1]]),
        Graph([Mean(2, 3, keepdim=True), Expand(2, 4, 6), Concatenate(2), Maximum()], [[0], [1], [2, 2], [3, 3]]),
    ]  # fmt: skip
    for module in cases:
        x = np.random.default_rng(1).random((2, *SHAPE))
        k.ops = k.Floats()
        want, _ = built(module.double(), *SHAPE).run(x, Fraction(0))
        k.ops = Worse()
        node = built(module, *SHAPE)
        got, e = node.run(x, Fraction(0))
        off = np.sqrt(((got - want) ** 2).sum(tuple(range(1, got.ndim)))).max()
        assert 0 < off <= float(e), module
        assert node.run(x, Fraction(1))[1] >= e + node.norm - Fraction(1, k.GRID), module
    k.ops = k.Floats()


class Worse(Bad):
    """It errs at sums and roots, too, each time as much again."""

    def rounding(self, n: int) -> Fraction:
        return n * super().rounding(n)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return super().add(x, y) - self.share * abs(super().add(x, y))

    def norms(self, c: np.ndarray) -> np.ndarray:
        return super().norms(c) * (1 - self.share)


@pytest.mark.parametrize(("config", "shape", "why"), [
    ({"type": "Graph", "modules": [], "sources": []}, (4,), "a graph of"),
    ({"type": "Graph", "modules": [{"type": "ReLU"}] * 2, "sources": [[0], [2, 1]]}, (4,), "reads values"),
    ({"type": "Graph", "modules": [{"type": "ReLU"}], "sources": [[]]}, (4,), "reads"),
    ({"type": "Graph", "modules": [{"type": "ReLU"}] * 2, "sources": [[0], [0]]}, (4,), "but the last"),
    ({"type": "Graph", "modules": [{"type": "ReLU"}], "sources": [[0, 0]]}, (4,), "no join"),
    ({"type": "Graph", "modules": [{"type": "Add", "signs": [1, 2]}], "sources": [[0, 0]]}, (4,), "signs"),
    ({"type": "Graph", "modules": [{"type": "Add", "signs": [1]}], "sources": [[0, 0]]}, (4,), "1 values"),
    ({"type": "Graph", "modules": [{"type": "Maximum", "p": 2}], "sources": [[0, 0]]}, (4,), "does not have"),
    ({"type": "Graph", "modules": [{"type": "Concatenate", "dim": 2}], "sources": [[0, 0]]}, (4,), "dimension"),
    ({"type": "Add", "signs": [1]}, (4,), "no rule"),
    ({"type": "Piece", "dim": 1, "start": 0, "stop": 5, "step": 1}, (4,), "Piece"),
    ({"type": "Expand", "shape": [1 << 26]}, (1,), "an activation"),
    ({"type": "Pad", "padding": [1 << 30, 0]}, (4,), "an activation"),
    ({"type": "Expand", "shape": [4, 4]}, (2, 4), "Expand"), ({"type": "Pad", "padding": [1, 0, 0, 0]}, (4,), "Pad of"),
    ({"type": "Pad", "padding": [7, -5]}, (4,), "an activation"),
    ({"type": "Permute", "dims": [1, 1]}, (4, 4), "Permute"), ({"type": "Reshape", "shape": [3]}, (4,), "Reshape"),
    ({"type": "L2NormPool2d", "kernel_size": 3}, (1, 4, 6), "windows"),
    ({"type": "LayerCenter", "dims": [2]}, (4,), "dimensions"),
    ({"type": "UnitNorm", "dims": [2], "eps": 1.0}, (4,), "dimensions"),
    ({"type": "UnitNorm", "dims": [1], "eps": 0.0}, (4,), "UnitNorm with eps above"),
    ({"type": "EnlargeBilinear", "rows": 3, "cols": 2}, (1, 2, 2), "powers of two"),
    ({"type": "EnlargeBilinear", "rows": 1 << 15, "cols": 1 << 15}, (1, 2, 2), "an activation"),
    ({"type": "Mean", "dims": [2], "keepdim": True}, (4,), "dimensions"),
    ({"type": "Elementary", "function": "tan"}, (4,), "another value of function"),
    ({"type": "Roll", "dim": 1, "shift": [1]}, (4,), "another value of shift"),  # numpy would take it
])  # fmt: skip
def test_refusals_name_the_reason(config: dict[str, Any], shape: tuple[int, ...], why: str) -> None:
    k.ops = k.Floats()
    with pytest.raises(k.Refused, match=why):
        k.build(config, k.Tensors({}), shape)


def test_limits_that_are_negative_or_values_that_are_not_finite() -> None:
    k.ops = k.Floats()
    config = {"type": "Graph", "modules": [{"type": "Product"}], "sources": [[0, 0]]}
    with pytest.raises(k.Refused, match="limits"):
        k.build(config, k.Tensors({"nodes.0.limits": np.array([1.0, -1.0])}), (2,))
    node = k.build(config, k.Tensors({"nodes.0.limits": np.array([1.0, 1.0])}), (2,))
    with pytest.raises(k.Refused, match="not finite"):
        node.run(np.array([[np.inf, 1.0]]), Fraction(0))


class Quiet(k.Floats):
    """A machine whose products overflow without a word, as those of several threads do."""

    def dot(self, c: np.ndarray, a: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            found: np.ndarray = super().dot(c, a)
            return found


@pytest.mark.parametrize("kind", ["a pool of squares", "a sum in a chain", "a sum beside a maximum"])
def test_a_value_that_overflowed_stays_refused_behind_modules_that_would_hide_it(kind: str) -> None:
    # Each of these modules makes a finite number of an infinite one: a root within limits, ReLU, a maximum.
    first = nn.Linear(5, 1, bias=False).double()
    # The sum is 1e150 x, but its first two terms alone overflow from x = 1e158 on.
    first.weight.data = torch.tensor([[-1.0, -1.0, 1.0, 1.0, 1.0]], dtype=torch.float64) * 1e150
    limits = torch.tensor([1e61, 1e300], dtype=torch.float64)
    modules: dict[str, tuple[list[nn.Module], float]] = {
        "a pool of squares": (
            [Reshape(5, 1, 1), L2NormPool2d(1), nn.Flatten(), Elementary("sqrt", limits)],
            1e155,
        ),
        "a sum in a chain": ([first, nn.ReLU()], 1e158),
        "a sum beside a maximum": ([Graph([first, Piece(1, 0, 1), Maximum()], [[0], [0], [1, 2]])], 1e158),
    }
    chain, size = modules[kind]
    net = lipkit.modules.Network(chain, (5,))
    stored = {name: t.double().numpy() for name, t in net.state_dict().items()}
    k.ops = Quiet()
    node = k.build(as_json(describe(net)), k.Tensors(stored), (5,))
    x = np.full((1, 5), size)
    with pytest.raises(k.Refused, match="not finite"), np.errstate(all="ignore"):
        node.run(x, Fraction(0))
    found, error = node.run(x / 100, Fraction(0))
    exact = Fraction(math.sqrt(size / 100)) if kind == "a pool of squares" else Fraction(size) / 100 * Fraction(1e150)
    assert all(abs(Fraction(float(v)) - exact) <= error + exact / 10**12 for v in found.flat)


def test_functions_within_limits_by_hand() -> None:
    k.ops = k.Floats()
    for name, ends, slope, largest in (
        ("exp", (-1.0, 2.0), math.exp(2), math.exp(2)), ("log", (0.25, 3.0), 4, math.log(4)),
        ("sqrt", (0.25, 9.0), 1, 3), ("reciprocal", (-4.0, -0.5), 4, 2),
    ):  # fmt: skip
        module = Elementary(name, torch.tensor(ends))
        node = k.build({"type": "Elementary", "function": name}, k.Tensors({"limits": np.array(ends)}), (3,))
        assert slope * (1 - 1e-12) <= float(node.norm) <= slope * (1 + 1e-9)
        assert 16 * 2.0**-53 * largest * math.sqrt(3) <= float(node.b) <= 1e-13 * largest
        x = np.array([[-9.0, 0.7, 9.0]])
        got, lost = node.run(x, Fraction(1, 10))
        np.testing.assert_allclose(got, module.double()(torch.from_numpy(x)).numpy(), rtol=1e-15)
        assert float(lost) >= slope / 10
    for name, ends, norm in (("exp", (-900.0, -800.0), 0), ("reciprocal", (1.0, 1e200), 1)):  # slopes that underflow
        stored = k.Tensors({"limits": np.array(ends)})
        assert k.build({"type": "Elementary", "function": name}, stored, (3,)).norm > norm
    for name, ends in (
        ("exp", (0.0, 701.0)), ("exp", (1.0, 0.0)), ("exp", (math.nan, 0.0)), ("exp", (-math.inf, 0.0)),
        ("log", (0.0, 1.0)), ("sqrt", (-1.0, 1.0)), ("reciprocal", (-1.0, 1.0)), ("reciprocal", (0.5, math.inf)),
    ):  # fmt: skip
        with pytest.raises(k.Refused, match=f"{name} between"):
            k.build({"type": "Elementary", "function": name}, k.Tensors({"limits": np.array(ends)}), (3,))


def test_integers_refuse_sums_that_overflow() -> None:
    k.ops = k.Integers()
    big = np.array([[(1 << 61) + 1]])
    config = {"type": "Graph", "modules": [{"type": "Add", "signs": [1, 1]}], "sources": [[0, 0]]}
    with pytest.raises(k.Refused, match="too large"):
        k.build(config, k.Tensors({}), (1,)).run(big, Fraction(0))
    assert k.ops.add(big - 2, big - 1).item() == (1 << 62) - 1
    k.ops = k.Floats()


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    shape = NETWORKS[name][1]
    model: nn.Module = settle(SMALL[name]()).float()
    if name == "U-Net":
        model = nn.Sequential(model, nn.Flatten(), nn.Linear(math.prod(shape), 10))
    if name in ("EfficientNet block", "ViT"):  # they have a constant on a box only
        model = lipkit.export(model, shape, box=(0.0, 1.0))
    return model, torch.rand(4, *shape)


# DenseNet is checked without floating point; the parts of the others are in smaller ones.
LARGE = ("ResNet-50", "WRN-16-4", "ResNet-18", "DenseNet", "VGG-11", "MobileNetV2")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in SMALL])
def test_twelve_networks(name: str, tmp_path: Path, capsys: Any) -> None:
    certificate = write_run(tmp_path, *model_of(name))
    assert certificate.radius.max() > 0
    assert verdict(tmp_path) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert said.startswith("confirmed  4 radii confirmed, 0 refused")
    assert float(said.split("at most ")[1].split()[0]) <= 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("LeNet", marks=pytest.mark.slow), "DenseNet"])
def test_networks_without_floating_point(name: str, tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path, *model_of(name))
    assert verdict(tmp_path, "--exact") == 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits through every join."""
    torch.manual_seed(2)
    parts = [
        nn.Conv2d(1, 4, 3, padding=1), Piece(1, 0, 2), Piece(1, 2, 4), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1),
        Concatenate(1), Add(1, -1), Maximum(), Blend(torch.tensor(0.25)), Product(torch.tensor([2.0, 2.0])),
        nn.Flatten(), nn.Linear(256, 10),
    ]  # fmt: skip
    sources = [[0], [1], [1], [2], [3], [4, 5], [1, 6], [7, 1], [8, 7], [9, 8], [10], [11]]
    folder = tmp_path_factory.mktemp("joined") / "run"
    write_run(folder, nn.Sequential(Graph(parts, sources)), digits(12)[0])
    return folder


@pytest.mark.thorough
def test_the_digits_through_every_join(joined: Path, capsys: Any) -> None:
    for options in ((), ("--exact",)):
        assert verdict(joined, *options) == 0, capsys.readouterr().out


def wiring(graph: dict[str, Any], tensors: dict[str, np.ndarray]) -> list[Any]:
    """Changes of a graph, each of which makes another function of it or none."""
    kinds = [part["type"] for part in graph["modules"]]
    add, join, blend, product = (kinds.index(k) for k in ("Add", "Maximum", "Blend", "Product"))
    pieces = [i for i, kind in enumerate(kinds) if kind == "Piece"]
    modules, sources = graph["modules"], graph["sources"]

    def tensor(name: str, value: float) -> None:
        next(a for full, a in tensors.items() if full.endswith(name))[...] = value

    return [
        lambda: modules[add].update(signs=[1, 1]), lambda: modules[add].update(signs=[1, -1, 1]),
        lambda: modules[add].update(signs=[1, -2]), lambda: sources[add].reverse(),
        lambda: sources.__setitem__(join, [sources[join][1]] * 2), lambda: sources.__setitem__(join, [99, 0]),
        lambda: sources.__setitem__(join, [len(modules), 0]), lambda: sources.__setitem__(join, [True, 0]),
        lambda: modules[join].update(type="Concatenate", dim=1), lambda: modules[join].update(type="Maxima"),
        lambda: modules[pieces[1]].update(start=0, stop=2), lambda: modules[pieces[0]].update(stop=1 << 40),
        lambda: modules[pieces[0]].update(step=0), lambda: tensor("share", 0.75), lambda: tensor("share", 7.0),
        lambda: tensor("limits", 0.01), lambda: tensor("limits", -1.0), lambda: tensor("limits", 50.0),
        lambda: (modules.pop(), sources.pop()), lambda: modules.__setitem__(slice(None), modules * 1000),
        lambda: modules[blend].update(type="Add", signs=[1, 1]), lambda: modules[product].update(type="Maximum"),
        lambda: sources.append([0]),
    ]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("turn", range(23))
def test_graphs_wired_otherwise_are_refused(turn: int, joined: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "run"
    shutil.copytree(joined, target)
    found = Run(target)
    graph = next(part for part in found.config["network"]["modules"] if part["type"] == "Graph")
    changes = wiring(graph, found.tensors)
    assert len(changes) == 23
    changes[turn]()
    found.write()
    assert verdict(target) == 1
    said = capsys.readouterr().out
    assert "REFUSED  " in said
    assert "MemoryError" not in said


@pytest.mark.thorough
def test_claims_beyond_a_graph_are_refused_with_the_own_radius(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path, *model_of("LeNet"))
    for share, said in ((0.5, "refused  constant: claimed"), (2.0, "confirmed")):
        run = Run(tmp_path)
        run.header["constant"] *= share
        run.write()
        verdict(tmp_path)
        assert said in capsys.readouterr().out
        run.header["constant"] /= share
        run.write()
    run.rows[0]["radius"] = 2 * run.rows[0]["radius"] + 1
    run.write()
    assert verdict(tmp_path) == 1
    assert "proved here" in capsys.readouterr().out
