"""``check_layer``: the laws, run on one layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.modules import Shape
from lipkit.testing.case import Case, LawBroken
from lipkit.testing.laws import LAWS


def run_law(number: int, case: Case) -> dict[str, float]:
    """Test one law; see :func:`check_layer`.

    Raises:
        LawBroken: the layer breaks it, or an error of another kind stopped the test.
    """
    if number not in LAWS:
        raise OptionError(f"laws: expected numbers from {min(LAWS)} to {max(LAWS)}, got {number!r}")
    law = LAWS[number]
    place = f"law {number} ({law.name}), {case.dtype}, input {case.shape}"
    try:
        return law.test(case)
    except LawBroken as error:
        raise LawBroken(f"{place}: {error}") from None
    except Exception as error:
        raise LawBroken(
            f"{place}: expected no error of this kind, got {type(error).__name__}: {str(error).strip()[:500]}"
        ) from error


def check_layer(
    make: Callable[..., nn.Module],
    *,
    input_shape: Shape | Sequence[Shape],
    laws: Iterable[int] | None = None,
    **promises: Any,
) -> dict[int, dict[str, float]]:
    r"""Test a layer with rules for ``lipschitz`` and ``export`` against the thirteen laws.

    References are independent of the layer: its dense matrix found by applying it to the unit vectors (Jacobians at
    sampled points if it is not affine), singular values by numpy in float64.

    Args:
        make: factory of the layer, such as ``functools.partial(MyConv, 3, 8, 3)``. It is given ``dtype=`` if it has
            such a parameter (otherwise ``.to`` converts the layer), and the ``options`` as keywords.
        input_shape: one shape without the batch, or several that the same layer accepts. Every one is used by the
            laws 1, 2, 3 and 11, the first by the others. Keep them below about 500 numbers.
        laws: numbers of the laws to test; default all.
        promises: what the layer promises and how it is tested, by the names of the fields of `lipkit.testing.Case`.

    Returns:
        For each law, what was measured.

    Guarantee:
        A test on samples, not a proof: it shows defects at these weights and sizes only.

    Raises:
        LawBroken: (an ``AssertionError``) with the law, the expected and the actual value.
        OptionError: an unknown claim, dtype or law.

    >>> from functools import partial
    >>> from lipkit.layers import Scale
    >>> check_layer(partial(Scale, 3.0), input_shape=(4,), gamma=3.0, laws=[2])[2]["largest"]
    3.0
    >>> try:
    ...     check_layer(partial(Scale, 3.0), input_shape=(4,), gamma=2.0, laws=[2])
    ... except LawBroken as error:
    ...     print(str(error)[:42])
    law 2 (attained), torch.float64, input (4,
    """
    first = tuple(input_shape)
    shapes = (first,) if first and isinstance(first[0], int) else tuple(tuple(s) for s in first)  # type: ignore[arg-type]
    unknown = sorted(promises.keys() - {field.name for field in dataclasses.fields(Case)})
    if unknown:
        raise OptionError(f"expected fields of lipkit.testing.Case, got {unknown}")
    given = {name: value for name, value in promises.items() if value is not None}
    if "attained" not in given:
        given["attained"] = 0.9 if given.get("claim") == "none" else 0.1
    case = Case(make=make, input_shapes=shapes, **given)  # type: ignore[arg-type]
    return {number: run_law(number, case) for number in (LAWS if laws is None else laws)}
