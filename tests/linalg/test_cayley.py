"""The Cayley transform against the paper's formula in numpy; inverses by blocks against LAPACK in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipkit.errors import ShapeError
from lipkit.linalg import cayley, orthogonality_residual
from lipkit.linalg.cayley import blocks_pay, factorize, inverse_by_blocks, solve_rows

SHAPES = [(1, 1), (4, 4), (6, 3), (3, 6), (5, 1), (1, 5)]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def reference(w: np.ndarray) -> np.ndarray:
    """[(I+Z)^-1 (I-Z); -2 V (I+Z)^-1], Z = U - U* + V* V, one matrix at a time."""
    if w.ndim > 2:
        return np.stack([reference(one) for one in w])
    m, n = w.shape
    if m < n:
        return reference(w.conj().T).conj().T
    u, v = w[:n], w[n:]
    z = u - u.conj().T + v.conj().T @ v
    inverse = np.linalg.inv(np.eye(n) + z)
    return np.concatenate((inverse @ (np.eye(n) - z), -2 * v @ inverse))


def tolerance(dtype: torch.dtype, n: int, size: float = 1.0) -> float:
    return 20 * n * torch.finfo(dtype).eps * (1 + size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_equals_the_formula_of_the_paper(shape: tuple[int, int], dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    w = random((*batch, *shape), dtype)
    q = cayley(w).resolve_conj()
    assert q.dtype == dtype
    assert q.shape == w.shape
    expected = reference(w.to(torch.complex128).numpy().reshape(-1, *shape)).reshape(w.shape)
    assert np.abs(q.numpy() - expected).max() <= tolerance(dtype, max(shape), float(w.abs().max()) ** 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_singular_value_is_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    q = cayley(random((4, *shape), dtype, 1)).resolve_conj().numpy().astype(np.complex128)
    values = np.linalg.svd(q, compute_uv=False)
    assert np.abs(values - 1).max() <= tolerance(dtype, max(shape), 10)


def test_square_result_has_no_eigenvalue_minus_one_and_determinant_one() -> None:
    q = cayley(random((6, 5, 5), torch.float64, 2)).numpy()
    assert np.abs(np.linalg.eigvals(q) + 1).min() > 1e-3
    assert np.allclose(np.linalg.det(q), 1)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_of_both_orders(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = random((2, *shape), dtype, 3).requires_grad_()
    assert torch.autograd.gradcheck(cayley, (w,), fast_mode=True)
    assert torch.autograd.gradgradcheck(cayley, (w,), fast_mode=True)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [torch.zeros, torch.ones], ids=["zero", "ones"])
def test_gradients_at_repeated_singular_values(shape: tuple[int, int], make: type) -> None:
    # A stack has a derivative of its own, written out.
    w = make((1, *shape), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(cayley, (w,))
    assert torch.autograd.gradgradcheck(cayley, (w,))


def test_zero_gives_the_identity_with_finite_gradient() -> None:
    for shape in SHAPES:
        w = torch.zeros(2, *shape, requires_grad=True)
        q = cayley(w)
        assert torch.equal(q.detach(), torch.eye(*shape).expand(2, -1, -1))
        q.sum().backward()
        assert bool(torch.isfinite(w.grad).all())


def test_orthogonal_input_with_all_singular_values_equal() -> None:
    w = torch.from_numpy(np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0])
    assert float(orthogonality_residual(cayley(w))) < 1e-13
    assert float(orthogonality_residual(cayley(w[:, :3]))) < 1e-13


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("shape", [(16, 16), (24, 16), (16, 24)])
def test_float32_stays_orthogonal_at_any_scale(shape: tuple[int, int], scale: float) -> None:
    # The weight that a layer hands over: unit Frobenius norm times its learnable scale.
    w = random((8, *shape), torch.float32, 4)
    w = w / w.norm(dim=(1, 2), keepdim=True) * scale
    values = np.linalg.svd(cayley(w).double().numpy(), compute_uv=False)
    assert np.abs(values - 1).max() < 5e-4


def test_one_wrong_formula_is_seen() -> None:
    w = random((4, 4), torch.float64)
    assert float(orthogonality_residual(1.01 * cayley(w))) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype: torch.dtype) -> None:
    w = random((5, 4), torch.float32).to(dtype).requires_grad_()
    q = cayley(w).resolve_conj()
    assert q.dtype == torch.float32
    assert torch.equal(q.detach(), cayley(w.detach().float()))
    q.sum().backward()
    assert w.grad.dtype == dtype


def test_conjugate_symmetric_input_gives_conjugate_output() -> None:
    w = random((3, 4, 4), torch.complex128, 5)
    assert torch.allclose(cayley(w.conj()), cayley(w).conj(), atol=1e-14)


def test_empty_batch_and_layouts() -> None:
    assert cayley(torch.zeros(0, 3, 2)).shape == (0, 3, 2)
    w = random((4, 3), torch.float64)
    assert torch.allclose(cayley(w.mT.contiguous().mT), cayley(w), atol=1e-15)


def test_only_the_gradient_that_is_asked_for() -> None:
    w = random((4, 2), torch.float64).requires_grad_()
    top = cayley(w)[:2]
    (grad,) = torch.autograd.grad(top.sum(), w)
    assert bool(torch.isfinite(grad).all())


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 7), n=st.integers(1, 7), log_scale=st.floats(-6, 2), seed=st.integers(0, 10**6))
def test_semi_orthogonal_for_random_sizes(m: int, n: int, log_scale: float, seed: int) -> None:
    w = random((m, n), torch.float64, seed) * 10**log_scale
    size = 1 + float(w.norm()) ** 2
    assert float(orthogonality_residual(cayley(w))) <= 1e-14 * size * max(m, n)


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(2, 2).long()])
def test_refuses_what_is_no_matrix(bad: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"expected .* got"):
        cayley(bad)
    with pytest.raises(ShapeError, match=r"expected .* got"):
        orthogonality_residual(bad)


def test_residual_is_measured_on_the_short_side() -> None:
    assert float(orthogonality_residual(torch.eye(3, 5))) == 0
    assert float(orthogonality_residual(torch.eye(5, 3))) == 0
    assert orthogonality_residual(torch.zeros(4, 2, 3, 2)).shape == (4, 2)
    assert float(orthogonality_residual(torch.zeros(2, 2))) == 1


def accretive(count: int, n: int, dtype: torch.dtype, seed: int, skew: float, gram: float) -> Tensor:
    """``I + skew (G - G^*) + gram V V^*`` with columns of norm about 1."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(count, n, n, dtype=dtype, generator=generator) / n**0.5
    v = torch.randn(count, n, max(n // 3, 1), dtype=dtype, generator=generator) / n**0.5
    return torch.eye(n, dtype=dtype) + skew * (g - g.mH) + gram * (v @ v.mH)


def inverse_of(n: Tensor) -> np.ndarray:
    return np.linalg.inv(n.resolve_conj().to(torch.complex128).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", [1, 2, 31, 32, 33, 65, 100])
@pytest.mark.parametrize("conjugated", [False, True])
def test_equals_the_inverse_of_numpy(dtype: torch.dtype, side: int, conjugated: bool) -> None:
    n = accretive(3, side, dtype, side, 2.0, 1.0)
    n = n.mH if conjugated else n
    found = inverse_by_blocks(n).numpy()
    assert found.dtype == n.numpy(force=True).dtype
    assert np.abs(found - inverse_of(n)).max() <= 50 * torch.finfo(dtype).eps


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
    error = np.linalg.norm(made.to(torch.complex128).numpy() - inverse_of(n), 2, (1, 2)).max()
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
    assert np.allclose(inverse_by_blocks(n).numpy(), inverse_of(n), rtol=0, atol=1e-13)
    single = n[0, 0]
    assert np.allclose(inverse_by_blocks(single).numpy(), inverse_of(single), rtol=0, atol=1e-13)


@pytest.mark.parametrize("scale", [0.2, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("shape", [(96, 96), (96, 64), (64, 96)])
def test_the_transform_stays_orthogonal_in_float32_for_small_and_for_huge_weights(
    scale: float, shape: tuple[int, int]
) -> None:
    w = scale * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)) / shape[0] ** 0.5
    values = np.linalg.svd(cayley(w).double().numpy(), compute_uv=False)
    skew = np.linalg.norm((w[:, :64, :64] - w[:, :64, :64].mT).double().numpy(), 2, (1, 2)).max()
    assert np.abs(values - 1).max() <= 32 * torch.finfo(torch.float32).eps * (1 + skew) ** (2 if scale <= 1 else 1)


@pytest.mark.parametrize("rows", [15, 16, 40, 48, 49])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_solves_take_an_inverse_from_half_as_many_rows_on(rows: int, scale: float) -> None:
    n = accretive(2, 32, torch.complex128, 0, scale, 1.0)
    factors = factorize(n.mT.contiguous(), rows)
    assert (factors.pivots is None) == (rows >= 16 if scale == 1.0 else rows > 48)
    b = torch.randn(2, rows, 32, dtype=n.dtype, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(solve_rows(factors, b) @ n.mT, b, atol=1e-10)
    assert torch.allclose(solve_rows(factors, b, transposed=True) @ n, b, atol=1e-10)
