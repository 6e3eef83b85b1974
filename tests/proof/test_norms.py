"""Proved spectral norms: never below the truth, not even by one unit in the last place."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any
from unittest.mock import Mock

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipkit.bounds import spectral_norm, spectral_norms
from lipkit.errors import ShapeError
from lipkit.proof import norms
from lipkit.proof.norms import power_of_two, quick_norm_estimate, quick_spectral_norm, scale_to
from lipkit.proof.roundoff import UNIT, gamma, multiply_up, reciprocal_up, to_double, up


@pytest.fixture(autouse=True, params=[norms.MANY, 3], ids=["all eigenvalues", "Lanczos"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices by the way of the large ones, too."""
    monkeypatch.setattr(norms, "MANY", request.param)


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def exact_norm(a: Tensor) -> mpmath.mpf:
    """Largest singular value to 60 digits of the numbers as stored."""
    with mpmath.workdps(60):
        if a.is_complex():
            rows = [[mpmath.mpc(float(x.real), float(x.imag)) for x in row] for row in a.to(torch.complex128)]
        else:
            rows = [[mpmath.mpf(float(x)) for x in row] for row in a.to(torch.float64)]
        largest = max(max(abs(x) for x in row) for row in rows)
        if largest == 0:
            return mpmath.mpf(0)
        m = mpmath.matrix(rows) / largest
        gram = m.H * m if m.rows >= m.cols else m * m.H
        values = (mpmath.eighe if a.is_complex() else mpmath.eigsy)(gram, eigvals_only=True)
        return mpmath.sqrt(max(mpmath.re(v) for v in values)) * largest


def check(a: Tensor, tightness: float = 1e-10) -> None:
    bound, truth = float(spectral_norms(a)), exact_norm(a)
    assert mpmath.mpf(bound) >= truth
    assert mpmath.mpf(bound) <= truth * (1 + mpmath.mpf(tightness))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 3), (5, 2), (2, 6), (6, 6)])
def test_never_below_sixty_digit_truth_and_tight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(3):
        check(random(shape, dtype, seed))


def special(name: str) -> Tensor:
    q = torch.from_numpy(np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0])
    return {
        "identity": torch.eye(5, dtype=torch.float64),
        "orthogonal": q,
        "semi-orthogonal": q[:, :3],
        "rank one": q[:, :1] @ q[:1] * 7,
        "all ones": torch.ones(6, 6, dtype=torch.float64),
        "all equal thirds": torch.full((5, 3), 1 / 3, dtype=torch.float64),
        "graded": torch.diag(10.0 ** -torch.arange(0, 18, 3, dtype=torch.float64)),
        "nearly equal": torch.diag(1 + 1e-15 * torch.arange(5, dtype=torch.float64)),
        "jordan": torch.diag(torch.ones(5, dtype=torch.float64), 1) + torch.eye(6, dtype=torch.float64),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "identity",
        "orthogonal",
        "semi-orthogonal",
        "rank one",
        "all ones",
        "all equal thirds",
        "graded",
        "nearly equal",
        "jordan",
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e150, 1e-150, 1e300, 1e-300])
def test_structured_matrices_at_any_scale(name: str, scale: float) -> None:
    check(special(name) * scale)


@pytest.mark.parametrize("value", [5e-324, 1e-310, 2.0**-1022, 1e-200, 1e200, 1.5e308])
def test_subnormal_and_huge_entries(value: float) -> None:
    check(torch.tensor([[value]], dtype=torch.float64), 1e-10 if value > 1e-310 else 2.0)
    check(torch.tensor([[value, 0.0], [0.0, -value]], dtype=torch.float64), 1e-10 if value > 1e-310 else 2.0)


def test_a_subnormal_matrix_is_bounded() -> None:
    a = torch.full((3, 4), 5e-324, dtype=torch.float64)
    assert mpmath.mpf(float(spectral_norms(a))) >= exact_norm(a)
    tiny = torch.full((3, 4), 1e-40, dtype=torch.float32)
    check(tiny)


def test_a_norm_beyond_the_largest_number_is_infinite() -> None:
    assert float(spectral_norms(torch.full((2, 2), 1.7e308, dtype=torch.float64))) == math.inf
    complex_ = torch.full((2, 2), 1.7e308 + 1.7e308j, dtype=torch.complex128)
    assert float(spectral_norms(complex_)) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_what_is_not_finite_is_infinite_and_does_not_spread(bad: float, dtype: torch.dtype) -> None:
    a = random((3, 4, 5), dtype)
    alone = spectral_norms(a)
    a[1, 2, 3] = bad
    norms = spectral_norms(a)
    assert norms[1] == math.inf
    assert torch.equal(norms[[0, 2]], alone[[0, 2]])
    assert spectral_norm(a.requires_grad_()).item() == math.inf


def test_zero_is_exactly_zero() -> None:
    assert spectral_norms(torch.zeros(2, 3, 4)).tolist() == [0.0, 0.0]
    assert spectral_norms(torch.zeros(2, 2, dtype=torch.complex64)).item() == 0.0
    for dtype in (torch.float32, torch.complex64):
        zero = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
        bound = spectral_norm(zero)
        bound.backward()
        assert (bound.item(), bound.dtype) == (0.0, torch.float64)
        assert zero.grad is not None and not zero.grad.any()  # noqa: PT018


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 5),
    n=st.integers(1, 5),
    data=st.data(),
    exponent=st.integers(-40, 40),
    complex_=st.booleans(),
)
def test_never_below_for_adversarial_entries(
    m: int, n: int, data: st.DataObject, exponent: int, complex_: bool
) -> None:
    number = st.floats(-8, 8, allow_subnormal=False) | st.sampled_from([0.0, 1.0, -1.0, 1 / 3, 1 + UNIT * 2])
    count = m * n * (2 if complex_ else 1)
    entries = torch.tensor(data.draw(st.lists(number, min_size=count, max_size=count)), dtype=torch.float64)
    entries = entries * 2.0**exponent
    a = torch.view_as_complex(entries.reshape(m, n, 2)) if complex_ else entries.reshape(m, n)
    bound, truth = float(spectral_norms(a)), exact_norm(a)
    assert mpmath.mpf(bound) >= truth
    # Below the normal range a number has fewer places: the bound may be one subnormal step above.
    assert mpmath.mpf(bound) <= truth * (1 + mpmath.mpf("1e-10")) + mpmath.mpf(2) ** -1074


@pytest.mark.parametrize("shape", [(64, 64), (200, 30), (30, 200), (1, 500)])
def test_larger_matrices_against_numpy(shape: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float64, torch.complex128):
        a = random(shape, dtype)
        truth = np.linalg.norm(to_double(a).numpy(), 2)
        assert truth * (1 - 1e-13) <= float(spectral_norms(a)) <= truth * (1 + 1e-10)


def none_found(gram: np.ndarray, **_: object) -> tuple[np.ndarray, np.ndarray]:
    return np.empty(0), np.empty((len(gram), 0))


@pytest.mark.parametrize("lapack", [None, none_found, Mock(side_effect=np.linalg.LinAlgError)])
def test_singular_values_that_all_coincide(lapack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of one such matrix in a dozen LAPACK finds no eigenvalue when it is asked for the last one alone.
    if lapack is not None:
        monkeypatch.setattr(norms, "eigh", lapack)
    for seed in range(48 if lapack is None else 3):
        a = torch.linalg.qr(random((200, norms.ALONE + seed), seed=seed))[0]
        assert 1 - 1e-14 <= float(spectral_norm(a)) <= 1 + (1e-7 if norms.MANY == 3 else 1.5e-15 * a.numel())


def test_batches_chunks_and_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    a = random((3, 4, 5, 6))
    whole = spectral_norms(a)
    assert whole.shape == (3, 4)
    assert whole.dtype == torch.float64
    monkeypatch.setattr("lipkit.proof.norms._CHUNK_BYTES", 1)
    assert torch.allclose(spectral_norms(a), whole, rtol=1e-11)
    assert torch.allclose(spectral_norms(a.mT), whole, rtol=1e-11)
    assert torch.allclose(spectral_norms(torch.complex(a, a).conj()), whole * math.sqrt(2), rtol=1e-11)
    empty = spectral_norms(torch.zeros(0, 2, 2))
    assert (empty.shape, empty.dtype) == ((0,), torch.float64)


@pytest.mark.parametrize(
    "bad", [torch.zeros(3), torch.zeros(2, 0), torch.zeros(0, 2), torch.ones(2, 2).long(), torch.ones(2, 2).bool()]
)
def test_refuses_what_is_no_matrix(bad: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"expected .* got"):
        spectral_norms(bad)
    with pytest.raises(ShapeError, match=r"expected one matrix or more, got shape \(0, 2, 2\)"):
        spectral_norm(torch.zeros(0, 2, 2))


def test_the_largest_of_a_batch_and_its_gradient() -> None:
    a = random((4, 5, 3)).requires_grad_()
    bound = spectral_norm(a)
    assert bound == spectral_norms(a).max()
    (grad,) = torch.autograd.grad(bound, a)
    i = int(spectral_norms(a).argmax())
    u, _, vh = np.linalg.svd(a.detach()[i].numpy())
    assert np.abs(grad[i].numpy() - np.outer(u[:, 0], vh[0])).max() < 1e-9
    assert int((grad.flatten(1).norm(dim=1) > 0).sum()) == 1


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1.0, 1e170, 1e300])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (1, 1)])
def test_gradient_at_any_scale(scale: float, shape: tuple[int, int]) -> None:
    a = (random(shape) * scale).requires_grad_()
    (grad,) = torch.autograd.grad(spectral_norm(a), a)
    u, _, vh = np.linalg.svd(a.detach().numpy() / scale)
    assert np.abs(grad.numpy() - np.outer(u[:, 0], vh[0])).max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 20), (20, 3), (12, 12), (64, 90), (90, 64)])
def test_quick_norm_is_never_below_and_tight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed, scale in enumerate((1.0, 1e-20, 1e15)):
        a = random(shape, dtype, seed) * scale
        truth = np.linalg.norm(to_double(a).numpy() / scale, 2) * scale
        assert truth * (1 - 1e-13) <= float(quick_spectral_norm(a).bound) <= truth * 1.003


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    side=st.integers(9, 14),
    values=st.lists(st.sampled_from([0.0, 1e-9, 0.3, 0.999, 1.0, 7.0]), min_size=9),
    skew=st.booleans(),
)
def test_quick_norm_with_singular_values_that_coincide(side: int, values: list[float], skew: bool) -> None:
    u, v = (torch.linalg.qr(random((side, side), seed=seed))[0] for seed in (1, 2))
    a = (u * torch.tensor((values * 2)[:side], dtype=torch.float64)) @ v.mT
    a = a - a.mT if skew else a
    truth = np.linalg.norm(a.numpy(), 2)
    assert truth * (1 - 1e-13) <= float(quick_spectral_norm(a).bound) <= truth * 1.051 + 1e-300


def test_quick_norm_where_the_steps_miss_the_largest_eigenvalue(monkeypatch: pytest.MonkeyPatch) -> None:
    a = random((40, 60))
    truth = np.linalg.norm(a.numpy(), 2)
    low = torch.tensor(1.0), torch.ones(40) / math.sqrt(40)
    monkeypatch.setattr(norms, "_lanczos", lambda *rest, **options: low)
    bound, u, v, _ = quick_spectral_norm(a)
    assert truth * (1 - 1e-13) <= float(bound) <= truth * (1 + 1e-9)
    assert float(u @ a @ v) == pytest.approx(truth)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_quick_norm_of_zero_and_of_what_is_not_finite(bad: float) -> None:
    wrong = random((20, 30), torch.float32)
    wrong[3, 4] = bad
    for matrix, bound in ((torch.zeros(20, 30), 0.0), (wrong, math.inf)):
        for found in (quick_spectral_norm(matrix), quick_norm_estimate(matrix)):
            assert (float(found.bound), float(found.ratio)) == (bound, 0.0)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e38])
@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_vectors_of_the_quick_norm(shape: tuple[int, int], scale: float) -> None:
    left, _, right = np.linalg.svd(random(shape).numpy(), full_matrices=False)
    exact = (left * np.geomspace(1.0, 0.1, 30)) @ right
    a = torch.tensor(exact * scale)
    bound, u, v, ratio = quick_spectral_norm(a)
    # Float32 Lanczos steps end at 1e-3.
    assert np.abs(np.outer(u, v) - np.outer(left[:, 0], right[0])).max() < 0.02
    assert float(ratio * (u @ a @ v)) == pytest.approx(float(bound), rel=1e-9)


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(0, 3), torch.ones(2, 2) * 1j, torch.ones(2, 2).long()])
def test_quick_norm_refuses_what_is_no_real_matrix(bad: Tensor) -> None:
    with pytest.raises(ShapeError, match="expected a real matrix"):
        quick_spectral_norm(bad)


def test_complex_gradient_against_finite_differences() -> None:
    a = random((3, 4), torch.complex128).requires_grad_()
    (grad,) = torch.autograd.grad(spectral_norm(a), a)
    step = random((3, 4), torch.complex128, 1)
    h = 1e-6
    with torch.no_grad():
        slope = (np.linalg.norm((a + h * step).numpy(), 2) - np.linalg.norm((a - h * step).numpy(), 2)) / (2 * h)
    assert abs(float((grad.conj() * step).sum().real) - slope) < 1e-7


def test_no_gradient_where_none_is_asked_for() -> None:
    a = random((2, 2)).requires_grad_()
    with torch.no_grad():
        assert not spectral_norm(a).requires_grad
    assert not spectral_norms(a).requires_grad


def test_scale_to_keeps_the_value_and_the_relative_gradient() -> None:
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    y = scale_to(torch.tensor(10.0, dtype=torch.float64), x**2)
    assert y.item() == 10.0
    assert torch.autograd.grad(y, x)[0].item() == pytest.approx(10.0 * 2 / 3)
    assert scale_to(torch.tensor(1.0), torch.tensor(0.0)).item() == 1.0


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-1022, 1024)
    assert power_of_two(exponents).tolist() == [math.ldexp(1.0, int(e)) for e in exponents]


def test_rounding_constants() -> None:
    for n in (1, 10, 10**6):
        assert Fraction(gamma(n)) >= Fraction(n) * Fraction(UNIT) / (1 - n * Fraction(UNIT))
        assert gamma(n) < 1.02 * n * UNIT
    value = torch.tensor(1 / 3, dtype=torch.float64)
    assert up(value, 0) > value
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert to_double(torch.tensor(0.1, dtype=dtype)).item() == torch.tensor(0.1, dtype=dtype).item()


@pytest.mark.thorough
@given(st.floats(0, 1e150), st.floats(0, 1e150))
def test_products_are_rounded_up_only_if_they_are_rounded(a: float, b: float) -> None:
    got = float(multiply_up(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)))
    exact = Fraction(a) * Fraction(b)
    assert Fraction(got) >= exact
    assert got == a * b if Fraction(a * b) == exact else got <= a * b * (1 + 1e-14) + 1e-323


@pytest.mark.thorough
@given(st.floats(0, 1e308))
def test_reciprocal_is_rounded_up(value: float) -> None:
    got = reciprocal_up(value)
    if math.isinf(got):
        assert value < 1e-307
    else:
        assert Fraction(got) * Fraction(value) >= 1
        assert Fraction(math.nextafter(got, 0)) * Fraction(value) < 1
    assert reciprocal_up(math.nan) == math.inf
