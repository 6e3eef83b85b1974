r"""Runs of modules on a box of inputs, and the LMI that bounds the gain of each run.

Interval arithmetic (rounding included) encloses the inputs of each activation, and so its slopes in [a, b]. With
:math:`c = b - a` the activation is :math:`\sigma(z) = a z + c\,s(z)`, where s has slopes in [0, 1]; where a = b it is
linear, up to a constant. So after k activations

.. math:: h_k = A_k x + \sum_{j < k} B_{kj} s_j,

and the LMI of `lipkit.bounds.lmi` bounds the gain; each of its weights reads x and all earlier s. A sum or a
concatenation of values, such as a residual block makes, is one more linear map. Weights are products in float64; a
bound of the error of each entry goes into the proof.

Source: Fazlyab et al., NeurIPS 2019, for the LMI; the matrix of slopes as an interval is Rohn, Linear Algebra and its
Applications 1989.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi_solver import minimise_gain
from lipkit.certificates.relaxation import curve_of, derivative, least_slope
from lipkit.lowering import lipschitz
from lipkit.modules.activations import Arcsinh, Arctan
from lipkit.modules.registry import Shape
from lipkit.modules.slope_runs import MOST_ROWS, Action, Part, composed, mapped, walked, widened
from lipkit.proof.roundoff import UNIT, known, next_down, next_up, up


def moduli_of(part: Part) -> Tensor:
    """Upper bounds of the moduli of the exact entries of a matrix or diagonal that is known up to errors."""
    return known(up(part[0].abs() + part[1], 2))


class Value(NamedTuple):
    """Bounds of a value of a run on the box.

    Attributes:
        map: the matrix from (x, s) (see the module docstring), or the diagonal of one; None for the run's input.
        jacobian: the interval matrix dy / dx, or its diagonal: middles and radii.
        reach: centre and radius of the interval of each entry.
        point: the value at the centre of the box of x.
    """

    map: Part | None
    jacobian: Part | None
    reach: Part
    point: Part

    @property
    def dense(self) -> bool:
        """True if `map` is a matrix."""
        return self.map is not None and self.map[0].ndim == 2

    def linear(self, weight: Tensor, shift: Tensor) -> Value:
        """Behind a linear layer: a matrix, or the diagonal of one."""
        parts = composed(weight, self.map), composed(weight, self.jacobian)
        intervals = (composed(weight, (a[:, None], e[:, None])) for a, e in (self.reach, self.point))
        return Value(*parts, *(_shifted(interval, shift) for interval in intervals))

    def full(self) -> Value:
        """This value with a matrix as its map, and as its jacobian."""
        one = torch.eye(len(self.reach[0]), dtype=torch.float64)
        return self if self.dense else self._replace(map=composed(one, self.map), jacobian=composed(one, self.jacobian))


@dataclasses.dataclass
class Run:
    """Consecutive modules: their constant, and, for an LMI, their weights in x and s (see the module docstring).

    Attributes:
        constant: the product of the modules' constants.
        inputs: number of columns of x. spread: radii of its box.
        last: the last value; None if only the constant is known.
        weights: rows of the nonlinear units, layer by layer, then of y, in the columns x, s_0, s_1, ...; or none.
    """

    constant: float
    inputs: int = 0
    spread: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))
    last: Value | None = None
    weights: list[Part] = dataclasses.field(default_factory=list)

    @classmethod
    def begin(cls, centre: Tensor, radius: Tensor) -> Run:
        """An empty run on a box."""
        start = Value(None, None, (centre, radius), (centre, torch.zeros_like(radius)))
        return cls(1.0, len(centre), radius, start)

    @property
    def units(self) -> int:
        return sum(len(weight) for weight, _ in self.weights)

    def slopes(self, value: Value, module: Any, constant: float) -> tuple[Part, ...]:
        """Lowest and highest slope of a scalar activation behind a value, then its lowest and highest output."""
        centre, radius = value.reach
        low, high = next_down(centre - radius), next_up(centre + radius)
        if value.jacobian is not None:  # the mean value theorem, from the centre of the box
            moduli = moduli_of(value.jacobian)
            steepest = moduli if moduli.ndim == 2 else torch.diag(moduli)
            width = value.point[1] + composed(steepest, (self.spread[:, None], 0 * self.spread[:, None]))[0][:, 0]
            width = up(width, 2 * len(self.spread) + 8) + 2.0**-1000
            low = torch.fmax(low, next_down(value.point[0] - width))  # the tighter one; NaN gives way
            high = torch.fmin(high, next_up(value.point[0] + width))
        return slopes_of(module, low, high, constant)

    def activated(self, value: Value, module: Any, constant: float, found: tuple[Part, ...]) -> Value:
        """Behind a scalar activation with these `slopes`; its nonlinear units become rows of the LMI."""
        assert value.map is not None
        assert value.jacobian is not None
        (low, high), ends = found
        active, columns = (high > low).nonzero()[:, 0], self.inputs + self.units  # other units are linear on the box
        weight, error = widened(value.map, columns)
        if len(active):
            self.weights.append((weight[active], error[active]))
        fresh = torch.zeros(len(low), len(active), dtype=torch.float64)
        # h = low z + width s; the upper slope that is proved is low + width.
        fresh[active, torch.arange(len(active))] = next_up(high - low)[active]
        weight, error = composed(low, (weight, error))  # the part that is linear
        middle = (low + high) / 2  # slopes as an interval: middle and radius
        radius = next_up(torch.maximum(next_up(high - middle), next_up(middle - low)))[:, None]
        turned, off = composed(middle, value.jacobian)
        point = slopes_of(
            module, next_down(value.point[0] - value.point[1]), next_up(value.point[0] + value.point[1]), constant
        )[1]
        return Value(
            (torch.cat((weight, fresh), 1), torch.cat((error, torch.zeros_like(fresh)), 1)),
            (turned, up(off + radius * moduli_of(value.jacobian), 3) + 2.0**-1070),
            around(*ends), around(*point),
        )  # fmt: skip

    def through(self, graph: nn.Module, value: Value, shape: Shape) -> Value:
        """Behind a graph of `units`, whose input has this shape."""

        def activated(module: Any, before: Value, size: Shape) -> Value:
            constant = float(lipschitz(module, size))
            return self.activated(before, module, constant, self.slopes(before, module, constant))

        def moved(act: Action, module: Any, given: Sequence[Value], shapes: Sequence[Shape]) -> Value:
            shift = module(*(torch.zeros(1, *size, dtype=torch.float64) for size in shapes)).flatten()

            def shifted(parts: Sequence[Part]) -> Part:
                return _shifted(mapped(act, [(a[:, None], e[:, None]) for a, e in parts], shapes), shift)

            maps = [widened(v.map, self.inputs + self.units) for v in given if v.map is not None]
            jacobians = [v.jacobian for v in given if v.jacobian is not None]
            boxes = shifted([v.reach for v in given]), shifted([v.point for v in given])
            return Value(mapped(act, maps, shapes), mapped(act, jacobians, shapes), *boxes)

        return walked(graph, [value.full()], [shape], activated, moved)

    def finished(self) -> Run:
        """The run, its last value added as y; no more modules can be appended."""
        if self.last is not None and self.last.map is not None and self.last.dense:
            self.weights.append(widened(self.last.map, self.inputs + self.units))
        return self

    def entry(self, i: int, j: int) -> Run:
        """The run from input j to output i alone."""
        weights = [(torch.cat((m[:, [j]], m[:, self.inputs :]), 1) for m in part) for part in self.weights]
        parts: list[Part] = [tuple(part) for part in weights]  # type: ignore[misc]
        parts[-1] = (parts[-1][0][[i]], parts[-1][1][[i]])  # y reads output i alone
        return dataclasses.replace(self, constant=math.inf, inputs=1, weights=parts)

    def least(self, accuracy: float = 1e-5) -> tuple[float, list[Tensor]]:
        """The smaller of `constant` and the gain proved by the LMI, and the multipliers, [] without an LMI."""
        gain, found, _ = least_gain(self.weights, accuracy)
        return min(self.constant, gain), found


def least_gain(parts: Sequence[Part], accuracy: float = 1e-5) -> tuple[float, list[Tensor], int]:
    """`minimise_gain` of weights with their errors; inf for none, for too large a matrix, or numbers not finite."""
    finite = all(bool(m.isfinite().all()) for part in parts for m in part)
    if not parts or not finite or parts[-1][0].shape[1] + len(parts[-1][0]) > MOST_ROWS:
        return math.inf, [], 0
    weights, errors = zip(*parts, strict=True)
    return minimise_gain(weights, errors, accuracy)


def around(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and radius of intervals that hold every number from ``low`` to ``high``."""
    finite = low.isfinite() & high.isfinite()
    centre = torch.where(finite, low / 2 + high / 2, 0.0)
    radius = next_up(torch.maximum(next_up(high - centre), next_up(centre - low)))
    # An interval of one number has radius 0.
    radius = torch.where((low == centre) & (high == centre), 0.0, radius)
    return centre, torch.where(finite, radius, math.inf)


def _shifted(column: Part, shift: Tensor) -> Part:
    """Centres and radii of intervals in one column, moved by a layer's output at 0; radii include rounding."""
    moved = column[0][:, 0] + shift
    return moved, up(known(column[1][:, 0]) + 2 * UNIT * moved.abs(), 3)  # the shift is added in one rounding


# Smooth functions, and the points where they turn; their derivatives turn at the joints of `relaxation.Curve`. Ten
# digits are enough: near a turning point, values change by the square of the distance.
_TURNS: dict[type[nn.Module], tuple[float, ...]] = {
    **dict.fromkeys((nn.Tanh, nn.Sigmoid, nn.Softplus, Arctan, Arcsinh), ()),
    nn.SiLU: (-1.2784645428,),
    nn.GELU: (-0.7517915247,),
}


def slopes_of(module: Any, low: Tensor, high: Tensor, constant: float) -> tuple[tuple[Tensor, Tensor], ...]:
    """Lowest and highest slope of a scalar activation on [low, high], then its lowest and highest value there."""
    kind = type(module)
    least, most = (torch.full_like(low, s, dtype=torch.float64) for s in (least_slope(module, constant), constant))
    if kind in (nn.ReLU, nn.LeakyReLU):
        slope = torch.zeros_like(low) + (module.negative_slope if kind is nn.LeakyReLU else 0)
        one, tiny = torch.ones_like(low), 0.0 if kind is nn.ReLU else 2.0**-1000  # a product may underflow
        left, right = torch.where(low >= 0, one, slope), torch.where(high <= 0, slope, one)
        ends = [module(x) for x in (low, high, torch.maximum(low, torch.minimum(high, torch.zeros_like(low))))]
        return (torch.minimum(left, right), torch.maximum(left, right)), _outwards(ends, 2.0**-50, tiny)
    if kind is nn.Hardtanh:
        inside = (low >= module.min_val) & (high <= module.max_val)
        outside = (high <= module.min_val) | (low >= module.max_val)
        return (inside.double(), (~outside).double()), (module(low), module(high))
    curve = curve_of(module)  # None for GELU's approximation by tanh
    if kind not in _TURNS or curve is None or (kind is nn.Softplus and module.beta != 1):
        return (least, most), (torch.full_like(low, -math.inf), torch.full_like(low, math.inf))

    def reached(turns: Sequence[float | Tensor]) -> list[Tensor]:
        inside = (torch.as_tensor(turn, dtype=torch.float64).expand_as(low) for turn in turns)
        return [low, high, *(torch.maximum(torch.minimum(turn, high), low) for turn in inside)]

    # Of computed values and derivatives: beyond its threshold, at least 20, torch's Softplus is the identity.
    error = 2.0**-27 if kind is nn.Softplus else 2.0**-44
    # Beyond 40, each derivative that falls exponentially is 0 or 1 up to far less than this error.
    far = math.inf if kind in (Arctan, Arcsinh) else 40.0
    found = [derivative(module, x.clamp(-far, far)) for x in reached(curve.joints(module))]
    a, b = _outwards(found, 0.0, error)
    a, b = torch.maximum(a, least), torch.minimum(b, most)
    return (a, b), _outwards([module(x) for x in reached(_TURNS[kind])], error, error)


def _outwards(values: Sequence[Tensor], relative: float, absolute: float) -> tuple[Tensor, Tensor]:
    """The least and the largest of the values, moved outwards by the errors; NaN gives infinite ends."""
    stacked = torch.stack([*values])
    room = up(stacked.abs() * relative + absolute, 4)
    low, high = (stacked - room).amin(0), (stacked + room).amax(0)
    return low.nan_to_num(-math.inf, math.inf, -math.inf), high.nan_to_num(math.inf, math.inf, -math.inf)
