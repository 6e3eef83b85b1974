"""Björck: against scipy's polar factor, a contraction however early it stops, safe at zero and at the extremes."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.utils.flop_counter import FlopCounterMode

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg import bjorck, orthogonality_residual
from lipkit.linalg.bjorck import into_unit_ball, inverse_root_coefficients

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
SHAPES = [(1, 1), (5, 5), (7, 3), (3, 7), (2, 6, 4), (2, 1, 3, 5)]


def norms(q: torch.Tensor) -> np.ndarray:
    return np.linalg.svd(q.detach().resolve_conj().numpy().astype(np.complex128), compute_uv=False)


def allowed(q: torch.Tensor) -> float:
    return 8 * max(q.shape[-2:]) * torch.finfo(q.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_converges_to_the_polar_factor(shape, dtype):
    torch.manual_seed(0)
    w = torch.randn(shape, dtype=dtype)
    q = bjorck(w, iterations=40)
    for one, reference in zip(q.reshape(-1, *shape[-2:]), w.reshape(-1, *shape[-2:]), strict=True):
        factor, _ = scipy.linalg.polar(reference.numpy())
        assert np.abs(one.resolve_conj().numpy() - factor).max() < 1e3 * torch.finfo(dtype).eps
    assert float(orthogonality_residual(q).max()) < allowed(q)


@pytest.mark.parametrize("order", [1, 2, 3, 6])
@pytest.mark.parametrize("iterations", [1, 2, 5, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_is_a_contraction_at_every_stage(order, iterations, dtype):
    torch.manual_seed(1)
    cases = [
        torch.randn(40, 30, dtype=dtype),
        torch.randn(30, 2, dtype=dtype) @ torch.randn(2, 40, dtype=dtype),
        torch.ones(64, 64, dtype=dtype),
        torch.diag(torch.logspace(0, -12, 16, dtype=torch.float64)).to(dtype),
        torch.randn(200, 3, dtype=dtype) @ torch.randn(3, 60, dtype=dtype),  # tall, of rank 3
        torch.linalg.qr(torch.randn(90, 16, dtype=dtype))[0] * torch.logspace(0, -12, 16).to(dtype),
    ]
    for w in cases:
        q = bjorck(w, iterations, order)
        assert norms(q).max() <= 1 + allowed(q)


@pytest.mark.thorough
def test_singular_values_grow_monotonically_towards_one():
    w = torch.diag(torch.tensor([2.0, 0.7, 0.01, 1e-5], dtype=torch.float64))
    last = np.zeros(4)
    for iterations in range(1, 45):
        now = np.sort(norms(bjorck(w, iterations)))
        assert (now >= last - 1e-14).all()
        last = now
    assert abs(last.min() - 1) < 1e-12


def test_higher_order_needs_fewer_steps():
    torch.manual_seed(2)
    w = torch.randn(32, 32, dtype=torch.float64)
    residuals = [float(orthogonality_residual(bjorck(w, 6, order))) for order in (1, 2, 3, 4)]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[-1] < 0.5 * residuals[0]


def test_coefficients_are_the_series_of_the_inverse_root():
    q = 0.3
    total = sum(c * q**j for j, c in enumerate(inverse_root_coefficients(40)))
    assert abs(total - (1 - q) ** -0.5) < 1e-14


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e18, 1e30])
def test_the_scale_of_the_argument_does_not_matter(scale):
    torch.manual_seed(3)
    w = torch.randn(12, 9)
    assert (bjorck(w * scale) - bjorck(w)).abs().max() < 1e-5


def test_division_brings_the_norm_to_at_most_one_and_not_far_below():
    torch.manual_seed(4)
    for w in (torch.randn(200, 150, dtype=torch.float64), torch.ones(50, 50, dtype=torch.float64)):
        top = norms(into_unit_ball(w)[0]).max()
        assert 150 ** (-1 / 8) <= top <= 1 + 1e-12
    q = torch.linalg.qr(torch.randn(20, 8, dtype=torch.float64))[0]
    assert abs(norms(into_unit_ball(3 * q)[0]).max() - 1) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("iterations", [1, 3, 8])
def test_gradients(dtype, iterations):
    torch.manual_seed(5)
    repeated = torch.linalg.qr(torch.randn(5, 3, dtype=dtype))[0]
    for w in (torch.randn(4, 4, dtype=dtype), torch.randn(2, 3, 5, dtype=dtype), 2 * repeated):
        assert torch.autograd.gradcheck(lambda a: bjorck(a, iterations), w.clone().requires_grad_(), fast_mode=True)
        assert torch.autograd.gradcheck(lambda a: bjorck(a, iterations, 3), w.clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (2, 4)])
def test_zero_has_a_finite_output_and_gradient(shape):
    w = torch.zeros(shape, requires_grad=True)
    q = bjorck(w)
    (q * torch.arange(1.0, q.numel() + 1).reshape(shape)).sum().backward()
    assert float(q.detach().abs().max()) == 0
    assert torch.isfinite(w.grad).all()
    assert float(w.grad.abs().min()) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype):
    w = torch.eye(3, dtype=dtype) * 5
    assert bjorck(w).dtype == torch.float32
    assert torch.equal(bjorck(w), torch.eye(3))


def test_refusals():
    with pytest.raises(OptionError, match=r"iterations: expected an integer of at least 1, got 0"):
        bjorck(torch.eye(2), iterations=0)
    with pytest.raises(OptionError, match=r"order: expected an integer of at least 1, got 1.5"):
        bjorck(torch.eye(2), order=1.5)
    with pytest.raises(OptionError, match="got True"):
        bjorck(torch.eye(2), iterations=True)
    with pytest.raises(ShapeError, match=r"expected a matrix .* got shape \(3,\)"):
        bjorck(torch.ones(3))
    with pytest.raises(ShapeError, match=r"expected a floating or complex dtype, got torch.int64"):
        bjorck(torch.ones(3, 3, dtype=torch.int64))


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("iterations", [1, 2, 5, 9, 12])
@pytest.mark.parametrize("shape", [(12, 12), (40, 9), (9, 40), (3, 30, 10)])
def test_every_step_is_the_published_one(shape, iterations, order):
    """Steps on the Gram matrix are the same polynomials in exact arithmetic: against numpy, step by step."""
    torch.manual_seed(6)
    w = torch.randn(shape, dtype=torch.float64)
    w[..., 0, :] *= 0.01
    tall = w if shape[-2] >= shape[-1] else w.mT
    x = into_unit_ball(tall)[0].numpy()
    for _ in range(iterations):
        q = np.eye(x.shape[-1]) - np.swapaxes(x, -1, -2) @ x
        x = sum(c * x @ np.linalg.matrix_power(q, j) for j, c in enumerate(inverse_root_coefficients(order)))
    found = bjorck(w, iterations, order)
    np.testing.assert_allclose((found if tall is w else found.mT).numpy(), x, rtol=0, atol=1e-13)


def _products(w: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        bjorck(w)
    return counter.get_total_flops()


def test_it_ends_when_nothing_changes_any_more():
    torch.manual_seed(7)
    q = torch.linalg.qr(torch.randn(40, 40))[0]
    one_step = 2 * 2 * 40**3  # two products
    ball = 2 * 2 * 40**3
    assert _products(q) == ball + 2 * one_step
    hard = q.clone()
    hard[0] *= 1e-6
    assert _products(hard) == ball + 20 * one_step


def test_tall_matrices_are_multiplied_rarely():
    torch.manual_seed(8)
    w = torch.randn(300, 20)
    tall, small = 2 * 300 * 20**2, 2 * 20**3
    assert _products(w) <= 7 * tall + (1 + 4 * 8) * small
    assert float(orthogonality_residual(bjorck(w))) < allowed(w)


@pytest.mark.parametrize("shape", [(6, 6), (20, 5)])
def test_vmap_takes_the_same_path(shape):
    torch.manual_seed(9)
    w = torch.randn(4, *shape, dtype=torch.float64)
    together = torch.func.vmap(bjorck)(w)
    for one, alone in zip(together, w, strict=True):
        torch.testing.assert_close(one, bjorck(alone), rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(24, 24), (96, 24)])
@pytest.mark.parametrize("condition", [1.0, 30.0, 1000.0])
def test_gradient_is_that_of_the_polar_factor(shape, condition):
    """Where the iteration ends early: against the derivative of W (W^* W)^(-1/2), in float64."""
    torch.manual_seed(10)
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    exact = (u * torch.logspace(0, -np.log10(condition), 24, dtype=torch.float64)) @ vh
    given = torch.randn(shape, dtype=torch.float64)
    w = exact.float().requires_grad_()
    bjorck(w, 30).backward(given.float())
    reference = exact.float().double().requires_grad_()
    polar = reference @ _inverse_root(reference.mT @ reference)
    polar.backward(given)
    error = (w.grad.double() - reference.grad).abs().max() / reference.grad.abs().max()
    assert float(error) < 2e-6 * condition


def _inverse_root(gram: torch.Tensor) -> torch.Tensor:
    """By a coupled iteration in float64, whose derivative needs no distinct eigenvalues."""
    scale = torch.linalg.matrix_norm(gram.detach(), 2)
    y, z = gram / scale, torch.eye(len(gram), dtype=gram.dtype)
    for _ in range(40):
        t = 1.5 * torch.eye(len(gram), dtype=gram.dtype) - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    return z / scale.sqrt()
