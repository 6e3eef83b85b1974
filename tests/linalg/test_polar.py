"""The polar factor: against scipy, with a derivative that repeated singular values do not break."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg import bjorck, orthogonality_residual, polar


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (7, 3), (3, 7), (2, 6, 4)])
def test_is_the_polar_factor(shape, dtype):
    torch.manual_seed(0)
    w = torch.randn(shape, dtype=dtype)
    q = polar(w)
    for one, reference in zip(q.reshape(-1, *shape[-2:]), w.reshape(-1, *shape[-2:]), strict=True):
        factor, _ = scipy.linalg.polar(reference.numpy())
        assert np.abs(one.resolve_conj().numpy() - factor).max() < 500 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "w",
    [torch.zeros(4, 3), torch.ones(5, 5), torch.diag(torch.tensor([1.0, 1e-20, 0.0])), 1e30 * torch.eye(2)],
    ids=["zero", "rank 1", "nearly singular", "large"],
)
def test_is_semi_orthogonal_for_every_matrix(w):
    w = w.requires_grad_()
    q = polar(w)
    (q * torch.linspace(-1, 1, q.numel()).reshape(q.shape)).sum().backward()
    assert float(orthogonality_residual(q.detach())) < 1e-5
    assert torch.isfinite(w.grad).all()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_with_repeated_singular_values(dtype):
    torch.manual_seed(1)
    repeated = torch.linalg.qr(torch.randn(5, 3, dtype=dtype))[0]
    for w in (
        torch.randn(4, 4, dtype=dtype),
        torch.randn(2, 5, 3, dtype=dtype),
        torch.randn(3, 5, dtype=dtype),
        repeated,
        2 * repeated.mH.contiguous(),
        torch.eye(3, dtype=dtype),
    ):
        assert torch.autograd.gradcheck(polar, w.clone().requires_grad_(), fast_mode=True)


def test_gradient_agrees_with_the_differentiated_iteration():
    torch.manual_seed(2)
    a = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(6, 4, dtype=torch.float64)
    (one,) = torch.autograd.grad((polar(a) * direction).sum(), a)
    (two,) = torch.autograd.grad((bjorck(a, 40) * direction).sum(), a)
    assert (one - two).abs().max() < 1e-10


def test_a_second_derivative_is_refused_rather_than_wrong():
    a = torch.eye(3, dtype=torch.float64).mul(2).requires_grad_()
    direction = torch.arange(9, dtype=torch.float64).reshape(3, 3)
    (g,) = torch.autograd.grad((polar(a) * direction).sum(), a, create_graph=True)
    with pytest.raises(OptionError, match="expected a first derivative, got a second one"):
        (g.square().sum() + a.square().sum()).backward()


def test_a_gradient_penalty_on_the_input_is_no_second_derivative():
    w = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad((x @ polar(w)).tanh().sum(), x, create_graph=True)
    g.square().sum().backward()
    assert float(w.grad.abs().max()) > 0


def test_autocast_around_the_backward_pass_rounds_nothing():
    w = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q = polar(w)
    (exact,) = torch.autograd.grad(q, w, torch.ones_like(q), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (given,) = torch.autograd.grad(q, w, torch.ones_like(q))
    assert torch.equal(given, exact)


def test_half_precision_is_widened():
    assert polar(torch.eye(3, dtype=torch.float16)).dtype == torch.float32


def test_refusals():
    with pytest.raises(ShapeError, match="expected a matrix"):
        polar(torch.ones(3))
