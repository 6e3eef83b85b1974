"""Bounds of convolutions: never below the norm of the layer that torch computes, written out as a matrix."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds
from torch import Tensor, nn

from lipkit.bounds import circular, grid_correction, symbol_sup, symbol_sup_estimate
from lipkit.errors import OptionError, ShapeError


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dense(layer: nn.Module, shape: tuple[int, ...]) -> np.ndarray:
    """The matrix of a linear layer, by applying it to the identity."""
    n = math.prod(shape)
    with torch.no_grad():
        return layer(torch.eye(n, dtype=torch.float64).reshape(n, *shape)).flatten(1).T.numpy()


def norm(matrix: np.ndarray) -> float:
    if min(matrix.shape) > 200:
        return float(svds(csr_matrix(matrix), k=1, return_singular_vectors=False, tol=1e-10, random_state=0)[0])
    return float(np.linalg.norm(matrix, 2))


def conv(kernel: Tensor, **options: object) -> nn.Conv2d:
    groups = int(options.get("groups", 1))  # type: ignore[call-overload]
    layer = nn.Conv2d(kernel.shape[1] * groups, len(kernel), tuple(kernel.shape[2:]), bias=False, **options)  # type: ignore[arg-type]
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(kernel)
    return layer


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(
    kh=st.sampled_from([1, 2, 3, 5, 7]),
    kw=st.sampled_from([1, 2, 3, 5, 7]),
    h=st.sampled_from([3, 5, 8]),
    w=st.sampled_from([3, 5, 8]),
    cin=st.integers(1, 3),
    cout=st.integers(1, 3),
    groups=st.integers(1, 2),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 4),
    seed=st.integers(0, 10**6),
)
def test_zero_padding_is_bounded(
    kh: int,
    kw: int,
    h: int,
    w: int,
    cin: int,
    cout: int,
    groups: int,
    stride: int,
    dilation: int,
    padding: int,
    seed: int,
) -> None:
    if h + 2 * padding < dilation * (kh - 1) + 1 or w + 2 * padding < dilation * (kw - 1) + 1:
        padding = dilation * 3
    kernel = random(cout * groups, cin, kh, kw, seed=seed)
    layer = conv(kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)
    truth = norm(dense(layer, (cin * groups, h, w)))
    # numpy itself is right to about 1e-15.
    assert float(symbol_sup(kernel, groups=groups)) >= truth * (1 - 1e-13)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(
    kh=st.sampled_from([1, 2, 3, 5, 7]),
    kw=st.sampled_from([1, 2, 3, 5, 7]),
    h=st.sampled_from([3, 5, 8]),
    w=st.sampled_from([3, 4, 7]),
    cin=st.integers(1, 3),
    cout=st.integers(1, 3),
    groups=st.integers(1, 2),
    seed=st.integers(0, 10**6),
)
def test_circular_padding_is_bounded_and_attained(
    kh: int, kw: int, h: int, w: int, cin: int, cout: int, groups: int, seed: int
) -> None:
    kernel = random(cout * groups, cin, kh, kw, seed=seed)
    layer = conv(kernel, padding="same", padding_mode="circular", groups=groups)
    truth = norm(dense(layer, (cin * groups, h, w)))
    bound = float(circular(kernel, h, w, groups=groups))
    assert truth * (1 - 1e-13) <= bound <= truth * (1 + 1e-10)
    # numpy itself is right to about 1e-15.
    assert float(symbol_sup(kernel, groups=groups)) >= truth * (1 - 1e-13)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_zero_padding_on_sixteen_pixels(k: int) -> None:
    kernel = random(2, 2, k, k, seed=k)
    truth = norm(dense(conv(kernel, padding=k - 1), (2, 16, 16)))
    bound = float(symbol_sup(kernel))
    assert truth <= bound <= truth * 1.15


@pytest.mark.thorough
@pytest.mark.usual(11)
@pytest.mark.parametrize("taps", [(2, 2), (3, 3), (1, 5), (5, 2), (7, 7)])
@pytest.mark.parametrize("channels", [(1, 1), (3, 2), (4, 4)])
def test_within_one_percent_of_the_supremum(taps: tuple[int, int], channels: tuple[int, int]) -> None:
    kernel = random(*channels, *taps, seed=sum(taps))
    side = 97
    w = 2 * np.pi * np.arange(side) / side
    e1 = np.exp(1j * np.outer(w, np.arange(taps[0])))
    e2 = np.exp(1j * np.outer(w, np.arange(taps[1])))
    symbol = np.einsum("ocij,xi,yj->xyoc", kernel.numpy(), e1, e2)
    on_grid = np.linalg.svd(symbol, compute_uv=False).max()
    bound = float(symbol_sup(kernel))
    assert on_grid <= bound <= 1.011 * on_grid * grid_correction(taps[0], side) * grid_correction(taps[1], side)


@pytest.mark.parametrize("k", [2, 3, 5, 7])
@pytest.mark.parametrize("extra", [0, 1, 2, 5])
def test_the_correction_holds_between_the_points_of_a_coarse_grid(k: int, extra: int) -> None:
    points = k + extra
    for seed in range(5):
        kernel = random(1, 1, 1, k, seed=seed)
        fine = np.abs(np.fft.fft(kernel.flatten().numpy(), 20000)).max()
        assert float(symbol_sup(kernel, points=points)) >= fine


def test_the_correction_is_sharp() -> None:
    # cos(w - pi/S) sampled at multiples of 2 pi/S: the largest sample misses the peak by exactly the correction.
    for points in (4, 6, 9):
        shift = math.pi / points
        samples = [abs(math.cos(2 * math.pi * i / points - shift)) for i in range(points)]
        assert 1 / max(samples) <= grid_correction(3, points) * (1 + 1e-12)
    assert 1 / math.cos(math.pi / 6) == pytest.approx(grid_correction(3, 6))


def test_a_grid_without_correction_would_be_below() -> None:
    kernel = torch.zeros(1, 1, 1, 3, dtype=torch.float64)
    kernel[0, 0, 0] = torch.tensor([1.0, 0.0, -1.0])  # |F(w)| = 2 |sin w|, largest at pi/2, not on 5 points
    on_five = max(2 * abs(math.sin(2 * math.pi * i / 5)) for i in range(5))
    assert on_five < 2 <= float(symbol_sup(kernel, points=5))


@pytest.mark.parametrize(("k", "points"), [(3, 2), (7, 6), (2, 1), (2, 0), (3, -1)])
def test_too_few_points_raise(k: int, points: int) -> None:
    with pytest.raises(OptionError, match=rf"at least the number of taps {k}, got {points}"):
        grid_correction(k, points)
    with pytest.raises(OptionError, match=r"expected .* got"):
        symbol_sup(torch.zeros(1, 1, k, k), points=points)


@pytest.mark.parametrize("groups", [0, -1, 3])
def test_wrong_groups_raise(groups: int) -> None:
    with pytest.raises(OptionError, match=r"divisor of the 4 output channels"):
        symbol_sup(torch.zeros(4, 1, 3, 3), groups=groups)
    with pytest.raises(OptionError):
        circular(torch.zeros(4, 1, 3, 3), 5, 5, groups=groups)


def test_wrong_shapes_raise() -> None:
    for bad in (torch.zeros(3, 3), torch.zeros(1, 1, 0, 3), torch.zeros(2, 2, 3, 3).long()):
        with pytest.raises(ShapeError):
            symbol_sup(bad)
        with pytest.raises(ShapeError):
            circular(bad, 4, 4)


@pytest.mark.parametrize("function", [lambda k: symbol_sup(k, groups=2), lambda k: circular(k, 5, 4, groups=2)])
def test_gradient_against_finite_differences(function: object) -> None:
    kernel = random(4, 3, 3, 2, seed=3).requires_grad_()
    (grad,) = torch.autograd.grad(function(kernel), kernel)  # type: ignore[operator]
    step = random(4, 3, 3, 2, seed=4)
    h = 1e-6
    with torch.no_grad():
        slope = (function(kernel + h * step) - function(kernel - h * step)) / (2 * h)  # type: ignore[operator]
    assert float((grad * step).sum()) == pytest.approx(float(slope), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinite(bad: float) -> None:
    kernel = random(4, 2, 3, 3)
    kernel[1, 0, 1, 1] = bad
    for groups in (1, 2):
        assert float(symbol_sup(kernel, groups=groups)) == math.inf
        assert float(circular(kernel, 5, 5, groups=groups)) == math.inf


def test_zero_is_zero_and_tiny_is_bounded() -> None:
    assert float(symbol_sup(torch.zeros(2, 2, 3, 3))) == 0
    assert float(circular(torch.zeros(2, 2, 3, 3), 4, 4)) == 0
    for value in (5e-324, 1e-320, 1e-300, 1e-200):
        kernel = torch.full((1, 1, 3, 3), value, dtype=torch.float64)
        assert float(symbol_sup(kernel)) >= 9 * value
        assert float(circular(kernel, 4, 4)) >= 9 * value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_kernels_are_bounded_as_stored(dtype: torch.dtype) -> None:
    kernel = random(2, 2, 3, 3).to(dtype)
    assert float(symbol_sup(kernel)) == float(symbol_sup(kernel.double()))
    assert symbol_sup(kernel).dtype == torch.float64


def test_known_values() -> None:
    ones = torch.ones(1, 1, 3, 3)
    assert 9 <= float(circular(ones, 6, 6)) <= 9 * (1 + 1e-10)
    delta = torch.zeros(3, 3, 3, 3)
    delta[range(3), range(3), 0, 2] = 2.0
    assert 2 <= float(symbol_sup(delta)) <= 2 * 1.011
    one_by_one = random(5, 4, 1, 1)
    truth = np.linalg.norm(one_by_one[:, :, 0, 0].numpy(), 2)
    assert truth * (1 - 1e-13) <= float(symbol_sup(one_by_one)) <= truth * (1 + 1e-10)


@pytest.mark.parametrize("taps", [(1, 2, 1), (1, 1, 1), (3, 2, 1), (5, 3, 7), (1, 4, 1), (1, 9, 7)])
def test_a_search_that_finds_a_low_point_costs_time_alone(
    taps: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = torch.tensor([[0.1 * tap for tap in taps], taps]).reshape(2, 1, 1, 3)  # largest in the second group, at 0
    room = sys.modules[symbol_sup.__module__]
    peak = room.find_peak(kernel[:, None].double())
    at_pi = peak._replace(group=0, point=(0, peak.periods[1] // 2))
    monkeypatch.setattr(room, "find_peak", lambda kernels: at_pi)
    for tolerance in (0.01, 0.1):
        for finer in (True, False):
            bound = symbol_sup(kernel.requires_grad_(), groups=2, finer=finer, tolerance=tolerance)
            assert sum(taps) <= bound.item() <= sum(taps) * (1 + tolerance)
            if taps != (1, 2, 1):  # 0 at pi, without a gradient
                first, second = torch.autograd.grad(bound, kernel)[0]
                assert not first.any() and bool((second > 0.5).all())  # noqa: PT018


@pytest.mark.thorough
def test_an_estimate_is_the_number_proved_first() -> None:
    for seed, shape in enumerate([(3, 4, 3, 3), (8, 8, 1, 3), (2, 2, 1, 1), (16, 5, 5, 5)]):
        kernel = random(*shape, seed=seed)
        for tolerance in (0.001, 0.02):
            estimate = symbol_sup_estimate(kernel, tolerance=tolerance)
            assert estimate == symbol_sup(kernel, tolerance=tolerance, finer=False)
    assert symbol_sup_estimate(torch.zeros(2, 2, 3, 3)) == 0
    with pytest.raises(OptionError, match="tolerance"):
        symbol_sup_estimate(torch.ones(2, 2, 3, 3), tolerance=2.0)
