"""The table of the laws, and ``check_layer``, which runs them on one layer."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from lipkit.errors import OptionError
from lipkit.modules import Shape
from lipkit.testing.case import Case, LawBroken
from lipkit.testing.laws.bounds import attained, gradients, sizes, sound, trained
from lipkit.testing.laws.interface import exported, options_act, refusals
from lipkit.testing.laws.moves import moves
from lipkit.testing.laws.state import complete, never_stale, pure, round_trips


class Law(NamedTuple):
    """A law: its name, its statement, and its test."""

    name: str
    says: str
    test: Callable[[Case], dict[str, float]]


LAWS: dict[int, Law] = {
    1: Law("sound", "the true norm is at most the bound of the export, and that at most the claimed one", sound),
    2: Law("attained", "the claimed constant is reached, from both sides for an orthogonal layer", attained),
    3: Law("export", "the exported layer computes the same with constant plain modules", exported),
    4: Law("complete at birth", "a forward pass makes no parameters, and each one gets a gradient", complete),
    5: Law("pure", "a forward pass changes nothing, and its result depends on nothing else", pure),
    6: Law("round trips", "state_dict, deepcopy, pickle and EMA copies are equal and independent", round_trips),
    7: Law("never stale", "after any change of a parameter the next output follows", never_stale),
    8: Law("options act", "every constructor option acts, or raises", options_act),
    9: Law("gradients", "gradients are right, and finite at repeated singular values and at zero", gradients),
    10: Law("trained", "the bounds still hold after optimiser steps with a large rate", trained),
    11: Law("sizes", "every image size gives the right shape and bound, whatever came before it", sizes),
    12: Law("moves", "dtype, device, autocast, torch.compile, torch.func and torch.export keep the function", moves),
    13: Law("refusals", "a bad argument raises its documented error with the expected and the actual value", refusals),
}
"""The laws by number."""


def run_law(number: int, case: Case) -> dict[str, float]:
    """Test one law, see :func:`check_layer`; ``LawBroken`` if the layer breaks it, or an error stops the test."""
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
        For each law, what was measured: on samples, so it proves nothing about other weights and sizes.

    Raises:
        LawBroken: (an ``AssertionError``) with the law, the expected and the actual value.

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
    first = tuple(input_shape)  # one shape, or several
    shapes = (first,) if first and isinstance(first[0], int) else tuple(tuple(s) for s in first)  # type: ignore[arg-type]
    unknown = sorted(promises.keys() - {field.name for field in dataclasses.fields(Case)})
    if unknown:
        raise OptionError(f"expected fields of lipkit.testing.Case, got {unknown}")
    given = {name: value for name, value in promises.items() if value is not None}  # None: the default
    given.setdefault("attained", 0.9 if given.get("claim") == "none" else 0.1)
    case = Case(make=make, input_shapes=shapes, **given)  # type: ignore[arg-type]
    return {number: run_law(number, case) for number in (LAWS if laws is None else laws)}
