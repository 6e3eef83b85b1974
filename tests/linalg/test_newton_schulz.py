"""Newton-Schulz: equal to Björck where both converge, a contraction also where the Gram matrix loses digits."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg import bjorck, newton_schulz, orthogonality_residual


def norms(q: torch.Tensor) -> np.ndarray:
    return np.linalg.svd(q.detach().resolve_conj().numpy().astype(np.complex128), compute_uv=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(1, 1), (9, 4), (4, 9), (2, 12, 5), (40, 10)])
def test_converges_to_the_polar_factor(shape, dtype):
    torch.manual_seed(0)
    w = torch.randn(shape, dtype=dtype)
    q = newton_schulz(w)
    for one, reference in zip(q.reshape(-1, *shape[-2:]), w.reshape(-1, *shape[-2:]), strict=True):
        factor, _ = scipy.linalg.polar(reference.numpy())
        assert np.abs(one.resolve_conj().numpy() - factor).max() < 1e4 * torch.finfo(dtype).eps
    assert float(orthogonality_residual(q).max()) < 100 * torch.finfo(dtype).eps


def test_without_rounding_it_is_bjorck_with_one_more_step():
    torch.manual_seed(1)
    w = torch.randn(20, 6, dtype=torch.float64)
    for iterations in (1, 2, 4, 8):
        assert (newton_schulz(w, iterations) - bjorck(w, iterations + 1)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("iterations", [1, 3, 20, 80])
def test_is_a_contraction_for_the_worst_conditioned_matrices(dtype, iterations):
    torch.manual_seed(2)
    cases = [
        torch.randn(100, 2, dtype=dtype) @ torch.randn(2, 80, dtype=dtype),
        torch.randn(128, 128, dtype=dtype),
        torch.ones(64, 64, dtype=dtype),
        torch.diag(torch.logspace(0, -14, 32, dtype=torch.float64)).to(dtype),
    ]
    for w in cases:
        q = newton_schulz(w, iterations)
        assert torch.isfinite(q).all()
        assert norms(q).max() <= 1 + 8 * max(w.shape) * torch.finfo(dtype).eps


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_the_argument_does_not_matter(scale):
    torch.manual_seed(3)
    w = torch.randn(20, 5)
    assert (newton_schulz(w * scale) - newton_schulz(w)).abs().max() < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients(dtype):
    torch.manual_seed(4)
    repeated = torch.linalg.qr(torch.randn(5, 3, dtype=dtype))[0]
    for w in (torch.randn(4, 3, dtype=dtype), torch.randn(2, 3, 5, dtype=dtype), 2 * repeated):
        assert torch.autograd.gradcheck(lambda a: newton_schulz(a, 6), w.clone().requires_grad_(), fast_mode=True)


def test_zero_has_a_finite_output_and_gradient():
    w = torch.zeros(4, 2, requires_grad=True)
    q = newton_schulz(w)
    q.sum().backward()
    assert float(q.detach().abs().max()) == 0
    assert torch.isfinite(w.grad).all()


def test_half_precision_is_widened():
    assert newton_schulz(torch.eye(3, dtype=torch.bfloat16)).dtype == torch.float32


def test_refusals():
    with pytest.raises(OptionError, match=r"iterations: expected an integer of at least 1, got 0"):
        newton_schulz(torch.eye(2), iterations=0)
    with pytest.raises(ShapeError, match="expected a matrix"):
        newton_schulz(torch.ones(0, 3))
