"""The exponential of skew kernels: its Taylor polynomial, and its three ways on images."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from scipy.linalg import expm
from torch import Tensor

from lipkit.conv import adjoint, exponential_conv2d, skew
from lipkit.conv.exponential_conv import MOST_NUMBERS, Way, operations, taylor_features, taylor_norm
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.exponential import taylor, taylor_products
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


WAYS: tuple[Way, ...] = get_args(Way)


def kernel_of(c: int, kh: int, kw: int, norm: float = 1.0) -> Tensor:
    kernel = skew(torch.randn(c, c, kh, kw, dtype=torch.float64))
    return kernel * norm / kernel.norm()


def dense(kernel: Tensor, h: int, w: int) -> np.ndarray:
    """The matrix of the circular convolution, tap by tap: no Fourier transform, no padding of torch."""
    c, _, kh, kw = kernel.shape
    made = np.zeros((c, h, w, c, h, w))
    for i, j, p, q in np.ndindex(kh, kw, h, w):
        made[:, p, q, :, (p + i - (kh - 1) // 2) % h, (q + j - (kw - 1) // 2) % w] += kernel[:, :, i, j].numpy()
    return made.reshape(c * h * w, -1)


@pytest.mark.parametrize("way", [*WAYS, None])
@pytest.mark.parametrize(("h", "w", "kh", "kw"), [(4, 4, 3, 3), (5, 2, 3, 1), (1, 1, 3, 3), (3, 4, 5, 3), (9, 8, 1, 3)])
def test_every_way_is_the_exponential_of_the_dense_matrix(way: Way | None, h: int, w: int, kh: int, kw: int) -> None:
    torch.manual_seed(0)
    kernel, x = kernel_of(3, kh, kw), torch.randn(2, 3, h, w, dtype=torch.float64)
    exact = scipy.linalg.expm(dense(kernel, h, w)) @ x.flatten(1).numpy().T
    # 20 terms of a matrix of norm at most sqrt(kh kw): the rest is below 4^21 / 21!.
    y = exponential_conv2d(kernel, x, 20, way=way)
    np.testing.assert_allclose(y.flatten(1).numpy().T, exact, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("terms", [1, 2, 5, 10])
def test_the_degree_is_the_one_asked_for(way: Way, terms: int) -> None:
    torch.manual_seed(0)
    kernel, x = kernel_of(2, 3, 3), torch.randn(2, 2, 4, 3, dtype=torch.float64)
    a = dense(kernel, 4, 3)
    polynomial = sum(np.linalg.matrix_power(a, i) / math.factorial(i) for i in range(terms + 1))
    y = exponential_conv2d(kernel, x, terms, way=way)
    np.testing.assert_allclose(y.flatten(1).numpy().T, polynomial @ x.flatten(1).numpy().T, atol=1e-13)


@pytest.mark.parametrize("way", WAYS)
def test_missing_channels_are_zeros_and_surplus_ones_are_dropped(way: Way) -> None:
    torch.manual_seed(0)
    kernel, x = kernel_of(5, 3, 3), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    whole = exponential_conv2d(kernel, F.pad(x, (0, 0, 0, 0, 0, 3)), 5, way="features")
    torch.testing.assert_close(exponential_conv2d(kernel, x, 5, 4, way=way), whole[:, :4])


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way: Way) -> None:
    torch.manual_seed(0)
    kernel, x = kernel_of(3, 3, 3).requires_grad_(), torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    whole, row = (kernel, x), (kernel[:, :, :1], x)
    torch.autograd.gradcheck(lambda k, x: exponential_conv2d(k, x, 5, 2, way=way), whole, fast_mode=True)
    torch.autograd.gradgradcheck(lambda k, x: exponential_conv2d(k, x, 2, 1, way=way), row, fast_mode=True)


def test_the_count_decides() -> None:
    assert "symbol" not in operations(1024, (3, 3), MOST_NUMBERS // 1024**2 + 1, 1, 5)
    # 20 taps of one image beside 5 convolutions of 1000: the images are few, then many.
    for batch, cheapest in ((1, "frequencies"), (1000, "symbol")):
        counts = operations(64, (3, 3), 64, batch, 5)
        assert min(counts, key=counts.__getitem__) == cheapest
    # One tap: nothing to gain from frequencies.
    counts = operations(64, (1, 1), 4096, 1, 1)
    assert min(counts, key=counts.__getitem__) == "features"


@pytest.mark.parametrize(("channels", "images", "way"), [(4, 64, "symbol"), (16, 2, "features")])
def test_autocast_takes_a_way_in_low_precision(channels: int, images: int, way: Way) -> None:
    torch.manual_seed(0)
    kernel, x = kernel_of(channels, 3, 3).float(), torch.randn(images, channels, 4, 4)
    exact = exponential_conv2d(kernel, x, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = exponential_conv2d(kernel, x, 5)
        assert torch.equal(y, exponential_conv2d(kernel, x, 5, way=way))
        assert float((exponential_conv2d(kernel, x, 5, way="frequencies") - exact).norm() / exact.norm()) < 1e-6
    assert 1e-4 < float((y.float() - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("shape", [(3, 2, 3, 3), (1, 1, 3, 3)])
def test_kernels_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"as many outputs as inputs, at least 2, got shape"):
        exponential_conv2d(torch.zeros(shape), torch.zeros(1, 2, 4, 4), 3)


def test_other_options_and_shapes_are_refused() -> None:
    kernel, x = torch.zeros(2, 2, 3, 3), torch.zeros(1, 2, 4, 4)
    for way in (None, *WAYS):
        with pytest.raises(OptionError, match=r"terms: expected an integer from 1 to 100, got 0"):
            exponential_conv2d(kernel, x, 0, way=way)
    with pytest.raises(OptionError, match=r"way: expected None or one of features, frequencies, symbol, got 'fast'"):
        exponential_conv2d(kernel, x, 3, way="fast")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"x: expected images \(B, C, h, w\), got shape \(2, 4, 4\)"):
        exponential_conv2d(kernel, x[0], 3)


def test_products_are_counted_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    product = Tensor.__matmul__

    def counting(a: Tensor, b: Tensor) -> Tensor:
        made.append(None)
        return product(a, b)

    monkeypatch.setattr(Tensor, "__matmul__", counting)
    for terms in range(1, 40):
        made.clear()
        taylor(torch.eye(2), terms)
        assert len(made) == taylor_products(terms)
