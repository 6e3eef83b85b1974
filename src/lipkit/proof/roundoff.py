"""A-priori rounding constants of float64 arithmetic (unit roundoff u = 2^-53)."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from lipkit.errors import OptionError
from lipkit.linalg.precision import SERIAL, check_underflow

UNIT = 2.0**-53
WIDE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def gamma(n: int) -> float:
    """Upper bound of the relative error of n chained float64 operations: ``n u / (1 - n u)``, slightly enlarged.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1.

    >>> gamma(2) >= 2 * UNIT
    True
    """
    return 1.01 * n * UNIT / (1 - n * UNIT)


def up(value: Tensor, operations: int) -> Tensor:
    """``value`` (float64, non-negative) enlarged to cover that many roundings of positive terms.

    >>> bool(up(torch.tensor(1.0, dtype=torch.float64), 3) > 1)
    True
    """
    return value * (1 + gamma(operations + 2))


def multiply_up(a: Tensor, b: Tensor) -> Tensor:
    """``a * b`` for non-negative 0-d float64 tensors, enlarged only if that product was rounded.

    >>> multiply_up(torch.tensor(2.0).double(), torch.tensor(1.5).double()).item()
    3.0
    """
    product = a * b
    x, y, z = (float(t.detach()) for t in (a, b, product))
    exact = math.isfinite(z) and Fraction(x) * Fraction(y) == Fraction(z)
    # The smallest subnormal number covers a product below the normal range.
    return product if exact or not math.isfinite(z) else up(product, 1) + 2.0**-1074


def reciprocal_up(value: float) -> float:
    """The smallest float64 that is not below ``1 / value`` (``value`` non-negative).

    >>> reciprocal_up(0.25), reciprocal_up(0.0), reciprocal_up(3.0) > 1 / 3
    (4.0, inf, True)
    """
    if not value > 0:
        return math.inf
    quotient = 1 / value
    exact = not math.isfinite(quotient) or not math.isfinite(value) or Fraction(quotient) * Fraction(value) >= 1
    return quotient if exact else math.nextafter(quotient, math.inf)


def check_readable(a: Tensor) -> None:
    """Raise ``OptionError`` unless every number of ``a`` can be read as it is stored, however small.

    >>> try:
    ...     check_readable(torch.ones(2).to_sparse())
    ... except OptionError as error:
    ...     print(error)
    expected a dense tensor with numbers, got layout torch.sparse_coo on cpu: use .to_dense()
    """
    if torch.compiler.is_compiling():
        return  # what is compiled proves nothing
    if a.layout is not torch.strided or a.is_meta:
        remedy = "load its numbers first" if a.is_meta else "use .to_dense()"
        raise OptionError(f"expected a dense tensor with numbers, got layout {a.layout} on {a.device}: {remedy}")
    check_underflow(workers=a.numel() >= SERIAL)


def to_double(a: Tensor) -> Tensor:
    """``a`` in float64 or complex128: exact for every floating dtype of torch up to float64.

    Raises:
        OptionError: as `check_readable`.
    """
    check_readable(a)
    return a.to(torch.complex128 if a.is_complex() else torch.float64)


def root(count: int) -> float:
    """Square root of an integer, rounded up unless it is exact.

    >>> root(9), root(2) > 2**0.5
    (3.0, True)
    """
    floor = math.isqrt(count)
    return float(floor) if floor * floor == count else math.nextafter(math.sqrt(count), math.inf)
