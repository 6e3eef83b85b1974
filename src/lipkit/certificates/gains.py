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
from typing import Any

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
from lipkit.modules import Network
from lipkit.modules.activations import ACTIVATIONS, slope_restricted
from lipkit.modules.chains import _SAME, _composed, _linear_map, slope_runs
from lipkit.modules.dense import Affine
from lipkit.modules.registry import LATER, Shape, output_shape
from lipkit.modules.storage import exact_copy
from lipkit.proof.roundoff import UNIT, known, next_down, next_up, product, up

Box = tuple[Any, Any]
"""Lowest and highest inputs: numbers, or tensors or arrays per entry or channel."""

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


LATER["tight"] = tight


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
    parts = _parts(network, (-math.inf, math.inf) if box is None else box, None)
    if len(parts) != 1 or not parts[0].weights:
        kinds = ", ".join(sorted({type(m).__name__ for m in network})) or "no module"
        raise NoRuleError(f"expected dense layers with scalar activations between them, got {kinds}")
    (run,) = parts
    assert run.jacobian is not None
    if not math.isfinite(everywhere):
        return torch.full_like(run.jacobian[0], math.inf)
    gain, multipliers = run.least()
    found = _moduli(run.jacobian).clamp_max(min(gain, everywhere))
    for i, j in found.nonzero().tolist() if found.numel() <= _MOST_ENTRIES and multipliers else ():
        entry = run.entry(i, j)
        if run.units <= _MOST_UNITS:
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


@dataclasses.dataclass
class _Run:
    """Consecutive modules: their constant, and, for an LMI, their weights in x and s (see the module docstring).

    Attributes:
        inputs: number of columns of x.
        constant: the product of the modules' constants.
        value: the matrix from (x, s) to the last value, or the diagonal of one; None before the first linear module.
        jacobian: the interval matrix dy / dx of that value, or its diagonal.
        own: the weight since the last activation, without a bound of its error.
        weights: rows of the nonlinear units, layer by layer, then of y, in the columns x, s_0, s_1, ...; or none.
        layers: the weight before each activation, its rows times the units' largest slopes; then the last weight, for
            the solver's starting point.
        sectors: ``m^2 - a b`` of the nonlinear units, layer by layer, for the starting point; slopes are in [a, b], and
            m is the largest modulus.
    """

    inputs: int
    constant: float = 1.0
    value: Part | None = None
    jacobian: Part | None = None
    own: Tensor | None = None
    weights: list[Part] = dataclasses.field(default_factory=list)
    layers: list[Tensor] = dataclasses.field(default_factory=list)
    sectors: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def units(self) -> int:
        return sum(map(len, self.sectors))

    def linear(self, weight: Tensor) -> None:
        """Append a linear layer: a matrix, or the diagonal of one."""
        self.value, self.jacobian = _composed(weight, self.value), _composed(weight, self.jacobian)
        self.own = _composed(weight, None if self.own is None else (self.own, torch.zeros_like(self.own)))[0]

    def activation(self, low: Tensor, high: Tensor) -> None:
        """Append an activation whose slopes lie between ``low`` and ``high``, unit by unit."""
        assert self.value is not None
        assert self.jacobian is not None
        assert self.own is not None
        active = (high > low).nonzero()[:, 0]  # the others are linear on the box
        width = next_up(high - low)[active]  # the upper slope that is proved is low + width
        most = torch.maximum(low.abs(), high.abs())
        self.layers.append(most[:, None] * (self.own if self.own.ndim == 2 else torch.diag(self.own)))
        self.sectors.append((most.square() - low * high)[active])
        if len(active):
            self.weights.append((self.value[0][active], self.value[1][active]))
        fresh = torch.zeros(len(low), len(active), dtype=torch.float64)
        fresh[active, torch.arange(len(active))] = width  # h = low z + width s
        value, error = _composed(low, self.value)  # the part that is linear
        self.value = torch.cat((value, fresh), 1), torch.cat((error, torch.zeros_like(fresh)), 1)
        middle = (low + high) / 2  # D as an interval: middle and radius
        radius = next_up(torch.maximum(next_up(high - middle), next_up(middle - low)))[:, None]
        old = _moduli(self.jacobian)  # moduli of the jacobian so far
        value, error = _composed(middle, self.jacobian)
        self.jacobian = value, up(error + radius * old, 3) + 2.0**-1070
        self.own = torch.ones(len(low), dtype=torch.float64)

    def steepest(self) -> Tensor:
        """Upper bounds of the moduli of dy / dx, entry by entry."""
        assert self.jacobian is not None
        moduli = _moduli(self.jacobian)
        return moduli if moduli.ndim == 2 else torch.diag(moduli)

    def finished(self) -> _Run:
        """The run, its last value added as y; no more modules can be appended."""
        if self.value is not None and self.value[0].ndim == 2 and self.own is not None:
            self.weights.append(self.value)
            # Without a dense layer after the last activation, the last weight is diagonal.
            self.layers.append(self.own if self.own.ndim == 2 else torch.diag(self.own))
        return self

    def entry(self, i: int, j: int) -> _Run:
        """The run from input j to output i alone."""
        weights = [(torch.cat((m[:, [j]], m[:, self.inputs :]), 1) for m in part) for part in self.weights]
        parts: list[Part] = [tuple(part) for part in weights]  # type: ignore[misc]
        parts[-1] = (parts[-1][0][[i]], parts[-1][1][[i]])  # y reads output i alone
        layers = [self.layers[0][:, [j]], *self.layers[1:]]
        layers[-1] = layers[-1][[i]]
        return dataclasses.replace(self, constant=math.inf, inputs=1, weights=parts, layers=layers)

    def least(self, accuracy: float = 1e-5) -> tuple[float, list[Tensor]]:
        """The smaller of `constant` and the gain proved by the LMI, and the multipliers, [] without an LMI."""
        if not self.weights or self.inputs + self.units + len(self.weights[-1][0]) > _MOST_ROWS:
            return self.constant, []
        weights, errors = (list(part) for part in zip(*self.weights, strict=True))  # a part is (weight, error)
        if not all(bool(m.isfinite().all()) for m in (*weights, *errors, *self.layers)):
            return self.constant, []
        if len(weights) == 1:  # no activation: the norm of one matrix
            return min(self.constant, gain_bound(weights, [], errors)), []
        norms = [float(torch.linalg.matrix_norm(m, 2)) for m in self.layers]
        scale = math.prod(norms)
        # The gain is divided by the product of the norms, which must be a normal number.
        if not (min(norms) > 1e-30 and max(norms) < 1e30 and 1e-100 < scale < 1e100):
            return self.constant, []
        # The start: as |h| <= m |z|, terms mu_k (m^2 z^2 - h^2) prove the product of the norms. They are at least
        # 2 (m^2 - a b) mu_k s (z - s), as h = a z + (b - a) s, so the multipliers (m^2 - a b) mu_k serve.
        slack, mu, start = 1.1 ** (1 / len(norms)), norms[-1] ** 2 / scale**2 / 1.1, list[Tensor]()
        for norm, sector in zip(reversed(norms[:-1]), reversed(self.sectors), strict=True):
            mu *= slack  # a little inside, so that the start is strictly feasible
            start.insert(0, sector * mu)
            mu *= norm**2
        start = [values for values in start if len(values)]
        program = GainProgram(_fewer_inputs([*weights[:-1], weights[-1] / scale], self.inputs))
        x = torch.cat((torch.tensor([1.1], dtype=torch.float64), *start))  # the gain and the multipliers
        if not program.inside(x):  # rounding can spoil the start: then the constant stays
            return self.constant, []
        x, _ = program.minimum(x, accuracy)
        found = list((x[1:] * scale).split([len(values) for values in start]))
        gain, found = repaired(weights, found, [values * scale for values in start], errors)
        return min(self.constant, gain), found


def _fewer_inputs(weights: list[Tensor], inputs: int) -> list[Tensor]:
    """The weights with fewer columns for x but the same Gram matrix of rows, so the LMI has the same gains."""
    rows = torch.cat([w[:, :inputs] for w in weights])
    if inputs > len(rows):  # a square root of the Gram matrix is smaller
        parts = torch.linalg.qr(rows.mT, mode="r").R.mT.split([len(w) for w in weights])
        weights = [torch.cat((part, w[:, inputs:]), 1) for part, w in zip(parts, weights, strict=True)]
    return weights


def _parts(network: Network, box: Box, units: int | None) -> list[_Run]:
    """Split a network into runs of at most ``units`` hidden units (None: any number); other modules are constants."""
    centre, radius = _around(*(end.flatten() for end in box_ends(box, network.input_shape)))
    found, shape = list[_Run](), network.input_shape
    run = _Run(math.prod(shape))
    for module, twin in zip(network, exact_copy(network), strict=True):
        before, shape = shape, output_shape(module, shape)
        if run.value is None:  # the box at the input of the run, and the value at its centre
            box_radius, point = radius, (centre, torch.zeros_like(radius))
        if type(module) in _SAME:
            continue
        constant = float(lipschitz(module, before))
        on_vectors = type(module) is nn.Linear and math.prod(before) == before[-1]
        # A matrix, or the diagonal of a scaling.
        weight = _linear_map(twin, before, True) if on_vectors or type(module) is Affine else None
        if weight is not None:
            run.linear(weight)
            run.constant = product(run.constant, constant)
            shift = twin(torch.zeros(1, *before, dtype=torch.float64)).flatten()
            centre, radius = _moved(weight, shift, centre, radius)
            point = _moved(weight, shift, *point)
        elif type(module) in ACTIVATIONS and (len(centre) <= _MOST_ROWS or run.value is not None):
            low, high = next_down(centre - radius), next_up(centre + radius)
            if run.jacobian is not None:  # the mean value theorem, from the centre of the box
                width = point[1] + _composed(run.steepest(), (box_radius[:, None], 0 * box_radius[:, None]))[0][:, 0]
                width = up(width, 2 * len(box_radius) + 8) + 2.0**-1000
                low = torch.fmax(low, next_down(point[0] - width))  # the tighter one; NaN gives way
                high = torch.fmin(high, next_up(point[0] + width))
            (a, b), (low, high) = _slopes(twin, low, high, constant)
            steepest = float(torch.maximum(a.abs(), b.abs()).max())
            count, begun = int((b > a).sum()), run.value is not None and run.value[0].ndim == 2
            if units is not None and (run.units + count > units or not begun):
                found += [run.finished(), _Run(0, steepest)]  # too many units: the activation counts by its constant
                run = _Run(len(a))
            else:
                if not begun:
                    run.linear(torch.eye(len(a), dtype=torch.float64))
                run.activation(a, b)
                run.constant = product(run.constant, steepest)
            centre, radius = _around(low, high)
            point = _around(*_slopes(twin, next_down(point[0] - point[1]), next_up(point[0] + point[1]), constant)[1])
        else:
            found += [run.finished(), _Run(0, constant)]
            run = _Run(math.prod(shape))
            centre = torch.zeros(math.prod(shape), dtype=torch.float64)
            radius = torch.full_like(centre, math.inf)
    if units is None and run.value is not None and run.value[0].ndim == 1:
        run.linear(torch.eye(len(centre), dtype=torch.float64))
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
