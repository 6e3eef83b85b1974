"""Rounding up in float64 (unit roundoff u = 2^-53), for non-negative numbers and tensors.

`up` covers a counted number of roundings, `grow` a few uncounted ones and underflow, `product` its own rounding, and
`next_up` that of one correctly rounded operation.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor

from lipkit.errors import OptionError
from lipkit.linalg.precision import SERIAL, check_underflow

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
    """Raise ``OptionError`` unless every number of ``a`` can be read as it is stored, however small.

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
    check_underflow(workers=a.numel() >= SERIAL)


def to_double(a: Tensor) -> Tensor:
    """``a``, after `check_readable`, in float64 or complex128: exact for all floating dtypes of torch up to float64."""
    check_readable(a)
    return a.to(torch.complex128 if a.is_complex() else torch.float64)


def root(count: int) -> float:
    """Square root of an integer, rounded up unless it is exact."""
    floor = math.isqrt(count)
    return float(floor) if floor * floor == count else next_up(math.sqrt(count))
