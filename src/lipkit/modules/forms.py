r"""How far a value inside a network can move when its input moves.

Every value v of a network gets a bound :math:`\|\Delta v\| \le \sum_i g_i \|\Delta s_i\|` with gains g over *sources*.
Usually the one source is the network's input x. A value p that is cut into disjoint pieces :math:`s_1, ..., s_n` opens
a frame of n sources with :math:`\sum_i \|\Delta s_i\|^2 = \|\Delta p\|^2`, so that branches on disjoint pieces count
by their maximum, not by their sum, when they are put together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import known, to_double, up


@dataclass(frozen=True, eq=False)
class Frame:
    """The sources that gains refer to: the pieces of a value ``whole``; if that is None, the network's input alone."""

    pieces: int = 1
    whole: Form | None = None

    @property
    def depth(self) -> int:
        """Number of cuts between the input of the network and these sources."""
        return 0 if self.whole is None else self.whole.frame.depth + 1


@dataclass(frozen=True, eq=False)
class Form:
    """A bound of one value: its gain, at least 0, over each piece of the frame; ``(frame.pieces,)`` float64."""

    frame: Frame
    gains: Tensor

    def scaled(self, factor: Tensor) -> Form:
        """The bound after a map of Lipschitz constant ``factor`` (0-d): gains times factor, exact for 0 and 1."""
        return Form(self.frame, _times(self.gains, factor))

    def lifted(self) -> Form:
        """This bound with gains over the sources of the uncut value: pieces are orthogonal (Cauchy-Schwarz)."""
        assert self.frame.whole is not None
        nonzero = int((self.gains != 0).sum())
        norm = self.gains.sum() if nonzero < 2 else up(torch.linalg.vector_norm(self.gains), len(self.gains) + 2)
        return self.frame.whole.scaled(norm)

    def total(self) -> Tensor:
        """Lipschitz bound with respect to the network's input, 0-d."""
        form = self
        while form.frame.whole is not None:
            form = form.lifted()
        return form.gains.sum()


def source() -> Form:
    """The bound of the network's input itself: one piece, of gain 1."""
    return Form(Frame(), torch.ones(1, dtype=torch.float64))


def cut(form: Form, pieces: int) -> tuple[Form, ...]:
    """The bounds of the disjoint pieces of a value: one new source for each piece.

    >>> a, b = cut(source(), 2)
    >>> three = torch.tensor(3.0, dtype=torch.float64)
    >>> round(float(stacked([a, b.scaled(three)]).total()), 9), round(float(added([a, b]).total()), 6)
    (3.0, 1.414214)
    """
    frame = Frame(pieces, form)
    return tuple(Form(frame, row) for row in torch.eye(pieces, dtype=torch.float64))


def added(forms: Sequence[Form]) -> Form:
    """Bound of a sum: the gains add up."""
    frame, rows = _common(forms)
    # Where at most one term moves with a source, its gain is no sum, so nothing is rounded.
    total = rows.sum(0)
    return Form(frame, torch.where((rows != 0).sum(0) > 1, up(total, len(rows)), total))


def blended(share: Tensor, forms: Sequence[Form]) -> Form:
    """Bound of ``share x_1 + (1 - share) x_2``; negative weights count by their modulus."""
    share = to_double(share).cpu()
    total = added([forms[0].scaled(up(share.abs(), 1)), forms[1].scaled(up((1 - share).abs(), 2))])
    if not 0 <= float(share.detach()) <= 1:
        return total
    # A convex combination is no larger than the larger of the two: equal gains need no room for rounding.
    gains, most = total.gains, _common(forms)[1].detach().amax(0)
    return Form(total.frame, torch.where(most < gains, most + (gains - gains.detach()), gains))


def stacked(forms: Sequence[Form]) -> Form:
    r"""Bound of a concatenation of values, and of their maximum, which changes no more than the concatenation.

    With rows of gains :math:`G`: :math:`\|\Delta\| \le \|G\|_2\,\|\Delta p\|`; for one source, the root of the sum of
    the squares.
    """
    frame, rows = _common(forms)
    if len(rows) == 1:
        return Form(frame, rows[0])
    if frame.pieces == 1 or int((rows != 0).any(0).sum()) < 2:
        norms = up(torch.linalg.vector_norm(rows, dim=0), len(rows) + 2)
        return Form(frame, torch.where((rows != 0).sum(0) > 1, norms, rows.sum(0)))
    assert frame.whole is not None
    return frame.whole.scaled(spectral_norm(rows))  # over the sources of the value that was cut


def _times(gains: Tensor, factor: Tensor) -> Tensor:
    if float(factor.detach()) == 1:
        return gains * factor
    product = known(gains * factor)  # 0 times infinity: behind a constant map, NaN is still NaN
    values = gains.detach()
    if bool(((values == 0) | (values == 1)).all()) or float(factor.detach()) == 0:
        return product
    # The smallest subnormal number covers a product below the normal range.
    return torch.where(values == 0, product, up(product, 1) + 2.0**-1074)


def _common(forms: Sequence[Form]) -> tuple[Frame, Tensor]:
    """Lift forms to the deepest frame that they have in common: that frame, and their gains ``(forms, pieces)`` in it.

    All forms must come from one :func:`source`.
    """
    work = list(forms)
    while any(form.frame is not work[0].frame for form in work):
        deepest = max(form.frame.depth for form in work)  # no other frame can express its gains
        work = [form.lifted() if form.frame.depth == deepest else form for form in work]
    return work[0].frame, torch.stack([form.gains for form in work])
