"""The phase form and the dilated convolution against each other, numpy's FFT and dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit.conv import Symbol, kernel_symbol, phases
from lipkit.conv.phases import (
    apply_phases,
    check_fits,
    dilated_conv2d,
    distinct_frequencies,
    frequency_map,
    kernel_of_symbol,
    merge_phases,
    split_phases,
)
from lipkit.errors import ShapeError
from lipkit.testing import dense_matrix

SIZES = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (2, 3), (1, 4), (9, 8)]


def random_symbol(size: tuple[int, int], cout: int, cin: int, parts: int) -> Symbol:
    generator = torch.Generator().manual_seed(1)
    n_real, n_pair = distinct_frequencies(size)
    real = torch.randn(n_real, cout, cin, dtype=torch.float64, generator=generator)
    return Symbol(real, torch.randn(n_pair, parts, cout, cin, dtype=torch.float64, generator=generator))


def image(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7])
def test_number_of_distinct_matrices(k: int) -> None:
    n_real, n_pair = distinct_frequencies((k, k))
    assert n_real + n_pair == ((k * k + 1) // 2 if k % 2 else (k * k + 4) // 2)
    assert n_real + 2 * n_pair == k * k


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_frequency_map_joins_exactly_the_conjugate_pairs(size: tuple[int, int]) -> None:
    kh, kw = size
    table = frequency_map(size).tolist()
    count = sum(distinct_frequencies(size))
    assert sorted({number for row in table for number in row}) == list(range(count))
    for p in range(kh):
        for q in range(kw):
            partners = [(i, j) for i in range(kh) for j in range(kw) if table[i][j] == table[p][q]]
            assert sorted({(p, q), (-p % kh, -q % kw)}) == partners


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernel_of_a_real_symbol_is_the_papers_inverse_transform_rolled_to_the_centre(size: tuple[int, int]) -> None:
    symbol = random_symbol(size, 2, 3, 1)
    p0 = torch.cat((symbol.real, symbol.pair[:, 0]))[frequency_map(size)].numpy()
    w0 = np.fft.ifft2(p0, axes=(0, 1))
    assert abs(w0.imag).max() < 1e-14
    w0 = np.roll(w0.real, [(k - 1) // 2 for k in size], axis=(0, 1)).transpose(2, 3, 0, 1)
    np.testing.assert_allclose(kernel_of_symbol(symbol, size).numpy(), w0, atol=1e-14)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernel_of_symbol_inverts_kernel_symbol(size: tuple[int, int]) -> None:
    kernel = image(2, 3, *size)
    torch.testing.assert_close(kernel_of_symbol(kernel_symbol(kernel, *size), size), kernel)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3), (3, 1)], ids=str)
def test_phase_form_equals_dilated_convolution(size: tuple[int, int], dilation: tuple[int, int], parts: int) -> None:
    symbol = random_symbol(size, 4, 3, parts)
    x = image(2, 3, size[0] * dilation[0], size[1] * dilation[1])
    y = apply_phases(symbol, x, size)
    torch.testing.assert_close(y, dilated_conv2d(x, kernel_of_symbol(symbol, size)), rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
def test_phase_form_of_other_memory_formats_and_gradients() -> None:
    symbol = random_symbol((3, 3), 4, 3, 1)
    x = image(2, 3, 6, 9)
    y = apply_phases(symbol, x, (3, 3))
    torch.testing.assert_close(apply_phases(symbol, x.contiguous(memory_format=torch.channels_last), (3, 3)), y)
    small = image(1, 3, 3, 6).requires_grad_()
    parts = [t.clone().requires_grad_() for t in symbol]
    assert torch.autograd.gradcheck(lambda x, r, p: apply_phases(Symbol(r, p), x, (3, 3)), (small, *parts))


def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images to a piece, and a last piece of one."""
    monkeypatch.setattr(phases, "FORWARD_BYTES", 1)
    monkeypatch.setattr(phases, "BACKWARD_BYTES", 1)
    monkeypatch.setattr(phases, "PIECE_PIXELS", 12)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_pieces_of_a_batch_and_their_gradients(
    biased: bool, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces(monkeypatch)
    symbol = [t.requires_grad_() for t in random_symbol((3, 3), 4, 3, 1)]
    bias = torch.randn(4, dtype=torch.float64).requires_grad_() if biased else None
    x = image(5, 3, 6, 9)
    x = (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
    y = apply_phases(Symbol(*symbol), x, (3, 3), bias=bias)
    kernel = kernel_of_symbol(Symbol(*symbol), (3, 3))
    expected = dilated_conv2d(x, kernel)
    expected = expected if bias is None else expected + bias[:, None, None]
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected)
    inputs = [*symbol, x] if bias is None else [*symbol, bias, x]
    upstream = image(5, 4, 6, 9)
    for given in (upstream, upstream.contiguous(memory_format=torch.channels_last), upstream[:1].expand(5, -1, -1, -1)):
        found, wanted = (torch.autograd.grad(z, inputs, given, retain_graph=True) for z in (y, expected))
        torch.testing.assert_close(found, wanted)
        assert found[-1].is_contiguous(memory_format=torch.channels_last)
    for i, one in enumerate(inputs):
        # Each gradient on its own: the others are neither made nor needed.
        (found,) = torch.autograd.grad(y, one, upstream, retain_graph=True)
        torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, upstream, retain_graph=True)[i])


# The first forward-mode derivative makes torch script functions of its own, which it has deprecated.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_second_derivatives_forward_mode_and_function_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces(monkeypatch)
    x = image(3, 2, 3, 6).requires_grad_()
    real, pair = (t.clone().requires_grad_() for t in random_symbol((3, 3), 3, 2, 1))
    bias = torch.randn(3, dtype=torch.float64).requires_grad_()

    def f(x: torch.Tensor, real: torch.Tensor, pair: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return apply_phases(Symbol(real, pair), x, (3, 3), bias=bias)

    inputs = (x[:1, :, :, :3].detach().clone().requires_grad_(), real, pair, bias)
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)
    fixed = [t.detach() for t in (real, pair, bias)]
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: f(v[None], *fixed)[0]))(x.detach())
    dense = torch.autograd.functional.jacobian(lambda v: f(v[None], *fixed)[0], x[0].detach())
    torch.testing.assert_close(jacobian, dense.expand_as(jacobian))


def test_autocast_lowers_the_products() -> None:
    symbol = Symbol(*(t.float() for t in random_symbol((3, 3), 3, 2, 1)))
    x = image(3, 2, 6, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = apply_phases(symbol, x, (3, 3))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), apply_phases(symbol, x, (3, 3)), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("size", [(2, 2), (3, 3), (4, 4), (2, 3)], ids=str)
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_identity_at_every_frequency_is_the_identity_map(size: tuple[int, int], dilation: int) -> None:
    n_real, n_pair = distinct_frequencies(size)
    eye = torch.eye(3, dtype=torch.float64)
    symbol = Symbol(eye.expand(n_real, 3, 3), eye.expand(n_pair, 1, 3, 3))
    x = image(2, 3, size[0] * dilation, size[1] * dilation)
    kernel = kernel_of_symbol(symbol, size)
    delta = torch.zeros_like(kernel)
    delta[:, :, (size[0] - 1) // 2, (size[1] - 1) // 2] = eye
    torch.testing.assert_close(kernel, delta)
    torch.testing.assert_close(dilated_conv2d(x, kernel), x)
    torch.testing.assert_close(apply_phases(symbol, x, size), x)


@pytest.mark.parametrize(("n", "k"), [(6, 2), (6, 3), (8, 4), (10, 2)])
def test_orthogonal_matrices_give_an_orthogonal_dense_matrix(n: int, k: int) -> None:
    # n = 6 with k = 2: an even kernel with an odd dilation, whose padding cannot be symmetric.
    raw = random_symbol((k, k), 2, 2, 1)
    real, pair = (torch.linalg.qr(t).Q for t in raw)
    symbol = Symbol(real, pair)
    dense = [
        dense_matrix(lambda x: apply_phases(symbol, x, (k, k)), (2, n, n)),
        dense_matrix(lambda x: dilated_conv2d(x, kernel_of_symbol(symbol, (k, k))), (2, n, n)),
    ]
    for matrix in dense:
        np.testing.assert_allclose(np.linalg.svd(matrix, compute_uv=False), 1, atol=1e-13)
    np.testing.assert_allclose(dense[0], dense[1], atol=1e-13)


def test_a_kernel_that_does_not_divide_the_image_would_not_be_orthogonal() -> None:
    # What ignoring k | n costs: the same taps with dilation 32 // 3 on 32 x 32.
    real, pair = (torch.linalg.qr(t).Q for t in random_symbol((3, 3), 4, 4, 1))
    kernel = kernel_of_symbol(Symbol(real, pair), (3, 3))
    spread = torch.zeros(4, 4, 21, 21, dtype=torch.float64)
    spread[:, :, ::10, ::10] = kernel
    norms = torch.linalg.matrix_norm(torch.fft.fft2(spread, s=(32, 32)).permute(2, 3, 0, 1), 2)
    assert float(norms.max()) > 1.2


def test_phases_are_a_permutation_of_the_pixels() -> None:
    x = torch.arange(2 * 3 * 6 * 4, dtype=torch.float64).reshape(2, 3, 6, 4)
    made = split_phases(x, (3, 2))
    assert made.shape == (8, 3, 3, 2)
    # The second phase image of the first sample: rows 0, 2, 4 and columns 1, 3.
    assert torch.equal(made[1], x[0, :, 0::2, 1::2])
    assert torch.equal(merge_phases(made, 6, 4), x)


def test_refusal_names_the_sizes_that_fit() -> None:
    check_fits(24, 12, (4, 3))
    x = image(1, 2, 32, 32)
    for call in (
        lambda: check_fits(32, 32, (3, 3)),
        lambda: apply_phases(random_symbol((3, 3), 2, 2, 1), x, (3, 3)),
        lambda: dilated_conv2d(x, image(2, 2, 3, 3)),
    ):
        with pytest.raises(ShapeError, match=r"got 3 x 3 for 32 x 32; these fit: 1, 2, 4, 8, 16, 32$"):
            call()
