"""How a radius is written, and which are meant: images are in [0, 1], radii are l2 norms and read best as k/255."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lipkit.errors import OptionError

LARGE = 8.0
"""A radius of images in [0, 1] above which a forgotten /255 is more likely than the radius."""


def format_radius(eps: float) -> str:
    r"""A radius as people write it: ``36/255`` where it is a whole number of 255ths, else a decimal.

    Args:
        eps: l2 radius in units of the input (pixels in [0, 1]).

    >>> format_radius(36 / 255), format_radius(0.15), format_radius(1.0), format_radius(0.0)
    ('36/255', '0.15', '1', '0')
    >>> format_radius(float("inf"))
    'inf'
    """
    if not math.isfinite(eps) or eps == int(eps):
        return f"{eps:g}"
    steps = round(eps * 255)
    if steps > 0 and abs(eps * 255 - steps) <= 1e-9 * steps:
        return f"{steps}/255"
    return f"{eps:.6g}"


def check_radii(
    radii: Iterable[float],
    input_shape: tuple[int, ...],
    input_range: tuple[float, float] | None,
    *,
    name: str = "eps",
    norm: str = "l2",
    large: bool = False,
) -> None:
    r"""Refuse radii that nobody means: above the diameter of the inputs' domain, and large ones not asked for by name.

    The diameter of the box ``[low, high]^n`` is ``sqrt(n) (high - low)`` in l2 and ``high - low`` in linf.

    Args:
        radii: in units of the input.
        input_shape: of one input.
        input_range: (low, high) of every entry; None for inputs without limits, of which nothing is known.
        name: of the radii in a message.
        norm: l2 or linf.
        large: whether a radius above LARGE (times ``high - low``) is meant.

    Raises:
        OptionError: such a radius; the message asks for the quotient that was probably meant.

    >>> check_radii([36 / 255, 1.0], (1, 28, 28), (0.0, 1.0))
    >>> check_radii([36], (1, 28, 28), (0.0, 1.0))
    Traceback (most recent call last):
    lipkit.errors.OptionError: eps: expected at most the diameter 28 of inputs in [0, 1], got 36: did you mean 36/255?
    >>> check_radii([16], (1, 28, 28), (0.0, 1.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lipkit.errors.OptionError: eps: got 16, did you mean 16/255? Inputs are in [0, 1]; a radius above 8 is taken ...
    >>> check_radii([16], (1, 28, 28), (0.0, 1.0), large=True)
    """
    if input_range is None:
        return
    low, high = input_range
    diameter = (high - low) * (math.sqrt(math.prod(input_shape)) if norm == "l2" else 1.0)
    for eps in radii:
        meant = f"did you mean {eps:g}/255?"
        if eps > diameter:
            raise OptionError(
                f"{name}: expected at most the diameter {diameter:.6g} of inputs in [{low:g}, {high:g}], got {eps:g}"
                + (f": {meant}" if eps <= 255 * diameter else "")
            )
        if eps > LARGE * (high - low) and not large:
            raise OptionError(
                f"{name}: got {eps:g}, {meant} Inputs are in [{low:g}, {high:g}]; a radius above "
                f"{LARGE * (high - low):g} is taken with --large-eps (in Python large_eps=True)"
            )
