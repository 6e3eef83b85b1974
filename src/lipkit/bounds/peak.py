r"""Where the norm of a symbol is largest: a search in float32 that proposes and never proves.

A few Lanczos steps by :math:`F^*F` at all points of a coarse grid at once; then, from the best points, steps that
alternate between the vector and the frequency. For a fixed vector the norm is a scalar function of the frequency.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipkit.bounds.power import start_vector
from lipkit.linalg.precision import without_autocast

# The peak is rounded to a grid of this many points per turn and degree, at most 0.03 % below the largest value.
FINE = 128
_CANDIDATES = 8
_WIDE, _VERY_WIDE = 64, 256


class Peak(NamedTuple):
    """The best frequency, ``2 pi point / periods``, its group, and estimates of ``||F||^2`` on the coarse grid."""

    group: int
    point: tuple[int, int]
    periods: tuple[int, int]
    sample: Tensor


def half_turn(periods: tuple[int, int]) -> Tensor:
    """One of each pair of points ``(p, -p)`` of a grid, ``(N, 2)``.

    >>> half_turn((2, 3)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    n1, n2 = periods
    points = torch.cartesian_prod(torch.arange(n1), torch.arange(n2 // 2 + 1)).reshape(-1, 2)
    own_mirror = torch.remainder(2 * points[:, 1], n2) == 0
    return points[~(own_mirror & (points[:, 0] > n1 // 2))]


class _Symbols:
    """Products of F(w) and its adjoint with vectors ``(g, c, B)``, each at its own frequency w."""

    def __init__(self, kernels: Tensor) -> None:
        groups, self.cout, cin, kh, kw = kernels.shape
        self.taps = torch.cartesian_prod(torch.arange(kh), torch.arange(kw)).reshape(-1, 2).to(kernels)
        self.rows = kernels.permute(0, 3, 4, 1, 2).reshape(groups, kh * kw * self.cout, cin)

    def waves(self, w: Tensor) -> Tensor:
        """``e^{i s w}``, ``(g, T, 1, B)``, for frequencies ``(g, B, 2)`` and all T taps s."""
        angle = (self.taps @ w.mT)[:, :, None]
        return torch.complex(angle.cos(), angle.sin())

    def each_tap(self, v: Tensor) -> Tensor:
        """``K[s] v``, ``(g, T, cout, B)``, for all T taps s."""
        y = self.rows @ torch.view_as_real(v).flatten(2)  # real kernels: both parts of v side by side
        return torch.view_as_complex(y.unflatten(2, (-1, 2)).unflatten(1, (-1, self.cout)))

    def gram(self, v: Tensor, waves: Tensor, conjugate: Tensor) -> Tensor:
        """``F^* F v``; ``waves`` is :meth:`waves` at the frequencies, ``conjugate`` its conjugate."""
        image = (self.each_tap(v) * waves).sum(1, keepdim=True) * conjugate
        back = self.rows.mT @ torch.view_as_real(image).flatten(1, 2).flatten(2)
        return torch.view_as_complex(back.unflatten(2, (-1, 2)))

    def lanczos(self, v: Tensor, w: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """The largest Ritz value of ``F^* F`` at each ``w``, with its vector: (vectors ``(g, c, B)``, values)."""
        waves = self.waves(w)
        conjugate = waves.conj_physical()
        v = v / _dot(v, v).sqrt().clamp_min(1e-30)
        basis, diagonal, off_diagonal = [v], list[Tensor](), list[Tensor]()
        for _ in range(min(steps, v.shape[1]) - 1):
            image = self.gram(v, waves, conjugate)
            diagonal.append(_dot(v, image))
            image -= diagonal[-1] * v  # three terms: F^*F is Hermitian
            if off_diagonal:
                image -= off_diagonal[-1] * basis[-2]
            size = _dot(image, image).sqrt()
            off_diagonal.append(size)
            v = image / size.clamp_min(1e-30)
            basis.append(v)
        diagonal.append(_dot(v, self.gram(v, waves, conjugate)))
        small = torch.diag_embed(torch.cat(diagonal, 1).mT)
        if off_diagonal:
            sides = torch.cat(off_diagonal, 1).mT
            small = small + torch.diag_embed(sides, 1) + torch.diag_embed(sides, -1)
        values, vectors = torch.linalg.eigh(small)
        weights = vectors[..., -1].mT[:, :, None]
        return (torch.stack(basis, 1) * weights).sum(1), values[..., -1]

    def moved(self, v: Tensor, w: Tensor, radius: list[float]) -> Tensor:
        """For each frequency w and vector v, the w' near w that maximises ``||F(w') v||``."""
        y = self.each_tap(v)
        gram = torch.einsum("gsob,gtob->gbst", y.conj(), y)
        line = torch.linspace(-1, 1, 7, device=w.device, dtype=w.dtype)
        near = w[:, :, None] + torch.cartesian_prod(line, line) * w.new_tensor(radius)
        angle = near @ self.taps.mT
        waves = torch.complex(angle.cos(), angle.sin())
        best = ((waves.conj() @ gram) * waves).real.sum(-1).argmax(-1)
        return near.gather(2, best[:, :, None, None].expand(-1, -1, 1, 2))[:, :, 0]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Real part of the inner products along the channels."""
    return (torch.view_as_real(a) * torch.view_as_real(b)).sum((1, 3))[:, None]


@without_autocast()
def find_peak(kernels: Tensor) -> Peak:
    """Search for the largest norm of the symbols of kernels ``(g, cout, cin, kh, kw)`` (finite, entries near 1)."""
    kernels = kernels.detach().to(torch.float32)
    if kernels.shape[1] < kernels.shape[2]:
        kernels = kernels.transpose(1, 2)
    groups, _, cin = kernels.shape[:3]
    degrees = (kernels.shape[3] - 1, kernels.shape[4] - 1)
    # Wide kernels have flat symbols with close eigenvalues: more steps, and fewer points where these cost too much.
    extra_points = 2 if cin >= _VERY_WIDE else 4
    steps = 6 if cin < _WIDE else min(24, 7 + cin // 64)
    n1, n2 = (2 * m + extra_points if m else 1 for m in degrees)
    points = half_turn((n1, n2)).to(kernels) * kernels.new_tensor([2 * math.pi / n1, 2 * math.pi / n2])
    grid = points.expand(groups, -1, 2)
    symbols = _Symbols(kernels)
    start = torch.view_as_complex(start_vector(2 * cin, kernels).reshape(1, cin, 1, 2))
    v, sample = symbols.lanczos(start.repeat(groups, 1, grid.shape[1]), grid, steps)
    # The best groups, each with its own best points.
    top = min(groups, _CANDIDATES)
    count = min(_CANDIDATES // top, sample.shape[1])
    chosen = sample.amax(1).topk(top).indices
    columns = sample[chosen].topk(count).indices
    w = grid[chosen].gather(1, columns[:, :, None].expand(-1, -1, 2))
    v = v[chosen].gather(2, columns[:, None].expand(-1, cin, -1))
    if groups > 1:
        symbols.rows = symbols.rows[chosen]
    radius = [math.pi / max(n, 2) for n in (n1, n2)]
    w = symbols.moved(v, w, radius)
    v, value = symbols.lanczos(v, w, 6)
    w = symbols.moved(v, w, [r / 4 for r in radius])
    row, column = divmod(int(value.argmax()), value.shape[1])
    fine1, fine2 = (FINE * m if m else 1 for m in degrees)
    turns = (w[row, column].double() / (2 * math.pi)).tolist()
    point = (round(turns[0] * fine1) % fine1, round(turns[1] * fine2) % fine2)
    # A few steps leave Ritz values a little low: correct all by what more steps gained at the peak.
    correction = min(1.04, max(1.0, float(value.max() / sample.max().clamp_min(1e-30))))
    return Peak(int(chosen[row]), point, (fine1, fine2), sample.flatten() * correction)
