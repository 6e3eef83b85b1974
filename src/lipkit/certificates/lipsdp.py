r"""LipSDP for whole networks: prove, or find, gains by the block-tridiagonal LMI.

One gain is found for every run Linear, activation, Linear, ..., Linear with slopes in [0, 1], in a chain of any modules
and inside a `Graph`. Linear modules between two activations count as one layer: their product in float64, whose
rounding is inside the proof. All other modules keep their constants.
"""

import collections
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import proves_gain
from lipkit.bounds.lmi_solver import minimise_gain
from lipkit.certificates.runs import least_gain
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.linalg.matrices import check_integer
from lipkit.lowering import lipschitz
from lipkit.modules import Graph, Network, guard
from lipkit.modules.chains import constants, whole
from lipkit.modules.graph import value_shapes
from lipkit.modules.plain import Shape
from lipkit.modules.registry import output_shape
from lipkit.modules.slope_runs import MOST_ROWS, SlopeRun, in_runs, is_linear, slope_runs
from lipkit.proof.roundoff import next_down
from lipkit.shown import Shown, upper

Place = int | str
"""An activation: its index, or inside a module its path in the network that `attach` makes: ``"2.nodes.0.1"``."""


@dataclass(frozen=True, repr=False)
class GainProof(Shown):
    """A gain that was proved.

    Attributes:
        gain: upper bound of the l2 gain of the whole network, proved in floating point.
        product: the product of the layers' norms, for comparison.
        multipliers: the diagonals that prove the gain, by place of the activation, for `attach`.
        steps: Newton steps taken to find them.
    """

    gain: float
    product: float
    multipliers: dict[Place, Tensor]
    steps: int

    def describe(self) -> str:
        """The proved gain beside the product of the norms."""
        return (
            f"gain <= {upper(self.gain)} (proved); product of the layers' norms {upper(self.product)}\n"
            f"{len(self.multipliers)} diagonals of multipliers, found in {self.steps} Newton steps"
        )


def _chained(graph: Graph, shape: Shape) -> Graph:
    """The graph with each chain of dense modules and activations merged into a `Network`, to carry multipliers.

    A graph that is linear as a whole stays as it is: it counts as one layer of the chain around it.
    """
    if is_linear(graph, shape):
        return graph
    shapes, readers = value_shapes(graph, shape), collections.Counter(itertools.chain(*graph.sources))
    nodes, sources = list[nn.Module](), list[list[int]]()
    number = [0]  # in the new graph, of each value of the old one
    for node, read in zip(graph.nodes, graph.sources, strict=True):
        fits, source = type(node) is Network or in_runs(node), number[read[0]]
        before = nodes[source - 1] if source else None  # value 0 is the input, value k the output of nodes[k - 1]
        if fits and type(before) is Network and readers[read[0]] == 1:
            nodes[source - 1] = Network([before, node], before.input_shape)
            number.append(source)
            continue
        if fits:
            node = Network([node], shapes[read[0]])
        elif type(node) is Graph:
            node = _chained(node, shapes[read[0]])
        nodes.append(node)
        sources.append([number[value] for value in read])
        number.append(len(nodes))
    return Graph([node[0] if type(node) is Network and len(node) == 1 else node for node in nodes], sources)


def verify(network: Network, gamma: float, multipliers: Mapping[Place, Tensor] | Sequence[Tensor]) -> bool:
    """True if these multipliers prove, in floating point, that the whole network has gain at most ``gamma``.

    True is a proof for the stored weights in exact arithmetic; False says nothing.

    Args:
        multipliers: positive diagonals ``(n_{k+1},)``, by place of the activation, or a list in their order.

    >>> layers = [nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)]
    >>> for layer in layers[::2]: _ = nn.init.eye_(layer.weight)
    >>> net = Network(layers, (2,))
    >>> verify(net, 1.001, [torch.ones(2)]), verify(net, 0.999, [torch.ones(2)])
    (True, False)

    References:
        Fazlyab et al., NeurIPS 2019; [LBDN] section 2; the proof by Cholesky is Rump, BIT 2006.
    """
    proved = attach(network, multipliers)
    runs = slope_runs(proved)  # with their multipliers
    if len(runs) == 1:
        factors = [float(c) for c in constants(proved, proved.input_shape)]
        run, rest = runs[0], whole(factors[: runs[0].start] + factors[runs[0].stop :])
        finite = max(factors) < torch.inf  # else a number that no weight shows, such as a bias, is not
        if finite and rest > 0 and proves_gain(run.weights, run.multipliers, next_down(gamma / rest), run.errors):
            return True
    return bool(lipschitz(proved) <= gamma)


def _pieces(run: SlopeRun, units: int | None) -> Iterator[SlopeRun]:
    """Cut a run at activations into pieces of at most ``units`` hidden units."""
    if units is None or run.units <= units:
        yield run
        return
    begin = used = 0
    for end, weight in enumerate(run.weights):
        last = end + 1 == len(run.weights)
        if last or used + len(weight) > units:
            if end > begin:
                inner, part = slice(begin, end), slice(begin, end + 1)
                yield run._replace(weights=run.weights[part], errors=run.errors[part], places=run.places[inner])
            begin, used = end + 1, 0  # the activation between two pieces counts by its own constant
        else:
            used += len(weight)


def _solved(network: Network, units: int | None) -> list[tuple[dict[int, Tensor], int]]:
    """Multipliers for the runs of a network, by the index of their activations, and the Newton steps taken."""
    found, runs = list[tuple[dict[int, Tensor], int]](), slope_runs(network, candidates=True)
    most = MOST_ROWS if units is None else units
    if any(run.units > most for run in runs):  # dense layers alone, and each branch by itself
        runs = slope_runs(network, candidates=True, branches=False)
    for run in (run for run in runs if run.branches):
        _, diagonals, steps = least_gain([*zip(run.weights, run.errors, strict=True)])
        if not diagonals:
            runs, found = slope_runs(network, candidates=True, branches=False), []
            break
        # Those of a graph's activations are one after the other.
        taken = list(zip(run.places, diagonals, strict=True))
        found.append(({i: torch.cat([d for k, d in taken if k == i]) for i in run.places}, steps))
    for run in (run for run in runs if not run.branches):
        for piece in _pieces(run, units):
            if not all(bool(error.isfinite().all()) for error in piece.errors):
                continue  # a product of finite weights overflows: their norms remain
            _, diagonals, steps = minimise_gain(piece.weights, piece.errors)
            values = dict(zip(piece.places, diagonals, strict=True))
            if not values and (run.stop - run.start > 1 or type(network[run.start]) is Graph):
                values = {run.stop - 1: torch.ones(1)}  # marks a run without activations, see `slope_runs`
            found.append((values, steps))
    return found


def solve(network: Network, *, units: int | None = None) -> GainProof:
    """Nearly the smallest gain that LMIs can prove for this network, with the multipliers that prove it.

    Args:
        network: result of ``lipkit.export``, with one linear layer or more.
        units: most hidden units in one LMI: a run with more is cut at activations, which then count by their constants.

    Returns:
        :class:`GainProof`; never a gain that :func:`verify` has not proved, and never above the product of norms.

    Cost:
        Grows with the cube of the total width: see ``docs/lab/lipsdp.md`` for measured times.

    >>> net = Network([nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)], (3,))
    >>> proof = solve(net)
    >>> 0 < proof.gain <= proof.product
    True
    """
    if units is not None:
        check_integer("units", units, 0)
    proved = attach(network, {})
    multipliers, steps = dict[Place, Tensor](), 0
    parts = [(path, part) for path, part in proved.named_modules() if type(part) is Network]
    found = [(path, part, *one) for path, part in parts for one in _solved(part, units)]
    if not found and units is None:
        kinds = sorted({type(m).__name__ for m in network.modules()} - {"Network"})
        raise NoRuleError(f"expected one linear layer or more for the LMI, got {', '.join(kinds) or 'no module'}")
    for path, part, values, taken in found:
        steps += taken
        for i, value in values.items():
            part.carry(i, value)
            multipliers[f"{path}.{i}" if path else i] = value
    norms = whole([float(c) for c in constants(network, network.input_shape)])
    return GainProof(min(float(lipschitz(proved)), norms), norms, multipliers, steps)


def attach(network: Network, multipliers: Mapping[Place, Tensor] | Sequence[Tensor]) -> Network:
    """A copy of the network that carries these multipliers, as `verify` takes them; ``lipschitz`` uses what they prove.

    Inside its graphs, chains of dense modules become a `Network`, which carries their multipliers.

    >>> net = Network([nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)], (3,))
    >>> proved = attach(net, solve(net).multipliers)
    >>> bool(lipschitz(proved) <= lipschitz(net))
    True
    """
    if type(network) is not Network:
        raise OptionError(f"expected the result of lipkit.export, got {type(network).__qualname__}")
    guard(network)  # its modules are looked at where they are bounded
    modules, shape = list[nn.Module](), network.input_shape
    for module in network:
        modules.append(_chained(module, shape) if type(module) is Graph else module)
        shape = output_shape(module, shape)
    attached = copy.deepcopy(Network(modules, network.input_shape, network.multipliers()))
    attached.input_range = network.input_range
    if not isinstance(multipliers, Mapping):
        places = [*dict.fromkeys(i for run in slope_runs(attached, candidates=True) for i in run.places)]
        if len(places) != len(multipliers):
            raise ShapeError(f"multipliers: expected one for each of {len(places)} activations, got {len(multipliers)}")
        multipliers = dict(zip(places, multipliers, strict=True))
    for place, values in multipliers.items():
        path, _, index = str(place).rpartition(".")
        parts = {name: part for name, part in attached.named_modules() if type(part) is Network}
        if path not in parts or not index.isdecimal() or len(index) > 9:
            raise OptionError(f"multipliers: expected the index or path of an activation, got {place!r}")
        parts[path].carry(int(index), values)
    return attached
