r"""Ranges of values: interval arithmetic, entry by entry.

Of a map of one sign or with all signs dropped, :math:`f(c) \pm |W| r` around the centre c of the box with radii r; of a
monotone function, its values at both ends. No certificate rests on a range: limits are part of the network
(`lipkit.modules.products`). Ranges say where it is the function that it was made from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Range(NamedTuple):
    """Lowest and highest value of each entry, float64, ``(1, *shape)``."""

    low: Tensor
    high: Tensor

    @property
    def centre(self) -> Tensor:
        """Halfway."""
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Tensor:
        """Half of the width."""
        return (self.high - self.low) / 2

    @property
    def largest(self) -> float:
        """The largest modulus of an entry."""
        return float(torch.maximum(self.low.abs(), self.high.abs()).max())


def around(centre: Tensor, radius: Tensor) -> Range:
    """``centre +- radius``."""
    return Range(centre - radius, centre + radius)


def one_sign(module: Any, x: Range) -> Range:
    """Of a linear map each of whose rows has weights of one sign."""
    return around(module(x.centre), module(x.radius).abs())


def monotone(module: Any, x: Range) -> Range:
    """Of a map none of whose outputs falls where an input rises."""
    return Range(module(x.low), module(x.high))
