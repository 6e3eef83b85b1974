r"""The symbol :math:`G(w) = F(w)^* F(w)` of a convolution followed by its adjoint; proved tests of :math:`G(w) \le t`.

It is a Hermitian trigonometric polynomial of degree ``k - 1`` per axis, whose matrix coefficients A[l] are the kernel's
autocorrelation at lag l, made once: each frequency then costs ``(2k-1)^2 c^2`` to form and ``4/3 c^3`` to test.
"""

import math
from functools import cached_property

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from lipkit.conv.block import half_autocorrelation, half_lags
from lipkit.conv.spectrum import angles
from lipkit.proof.roundoff import FLOAT32, UNIT, gamma

# Size of the matrices formed at once.
_CHUNK_BYTES = 1 << 24
# Up to this side, products of different groups go through one batched call.
_SMALL = 8
# From this side on, a first test in float32 pays.
_SINGLE_FROM = 24
# Below this size a call of LAPACK costs more than the factorisation itself, so torch factorises the batch in one call.
_PACKED_FROM = 16


class GramSymbol:
    """The symbol G(w) of each group, (c, c) with c the smaller number of channels, and proved tests of its norm.

    Args:
        kernels: ``(g, cout, cin, kh, kw)``, float64, largest entry in [1/2, 1), no gradient.

    Attributes:
        degrees: (kh - 1, kw - 1).
        curvature: bound of the sum of ``||A[l]|| max_i (l_i / degree_i)^2`` over all lags l.
    """

    def __init__(self, kernels: Tensor) -> None:
        groups, cout, cin, kh, kw = kernels.shape
        if cout < cin:
            # F(w) and its transpose have the same norm: contract the longer side.
            kernels, cout, cin = kernels.transpose(1, 2), cin, cout
        self.groups, self.side, self.degrees = groups, cin, (kh - 1, kw - 1)
        self.lags = half_lags(kh, kw).to(kernels.device)
        half = half_autocorrelation(kernels)
        self._entries = stored_entries(cin, kernels.device)
        self._table = self._interleaved(half)
        size = half.abs().sum(1)
        # Norm of the sum of |A[l]| over all lags l, by its row sums.
        self.spread = float((size + size.mT).sum(-1).amax()) * (1 + gamma(4 * cin * len(self.lags)))
        # a = || sum_s |K_s| ||_F: a^2 bounds the norm of the sum of |A[l]|, hence all roundings of the
        # coefficients (inner products of cout kh kw terms), of the cosines (angles below 2 pi) and of the sums.
        a_squared = float(kernels.abs().sum((-2, -1)).square().sum((-2, -1)).amax())
        a_squared *= 1 + gamma(kernels[0].numel() + 8)
        self.error = a_squared * gamma(2 * (cout * kh * kw + len(self.lags)) + 128)
        self.curvature = self._curvature(half) + 4 * self.error

    def _interleaved(self, half: Tensor) -> Tensor:
        """Coefficients of E entries of -G at L lags, ``(g, 2 L - 1, 2 E)``: cosines (real), then sines (imaginary)."""
        row, column, sign = self._entries
        flat = half.flatten(2)
        places = (row * self.side + column, column * self.side + row)
        there, back = (flat.gather(2, place.expand(*flat.shape[:2], -1)) for place in places)
        lags = half.shape[1]
        table = half.new_zeros(len(half), 2 * lags - 1, len(row), 2)
        torch.add(there[:, 1:], back[:, 1:], out=table[:, 1:lags, :, 0]).neg_()
        table[:, 0, :, 0] = -there[:, 0]  # lag zero has no partner and no sine
        torch.sub(there[:, 1:], back[:, 1:], out=table[:, lags:, :, 1]).mul_(sign)
        return table.flatten(2)

    def _curvature(self, half: Tensor) -> float:
        reach = torch.zeros(len(self.lags), dtype=torch.float64, device=half.device)
        for axis, degree in enumerate(self.degrees):
            if degree:
                reach = torch.maximum(reach, (self.lags[:, axis].double() / degree).square())
        norms = torch.linalg.vector_norm(half, dim=(-2, -1))
        mean = half[:, 0].diagonal(dim1=1, dim2=2).mean(1)
        if bool(((norms[:, 1:].sum(1) / math.sqrt(self.side)) < 4 * mean).any()):
            # A nearly constant symbol is worth the finer bound by row and column sums.
            size = half.abs()
            norms = torch.minimum(norms, (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt())
        return float((2 * norms * reach).sum(1).amax()) * (1 + gamma(4 * self.side**2))

    def _minus(self, cells: Tensor, periods: tuple[int, int], table: Tensor, out: Tensor) -> Tensor:
        """Write the stored entries of ``-G`` at each cell's centre (see :meth:`below`) to ``out``, ``(N, 2 E)``."""
        angle = angles(cells[:, 1:], self.lags, *periods)
        wave = torch.cat((angle.cos(), angle[:, 1:].sin()), 1).to(table.dtype)
        if self.groups == 1:
            _product(wave, table[0], out)
        elif self.side <= _SMALL:
            torch.bmm(wave[:, None], table[cells[:, 0]], out=out[:, None])
        else:
            # Cells come in the order of their groups.
            groups, counts = (t.tolist() for t in cells[:, 0].unique_consecutive(return_counts=True))
            for group, rows, made in zip(groups, wave.split(counts), out.split(counts), strict=True):
                _product(rows, table[group], made)
        return torch.view_as_complex(out.unflatten(1, (-1, 2)))

    def at(self, cell: Tensor, periods: tuple[int, int]) -> Tensor:
        """G at the centre of one cell (see :meth:`below`): ``(c, c)``."""
        row, column, sign = self._entries
        values = -self._minus(cell[None], periods, self._table, self._table.new_empty(1, self._table.shape[2]))[0]
        values = torch.complex(values.real, values.imag * sign)
        full = values.new_empty(self.side, self.side)
        full[column, row] = values.conj()
        full[row, column] = values
        return full

    def below(self, cells: Tensor, periods: tuple[int, int], level: float, room: float = 0.0) -> Tensor:
        """``(N,)`` bool: True is a proof of ``||G(w)|| <= level`` at the frequency w; False says nothing.

        Proofs are for exact arithmetic on the kernel. Tests run in float32 if its rounding is small, then in float64.

        Args:
            cells: integers ``(N, 3)``, in the order of the groups: group and the two coordinates of a point, as
                multiples of 2 pi / ``periods``, the number of points per turn of each axis.
            room: expected relative gap between the level and most norms; float32 is used if its rounding is smaller.
        """
        loss = float(cholesky_error(self.side, FLOAT32.unit).sum())
        if self.side < _SINGLE_FROM or self._table.device.type != "cpu" or loss > 0.7 * room:
            return self._test(cells, periods, level, self._table)
        proved = self._test(cells, periods, level, self.single_table)
        if loss > 0.05 * room and not bool(proved.all()):
            proved[~proved] = self._test(cells[~proved], periods, level, self._table)
        return proved

    @cached_property
    def single_table(self) -> Tensor:
        return self._table.to(torch.float32)

    def _test(self, cells: Tensor, periods: tuple[int, int], level: float, table: Tensor) -> Tensor:
        """`below`, computed in the dtype of the coefficients ``table``: its rounding is subtracted from the level."""
        single = table.dtype == torch.float32
        unit, error = FLOAT32.unit if single else UNIT, self.error
        if single:  # each entry is a sum of 2 L rounded products of rounded factors; then the shift rounds
            error += self.spread * 4 * (table.shape[1] + 8) * unit + 4 * unit * level + 1e-25
        level = (level - error) * (1 - 16 * UNIT)
        proved = torch.zeros(len(cells), dtype=torch.bool, device=cells.device)
        if not level > 0:
            return proved
        each = table.element_size() * table.shape[2]
        if self.groups > 1 and self.side <= _SMALL:
            each *= table.shape[1]
        step = max(1, min(len(cells), _CHUNK_BYTES // each))
        # One buffer for all chunks: fresh pages would cost more than the arithmetic.
        out = table.new_empty(step, table.shape[2])
        row, column, _ = self._entries
        diagonal = (row == column).nonzero()[:, 0]
        weights = cholesky_error(self.side, unit).to(cells.device)[row[diagonal]]
        for rows in torch.arange(len(cells), device=cells.device).split(step):
            h = self._minus(cells[rows], periods, table, out[: len(rows)])
            on_diagonal = level + h[:, diagonal].real.double()
            shift = level - (on_diagonal.abs() + 8 * unit * level) @ weights
            h[:, diagonal] += shift.clamp_min(0)[:, None].to(table.dtype)  # h is -G: level I - G, less the allowance
            proved[rows] = cholesky_succeeds(h, self.side) & (shift > 0)
        return proved


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write ``a @ b`` to ``out``; float32 by numpy, since settings may lower torch's products to bfloat16 or TF32."""
    if a.dtype == torch.float32:
        np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    else:
        torch.mm(a, b, out=out)


def cholesky_error(side: int, unit: float) -> Tensor:
    r"""A vector c: a complex Cholesky factorisation of H that completes proves :math:`H \ge -\sum_i c_i H_{ii} I`.

    With r_i the rows of the factor R, entry (i, j) of :math:`H - R R^*` (i, j from 1) is the error of at most
    ``2 min(i, j)`` real products in any order, a subtraction, and a division or a product by a reciprocal: at most
    :math:`\sqrt2\, \gamma_{2\min(i,j) + 8} \|r_i\| \|r_j\|`. The matrix :math:`(\min(i, j) \|r_i\| \|r_j\|)_{ij}` is
    positive semidefinite: its norm is at most its trace. (Rump 2006, theorem 2.3, counts ``side`` products everywhere.)
    """
    n = math.sqrt(2) * unit * (2 * torch.arange(1, side + 1, dtype=torch.float64) + 8)
    return 1.02 * n / (1 - 2 * n).clamp_min(1e-6)


def _packed(side: int, device: torch.device) -> bool:
    """True if matrices are stored in LAPACK's rectangular full packed format, which holds half of their entries.

    LAPACK's blocked factorisation reads this format, so only half of a matrix is formed and none of it copied.
    """
    return device.type == "cpu" and side >= _PACKED_FROM


def stored_entries(side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column, and sign of the imaginary part, each ``(E,)``, of the entries that `cholesky_succeeds` reads."""
    if not _packed(side, device):
        row, column = torch.cartesian_prod(torch.arange(side), torch.arange(side)).reshape(-1, 2).unbind(1)
        return row.to(device), column.to(device), torch.ones(side * side, dtype=torch.float64, device=device)
    # Packing a matrix of numbered entries shows where LAPACK puts each one, and which ones it conjugates.
    marks = np.arange(side * side).reshape(side, side) + 1j
    packed = lapack.ztrttf(np.asfortranarray(marks), transr="N", uplo="L")[0]  # type: ignore[attr-defined]
    row, column = np.divmod(packed.real.astype(np.int64), side)
    return torch.from_numpy(row), torch.from_numpy(column), torch.from_numpy(packed.imag.copy())


def cholesky_succeeds(entries: Tensor, side: int) -> Tensor:
    """True for each matrix whose Cholesky factorisation completes, ``(N,)``. ``entries`` is overwritten.

    ``entries`` ``(N, E)`` are those that :func:`stored_entries` lists, the imaginary parts times its signs: contiguous
    and finite, complex128 or complex64. A factorisation that fails stops at the first negative pivot.
    """
    if side == 1:
        return entries[:, 0].real > 0
    if not _packed(side, entries.device):
        return torch.linalg.cholesky_ex(entries.unflatten(1, (side, side)))[1] == 0
    factor = getattr(lapack, "zpftrf" if entries.dtype == torch.complex128 else "cpftrf")
    return torch.tensor(
        [factor(side, a, transr="N", uplo="L", overwrite_a=1)[1] == 0 for a in entries.numpy()], dtype=torch.bool
    )
