"""The Gram bound against numpy's spectral norm, its gradient against differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipkit.errors import ShapeError
from lipkit.linalg.exponential import schatten_bound
from lipkit.linalg.gram_norm import SMALLEST, gram_norm
from lipkit.linalg.matrices import PANEL, mirrored_product

LARGE = 4 * PANEL + 3  # products by panels


def truth(a: Tensor) -> float:
    return float(np.linalg.norm(a.double().numpy(), 2))


def matrix(kind: str, m: int, n: int, dtype: torch.dtype) -> Tensor:
    a = torch.randn(m, n, dtype=torch.float64)
    if kind == "orthogonal":
        u, _, v = torch.linalg.svd(a, full_matrices=False)
        a = u @ v
    elif kind == "rank one":
        a = a[:, :1] @ a[:1]
    elif kind == "spiked":
        a = a / 10 + 3 * torch.eye(m, n, dtype=torch.float64)[:, :1] @ a[:1]
    return a.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["normal", "orthogonal", "rank one", "spiked"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 50), (50, 3), (40, 40), (LARGE, 2 * LARGE), (300, 70)])
def test_upper_and_close(m: int, n: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a = matrix(kind, m, n, dtype)
    exact, bound = truth(a), gram_norm(a)
    assert bound.dtype is torch.float64
    assert exact <= float(bound) <= min(m, n) ** (1 / 256) * (1 + 1e-8) * exact


@pytest.mark.thorough
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    m=st.integers(1, 20),
    n=st.integers(1, 20),
    size=st.sampled_from([1e-2, 1.0, 1e6, 1e18]),
    decay=st.floats(0, 8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_never_below(seed: int, m: int, n: int, size: float, decay: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -decay, n, dtype=torch.float64)
    a = (size * torch.randn(m, n, dtype=torch.float64, generator=generator) * scales).to(dtype)
    assert truth(a) * (1 - 1e-14) <= float(gram_norm(a)) <= 1.05 * truth(a) + 2 * SMALLEST


@pytest.mark.parametrize("scale", [0.0, 1e-200, 1e-30, 1e-5])
def test_small_matrices_count_as_the_smallest(scale: float) -> None:
    a = torch.full((3, 4), scale, dtype=torch.float64, requires_grad=True)
    bound = gram_norm(a)
    assert SMALLEST <= float(bound.detach()) <= SMALLEST * (1 + 1e-8)
    (g,) = torch.autograd.grad(bound, a)
    assert torch.equal(g, torch.zeros_like(a))


def test_infinite_and_undefined_entries_are_not_hidden() -> None:
    assert not bool(torch.isfinite(gram_norm(torch.tensor([[1.0, torch.inf]]))))
    assert not bool(torch.isfinite(gram_norm(torch.tensor([[1.0, torch.nan]]))))


def test_squares_that_overflow_give_no_small_bound() -> None:
    for size in (1e150, 1e200):
        assert not float(gram_norm(size * torch.eye(3, dtype=torch.float64))) < size
    large = torch.tensor([1e20, 0.0])[:, None, None] * torch.eye(2)  # float32
    assert schatten_bound(large).tolist() == [torch.inf, 0.0]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 5), (5, 3), (4, 4)])
def test_derivatives(m: int, n: int) -> None:
    torch.manual_seed(0)
    a = torch.randn(m, n, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gram_norm, a)
    assert torch.autograd.gradgradcheck(gram_norm, a)


def test_reduced_precision_of_float32_products_does_not_touch_it() -> None:
    torch.manual_seed(0)
    a = matrix("orthogonal", LARGE, LARGE, torch.float32)
    expected = gram_norm(a)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(gram_norm(a), expected)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_mirrored_products(batch: tuple[int, ...], negative: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(*batch, LARGE, 9, dtype=torch.float64)
    y = torch.randn(*batch, 9, LARGE, dtype=torch.float64)
    # [x, y^T] [y; +-x^T] equals its transpose or the negative of it.
    left, right = torch.cat((x, y.mT), -1), torch.cat((y, -x.mT if negative else x.mT), -2)
    made = mirrored_product(left, right, torch.empty(*batch, LARGE, LARGE, dtype=torch.float64), negative)
    torch.testing.assert_close(made, left @ right, rtol=1e-12, atol=1e-12)


def test_bad_shapes_are_named() -> None:
    with pytest.raises(ShapeError, match=r"a: expected a matrix"):
        gram_norm(torch.ones(3))
