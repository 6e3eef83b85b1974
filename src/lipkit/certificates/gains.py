r"""Gains of networks that were not built for a gain: by LMIs, on a box of inputs, and from each input to each output.

On a box, interval arithmetic (rounding included) encloses the inputs of each activation, and so its slopes in [a, b].
With :math:`c = b - a` the activation is :math:`\sigma(z) = a z + c\,s(z)`, where s has slopes in [0, 1]; where a = b it
is linear, up to a constant. So after k activations

.. math:: h_k = A_k x + \sum_{j < k} B_{kj} s_j,

and the LMI of `lipkit.bounds.lmi` bounds the gain; each of its weights reads x and all earlier s. Weights are products
in float64; a bound of the error of each entry goes into the proof. An entry dy_i / dx_j of the derivative has two
bounds: the same LMI for input j and output i alone, and :math:`W_L D_L \cdots D_1 W_0` with intervals of slopes D.

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

from lipkit.bounds.lmi import gain_bound
from lipkit.bounds.lmi_solver import GainProgram, balance, repaired
from lipkit.certificates.lipsdp import attach, solve
from lipkit.certificates.measurement import check_network
from lipkit.certificates.relaxation import curve_of, derivative
from lipkit.errors import NoRuleError, OptionError, ShapeError, interval
from lipkit.linalg.matrices import check_integer
from lipkit.lowering import lipschitz
from lipkit.modules import Graph, Network
from lipkit.modules.activations import ACTIVATIONS, slope_restricted
from lipkit.modules.chains import _SAME, _composed, _linear_map, slope_runs
from lipkit.modules.dense import Affine
from lipkit.modules.graph import value_shapes
from lipkit.modules.linear_graph import ACTIONS, acted
from lipkit.modules.registry import LATER, Shape, output_shape
from lipkit.modules.storage import exact_copy
from lipkit.proof.roundoff import UNIT, known, next_down, next_up, product, up

Box = tuple[Any, Any]
"""Lowest and highest inputs: numbers, or tensors or arrays per entry or channel."""

EVERYWHERE: Box = (-math.inf, math.inf)

UNITS = 600
"""Most hidden units in one LMI by default, and in a network that `analyze` bounds by LMIs with ``tight=None``."""

# Most inputs, units and outputs in one LMI; most entries of a matrix with a proof each, most units for an LMI of each.
_MOST_ROWS, _MOST_ENTRIES, _MOST_UNITS = 3000, 256, 100


def tight(network: Network, *, units: int = 2048) -> Network:
    """A copy of the network with LipSDP multipliers for every run of dense layers: its ``lipschitz`` is the tight gain.

    Args:
        network: result of ``lipkit.export``.
        units: most hidden units in one LMI (2,048 take two minutes); a run with more is bounded piece by piece, and a
            wider layer by its norm: ``docs/lipsdp.md`` shows what this costs.

    Guarantee:
        That of ``lipschitz``, which proves the multipliers' claim; the gain is never above the one without them.

    >>> net = Network([nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)], (3,))
    >>> bool(lipschitz(tight(net)) <= lipschitz(net))
    True
    """
    return attach(network, solve(network, units=units).multipliers)


def _tight_gain(network: Network) -> Tensor:
    """The gain of `tight`; with branches also that of one LMI for all of them, if it is smaller."""
    gain = lipschitz(tight(network))
    if any(type(module) is Graph for module in network):
        gain = gain.clamp_max(local_gain(network, EVERYWHERE, units=2048))
    return gain


LATER["tight"] = _tight_gain


def hidden_units(network: Network) -> int:
    """The largest number of hidden units in a run of dense layers; `tight` bounds each run by one LMI."""
    parts = [part for part in attach(network, {}).modules() if type(part) is Network]
    runs = [run for part in parts for run in slope_runs(part, candidates=True)]
    return max((sum(len(weight) for weight in run.weights[:-1]) for run in runs), default=0)


def local_gain(network: Network, box: Box, *, units: int = UNITS) -> float:
    r"""A gain that holds between inputs in a box: :math:`\|f(x) - f(x')\|_2 \le g \|x - x'\|_2`.

    Args:
        network: result of ``lipkit.export``; multipliers that it carries (`tight`) count.
        box: (lowest, highest) inputs: numbers, ``input_shape``, or ``(C,)`` for the channels of ``(C, ...)``; or
            anything else that broadcasts to ``input_shape``. Ends may be infinite.
        units: most hidden units in one LMI.

    Guarantee:
        Upper bound for the stored numbers, rounding included, and never above ``lipschitz(network)``. Softplus counts
        as its formula on both sides of its threshold.

    Raises:
        OptionError, ShapeError: a box that does not fit, or is empty.

    >>> net = Network([nn.Linear(1, 1, bias=False), nn.Tanh()], (1,))
    >>> _ = nn.init.ones_(net[0].weight)
    >>> round(local_gain(net, (2.0, 3.0)), 6), round(local_gain(net, (-1.0, 1.0)), 6)  # 1 - tanh(2)^2
    (0.070651, 1.0)
    """
    check_network(network, "bound")
    check_integer("units", units, 0)
    everywhere = float(lipschitz(network))
    if not math.isfinite(everywhere):
        return everywhere
    return min(everywhere, product(*(part.least()[0] for part in _parts(network, box, units))))


def gain_matrix(network: Network, box: Box | None = None) -> Tensor:
    r"""Bounds (outputs, inputs), flattened, float64: one unit of input j moves output i by at most :math:`G_{ij}`.

    Args:
        network: result of ``lipkit.export``: dense layers, scalings and scalar activations in a chain.
        box: of the inputs, as for `local_gain`; None bounds it everywhere.

    Guarantee:
        Upper bound, as for `local_gain`. In a box ``|f(x) - f(x')| <= G |x - x'|`` entry by entry.

    Raises:
        NoRuleError: a network of other modules. OptionError, ShapeError: a box that does not fit, or is empty.

    >>> net = Network([nn.Linear(2, 1, bias=False)], (2,))
    >>> _ = net[0].weight.copy_(torch.tensor([[3.0, -4.0]]))
    >>> [round(value, 9) for value in gain_matrix(net)[0].tolist()]
    [3.0, 4.0]
    """
    check_network(network, "bound")
    everywhere = float(lipschitz(network))
    parts = _parts(network, EVERYWHERE if box is None else box, None)
    if len(parts) != 1 or not parts[0].weights:
        kinds = ", ".join(sorted({type(m).__name__ for m in network})) or "no module"
        raise NoRuleError(f"expected dense layers with scalar activations between them, got {kinds}")
    (run,) = parts
    assert run.last is not None
    assert run.last.jacobian is not None
    if not math.isfinite(everywhere):
        return torch.full_like(run.last.jacobian[0], math.inf)
    gain, multipliers = run.least()
    found = _moduli(run.last.jacobian).clamp_max(min(gain, everywhere))
    for i, j in found.nonzero().tolist() if found.numel() <= _MOST_ENTRIES and multipliers else ():
        entry = run.entry(i, j)
        if sum(len(weight) for weight, _ in run.weights[:-1]) <= _MOST_UNITS:
            bound = entry.least(1e-3)[0]
        else:
            weights, errors = zip(*entry.weights, strict=True)
            factor = balance(weights, multipliers)
            bound = gain_bound(weights, [m * factor for m in multipliers], errors)
        found[i, j] = min(float(found[i, j]), bound)
    return found


Part = tuple[Tensor, Tensor]
"""A matrix or a vector (a diagonal), and a bound of the error of each entry."""


def _moduli(part: Part) -> Tensor:
    """Upper bounds of the moduli of the exact entries of a matrix or diagonal that is known up to errors."""
    return known(up(part[0].abs() + part[1], 2))


class _Value(NamedTuple):
    """What is known of a value of a run on the box.

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

    def linear(self, weight: Tensor, shift: Tensor) -> _Value:
        """Behind a linear layer: a matrix, or the diagonal of one."""
        parts = _composed(weight, self.map), _composed(weight, self.jacobian)
        return _Value(*parts, _moved(weight, shift, *self.reach), _moved(weight, shift, *self.point))

    def full(self) -> _Value:
        """The same value with matrices."""
        one = torch.eye(len(self.reach[0]), dtype=torch.float64)
        return (
            self if self.dense else self._replace(map=_composed(one, self.map), jacobian=_composed(one, self.jacobian))
        )


def _widened(part: Part, width: int) -> Part:
    """A matrix with columns of zeros for the s that came after it."""
    more = part[0].new_zeros(len(part[0]), width - part[0].shape[1])
    return torch.cat((part[0], more), 1), torch.cat((part[1], more), 1)


@dataclasses.dataclass
class _Run:
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
    last: _Value | None = None
    weights: list[Part] = dataclasses.field(default_factory=list)

    @classmethod
    def begin(cls, centre: Tensor, radius: Tensor) -> _Run:
        """An empty run on a box."""
        start = _Value(None, None, (centre, radius), (centre, torch.zeros_like(radius)))
        return cls(1.0, len(centre), radius, start)

    @property
    def units(self) -> int:
        return sum(len(weight) for weight, _ in self.weights)

    def slopes(self, value: _Value, module: Any, constant: float) -> tuple[Part, ...]:
        """Lowest and highest slope of a scalar activation behind a value, then its lowest and highest output."""
        centre, radius = value.reach
        low, high = next_down(centre - radius), next_up(centre + radius)
        if value.jacobian is not None:  # the mean value theorem, from the centre of the box
            moduli = _moduli(value.jacobian)
            steepest = moduli if moduli.ndim == 2 else torch.diag(moduli)
            width = value.point[1] + _composed(steepest, (self.spread[:, None], 0 * self.spread[:, None]))[0][:, 0]
            width = up(width, 2 * len(self.spread) + 8) + 2.0**-1000
            low = torch.fmax(low, next_down(value.point[0] - width))  # the tighter one; NaN gives way
            high = torch.fmin(high, next_up(value.point[0] + width))
        return _slopes(module, low, high, constant)

    def activated(self, value: _Value, module: Any, constant: float, found: tuple[Part, ...]) -> _Value:
        """Behind a scalar activation with these `slopes`; its nonlinear units become rows of the LMI."""
        assert value.map is not None
        assert value.jacobian is not None
        (low, high), ends = found
        active, columns = (high > low).nonzero()[:, 0], self.inputs + self.units  # other units are linear on the box
        weight, error = _widened(value.map, columns)
        if len(active):
            self.weights.append((weight[active], error[active]))
        fresh = torch.zeros(len(low), len(active), dtype=torch.float64)
        # h = low z + width s; the upper slope that is proved is low + width.
        fresh[active, torch.arange(len(active))] = next_up(high - low)[active]
        weight, error = _composed(low, (weight, error))  # the part that is linear
        middle = (low + high) / 2  # slopes as an interval: middle and radius
        radius = next_up(torch.maximum(next_up(high - middle), next_up(middle - low)))[:, None]
        turned, off = _composed(middle, value.jacobian)
        point = _slopes(
            module, next_down(value.point[0] - value.point[1]), next_up(value.point[0] + value.point[1]), constant
        )[1]
        return _Value(
            (torch.cat((weight, fresh), 1), torch.cat((error, torch.zeros_like(fresh)), 1)),
            (turned, up(off + radius * _moduli(value.jacobian), 3) + 2.0**-1070),
            _around(*ends), _around(*point),
        )  # fmt: skip

    def through(self, module: Any, given: Sequence[_Value], shapes: Sequence[Shape]) -> _Value:
        """Behind a module of a graph whose kind `_hidden` knows, which reads values of these shapes."""
        kind, (value, *_), shape = type(module), given, shapes[0]
        if kind is Network:
            for child in module:
                value, shape = self.through(child, [value], [shape]), output_shape(child, shape)
            return value
        if kind is Graph:
            values, sizes = [value], value_shapes(module, shape)
            for node, read in zip(module.nodes, module.sources, strict=True):
                values.append(self.through(node, [values[k] for k in read], [sizes[k] for k in read]))
            return values[-1]
        if kind in ACTIVATIONS:
            constant = float(lipschitz(module, shape))
            return self.activated(value, module, constant, self.slopes(value, module, constant))
        act, columns = ACTIONS[kind](module, shape), self.inputs + self.units
        shift = module(*(torch.zeros(1, *size, dtype=torch.float64) for size in shapes)).flatten()

        def made(parts: Sequence[Part]) -> Part:
            """The action on matrices, column by column; on vectors, which are columns, with the shift."""
            rows = [[t.mT.reshape(-1, *size) for t in part] for part, size in zip(parts, shapes, strict=True)]
            found, error = acted(act, [(a, b) for a, b in rows])
            return found.flatten(1).mT, known(error.flatten(1).mT)

        def shifted(parts: Sequence[Part]) -> Part:
            found, error = made([(a[:, None], b[:, None]) for a, b in parts])
            moved = found[:, 0] + shift
            return moved, up(error[:, 0] + 2 * UNIT * moved.abs(), 3)  # the shift is added in one rounding

        maps = [_widened(v.map, columns) for v in given if v.map is not None]
        jacobians = [v.jacobian for v in given if v.jacobian is not None]
        return _Value(made(maps), made(jacobians), shifted([v.reach for v in given]), shifted([v.point for v in given]))

    def finished(self) -> _Run:
        """The run, its last value added as y; no more modules can be appended."""
        if self.last is not None and self.last.map is not None and self.last.dense:
            self.weights.append(_widened(self.last.map, self.inputs + self.units))
        return self

    def entry(self, i: int, j: int) -> _Run:
        """The run from input j to output i alone."""
        weights = [(torch.cat((m[:, [j]], m[:, self.inputs :]), 1) for m in part) for part in self.weights]
        parts: list[Part] = [tuple(part) for part in weights]  # type: ignore[misc]
        parts[-1] = (parts[-1][0][[i]], parts[-1][1][[i]])  # y reads output i alone
        return dataclasses.replace(self, constant=math.inf, inputs=1, weights=parts)

    def least(self, accuracy: float = 1e-5) -> tuple[float, list[Tensor]]:
        """The smaller of `constant` and the gain proved by the LMI, and the multipliers, [] without an LMI."""
        if not self.weights or self.inputs + self.units > _MOST_ROWS:
            return self.constant, []
        weights, errors = (list(part) for part in zip(*self.weights, strict=True))  # a part is (weight, error)
        if not all(bool(m.isfinite().all()) for m in (*weights, *errors)):
            return self.constant, []
        if len(weights) == 1:  # no activation: the norm of one matrix
            return min(self.constant, gain_bound(weights, [], errors)), []
        gain, start = _feasible(weights, self.inputs)
        # The last weight is divided by this gain, which must be a normal number.
        if not (1e-100 < gain < 1e100 and 1e-200 < min(start) <= max(start) < 1e200):
            return self.constant, []
        safe = [
            torch.full((len(w),), value / gain, dtype=torch.float64) for w, value in zip(weights, start, strict=False)
        ]
        program = GainProgram(_fewer_inputs([*weights[:-1], weights[-1] / gain], self.inputs))
        x = torch.cat((torch.tensor([1.1], dtype=torch.float64), *(values / gain for values in safe)))
        if not program.inside(x):  # rounding can spoil the start: then the constant stays
            return self.constant, []
        x, _ = program.minimum(x, accuracy)
        found = list((x[1:] * gain).split(list(map(len, safe))))
        proved, found = repaired(weights, found, safe, errors)
        return min(self.constant, proved), found


def _feasible(weights: Sequence[Tensor], inputs: int) -> tuple[float, list[float]]:
    r"""A gain g, and for the multipliers of each layer a number t_k, such that t_k / g is feasible: from all paths.

    In the form of H, the units of layer k, :math:`z_k = \sum_j W_{kj} v_j`, cost at most
    :math:`t_k\, c_k \sum_j \|W_{kj}\|^2 \|v_j\|^2`, where :math:`c_k` of the :math:`W_{kj}` are not 0, and y the same
    with :math:`t = 1`. So it is enough that each :math:`v_j` has more than all that reads it.
    """
    sizes = [inputs, *map(len, weights[:-1])]
    squares = list[list[float]]()  # of each layer, for each value before it
    for w in weights:
        norms = [
            float(torch.linalg.matrix_norm(block, 2)) if block.any() else 0.0
            for block in w.split(sizes[: len(squares) + 1], 1)
        ]
        squares.append([sum(n > 0 for n in norms) * n * n for n in norms])
    totals = [1.0]  # of the layers from the last one on, y first
    for j in range(len(sizes) - 1, -1, -1):
        readers = [squares[k][j] for k in range(len(squares) - 1, j - 1, -1)]
        totals.append(1.1 * sum(t * s for t, s in zip(totals, readers, strict=True)) or 1e-9 * totals[-1])
    return math.sqrt(totals[-1]), totals[-2:0:-1]


def _hidden(module: Any, shape: Shape) -> float:
    """The number of units of a graph of linear modules and scalar activations; inf for others and for large ones."""
    kind = type(module)
    if math.prod(shape) > _MOST_ROWS:
        return math.inf
    if kind is Network:
        total, size = 0.0, shape
        for child in module:
            total, size = total + _hidden(child, size), output_shape(child, size)
        return total
    if kind is Graph:
        sizes = value_shapes(module, shape)
        reads = zip(module.nodes, module.sources, strict=True)
        return sum(_hidden(node, sizes[read[0]]) for node, read in reads)
    if kind in ACTIVATIONS:
        return math.prod(shape)
    return 0.0 if kind in ACTIONS else math.inf


def _fewer_inputs(weights: list[Tensor], inputs: int) -> list[Tensor]:
    """The weights with fewer columns for x but the same Gram matrix of rows, so the LMI has the same gains."""
    rows = torch.cat([w[:, :inputs] for w in weights])
    if inputs > len(rows):  # a square root of the Gram matrix is smaller
        parts = torch.linalg.qr(rows.mT, mode="r").R.mT.split([len(w) for w in weights])
        weights = [torch.cat((part, w[:, inputs:]), 1) for part, w in zip(parts, weights, strict=True)]
    return weights


def _parts(network: Network, box: Box, units: int | None) -> list[_Run]:
    """Split a network into runs of at most ``units`` hidden units (None: any number); other modules are constants."""
    run = _Run.begin(*_around(*(end.flatten() for end in box_ends(box, network.input_shape))))
    found, shape = list[_Run](), network.input_shape
    for module, twin in zip(network, exact_copy(network), strict=True):
        before, shape = shape, output_shape(module, shape)
        if type(module) in _SAME:
            continue
        constant, value, after = float(lipschitz(module, before)), run.last, None
        assert value is not None
        on_vectors = type(module) is nn.Linear and math.prod(before) == before[-1]
        # A matrix, or the diagonal of a scaling.
        weight = _linear_map(twin, before, True) if on_vectors or type(module) is Affine else None
        if weight is not None:
            after = value.linear(weight, twin(torch.zeros(1, *before, dtype=torch.float64)).flatten())
        elif type(module) in ACTIVATIONS and (len(value.reach[0]) <= _MOST_ROWS or value.map is not None):
            slopes = run.slopes(value, twin, constant)
            (a, b), ends = slopes
            constant = float(torch.maximum(a.abs(), b.abs()).max())
            if units is not None and (run.units + int((b > a).sum()) > units or not value.dense):
                found += [run.finished(), _Run(constant)]  # too many units: the activation counts by its constant
                run = _Run.begin(*_around(*ends))
                continue
            after = run.activated(value.full(), twin, constant, slopes)
        elif type(module) is Graph and run.units + _hidden(module, before) <= (_MOST_ROWS if units is None else units):
            after = run.through(twin, [value.full()], [before])
        if after is None:
            found += [run.finished(), _Run(constant)]
            centre = torch.zeros(math.prod(shape), dtype=torch.float64)
            run = _Run.begin(centre, torch.full_like(centre, math.inf))
        else:
            run.last, run.constant = after, product(run.constant, constant)
    assert run.last is not None
    if units is None and run.last.map is not None:
        run.last = run.last.full()
    return [part for part in (*found, run.finished()) if part.weights or part.constant != 1]


def box_ends(box: Box, shape: Shape, name: str = "box") -> tuple[Tensor, Tensor]:
    """The lowest and the highest input of a box as `local_gain` takes it, float64; ``name`` is for messages."""
    try:
        given = [torch.as_tensor(end, dtype=torch.float64).detach().cpu() for end in box]
    except (TypeError, ValueError, RuntimeError):
        given = []
    ends = list[Tensor]()
    for end in given:
        if end.ndim == 1 and len(shape) > 1 and len(end) == shape[0]:
            end = end.view(-1, *[1] * (len(shape) - 1))
        try:
            ends.append(end.expand(shape))
        except RuntimeError:
            raise ShapeError(f"{name}: expected ends of shape {shape} or per channel, got {tuple(end.shape)}") from None
    if len(ends) != 2 or isinstance(box, str) or not bool((ends[0] <= ends[1]).all()):
        interval(name, box)  # raises with the usual message
        raise OptionError(f"{name}: expected two ends, the smaller one first in every entry")
    return ends[0], ends[1]


def _around(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and radius of intervals that hold every number from ``low`` to ``high``."""
    finite = low.isfinite() & high.isfinite()
    centre = torch.where(finite, low / 2 + high / 2, 0.0)
    radius = next_up(torch.maximum(next_up(high - centre), next_up(centre - low)))
    # An interval of one number has radius 0.
    radius = torch.where((low == centre) & (high == centre), 0.0, radius)
    return centre, torch.where(finite, radius, math.inf)


def _moved(weight: Tensor, shift: Tensor, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and radius of the intervals after a linear layer; the radius includes rounding."""
    value, error = _composed(weight, (centre[:, None], radius[:, None]))
    value, error = value[:, 0], known(error[:, 0])
    moved = value + shift  # shift: the layer's output at 0
    return moved, up(error + 2 * UNIT * moved.abs(), 3)  # the shift is added in one rounding


# Smooth functions, and the points where they turn; their derivatives turn at the joints of `relaxation.Curve`. Ten
# digits are enough: near a turning point, values change by the square of the distance.
_TURNS: dict[type[nn.Module], tuple[float, ...]] = {
    **dict.fromkeys((nn.Tanh, nn.Sigmoid, nn.Softplus), ()),
    nn.SiLU: (-1.2784645428,),
    nn.GELU: (-0.7517915247,),
}


def _slopes(module: Any, low: Tensor, high: Tensor, constant: float) -> tuple[tuple[Tensor, Tensor], ...]:
    """Lowest and highest slope of a scalar activation on [low, high], then its lowest and highest value there."""
    kind = type(module)
    least, most = torch.zeros_like(low), torch.full_like(low, constant, dtype=torch.float64)
    if not slope_restricted(module):
        # gelu'(x) + gelu'(-x) = 1, and the same of SiLU.
        least = least - (constant if kind not in (nn.GELU, nn.SiLU) else next_up(constant - 1))  # slopes below 0
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
    # Beyond 40, each derivative is 0 or 1 up to far less than this error.
    found = [derivative(module, x.clamp(-40, 40)) for x in reached(curve.joints(module))]
    a, b = _outwards(found, 0.0, error)
    a, b = torch.maximum(a, least), torch.minimum(b, most)
    return (a, b), _outwards([module(x) for x in reached(_TURNS[kind])], error, error)


def _outwards(values: Sequence[Tensor], relative: float, absolute: float) -> tuple[Tensor, Tensor]:
    """The least and the largest of the values, moved outwards by the errors; NaN gives infinite ends."""
    stacked = torch.stack([*values])
    room = up(stacked.abs() * relative + absolute, 4)
    low, high = (stacked - room).amin(0), (stacked + room).amax(0)
    return low.nan_to_num(-math.inf, math.inf, -math.inf), high.nan_to_num(math.inf, math.inf, -math.inf)
