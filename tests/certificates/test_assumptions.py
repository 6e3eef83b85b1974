"""What `docs/rounding.md` assumes of the libraries, on matrices for which faster algorithms are wrong entry by entry.

Every check is told apart from the algorithm it excludes: an emulation of that one fails it on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lipkit.bounds.gram_symbol import cholesky_succeeds, stored_entries

Matrix = NDArray[np.generic]
Product = Callable[..., Tensor]
# Sums in any order: gamma_(n + 1), and room for the reference and for one more rounding.
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.complex128: 2.0**-53, torch.complex64: 2.0**-24}

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="needs a longer format as reference")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def long(a: Tensor) -> Matrix:
    """The numbers in numpy's longest format, whose products go through no library."""
    return a.resolve_conj().numpy().astype(np.clongdouble if a.is_complex() else np.longdouble)


def parts(a: Matrix) -> tuple[Matrix, Matrix]:
    return np.abs(a.real), np.abs(a.imag)


def worst(found: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest error of an entry of a product, real and imaginary parts apart, in units of its allowance."""
    x, y = long(a), long(b)
    gap = long(found) - x @ y
    (xr, xi), (yr, yi) = parts(x), parts(y)
    terms = 2 * x.shape[1] + 2 if a.is_complex() else x.shape[1] + 1
    allowed = terms * UNIT[a.dtype]
    real = np.abs(gap.real) / (allowed * (xr @ yr + xi @ yi))
    if not a.is_complex():
        return float(real.max())
    return float(max(real.max(), (np.abs(gap.imag) / (allowed * (xr @ yi + xi @ yr))).max()))


def graded(n: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Factors whose rows and columns, and imaginary parts, have sizes far apart."""
    a, b = drawn(n, n, seed=seed), drawn(n, n, seed=seed + 1)
    step = 2.0 ** (-30 if UNIT[dtype] < 1e-12 else -14)
    grade = torch.where(torch.arange(n) < n // 2, 1.0, step).double()
    a, b = grade[:, None] * a, b * grade
    if dtype.is_complex:
        a = torch.complex(a, step * grade[:, None] * drawn(n, n, seed=seed + 2))
        b = torch.complex(b, step * drawn(n, n, seed=seed + 3) * grade)
    return a.to(dtype), b.to(dtype)


def strassen(a: Tensor, b: Tensor) -> Tensor:
    h = len(a) // 2
    a11, a12, a21, a22 = a[:h, :h], a[:h, h:], a[h:, :h], a[h:, h:]
    b11, b12, b21, b22 = b[:h, :h], b[:h, h:], b[h:, :h], b[h:, h:]
    m1, m2, m3 = (a11 + a22) @ (b11 + b22), (a21 + a22) @ b11, a11 @ (b12 - b22)
    m4, m5, m6 = a22 @ (b21 - b11), (a11 + a12) @ b22, (a21 - a11) @ (b11 + b12)
    m7 = (a12 - a22) @ (b21 + b22)
    top = torch.cat((m1 + m4 - m5 + m7, m3 + m5), 1)
    return torch.cat((top, torch.cat((m2 + m4, m1 - m2 + m3 + m6), 1)))


def three_products(a: Tensor, b: Tensor) -> Tensor:
    real, imaginary = a.real @ b.real, a.imag @ b.imag
    return torch.complex(real - imaginary, (a.real + a.imag) @ (b.real + b.imag) - real - imaginary)


DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [4, 32, 100])
def test_products_are_inner_products(dtype: torch.dtype, n: int) -> None:
    a, b = graded(n, dtype, n)
    ways: dict[str, Product] = {
        "matmul": torch.matmul,
        "batched": lambda a, b: torch.bmm(a[None].expand(3, -1, -1), b[None].expand(3, -1, -1))[1],
        "transposed": lambda a, b: (b.mT.contiguous() @ a.mT.contiguous()).mT,
        "adjoint": lambda a, b: a.mH.contiguous().mH @ b,
        "numpy": lambda a, b: torch.from_numpy(a.numpy() @ b.numpy()),
        "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    }
    if not dtype.is_complex:
        ways["linear"] = lambda a, b: F.linear(a, b.mT.contiguous())
        ways["convolution"] = lambda a, b: F.conv2d(a[:, :, None, None], b.mT[:, :, None, None])[:, :, 0, 0]
    for name, way in ways.items():
        assert worst(way(a, b), a, b) <= 1, name
    assert worst(strassen(a, b), a, b) > 100
    if dtype.is_complex:
        assert worst(three_products(a, b), a, b) > 100
    if dtype == torch.float32:
        assert worst((a.bfloat16() @ b.bfloat16()).float(), a, b) > 100


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_a_gram_matrix_is_one_of_inner_products(dtype: torch.dtype) -> None:
    # Columns of sizes far apart: the factors of a product of a matrix with its own adjoint.
    a = graded(96, dtype, 7)[0].mT.contiguous()
    assert worst(a.mH @ a, a.mH, a) <= 1
    assert worst(strassen(a.mH, a), a.mH, a) > 100


def steep(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Positive definite; the first 24 rows of its triangular factor have an inverse of 1e4 and more."""
    low = drawn(n, n, seed=seed) / n
    low[:24, :24] = -0.55 - 0.1 * drawn(24, 24, seed=seed).abs()
    low[24:, :24] = 0.3 * drawn(n - 24, 24, seed=seed)
    low = low.tril(-1) + torch.eye(n, dtype=torch.float64)
    if dtype.is_complex:
        turned = torch.exp(1j * drawn(n, seed=seed + 1))
        low = turned[:, None] * low * turned.conj()
    return (low @ low.mH).to(dtype)


def substituted(found: Tensor, h: Tensor) -> float:
    """The largest error of an entry of ``L L^*``, in units of what substitution allows."""
    low = long(found.tril())
    size = np.abs(low)
    terms = (4 if h.is_complex() else 1) * (len(h) + 2)
    gap = np.abs(low @ low.conj().T - long(h)) / (terms * UNIT[h.dtype] * (size @ size.T))
    return float(gap[np.tril_indices(len(h))].max())


def by_inverses(h: Tensor, block: int) -> Tensor:
    """Cholesky by blocks, which multiplies by the inverse of each diagonal block instead of solving with it."""
    rest, low = h.clone(), torch.zeros_like(h)
    for at in range(0, len(h), block):
        here, below = slice(at, at + block), slice(at + block, None)
        low[here, here] = torch.linalg.cholesky(rest[here, here])
        low[below, here] = rest[below, here] @ torch.linalg.inv(low[here, here]).mH
        rest[below, below] -= low[below, here] @ low[below, here].mH
    return low


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("n", [24, 48, 120, 240])
def test_cholesky_factorisations_solve_by_substitution(dtype: torch.dtype, n: int) -> None:
    h = steep(n, dtype, n)
    found, info = torch.linalg.cholesky_ex(h)
    assert int(info) == 0
    assert substituted(found, h) <= 1
    batched = torch.linalg.cholesky_ex(h[None].expand(2, -1, -1))[0][1]
    assert substituted(batched, h) <= 1
    if n > 24:
        assert substituted(by_inverses(h, 24), h) > 10


@pytest.mark.parametrize("n", [24, 48, 120])
def test_packed_factorisations_solve_by_substitution(n: int) -> None:
    h = steep(n, torch.complex128, n)
    row, column, sign = stored_entries(n, torch.device("cpu"))
    packed = torch.complex(h[row, column].real, sign * h[row, column].imag)[None].contiguous()
    assert bool(cholesky_succeeds(packed, n))
    # The factor lies where the matrix did.
    low = torch.zeros_like(h)
    low[row, column] = torch.complex(packed[0].real, sign * packed[0].imag)
    assert substituted(low, h) <= 1


def winograd(x: Tensor, w: Tensor) -> Tensor:
    """F(2, 3) along one axis: two outputs by four products."""
    g = torch.stack((w[0], (w[0] + w[1] + w[2]) / 2, (w[0] - w[1] + w[2]) / 2, w[2]))
    d = x.unfold(0, 4, 2)
    m = torch.stack((d[:, 0] - d[:, 2], d[:, 1] + d[:, 2], d[:, 2] - d[:, 1], d[:, 1] - d[:, 3]), 1) * g
    return torch.stack((m[:, 0] + m[:, 1] + m[:, 2], m[:, 1] - m[:, 2] - m[:, 3]), 1).reshape(-1)


def off(found: Tensor, x: Tensor, w: Tensor, exact: Product, terms: int) -> float:
    """The largest error of an output of a convolution in float32, in units of its allowance; 0 for no error."""
    gap = (found.double() - exact(x.double(), w.double())).abs()
    allowed = (terms + 1) * UNIT[torch.float32] * exact(x.double().abs(), w.double().abs())
    return float(torch.where(gap > 0, gap / allowed, 0.0).max())


def pixels(n: int) -> Tensor:
    """Sizes far apart beside each other, as algorithms that mix neighbouring windows would see them."""
    return 2.0 ** (-10 * torch.remainder(torch.arange(n), 5).double())


TAPS = 2.0 ** (-10 * torch.arange(3).double())


@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"stride": 2}, {"dilation": 2}, {"groups": 4}], ids=str)
@pytest.mark.parametrize("channels", [4, 64])
@pytest.mark.parametrize("convolve", [F.conv2d, F.conv_transpose2d])
def test_convolutions_are_inner_products(convolve: Product, channels: int, options: dict[str, int]) -> None:
    x = (drawn(2, channels, 20, 20, seed=1) * pixels(20) * pixels(20)[:, None]).float()
    w = (drawn(channels, channels // options.get("groups", 1), 3, 3, seed=2) * TAPS * TAPS[:, None]).float()
    with torch.backends.nnpack.flags(enabled=False):
        found = convolve(x, w, **options)
    assert off(found, x, w, lambda x, w: convolve(x, w, **options), 9 * channels) <= 1


def test_the_probe_of_convolutions_tells_other_algorithms_apart() -> None:
    x, w = (drawn(22, seed=1) * pixels(22)).float(), (drawn(3, seed=2) * TAPS).float()

    def exact(x: Tensor, w: Tensor) -> Tensor:
        return F.conv1d(x[None, None], w[None, None])[0, 0]

    assert off(exact(x, w), x, w, exact, 3) <= 1
    assert off(winograd(x, w), x, w, exact, 3) > 100
    spectral = torch.fft.irfft(torch.fft.rfft(x, 24) * torch.fft.rfft(w.flip(0), 24), 24)[2:22]
    assert off(spectral, x, w, exact, 3) > 100
