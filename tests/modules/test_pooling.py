"""Constants of pooling layers against the matrices of what torch computes."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from lipkit import modules
from lipkit.errors import NoRuleError, ShapeError
from lipkit.lowering import export, lipschitz
from lipkit.modules.pooling import adaptive_matrix, average_matrix, max_pool_constant, overlap, window_terms


def matrix(layer: nn.Module, h: int, w: int) -> np.ndarray:
    return layer(torch.eye(h * w, dtype=torch.float64).reshape(-1, 1, h, w)).flatten(1).T.numpy()


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    size=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    ceil_mode=st.booleans(),
    count=st.booleans(),
    divisor=st.sampled_from([None, None, 1, 3, -2]),
)
def test_average_pooling(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    size: tuple[int, int],
    ceil_mode: bool,
    count: bool,
    divisor: int | None,
) -> None:
    assume(all(2 * p <= k for p, k in zip(padding, kernel, strict=True)))
    assume(all(n + 2 * p >= k for n, p, k in zip(size, padding, kernel, strict=True)))
    layer = nn.AvgPool2d(kernel, stride, padding, ceil_mode, count, divisor)
    dense = matrix(layer, *size)
    truth = np.linalg.norm(dense, 2)
    exact, any_size = float(lipschitz(layer, (1, *size))), float(lipschitz(layer))
    assert exact >= truth * (1 - 1e-14)
    assert any_size >= truth * (1 - 1e-14)
    if divisor is None:
        assert exact <= truth * (1 + 1e-10)
        axes = zip(size, kernel, stride, padding, strict=True)
        rows, cols = (average_matrix(*axis, ceil_mode, count).numpy() for axis in axes)
        assert np.abs(np.kron(rows, cols) - dense).max() < 1e-15


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 3), (3, 1), (3, 2), (5, 2), (4, 3), (2, 5)])
def test_average_pooling_of_any_size_is_close_to_large_images(kernel: int, stride: int) -> None:
    truth = float(np.linalg.norm(average_matrix(61, kernel, stride, 0, False, True).numpy(), 2)) * (1 - 1e-14)
    any_size = float(lipschitz(nn.AvgPool2d((kernel, 1), (stride, 1))))
    assert truth <= any_size <= truth * math.sqrt(math.ceil(kernel / stride) * stride / kernel) * 1.02


@pytest.mark.parametrize("s", [1, 2, 3, 4, 5, 7])
def test_pooling_with_the_side_as_divisor_is_an_isometry_on_its_range(s: int) -> None:
    bound = float(lipschitz(nn.AvgPool2d(s, divisor_override=s), (3, 2 * s, 2 * s)))
    assert 1 <= bound <= 1 + 1e-13


@pytest.mark.parametrize("kernel", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 11])
def test_rounding_goes_up(kernel: int, divisor: int) -> None:
    # No overlap: the norm is kernel / divisor exactly.
    bound = float(lipschitz(nn.AvgPool2d(kernel, divisor_override=divisor)))
    assert Fraction(bound) >= Fraction(kernel, divisor)
    assert bound <= kernel / divisor * (1 + 1e-13)
    plain = float(lipschitz(nn.AvgPool2d(kernel)))
    assert Fraction(plain) >= Fraction(1, kernel)
    strips = float(lipschitz(nn.AvgPool2d((kernel, 1))))
    assert Fraction(strips) ** 2 >= Fraction(1, kernel)


def windows(n: int, kernel: int, stride: int, dilation: int) -> int:
    """The most windows that share one pixel, counted."""
    hits = [0] * n
    for start in range(0, n - dilation * (kernel - 1), stride):
        for tap in range(kernel):
            hits[start + tap * dilation] += 1
    return max(hits)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
def test_overlap_is_the_count(kernel: int, stride: int, dilation: int) -> None:
    assert overlap(kernel, stride, dilation) == windows(200, kernel, stride, dilation)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil_mode"),
    [
        (2, 2, 0, 1, False),
        (3, 2, 1, 1, False),
        (3, 1, 1, 1, True),
        (2, 1, 0, 2, False),
        (3, 2, 0, 2, True),
        (2, 3, 1, 1, True),
    ],
)
def test_max_pooling_is_reached_where_one_pixel_wins_every_window(
    kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> None:
    layer = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    bound = float(lipschitz(layer))
    x = torch.zeros(1, 1, 19, 19, dtype=torch.float64)
    best = 0.0
    for i, j in itertools.product(range(6, 13), repeat=2):
        spike = x.clone()
        spike[0, 0, i, j] = 1
        best = max(best, float((layer(spike) - layer(x)).norm()))
    assert bound == pytest.approx(best, rel=1e-12)
    assert bound >= best
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(50, 1, 9, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    ratio = (layer(a) - layer(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
    assert float(ratio.max()) <= bound


def test_max_pool_constants_are_not_below_the_root() -> None:
    for k in range(1, 12):
        assert Fraction(max_pool_constant([k, 1], [1, 1], [1, 1])) ** 2 >= k


def test_max_pool_with_indices_is_refused() -> None:
    with pytest.raises(NoRuleError, match="return_indices"):
        lipschitz(nn.MaxPool2d(2, return_indices=True))


@pytest.mark.parametrize("size", [(4, 4), (3, 5), (1, 7)])
def test_global_average_pooling(size: tuple[int, int]) -> None:
    layer = nn.AdaptiveAvgPool2d(1)
    truth = np.linalg.norm(matrix(layer, *size), 2)
    bound = float(lipschitz(layer, (2, *size)))
    assert Fraction(bound) ** 2 >= Fraction(1, math.prod(size))
    assert bound == pytest.approx(truth, rel=1e-13)
    assert float(lipschitz(nn.AdaptiveAvgPool2d((1, 1)), (2, *size))) == bound


@pytest.mark.parametrize("output", [2, (1, 2), (None, 1), 4, (2, 4)])
def test_adaptive_pooling_whose_windows_are_alike_has_their_norm(output: object) -> None:
    layer = nn.AdaptiveAvgPool2d(output)  # type: ignore[arg-type]
    matrix = torch.func.jacrev(layer)(torch.zeros(1, 4, 4, dtype=torch.float64)).reshape(-1, 16)
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    assert norm <= float(lipschitz(layer, (3, 4, 4))) <= norm * (1 + 1e-12)


@pytest.mark.parametrize("output", [3, (1, 5), 8, (3, None), (7, 2)])
@pytest.mark.parametrize("size", [(4, 4), (5, 9)])
def test_adaptive_pooling_whose_windows_overlap_has_its_norm(output: object, size: tuple[int, int]) -> None:
    layer = nn.AdaptiveAvgPool2d(output)  # type: ignore[arg-type]
    norm = float(np.linalg.norm(matrix(layer, *size), 2))
    assert norm * (1 - 1e-14) <= float(lipschitz(layer, (3, *size))) <= norm * (1 + 1e-12)
    x = torch.rand(2, 3, *size)
    assert torch.equal(export(layer, (3, *size))(x), layer(x))


def test_windows_of_adaptive_pooling_are_those_of_torch() -> None:
    for n, m in itertools.product(range(1, 9), repeat=2):
        found = (adaptive_matrix(n, m) > 0).double()
        taken = torch.func.jacrev(nn.AdaptiveAvgPool1d(m))(torch.zeros(1, n, dtype=torch.float64))[0, :, 0]
        assert torch.equal(found, (taken > 0).double())
        assert int(found.sum(1).amax()) <= window_terms(nn.AdaptiveAvgPool2d((1, m)), (1, 1, n))
        assert int(found.sum(0).amax()) <= window_terms(nn.AdaptiveAvgPool2d((1, m)), (1, 1, n))


@pytest.mark.parametrize(
    ("output", "size", "picked"), [(2, (4, 6), 1), (3, (4, 4), 4), ((2, 1), (5, 3), 2), (6, (3, 3), 4)]
)
def test_adaptive_max_pooling_picks_a_pixel_that_often(output: Any, size: tuple[int, int], picked: int) -> None:
    layer = nn.AdaptiveMaxPool2d(output)
    bound = float(lipschitz(layer, (1, *size)))
    spikes = torch.eye(math.prod(size), dtype=torch.float64).reshape(-1, 1, *size)
    assert bound == pytest.approx(float(layer(spikes).flatten(1).norm(dim=1).amax()), rel=1e-12)
    assert bound**2 == pytest.approx(picked)
    if picked > 1:
        with pytest.raises(NoRuleError, match=r"divides the image .* use nn\.MaxPool2d"):
            export(layer, (1, *size))
    else:
        x = torch.rand(3, 1, *size)
        assert torch.equal(export(layer, (1, *size))(x), layer(x))


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool1d(3, 2, 1, 2, ceil_mode=True),
        nn.AvgPool1d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.AdaptiveAvgPool1d(4),
        nn.AdaptiveMaxPool1d(3),
        nn.AdaptiveMaxPool1d((1,)),
        nn.MaxPool1d(np.int64(3), np.int64(2), np.int64(1)),  # type: ignore[arg-type]
    ],
)
def test_pooling_of_signals_is_that_of_images_with_one_row(layer: nn.Module) -> None:
    x = torch.randn(5, 2, 9, dtype=torch.float64)
    plain = export(layer, (2, 9))
    assert torch.equal(plain(x), layer(x))
    assert float(lipschitz(plain)) == float(lipschitz(layer, (2, 9)))
    spikes = torch.eye(9, dtype=torch.float64)[:, None]
    if isinstance(layer, nn.MaxPool1d | nn.AdaptiveMaxPool1d):
        norm = float((layer(spikes).flatten(1)).norm(dim=1).amax())
    else:
        norm = float(torch.linalg.matrix_norm(layer(spikes)[:, 0], 2))
    assert norm * (1 - 1e-14) <= float(lipschitz(layer, (2, 9))) <= norm * (1 + 1e-12)
    call = {nn.MaxPool1d: lambda x: F.max_pool1d(x, 3, 2), nn.AvgPool1d: lambda x: F.avg_pool1d(x, 3)}.get(type(layer))
    if call is not None:
        own = Called(call)
        assert torch.equal(export(own, (2, 9))(x), own(x))


class Called(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def test_adaptive_pooling_needs_the_input_shape() -> None:
    for network in (nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1))):
        with pytest.raises(ShapeError, match=r"got none: lipkit\.lipschitz\(network, input_shape="):
            lipschitz(network)


@pytest.mark.parametrize("layer", [nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)])
def test_a_shape_without_two_sides_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ShapeError, match="at least 2 dimensions"):
        lipschitz(layer, (8,))


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.MaxPool2d(2, stride=0), "nn.MaxPool2d: expected a stride of at least 1, got 0"),
        (nn.MaxPool2d(2, dilation=(1, 0)), r"expected a dilation of at least 1, got \(1, 0\)"),
        (nn.AvgPool2d((2, 0), 1), r"nn.AvgPool2d: expected a kernel_size of at least 1, got \(2, 0\)"),
        (nn.AvgPool1d(2, stride=0), r"expected a stride of at least 1, got \(1, 0\)"),
        (nn.AvgPool2d(2, divisor_override=0), "expected a divisor_override other than 0, got 0"),
    ],
)
def test_windows_that_torch_cannot_run_are_refused(layer: nn.Module, expected: str) -> None:
    with pytest.raises(NoRuleError, match=expected):
        lipschitz(layer)


def test_sizes_that_have_no_rule_are_refused() -> None:
    with pytest.raises(NoRuleError, match="output sizes of at least 1, got 0"):
        lipschitz(nn.AdaptiveAvgPool2d(0), (1, 4, 4))
    with pytest.raises(NoRuleError, match="divides the image"):
        export(nn.AdaptiveMaxPool2d((2, 3)), (1, 4, 4))
    with pytest.raises(ShapeError):
        lipschitz(modules.Mean(3), (2, 2))
    with pytest.raises(ShapeError, match="PositionCode: expected"):
        modules.PositionCode(2, 4, 4)(torch.ones(1, 2, 4, 1))
