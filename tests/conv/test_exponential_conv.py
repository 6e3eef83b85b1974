"""The three ways of an exponential convolution, against the dense matrix of the convolution and scipy."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.conv import exponential_conv2d, skew
from lipkit.conv.exponential_conv import MOST_NUMBERS, Way, operations
from lipkit.errors import ShapeError
from lipkit.linalg.exponential import taylor, taylor_products

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


@pytest.mark.parametrize("way", WAYS)
def test_gradients(way: Way) -> None:
    torch.manual_seed(0)
    kernel, x = kernel_of(3, 3, 3).requires_grad_(), torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda k, x: exponential_conv2d(k, x, 5, 2, way=way), (kernel, x))
    torch.autograd.gradgradcheck(lambda k, x: exponential_conv2d(k, x, 2, 1, way=way), (kernel[:, :, :1], x))


def test_the_count_decides() -> None:
    assert "symbol" not in operations(1024, (3, 3), MOST_NUMBERS // 1024**2 + 1, 1, 5)
    # 20 taps of one image beside 5 convolutions of 1000: the images are few, then many.
    for batch, cheapest in ((1, "frequencies"), (1000, "symbol")):
        counts = operations(64, (3, 3), 64, batch, 5)
        assert min(counts, key=counts.__getitem__) == cheapest
    # One tap: nothing to gain from frequencies.
    counts = operations(64, (1, 1), 4096, 1, 1)
    assert min(counts, key=counts.__getitem__) == "features"


def test_autocast_takes_the_way_in_low_precision() -> None:
    torch.manual_seed(0)
    kernel, x = kernel_of(4, 3, 3).float(), torch.randn(64, 4, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = exponential_conv2d(kernel, x, 5)
        assert torch.equal(y, exponential_conv2d(kernel, x, 5, way="features"))
    torch.testing.assert_close(y.float(), exponential_conv2d(kernel, x, 5), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("shape", [(3, 2, 3, 3), (1, 1, 3, 3)])
def test_kernels_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"as many outputs as inputs, at least 2, got shape"):
        exponential_conv2d(torch.zeros(shape), torch.zeros(1, 2, 4, 4), 3)


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
