r"""Functions of one number that are steep without bound, limited to an interval: :math:`y = f(\mathrm{clip}(x, l, h))`.

The exponential, logarithm, root and reciprocal have no Lipschitz constant on all of space, but they have one on a
bounded set of inputs that keeps away from their poles. The modulus of each slope is monotone, so its maximum is at an
end of the interval. As with products (`lipkit.modules.products`), the limits need no proof.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from lipkit.errors import NoRuleError, OptionError, check_choice
from lipkit.modules.activations import LIBRARY, pointwise
from lipkit.modules.configuration import either
from lipkit.modules.plain import Plain, RoundingError, Shape, Shown, Stored, add_plain
from lipkit.modules.ranges import Range
from lipkit.proof.roundoff import Arithmetic, grow, to_double

REMEDY = "give the range of the inputs, such as box=(0, 1), which limits its operands to what they can reach"
# The least distance of limits from a pole: no slope and no square of a limit then leaves the range of a proof.
_LEAST = 2.0**-100


class Curve(NamedTuple):
    """A monotone function that is steep without bound."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[float], float]  # the modulus of its derivative
    holds: Callable[[float, float], bool]  # True if both are finite from the lower to the upper end of an interval
    where: str  # the same in words, for messages


CURVES = {
    "exp": Curve(torch.exp, math.exp, lambda low, high: high <= 700, "at most 700"),
    "log": Curve(torch.log, lambda x: 1 / x, lambda low, high: low >= _LEAST, "above 0"),
    "sqrt": Curve(torch.sqrt, lambda x: 0.5 / math.sqrt(x), lambda low, high: low >= _LEAST, "above 0"),
    "reciprocal": Curve(
        torch.reciprocal, lambda x: 1 / x / x, lambda low, high: low >= _LEAST or high <= -_LEAST, "of one sign"
    ),
}
"""The functions by name."""


class Elementary(Shown):
    """A function named in `CURVES`, of inputs clipped to ``limits`` (low, high), which are infinite until known.

    Raises:
        OptionError: another function. NoRuleError (of its constant): limits between which the slope is not bounded.

    >>> Elementary("exp", torch.tensor([-1.0, 0.0]))(torch.tensor([[-0.0, 5.0]])).tolist()
    [[1.0, 1.0]]
    """

    limits: Tensor
    where = ""  # how messages name the call in the network

    def __init__(self, function: str, limits: Tensor | None = None) -> None:
        super().__init__()
        check_choice("Elementary", function, CURVES)
        self.function = function
        limits = torch.tensor([-math.inf, math.inf], dtype=torch.float32) if limits is None else limits
        if limits.shape != (2,) or not limits.is_floating_point():
            got = f"got {limits.dtype} of shape {tuple(limits.shape)}"
            raise OptionError(f"Elementary: expected a lower and an upper limit in floating point, {got}")
        self.register_buffer("limits", limits.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.limits.to(x.dtype).split(1)
        return CURVES[self.function].function(torch.maximum(torch.minimum(x, high), low))

    @property
    def needs(self) -> str:
        """The message for unknown limits."""
        if self.function == "reciprocal":
            expected = "expected a constant divisor, got one that depends on the input"
            return f"{expected}: such a quotient has no Lipschitz constant on all of space"
        expected = "expected a function of bounded slope"
        return f"{expected}, got {self.function}, which has no Lipschitz constant on all of space"

    def ends(self) -> tuple[float, float]:
        """The limits; ``NoRuleError`` where the slope between them is not bounded."""
        low, high = to_double(self.limits).tolist()
        name, curve = self.where or self.function, CURVES[self.function]
        if (low, high) == (-math.inf, math.inf):
            raise NoRuleError(f"{name}: {self.needs}; {REMEDY}")
        if not (-math.inf < low <= high < math.inf and curve.holds(low, high)):
            expected = f"expected values {curve.where} on the box, got some in [{low:g}, {high:g}]"
            raise NoRuleError(f"{name}: {expected}, where its slope is not bounded")
        return low, high

    def within(self, x: Range) -> Self:
        """A copy whose limits are as narrow as possible without clipping any input in the range ``x``."""
        made = copy.deepcopy(self)
        info, low, high = torch.finfo(self.limits.dtype), float(x.low.min()), float(x.high.max())
        # Room for the rounding of the limits, also below the normal range.
        down, up = (max(1e-6, info.eps) * max(abs(end), info.tiny * (end != 0)) for end in (low, high))
        found = self.limits.new_tensor([low - down, high + up], dtype=torch.float64)
        old = self.limits.double()  # narrower ones stay
        made.limits = torch.stack((torch.maximum(old[0], found[0]), torch.minimum(old[1], found[1]))).to(self.limits)
        made.ends()
        return made


def _constant(module: Elementary, input_shape: Shape | None) -> float:
    slopes = map(CURVES[module.function].slope, module.ends())
    return grow(grow(max(*slopes, 2.0**-1000)))  # three roundings in float64, and underflow


def _error(module: Elementary, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    (low, high), curve = module.ends(), CURVES[module.function]
    ends = torch.tensor([low, high], dtype=torch.float64)
    largest = grow(float(curve.function(ends).abs().amax()) * (1 + 2.0**-40))
    moved = arithmetic.stored * max(abs(end) * curve.slope(end) for end in (low, high))  # by limits that are rounded
    # A limit that the machine takes for 0 is no limit.
    lost = math.inf if module.function != "exp" and float(ends.abs().amin()) < arithmetic.tiny else 0.0
    most = max(largest, abs(low), abs(high))
    return pointwise(0.0, LIBRARY * largest + moved, lost, input_shape, arithmetic, most)


def _range(module: Elementary, x: Range) -> Range:
    one, other = module(x.low), module(x.high)
    return Range(torch.minimum(one, other), torch.maximum(one, other))


_stored = Stored({"function": either(None, *CURVES)})
add_plain(Plain(Elementary, _constant, _error, _stored, _range, export=lambda module, shape: copy.deepcopy(module)))
