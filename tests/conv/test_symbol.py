"""Symbols against numpy's FFT and against sums of rolled images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lipkit.conv import apply_symbol, downsample, fold, kernel_symbol, symbol, symbol_at
from lipkit.conv.spectrum import (
    Spectrum,
    analyse,
    as_complex,
    frequencies,
    multiply,
    outer,
    synthesise,
    to_rows,
    transform_matrices,
)
from lipkit.conv.symbol import symbol_parts
from lipkit.errors import OptionError, ShapeError

SIZES = [(1, 1), (1, 2), (2, 2), (1, 5), (3, 3), (4, 4), (5, 7), (6, 5), (8, 8), (7, 10), (9, 9), (12, 8)]
KERNELS = [(1, 1), (3, 3), (2, 2), (5, 3), (4, 7), (1, 3)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rolled(kernel: np.ndarray, x: np.ndarray) -> np.ndarray:
    """y[p] = sum_s K[s] x[p + s - c] with c = (k - 1) // 2 and circular indices, tap by tap."""
    kh, kw = kernel.shape[2:]
    y = np.zeros((x.shape[0], kernel.shape[0], *x.shape[2:]))
    for i in range(kh):
        for j in range(kw):
            moved = np.roll(x, ((kh - 1) // 2 - i, (kw - 1) // 2 - j), (2, 3))
            y += np.einsum("oc,bchw->bohw", kernel[:, :, i, j], moved)
    return y


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("taps", KERNELS)
def test_symbol_equals_numpys_fft(size: tuple[int, int], taps: tuple[int, int]) -> None:
    kernel = random(3, 2, *taps)
    h, w = size
    padded = np.zeros((3, 2, h, w))
    centre = [(k - 1) // 2 for k in taps]
    for i in range(taps[0]):
        for j in range(taps[1]):
            padded[:, :, (i - centre[0]) % h, (j - centre[1]) % w] += kernel[:, :, i, j].numpy()
    expected = np.conj(np.fft.rfft2(padded)).transpose(2, 3, 0, 1)
    got = symbol(kernel, h, w)
    assert got.shape == (h, w // 2 + 1, 3, 2)
    assert np.abs(got.numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("size", [(3, 3), (4, 6), (7, 5)])
def test_symbol_equals_its_docstring_formula(size: tuple[int, int]) -> None:
    kernel = random(2, 2, 3, 2)
    h, w = size
    f1, f2 = np.arange(h)[:, None], np.arange(w // 2 + 1)[None, :]
    shift = np.exp(-2j * np.pi * (1 * f1 / h + 0 * f2 / w))
    expected = np.conj(np.fft.rfft2(kernel.numpy(), (h, w))) * shift
    assert np.abs(symbol(kernel, h, w).numpy() - expected.transpose(2, 3, 0, 1)).max() < 1e-12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("taps", KERNELS)
def test_apply_symbol_equals_rolled_sums(size: tuple[int, int], taps: tuple[int, int]) -> None:
    kernel, x = random(3, 2, *taps), random(2, 2, *size, seed=1)
    got = apply_symbol(kernel_symbol(kernel, *size), x)
    assert got.shape == (2, 3, *size)
    assert np.abs(got.numpy() - rolled(kernel.numpy(), x.numpy())).max() < 1e-12


@pytest.mark.parametrize("size", [(5, 7), (8, 8), (9, 12)])
@pytest.mark.parametrize("taps", [(3, 3), (1, 5), (2, 4)])
def test_apply_symbol_equals_torchs_circular_convolution(size: tuple[int, int], taps: tuple[int, int]) -> None:
    kernel, x = random(4, 3, *taps), random(2, 3, *size, seed=1)
    conv = torch.nn.Conv2d(3, 4, taps, padding="same", padding_mode="circular", bias=False).double()
    with torch.no_grad():
        conv.weight.copy_(kernel)
        assert torch.allclose(apply_symbol(kernel_symbol(kernel, *size), x), conv(x), atol=1e-12)


@pytest.mark.thorough
def test_apply_symbol_is_differentiable() -> None:
    kernel, x = random(2, 2, 3, 3).requires_grad_(), random(1, 2, 4, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda k, x: apply_symbol(kernel_symbol(k, 4, 5), x), (kernel, x))


@pytest.mark.parametrize("size", [*SIZES, (16, 3), (3, 40)])
def test_frequencies_are_one_of_each_pair(size: tuple[int, int]) -> None:
    h, w = size
    f = frequencies(h, w)
    own = {(int(a) % h, int(b) % w) for a, b in f.real}
    pairs = [(int(a) % h, int(b) % w) for a, b in f.pair]
    others = [((-a) % h, (-b) % w) for a, b in pairs]
    assert all(((-a) % h, (-b) % w) == (a, b) for a, b in own)
    assert len(own) + len(pairs) + len(others) == h * w
    assert own | set(pairs) | set(others) == {(i, j) for i in range(h) for j in range(w)}


@pytest.mark.parametrize("size", [*SIZES, (16, 16), (1, 70), (33, 4)])
@pytest.mark.parametrize("dense_pixels", [None, 0, 10**6])
def test_transform_is_orthonormal_and_inverts(
    size: tuple[int, int], dense_pixels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dense_pixels is not None:
        monkeypatch.setattr("lipkit.conv.spectrum.DENSE_PIXELS", dense_pixels)
    h, w = size
    matrices = transform_matrices(h, w, dtype=torch.float64)
    assert len(matrices) == {None: 1 if h * w <= 64 else 2, 0: 2, 10**6: 1}[dense_pixels]
    for t in matrices:
        assert np.abs(t.numpy() @ t.numpy().T - np.eye(len(t))).max() < 1e-13
    x = random(2, 3, h, w)
    s = analyse(x, matrices)
    energy = s.real.square().sum() + s.pair.square().sum()
    assert torch.isclose(energy, x.square().sum())
    assert torch.allclose(synthesise(s, h, w, matrices), x, atol=1e-13)


@pytest.mark.parametrize("size", [(4, 4), (5, 6), (3, 3), (2, 7)])
def test_dense_and_separable_coefficients_agree(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    h, w = size
    x = random(1, 2, h, w)

    def coefficients() -> dict[tuple[int, int], Tensor]:
        """By frequency; where the other frequency of a pair was taken, its conjugate."""
        s, f = analyse(x, transform_matrices(h, w, dtype=torch.float64)), frequencies(h, w)
        found = {(a % h, b % w): one for (a, b), one in zip(f.real.tolist(), s.real, strict=True)}
        for (a, b), (re, im) in zip(f.pair.tolist(), s.pair, strict=True):
            found[a % h, b % w], found[-a % h, -b % w] = torch.complex(re, im), torch.complex(re, -im)
        return found

    dense = coefficients()
    monkeypatch.setattr("lipkit.conv.spectrum.DENSE_PIXELS", 0)
    separable = coefficients()
    assert dense.keys() == separable.keys() == {(a, b) for a in range(h) for b in range(w)}
    for frequency, one in dense.items():
        assert torch.allclose(one, separable[frequency], atol=1e-13)


@pytest.mark.parametrize(("size", "tiles", "count"), [
    ((9, 10), False, 1), ((13, 12), False, 2), ((13, 12), True, 1), ((16, 16), True, 1), ((16, 17), True, 2)
])  # fmt: skip
def test_one_matrix_in_half_precision_has_the_rows_of_separable_products(
    size: tuple[int, int], tiles: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lipkit.conv.spectrum.HAS_TILES", tiles)
    x = random(2, 3, *size)
    half = transform_matrices(*size, dtype=torch.bfloat16)
    assert len(half) == count
    exact = to_rows(x, transform_matrices(*size, dtype=torch.float64))
    assert float((to_rows(x, [t.double() for t in half]) - exact).norm() / exact.norm()) < 2.0**-8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("conjugate", [False, True])
def test_outer_products_are_those_of_complex_numbers(dtype: torch.dtype, conjugate: bool) -> None:
    g, s = (Spectrum(random(2, 9, c, seed=c), random(5, 2, 9, c, seed=c + 1)) for c in (3, 4))
    rounded = [Spectrum(one.real.to(dtype), one.pair.to(dtype)) for one in (g, s)]
    real, pair = outer(*rounded, -2.0, conjugate=conjugate)
    a, b = (as_complex(one.pair).numpy() for one in (g, s))
    expected = -2 * np.einsum("nrc,nrd->ncd", a, b.conj())
    found = as_complex(pair.double()).numpy()
    tolerance = 1e-14 if dtype == torch.float64 else 0.02
    assert np.abs(found - (expected.conj() if conjugate else expected)).max() < tolerance * np.abs(expected).max()
    assert (real.double() + 2 * g.real.mT @ s.real).abs().max() < tolerance * 50


@pytest.mark.parametrize("size", SIZES)
def test_coefficients_are_those_of_numpys_fft(size: tuple[int, int]) -> None:
    h, w = size
    x = random(1, 1, h, w)
    s = analyse(x, transform_matrices(h, w, dtype=torch.float64))
    spectrum = np.fft.fft2(x[0, 0].numpy()) / np.sqrt(h * w)
    f = frequencies(h, w)
    own = np.array([spectrum[a % h, b % w] for a, b in f.real.tolist()])
    assert np.abs(s.real[:, 0, 0].numpy() - own).max() < 1e-12
    for (a, b), pair in zip(f.pair.tolist(), s.pair[:, :, 0, 0].numpy(), strict=True):
        assert abs(abs(pair[0] + 1j * pair[1]) - np.sqrt(2) * abs(spectrum[a % h, b % w])) < 1e-12


@pytest.mark.parametrize("size", [(4, 4), (5, 3), (1, 6), (8, 9)])
def test_the_block_diagonal_form_has_the_singular_values_of_the_convolution(size: tuple[int, int]) -> None:
    h, w = size
    kernel = random(3, 2, 3, 3)
    s = kernel_symbol(kernel, h, w)
    pair = s.pair[:, 0] + 1j * s.pair[:, 1]
    blocks = [np.linalg.svd(m, compute_uv=False) for m in s.real.numpy()]
    blocks += [np.repeat(np.linalg.svd(m, compute_uv=False), 2) for m in pair.numpy()]
    basis = np.eye(2 * h * w).reshape(-1, 2, h, w)
    dense = rolled(kernel.numpy(), basis).reshape(2 * h * w, -1)
    expected = np.linalg.svd(dense, compute_uv=False)
    assert np.allclose(np.sort(np.concatenate(blocks)), np.sort(expected), atol=1e-12)


def test_multiply_is_the_complex_product() -> None:
    s = kernel_symbol(random(3, 2, 3, 3), 5, 4)
    x = analyse(random(2, 2, 5, 4), transform_matrices(5, 4, dtype=torch.float64))
    got = multiply(s, x)
    m = s.pair[:, 0] + 1j * s.pair[:, 1]
    v = x.pair[:, 0] + 1j * x.pair[:, 1]
    expected = np.einsum("foc,fbc->fbo", m.numpy(), v.numpy())
    assert np.abs((got.pair[:, 0] + 1j * got.pair[:, 1]).numpy() - expected).max() < 1e-13
    assert np.abs(got.real.numpy() - np.einsum("foc,fbc->fbo", s.real.numpy(), x.real.numpy())).max() < 1e-13


@pytest.mark.parametrize("size", [(6, 8), (5, 5), (1, 4)])
def test_imaginary_part_is_exactly_zero_at_self_conjugate_frequencies(size: tuple[int, int]) -> None:
    h, w = size
    f = frequencies(h, w).real
    _, imag = symbol_parts(random(3, 3, 5, 4), f[:, 0], f[:, 1], h, w)
    assert bool((imag == 0).all())


def test_conjugate_frequencies_and_large_integers() -> None:
    kernel = random(2, 3, 3, 4)
    f = torch.tensor([1, 2, 3])
    plus, minus = symbol_at(kernel, f, 2 * f, 7, 9), symbol_at(kernel, -f, -2 * f, 7, 9)
    assert torch.allclose(plus, minus.conj(), atol=1e-13)
    far = symbol_at(kernel, f + 7 * 10**6, 2 * f - 9 * 10**6, 7, 9)
    assert torch.allclose(plus, far, atol=1e-13)


def test_delta_at_the_centre_is_the_identity() -> None:
    for taps in KERNELS:
        kernel = torch.zeros(2, 2, *taps)
        kernel[range(2), range(2), (taps[0] - 1) // 2, (taps[1] - 1) // 2] = 1
        assert torch.equal(symbol(kernel, 5, 6), torch.eye(2, dtype=torch.complex64).expand(5, 4, 2, 2))


@pytest.mark.parametrize("taps", [(3, 3), (2, 5), (7, 4), (9, 9)])
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (2, 2), (3, 4), (5, 2), (9, 9)])
def test_fold_keeps_the_convolution(taps: tuple[int, int], size: tuple[int, int]) -> None:
    kernel, x = random(2, 3, *taps), random(1, 3, *size, seed=1)
    folded = fold(kernel, *size)
    assert all(k <= n for k, n in zip(folded.shape[2:], size, strict=True))
    assert np.abs(rolled(folded.numpy(), x.numpy()) - rolled(kernel.numpy(), x.numpy())).max() < 1e-12
    if taps[0] <= size[0] and taps[1] <= size[1]:
        assert folded is kernel


def test_fold_is_differentiable() -> None:
    kernel = random(1, 1, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda k: fold(k, 2, 3), (kernel,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    kernel, x = random(2, 3, 3, 3).to(dtype), random(1, 3, 9, 10).to(dtype)
    y = apply_symbol(kernel_symbol(kernel, 9, 10), x)
    assert y.dtype == dtype
    assert np.abs(y.numpy() - rolled(kernel.numpy(), x.numpy())).max() < 300 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "bad", [torch.zeros(3, 3), torch.zeros(1, 1, 0, 3), torch.zeros(1, 1, 3, 3).long(), torch.zeros(1, 1, 1, 1) * 1j]
)
def test_refuses_what_is_no_kernel(bad: Tensor) -> None:
    for function in (symbol, kernel_symbol, fold):
        with pytest.raises(ShapeError, match=r"expected .* got"):
            function(bad, 4, 4)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_downsample_is_a_permutation(stride: int) -> None:
    x = torch.arange(2 * 3 * 6 * 6.0).reshape(2, 3, 6, 6)
    y = downsample(x, stride)
    assert y.shape == (2, 3 * stride**2, 6 // stride, 6 // stride)
    assert torch.equal(y.flatten(1).sort(1).values, x.flatten(1).sort(1).values)
    # Channel c s^2 + i s + j holds the pixels (i, j) modulo s of channel c.
    for c in range(3):
        for i in range(stride):
            for j in range(stride):
                assert torch.equal(y[:, (c * stride + i) * stride + j], x[:, c, i::stride, j::stride])


def test_downsample_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(ShapeError, match=r"multiples of 2, got 3 x 4"):
        downsample(torch.zeros(1, 1, 3, 4), 2)
    with pytest.raises(OptionError, match=r"stride: expected an integer of at least 1, got 0"):
        downsample(torch.zeros(1, 1, 3, 4), 0)
