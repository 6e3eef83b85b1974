r"""The solve form of the Cayley transform on the rows of a Fourier transform: forward and backward, no derivatives.

See :mod:`lipkit.conv.cayley_conv` for the equations. The factors solve :math:`N` and :math:`N^\top`, so
:math:`N^* k = g` is solved for the conjugates of g and k.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lipkit.linalg.cayley import Factors, solve_rows

Form = Literal["wide", "tall", "second", "first adjoint"]


def _rows_of(z: Tensor) -> Tensor:
    """A view of complex numbers as rows: one strided pass over both parts costs less than one for each."""
    return torch.view_as_real(z.resolve_conj()).movedim(-1, 1)


def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale a b`` without a second pass."""
    return a.new_empty(len(a), a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


def conjugated(g: Tensor) -> Tensor:
    """The conjugate, in place; real numbers as they are. A lazily conjugated tensor only has its flag cleared."""
    if not g.is_complex():
        return g
    return g.conj() if g.is_conj() else g.conj_physical_()


class Group(NamedTuple):
    """The frequencies of one kind (real, or pairs), and how their rows become real or complex numbers."""

    factors: Factors
    rest: Tensor | None
    rows: slice

    def view(self, rows: Tensor, channels: slice) -> Tensor:
        """Real ``(n_r, B, C)``, or pairs ``(n_p, 2, B, C)``."""
        part = rows[self.rows]
        part = part.view(-1, 2, *part.shape[1:]) if self.factors.matrix.is_complex() else part
        return part[..., channels]

    def read(self, rows: Tensor, channels: slice, *, conjugate: bool = False) -> Tensor:
        """As matrices are: real, or complex ``(n_p, B, C)``."""
        part = self.view(rows, channels)
        if not self.factors.matrix.is_complex():
            return part.contiguous()
        made = torch.complex(part[:, 0], part[:, 1])
        return made.conj_physical_() if conjugate else made

    def write(self, out: Tensor, channels: slice, z: Tensor, scale: float) -> None:
        """``out = scale z``."""
        torch.mul(_rows_of(z) if z.is_complex() else z, scale, out=self.view(out, channels))

    def reflect(self, out: Tensor, rows: Tensor, channels: slice, z: Tensor) -> None:
        """``out = 2 z - rows``."""
        part, minus = self.view(out, channels), self.view(rows, channels)
        # lerp with the weight 2 is rows + 2 (z - rows) = 2 z - rows, in one pass.
        if not z.is_complex():
            torch.lerp(minus, z, 2.0, out=part)
        elif z.is_contiguous():
            torch.lerp(minus, _rows_of(z), 2.0, out=part)
        else:
            # A solution by factors is transposed: arithmetic along its columns would be slower than a copy.
            torch.lerp(minus, part.copy_(_rows_of(z)), 2.0, out=part)


def forward_rows(form: Form, group: Group, rows: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Fill ``out`` and return conj(h) ('first adjoint': h), and conj(x_2) where the derivative needs it."""
    n, rest = group.factors.matrix.shape[-1], group.rest
    own, other = slice(0, n), slice(n, None)
    if form == "first adjoint":
        # N^* h = x is solved as N^T conj(h) = conj(x).
        h = conjugated(solve_rows(group.factors, group.read(rows, own, conjugate=True), transposed=True))
        group.reflect(out, rows, own, h)
        return h, None
    if form == "second":
        assert rest is not None
        x2 = group.read(rows, slice(None))
        # N h = -W_2 x_2, so that y = -2 N^-1 W_2 x_2 is 2 h and the derivatives are those of 'wide'.
        h = solve_rows(group.factors, product(x2, rest.mT, -1))
        group.write(out, own, h, 2.0)
        return conjugated(h), conjugated(x2)
    x = group.read(rows, own)
    x_other: Tensor | None = None
    if form == "wide" and rest is not None:
        x_other = group.read(rows, other)
        x = torch.baddbmm(x, x_other, rest.mT, alpha=-1)
    h = solve_rows(group.factors, x)
    group.reflect(out, rows, own, h)
    if form == "tall" and rest is not None:
        group.write(out, other, h @ rest.mT, -2.0)
    # The derivative needs the conjugates only, so they are made in place.
    return conjugated(h), None if x_other is None else conjugated(x_other)


def backward_rows(
    form: Form, group: Group, h: Tensor, x2: Tensor | None, g: Tensor, out: Tensor, *, symbol: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Fill ``out`` with the input's gradient; return those of N^T and of W_2 if ``symbol`` asks for them."""
    n, rest = group.factors.matrix.shape[-1], group.rest
    own, other = slice(0, n), slice(n, None)
    if form == "first adjoint":
        k = solve_rows(group.factors, group.read(g, own))
        group.reflect(out, g, own, k)
        return (product(conjugated(k).mT, h, -2) if symbol else None), None
    # The conjugate of the incoming gradient, because the factors solve N^T and not N^*.
    top = group.read(g, own, conjugate=True)
    if form == "tall" and rest is not None:
        top = torch.baddbmm(top, group.read(g, other, conjugate=True), rest, alpha=-1)
    k = solve_rows(group.factors, top, transposed=True)
    if form != "tall" and rest is not None:
        group.write(out, slice(None) if form == "second" else other, conjugated(k @ rest), -2.0)
    # Conjugate the features: the gradients below are as large as the matrices and would cost more.
    k = conjugated(k)
    if form != "second":
        group.reflect(out, g, own, k)
    if not symbol:
        return None, None
    for_rest = None
    if form == "tall" and rest is not None:
        for_rest = product(group.read(g, other).mT, h, -2)
    elif x2 is not None:
        for_rest = product(k.mT, x2, -2)
    return product(h.mT, k, -2), for_rest  # h is kept as a conjugate: the gradient of N^T is -2 conj(h) k^T
