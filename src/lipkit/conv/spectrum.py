r"""The real orthonormal 2-D Fourier transform, and products by a symbol in it: real arithmetic throughout.

A real convolution acts as a real matrix :math:`M` on the coefficient of a self-conjugate frequency, and as one complex
matrix :math:`R + iS` on the :math:`a + ib` of a pair (:mod:`lipkit.conv.transform`): the layer is the block-diagonal
matrix of the blocks :math:`M` and :math:`\begin{pmatrix} R & -S \\ S & R \end{pmatrix}`. Nothing is redundant, so
nothing is dropped on the way back (a half-spectrum inverse discards imaginary parts). Odd sizes need no special case.
The whole layer is matrix products, which export to any runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipkit.conv.symbol import symbol_parts
from lipkit.conv.transform import count_real, frequencies, to_images, to_rows, transform_matrices
from lipkit.linalg.precision import autocast_off, product_dtype, without_autocast
from lipkit.linalg.transforms import plain_gradients, transformed


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
    sign, rows, made = -1 if adjoint else 1, s.pair.flatten(1, 2), out.pair.flatten(1, 2)
    out.real.baddbmm_(s.real, real, beta=0)
    if not len(pair):
        return
    made.baddbmm_(rows, r, beta=0)
    # i S in one batched product for both parts: multiply by i before or after it, whichever has fewer channels.
    if i.shape[1] <= i.shape[2]:
        made.baddbmm_(_turned(s.pair, sign).flatten(1, 2), i)
    else:
        turned = torch.bmm(rows, i).view_as(out.pair)
        out.pair[:, 0].sub_(turned[:, 1], alpha=sign)
        out.pair[:, 1].add_(turned[:, 0], alpha=sign)


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

    Gain over :func:`_plain` (AMD EPYC): 1.0 to 1.3; of a training step of BRO or LOT 1.15 to 1.24 at 3->32@32.
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
    h, w = x.shape[-2:]
    dtype = product_dtype(x, symbol.real.dtype)
    if dtype != symbol.real.dtype:
        with autocast_off(x):
            return apply_symbol(symbol.to(dtype), x.to(dtype), bias=None if bias is None else bias.to(dtype))
    if matrices is None:
        matrices = transform_matrices(h, w, dtype=x.dtype, device=x.device)
    if torch.compiler.is_compiling() or transformed() or x.dtype != symbol.real.dtype:
        return _plain(symbol.real, symbol.pair, bias, x, matrices)
    if not torch.is_grad_enabled():
        return _applied(symbol.real, symbol.pair, bias, x, matrices)
    return _Apply.apply(symbol.real, symbol.pair, bias, x, *matrices)
