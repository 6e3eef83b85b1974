"""The checker's arithmetic against rationals: products, norms, cosines, and the balls of every module."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

import lipkit_check as k

ARITHMETICS = [k.Floats(), k.Integers()]


@pytest.fixture(autouse=True, params=ARITHMETICS, ids=["floats", "integers"])
def arithmetic(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(k, "ops", request.param)
    return request.param


def rational(a: np.ndarray, ops: Any) -> np.ndarray:
    return np.array([ops.number(v) for v in a.flat], object).reshape(a.shape)


def exact(a: np.ndarray) -> np.ndarray:
    return np.array([Fraction(float(v)) for v in a.flat], object).reshape(a.shape)


@pytest.mark.parametrize("x", [Fraction(0), Fraction(2), Fraction(1, 3), Fraction(10**40, 7), Fraction(1, 1 << 210)])
def test_scalars_are_rounded_up_by_less_than_a_place(x: Fraction) -> None:
    assert x <= k.up(x) < x + Fraction(1, k.GRID)
    r = k.root(x)
    assert r * r >= x
    assert r == 0 or (r - Fraction(1, k.GRID)) ** 2 < x
    for places in (3, 0, -2):
        assert 0 <= k.halved(k.counts(x), places) - k.counts(x) * Fraction(1, 2) ** places < 1


def test_gamma_is_that_of_the_textbook() -> None:
    u = Fraction(1, 1 << 53)
    for n in (1, 7, 10**6):
        assert k.gamma(n) == n * u / (1 - n * u)


def test_stored_numbers_are_within_their_error(arithmetic: Any) -> None:
    some = [0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 1e-300, 2.0**-44, 2.0**-45, -(2.0**-46), 0.1, -1234.567, 131071.3]
    a = np.array([*some, *np.random.default_rng(0).normal(size=200)])
    got, error = arithmetic.of(a)
    assert max(abs(rational(got, arithmetic) - exact(a))) <= error
    assert error <= Fraction(1, 1 << 43)


def test_numbers_too_large_for_integers_are_refused() -> None:
    with pytest.raises(k.Refused, match="2\\^18"):
        k.Integers().of(np.array([2.0**18]))
    with pytest.raises(k.Refused, match="64 bits"):
        k.Integers().dot(np.full((1, 8), 1 << 61), np.full((1, 8), 1 << 61))


@pytest.mark.parametrize("n", [1, 3, 64, 501])
def test_products_are_within_theorem_1(n: int, arithmetic: Any) -> None:
    rng = np.random.default_rng(n)
    c, a = (arithmetic.of(rng.normal(size=s) * 10.0 ** rng.integers(-3, 1, size=s))[0] for s in ((4, n), (3, n)))
    left, right = rational(c, arithmetic), rational(a, arithmetic)
    off = abs(rational(arithmetic.dot(c, a), arithmetic) - left @ right.T)
    allowed = arithmetic.rounding(n) * (abs(left) @ abs(right).T) + arithmetic.unit
    assert (off <= allowed).all()
    assert arithmetic.rounding(n) == 0 or arithmetic.rounding(n) >= k.gamma(n + 1)
    assert arithmetic.rounding(0) * 10**6 < 1


def test_an_integer_product_is_the_floor() -> None:
    rng = np.random.default_rng(1)
    c, a = (rng.integers(-(1 << 47), 1 << 47, size=(5, 9)) for _ in range(2))
    want = (c.astype(object) @ a.astype(object).T) >> k.PLACES
    assert (k.Integers().dot(c, a).astype(object) == want).all()
    assert k.Integers().unit >= Fraction(1, 1 << k.PLACES)


def test_other_operations_are_within_their_error(arithmetic: Any) -> None:
    rng = np.random.default_rng(2)
    a, b = (arithmetic.of(np.abs(rng.normal(size=(6, 7))) + 0.1)[0] for _ in range(2))
    x, y = rational(a, arithmetic), rational(b, arithmetic)
    slack = arithmetic.rounding(1), arithmetic.unit
    assert (abs(rational(arithmetic.scale(a, b), arithmetic) - x * y) <= slack[0] * x * y + slack[1]).all()
    inverse = rational(arithmetic.inverse(a), arithmetic)
    assert (abs(inverse - 1 / x) <= slack[0] / x + slack[1]).all()
    square = rational(arithmetic.sqrt(a), arithmetic) ** 2
    assert (abs(square - x) <= 4 * (slack[0] * x + slack[1] * (1 + x))).all()
    rows = abs(x).sum(1).max()
    assert rows <= arithmetic.rowsum(a) <= rows * (1 + k.gamma(20))
    for row, got in zip(x, arithmetic.lengths(a), strict=True):
        want = sum(v * v for v in row)
        assert want <= got * got <= want * (1 + Fraction(1, 10**12))
    for s in (-3, 0, 4):
        shifted = rational(arithmetic.shift(a, s), arithmetic)
        assert (abs(shifted - x * Fraction(2) ** s) <= arithmetic.unit).all()


def is_bound(t: Fraction, a: np.ndarray) -> bool:
    """t^2 I - A^T A is positive definite: all pivots of its rational elimination are positive."""
    h = -(a.T @ a)
    for i in range(len(h)):
        h[i, i] += t * t
    for i in range(len(h)):
        if h[i, i] <= 0:
            return False
        for j in range(i + 1, len(h)):
            h[j, i:] -= h[i, i:] * (h[j, i] / h[i, i])
    return True


@pytest.mark.thorough
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6), st.floats(-6, 1))
@settings(max_examples=15, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_a_norm_is_a_bound_in_rational_arithmetic_and_close(seed: int, m: int, n: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    for ops in ARITHMETICS:
        k.ops = ops
        stored = rng.normal(size=(m, n)) * 10.0**size
        if seed % 3 == 0 and m >= n:
            stored = np.linalg.qr(stored)[0]
        a, error = ops.of(stored)
        t = k.spectral(a[None], error)
        assert is_bound(t * (1 + Fraction(1, 10**30)), exact(stored))
        slack = (
            1e-9 if isinstance(ops, k.Floats) else 1e-6 + 1e-12 * m * n / max(np.linalg.norm(stored, 2), 1e-300) ** 2
        )
        assert float(t) <= np.linalg.norm(stored, 2) * (1 + slack) + 1e-12


def test_norms_of_stacks_and_of_large_orthogonal_matrices(arithmetic: Any) -> None:
    rng = np.random.default_rng(3)
    q = np.linalg.qr(rng.normal(size=(200, 60)))[0].astype(np.float32).astype(np.float64)
    stack = np.stack([q, q[::-1] / 2, q * 0])
    a, error = arithmetic.of(stack)
    want = np.linalg.norm(q, 2)
    assert want <= float(k.spectral(a, error)) <= want * (1 + 2e-7)
    assert k.spectral(a[2:], Fraction(0)) == 0
    assert float(k.spectral(a[2:], Fraction(1, 1000))) == pytest.approx(math.sqrt(200 * 60) / 1000)


def test_a_stack_in_several_pieces(arithmetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "PIECE", 1)
    a, error = arithmetic.of(np.array([[[1.0]], [[3.0]], [[2.0]]]))
    assert 3 <= k.spectral(a, error) < 3.0001


def test_a_larger_error_of_the_entries_is_in_the_norm(arithmetic: Any) -> None:
    a, _ = arithmetic.of(np.eye(4)[None])
    assert k.spectral(a, Fraction(1, 4)) >= 2  # 1 + 4/4: entries off by 1/4 each reach 1 + 1


@pytest.mark.parametrize("n", [1, 2, 3, 8, 12, 1156])
def test_cosines_are_those_of_mpmath(n: int) -> None:
    turns = np.arange(-n, 2 * n) if n < 100 else np.arange(0, n, 97)
    cos, sin = k.cosines(turns, n)
    with mpmath.workprec(200):
        for t, c, s in zip(turns.tolist(), cos, sin, strict=True):
            angle = 2 * mpmath.pi * t / n
            assert abs(mpmath.mpf(int(c)) / 2**62 - mpmath.cos(angle)) <= mpmath.mpf(2) ** -61
            assert abs(mpmath.mpf(int(s)) / 2**62 - mpmath.sin(angle)) <= mpmath.mpf(2) ** -61


@pytest.mark.parametrize(("h", "w"), [(1, 1), (2, 3), (5, 4), (9, 8), (1, 6)])
def test_the_transform_is_an_isometry(h: int, w: int, arithmetic: Any) -> None:
    (wide, tau), (tall, _) = k.transform(h, w)
    wide, tall = (np.array(rational(t, arithmetic), float) for t in (wide, tall))
    assert np.abs(wide.T @ wide - np.eye(w)).max() < 1e-11
    assert np.abs(tall.T @ tall - np.eye(2 * h)).max() < 1e-11
    assert tau >= Fraction(1, 1 << 53)
    assert tau <= Fraction(1, 1 << 43)


@pytest.mark.thorough
def test_slopes_are_bounds_and_attained() -> None:
    k.ops = k.Floats()
    x = np.concatenate((np.linspace(-8, 8, 400_001), [-3, 3, 0]))
    arguments: dict[str, Any] = {
        "Hardtanh": {"min_val": -1.0, "max_val": 2.0}, "ELU": {"alpha": 1.3}, "CELU": {"alpha": 0.7},
        "Softplus": {"beta": 2.0, "threshold": 20.0}, "Softshrink": {"lambd": 0.3}, "GELU": {"approximate": "none"},
    }  # fmt: skip
    names = [(name, arguments.get(name, {})) for name in k.SMOOTH]
    for name, more in [*names, ("GELU", {"approximate": "tanh"}), ("ELU", {"alpha": 0.4})]:
        node = k.build({"type": name, **more}, k.Tensors({}), (len(x),))
        y = node.forward(np.sort(x)[None])[0]
        steepest = np.abs(np.diff(y) / np.maximum(np.diff(np.sort(x)), 1e-9)).max()
        assert steepest <= float(node.norm) * (1 + 1e-9), name
        assert steepest >= float(node.norm) * (1 - 4e-4), name
    d = scipy.special.ndtr(math.sqrt(2)) + math.sqrt(2) * math.exp(-1) / math.sqrt(2 * math.pi)
    assert d <= float(k.build({"type": "GELU", "approximate": "none"}, k.Tensors({}), (1,)).norm) < d + 1e-8


@pytest.mark.parametrize(("config", "why"), [
    ({"type": "ELU", "alpha": -1.0}, "alpha"), ({"type": "CELU", "alpha": 0.0}, "alpha"), ({"type": "Abs"}, "no rule"),
    ({"type": "Softplus", "beta": -1.0, "threshold": 20.0}, "beta"), ({"type": "Softshrink", "lambd": -1.0}, "below 0"),
    ({"type": "Softplus", "beta": 1.0, "threshold": 5.0}, "jumps"), ({"type": "GroupSort", "group_size": 3}, "groups"),
    ({"type": "Hardtanh", "min_val": 1.0, "max_val": 0.0}, "ends"),
    ({"type": "ReLU", "inplace": True}, "does not have"),
])  # fmt: skip
def test_refusals_name_the_reason(config: dict[str, Any], why: str) -> None:
    k.ops = k.Floats()
    with pytest.raises(k.Refused, match=why):
        k.build(config, k.Tensors({}), (4,)).run(np.ones((1, 4)), Fraction(0))


def test_integers_refuse_smooth_activations() -> None:
    k.ops = k.Integers()
    with pytest.raises(k.Refused, match="Tanh"):
        k.build({"type": "Tanh"}, k.Tensors({}), (4,))


def test_a_linear_layer_has_the_constants_of_theorems_1_and_4(arithmetic: Any) -> None:
    rng = np.random.default_rng(5)
    w, b = rng.normal(size=(7, 30)), rng.normal(size=7) * 100
    config = {"type": "Linear", "in_features": 30, "out_features": 7, "bias": True}
    node = k.build(config, k.Tensors({"weight": w, "bias": b}), (30,))
    assert node.norm >= Fraction(float(np.linalg.norm(w, 2))) * (1 - Fraction(1, 10**12))
    c, e = arithmetic.of(rng.normal(size=(5, 30)))[0], Fraction(1, 1000)
    y, end = node.run(c, e)
    own, lost = node.run(c, Fraction(0))
    assert (own == y).all()
    assert end >= lost + node.norm * e - Fraction(1, k.GRID)
    x, stored = rational(c, arithmetic), (exact(w), exact(b))
    for row, got in zip(x, rational(y, arithmetic), strict=True):
        assert sum((stored[0] @ row + stored[1] - got) ** 2) <= lost**2
    if isinstance(arithmetic, k.Floats):
        size = max(sum(v * v for v in row) for row in x)
        least = k.gamma(31) * (Fraction(np.linalg.norm(np.abs(w), 2)) * k.root(size) + Fraction(np.linalg.norm(b)))
        assert least <= lost * Fraction(101, 100) <= 10 * least + Fraction(1, 10**9)


def test_positive_refuses_what_is_not_positive(arithmetic: Any) -> None:
    q = np.linalg.qr(np.random.default_rng(6).normal(size=(12, 12)))[0]
    for least, error, want in (
        (0.1, 0, True),
        (-0.01, 0, False),
        (0.1, 0.05, True),
        (0.1, 0.2, False),
        (1e-4, 2e-4, False),
    ):
        h = arithmetic.of(q @ np.diag(np.linspace(least, 2, 12)) @ q.T)[0]
        assert k.positive(np.tril(h) + np.tril(h, -1).T, Fraction(error)) is want


@pytest.mark.parametrize(("sizes", "kernel", "stride", "padding", "dilation", "mode", "groups"), [
    ((2, 3, 5, 6), 3, 1, 1, 1, "circular", 1), ((2, 4, 6, 6), 3, 2, 1, 1, "circular", 1),
    ((2, 2, 6, 9), (1, 3), 3, (0, 2), 2, "zeros", 1), ((2, 2, 4, 4), 2, 2, 0, 1, "zeros", 1),
    ((4, 2, 4, 5), 3, 1, 1, 1, "zeros", 2), ((2, 3, 5, 5), 2, 1, "same", 1, "circular", 1),
    ((1, 1, 5, 4), 3, 1, 2, 1, "circular", 1), ((1, 2, 4, 4), 3, 2, 1, 1, "reflect", 1),
    ((1, 1, 4, 7), 3, 3, 1, 1, "circular", 1), ((2, 2, 5, 5), 3, 1, 2, 1, "replicate", 1),
    ((2, 2, 4, 6), 1, 1, 0, 1, "zeros", 1), ((2, 2, 5, 7), 3, 2, 4, 1, "zeros", 1),
    ((1, 2, 4, 4), 3, 4, 2, 1, "zeros", 1),
])  # fmt: skip
def test_a_convolution_is_bounded_by_its_dense_matrix(
    sizes: Any, kernel: Any, stride: int, padding: Any, dilation: int, mode: str, groups: int, arithmetic: Any
) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cin, cout, h, w = sizes
    conv = torch.nn.Conv2d(cin, cout, kernel, stride, padding, dilation, groups, True, mode, dtype=torch.float64)
    keys = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    config = {"type": "Conv2d", "bias": True} | {key: getattr(conv, key) for key in keys}
    config = {key: list(v) if isinstance(v, tuple) else v for key, v in config.items()}
    stored = {name: v.numpy() for name, v in conv.state_dict().items()}
    node = k.build(config, k.Tensors(stored), (cin, h, w))
    basis = torch.eye(cin * h * w, dtype=torch.float64).reshape(-1, cin, h, w)
    with torch.no_grad():
        dense = (conv(basis) - conv(basis * 0)).reshape(len(basis), -1)
        got, e = node.run(arithmetic.of(basis.numpy())[0], Fraction(0))
        assert np.abs(np.array(rational(got, arithmetic), float) - conv(basis).numpy()).max() <= float(e) + 1e-13
    norm = float(torch.linalg.matrix_norm(dense, 2))
    assert norm <= float(node.norm) * (1 + 1e-12)
    tight = mode == "circular" and (stride == 1 or h % stride == w % stride == 0) and padding in (1, "same")
    assert float(node.norm) <= norm * (1 + 1e-6 if tight else 3)


@pytest.mark.thorough
def test_pools_are_bounded_by_their_dense_matrix(arithmetic: Any) -> None:
    torch = pytest.importorskip("torch")
    options = itertools.product((2, 3), (1, 2, 3), (0, 1), (False, True), (False, True), (None, 5))
    pools = [torch.nn.AvgPool2d(*a) for a in list(options)[::5]]
    keys = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    rng = np.random.default_rng(0)
    for pool in [*pools, torch.nn.AdaptiveAvgPool2d(3), torch.nn.AdaptiveAvgPool2d((1, None))]:
        config = {"type": type(pool).__name__} | {key: getattr(pool, key) for key in keys if hasattr(pool, key)}
        if hasattr(pool, "output_size"):
            config["output_size"] = list(pool.output_size) if isinstance(pool.output_size, tuple) else pool.output_size
        node = k.build(config, k.Tensors({}), (1, 5, 7))
        basis = torch.eye(35, dtype=torch.float64).reshape(-1, 1, 5, 7)
        got, e = node.run(arithmetic.of(basis.numpy())[0], Fraction(0))
        want = pool(basis)
        assert np.abs(np.array(rational(got, arithmetic), float) - want.numpy()).max() <= float(e) < 1e-9, config
        norm = np.linalg.norm(want.reshape(35, -1).numpy(), 2)
        assert norm * (1 - 1e-9) <= float(node.norm) <= norm * (1 + 1e-6), config
    for a in list(itertools.product((2, 3), (1, 2, 3), (0, 1), (1, 2), (False,), (False, True)))[::5]:
        pool = torch.nn.MaxPool2d(*a)
        keys = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        node = k.build({"type": "MaxPool2d"} | {key: getattr(pool, key) for key in keys}, k.Tensors({}), (1, 6, 7))
        x = rng.integers(-9, 9, size=(4, 1, 6, 7)).astype(float)
        got, _ = node.run(arithmetic.of(x)[0], Fraction(0))
        assert (np.array(rational(got, arithmetic), float) == pool(torch.tensor(x)).numpy()).all()
        most = int((pool(torch.eye(42).reshape(42, 1, 6, 7)) > 0).sum((1, 2, 3)).max())
        assert math.sqrt(most) * (1 - 1e-12) <= float(node.norm) <= math.sqrt(most) * (1 + 1e-9)


class Bad(k.Floats):
    """A machine that errs as much as it may, always to the same side."""

    share = 1e-3

    def rounding(self, n: int) -> Fraction:
        return Fraction(self.share) * Fraction(101, 100)

    def dot(self, c: np.ndarray, a: np.ndarray) -> np.ndarray:
        return super().dot(c, a) - self.share * super().dot(np.abs(c), np.abs(a))

    def scale(self, c: np.ndarray, s: np.ndarray) -> np.ndarray:
        return super().scale(c, s) * (1 - self.share)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_norms_of_a_bad_machine_are_bounds(n: int) -> None:
    k.ops = Bad()
    rng = np.random.default_rng(n)
    for a in (np.ones((n, n)), np.ones((3 * n, n)), rng.random((n, n + 1)), np.eye(n) - 0.1):
        found = k.spectral(a[None])
        assert float(found) >= np.linalg.norm(a, 2) * (1 - 1e-12)
        assert float(found) <= np.linalg.norm(a, 2) * 1.02


class Coarse(k.Floats):
    """A machine that loses a unit wherever it may, and nothing else."""

    unit = Fraction(1, 1 << 20)

    def rounding(self, n: int) -> Fraction:
        return Fraction(0)

    def dot(self, c: np.ndarray, a: np.ndarray) -> np.ndarray:
        return super().dot(c, a) - float(self.unit)

    def shift(self, a: np.ndarray, s: int) -> np.ndarray:
        return super().shift(a, s) - float(self.unit) * (s < 0)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_norms_of_a_machine_that_may_lose_a_unit_are_bounds(n: int) -> None:
    k.ops = Coarse()
    for size in (1, 1.5, 3, 16):  # the powers of ones / n lose in the direction of their norm
        assert Fraction(size) <= k.spectral(np.full((1, n, n), size / n)) <= Fraction(size) * Fraction(1001, 1000)
    k.ops = k.Floats()


@pytest.mark.thorough
def test_balls_of_a_bad_machine_hold_the_exact_values() -> None:
    rng = np.random.default_rng(9)
    hold: dict[str, Any] = {"weight": rng.random((4, 3, 3, 3)), "bias": rng.random(4) * 20}
    conv = {"type": "Conv2d", "in_channels": 3, "out_channels": 4, "kernel_size": [3, 3], "stride": [1, 1],
            "padding": [1, 1], "dilation": [1, 1], "groups": 1, "padding_mode": "circular", "bias": True}  # fmt: skip
    plane = {"type": "FourierConv2d", "in_channels": 3, "out_channels": 4, "height": 4, "width": 5, "bias": False,
             "kernel_size": [4, 5], "complex_pairs": True}  # fmt: skip
    symbol = {"real": rng.random((2, 4, 3)), "pair": rng.random((9, 2, 4, 3))}
    affine = {"type": "Affine", "scale": [3], "shift": [3]}, {"scale": rng.random(3) + 1, "shift": rng.random(3)}
    dense = {"type": "Linear", "in_features": 5, "out_features": 6, "bias": True}
    matrix = {"weight": rng.random((6, 5)), "bias": rng.random(6)}
    residual = {"type": "Graph", "modules": [affine[0], {"type": "Blend"}], "sources": [[0], [1, 0]]}
    both = {"nodes.1.share": np.array(0.4), **{f"nodes.0.{name}": v for name, v in affine[1].items()}}
    pool = {"type": "AvgPool2d", "kernel_size": 2, "stride": 1, "padding": 0, "ceil_mode": False,
            "count_include_pad": True, "divisor_override": None}  # fmt: skip
    taylor = {
        "type": "TaylorConv2d",
        "in_channels": 3,
        "out_channels": 3,
        "kernel_size": [3, 3],
        "terms": 4,
        "bias": False,
    }
    kernel = {"kernel": rng.random((3, 3, 3, 3)) * 0.05}
    back = {"type": "ConvTranspose2d", "in_channels": 3, "out_channels": 2, "kernel_size": [2, 2], "stride": [2, 2],
            "padding": [0, 0], "output_padding": [0, 0], "dilation": [1, 1], "groups": 1, "bias": False}  # fmt: skip
    adjoint = back, {"weight": rng.random((3, 2, 2, 2))}
    cases = [(conv, hold), (plane, symbol), affine, (dense, matrix), (residual, both), (pool, {}), (taylor, kernel)]
    cases.append(adjoint)
    for config, stored in cases:
        x = rng.random((2, 3, 4, 5))
        k.ops = k.Floats()
        want, _ = k.build(config, k.Tensors(stored), (3, 4, 5)).run(x, Fraction(0))
        k.ops = Bad()
        node = k.build(config, k.Tensors(stored), (3, 4, 5))
        got, e = node.run(x, Fraction(0))
        off = np.sqrt(((got - want) ** 2).sum(tuple(range(1, got.ndim)))).max()
        assert 0 < off <= float(e), config["type"]
        assert node.run(x, Fraction(1))[1] >= e + node.norm - Fraction(1, k.GRID), config["type"]
    k.ops = k.Floats()


def test_a_bad_machine_proves_no_matrix_positive_that_is_not() -> None:
    k.ops = Bad()
    q = np.linalg.qr(np.random.default_rng(6).normal(size=(6, 6)))[0]
    for least in (-1e-3, -1e-2):
        assert not k.positive(q @ np.diag(np.linspace(least, 2, 6)) @ q.T, Fraction(0))
    k.ops = k.Floats()
