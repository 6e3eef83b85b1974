r"""The real orthonormal 2-D Fourier transform, and products by a symbol in it: real arithmetic throughout.

An image of ``h x w`` has ``n_r`` self-conjugate frequencies (1, 2 or 4 of them), where a real convolution acts as
a real matrix, and ``n_p = (h w - n_r) / 2`` pairs ``(f, -f)``, where it acts as one complex matrix
:math:`R + iS` on :math:`a + ib`. In the basis used here the coefficients of a real image are exactly the ``n_r``
real numbers and ``n_p`` pairs ``(a, b)``, the transform is an orthogonal matrix, and the layer is the
block-diagonal matrix of the blocks :math:`M` and :math:`\begin{pmatrix} R & -S \\ S & R \end{pmatrix}`.
Nothing is redundant, so nothing is dropped on the way back (a half-spectrum inverse discards imaginary parts),
there is no odd-size special case, and the whole layer is matrix products: it exports to any runtime.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipkit.conv.symbol import symbol_parts

# Below this many pixels the transform is one dense product (no passes over memory besides the product itself);
# above it, two separable products and a butterfly.
DENSE_PIXELS = 64


class Frequencies(NamedTuple):
    """Integer frequencies: ``real`` is ``(n_r, 2)``, ``pair`` is ``(n_p, 2)``; columns are (f1, f2)."""

    real: Tensor
    pair: Tensor


class Symbol(NamedTuple):
    """A symbol on ``h x w``: ``real`` is ``(n_r, cout, cin)``, ``pair`` is ``(n_p, 2, cout, cin)`` (R, then S)."""

    real: Tensor
    pair: Tensor


class Spectrum(NamedTuple):
    """Coefficients of images: ``real`` is ``(n_r, B, C)``, ``pair`` is ``(n_p, 2, B, C)`` (a, then b)."""

    real: Tensor
    pair: Tensor


def _self_conjugate(n: int) -> list[int]:
    return [0, n // 2] if n % 2 == 0 else [0]


def frequencies(h: int, w: int) -> Frequencies:
    """The frequencies of an ``h x w`` image, one of each conjugate pair, in the order of the transform.

    >>> f = frequencies(2, 3)
    >>> f.real.tolist(), f.pair.tolist()
    ([[0, 0], [1, 0]], [[0, 1], [1, 1]])
    """
    rows, cols = _self_conjugate(h), _self_conjugate(w)
    up, right = range(1, (h + 1) // 2), range(1, (w + 1) // 2)
    real = [(i, j) for i in rows for j in cols]
    pair = [(i, j) for i in rows for j in right]
    pair += [(i, j) for i in up for j in cols]
    pair += [(i, j) for i in up for j in right]
    pair += [(i, -j) for i in up for j in right]
    return Frequencies(
        torch.tensor(real, dtype=torch.int64).reshape(-1, 2),
        torch.tensor(pair, dtype=torch.int64).reshape(-1, 2),
    )


def _waves_1d(n: int) -> Tensor:
    """Orthonormal real DFT of length n (float64): constant, Nyquist (even n), cosines, negated sines."""
    own, rest = _self_conjugate(n), range(1, (n + 1) // 2)
    f = torch.tensor([*own, *rest, *rest], dtype=torch.int64)[:, None]
    angle = torch.remainder(f * torch.arange(n), n).to(torch.float64) * (2 * math.pi / n)
    wave = angle.cos()
    wave[len(own) :] *= math.sqrt(2)
    first_sine = len(own) + len(rest)
    wave[first_sine:] = -math.sqrt(2) * angle[first_sine:].sin()
    return wave / math.sqrt(n)


def _split(c: Tensor, h: int, w: int) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients (h, w, N) of the separable transform to (n_r, N), (n_p, N), (n_p, N)."""
    rh, rw = len(_self_conjugate(h)), len(_self_conjugate(w))
    mh, mw = (h - 1) // 2, (w - 1) // 2
    cc, cs = c[rh : rh + mh, rw : rw + mw], c[rh : rh + mh, rw + mw :]
    sc, ss = c[rh + mh :, rw : rw + mw], c[rh + mh :, rw + mw :]
    half = math.sqrt(0.5)
    a = [c[:rh, rw : rw + mw], c[rh : rh + mh, :rw], (cc - ss) * half, (cc + ss) * half]
    b = [c[:rh, rw + mw :], c[rh + mh :, :rw], (sc + cs) * half, (sc - cs) * half]
    flat = [torch.cat([t.flatten(0, 1) for t in parts]) for parts in (a, b)]
    return c[:rh, :rw].flatten(0, 1), flat[0], flat[1]


def _join(real: Tensor, a: Tensor, b: Tensor, h: int, w: int) -> Tensor:
    """Inverse of :func:`_split`: back to (h, w, N)."""
    rh, rw = len(_self_conjugate(h)), len(_self_conjugate(w))
    mh, mw = (h - 1) // 2, (w - 1) // 2
    sizes = [(rh, mw), (mh, rw), (mh, mw), (mh, mw)]
    counts = [p * q for p, q in sizes]
    rc, cr, pa, ma = (t.unflatten(0, s) for t, s in zip(a.split(counts), sizes, strict=True))
    rs, sr, pb, mb = (t.unflatten(0, s) for t, s in zip(b.split(counts), sizes, strict=True))
    half = math.sqrt(0.5)
    return torch.cat(
        (
            torch.cat((real.unflatten(0, (rh, rw)), rc, rs), 1),
            torch.cat((cr, (pa + ma) * half, (pb - mb) * half), 1),
            torch.cat((sr, (pb + mb) * half, (ma - pa) * half), 1),
        ),
        0,
    )


def transform_matrices(h: int, w: int, *, dtype: torch.dtype, device: torch.device | None = None) -> list[Tensor]:
    """The constants of the transform: one ``(h w, h w)`` matrix for small images, else ``[(h, h), (w, w)]``.

    The dense matrix has its rows in the order of :class:`Spectrum` (pairs interleaved); its transpose is the
    inverse. Made in float64, then rounded once to ``dtype``.
    """
    th, tw = _waves_1d(h), _waves_1d(w)
    if h * w > DENSE_PIXELS:
        return [t.to(dtype=dtype, device=device) for t in (th, tw)]
    both = torch.einsum("fp,gq->fgpq", th, tw).flatten(2)
    real, a, b = _split(both, h, w)
    dense = torch.cat((real, torch.stack((a, b), 1).flatten(0, 1)))
    return [dense.to(dtype=dtype, device=device)]


def analyse(x: Tensor, matrices: list[Tensor]) -> Spectrum:
    """Images ``(B, C, h, w)`` to their :class:`Spectrum`."""
    b, c, h, w = x.shape
    n_real = len(_self_conjugate(h)) * len(_self_conjugate(w))
    if len(matrices) == 1:
        rows = matrices[0] @ x.reshape(b * c, h * w).mT
        return Spectrum(rows[:n_real].unflatten(1, (b, c)), rows[n_real:].reshape(-1, 2, b, c))
    th, tw = matrices
    # Two products whose transposed operands are views: no copies besides the results.
    along_w = tw @ x.reshape(b * c * h, w).mT
    along_h = th @ along_w.reshape(w * b * c, h).mT
    real, re, im = _split(along_h.reshape(h, w, b * c), h, w)
    return Spectrum(real.unflatten(1, (b, c)), torch.stack((re, im), 1).unflatten(2, (b, c)))


def synthesise(s: Spectrum, h: int, w: int, matrices: list[Tensor]) -> Tensor:
    """Inverse of :func:`analyse`: a :class:`Spectrum` to images ``(B, C, h, w)``."""
    b, c = s.pair.shape[2:]
    if len(matrices) == 1:
        rows = torch.cat((s.real.flatten(1), s.pair.flatten(2).flatten(0, 1)))
        return (rows.mT @ matrices[0]).reshape(b, c, h, w)
    th, tw = matrices
    joined = _join(s.real.flatten(1), s.pair[:, 0].flatten(1), s.pair[:, 1].flatten(1), h, w)
    along_h = joined.reshape(h, w * b * c).mT @ th
    along_w = along_h.reshape(w, b * c * h).mT @ tw
    return along_w.reshape(b, c, h, w)


def multiply(symbol: Symbol, s: Spectrum) -> Spectrum:
    """The block-diagonal product: ``M`` on the real coefficients, ``R + iS`` on the pairs."""
    real = s.real @ symbol.real.mT
    n, _, cout, _ = symbol.pair.shape
    b = s.pair.shape[2]
    # One batched product of (2 B) x cin by cin x (2 cout) gives aR, aS, bR, bS.
    wide = s.pair.flatten(1, 2) @ symbol.pair.flatten(1, 2).mT
    wide = wide.reshape(n, 2, b, 2, cout)
    re = wide[:, 0, :, 0] - wide[:, 1, :, 1]
    im = wide[:, 0, :, 1] + wide[:, 1, :, 0]
    return Spectrum(real, torch.stack((re, im), 1))


def kernel_symbol(kernel: Tensor, h: int, w: int) -> Symbol:
    """The :class:`Symbol` of a real kernel ``(cout, cin, kh, kw)`` on ``h x w``, by a small matrix product."""
    f = frequencies(h, w)
    n_real = len(f.real)
    both = torch.cat((f.real, f.pair))
    re, im = symbol_parts(kernel, both[:, 0], both[:, 1], h, w)
    return Symbol(re[:n_real], torch.stack((re[n_real:], im[n_real:]), 1))


def apply_symbol(symbol: Symbol, x: Tensor, matrices: list[Tensor] | None = None) -> Tensor:
    """Circular convolution of ``x`` ``(B, cin, h, w)`` with the layer of this ``symbol``: ``(B, cout, h, w)``.

    >>> from lipkit.conv import kernel_symbol
    >>> x = torch.arange(12.0).reshape(1, 1, 3, 4)
    >>> shift = torch.zeros(1, 1, 3, 3); shift[0, 0, 1, 2] = 1.0
    >>> apply_symbol(kernel_symbol(shift, 3, 4), x)[0, 0, 1].round(decimals=4).tolist()
    [5.0, 6.0, 7.0, 4.0]
    """
    h, w = x.shape[-2:]
    if matrices is None:
        matrices = transform_matrices(h, w, dtype=x.dtype, device=x.device)
    return synthesise(multiply(symbol, analyse(x, matrices)), h, w, matrices)
