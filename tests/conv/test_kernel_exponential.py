"""The exponential in the kernel algebra, against dense matrices and scipy's exponential."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import expm

from lipkit.conv import adjoint, skew, taylor_features
from lipkit.conv.kernel_exponential import taylor_norm
from lipkit.errors import OptionError, ShapeError
from lipkit.testing import dense_matrix


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def zero_padded(kernel: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, kernel, padding=[k // 2 for k in kernel.shape[2:]])


def circular(kernel: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kh, kw = kernel.shape[2:]
    return F.conv2d(F.pad(x, (kw // 2, kw // 2, kh // 2, kh // 2), mode="circular"), kernel)


@pytest.mark.parametrize("apply", [zero_padded, circular])
@pytest.mark.parametrize("size", [(3, 3), (1, 5), (3, 1)], ids=str)
def test_adjoint_is_the_transposed_matrix(apply, size) -> None:
    kernel = torch.randn(3, 2, *size, dtype=torch.float64)
    forward = dense_matrix(lambda x: apply(kernel, x), (2, 4, 6))
    back = dense_matrix(lambda x: apply(adjoint(kernel), x), (3, 4, 6))
    np.testing.assert_allclose(back, forward.T, atol=1e-14)


@pytest.mark.parametrize("apply", [zero_padded, circular])
def test_skew_kernels_are_skew_matrices_and_exponentiate_to_rotations(apply) -> None:
    kernel = skew(torch.randn(3, 3, 3, 3)).double() / 20
    assert torch.equal(kernel, -adjoint(kernel))
    a = dense_matrix(lambda x: apply(kernel, x), (3, 4, 5))
    np.testing.assert_array_equal(a, -a.T)
    e = dense_matrix(lambda x: taylor_features(x, lambda t: apply(kernel, t), 30), (3, 4, 5))
    np.testing.assert_allclose(e, expm(a), atol=1e-13)


@pytest.mark.parametrize("terms", [1, 2, 5, 7, 10])
@pytest.mark.parametrize("angle", [0.3, 1.0, 2.0])
def test_taylor_norm_is_never_below_a_dense_search(angle: float, terms: int) -> None:
    theta = np.linspace(0, angle, 20001)
    series = sum((1j * theta) ** i / math.factorial(i) for i in range(terms + 1))
    worst = float(np.abs(series).max())
    bound = taylor_norm(angle, 0.0, terms)
    assert worst <= bound * (1 + 1e-15)
    if angle <= 1:
        assert bound - 1 <= (worst - 1) * (1 + 1e-6) + 1e-12


def test_taylor_norm_covers_what_is_not_skew() -> None:
    generator = np.random.default_rng(0)
    for error in (1e-3, 0.1, 0.5):
        s, e = generator.standard_normal((2, 6, 6))
        s, e = s - s.T, e + e.T
        s, e = s / np.linalg.norm(s, 2), error * e / np.linalg.norm(e, 2)
        series = sum(np.linalg.matrix_power(s + e, i) / math.factorial(i) for i in range(6))
        assert np.linalg.norm(series, 2) <= taylor_norm(1.0, error, 5)
    # Attained to first order: a multiple of the identity adds its size.
    assert taylor_norm(0.0, 0.1, 5) <= 1 + 0.1 * math.exp(0.1) * (1 + 1e-9)


@pytest.mark.parametrize(("angle", "error"), [(math.inf, 0.0), (1.0, math.inf), (math.nan, 0.0), (200.0, 0.0)])
def test_taylor_norm_promises_nothing_for_huge_operators(angle: float, error: float) -> None:
    assert taylor_norm(angle, error, 5) == math.inf


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"expected odd sizes, got \(2, 3\)"):
        adjoint(torch.zeros(1, 1, 2, 3))
    with pytest.raises(ShapeError, match=r"as many outputs as inputs, got shape \(2, 3, 3, 3\)"):
        skew(torch.zeros(2, 3, 3, 3))
    with pytest.raises(OptionError, match=r"terms: expected .* got 0"):
        taylor_features(torch.zeros(1), lambda x: x, 0)
