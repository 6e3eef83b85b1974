"""How a radius is written: images are in [0, 1], radii are l2 norms and read best as k/255."""

from __future__ import annotations

import math


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
