r"""Ranges of values: interval arithmetic, entry by entry.

On a box with centre c and radii r, a linear map W has the range :math:`W c \pm |W| r`, and a non-decreasing function
has its values at both ends. No certificate rests on a range: the limits made from them are part of the network, and
`lipkit.modules.products` leaves room for rounding, so that the limited network computes the same on the box.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipkit.proof.roundoff import next_up


class Range(NamedTuple):
    """Lowest and highest value of each entry, float64, ``(1, *shape)``."""

    low: Tensor
    high: Tensor

    @property
    def centre(self) -> Tensor:
        """Middle of each interval."""
        return self.low / 2 + self.high / 2

    @property
    def radius(self) -> Tensor:
        """Half the width of each interval, rounded up; ``centre +- radius`` covers it although `centre` is rounded."""
        return next_up(torch.maximum(self.high - self.centre, self.centre - self.low))

    @property
    def largest(self) -> float:
        """The largest modulus of an entry."""
        return float(torch.maximum(self.low.abs(), self.high.abs()).max())


def around(centre: Tensor, radius: Tensor) -> Range:
    """``centre +- radius``."""
    return Range(centre - radius, centre + radius)


def one_sign(module: Any, x: Range) -> Range:
    """Range ``W c +- |W r|`` of a linear map W whose rows each have weights of one sign."""
    return around(module(x.centre), module(x.radius).abs())


def within_one(module: Any, x: Range) -> Range:
    """Range of a map whose values lie in [-1, 1]."""
    return around(torch.zeros_like(x.low), torch.ones_like(x.low))


def monotone(module: Any, x: Range) -> Range:
    """Range of a non-decreasing map: its values at both ends."""
    return Range(module(x.low), module(x.high))
