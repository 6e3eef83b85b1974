r"""Rounding up in float64, machine arithmetic, and bounds that grow linearly with the distance from a sample.

For non-negative numbers and tensors of float64 (unit roundoff u = 2^-53) `up` covers a counted number of roundings,
`grow` a few uncounted ones and underflow, `product` its own rounding, and `next_up` that of one correctly rounded
operation.

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
from fractions import Fraction
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lipkit.errors import OptionError
from lipkit.linalg.precision import SERIAL, check_underflow
from lipkit.linalg.transforms import one_alone

UNIT = 2.0**-53
# Formats whose numbers float64 holds exactly.
WIDE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

Values = TypeVar("Values", float, Tensor)


def gamma(n: float, unit: float = UNIT) -> float:
    """Upper bound of the relative error of n chained operations: ``n u / (1 - n u)``, slightly enlarged, or ``inf``.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1.
    """
    product = n * unit
    return 1.01 * product / (1 - product) if product < 0.5 else math.inf  # 1.01 covers the rounding of this line


def up(value: Values, operations: int) -> Values:
    """``value`` enlarged to cover ``operations`` roundings of positive terms."""
    return value * (1 + gamma(operations + 2))  # two more: this product and this sum


def grow(value: Values) -> Values:
    """``value`` enlarged by more than eight roundings and by more than any underflow; a float that is 0 stays 0."""
    moves = isinstance(value, Tensor) or value > 0
    return up(value, 14) + 2.0**-1000 if moves else value


def known(bound: Tensor) -> Tensor:
    """``bound`` with ``inf`` in place of NaN: infinity times 0, say, bounds nothing."""
    return bound.nan_to_num(nan=math.inf, posinf=math.inf)


def product(*factors: float) -> float:
    """The product of ``factors``, rounded up unless it is exact; 0 if one of them is 0."""
    if 0.0 in factors or not all(map(math.isfinite, factors)):
        return math.nan if any(map(math.isnan, factors)) else 0.0 if 0.0 in factors else math.inf
    exact = math.prod(map(Fraction, factors))
    try:
        return float(exact) if float(exact) >= exact else next_up(float(exact))
    except OverflowError:
        return math.inf


def next_up(value: Values) -> Values:
    """The next float64 above: covers the rounding of one correctly rounded operation."""
    if isinstance(value, Tensor):
        return torch.nextafter(value, torch.full_like(value, math.inf))
    return math.nextafter(value, math.inf)


def next_down(value: Values) -> Values:
    """The next float64 below."""
    return -next_up(-value)


def multiply_up(a: Tensor, b: Tensor) -> Tensor:
    """``a * b`` for non-negative 0-d float64 tensors, enlarged unless it is exact."""
    value = a * b
    exact = product(float(a.detach()), float(b.detach())) == float(value.detach())
    # The smallest subnormal number covers a product below the normal range.
    return value if exact else up(value, 1) + 2.0**-1074


def reciprocal_up(value: float) -> float:
    """The smallest float64 that is not below ``1 / value`` (``value`` non-negative).

    >>> reciprocal_up(0.25), reciprocal_up(0.0), reciprocal_up(3.0) > 1 / 3
    (4.0, inf, True)
    """
    if not value > 0:
        return math.inf
    quotient = 1 / value
    finite = math.isfinite(quotient) and math.isfinite(value)
    return next_up(quotient) if finite and Fraction(quotient) * Fraction(value) < 1 else quotient


def check_readable(a: Tensor) -> None:
    """Raise ``OptionError`` unless ``a`` is one tensor whose numbers can be read as they are stored, however small.

    >>> try:
    ...     check_readable(torch.ones(2).to_sparse())
    ... except OptionError as error:
    ...     print(error)
    expected a dense tensor with numbers, got layout torch.sparse_coo on cpu: use .to_dense()
    """
    if torch.compiler.is_compiling():
        return  # a compiled graph is never part of a proof
    if a.layout is not torch.strided or a.is_meta:
        remedy = "load its numbers first" if a.is_meta else "use .to_dense()"
        raise OptionError(f"expected a dense tensor with numbers, got layout {a.layout} on {a.device}: {remedy}")
    one_alone(a)
    check_underflow(workers=a.numel() >= SERIAL)


def to_double(a: Tensor) -> Tensor:
    """``a``, after `check_readable`, in float64 or complex128: exact for all floating dtypes of torch up to float64."""
    check_readable(a)
    return a.to(torch.complex128 if a.is_complex() else torch.float64)


def root(count: int) -> float:
    """Square root of an integer, rounded up unless it is exact."""
    floor = math.isqrt(count)
    return float(floor) if floor * floor == count else next_up(math.sqrt(count))


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of an evaluator.

    Attributes:
        unit: u, the largest relative error of one operation.
        tiny: the smallest normal number.
        largest: the largest finite number.
        block: inner products are summed in blocks of this many terms and the blocks pairwise; None for any order.
        stored: how often a stored number is rounded before it is used.
    """

    unit: float
    tiny: float
    largest: float
    block: int | None = None
    stored: int = 0

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
