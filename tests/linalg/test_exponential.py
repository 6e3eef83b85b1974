"""The exponential against scipy, the Taylor polynomial against its own sum, bounds against dense sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.exponential import (
    SMALLEST,
    exponential,
    gram_norm,
    schatten_bound,
    skew_bound,
    skew_part,
    taylor,
    taylor_range,
)
from lipkit.linalg.matrices import PANEL
from lipkit.linalg.skew_polynomial import taylor_exponential

LARGE = 4 * PANEL + 3  # products by panels
SHAPES = [(4, 4), (7, 3), (3, 7), (1, 5), (5, 1), (1, 1)]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def singular_values(q: torch.Tensor) -> np.ndarray:
    return np.linalg.svd(q.to(torch.complex128).numpy(), compute_uv=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exponential_is_semi_orthogonal_and_scipys(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = random(2, *shape, dtype=dtype)
    q = exponential(w)
    assert q.shape == w.shape
    assert q.dtype == dtype
    eps = torch.finfo(dtype).eps
    np.testing.assert_allclose(singular_values(q), 1, atol=100 * eps)
    side = max(shape)
    for one, made in zip(w, q, strict=True):
        padded = np.zeros((side, side), dtype=complex)
        padded[: shape[0], : shape[1]] = one.numpy()
        reference = scipy.linalg.expm(padded - padded.conj().T)[: shape[0], : shape[1]]
        np.testing.assert_allclose(made.numpy(), reference, atol=200 * eps)


def test_exact_exponential_of_large_float32_matrices_stays_orthogonal() -> None:
    values = singular_values(exponential(30 * random(64, 64, dtype=torch.float32)))
    assert values.min() > 1 - 1e-4
    assert values.max() < 1 + 1e-4
    values = singular_values(exponential(random(64, 64, dtype=torch.float32) / 8))
    assert values.min() > 1 - 1e-5
    assert values.max() < 1 + 1e-5


def test_every_rotation_of_the_plane_is_reached() -> None:
    angle = torch.linspace(-3.1, 3.1, 9, dtype=torch.float64)
    w = torch.zeros(9, 2, 2, dtype=torch.float64)
    w[:, 1, 0] = angle
    q = exponential(w)
    torch.testing.assert_close(torch.atan2(q[:, 1, 0], q[:, 0, 0]), angle)


def test_skew_part_is_skew_to_the_last_bit() -> None:
    for shape in SHAPES:
        a = skew_part(random(*shape, dtype=torch.complex64))
        assert a.shape == (max(shape), max(shape))
        assert torch.equal(a, -a.mH)


def test_half_precision_is_widened() -> None:
    for function in (exponential, taylor_exponential):
        assert function(random(3, 3, dtype=torch.float32).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("terms", range(1, 17))
def test_taylor_is_the_sum_of_powers(terms: int) -> None:
    a = random(2, 5, 5)
    expected = sum(np.linalg.matrix_power(a.numpy(), i) / math.factorial(i) for i in range(terms + 1))
    np.testing.assert_allclose(taylor(a, terms).numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("terms", "published"), [(1, 0.486), (2, 0.164), (3, 0.041), (4, 0.0083), (5, 0.0014), (10, 2.5e-8)]
)
def test_worst_truncation_error_at_norm_one(terms: int, published: float) -> None:
    # A rotation by 1 rad is the worst skew matrix of norm 1.
    a = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    error = np.linalg.norm(taylor(a, terms).numpy() - scipy.linalg.expm(a.numpy()), 2)
    assert error == pytest.approx(published, rel=0.05)
    assert error <= 1 / math.factorial(terms + 1) <= 1.06 * error


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(norm=st.floats(0, 4), terms=st.integers(1, 14))
def test_taylor_range_holds_and_is_attained_for_small_norms(norm: float, terms: int) -> None:
    low, high = taylor_range(norm, terms)
    theta = np.linspace(0, norm, 2001)
    values = np.abs(sum((1j * theta) ** i / math.factorial(i) for i in range(terms + 1)))
    slack = 1e-14 * math.exp(norm)
    assert low <= values.min() + slack
    assert values.max() <= high + slack
    assert abs(values - 1).max() <= norm ** (terms + 1) / math.factorial(terms + 1) + slack
    if norm <= 1:
        assert values.min() == pytest.approx(low, abs=1e-12)
        assert values.max() == pytest.approx(high, abs=1e-12)


def test_taylor_range_at_the_defaults_of_the_paper() -> None:
    assert taylor_range(1.0, 5)[0] == 1.0
    assert taylor_range(1.0, 5)[1] == pytest.approx(1.0009, abs=1e-5)
    assert 1 < taylor_range(1.0, 10)[1] < 1 + 2.1e-8
    assert taylor_range(1.0, 4)[1] == 1.0
    assert taylor_range(0.0, 1) == (1.0, 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("n", [2, 9, 64])
def test_schatten_bound_is_above_the_norm_and_close(n: int, scale: float, dtype: torch.dtype) -> None:
    a = scale * skew_part(random(3, n, n, dtype=dtype))
    norm = singular_values(a)[:, 0]
    bound = schatten_bound(a).numpy()
    assert (bound >= norm * (1 - 100 * torch.finfo(dtype).eps)).all()
    assert (bound <= norm * n ** (1 / 16) * (1 + 1e-5)).all()


def test_schatten_bound_of_equal_singular_values_is_its_worst_case() -> None:
    a = torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]])] * 8)
    assert float(schatten_bound(a)) == pytest.approx(16 ** (1 / 16), rel=1e-6)


@pytest.mark.parametrize("squarings", [3, 4, 5, 6])
@pytest.mark.parametrize("n", [2, 9, 64])
def test_the_bound_of_skew_matrices_counts_each_pair_once(n: int, squarings: int) -> None:
    for dtype in (torch.float64, torch.complex128):
        a = skew_part(random(3, n, n, dtype=dtype))
        angles = np.abs(np.linalg.eigvalsh(1j * a.numpy()))
        power = 2 ** (squarings + 1)
        counted = (angles**power).sum(-1) / (1 if dtype is torch.complex128 else 2)
        np.testing.assert_allclose(skew_bound(a, squarings).numpy(), counted ** (1 / power), rtol=1e-12)
        assert (skew_bound(a, squarings).numpy() >= angles.max(-1) * (1 - 1e-13)).all()
    for wrong in (2, 7, True, 4.0):
        with pytest.raises(OptionError, match="squarings: expected an integer from 3 to 6"):
            taylor_exponential(torch.eye(2), 5, wrong)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_random_matrices_turn_by_almost_one_radian() -> None:
    # The largest angle of the exponential, against 0.79 of the eighth power alone.
    w = torch.linalg.qr(random(2, 256, 256))[0]
    q = taylor_exponential(w, 10, 5).numpy()
    assert 0.95 < np.abs(np.angle(np.linalg.eigvals(q))).max(-1).min() <= 1


@pytest.mark.parametrize("terms", [1, 3, 5, 10])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_taylor_exponential_is_inside_its_range(shape: tuple[int, int], terms: int) -> None:
    low, high = taylor_range(1.0, terms)
    values = singular_values(taylor_exponential(random(8, *shape), terms))
    assert values.min() >= low - 1e-13
    assert values.max() <= high + 1e-13


def test_taylor_exponential_ignores_the_scale() -> None:
    w = random(2, 6, 4)
    torch.testing.assert_close(taylor_exponential(w, 5), taylor_exponential(1e6 * w, 5))
    assert (taylor_exponential(w) - taylor_exponential(-w)).norm() > 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("complex_", [False, True])
def test_gradients(shape: tuple[int, int], complex_: bool) -> None:
    w = random(2, *shape, dtype=torch.complex128 if complex_ else torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(exponential, w, fast_mode=True)
    assert torch.autograd.gradcheck(lambda w: taylor_exponential(w, 5), w, fast_mode=True)
    assert torch.autograd.gradcheck(lambda w: schatten_bound(skew_part(w)), w, fast_mode=True)


def by_definition(w: torch.Tensor, terms: int, squarings: int = 4) -> torch.Tensor:
    a = skew_part(w)
    scale = skew_bound(a, squarings).clamp_min(1e-12)
    return taylor(a / scale[..., None, None], terms)[..., : w.shape[-2], : w.shape[-1]]


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 6, 10])
@pytest.mark.parametrize("shape", [(2, 4, 4), (3, 2, 5, 3), (2, 4), (1, 1), (0, 3, 3)], ids=str)
def test_fewer_products_give_the_same_value_and_gradient(shape: tuple[int, ...], terms: int) -> None:
    w = random(*shape).requires_grad_()
    upstream = random(*shape, seed=1)
    squarings = 3 + terms % 4
    made, expected = taylor_exponential(w, terms, squarings), by_definition(w, terms, squarings)
    torch.testing.assert_close(made, expected, rtol=1e-13, atol=1e-13)
    found, wanted = (torch.autograd.grad(q, w, upstream)[0] for q in (made, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("shape", [(3, 256, 256), (1, 300, 271)], ids=str)
def test_large_matrices_by_panels(shape: tuple[int, ...]) -> None:
    # 256 rows are four panels of a product that is known to be symmetric; 300 end in a shorter one.
    w = random(*shape).requires_grad_()
    upstream = random(*shape, seed=1)
    made, expected = taylor_exponential(w, 5), by_definition(w, 5)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-13)
    found, wanted = (torch.autograd.grad(q, w, upstream)[0] for q in (made, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("scale", [0.0, 1e-14, 3e-13, 1e-12, 1e-5, 1e12])
def test_tiny_and_huge_matrices_in_float32(scale: float) -> None:
    # Below a norm of 1e-12 they are not scaled up to norm 1, and the scale has no gradient.
    w = (scale * random(2, 20, 20, dtype=torch.float32)).requires_grad_()
    upstream = random(2, 20, 20, dtype=torch.float32, seed=1)
    made = taylor_exponential(w, 5)
    double = w.detach().double().requires_grad_()
    expected = by_definition(double, 5)
    torch.testing.assert_close(made.double(), expected, rtol=0, atol=1e-5)
    (found,) = torch.autograd.grad(made, w, upstream)
    (wanted,) = torch.autograd.grad(expected, double, upstream.double())
    error = (found.double() - wanted).abs().max()
    assert float(error) <= 1e-4 * float(wanted.abs().max())


# The first forward-mode derivative makes torch script functions of its own, which it has deprecated.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_second_derivatives_forward_mode_and_function_transforms() -> None:
    w = random(2, 3, 2).requires_grad_()

    def f(w: torch.Tensor) -> torch.Tensor:
        return taylor_exponential(w, 5)

    assert torch.autograd.gradcheck(f, w, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, w, fast_mode=True)
    jacobians = torch.func.vmap(torch.func.jacrev(f))(w.detach())
    for one, jacobian in zip(w.detach(), jacobians, strict=True):
        torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(f, one))


@pytest.mark.parametrize("function", [exponential, taylor_exponential])
def test_zero_gives_the_identity_and_a_finite_gradient(function: object) -> None:
    assert callable(function)
    w = torch.zeros(2, 4, 3, requires_grad=True)
    q = function(w)
    assert torch.equal(q, torch.eye(4, 3).expand(2, 4, 3))
    (q * random(2, 4, 3, dtype=torch.float32)).sum().backward()
    assert w.grad is not None
    assert bool(w.grad.isfinite().all())


def test_refusals() -> None:
    with pytest.raises(OptionError, match="terms: expected an integer from 1 to 100, got 0"):
        taylor(torch.eye(2), 0)
    with pytest.raises(OptionError, match="norm: expected a finite number >= 0, got -1"):
        taylor_range(-1.0, 5)
    with pytest.raises(OptionError, match="got nan"):
        taylor_range(math.nan, 5)
    with pytest.raises(ShapeError, match=r"got shape \(3,\)"):
        exponential(torch.zeros(3))


def truth(a: torch.Tensor) -> float:
    return float(np.linalg.norm(a.double().numpy(), 2))


def matrix(kind: str, m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
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


def test_bad_shapes_of_the_gram_norm_are_named() -> None:
    with pytest.raises(ShapeError, match=r"a: expected a matrix"):
        gram_norm(torch.ones(3))
