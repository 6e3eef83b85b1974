"""The polynomial of a wide matrix, against the square skew matrix that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lipkit.linalg import skew_polynomial
from lipkit.linalg.exponential import taylor_range
from lipkit.linalg.skew_polynomial import _taylor_exponential, taylor_exponential, wide_taylor_exponential

SHAPES = [(1, 3), (1, 9), (3, 8), (4, 30), (2, 5, 40), (0, 2, 9)]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_polynomial_of_the_square_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = random(*shape, dtype=dtype)
    for terms in (1, 2, 3, 4, 5, 6, 10):
        squarings = 3 + terms % 4
        expected, found = (f(w, terms, squarings) for f in (_taylor_exponential, wide_taylor_exponential))
        assert found.shape == w.shape
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["no square part", "no rest", "rank one", "huge", "tiny", "steep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_special_matrices(kind: str, dtype: torch.dtype) -> None:
    w = random(4, 20)
    if kind == "no square part":
        w[:, :4] = 0
    elif kind == "no rest":
        w[:, 4:] = 0
    elif kind == "rank one":
        w = w[:1] * w[:, :1]
    elif kind == "steep":
        w *= torch.logspace(0, -7, 20, dtype=torch.float64)
    w = (w * {"huge": 1e15, "tiny": 1e-9}.get(kind, 1.0)).to(dtype)
    for terms in (5, 10):
        q = wide_taylor_exponential(w, terms)
        torch.testing.assert_close(q, _taylor_exponential(w, terms), rtol=0, atol=256 * torch.finfo(dtype).eps)
        low, high = taylor_range(1.0, terms)
        values = torch.linalg.svdvals(q.double())
        slack = 64 * torch.finfo(dtype).eps
        assert low - slack <= float(values.min())
        assert float(values.max()) <= high + slack


def test_zero_is_the_identity_with_a_gradient_of_zero() -> None:
    w = torch.zeros(2, 9, requires_grad=True)
    q = wide_taylor_exponential(w, 5)
    assert torch.equal(q.detach(), torch.eye(2, 9))
    (g,) = torch.autograd.grad(q.square().sum(), w)
    assert bool(torch.isfinite(g).all())


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_derivatives(dtype: torch.dtype) -> None:
    w = random(2, 7, dtype=dtype).requires_grad_()
    g = random(2, 7, dtype=dtype, seed=1)
    for terms in (5, 7):
        (one,), (two,) = (
            torch.autograd.grad(f(w, terms), w, g) for f in (wide_taylor_exponential, _taylor_exponential)
        )
        torch.testing.assert_close(one, two)
    assert torch.autograd.gradcheck(lambda w: wide_taylor_exponential(w, 5), w, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda w: wide_taylor_exponential(w, 3), w, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(("m", "n", "wide"), [(2, 5, False), (2, 6, True), (6, 2, True), (5, 2, False)])
def test_sides_that_differ_enough_go_this_way(
    m: int, n: int, wide: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []

    def seen(w: Tensor, terms: int, squarings: int) -> Tensor:
        calls.append(tuple(w.shape))
        return wide_taylor_exponential(w, terms, squarings)

    monkeypatch.setattr(skew_polynomial, "wide_taylor_exponential", seen)
    w = random(m, n, dtype=dtype)
    torch.testing.assert_close(taylor_exponential(w, 5), _taylor_exponential(w, 5))
    assert calls == ([(min(m, n), max(m, n))] if wide else [])
