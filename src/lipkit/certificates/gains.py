r"""Gains of networks that were not built for a gain: by LMIs, on a box of inputs, and from each input to each output.

An entry dy_i / dx_j of the derivative has two bounds: the LMI of `lipkit.certificates.runs` for input j and output i
alone, and :math:`W_L D_L \cdots D_1 W_0` with intervals of slopes D.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound
from lipkit.bounds.lmi_solver import balance
from lipkit.certificates.lipsdp import attach, solve
from lipkit.certificates.measurement import check_network
from lipkit.certificates.runs import Run, around, moduli_of
from lipkit.errors import NoRuleError, OptionError, ShapeError, interval
from lipkit.linalg.matrices import check_integer
from lipkit.lowering import lipschitz
from lipkit.modules import Graph, Network
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.dense import Affine
from lipkit.modules.registry import LATER, Shape, output_shape
from lipkit.modules.slope_runs import ACTIONS, LAYERS, MOST_ROWS, SAME, in_unit_slope, linear_map, slope_runs
from lipkit.modules.slope_runs import units as units_of
from lipkit.modules.storage import exact_copy
from lipkit.proof.roundoff import product

Box = tuple[Any, Any]
"""Lowest and highest inputs: numbers, or tensors or arrays per entry or channel."""

EVERYWHERE: Box = (-math.inf, math.inf)

UNITS = 600
"""Most hidden units in one LMI by default, and in a network that `analyze` bounds by LMIs with ``tight=None``."""

# Most entries of a matrix with a proof each, most units for an LMI of each.
_MOST_ENTRIES, _MOST_UNITS = 256, 100


def tight(network: Network, *, units: int = 2048) -> Network:
    """A copy of the network with LipSDP multipliers for every run of dense layers: its ``lipschitz`` is the tight gain.

    Residual blocks and other branches are in the LMI of the run around them, and so are convolutions and poolings of
    at most 1,024 inputs and outputs, where no run then has too many units.

    Args:
        network: result of ``lipkit.export``.
        units: most hidden units in one LMI (2,048 take two minutes); a run with more is bounded piece by piece, and a
            wider layer by its norm: ``docs/lab/lipsdp.md`` shows what this costs.

    Guarantee:
        That of ``lipschitz``, which proves the multipliers' claim; the gain is never above the one without them.

    >>> net = Network([nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)], (3,))
    >>> bool(lipschitz(tight(net)) <= lipschitz(net))
    True
    """
    return attach(network, solve(network, units=units).multipliers)


LATER["tight"] = tight


def hidden_units(network: Network) -> int:
    """The largest number of hidden units in a run of dense layers; `tight` bounds each run by one LMI.

    Without such a run, that between other modules, branches and convolutions included; 0 if values are too large.
    """
    parts = [part for part in attach(network, {}).modules() if type(part) is Network]
    alone = (run.units for part in parts for run in slope_runs(part, candidates=True, branches=False))
    if found := max(alone, default=0):
        return found
    for part in parts:
        total, shape = 0.0, part.input_shape
        for module in part:
            total += units_of(module, shape, in_unit_slope)
            found, shape = max(found, int(total) if total < math.inf else 0), output_shape(module, shape)
            total = total if total < math.inf else 0.0
    return found


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
        network: result of ``lipkit.export``: dense layers, convolutions, scalings, means, moves of entries and scalar
            activations, in a chain or in branches that are summed or concatenated.
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
        known = (Network, Graph, nn.ModuleList, *ACTIONS, *ACTIVATIONS)
        others = sorted({type(m).__name__ for m in network.modules()} - {kind.__name__ for kind in known})
        got = ", ".join(others) or f"values of more than {MOST_ROWS} entries or units"
        raise NoRuleError(f"expected dense layers, moves of entries and scalar activations alone, got {got}")
    (run,) = parts
    assert run.last is not None
    assert run.last.jacobian is not None
    if not math.isfinite(everywhere):
        return torch.full_like(run.last.jacobian[0], math.inf)
    gain, multipliers = run.least()
    gain = min(gain, everywhere)
    found = moduli_of(run.last.jacobian).clamp_max(gain)
    more = found > 2.0**-45 * gain  # the others are rounding
    for i, j in more.nonzero().tolist() if found.numel() <= _MOST_ENTRIES and multipliers else ():
        entry = run.entry(i, j)
        if sum(len(weight) for weight, _ in run.weights[:-1]) <= _MOST_UNITS:
            bound = entry.least(1e-3)[0]
        else:
            weights, errors = zip(*entry.weights, strict=True)
            factor = balance(weights, multipliers)
            bound = gain_bound(weights, [m * factor for m in multipliers], errors)
        found[i, j] = min(float(found[i, j]), bound)
    return found


def _parts(network: Network, box: Box, units: int | None) -> list[Run]:
    """Split a network into runs of at most ``units`` hidden units (None: any number); other modules are constants."""
    run = Run.begin(*around(*(end.flatten() for end in box_ends(box, network.input_shape))))
    found, shape = list[Run](), network.input_shape
    for module, twin in zip(network, exact_copy(network), strict=True):
        before, shape = shape, output_shape(module, shape)
        if type(module) in SAME:
            continue
        constant, value, after = float(lipschitz(module, before)), run.last, None
        assert value is not None
        on_vectors = type(module) is nn.Linear and math.prod(before) == before[-1]
        # A matrix, or the diagonal of a scaling.
        weight = linear_map(twin, before, True) if on_vectors or type(module) is Affine else None
        if weight is not None:
            after = value.linear(weight, twin(torch.zeros(1, *before, dtype=torch.float64)).flatten())
        elif type(module) in ACTIVATIONS and (len(value.reach[0]) <= MOST_ROWS or value.map is not None):
            slopes = run.slopes(value, twin, constant)
            (a, b), ends = slopes
            constant = float(torch.maximum(a.abs(), b.abs()).max())
            if units is not None and (run.units + int((b > a).sum()) > units or not value.dense):
                found += [run.finished(), Run(constant)]  # too many units: the activation counts by its constant
                run = Run.begin(*around(*ends))
                continue
            after = run.activated(value.full(), twin, constant, slopes)
        elif type(module) in LAYERS or units is None or value.dense:
            count = units_of(module, before, lambda one: True)
            if run.units + count <= (MOST_ROWS if units is None else units):
                after = run.through(twin, value, before)
        if after is None:
            found += [run.finished(), Run(constant)]
            centre = torch.zeros(math.prod(shape), dtype=torch.float64)
            run = Run.begin(centre, torch.full_like(centre, math.inf))
        else:
            run.last, run.constant = after, product(run.constant, constant)
    assert run.last is not None
    if units is None:
        run.last = run.last.full()
    return [*found, run.finished()]


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
