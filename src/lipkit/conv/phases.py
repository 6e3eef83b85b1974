r"""Convolutions whose symbol has a period of k frequencies: dilated kernels, and the phase form [ECO].

Take a circular convolution on H x W images with kh x kw taps and the dilations H / kh and W / kw. Its matrices at the
frequencies f and f + (kh, kw) agree: kh kw are distinct. Equivalently, each of the (H / kh)(W / kw) phase images of
kh x kw pixels (p, p + H/kh, p + 2H/kh, ...) is convolved separately, by a circular convolution of its own size.

In the real Fourier basis of the phase images (:mod:`lipkit.conv.spectrum`) the layer is
:math:`\Phi^\top \mathrm{diag}(M_f)\, \Phi` with a small orthogonal :math:`\Phi`. Real matrices take H W c^2
multiplications per image, 1 / (kh kw) of those of the kernel. Memory traffic then dominates, so a CPU takes the batch
in pieces that stay in the cache from the first copy to the last, forward and backward.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.circular import circular_pad, circular_pads
from lipkit.conv.patches import Size
from lipkit.conv.spectrum import (
    Spectrum,
    Symbol,
    analyse,
    angles,
    count_real,
    frequencies,
    multiply,
    synthesise,
    transform_matrices,
)
from lipkit.conv.symbol import check_kernel
from lipkit.errors import ShapeError
from lipkit.linalg.precision import autocast_off, autocast_on, product_dtype, without_autocast
from lipkit.linalg.transforms import plain_gradients, transformed


def check_fits(height: int, width: int, kernel_size: Size, name: str = "kernel_size") -> None:
    """Raise ``ShapeError`` unless the kernel divides the image; the message names the sizes that do.

    >>> check_fits(32, 32, (3, 3))
    Traceback (most recent call last):
    lipkit.errors.ShapeError: kernel_size: expected sizes that divide the image, got 3 x 3 for 32 x 32; ...
    """
    kh, kw = kernel_size
    if height % kh or width % kw:
        fitting = ", ".join(str(k) for k in range(1, height + 1) if math.gcd(height, width) % k == 0)
        got = f"{kh} x {kw} for {height} x {width}; these fit: {fitting}"
        raise ShapeError(f"{name}: expected sizes that divide the image, got {got}")


def distinct_frequencies(kernel_size: Size) -> tuple[int, int]:
    """Number of self-conjugate frequencies and of conjugate pairs of a kh x kw grid.

    >>> [sum(distinct_frequencies((k, k))) for k in (1, 2, 3, 4, 5)]
    [1, 4, 5, 10, 13]
    """
    real = count_real(*kernel_size)
    return real, (math.prod(kernel_size) - real) // 2


def frequency_map(kernel_size: Size) -> Tensor:
    r"""The index I of each frequency's distinct matrix: :math:`I[p, q] = I[(k_h - p) \% k_h, (k_w - q) \% k_w]`.

    Self-conjugate frequencies come first, then one index for each pair, in the order of :func:`frequencies` ([ECO]
    equation 18 and algorithm 2, where 0 also marks entries that are not yet set).

    >>> frequency_map((3, 3))
    tensor([[0, 1, 1],
            [2, 3, 4],
            [2, 4, 3]])
    """
    kh, kw = kernel_size
    table = torch.full((kh, kw), -1, dtype=torch.int64)
    for number, (p, q) in enumerate(torch.cat(frequencies(kh, kw)).tolist()):
        table[p % kh, q % kw] = table[-p % kh, -q % kw] = number
    return table


def kernel_of_symbol(symbol: Symbol, kernel_size: Size) -> Tensor:
    r"""The kernel ``(cout, cin, kh, kw)`` of a symbol on kh x kw: W0 of [ECO] equation 16, centred at c = (k - 1) // 2.

    .. math:: W_0[s] = \frac{1}{k_h k_w} \sum_f F(f)\, e^{-2\pi i \langle f, (s - c)/k \rangle}

    summed over conjugate pairs, so that it is real. Inverse of :func:`lipkit.conv.kernel_symbol`; the identity at
    every frequency gives one tap of 1 at the centre, the identity map. Pairs may be real: ``(n_p, 1, cout, cin)``.
    """
    kh, kw = kernel_size
    cout, cin = symbol.real.shape[-2:]
    taps = torch.cartesian_prod(*(torch.arange(k) - (k - 1) // 2 for k in kernel_size))  # from the centre
    real, pair = (angles(grid, taps, kh, kw) for grid in frequencies(kh, kw))
    # Re((R + iS) e^{-i a}) = R cos a + S sin a, twice for the pair f and -f.
    waves = [real.cos(), 2 * pair.cos()]
    parts = [symbol.real.flatten(1), symbol.pair[:, 0].flatten(1)]
    if symbol.pair.shape[1] == 2:
        waves.append(2 * pair.sin())
        parts.append(symbol.pair[:, 1].flatten(1))
    table = (torch.cat(waves) / (kh * kw)).to(symbol.real)
    return (table.mT @ torch.cat(parts)).reshape(kh, kw, cout, cin).permute(2, 3, 0, 1)


def dilated_conv2d(x: Tensor, kernel: Tensor) -> Tensor:
    """Circular convolution with the dilations H / kh and W / kw: the layer as [ECO] evaluates it.

    The padding is asymmetric for an even kernel, so that tap ``(k - 1) // 2`` is the centre for every dilation. The
    sides of the kernel divide those of the image.

    >>> shift = torch.tensor([[[[1.0, 0.0, 0.0]]]])
    >>> dilated_conv2d(torch.arange(6.0).reshape(1, 1, 1, 6), shift).flatten().tolist()
    [4.0, 5.0, 0.0, 1.0, 2.0, 3.0]
    """
    check_kernel(kernel)
    kh, kw = kernel.shape[-2:]
    check_fits(x.shape[-2], x.shape[-1], (kh, kw))
    dh, dw = x.shape[-2] // kh, x.shape[-1] // kw
    pads = [d * p for d, p in zip((dw, dw, dh, dh), circular_pads(kh, kw), strict=True)]
    return F.conv2d(circular_pad(x, pads), kernel, dilation=(dh, dw))


def split_phases(x: Tensor, kernel_size: Size) -> Tensor:
    """The phase images ``(B H W / (kh kw), C, kh, kw)`` of ``x`` ``(B, C, H, W)``, each pixel's channels contiguous.

    Copies once, unless the memory order is (kh, kw, B, H / kh, W / kw, C) already.

    >>> split_phases(torch.arange(6.0).reshape(1, 1, 1, 6), (1, 3)).flatten(1).tolist()
    [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """
    kh, kw = kernel_size
    b, c, h, w = x.shape
    pixels = b * (h // kh) * (w // kw)
    return phase_order(x, kernel_size).reshape(kh, kw, pixels, c).permute(2, 3, 0, 1)


def phase_order(x: Tensor, kernel_size: Size) -> Tensor:
    """The view ``(kh, kw, B, H / kh, W / kw, C)`` of ``x`` ``(B, C, H, W)``."""
    kh, kw = kernel_size
    b, c, h, w = x.shape
    return x.reshape(b, c, kh, h // kh, kw, w // kw).permute(2, 4, 0, 3, 5, 1)  # pixel p + i H / kh: i leads


def merge_phases(phases: Tensor, height: int, width: int) -> Tensor:
    """Inverse of :func:`split_phases`: images ``(B, C, height, width)`` in the ``channels_last`` memory format."""
    n, c, kh, kw = phases.shape
    dh, dw = height // kh, width // kw
    grid = phases.permute(2, 3, 0, 1).reshape(kh, kw, n // (dh * dw), dh, dw, c)
    return grid.permute(2, 0, 3, 1, 4, 5).reshape(-1, height, width, c).permute(0, 3, 1, 2)


# Bytes of one buffer of a piece, and the fewest pixels that keep the products efficient. Backward has more buffers.
FORWARD_BYTES, BACKWARD_BYTES, PIECE_PIXELS = 2**23, 2**22, 256


def apply_phases(
    symbol: Symbol, x: Tensor, kernel_size: Size, matrices: list[Tensor] | None = None, bias: Tensor | None = None
) -> Tensor:
    r"""The convolution with this symbol, applied to each phase image: one product for each distinct frequency.

    Equal to ``dilated_conv2d(x, kernel_of_symbol(symbol, kernel_size))`` plus the bias (cout,).

    Args:
        symbol: on kh x kw: ``real`` (n_r, cout, cin) and ``pair`` (n_p, 2, cout, cin), or (n_p, 1, cout, cin) for
            real matrices.
        x: ``(B, cin, H, W)``.
        kernel_size: (kh, kw), which divide H and W.
        matrices: ``transform_matrices(kh, kw)``, made here if not given.

    Returns:
        ``(B, cout, H, W)``, under autocast in its dtype; in the ``channels_last`` memory format unless the kernel is
        1 x 1. An input and an upstream gradient in that format are the fastest.

    Cost:
        :math:`H W c_{in} c_{out}` multiplications per image for real matrices, 2 to 4 times that for complex ones; two
        small transforms and two copies. Backward, real matrices on a CPU keep no features but ``x``.
    """
    check_fits(x.shape[-2], x.shape[-1], kernel_size)
    if kernel_size == (1, 1):
        return F.conv2d(x, symbol.real[0, :, :, None, None], bias)
    dtype = product_dtype(x, symbol.real.dtype)
    if dtype != symbol.real.dtype:
        bias = None if bias is None else bias.to(dtype)
        with autocast_off(x):
            return apply_phases(symbol.to(dtype), x.to(dtype), kernel_size, bias=bias)
    if matrices is None:
        matrices = transform_matrices(*kernel_size, dtype=x.dtype, device=x.device)
    if _in_pieces(symbol, x, matrices, bias):
        return _PhaseProduct.apply(*symbol, bias, x, matrices[0], kernel_size)
    return _plain(*symbol, bias, x, matrices, kernel_size)


def _in_pieces(symbol: Symbol, x: Tensor, matrices: list[Tensor], bias: Tensor | None) -> bool:
    """True if the batch is taken in pieces: eager operations on a CPU with real matrices of one dtype."""
    numbers = [*symbol, *matrices] if bias is None else [*symbol, *matrices, bias]
    return (
        x.device.type == "cpu"
        and not (torch.compiler.is_compiling() or transformed() or torch.jit.is_tracing() or autocast_on(x))
        and x.dtype in (torch.float32, torch.float64, torch.bfloat16)
        and all(one.dtype == x.dtype and one.device == x.device for one in numbers)
        and symbol.pair.shape[1] == 1
        and len(matrices) == 1
        and x.numel() > 0
    )


def _plain(
    real: Tensor, pair: Tensor, bias: Tensor | None, x: Tensor, matrices: list[Tensor], kernel_size: Size
) -> Tensor:
    """The whole batch at once, in operations that torch can trace and differentiate to any order."""
    (kh, kw), (h, w) = kernel_size, x.shape[-2:]
    s = analyse(split_phases(x, kernel_size), matrices)
    if pair.shape[1] == 2:
        s = multiply(Symbol(real, pair), s)
    else:
        # Real matrices take half of the products: the two coefficients of a pair are rows of one product.
        both = s.pair.flatten(1, 2) @ pair[:, 0].mT
        s = Spectrum(s.real @ real.mT, both.unflatten(1, s.pair.shape[1:3]))
    if len(matrices) > 1:
        y = merge_phases(synthesise(s, kh, kw, matrices), h, w)
    else:
        rows = torch.cat((s.real.flatten(1), s.pair.flatten(2).flatten(0, 1)))
        # Like `synthesise`, but a pixel of all images stays together in memory, the order that `merge_phases` reads.
        images = (matrices[0].mT @ rows).reshape(kh, kw, *s.real.shape[1:])
        y = merge_phases(images.permute(2, 3, 0, 1), h, w)
    return y if bias is None else y + bias[:, None, None]


def _images_per_piece(x: Tensor, channels: int, kernel_size: Size, buffer: int) -> int:
    b, _, h, w = x.shape
    pixels = max(buffer // (x.element_size() * channels), PIECE_PIXELS * math.prod(kernel_size))
    return min(b, max(1, pixels // (h * w)))


def _rows(x: Tensor, matrix: Tensor, kernel_size: Size) -> Tensor:
    """The coefficients ``(kh kw, pixels, c)`` of the phase images of ``x``."""
    phases = phase_order(x, kernel_size).reshape(len(matrix), -1)
    # In bfloat16 a small matrix takes twice the time unless it is in column order, as in `_write_back`.
    return (matrix.mT.contiguous().mT @ phases).view(len(matrix), -1, x.shape[1])


def _pairs(rows: Tensor, n_real: int) -> Tensor:
    """The rows of each pair of frequencies, from which one product serves both: ``(n_p, 2 pixels, c)``."""
    n, pixels, channels = rows.shape
    return rows[n_real:].view((n - n_real) // 2, 2 * pixels, channels)


def _products(real: Tensor, pair: Tensor, rows: Tensor) -> Tensor:
    """Every row times the transposed matrix of its frequency: ``(kh kw, pixels, cout)``."""
    n_real = len(real)
    made = rows.new_empty(*rows.shape[:2], real.shape[1])
    torch.bmm(rows[:n_real], real.mT, out=made[:n_real])
    torch.bmm(_pairs(rows, n_real), pair[:, 0].mT, out=_pairs(made, n_real))
    return made


def _write_back(rows: Tensor, matrix: Tensor, out: Tensor, kernel_size: Size) -> None:
    """Transform rows back, and write the images into ``out`` (b, c, h, w)."""
    target = phase_order(out, kernel_size)
    target.copy_((matrix.mT @ rows.flatten(1)).view(target.shape))  # orthogonal: the transpose is the inverse


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out += a @ b``; ``out`` may have a wider dtype than the factors."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b)
    else:
        out += a @ b


class _PhaseProduct(torch.autograd.Function):
    """``y = Phi^T diag(M_f) Phi x + b`` with real matrices, in pieces.

    On an AMD EPYC 1.3 (32@24) and 1.2 (128@12, 512@3) times as fast as :func:`_plain`.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs[:5])
        real, pair, bias, x, matrix, ctx.kernel_size = inputs
        (b, _, h, w), (cout, cin), size = x.shape, real.shape[1:], ctx.kernel_size
        y = torch.empty(b, cout, h, w, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)  # no view
        constant = None if bias is None else bias * math.sqrt(len(matrix))
        step = _images_per_piece(x, max(cin, cout), size, FORWARD_BYTES)
        for given, out in zip(x.split(step), y.split(step), strict=True):
            rows = _products(real, pair, _rows(given, matrix, size))
            if constant is not None:
                rows[0].add_(constant)  # a constant image has one coefficient, the first
            _write_back(rows, matrix, out, size)
        return y

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        real, pair, bias, x, matrix = ctx.saved_tensors
        size: Size = ctx.kernel_size
        if torch.is_grad_enabled() or transformed(g):
            plain = partial(_plain, matrices=[matrix], kernel_size=size)
            return *plain_gradients(plain, (real, pair, bias, x), g), None, None
        (b, cin, h, w), (n_real, cout, _) = x.shape, real.shape
        of_symbol, (of_bias, of_x) = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2:4]
        gx = x.new_empty(b, h, w, cin).permute(0, 3, 1, 2) if of_x else None
        # Sum the pieces in float32 at least: bfloat16 would lose small terms.
        sums = torch.promote_types(real.dtype, torch.float32)
        g_real, g_pair = (torch.zeros_like(t, dtype=sums) for t in (real, pair[:, 0]))
        g_bias = g.new_zeros(cout, dtype=sums)
        step = _images_per_piece(x, max(cin, cout), size, BACKWARD_BYTES)
        for first in range(0, b, step):
            part = slice(first, first + step)
            g_rows = _rows(g[part], matrix, size)
            if of_bias:
                g_bias += g_rows[0].sum(0, dtype=sums)
            if of_symbol:
                x_rows = _rows(x[part], matrix, size)
                _add_product(g_real, g_rows[:n_real].mT, x_rows[:n_real])
                _add_product(g_pair, _pairs(g_rows, n_real).mT, _pairs(x_rows, n_real))
            if gx is not None:
                _write_back(_products(real.mT, pair.mT, g_rows), matrix, gx[part], size)
        for_symbol = (g_real, g_pair[:, None]) if of_symbol else (None, None)
        for_bias = g_bias * math.sqrt(len(matrix)) if of_bias else None
        return *(None if t is None else t.to(real.dtype) for t in (*for_symbol, for_bias)), gx, None, None
