"""Cholesky contractions and block reflectors against numpy, at full and at lost rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg import block_reflector, cholesky
from lipkit.linalg.cholesky import reflect

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
LOST = {
    "zero": torch.zeros(6, 3),
    "equal columns": torch.ones(64, 32),
    "tiny": torch.eye(4, 3) * 1e-30,
    "large": torch.randn(4, 2, generator=torch.Generator().manual_seed(0)) * 1e30,
    "rank 5": torch.randn(256, 5, generator=torch.Generator().manual_seed(1))
    @ torch.randn(5, 128, generator=torch.Generator().manual_seed(2)),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (4, 7), (7, 4), (5, 5), (2, 3, 6)], ids=str)
def test_singular_values_of_a_contraction(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = torch.randn(shape, dtype=dtype)
    q = cholesky(w, ridge=0.1).reshape(-1, *shape[-2:])
    for one, matrix in zip(q, w.reshape(-1, *shape[-2:]), strict=True):
        a = matrix.resolve_conj().numpy().astype(np.complex128)
        _, s, vh = np.linalg.svd(a, full_matrices=False)
        e = 0.1 * (s**2).sum() / min(shape[-2:])
        values = np.linalg.svd(one.resolve_conj().numpy().astype(np.complex128), compute_uv=False)
        np.testing.assert_allclose(np.sort(values), np.sort(s / np.sqrt(s**2 + e)), rtol=0, atol=1e3 * _eps(dtype))
        # L^-1 W keeps the row space of W: no row of the result leaves it
        outside = one.resolve_conj().numpy() @ (np.eye(shape[-1]) - vh.conj().T @ vh)
        assert shape[-2] > shape[-1] or np.abs(outside).max() < 1e3 * _eps(dtype)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (6, 3), (7, 2), (2, 8, 4), (5, 5)], ids=str)
def test_a_block_reflector_is_that_of_the_projector(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    v = torch.randn(shape, dtype=dtype)
    w = block_reflector(v).reshape(-1, shape[-2], shape[-2])
    for one, matrix in zip(w, v.reshape(-1, *shape[-2:]), strict=True):
        a = matrix.resolve_conj().numpy().astype(np.complex128)
        expected = np.eye(shape[-2]) - 2 * a @ np.linalg.pinv(a)
        np.testing.assert_allclose(one.resolve_conj().numpy(), expected, rtol=0, atol=3e3 * _eps(dtype))
    block = block_reflector(v, 1, shape[-2])
    torch.testing.assert_close(block, block_reflector(v)[..., :1, :])


@pytest.mark.parametrize("name", LOST)
def test_without_full_rank_the_norm_stays_at_most_1(name: str) -> None:
    v = LOST[name].clone().requires_grad_()
    for made in (block_reflector(v), cholesky(v), cholesky(v.mT)):
        values = np.linalg.svd(made.detach().double().numpy(), compute_uv=False)
        assert values.max() <= 1 + 1e-5
        (gradient,) = torch.autograd.grad((made * torch.linspace(-1, 1, made.numel()).view_as(made)).sum(), v)
        assert bool(gradient.isfinite().all())
    reflector = block_reflector(v).detach()
    # as many eigenvalues are -1 as V has directions that stand out of rounding
    rank = int(torch.linalg.matrix_rank(v.detach()))
    assert float(torch.trace(reflector)) == pytest.approx(len(v) - 2 * rank, abs=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    repeated = torch.linalg.qr(torch.randn(5, 3, dtype=dtype))[0]
    for v in (torch.randn(2, 5, 3, dtype=dtype), repeated):
        assert torch.autograd.gradcheck(block_reflector, (v.clone().requires_grad_(),), fast_mode=True)
        assert torch.autograd.gradcheck(cholesky, (v.clone().requires_grad_(),), fast_mode=True)


def test_refusals() -> None:
    with pytest.raises(OptionError, match=r"ridge: expected a positive finite number, got 0"):
        cholesky(torch.eye(2), 0)
    with pytest.raises(OptionError, match=r"v: expected at most as many columns as rows, got 3 and 2"):
        block_reflector(torch.zeros(2, 3))
    with pytest.raises(OptionError, match=r"columns: expected an integer from 1 to 3, got 4"):
        block_reflector(torch.eye(3), 3, 4)
    with pytest.raises(ShapeError, match="expected a matrix"):
        block_reflector(torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(("n", "m", "k", "size"), [(6, 2, 6, 6), (6, 5, 4, 6), (6, 3, 6, 2), (1, 1, 1, 1)])
def test_rows_are_reflected_without_the_matrix(n: int, m: int, k: int, size: int, dtype: torch.dtype) -> None:
    v, x = torch.randn(3, n, m, dtype=dtype), torch.randn(3, 2, k, dtype=dtype)
    exact = 2e-5 if dtype in (torch.float32, torch.complex64) else 1e-13
    torch.testing.assert_close(reflect(x, v, size), x @ block_reflector(v, size, k).mT, rtol=0, atol=exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_rows_are_those_of_the_matrix_where_columns_are_nearly_dependent(dtype: torch.dtype) -> None:
    """A network must not depend on how many images it sees: columns as small as the root of the shift are halved."""
    eps = torch.finfo(dtype).eps
    v = torch.linalg.qr(torch.randn(16, 5, dtype=dtype))[0] * torch.tensor([1, 0.3, 2 * eps**0.5, eps**0.5, eps])
    v, x = v.to(dtype), torch.eye(16, dtype=dtype)
    assert 0.05 < float((block_reflector(v) @ v[:, 3] / eps**0.5 + v[:, 3] / eps**0.5).norm()) < 2
    torch.testing.assert_close(reflect(x, v, 16), block_reflector(v).mT, rtol=0, atol=100 * eps)


@pytest.mark.parametrize("noise", [0, 1e-6, 1e-3, 1e-1])
def test_reflected_rows_do_not_grow_where_columns_are_nearly_dependent(noise: float) -> None:
    v = torch.randn(8, 16, 1, dtype=torch.complex64).expand(8, 16, 7) + noise * torch.randn(8, 16, 7)
    made = reflect(torch.eye(16, dtype=v.dtype).expand(8, 16, 16), v, 16).to(torch.complex128)
    assert float(torch.linalg.matrix_norm(made, 2).max()) <= 1 + 1e-6


@pytest.mark.parametrize("ridge", [1e-6, 1e-8, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_ridge_below_rounding_leaves_a_contraction(ridge: float, dtype: torch.dtype) -> None:
    """Without a least ridge the norm was 4, or NaN, where the factor met a pivot of rounding alone."""
    w = torch.randn(50, 1, dtype=dtype) @ torch.randn(1, 20, dtype=dtype)
    for one in (w, w.mT, torch.ones(30, 30, dtype=dtype), torch.randn(40, 10, dtype=dtype)):
        assert float(torch.linalg.matrix_norm(cholesky(one, ridge).double(), 2)) <= 1 + 20 * torch.finfo(dtype).eps
