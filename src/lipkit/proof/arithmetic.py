r"""Machine arithmetic, and bounds that grow linearly with the distance from a sample.

The model of an evaluator: for ``+ - * /`` of two numbers in its format

.. math:: \mathrm{fl}(a \circ b) = (a \circ b)(1 + \delta) + \epsilon, \qquad |\delta| \le u,\ |\epsilon| \le \eta

with the unit roundoff u and :math:`\eta` the smallest *normal* number, so that results and operands below it may be
flushed to zero; products may be fused with sums, and sums may be taken in any order. A sum of d chained operations is
then within :math:`\gamma_d = d u / (1 - d u)` of the sum of the moduli of its terms (Higham, "Accuracy and Stability
of Numerical Algorithms", 2nd edition, section 3.1 and lemma 3.1), plus d times :math:`\eta`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lipkit.proof.roundoff import gamma, grow


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of an evaluator.

    Attributes:
        unit: u, the largest relative error of one operation.
        tiny: the smallest normal number.
        largest: the largest finite number.
        block: inner products are summed in blocks of this many terms and the blocks pairwise; None for any order.
        rounds_weights: whether the stored numbers are rounded once to the format before they are used.
    """

    unit: float
    tiny: float
    largest: float
    block: int | None = None
    rounds_weights: bool = False

    def gamma(self, operations: float) -> float:
        """Bound of the relative error of ``operations`` chained operations; ``inf`` if none exists."""
        return gamma(operations, self.unit)

    def depth(self, terms: int) -> int:
        """The largest number of roundings that one term of an inner product passes: its product and its additions.

        >>> import dataclasses
        >>> FLOAT32.depth(1024), dataclasses.replace(FLOAT32, block=32).depth(1024)
        (1024, 37)
        """
        if self.block is None or terms <= self.block:
            return terms
        return self.block + math.ceil(math.log2(math.ceil(terms / self.block)))

    @property
    def room(self) -> float:
        """Limit for bounds of the norms of intermediate values: a quarter of the largest finite number."""
        return self.largest / 4

    @property
    def stored(self) -> int:
        """How often a stored number is rounded before it is used."""
        return 1 if self.rounds_weights else 0


def arithmetic_of(dtype: torch.dtype) -> Arithmetic:
    """The arithmetic of a floating dtype.

    >>> arithmetic_of(torch.float32).unit == 2.0**-24
    True
    """
    info = torch.finfo(dtype)
    return Arithmetic(unit=info.eps / 2, tiny=info.tiny, largest=info.max)


FLOAT64, FLOAT32 = arithmetic_of(torch.float64), arithmetic_of(torch.float32)


class Line(NamedTuple):
    r"""An upper bound ``at + slope s`` for every s >= 0 (a distance from the sample), one for each of N samples.

    All values are rounded up. ``at`` is (N,) float64; ``slope`` is the same for all samples.

    >>> Line(torch.ones(1).double(), 2.0).below(Line(torch.ones(1).double(), 3.0)).slope >= 6.0
    True
    """

    at: Tensor
    slope: float

    def plus(self, other: Line) -> Line:
        """The sum of two bounds."""
        return Line(grow(self.at + other.at), grow(self.slope + other.slope))

    def times(self, factor: float) -> Line:
        """The bound times a number >= 0; exactly 0 if the number is 0."""
        if factor == 0:
            return Line(torch.zeros_like(self.at), 0.0)
        # The growth covers the product's rounding, underflow too; a slope of 0 stays 0 even for an infinite factor.
        return Line(grow(self.at * factor), grow(max(self.slope * factor, 2.0**-1074)) if self.slope else 0.0)

    def below(self, inner: Line) -> Line:
        """This bound at a distance that is itself bounded by ``inner``: ``at + slope * inner``."""
        return inner.times(self.slope).plus(Line(self.at, 0.0))

    def most(self, other: Line) -> Line:
        """A line above both."""
        return Line(torch.maximum(self.at, other.at), max(self.slope, other.slope))


def flat(like: Tensor, number: float) -> Line:
    """The constant line ``number`` >= 0 for each of N samples, always in float64; ``like`` gives N and the device."""
    return Line(torch.full_like(like, number, dtype=torch.float64), 0.0)


def size(values: Tensor) -> Tensor:
    """The l2 norm of each sample, (N,) float64, rounded up; ``inf`` where it overflows."""
    flat = values.detach().double().flatten(1)
    n = flat.shape[1]
    # Squares below the range of float64 are lost: at most 2^-537 of each entry.
    return torch.linalg.vector_norm(flat, dim=1) * (1 + gamma(n + 8)) + math.sqrt(n) * 2.0**-500
