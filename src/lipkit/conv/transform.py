r"""The real orthonormal 2-D Fourier transform of a batch of images, as matrix products without permuted copies.

An image of ``h x w`` has ``n_r`` self-conjugate frequencies (1, 2 or 4 of them) and ``n_p = (h w - n_r) / 2`` pairs
``(f, -f)``. The transform of a batch is the array of *rows* ``(h w, B, C)``: one row of coefficients for each
self-conjugate frequency, then two, a and b, for each pair. Up to ``DENSE_PIXELS`` pixels it is one product by a dense
matrix. Above, a real matrix transforms the width first. Its cosine and sine rows p and q of one frequency are a complex
signal along the height, whose transform :math:`(C - iS)(p + iq)` is one more product of real matrices,

.. math:: \begin{pmatrix} a \\ b \end{pmatrix} = \begin{pmatrix} C & S \\ -S & C \end{pmatrix}
          \begin{pmatrix} p \\ q \end{pmatrix},

which gives both f1 and -f1 without further additions. Each product reads a transposed view and writes its result in
the order that the next one reads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipkit.conv.symbol import angles

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
        return (rows.mT @ matrices[0]).reshape(b, c, h, w)
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
    return (along.reshape(w, n * h).mT @ p.width).reshape(b, c, h, w)
