r"""The symbol (Fourier transform) of a convolution kernel, by a small matrix product.

Convention: torch's cross-correlation, ``y[p] = sum_s K[s] x[p + s - c]`` with the integer centre
``c = (k - 1) // 2`` per axis, which is what ``nn.Conv2d(padding='same', padding_mode='circular')`` computes.
On the wave :math:`e^{2\pi i f p / n}` it acts as the matrix :math:`F(f) = \sum_s K[s]\, e^{2\pi i f (s - c)/n}`.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import ShapeError
from lipkit.linalg.matrices import at_least_float32
from lipkit.linalg.precision import autocast_off


def check_kernel(kernel: Tensor) -> None:
    """Raise ``ShapeError`` unless ``kernel`` is a real tensor ``(cout, cin, kh, kw)`` without empty sides."""
    if kernel.ndim != 4 or 0 in kernel.shape:
        raise ShapeError(f"kernel: expected shape (cout, cin, kh, kw) without zeros, got {tuple(kernel.shape)}")
    if not kernel.is_floating_point():
        raise ShapeError(f"kernel: expected a real floating dtype, got {kernel.dtype}")


def check_images(x: Tensor) -> torch.Size:
    """The shape of images ``(B, C, h, w)``; ``ShapeError`` for a tensor without four dimensions."""
    if x.ndim != 4:
        raise ShapeError(f"x: expected images (B, C, h, w), got shape {tuple(x.shape)}")
    return x.shape


def _waves(frequencies: Tensor, n: int, k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi f (s - c) / n, each ``(len(frequencies), k)``.

    Turns are reduced modulo n in integers, so that a self-conjugate frequency (2 f = 0 mod n) has a sine of exactly 0.
    """
    taps = torch.arange(k, device=like.device) - (k - 1) // 2
    turns = torch.remainder(frequencies.to(like.device)[:, None] * taps, n)  # integers: exact
    angle = turns.to(torch.float64) * (2 * math.pi / n)
    sine = torch.where(torch.remainder(2 * turns, n) == 0, torch.zeros_like(angle), angle.sin())
    return angle.cos(), sine


def half_grid(h: int, w: int) -> tuple[Tensor, Tensor]:
    """The frequencies f1, f2 of a real 2-D transform, ``h (w // 2 + 1)`` each: the others are conjugates of these."""
    half = w // 2 + 1  # f2 above it is the conjugate of -f2
    return torch.arange(h).repeat_interleave(half), torch.arange(half).repeat(h)


def symbol_at(kernel: Tensor, f1: Tensor, f2: Tensor, h: int, w: int) -> Tensor:
    r"""The matrices :math:`F(f_1, f_2)` of ``kernel`` at a list of frequencies, by two small real products.

    Args:
        kernel: ``(cout, cin, kh, kw)``, real. May be larger than the image: taps then wrap around.
        f1, f2: integer tensors ``(F,)``: cycles per image height ``h`` and width ``w``.
        h, w: size of the circular image.

    Returns:
        Complex ``(F, cout, cin)``: the imaginary part is exactly 0 at self-conjugate frequencies.

    >>> identity = torch.zeros(1, 1, 3, 3)
    >>> identity[0, 0, 1, 1] = 1.0
    >>> symbol_at(identity, torch.tensor([0, 1]), torch.tensor([0, 2]), 5, 5).flatten().tolist()
    [(1+0j), (1+0j)]
    """
    return torch.complex(*symbol_parts(at_least_float32(kernel), f1, f2, h, w))  # torch has no complex bfloat16


def symbol_parts(kernel: Tensor, f1: Tensor, f2: Tensor, h: int, w: int) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of :func:`symbol_at`, each ``(F, cout, cin)``."""
    check_kernel(kernel)
    cout, cin, kh, kw = kernel.shape
    taps = kernel.permute(2, 3, 0, 1).reshape(kh * kw, cout * cin)
    table = wave_table(f1, f2, h, w, (kh, kw), kernel).flatten(0, 1)  # cosines and sines as rows of one product
    with autocast_off(kernel):
        re, im = (table @ taps).reshape(2, -1, cout, cin).unbind(0)
    return re, im


def wave_table(f1: Tensor, f2: Tensor, h: int, w: int, size: tuple[int, int], like: Tensor) -> Tensor:
    """Cosines and sines ``(2, F, kh kw)`` of the waves of frequencies ``(F,)`` at the taps of a kernel of this size."""
    cos1, sin1 = _waves(f1, h, size[0], like)
    cos2, sin2 = _waves(f2, w, size[1], like)
    # e^{i(a + b)} for every pair of taps
    cos = (cos1[:, :, None] * cos2[:, None, :] - sin1[:, :, None] * sin2[:, None, :]).flatten(1)
    sin = (sin1[:, :, None] * cos2[:, None, :] + cos1[:, :, None] * sin2[:, None, :]).flatten(1)
    return torch.stack((cos, sin)).to(like.dtype)


def symbol(kernel: Tensor, h: int, w: int) -> Tensor:
    r"""The symbol ``(h, w // 2 + 1, cout, cin)`` of a kernel ``(cout, cin, kh, kw)`` at the frequencies of ``rfft2``.

    Equal to ``conj(rfft2(K, (h, w))) * exp(-2 pi i (c1 f1 / h + c2 f2 / w))`` for kernels that fit, c = (k - 1) // 2.

    >>> symbol(torch.ones(2, 3, 1, 1), 4, 6).shape
    torch.Size([4, 4, 2, 3])
    """
    return symbol_at(kernel, *half_grid(h, w), h, w).unflatten(0, (h, -1))


def taps_of(symbols: Tensor, h: int, w: int, size: Sequence[int]) -> Tensor:
    """The taps ``(cout, cin, kh, kw)`` that :func:`symbol` maps to ``symbols``; taps outside this size are dropped."""
    (kh, kw), taps = size, torch.fft.irfft2(symbols.conj().permute(2, 3, 0, 1), s=(h, w))
    return taps.roll(((kh - 1) // 2, (kw - 1) // 2), (-2, -1))[..., :kh, :kw]


def fold(kernel: Tensor, h: int, w: int) -> Tensor:
    """The kernel of at most ``h x w`` taps with the same circular convolution on an ``h x w`` image.

    Taps that meet modulo the image size are added. The result keeps the centring convention ``(k - 1) // 2``.

    >>> fold(torch.ones(1, 1, 3, 3), 1, 2).flatten().tolist()
    [3.0, 6.0]
    """
    check_kernel(kernel)
    for dim, n in ((2, h), (3, w)):
        if (k := kernel.shape[dim]) > n:
            folded = torch.zeros_like(kernel.narrow(dim, 0, n))
            kernel = folded.index_add(dim, folded_places(k, n).to(kernel.device), kernel)
    return kernel


def folded_places(k: int, n: int) -> Tensor:
    """For each of k taps its index in a kernel of n taps with the same centre, modulo n."""
    return torch.remainder(torch.arange(k) - (k - 1) // 2 + (n - 1) // 2, n)


def centred(kernel: Tensor) -> Tensor:
    """The kernel with odd sizes: an even one gets a zero tap in front, which moves its centre to the middle.

    >>> centred(torch.ones(1, 1, 1, 2)).flatten().tolist()
    [0.0, 1.0, 1.0]
    """
    kh, kw = kernel.shape[2:]
    return kernel if kh % 2 and kw % 2 else F.pad(kernel, (1 - kw % 2, 0, 1 - kh % 2, 0))
