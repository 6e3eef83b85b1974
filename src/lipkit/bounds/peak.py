r"""Where the norm of a symbol is largest: a search in float32 that proposes and never proves.

Power steps by :math:`F^*F` at all points of a coarse grid at once, accelerated by Chebyshev polynomials, then at the
best points alternating steps of the frequency (a scalar trigonometric polynomial for a fixed vector) and the vector.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipkit.bounds.power import start_vector

# Points per turn and degree on which the peak is reported: at most 0.03 % below the largest value in between.
FINE = 128
_CANDIDATES = 8


class Peak(NamedTuple):
    """The best frequency found, ``2 pi point / periods`` of a group, and estimates of ``||F||^2`` on the coarse grid."""

    group: int
    point: tuple[int, int]
    periods: tuple[int, int]
    sample: Tensor


class _Symbols:
    """Products by F(w) and its adjoint for vectors ``(g, c, B)``, each with a frequency of its own."""

    def __init__(self, kernels: Tensor) -> None:
        groups, cout, cin, kh, kw = kernels.shape
        self.taps = torch.cartesian_prod(torch.arange(kh), torch.arange(kw)).reshape(-1, 2).to(kernels)
        self.cout = cout
        self.rows = kernels.permute(0, 3, 4, 1, 2).reshape(groups, kh * kw * cout, cin).contiguous()

    def waves(self, w: Tensor) -> Tensor:
        """e^{i s w} for frequencies ``(g, B, 2)``: ``(g, T, 1, B)``."""
        angle = (self.taps @ w.mT)[:, :, None]
        return torch.polar(torch.ones_like(angle), angle)

    def each_tap(self, v: Tensor) -> Tensor:
        """``K[s] v``: ``(g, T, cout, B)``."""
        y = self.rows @ torch.view_as_real(v).flatten(2)
        return torch.view_as_complex(y.unflatten(2, (-1, 2)).unflatten(1, (-1, self.cout)))

    def gram(self, v: Tensor, waves: Tensor) -> Tensor:
        """``F^* F v``."""
        image = (self.each_tap(v) * waves).sum(1, keepdim=True) * waves.conj()
        back = self.rows.mT @ torch.view_as_real(image.resolve_conj()).flatten(1, 2).flatten(2)
        return torch.view_as_complex(back.unflatten(2, (-1, 2)).contiguous())


def _normalised(v: Tensor) -> Tensor:
    return v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(1e-30)


def _steps(symbols: _Symbols, v: Tensor, waves: Tensor, plain: int, degree: int) -> tuple[Tensor, Tensor]:
    """Vectors after plain power steps and a Chebyshev polynomial of that degree, and their Rayleigh quotients."""
    for _ in range(plain):
        v = _normalised(symbols.gram(v, waves))
    image = symbols.gram(v, waves)
    quotient = (v.conj() * image).sum(1, keepdim=True).real
    # Eigenvalues below 0.85 of the quotient stay bounded, those above grow like Chebyshev polynomials.
    scale = 2 / (0.85 * quotient).clamp_min(1e-30)
    before, now = v, scale * image - v
    for _ in range(degree - 1):
        before, now = now, 2 * (scale * symbols.gram(now, waves) - now) - before
    v = _normalised(now)
    return v, (v.conj() * symbols.gram(v, waves)).sum(1).real


def _move(symbols: _Symbols, v: Tensor, w: Tensor, radius: list[float]) -> Tensor:
    """The best frequency near each one for its vector held fixed."""
    y = symbols.each_tap(v)
    gram = torch.einsum("gsob,gtob->gbst", y.conj(), y)
    line = torch.linspace(-1, 1, 9, device=w.device)
    patch = torch.cartesian_prod(line, line) * torch.tensor(radius, device=w.device)
    near = w[:, :, None] + patch
    angle = near @ symbols.taps.mT
    waves = torch.polar(torch.ones_like(angle), angle)
    value = ((waves.conj() @ gram) * waves).sum(-1).real
    best = value.argmax(-1)
    return near.gather(2, best[:, :, None, None].expand(-1, -1, 1, 2))[:, :, 0]


def find_peak(kernels: Tensor) -> Peak:
    """Search the largest norm of the symbols of kernels ``(g, cout, cin, kh, kw)`` (finite, entries near 1).

    >>> peak = find_peak(torch.ones(1, 1, 1, 3, 3))
    >>> peak.point, round(peak.sample.amax().item())
    ((0, 0), 81)
    """
    kernels = kernels.detach().to(torch.float32)
    if kernels.shape[1] < kernels.shape[2]:
        kernels = kernels.transpose(1, 2)
    groups, _, cin = kernels.shape[:3]
    degrees = (kernels.shape[3] - 1, kernels.shape[4] - 1)
    n1, n2 = (2 * m + 4 if m else 1 for m in degrees)
    # G(-w) is the conjugate of G(w): half of the turn of one axis is enough.
    halves = (n1, n2 // 2 + 1) if n2 > 1 else (n1 // 2 + 1, 1)
    grid = torch.cartesian_prod(torch.arange(halves[0]) / n1, torch.arange(halves[1]) / n2) * 2 * math.pi
    grid = grid.to(kernels).expand(groups, -1, 2)
    symbols = _Symbols(kernels)
    start = start_vector(2 * cin * grid.shape[1], kernels).reshape(1, cin, -1, 2)
    v = torch.view_as_complex(start.expand(groups, -1, -1, -1).contiguous())
    v, sample = _steps(symbols, _normalised(v), symbols.waves(grid), 2, 4)
    # The groups of the best points, each with its own best ones.
    top = min(groups, _CANDIDATES)
    chosen = sample.amax(1).topk(top).indices
    count = min(max(1, _CANDIDATES // top), sample.shape[1])
    columns = sample[chosen].topk(count).indices
    w = grid[chosen].gather(1, columns[:, :, None].expand(-1, -1, 2))
    v = v[chosen].gather(2, columns[:, None].expand(-1, cin, -1))
    symbols.rows = symbols.rows[chosen]
    radius = [math.pi / max(n, 2) for n in (n1, n2)]
    for shrink in (1.0, 0.3, 0.1):
        w = _move(symbols, v, w, [shrink * r for r in radius])
        v, value = _steps(symbols, v, symbols.waves(w), 0, 5)
    best = int(value.argmax())
    row, column = divmod(best, value.shape[1])
    periods = tuple(FINE * m if m else 1 for m in degrees)
    turns = w[row, column].double() / (2 * math.pi)
    point = tuple(round(float(t) * n) % n for t, n in zip(turns, periods, strict=True))
    return Peak(int(chosen[row]), point, periods, sample)  # type: ignore[arg-type]
