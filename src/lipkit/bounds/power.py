r"""LOWER estimates of spectral norms by the power method. They never certify anything.

The quotient :math:`\|Av\| / \|v\|` of any vector is at most :math:`\|A\|_2`, so whatever a power iteration returns is
too small: dividing by it leaves a norm above 1. Certificates use the other files of this package.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.conv import fold
from lipkit.conv.symbol import check_kernel, half_grid, symbol_at
from lipkit.linalg import at_least_float32
from lipkit.linalg.matrices import check_integer, check_positive, near_one, thin_svd
from lipkit.linalg.singular_value import singular_value
from lipkit.proof.norms import gram_matrix


def _checked(kernel: Tensor, h: int, w: int, iterations: int) -> tuple[Tensor, Tensor]:
    """The kernel over its largest entry, which keeps powers in range, and that entry; float32 or better."""
    check_kernel(kernel)
    check_positive(h=h, w=w)
    check_integer("iterations", iterations, 0)
    kernel = at_least_float32(kernel)
    return near_one(kernel, (0, 1, 2, 3)), kernel.detach().abs().amax()


def start_vector(n: int, like: Tensor) -> Tensor:
    r"""The fixed start of every iteration, ``(n,)``: the chirp :math:`\cos(\pi \sqrt2\, i^2)`, without any structure.

    A function of n alone: no generator, no state, and no frequency in which it is small.
    """
    i = torch.arange(n, dtype=torch.float64, device=like.device)
    return torch.cos(math.pi * torch.remainder(math.sqrt(2) * i * i, 2)).to(like.dtype)


def unit(v: Tensor) -> Tensor:
    """``v / ||v||``; a zero stays as it is."""
    norm = torch.linalg.vector_norm(v)
    return v / torch.where(norm > 0, norm, torch.ones_like(norm))


def _iterate(
    v: Tensor, apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], iterations: int
) -> tuple[Tensor, Tensor]:
    """The unit vector after ``iterations`` power steps from v, and its image."""
    v = unit(v)
    for _ in range(iterations):
        v = unit(adjoint(apply(v)))
    return v, apply(v)


def _correlate(x: Tensor, kernel: Tensor, centre: tuple[int, int], groups: int) -> Tensor:
    """Circular cross-correlation; the tap ``centre`` multiplies the pixel itself, so the size stays."""
    (top, left), (kh, kw) = centre, kernel.shape[-2:]
    pads = (left, kw - 1 - left, top, kh - 1 - top)
    return F.conv2d(F.pad(x, pads, mode="circular") if any(pads) else x, kernel, groups=groups)


def _quotients(x: Tensor, y: Tensor) -> Tensor:
    """Squares of ``||y(f)|| / ||x(f)||`` for coefficients ``(C, F)``; 0 where x(f) consists of rounding errors."""
    power_in, power_out = (t.abs().square().sum(0) for t in (x, y))
    counts = power_in > 1e-4 * power_in.amax()
    return torch.where(counts, power_out, 0) / torch.where(counts, power_in, 1)


def maps(kernel: Tensor, groups: int = 1) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The circular convolution with a kernel that fits the image, and its adjoint."""
    kh, kw = kernel.shape[-2:]
    flipped = kernel.flip(-2, -1).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    centre, opposite = ((kh - 1) // 2, (kw - 1) // 2), (kh // 2, kw // 2)
    return lambda v: _correlate(v, kernel, centre, groups), lambda y: _correlate(y, flipped, opposite, groups)


def farnia_lower_estimate(kernel: Tensor, h: int, w: int, iterations: int = 10) -> Tensor:
    r"""LOWER estimate of the norm of a circular convolution on ``h x w``, by the convolutional power method.

    .. math:: x \leftarrow K^\top K x / \|K^\top K x\|, \qquad
              \text{estimate} = \max_f \frac{\|\widehat{Kx}(f)\|}{\|\hat x(f)\|} \le \|K\|_2

    with :math:`K^\top` the transposed convolution, on one image from a fixed start. A circular convolution acts on each
    frequency by itself, so the image carries one power iteration for each of them: after 10 steps on a random kernel
    the best quotient is typically within 1 % of the norm, :math:`\|Kx\| / \|x\|` within 4 %. Frequencies of less than
    1e-4 of the largest power do not count. Taps beyond the image wrap around. Differentiable; 0 at a zero kernel.

    Guarantee:
        None from above: the true norm (``bounds.circular``) is at least this, up to rounding (which is 1e-3 where a
        GPU convolves in TF32).

    Cost:
        ``2 iterations + 1`` convolutions and two Fourier transforms of one image.

    >>> from lipkit.bounds import circular
    >>> k = torch.arange(18.0).reshape(2, 1, 3, 3)
    >>> 0.99 * float(circular(k, 5, 4)) < float(farnia_lower_estimate(k, 5, 4)) < 1.00001 * float(circular(k, 5, 4))
    True

    References:
        Farnia, Zhang & Tse, ICLR 2019, and Ryu et al., ICML 2019, for the power method by convolutions; the fixed
        start and the quotient per frequency are new here.
    """
    kernel, size = _checked(kernel, h, w, iterations)
    kernel = fold(kernel, h, w)
    x = start_vector(kernel.shape[1] * h * w, kernel).reshape(1, -1, h, w)
    both = (torch.fft.rfft2(t)[0].flatten(1) for t in _iterate(x, *maps(kernel), iterations))
    largest = _quotients(*both).amax()
    # sqrt has no finite derivative at 0, where the kernel is zero.
    return size * torch.where(largest > 0, largest, 1).sqrt() * (largest > 0)


def _length(v: Tensor) -> Tensor:
    """Norms ``(F, 1)`` of complex rows ``(F, n)``; torch takes ten times as long over complex numbers."""
    return torch.linalg.vector_norm(torch.view_as_real(v).flatten(1), dim=1, keepdim=True)


def _normed(v: Tensor) -> Tensor:
    norm = _length(v)
    return v / torch.where(norm > 0, norm, 1)


def _krylov(a: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lower estimates of the norms of matrices ``a`` ``(F, m, n)``, by Krylov spaces that start at ``v``.

    After `HEATS` steps only the best `FINALISTS` matrices go on. Returns, for the f matrices that are left, the
    estimates ``(f,)``, the unit vectors ``(f, n)`` that reach them, and the indices of the matrices in ``a``.
    """
    v, which = _normed(v), torch.arange(len(a), device=a.device)
    basis, images = v[:, None], v[:, None] @ a.mT
    for step in range(min(steps, v.shape[1] - 1)):
        if step == HEATS and len(a) > FINALISTS:
            keep = torch.linalg.eigvalsh(images.conj() @ images.mT)[:, -1].topk(FINALISTS).indices
            a, basis, images, which = (one[keep] for one in (a, basis, images, which))
        v = (images[:, -1:].conj() @ a)[:, 0].conj().resolve_conj()  # A^* y, as a row
        size = _length(v)
        # Twice, because the first projection leaves rounding of the size of what it takes away.
        for _ in range(2):
            v = v - (v[:, None] @ basis.mH @ basis)[:, 0]
        rest = _length(v)
        # In an invariant space the rest is only rounding: drop it.
        v = torch.where(rest > 100 * torch.finfo(a.dtype).eps * size, v / torch.where(rest > 0, rest, 1), 0)
        # A row by matrices: several times faster than matrices by a column.
        basis, images = (torch.cat(both, 1) for both in ((basis, v[:, None]), (images, v[:, None] @ a.mT)))
    values, vectors = torch.linalg.eigh(images.conj() @ images.mT)
    best = (vectors[:, None, :, -1] @ basis)[:, 0].resolve_conj()
    return values[:, -1].clamp_min(0).sqrt(), _normed(best), which


# All frequencies take SCREENING steps together. The best go on: as many as have ENTRIES entries in all, at least
# CANDIDATES.
SCREENING = 4
ENTRIES = 2**17
CANDIDATES = 16
# After HEATS steps of Krylov spaces, the best FINALISTS go on.
HEATS, FINALISTS = 4, 3
# Up to this value of (number of frequencies) x (smaller side)^3, eigenvalues at all frequencies are faster.
EXACT = 5_000_000


def _by_eigenvalues(taps: Tensor, h: int, w: int) -> tuple[Tensor, Tensor, Tensor]:
    """The frequency (f1, f2) of the largest norm of the symbol, and its right singular vector there."""
    f1, f2 = (f.to(taps.device) for f in half_grid(h, w))
    symbols = symbol_at(taps, f1, f2, h, w)
    best = torch.linalg.eigvalsh(gram_matrix(symbols))[:, -1].argmax().reshape(1)
    vectors = thin_svd(symbols[best])[2][0]
    return f1[best], f2[best], vectors[0].conj().resolve_conj()


def _by_steps(taps: Tensor, h: int, w: int, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_by_eigenvalues`, estimated by power steps, then Krylov spaces at the best frequencies."""
    (kh, kw), half = taps.shape[-2:], w // 2 + 1  # columns of a real 2-D transform
    candidates = min(max(CANDIDATES, ENTRIES // taps[..., 0, 0].numel()), h * half)
    # No screening if all frequencies go on anyway.
    screening = min(iterations, SCREENING) if candidates < h * half else 0
    # The symbol of few taps is smooth: every second frequency of an axis is enough.
    spacing = 2 if screening and h % 2 == w % 2 == 0 and 4 * kh <= h and 4 * kw <= w else 1
    rows, columns = h // spacing, w // spacing
    image = start_vector(taps.shape[1] * rows * columns, taps).reshape(1, -1, rows, columns)
    f1, f2 = torch.unravel_index(torch.arange(candidates, device=taps.device), (h, half))
    if screening:
        apply, adjoint = maps(taps)
        # Iterate K K^T, with the same norms: the images K^T y are inputs of K, from which the spaces can start.
        reached, image = _iterate(apply(image), adjoint, apply, screening - 1)
        quotients = _quotients(*(torch.fft.fft2(t)[0].flatten(1) for t in (reached, image))).view(rows, columns)
        if spacing == 2:
            for axis in (0, 1):  # frequencies left out get the mean of their neighbours
                means = (quotients + quotients.roll(-1, axis)) / 2
                quotients = torch.stack((quotients, means), axis + 1).flatten(axis, axis + 1)
        f1, f2 = torch.unravel_index(quotients[:, :half].flatten().topk(candidates).indices, (h, half))
    start = torch.fft.fft2(image)[0][:, f1 // spacing, f2 // spacing].mT
    norms, vectors, which = _krylov(symbol_at(taps, f1, f2, h, w), start, iterations - screening)
    best = norms.argmax().reshape(1)
    return f1[which[best]], f2[which[best]], vectors[best][0]


def krylov_lower_estimate(kernel: Tensor, h: int, w: int, iterations: int = 20) -> Tensor:
    r"""LOWER estimate of the norm of a circular convolution on ``h x w``, by Krylov spaces at its frequencies.

    .. math:: \text{estimate} = \|F(f) v\| \le \max_f \|F(f)\|_2, \qquad
              v \in \mathrm{span}\{x,\, F^*F x,\, \dots,\, (F^*F)^k x\}, \quad \|v\| = 1

    where F(f) is the symbol. A fixed image takes four power steps at all frequencies at once (for few taps, whose
    symbol is smooth, at every second one per axis). At least 16 frequencies with the largest quotients take four steps
    in Krylov spaces, and the best three take all further steps; the largest result counts. With few channels,
    eigenvalues at all frequencies replace the steps. Taps beyond the image wrap around.

    Guarantee:
        None from above: the true norm (``bounds.circular``) is at least this, up to rounding. The derivative is that
        of :math:`\|F(f) v\|` for constant f and v. It equals that of the norm, :math:`\mathrm{Re}\, u^* \dot F v`, if
        the largest singular value is simple and the spaces have found it; second derivatives then agree as well.

    Cost:
        Eight convolutions of one image (of a quarter if its sides are even and at least four times the kernel's);
        eight products by vectors at the chosen frequencies, ``2 iterations`` at three.

    >>> from lipkit.bounds import circular
    >>> k = torch.arange(18.0).reshape(2, 1, 3, 3)
    >>> 0.9999 * float(circular(k, 5, 4)) < float(krylov_lower_estimate(k, 5, 4)) < 1.0001 * float(circular(k, 5, 4))
    True

    References:
        Lanczos, J. Res. Nat. Bur. Standards 45 (1950); the spaces at frequencies, and their choice, are new here.
    """
    kernel, size = _checked(kernel, h, w, iterations)
    with torch.no_grad():
        taps = fold(kernel.detach(), h, w).nan_to_num()  # LAPACK refuses NaN, which the symbol below carries on
        few = h * (w // 2 + 1) * min(kernel.shape[:2]) ** 3 <= EXACT
        f1, f2, vector = _by_eigenvalues(taps, h, w) if few else _by_steps(taps, h, w, iterations)
    symbol = symbol_at(kernel, f1, f2, h, w)[0]
    image = (symbol @ vector).detach()
    norm = torch.linalg.vector_norm(image)
    return size * singular_value(symbol, image / norm.clamp_min(1e-30), vector, norm)
