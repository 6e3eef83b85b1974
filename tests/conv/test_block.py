"""Block convolution against composed convolutions, BCOP kernels against the product of their factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lipkit.conv import bcop_kernel, block_convolve
from lipkit.conv.block import two_taps
from lipkit.errors import ShapeError

SIZES = [(1, 1), (2, 2), (3, 3), (4, 4), (1, 3), (5, 2)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def orthonormal(*shape: int) -> torch.Tensor:
    rows, cols = shape[-2:]
    q = torch.linalg.qr(torch.randn(*shape[:-2], max(rows, cols), min(rows, cols), dtype=torch.float64)).Q
    return q if rows >= cols else q.mT


def polynomial(kernel: torch.Tensor, z1: complex, z2: complex) -> np.ndarray:
    """F(z1, z2), term by term."""
    total = np.zeros(kernel.shape[:2], dtype=complex)
    for i in range(kernel.shape[2]):
        for j in range(kernel.shape[3]):
            total += kernel[:, :, i, j].numpy() * z1**i * z2**j
    return total


def points() -> list[tuple[complex, complex]]:
    angles = np.random.default_rng(1).uniform(0, 2 * np.pi, (6, 2))
    return [(complex(a), complex(b)) for a, b in np.exp(1j * angles)]


def test_block_convolution_is_composition() -> None:
    a, b = torch.randn(4, 3, 2, 3, dtype=torch.float64), torch.randn(3, 2, 3, 1, dtype=torch.float64)
    x = torch.randn(2, 2, 8, 9, dtype=torch.float64)
    torch.testing.assert_close(F.conv2d(x, block_convolve(a, b)), F.conv2d(F.conv2d(x, b), a))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dim", [2, 3])
def test_two_taps_is_block_convolution_with_the_projector_kernel(dim: int, swap: bool) -> None:
    kernel, v = torch.randn(5, 3, 2, 3, dtype=torch.float64), orthonormal(5, 2)
    p = v @ v.mT
    taps = [p, torch.eye(5, dtype=torch.float64) - p]
    pair = torch.stack(taps[::-1] if swap else taps, -1)
    pair = pair[:, :, None, :] if dim == 3 else pair[:, :, :, None]
    torch.testing.assert_close(two_taps(kernel, v, dim, swap), block_convolve(pair, kernel))


@pytest.mark.parametrize("channels", [(5, 5), (6, 3), (3, 6), (4, 1)], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_symbol_is_semi_orthogonal_everywhere_on_the_torus(size: tuple[int, int], channels: tuple[int, int]) -> None:
    c = max(channels)
    kernel = bcop_kernel(orthonormal(*channels), orthonormal(sum(size) - 2, c, c // 2), size)
    assert kernel.shape == (*channels, *size)
    for z1, z2 in points():
        values = np.linalg.svd(polynomial(kernel, z1, z2), compute_uv=False)
        np.testing.assert_allclose(values, 1, atol=1e-13)


def test_symbol_is_the_product_of_the_documented_factors() -> None:
    h, v = orthonormal(4, 2), orthonormal(5, 4, 2)
    kernel = bcop_kernel(h, v, (4, 3))
    eye = np.eye(4)
    for z1, z2 in points():
        product = h.numpy().astype(complex)
        # Axes alternate while both have taps left; the first and third factor of an axis have their taps exchanged.
        for one, (z, swap) in zip(v.numpy(), [(z1, 1), (z2, 1), (z1, 0), (z2, 0), (z1, 1)], strict=True):
            p = one @ one.T
            near, far = (eye - p, p) if swap else (p, eye - p)
            product = (near + far * z) @ product
        np.testing.assert_allclose(polynomial(kernel, z1, z2), product, atol=1e-14)


@pytest.mark.parametrize("scale", [0.0, 0.5, 0.95, 1.0])
def test_a_contraction_even_without_projectors(scale: float) -> None:
    h, v = orthonormal(6, 6), orthonormal(4, 6, 3) * scale
    kernel = bcop_kernel(h, v, (3, 3))
    norms = [np.linalg.norm(polynomial(kernel, *z), 2) for z in points()]
    assert max(norms) <= 1 + 1e-13
    assert scale not in (0.0, 1.0) or min(norms) >= 1 - 1e-13


def test_norm_bound_for_large_factors_is_attained() -> None:
    # lambda = s^2 > 1: at z = -1 the factor has the eigenvalue 2 lambda - 1.
    s = 1.2
    kernel = bcop_kernel(torch.eye(2, dtype=torch.float64), torch.tensor([[[s], [0.0]]], dtype=torch.float64), (2, 1))
    assert np.isclose(np.linalg.norm(polynomial(kernel, -1, 1), 2), 2 * s**2 - 1)


def test_no_projector_is_the_matrix_at_the_centre_tap() -> None:
    for size in SIZES:
        kernel = bcop_kernel(torch.eye(2), torch.zeros(sum(size) - 2, 2, 0), size)
        expected = torch.zeros(2, 2, *size)
        expected[:, :, (size[0] - 1) // 2, (size[1] - 1) // 2] = torch.eye(2)
        assert torch.equal(kernel, expected)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"a.shape\[1\] == b.shape\[0\], got \(1, 2, 1, 1\) and \(3, 1, 1, 1\)"):
        block_convolve(torch.zeros(1, 2, 1, 1), torch.zeros(3, 1, 1, 1))
    with pytest.raises(ShapeError, match=r"expected shapes \(m, n\) and \(4, 3, r\), got \(2, 3\) and \(3, 3, 1\)"):
        bcop_kernel(torch.zeros(2, 3), torch.zeros(3, 3, 1), (3, 3))
