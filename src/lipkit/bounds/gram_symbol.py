r"""The symbol :math:`G(w) = F(w)^* F(w)` of a convolution and its adjoint, with proved tests :math:`G(w) \le t`.

It is a Hermitian trigonometric polynomial of degree ``k - 1`` per axis, whose matrix coefficients are the
autocorrelation of the kernel, made once: each frequency then costs ``(2k-1)^2 c^2`` to form and ``4/3 c^3`` to test.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.bounds.definite import cholesky_succeeds
from lipkit.bounds.rounding import UNIT, gamma
from lipkit.conv.autocorrelation import half_autocorrelation, half_lags

# Matrices formed at once: their memory is used again, since fresh pages cost more than the arithmetic.
_CHUNK_BYTES = 1 << 22


class GramSymbol:
    """G(w) of each group, on its smaller side, with the bounds that a proof needs.

    Args:
        kernels: ``(g, cout, cin, kh, kw)``, float64, largest entry in [1/2, 1), no gradient.

    Attributes:
        degrees: (kh - 1, kw - 1).
        curvature: bound of the sum of ``||A[delta]|| max_i (delta_i / degree_i)^2`` over all delta.
    """

    def __init__(self, kernels: Tensor) -> None:
        groups, cout, cin, kh, kw = kernels.shape
        if cout < cin:
            # F(w) and its transpose have the same norm: contract the longer side.
            kernels, cout, cin = kernels.transpose(1, 2), cin, cout
        self.groups, self.side, self.degrees = groups, cin, (kh - 1, kw - 1)
        self.lags = half_lags(kh, kw).to(kernels.device)
        half = half_autocorrelation(kernels)
        cosine = -(half + half.mT)
        cosine[:, 0] = -half[:, 0]
        self._cosine = cosine.flatten(2)
        self._sine = (half - half.mT)[:, 1:].flatten(2)
        # A = || sum_s |K_s| ||_F: A^2 bounds the norm of the sum of |A[delta]|, hence all roundings of the
        # coefficients (inner products of cout kh kw terms), of the cosines (angles below 2 pi) and of the sums.
        absolute = float(kernels.abs().sum((-2, -1)).square().sum((-2, -1)).amax()) * (1 + gamma(kernels[0].numel() + 8))
        self.error = absolute * gamma(2 * (cout * kh * kw + len(self.lags)) + 128)
        self.curvature = self._curvature(half) + 4 * self.error

    def _curvature(self, half: Tensor) -> float:
        reach = torch.zeros(len(self.lags), dtype=torch.float64, device=half.device)
        for axis, degree in enumerate(self.degrees):
            if degree:
                reach = torch.maximum(reach, (self.lags[:, axis].double() / degree).square())
        norms = torch.linalg.vector_norm(half, dim=(-2, -1))
        mean = half[:, 0].diagonal(dim1=1, dim2=2).mean(1)
        if bool(((norms[:, 1:].sum(1) / math.sqrt(self.side)) < 4 * mean).any()):
            # Not far from constant: worth the finer bound by row and column sums.
            size = half.abs()
            norms = torch.minimum(norms, (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt())
        return float((2 * norms * reach).sum(1).amax()) * (1 + gamma(4 * self.side**2))

    def _minus(self, group: int, points: Tensor, periods: tuple[int, int], parts: Tensor, h: Tensor) -> Tensor:
        """``-G`` at the frequencies ``2 pi points / periods``, written to ``h``, ``(N, c, c)``, by way of ``parts``."""
        n1, n2 = periods
        # Whole turns are removed in integers: the angle is right to a few roundings.
        turns = torch.remainder((self.lags * torch.tensor([n2, n1], device=points.device)) @ points.mT, n1 * n2)
        angle = turns.mT.to(torch.float64) * (2 * math.pi / (n1 * n2))
        flat = torch.view_as_real(h).flatten(1, 2)
        torch.mm(angle.cos(), self._cosine[group], out=parts)
        flat[..., 0] = parts
        torch.mm(angle[:, 1:].sin(), self._sine[group], out=parts)
        flat[..., 1] = parts
        return h

    def _buffers(self, count: int) -> tuple[Tensor, Tensor]:
        parts = self._cosine.new_empty(count, self.side**2)
        return parts, parts.new_empty(count, self.side, self.side, dtype=torch.complex128)

    def at(self, group: int, points: Tensor, periods: tuple[int, int]) -> Tensor:
        """G at the frequencies ``2 pi points / periods``: complex128 ``(N, c, c)``."""
        return -self._minus(group, points, periods, *self._buffers(len(points)))

    def below(self, cells: Tensor, periods: tuple[int, int], level: float) -> Tensor:
        """Which of the frequencies are proved to have ``||G(w)|| <= level``, in exact arithmetic on the kernel.

        Args:
            cells: integers ``(N, 3)``: group and the two coordinates of a point, as multiples of 2 pi / ``periods``.
            periods: number of points per turn of each axis.
            level: the bound to be proved.

        Returns:
            bool ``(N,)``: True is a proof; False says nothing.
        """
        # Rump 2006: a factorisation of H that completes proves H >= -gamma_{c+1}/(1 - ...) tr(H); eight times that
        # for complex arithmetic and for kernels that multiply by reciprocals. The trace is at most c * level.
        allowance = gamma(8 * (self.side + 4)) * self.side * level
        shift = (level - allowance - self.error) * (1 - 16 * UNIT)
        done = torch.zeros(len(cells), dtype=torch.bool, device=cells.device)
        if not shift > 0:
            return done
        step = max(1, min(len(cells), _CHUNK_BYTES // (16 * self.side**2)))
        parts, matrices = self._buffers(step)
        for group in cells[:, 0].unique().tolist():
            rows = (cells[:, 0] == group).nonzero()[:, 0]
            for part in rows.split(step):
                h = matrices[: len(part)]
                self._minus(group, cells[part, 1:], periods, parts[: len(part)], h)
                h.diagonal(dim1=1, dim2=2).add_(shift)
                done[part] = cholesky_succeeds(h)
        return done
