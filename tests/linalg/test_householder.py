"""Householder: the closed form against a loop of reflections in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit.errors import ShapeError
from lipkit.linalg import householder, orthogonality_residual


def reflections(w: np.ndarray) -> np.ndarray:
    """The product of the reflections, one after the other, cropped to n columns."""
    m, n = w.shape
    q = np.eye(m, dtype=w.dtype)
    for column in w.T:
        size = np.vdot(column, column).real
        if size > 0:
            q = q @ (np.eye(m) - 2 * np.outer(column, column.conj()) / size)
    return q[:, :n]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (7, 3), (3, 7), (2, 6, 4), (40, 40)])
def test_is_the_product_of_reflections(shape, dtype):
    torch.manual_seed(0)
    w = torch.randn(shape, dtype=dtype)
    q = householder(w)
    for one, matrix in zip(q.reshape(-1, *shape[-2:]), w.reshape(-1, *shape[-2:]), strict=True):
        wide = shape[-2] < shape[-1]
        a = matrix.numpy().astype(np.complex128)
        expected = reflections(a.conj().T).conj().T if wide else reflections(a)
        assert np.abs(one.resolve_conj().numpy() - expected).max() < 2e3 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "w",
    [
        torch.zeros(5, 3),
        torch.ones(64, 64),
        torch.outer(torch.arange(1.0, 33), torch.ones(32)),
        torch.eye(4, 3) * 1e-30,
        torch.ones(3, 3) * 1e30,
    ],
    ids=["zero", "equal columns", "parallel columns", "tiny", "large"],
)
def test_is_semi_orthogonal_for_every_matrix(w):
    w = w.requires_grad_()
    q = householder(w)
    (q * torch.linspace(-1, 1, q.numel()).reshape(q.shape)).sum().backward()
    assert float(orthogonality_residual(q.detach())) < 1e-5
    assert torch.isfinite(w.grad).all()


def test_dependent_columns_do_not_raise_the_norm():
    torch.manual_seed(1)
    w = torch.randn(300, 5) @ torch.randn(5, 256)
    values = np.linalg.svd(householder(w).double().numpy(), compute_uv=False)
    assert values.max() <= 1 + 3e-6
    assert values.min() >= 1 - 3e-6


def test_a_zero_column_is_no_reflection():
    torch.manual_seed(2)
    w = torch.randn(5, 3, dtype=torch.float64)
    w[:, 1] = 0
    assert np.abs(householder(w).numpy() - reflections(w.numpy())).max() < 1e-14


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients(dtype):
    torch.manual_seed(3)
    repeated = torch.linalg.qr(torch.randn(5, 3, dtype=dtype))[0]
    for w in (
        torch.randn(4, 4, dtype=dtype),
        torch.randn(2, 5, 3, dtype=dtype),
        torch.randn(3, 5, dtype=dtype),
        repeated,
    ):
        assert torch.autograd.gradcheck(householder, w.clone().requires_grad_(), fast_mode=True)


def test_determinant_is_that_of_n_reflections():
    torch.manual_seed(4)
    for n in (2, 3, 6):
        assert abs(float(torch.linalg.det(householder(torch.randn(n, n, dtype=torch.float64)))) - (-1) ** n) < 1e-12


def test_refusals():
    with pytest.raises(ShapeError, match="expected a matrix"):
        householder(torch.ones(3))
