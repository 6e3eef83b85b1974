r"""The real orthonormal 2-D Fourier transform of a batch of images, and products by a symbol in it.

An image of ``h x w`` has ``n_r`` self-conjugate frequencies (1, 2 or 4 of them) and ``n_p = (h w - n_r) / 2`` pairs
``(f, -f)``. The transform of a batch is the array of *rows* ``(h w, B, C)``: one row of coefficients for each
self-conjugate frequency, then two, a and b, for each pair. Up to ``DENSE_PIXELS`` pixels it is one product by a dense
matrix. Above, a real matrix transforms the width first. Its cosine and sine rows p and q of one frequency are a complex
signal along the height, whose transform :math:`(C - iS)(p + iq)` is one more product of real matrices,

.. math:: \begin{pmatrix} a \\ b \end{pmatrix} = \begin{pmatrix} C & S \\ -S & C \end{pmatrix}
          \begin{pmatrix} p \\ q \end{pmatrix},

which gives both f1 and -f1 without further additions. Each product reads a transposed view and writes its result in
the order that the next one reads.

A real convolution acts as a real matrix :math:`M` on the coefficient of a self-conjugate frequency, and as one complex
matrix :math:`R + iS` on the :math:`a + ib` of a pair: the layer is the block-diagonal matrix of the blocks :math:`M`
and :math:`\begin{pmatrix} R & -S \\ S & R \end{pmatrix}`. Nothing is redundant, so nothing is dropped on the way back
(a half-spectrum inverse discards imaginary parts). Odd sizes need no special case. The whole layer is matrix products,
which export to any runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipkit.conv.symbol import symbol_parts
from lipkit.linalg.precision import autocast_off, product_dtype, without_autocast
from lipkit.linalg.transforms import plain_gradients, transformed

# Up to this many pixels the transform is one dense product, above it two separable ones.
DENSE_PIXELS = 64

# In half precision the dense product wins up to more pixels: HALF_PIXELS, or TILED_PIXELS on processors with matrix
# tiles (AMX). Accelerators are taken for such processors; they were not measured.
HALF_PIXELS, TILED_PIXELS = 144, 256
# Versions of torch before 2.13 cannot report tiles.
HAS_TILES = hasattr(torch.cpu, "get_capabilities") and bool(torch.cpu.get_capabilities().get("amx_bf16"))


class Frequencies(NamedTuple):
    """Integer frequencies: ``real`` is ``(n_r, 2)``, ``pair`` is ``(n_p, 2)``; columns are (f1, f2)."""

    real: Tensor
    pair: Tensor


def self_conjugate(n: int) -> list[int]:
    """The self-conjugate frequencies of n samples: 0, and n / 2 where n is even."""
    return [0, n // 2] if n % 2 == 0 else [0]


def count_real(h: int, w: int) -> int:
    """n_r, the number of self-conjugate frequencies of an ``h x w`` image."""
    return (2 - h % 2) * (2 - w % 2)


def is_dense(h: int, w: int) -> bool:
    """True if images of this size are transformed by one dense matrix."""
    return h * w <= DENSE_PIXELS


def frequencies(h: int, w: int) -> Frequencies:
    """The frequencies of an ``h x w`` image, one of each conjugate pair, in the order of the transform.

    >>> f = frequencies(2, 3)
    >>> f.real.tolist(), f.pair.tolist()
    ([[0, 0], [1, 0]], [[0, 1], [1, 1]])
    """
    rows, cols = (torch.tensor(self_conjugate(n), dtype=torch.int64) for n in (h, w))
    up, right = (torch.arange(1, (n + 1) // 2) for n in (h, w))  # one of each pair f, -f of an axis
    if is_dense(h, w):
        real = torch.cartesian_prod(rows, cols)
        pair = [torch.cartesian_prod(*both) for both in ((rows, right), (up, cols), (up, right), (up, -right))]
    else:
        real = torch.cartesian_prod(cols, rows).flip(1)  # f2 leads: the width is transformed first
        along = torch.cat((rows, up, -up))
        pair = [torch.cartesian_prod(*both).flip(1) for both in ((cols, up), (right, along))]
    return Frequencies(real, torch.cat(pair))


def angles(frequencies: Tensor, points: Tensor, h: int, w: int) -> Tensor:
    """2 pi (f1 p1 / h + f2 p2 / w) in float64, ``(F, P)``, for integers ``(F, 2)`` and ``(P, 2)``.

    Whole turns are removed before the angle is formed, in integers that count units of 1 / (h w): no angle is large.
    """
    turns = frequencies[:, :1] * (w * points[:, 0]) + frequencies[:, 1:] * (h * points[:, 1])
    return torch.remainder(turns, h * w).to(torch.float64) * (2 * math.pi / (h * w))


def _waves(n: int) -> Tensor:
    """Orthonormal real DFT of length n (float64): constant, Nyquist (even n), cosines, negated sines."""
    own, rest = self_conjugate(n), range(1, (n + 1) // 2)
    f = torch.tensor([*own, *rest, *rest], dtype=torch.int64)[:, None]
    angle = torch.remainder(f * torch.arange(n), n).to(torch.float64) * (2 * math.pi / n)
    wave = angle.cos()
    wave[len(own) :] *= math.sqrt(2)  # a cosine has the mean square 1/2
    first_sine = len(own) + len(rest)  # own, then as many cosines as sines
    wave[first_sine:] = -math.sqrt(2) * angle[first_sine:].sin()
    return wave / math.sqrt(n)


def _dense(h: int, w: int) -> Tensor:
    """The matrix ``(h w, h w)`` of the transform, in float64."""
    pixels = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    real, pair = (angles(grid, pixels, h, w) for grid in frequencies(h, w))
    waves = torch.stack((pair.cos(), -pair.sin()), 1).flatten(0, 1) * math.sqrt(2)
    return torch.cat((real.cos(), waves)) / math.sqrt(h * w)


def transform_matrices(h: int, w: int, *, dtype: torch.dtype, device: torch.device | None = None) -> list[Tensor]:
    """The constants of the transform: one ``(h w, h w)`` matrix for small images, else ``[(h, h), (w, w)]``.

    The dense matrix has its rows in the order of :func:`frequencies` (pairs interleaved); its transpose is the
    inverse. Made in float64, then rounded once to ``dtype``. In half precision, larger images have one matrix, too.
    """
    made = [_dense(h, w)] if is_dense(h, w) else [_waves(h), _waves(w)]
    most = TILED_PIXELS if HAS_TILES or (device is not None and device.type != "cpu") else HALF_PIXELS
    if len(made) > 1 and dtype in (torch.bfloat16, torch.float16) and h * w <= most:
        units = torch.eye(h * w, dtype=torch.float64)  # one matrix, with the rows of the separable transform
        made = [to_rows(units.view(h * w, 1, h, w), made).view(h * w, h * w)]
    return [t.to(dtype=dtype, device=device) for t in made]


class _Stages(NamedTuple):
    """The matrices of the separable transform: ``width`` first, then matrices that act along the height.

    These are ``own_real`` and ``own_pair`` for self-conjugate f2, ``cosine`` and ``sine`` for rows of the other f2.
    """

    width: Tensor
    own_real: Tensor
    own_pair: Tensor
    cosine: Tensor
    sine: Tensor

    def split_width(self, along: Tensor) -> tuple[Tensor, ...]:
        """Split the rows ``(w, ...)`` of the width's transform: self-conjugate f2, cosines, sines."""
        m = (len(self.width) - 1) // 2
        return along.split((len(self.width) - 2 * m, m, m))

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """Split the rows ``(h w, n)`` of the whole transform into three views ``(frequencies f2, rows of f1, n)``."""
        m = (len(self.width) - 1) // 2
        own = len(self.width) - 2 * m
        sizes = (own, len(self.own_real)), (own, len(self.own_pair)), (m, len(self.cosine))
        parts = rows.split([math.prod(size) for size in sizes])
        return [part.view(*size, rows.shape[1]) for part, size in zip(parts, sizes, strict=True)]


def _stages(matrices: list[Tensor]) -> _Stages:
    th, tw = matrices
    own, m = len(self_conjugate(len(th))), (len(th) - 1) // 2
    c, s = th[own : own + m], th[own + m :]
    half = math.sqrt(0.5)  # c is cos sqrt(2 / h) and s is -sin sqrt(2 / h): this leaves sqrt(1 / h)
    c_half, s_half = c * half, s * half
    # Rows f1 and -f1: the cosine is even in f1, the sine odd.
    even = torch.cat((th[:own], c_half, c_half))
    odd = torch.cat((torch.zeros_like(th[:own]), s_half, -s_half))
    return _Stages(
        tw,
        th[:own],
        torch.stack((c, s), 1).flatten(0, 1),
        torch.stack((even, odd), 1).flatten(0, 1),
        torch.stack((-odd, even), 1).flatten(0, 1),
    )


def _product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """``out = a @ b`` or ``out += a @ b`` for batches; a matrix ``a`` or ``b`` serves the whole batch."""
    n = len(out)
    a, b = (t if t.ndim == 3 else t.expand(n, *t.shape) for t in (a, b))
    if n:
        out.baddbmm_(a, b, beta=1 if add else 0)


def to_rows(x: Tensor, matrices: list[Tensor], *, pure: bool = False) -> Tensor:
    """Images ``(B, C, h, w)`` to rows ``(h w, B, C)``.

    With ``pure``, only operations that torch can trace and differentiate, at the price of one more copy.
    """
    b, c, h, w = x.shape
    n = b * c
    if len(matrices) == 1:
        return (matrices[0] @ x.reshape(n, h * w).mT).reshape(h * w, b, c)
    p = _stages(matrices)
    # The view (w, h, n) has the height on the axis that the products below sum over.
    own, cosines, sines = p.split_width((p.width @ x.reshape(n * h, w).mT).reshape(w, n, h).mT)
    # Self-conjugate f2 need a real transform along the height; other f2 mix cosine and sine rows to f1 and -f1.
    if pure:
        parts = p.own_real @ own, p.own_pair @ own, p.cosine @ cosines + p.sine @ sines
        return torch.cat([part.reshape(-1, b, c) for part in parts])
    rows = x.new_empty(h * w, b, c)
    first, second, third = p.split_rows(rows.view(h * w, n))
    _product(first, p.own_real, own)
    _product(second, p.own_pair, own)
    _product(third, p.cosine, cosines)
    _product(third, p.sine, sines, add=True)
    return rows


def to_images(
    rows: Tensor, h: int, w: int, matrices: list[Tensor], bias: Tensor | None = None, *, pure: bool = False
) -> Tensor:
    """Inverse and adjoint of :func:`to_rows`: rows ``(h w, B, C)`` to images ``(B, C, h, w)``.

    ``bias`` (C,) is added to every pixel: ``rows`` is changed in place.
    """
    if bias is not None:
        rows[0].add_(bias, alpha=math.sqrt(h * w))  # a constant image is the coefficient of frequency 0, the first row
    _, b, c = rows.shape
    n = b * c
    rows = rows.reshape(h * w, n)
    if len(matrices) == 1:
        return _images(rows.mT, matrices[0], (b, c, h, w), pure)
    p = _stages(matrices)
    first, second, third = (part.mT for part in p.split_rows(rows))
    if pure:
        along = torch.cat((first @ p.own_real + second @ p.own_pair, third @ p.cosine, third @ p.sine))
    else:
        along = rows.new_empty(w, n, h)
        own, cosines, sines = p.split_width(along)
        _product(own, first, p.own_real)
        _product(own, second, p.own_pair, add=True)
        _product(cosines, third, p.cosine)
        _product(sines, third, p.sine)
    return _images(along.reshape(w, n * h).mT, p.width, (b, c, h, w), pure)


def _images(a: Tensor, b: Tensor, shape: tuple[int, ...], pure: bool) -> Tensor:
    """``a @ b`` of this shape; no view unless ``pure``: nn.ReLU(inplace=True) may not overwrite views of a Function."""
    if pure:
        return (a @ b).reshape(shape)
    images = a.new_empty(shape)
    torch.mm(a, b, out=images.view(len(a), b.shape[1]))
    return images


class Symbol(NamedTuple):
    """A symbol on ``h x w``: ``real`` is ``(n_r, cout, cin)``, ``pair`` is ``(n_p, 2, cout, cin)`` (R, then S)."""

    real: Tensor
    pair: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Symbol:
        """Apply ``function`` to the real matrices and to the complex ones.

        It must commute with conjugation: the matrix at -f is the conjugate of that at f, and only one is stored.
        """
        return Symbol(function(self.real), as_pair(function(as_complex(self.pair))))

    def to(self, dtype: torch.dtype) -> Symbol:
        """Both parts in this dtype."""
        return Symbol(self.real.to(dtype), self.pair.to(dtype))


def as_complex(pair: Tensor) -> Tensor:
    """Pairs ``(n, 2, ...)`` as complex numbers ``(n, ...)``."""
    return torch.complex(pair[:, 0], pair[:, 1])


def as_pair(z: Tensor) -> Tensor:
    """Complex numbers ``(n, ...)`` as pairs ``(n, 2, ...)``: the inverse of :func:`as_complex`."""
    z = z.resolve_conj()  # vmap has no rule for the lazy minus of a conjugate
    return torch.stack((z.real, z.imag), 1)


class Spectrum(NamedTuple):
    """Coefficients of images: ``real`` is ``(n_r, B, C)``, ``pair`` is ``(n_p, 2, B, C)`` (a, then b)."""

    real: Tensor
    pair: Tensor


def split_rows(rows: Tensor, h: int, w: int) -> Spectrum:
    """The rows ``(h w, B, C)`` of a transform as a :class:`Spectrum`: two views."""
    n_real = count_real(h, w)
    return Spectrum(rows[:n_real], rows[n_real:].unflatten(0, (-1, 2)))


def analyse(x: Tensor, matrices: list[Tensor]) -> Spectrum:
    """Images ``(B, C, h, w)`` to their :class:`Spectrum`."""
    return split_rows(to_rows(x, matrices, pure=True), *x.shape[-2:])


def synthesise(s: Spectrum, h: int, w: int, matrices: list[Tensor]) -> Tensor:
    """Inverse of :func:`analyse`: a :class:`Spectrum` to images ``(B, C, h, w)``."""
    return to_images(torch.cat((s.real, s.pair.flatten(0, 1))), h, w, matrices, pure=True)


def at_frequencies(function: Callable[..., Tensor], x: Tensor, real: Sequence[Any], pair: Sequence[Any]) -> Tensor:
    """Images ``(B, C, h, w)`` whose coefficients are ``function(rows, *matrices)`` of those of x, at each frequency.

    The matrices are ``real`` and, at the pairs, complex. As in `Symbol.map`, the function must commute with
    conjugation.
    """
    h, w = x.shape[-2:]
    matrices = transform_matrices(h, w, dtype=x.dtype, device=x.device)
    s = analyse(x, matrices)
    made = Spectrum(function(s.real, *real), as_pair(function(as_complex(s.pair), *pair)))
    return synthesise(made, h, w, matrices)


def multiply(symbol: Symbol, s: Spectrum) -> Spectrum:
    """The block-diagonal product: ``M`` on the real coefficients, ``R + iS`` on the pairs."""
    n, _, cout, _ = symbol.pair.shape
    # One batched product of (2 B) x cin by cin x (2 cout) gives aR, aS, bR, bS.
    wide = (s.pair.flatten(1, 2) @ symbol.pair.flatten(1, 2).mT).reshape(n, 2, s.pair.shape[2], 2, cout)
    re = wide[:, 0, :, 0] - wide[:, 1, :, 1]  # aR - bS
    im = wide[:, 0, :, 1] + wide[:, 1, :, 0]  # aS + bR
    return Spectrum(s.real @ symbol.real.mT, torch.stack((re, im), 1))


def kernel_symbol(kernel: Tensor, h: int, w: int) -> Symbol:
    """The :class:`Symbol` of a real kernel ``(cout, cin, kh, kw)`` on ``h x w``, by a small matrix product."""
    n_real = count_real(h, w)
    f1, f2 = torch.cat(frequencies(h, w)).unbind(1)
    re, im = symbol_parts(kernel, f1, f2, h, w)
    return Symbol(re[:n_real], torch.stack((re[n_real:], im[n_real:]), 1))


def parts_apart(pair: Tensor) -> Tensor:
    """Pairs ``(n, 2, ...)`` with all first parts before all second ones in memory; a copy only if needed."""
    # Transposed matrices stay transposed views.
    if pair.stride(-1) != 1 and pair.stride(-2) == 1:
        return parts_apart(pair.mT).mT
    return pair.movedim(1, 0).contiguous().movedim(0, 1)


def _turned(s: Tensor, sign: int) -> Tensor:
    """Pairs (a, b), read as a + ib, multiplied by ``sign`` i: ``sign (-b, a)``."""
    turned = torch.empty_like(s)
    torch.mul(s[:, 1], -sign, out=turned[:, 0])
    torch.mul(s[:, 0], sign, out=turned[:, 1])
    return turned


def outer(g: Spectrum, s: Spectrum, scale: float = 1.0, *, conjugate: bool = False) -> tuple[Tensor, Tensor]:
    """Parts of a `Symbol`: ``scale`` times the sum of ``g s^*`` over the batch, or its conjugate, at each frequency."""
    made = torch.bmm(g.real.mT, s.real).mul_(scale)
    rows, columns = g.pair.flatten(1, 2).mT, s.pair.flatten(1, 2)
    # g s^* = (a + ib)(c - id) = (ac + bd) + i (bc - ad): rows (a; b), then (b; -a), by the columns (c; d).
    pairs = made.new_empty(2, len(g.pair), *made.shape[1:])
    pairs[0].baddbmm_(rows, columns, beta=0, alpha=scale)
    pairs[1].baddbmm_(_turned(g.pair, -1).flatten(1, 2).mT, columns, beta=0, alpha=-scale if conjugate else scale)
    return made, pairs.movedim(0, 1)


def multiplied(real: Tensor, pair: Tensor, s: Spectrum, out: Spectrum, *, adjoint: bool) -> None:
    """Fill ``out`` with ``s`` times the symbol of parts ``real`` and ``pair``, or times its adjoint."""
    if pair.device.type == "cpu" and pair.dtype in (torch.bfloat16, torch.float16):
        # Batched half-precision products on a CPU copy operands whose matrices are not adjacent in memory, transposed
        # ones element by element, which takes up to three times as long as the product.
        pair = parts_apart(pair)
    # Rows multiply from the left, so the symbol itself is transposed. Its adjoint is R^T - i S^T: the sign below.
    real, r, i = (real, pair[:, 0], pair[:, 1]) if adjoint else (real.mT, pair[:, 0].mT, pair[:, 1].mT)
    out.real.baddbmm_(s.real, real, beta=0)
    if len(pair):
        made = out.pair.flatten(1, 2)
        made.baddbmm_(s.pair.flatten(1, 2), r, beta=0)
        made.baddbmm_(_turned(s.pair, -1 if adjoint else 1).flatten(1, 2), i)  # i S, for both parts of the rows


def _applied(real: Tensor, pair: Tensor, bias: Tensor | None, x: Tensor, matrices: list[Tensor]) -> Tensor:
    h, w = x.shape[-2:]
    out = x.new_empty(h * w, len(x), real.shape[1])
    multiplied(real, pair, split_rows(to_rows(x, matrices), h, w), split_rows(out, h, w), adjoint=False)
    return to_images(out, h, w, matrices, bias)


def _plain(real: Tensor, pair: Tensor, bias: Tensor | None, x: Tensor, matrices: list[Tensor]) -> Tensor:
    """The function of :class:`_Apply`, in operations that torch can trace and differentiate to any order."""
    h, w = x.shape[-2:]
    y = synthesise(multiply(Symbol(real, pair), analyse(x, matrices)), h, w, matrices)
    return y if bias is None else y + bias[:, None, None]


class _Apply(torch.autograd.Function):
    """``y = T^T diag(M_f) T x + b`` with its derivative by hand.

    On an AMD EPYC 1.0 to 1.3 times as fast as :func:`_plain`; a training step of BRO or LOT 1.15 to 1.24 (3->32@32).
    """

    @staticmethod
    def forward(ctx: Any, real: Tensor, pair: Tensor, bias: Tensor | None, x: Tensor, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(real, pair, bias, x, *matrices)
        return _applied(real, pair, bias, x, list(matrices))

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        real, pair, bias, x, *matrices = ctx.saved_tensors
        for_real, for_pair, for_bias, for_x = ctx.needs_input_grad[:4]
        none = (None,) * len(matrices)
        if torch.is_grad_enabled() or transformed(g):
            return *plain_gradients(partial(_plain, matrices=matrices), (real, pair, bias, x), g), *none
        h, w = x.shape[-2:]
        g_real, g_pair, gx = None, None, None
        g_rows = split_rows(to_rows(g, matrices), h, w)
        if for_real or for_pair:
            g_real, g_pair = outer(g_rows, split_rows(to_rows(x, matrices), h, w))
        if for_x:
            out = torch.empty(h * w, len(x), real.shape[2], dtype=x.dtype, device=x.device)
            multiplied(real, pair, g_rows, split_rows(out, h, w), adjoint=True)
            gx = to_images(out, h, w, matrices)
        return g_real, g_pair, g.sum((0, 2, 3)).to(bias.dtype) if for_bias else None, gx, *none


def apply_symbol(symbol: Symbol, x: Tensor, matrices: list[Tensor] | None = None, bias: Tensor | None = None) -> Tensor:
    """Circular convolution of ``x`` ``(B, cin, h, w)`` with the layer of this ``symbol``: ``(B, cout, h, w)``.

    ``matrices`` are ``transform_matrices(h, w)``, made here if not given; ``bias`` ``(cout,)`` is added to every pixel.
    Under autocast, products are made in its dtype, and so is the result.

    >>> from lipkit.conv import kernel_symbol
    >>> x = torch.arange(12.0).reshape(1, 1, 3, 4)
    >>> shift = torch.zeros(1, 1, 3, 3); shift[0, 0, 1, 2] = 1.0
    >>> apply_symbol(kernel_symbol(shift, 3, 4), x)[0, 0, 1].round(decimals=4).tolist()
    [5.0, 6.0, 7.0, 4.0]
    """
    dtype = product_dtype(x, symbol.real.dtype)
    with autocast_off(x):
        if dtype != symbol.real.dtype:
            symbol, x, matrices = symbol.to(dtype), x.to(dtype), None
            bias = None if bias is None else bias.to(dtype)
        if matrices is None:
            matrices = transform_matrices(*x.shape[-2:], dtype=x.dtype, device=x.device)
        if torch.compiler.is_compiling() or transformed() or x.dtype != symbol.real.dtype:
            return _plain(symbol.real, symbol.pair, bias, x, matrices)
        if not torch.is_grad_enabled():
            return _applied(symbol.real, symbol.pair, bias, x, matrices)
        return _Apply.apply(symbol.real, symbol.pair, bias, x, *matrices)
