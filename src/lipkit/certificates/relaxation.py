r"""Two lines around a scalar activation on an interval, proved in float64.

For any slope a the line :math:`a z + b` lies below s on [l, u] if :math:`b \le \min_{[l, u]} (s(z) - a z)`, so slopes
are free and intercepts are proved. An activation names its joints, between which it is convex, concave or straight.
On a straight or concave piece [c, d] the minimum of :math:`g(z) = s(z) - a z` is at an end; on a convex one

.. math:: g(z) \ge g(z_0) - \max\big(g'(z_0) (z_0 - c),\ -g'(z_0) (d - z_0),\ 0\big)

for any z0 in it (a tangent); the maximum is bounded in the same way. If only slopes in [p, q] are known, m the middle,

.. math:: |s(z) - s(m) - \tfrac{p + q}2 (z - m)| \le \tfrac{(q - p)(u - l)}4 .
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.modules.activations import ACTIVATIONS, Arcsinh, Arctan, slope_restricted
from lipkit.modules.guarding import type_name
from lipkit.modules.isometric import HalfAbs, LPReLU, NActivation
from lipkit.modules.machine import local_error
from lipkit.modules.registry import lipschitz
from lipkit.proof.roundoff import FLOAT64, grow, next_up

# Absolute error of a slope in float64: derivatives have size 1, and library functions are off by at most 16 units.
_SLOPE_ERROR = 2.0**-40
_STEPS = 40  # halvings: touching points need not be exact, tangents hold anywhere


class Curve(NamedTuple):
    """The shape of a scalar activation, piece by piece.

    Attributes:
        joints: maps a module to the points between its pieces, ascending: numbers, or tensors of a sample's shape.
        bends: shape of each piece: 1 convex, -1 concave, 0 straight.
        slope: maps a module and points to derivatives, where torch's own are not accurate enough.
    """

    joints: Callable[[Any], tuple[float | Tensor, ...]]
    bends: tuple[int, ...]
    slope: Callable[[Any, Tensor], Tensor] | None = None


def _at(*joints: float) -> Callable[[Any], tuple[float | Tensor, ...]]:
    return lambda module: joints


# Where s'' of SiLU vanishes: z tanh(z / 2) = 2.
_SILU = 2.3993572805154

CURVES: dict[type[nn.Module], Curve] = {
    **dict.fromkeys((nn.ReLU, nn.LeakyReLU, nn.PReLU, LPReLU, HalfAbs), Curve(_at(0.0), (0, 0))),
    nn.Hardtanh: Curve(lambda m: (m.min_val, m.max_val), (0, 0, 0)),
    nn.Softshrink: Curve(lambda m: (-m.lambd, m.lambd), (0, 0, 0)),
    nn.Hardsigmoid: Curve(_at(-3.0, 3.0), (0, 0, 0)),
    nn.Hardswish: Curve(_at(-3.0, 3.0), (0, 1, 0)),
    NActivation: Curve(lambda m: (m.thresholds.amin(0), m.thresholds.amax(0)), (0, 0, 0)),
    **dict.fromkeys((nn.Tanh, nn.Sigmoid, nn.Softsign, Arctan, Arcsinh), Curve(_at(0.0), (1, -1))),
    nn.Tanhshrink: Curve(_at(0.0), (-1, 1)),
    nn.Softplus: Curve(_at(), (1,)),
    nn.LogSigmoid: Curve(_at(), (-1,)),
    # torch's derivative of CELU takes 1 / alpha in float32.
    nn.CELU: Curve(_at(0.0), (1, 0), lambda m, z: torch.exp(z.clamp_max(0) / m.alpha)),
    nn.SELU: Curve(_at(0.0), (1, 0)),
    nn.SiLU: Curve(_at(-_SILU, _SILU), (-1, 1, -1)),
}
"""Activations with known joints, by exact type; the others are bounded by the range of their slopes."""


class Lines(NamedTuple):
    """``low_slope z + low <= s(z) <= high_slope z + high`` on an interval, and the range of s there."""

    low_slope: Tensor
    low: Tensor
    high_slope: Tensor
    high: Tensor
    least: Tensor
    most: Tensor


def curve_of(module: Any) -> Curve | None:
    """The curve of a scalar activation; None if only the range of its slopes is known."""
    if type(module) is nn.GELU and module.approximate == "none":
        return Curve(_at(-math.sqrt(2.0), math.sqrt(2.0)), (-1, 1, -1))
    if type(module) is nn.ELU:
        return Curve(_at(0.0), (1 if module.alpha >= 0 else -1, 0))
    if type(module) not in CURVES and type(module) not in ACTIVATIONS:
        raise NoRuleError(f"expected a scalar activation, got {type_name(type(module))}")
    return CURVES.get(type(module))


def least_slope(module: Any, constant: float) -> float:
    """A lower bound of the slopes of a scalar activation with this constant."""
    if slope_restricted(module) or type(module) is nn.SELU or (type(module) is nn.ELU and module.alpha >= 0):
        return 0.0
    if type(module) is nn.PReLU:
        return min(1.0, float(module.weight.detach().amin()))
    # s'(z) + s'(-z) = 1 if s(z) - s(-z) = z
    return -(next_up(constant - 1) if type(module) in (nn.GELU, nn.SiLU, nn.Hardswish) else constant)


class Relaxation:
    """Maps intervals, given by their ends ``(N, *shape)`` in float64, to `Lines` around one activation."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.curve = module, curve_of(module)
        constant = float(lipschitz(module))  # slopes of s are at least -constant
        if not constant < math.inf:
            raise NoRuleError(f"expected an activation with a finite slope, got {module}")
        most = min(constant * (1 + 2.0**-40), 1.0) if slope_restricted(module) else constant
        self.slopes = least_slope(module, constant), most
        # Beyond its threshold torch's Softplus has slope 1, the exact one has 1 - 1 / (1 + e^z).
        jump = math.exp(-module.threshold) * 1.001 if isinstance(module, nn.Softplus) else 0.0
        self.slope_error = _SLOPE_ERROR * max(1.0, constant) + jump
        error = local_error(module, (1,), FLOAT64)(torch.zeros(1, 1, dtype=torch.float64)).error
        self.error = float(error.at), error.slope

    def __call__(self, low: Tensor, high: Tensor) -> Lines:
        """Lines around the activation on the finite intervals [low, high]."""
        largest = torch.maximum(low.abs(), high.abs())
        wrong = grow(self.error[0] + self.error[1] * largest)  # the error of torch's values of s
        with torch.no_grad():
            return self._by_slopes(low, high, wrong) if self.curve is None else self._by_pieces(low, high, wrong)

    def _by_slopes(self, low: Tensor, high: Tensor, wrong: Tensor) -> Lines:
        (p, q), middle, width = self.slopes, (low + high) / 2, high - low
        value, slope = self.module(middle), (p + q) / 2
        size = value.abs() + (abs(slope) + q - p) * (middle.abs() + width)
        slack = grow((q - p) / 4 * width * (1 + 2.0**-40)) + wrong + grow(2.0**-49 * size)  # the formula above
        a, b = torch.full_like(low, slope, dtype=torch.float64), value - slope * middle
        reach = grow(max(abs(p), abs(q)) * width / 2 * (1 + 2.0**-40)) + wrong + grow(2.0**-49 * size)
        return Lines(a, b - slack, a, b + slack, value - reach, value + reach)

    def _by_pieces(self, low: Tensor, high: Tensor, wrong: Tensor) -> Lines:
        assert self.curve is not None
        edges = [low]
        for joint in self.curve.joints(self.module):
            point = torch.as_tensor(joint, dtype=torch.float64, device=low.device)
            point = point.reshape(-1, *[1] * (low.ndim - 2)) if point.ndim == 1 else point
            # A joint outside of the interval gives an empty piece.
            edges.append(torch.minimum(torch.maximum(point.expand_as(low), low), high))
        edges.append(high)
        values = [self.module(edge) for edge in edges]
        flat = torch.zeros_like(low)
        # Candidates: the chord of the whole interval, a flat line, then chords and tangents of each piece.
        slopes = [_chord(edges[0], edges[-1], values[0], values[-1]), flat]
        pieces = zip(edges[:-1], edges[1:], values[:-1], values[1:], self.curve.bends, strict=True)
        for c, d, at_c, at_d, bend in pieces:
            slopes.append(_chord(c, d, at_c, at_d))
            if bend:
                slopes += [self._slope(c), self._slope(d), self._slope((c + d) / 2)]
        if any(self.curve.bends):
            slopes.append((self._slope(low) + self._slope(high)) / 2)
        # All slopes at once, stacked along the batch; the lines that are best in the middle of the interval count.
        count, middle = len(slopes), (low + high) / 2
        a = torch.cat(slopes)
        wrong, *both = (part.repeat(count, *[1] * (low.ndim - 1)) for part in (wrong, *edges, *values))
        below, above = self._intercepts(a, both[: len(edges)], both[len(edges) :], wrong)
        a, below, above = (part.unflatten(0, (count, -1)) for part in (a, below, above))
        # The highest of the lower lines and the lowest of the upper ones; NaN is never chosen.
        low_at = (a * middle + below).nan_to_num(-math.inf, math.inf, -math.inf).argmax(0, keepdim=True)
        high_at = (a * middle + above).nan_to_num(math.inf, math.inf, -math.inf).argmin(0, keepdim=True)
        chosen = ((a, low_at), (below, low_at), (a, high_at), (above, high_at))
        lines = (part.gather(0, at).squeeze(0) for part, at in chosen)
        return Lines._make((*lines, below.select(0, 1), above.select(0, 1)))  # the second slope is flat

    def _intercepts(self, a: Tensor, edges: list[Tensor], values: list[Tensor], wrong: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of s(z) - a z on the interval; ``values`` of s at the edges err by ``wrong``."""
        assert self.curve is not None
        gaps = [value - a * edge for edge, value in zip(edges, values, strict=True)]
        # On straight pieces the extremes of the gap are at edges; a convex one can only dip lower, a concave one rise.
        below, above = torch.stack(gaps).amin(0), torch.stack(gaps).amax(0)
        for c, d, bend in zip(edges[:-1], edges[1:], self.curve.bends, strict=True):
            if bend:
                z = self._touching(a, c, d, bend)
                slope = bend * (self._slope(z) - a)  # of the gap s - a z; 0 where z touches exactly
                off = self.slope_error
                slack = torch.maximum((slope + off) * (z - c), (off - slope) * (d - z)).clamp_min(0)
                extreme = self.module(z) - a * z - bend * grow(slack * (1 + 2.0**-40))
                below = torch.minimum(below, extreme) if bend > 0 else below
                above = torch.maximum(above, extreme) if bend < 0 else above
        largest = torch.maximum(edges[0].abs(), edges[-1].abs())
        size = torch.stack(values).abs().amax(0) + wrong + a.abs() * largest + (edges[-1] - edges[0])
        slack = wrong + grow(2.0**-50 * size)
        return below - slack, above + slack

    def _touching(self, a: Tensor, c: Tensor, d: Tensor, bend: int) -> Tensor:
        """A point between c and d where s nearly has slope a, by bisection: the slope of s is monotone there."""
        for _ in range(_STEPS):
            z = (c + d) / 2
            beyond = bend * (self._slope(z) - a) > 0  # the slope rises on a convex piece, falls on a concave one
            c, d = torch.where(beyond, c, z), torch.where(beyond, z, d)
        return (c + d) / 2

    def _slope(self, z: Tensor) -> Tensor:
        return self.curve.slope(self.module, z) if self.curve and self.curve.slope else derivative(self.module, z)


def derivative(module: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The derivative of a scalar activation at each z, as torch computes it."""
    with torch.inference_mode(False), torch.enable_grad():
        z = z.detach().clone().requires_grad_()
        return torch.autograd.grad(module(z).sum(), z)[0]


def _chord(c: Tensor, d: Tensor, at_c: Tensor, at_d: Tensor) -> Tensor:
    """The slope of the chord between two points; 0 where they coincide."""
    apart = d > c
    slope = (at_d - at_c) / torch.where(apart, d - c, 1.0)
    return torch.where(apart & slope.isfinite(), slope, 0.0)
