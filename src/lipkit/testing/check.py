"""``check_layer``: the laws, run on one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lipkit.errors import OptionError
from lipkit.modules import Shape
from lipkit.testing.case import Case, LawBroken, Refusal
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
    dtype: torch.dtype = torch.float64,
    claim: str = "orthogonal",
    laws: Iterable[int] | None = None,
    gamma: float = 1.0,
    slack: float = 0.0,
    attained: float | None = None,
    train_gap: float = 0.0,
    smooth: bool = True,
    options: Mapping[str, Sequence[Any]] | None = None,
    refusals: Sequence[Refusal] = (),
    output_shape: Callable[[Shape], Shape] | None = None,
    backends: Sequence[str] = ("aot_eager",),
    fullgraph: bool = True,
    seed: int = 0,
) -> dict[int, dict[str, float]]:
    r"""Test a layer with rules for ``lipschitz`` and ``export`` against the thirteen laws.

    References are independent of the layer: its dense matrix found by applying it to the unit vectors (Jacobians at
    sampled points if it is not affine), singular values by numpy in float64.

    Args:
        make: factory of the layer, such as ``functools.partial(MyConv, 3, 8, 3)``. It is given ``dtype=`` if it has
            such a parameter (else the layer is moved with ``.to``), and the ``options`` as keywords.
        input_shape: one shape without the batch, or several that the same layer accepts. Every one is used by the
            laws 1, 2, 3 and 11, the first by the others. Keep them below about 500 numbers.
        dtype: float32 or float64.
        claim: 'orthogonal' (every singular value is gamma), 'contraction' (none is above gamma), or 'none'
            (``lipschitz`` computes the constant from the numbers).
        laws: numbers of the laws to test; default all.
        gamma: the claimed constant.
        slack: relative amount by which ``lipschitz(layer)`` may exceed gamma (a declared truncation error).
        attained: share of ``lipschitz(layer)`` that the largest singular value (or Jacobian) reaches at random
            weights; default 0.1 for a contraction and 0.9 for 'none'. Not used for 'orthogonal'.
        train_gap: relative difference between training and evaluation mode that is declared (Taylor terms).
        smooth: whether the layer is differentiable where singular values of a parameter coincide (a division by a
            spectral norm is not); if not, gradients there need only be finite.
        options: constructor keyword -> at least two values, each pair of which must act differently or raise.
        refusals: documented bad arguments and their errors; ``conv_refusals`` and ``linear_refusals`` are tables.
        output_shape: input shape -> output shape; default: read from ``stride``, ``out_channels``, ``out_features``
            of the layer where it has them.
        backends: of ``torch.compile``.
        fullgraph: whether the layer must compile as one graph; False for one whose steps depend on values.
        seed: of the weights and inputs. The global random state is left as it was.

    Returns:
        For each law, what was measured.

    Guarantee:
        A test on samples, not a proof: a layer that passes has no defect that these laws can show at these weights
        and sizes.

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
    case = Case(
        make=make,
        input_shapes=shapes,  # type: ignore[arg-type]
        dtype=dtype,
        claim=claim,
        gamma=gamma,
        slack=slack,
        attained=attained if attained is not None else (0.9 if claim == "none" else 0.1),
        train_gap=train_gap,
        smooth=smooth,
        options=options or {},
        refusals=refusals,
        output_shape=output_shape,
        backends=backends,
        fullgraph=fullgraph,
        seed=seed,
    )
    return {number: run_law(number, case) for number in (LAWS if laws is None else laws)}
