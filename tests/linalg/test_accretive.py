"""Inverses by blocks against LAPACK in float64, and when they are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipkit.linalg.accretive import blocks_pay, inverse_by_blocks
from lipkit.linalg.cayley import cayley, factorize, solve_rows

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def accretive(count: int, n: int, dtype: torch.dtype, seed: int, skew: float, gram: float) -> Tensor:
    """``I + skew (G - G^*) + gram V V^*`` with columns of norm about 1."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(count, n, n, dtype=dtype, generator=generator) / n**0.5
    v = torch.randn(count, n, max(n // 3, 1), dtype=dtype, generator=generator) / n**0.5
    return torch.eye(n, dtype=dtype) + skew * (g - g.mH) + gram * (v @ v.mH)


def reference(n: Tensor) -> np.ndarray:
    return np.linalg.inv(n.resolve_conj().to(torch.complex128).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", [1, 2, 31, 32, 33, 65, 100])
@pytest.mark.parametrize("conjugated", [False, True])
def test_equals_the_inverse_of_numpy(dtype: torch.dtype, side: int, conjugated: bool) -> None:
    n = accretive(3, side, dtype, side, 2.0, 1.0)
    n = n.mH if conjugated else n
    found = inverse_by_blocks(n).numpy()
    assert found.dtype == n.numpy(force=True).dtype
    assert np.abs(found - reference(n)).max() <= 50 * torch.finfo(dtype).eps


@pytest.mark.thorough
@given(
    st.integers(1, 80),
    st.integers(0, 2**31),
    st.floats(0, 5, width=32),
    st.floats(0, 30, width=32),
    st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_where_it_pays_it_is_as_exact_as_promised(
    side: int, seed: int, skew: float, gram: float, dtype: torch.dtype
) -> None:
    n = accretive(2, side, dtype, seed, skew, gram)
    exact = n.to(torch.complex128)
    size = torch.linalg.matrix_norm(exact, 2).max().item()
    made = inverse_by_blocks(n) if blocks_pay(n) else torch.linalg.inv(n)
    error = np.linalg.norm(made.to(torch.complex128).numpy() - reference(n), 2, (1, 2)).max()
    assert error <= 10 * torch.finfo(dtype).eps * (1 + size**2)


def test_large_matrices_and_broken_ones_are_left_to_lapack() -> None:
    tame = accretive(2, 40, torch.float32, 0, 1.0, 0.0)
    assert blocks_pay(tame)
    assert not blocks_pay(accretive(2, 31, torch.float32, 0, 1.0, 0.0))
    # One matrix of the batch decides.
    wild = torch.cat((tame, accretive(1, 40, torch.float32, 0, 100.0, 0.0)))
    assert not blocks_pay(wild)
    for bad in (float("nan"), float("inf")):
        broken = tame.clone()
        broken[1, 3, 4] = bad
        assert not blocks_pay(broken)
    assert not blocks_pay(tame[:0])


def test_leading_dimensions_are_kept() -> None:
    n = accretive(6, 40, torch.complex128, 0, 1.0, 1.0).reshape(2, 3, 40, 40)
    assert blocks_pay(n)
    assert inverse_by_blocks(n).shape == n.shape
    assert np.allclose(inverse_by_blocks(n).numpy(), reference(n), rtol=0, atol=1e-13)
    single = n[0, 0]
    assert np.allclose(inverse_by_blocks(single).numpy(), reference(single), rtol=0, atol=1e-13)


@pytest.mark.parametrize("scale", [0.2, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("shape", [(96, 96), (96, 64), (64, 96)])
def test_the_transform_stays_orthogonal_in_float32_for_small_and_for_huge_weights(
    scale: float, shape: tuple[int, int]
) -> None:
    w = scale * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)) / shape[0] ** 0.5
    values = np.linalg.svd(cayley(w).double().numpy(), compute_uv=False)
    skew = np.linalg.norm((w[:, :64, :64] - w[:, :64, :64].mT).double().numpy(), 2, (1, 2)).max()
    assert np.abs(values - 1).max() <= 20 * torch.finfo(torch.float32).eps * (1 + skew) ** (2 if scale <= 1 else 1)


@pytest.mark.parametrize("rows", [15, 16, 40, 48, 49])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_solves_take_an_inverse_from_half_as_many_rows_on(rows: int, scale: float) -> None:
    n = accretive(2, 32, torch.complex128, 0, scale, 1.0)
    factors = factorize(n.mT.contiguous(), rows)
    assert (factors.pivots is None) == (rows >= 16 if scale == 1.0 else rows > 48)
    b = torch.randn(2, rows, 32, dtype=n.dtype, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(solve_rows(factors, b) @ n.mT, b, atol=1e-10)
    assert torch.allclose(solve_rows(factors, b, transposed=True) @ n, b, atol=1e-10)
