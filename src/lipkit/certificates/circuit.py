r"""A network as linear maps, scalar activations, sums and stacks, through which linear bounds are carried back.

A rule for each exact type of module (`circuit_rule`) says which parts it is made of. Sorting and maxima are
:math:`\max(a, b) = b + \mathrm{relu}(a - b)`, so only differences need bounds. A module without a rule becomes a
`Leaf`: a ball around its output at the sample, whose radius follows from the constants up to it.

A linear map is stored as its adjoint, a map that gives :math:`|W| h`, and its bias. Torch computes adjoints in float64,
as inner products of a known number of terms in any order.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from lipkit.certificates.relaxation import Relaxation
from lipkit.errors import NoRuleError
from lipkit.modules.activations import ACTIVATIONS, GroupSort, MaxMin
from lipkit.modules.dense import Affine
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Maximum
from lipkit.modules.guarding import guard, remember, type_name
from lipkit.modules.isometric import HalfAbs
from lipkit.modules.machine import local_error
from lipkit.modules.network import Network, first_floating
from lipkit.modules.normalization import LayerCenter
from lipkit.modules.pooling import Mean, pair, window_terms
from lipkit.modules.registry import Shape, output_shape
from lipkit.modules.sandwich import SandwichBlock, SlopeResidual
from lipkit.modules.views import EnlargeBilinear, Expand, Pad, Permute, Piece, Reshape, Roll, Shift2d, numbered
from lipkit.proof.roundoff import Arithmetic, grow


class Noise(NamedTuple):
    """The evaluator's rounding errors in a linear node: an output is a sum of terms, s the sum of their moduli.

    Attributes:
        depth: chained operations; the error is gamma(depth) s, plus the smallest normal number per operation.
        terms: number of terms in one output.
        swell: intermediate numbers are at most ``swell`` times s.
        weight: moduli of the stored weights, some of which may be flushed or overflow; None without weights.
    """

    depth: int
    terms: int = 1
    swell: float = 1.0
    weight: Tensor | None = None


class Linear(NamedTuple):
    """``y = W x + k`` of a sample.

    Attributes:
        shape: of y.
        adjoint: maps ``(B, *shape)`` to ``(B, *input)``, each entry a sum of at most ``terms`` products; ``terms`` is 0
            if numbers only move.
        moduli: maps |x| to at least |W| |x|, up to the rounding of sums of at most 2^20 terms.
        bias: k, of y's shape; None for 0.
        noise: the evaluator's rounding errors; None if it only moves numbers.
    """

    shape: Shape
    adjoint: Callable[[Tensor], Tensor]
    moduli: Callable[[Tensor], Tensor]
    terms: int
    bias: Tensor | None = None
    noise: Noise | None = None


class Scalar(NamedTuple):
    """A scalar activation, bounded from below and above on an interval by ``lines``.

    ``noise`` maps bounds of the input's moduli to the evaluator's (error, largest number); None without errors.
    """

    lines: Relaxation
    noise: Callable[[Tensor], tuple[Tensor, Tensor]] | None


class Total(NamedTuple):
    """``sum_i c_i x_i`` of values of one shape; ``flushed``: the evaluator only compares them, but may flush them."""

    factors: tuple[float, ...]
    noise: Noise | None
    flushed: bool = False


class Stack(NamedTuple):
    """Values concatenated along a dimension (the batch is 0)."""

    dim: int
    sizes: tuple[int, ...]


class Leaf(NamedTuple):
    """The output of the network's module ``position``, as a ball around its value at the sample."""

    position: int


Node = Linear | Scalar | Total | Stack | Leaf


class Circuit:
    """Nodes in the order of computation: value 0 is the input, value i + 1 the output of node i.

    The methods that add nodes return the number of the value that they make.

    Args:
        network: exported, in float64.
        arithmetic: of the evaluator; None for exact evaluations.
    """

    def __init__(self, network: Network, arithmetic: Arithmetic | None) -> None:
        self.arithmetic, self.device = arithmetic, first_floating(network).device
        self.nodes: list[Node] = []
        self.sources: list[tuple[int, ...]] = []
        self.shapes: list[Shape] = [network.input_shape]  # of one sample of each value
        shape, value = network.input_shape, 0
        for index, module in enumerate(network):
            before = len(self.nodes)
            shape = output_shape(module, shape)
            try:
                value = self.module(module, value)
            except NoRuleError:
                # Drop what parts of the module have added.
                del self.nodes[before:], self.sources[before:], self.shapes[before + 1 :]
                value = self._add(Leaf(index), (), shape)
        self.output = value
        # Values that activations read, which need bounds from below and above.
        self.read = {source for node, s in zip(self.nodes, self.sources, strict=True) for source in s
                     if isinstance(node, Scalar)}  # fmt: skip

    @property
    def leaves(self) -> bool:
        """True if some module has no rule here, and so became a `Leaf`."""
        return any(isinstance(node, Leaf) for node in self.nodes)

    @property
    def stored(self) -> int:
        """How often the evaluator rounds a stored number before it uses it."""
        return 0 if self.arithmetic is None else self.arithmetic.stored

    def _add(self, node: Node, sources: Sequence[int], shape: Shape) -> int:
        self.nodes.append(node)
        self.sources.append(tuple(sources))
        self.shapes.append(tuple(shape))
        return len(self.nodes)

    def module(self, module: nn.Module, *values: int) -> int:
        """Add the nodes of ``module(*values)``; ``NoRuleError`` if the module, or a part of it, has no rule."""
        guard(module)
        if type(module) not in _RULES:
            raise NoRuleError(f"local bounds: expected a module with a rule, got {type_name(type(module))}")
        return _RULES[type(module)](self, module, *values)

    def linear(self, value: int, linear: Linear) -> int:
        """Add the node ``linear`` applied to a value."""
        return self._add(linear, (value,), linear.shape)

    def scalar(self, value: int, module: nn.Module, *, exact: bool = False) -> int:
        """Add a scalar activation applied to a value; ``exact`` if the evaluator does not round it."""
        noise = None if exact or self.arithmetic is None else _noise_of(module, self.arithmetic)
        return self._add(Scalar(Relaxation(module), noise), (value,), self.shapes[value])

    def total(
        self, values: Sequence[int], factors: Sequence[float], noise: Noise | None = None, *, flushed: bool = False
    ) -> int:
        """Add ``sum_i factors_i values_i``; ``noise`` and ``flushed`` are those of `Total`."""
        return self._add(Total(tuple(factors), noise, flushed), values, self.shapes[values[0]])

    def stack(self, values: Sequence[int], dim: int) -> int:
        """Add a concatenation of values along a dimension (the batch is 0)."""
        shapes = [self.shapes[value] for value in values]
        sizes = tuple(shape[dim - 1] for shape in shapes)
        # Shapes have no batch: the dimension dim is their dim - 1.
        shape = (*shapes[0][: dim - 1], sum(sizes), *shapes[0][dim:])
        return self._add(Stack(dim, sizes), values, shape)

    def select(self, value: int, index: Tensor) -> int:
        """Add the entries of a value at ``index``, flat and counted from 1, in the shape of ``index``; 0 gives 0."""
        shape, flat = self.shapes[value], index.to(self.device).flatten()
        size, kept = math.prod(shape), flat[flat > 0] - 1  # 0 is a zero, entries count from 1
        most = int(torch.bincount(kept, minlength=1).amax()) if len(kept) else 0
        same = len(flat) == size and bool((flat == torch.arange(1, size + 1, device=flat.device)).all())
        back = torch.zeros(size, dtype=torch.int64, device=flat.device)
        back[kept] = (flat > 0).nonzero()[:, 0] + 1  # the inverse: where each entry went

        def adjoint(a: Tensor) -> Tensor:
            if same:
                return a.reshape(len(a), *shape)
            if most <= 1:  # each entry is read once at most, so nothing is added
                return F.pad(a.flatten(1), (1, 0))[:, back].reshape(len(a), *shape)
            total = a.new_zeros(len(a), size + 1).index_add_(1, flat, a.flatten(1))  # column 0 collects what zeros had
            return total[:, 1:].reshape(len(a), *shape)

        def forward(h: Tensor) -> Tensor:
            return F.pad(h.flatten(1), (1, 0))[:, flat].reshape(len(h), *index.shape)

        return self.linear(value, Linear(tuple(index.shape), adjoint, forward, most if most > 1 else 0))

    def maximum(self, a: int, b: int) -> int:
        """Add the maximum as ``b + relu(a - b)``; the evaluator only compares, so it rounds nothing."""
        apart = self.total((a, b), (1.0, -1.0))
        return self.total((b, self.scalar(apart, nn.ReLU(), exact=True)), (1.0, 1.0), flushed=True)


CircuitRule = Callable[..., int]

_RULES: dict[type[nn.Module], CircuitRule] = {}


def circuit_rule(*types: type[nn.Module]) -> Callable[[CircuitRule], CircuitRule]:
    """Register ``rule(circuit, module, *values) -> value``, which adds the nodes of a module of exactly these types.

    >>> class Twice(nn.Module):
    ...     def forward(self, x): return x + x
    >>> @circuit_rule(Twice)
    ... def _(circuit, module, value): return circuit.total((value, value), (1.0, 1.0), Noise(depth=1, terms=2))
    >>> del _RULES[Twice]  # only so that the example leaves the table as it was
    """

    def put(rule: CircuitRule) -> CircuitRule:
        for kind in types:
            if kind in _RULES:
                raise NoRuleError(f"{type_name(kind)} already has a rule of local bounds; expected one for each type")
            _RULES[kind] = rule
            remember(kind)
        return rule

    return put


def _noise_of(module: nn.Module, arithmetic: Arithmetic) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The rounding of an activation: a map from bounds h of its inputs to (error, largest intermediate number)."""
    found = local_error(module, (1,), arithmetic)(torch.zeros(1, 1, dtype=torch.float64))

    def noise(h: Tensor) -> tuple[Tensor, Tensor]:
        error, peak = (grow(line.at.to(h.device) + line.slope * h) for line in found)
        return error, peak

    return noise


@circuit_rule(nn.Flatten, Reshape, Permute, Piece, Roll, Pad, Shift2d, Expand)
def _moves(circuit: Circuit, module: nn.Module, value: int) -> int:
    # The module moves the numbers of the entries, 1, 2, ..., exactly: they show where each entry goes.
    return circuit.select(value, module(numbered(circuit.shapes[value]))[0].long())


@circuit_rule(nn.Linear)
def _dense(circuit: Circuit, module: nn.Linear, value: int) -> int:
    weight, size = module.weight.detach(), module.weight.detach().abs()
    shape = (*circuit.shapes[value][:-1], module.out_features)
    bias = None if module.bias is None else module.bias.detach().expand(shape)
    noise = inner_products(circuit, module.in_features, size)
    made = Linear(shape, lambda a: a @ weight, lambda h: F.linear(h, size), module.out_features, bias, noise)
    return circuit.linear(value, made)


def inner_products(circuit: Circuit, terms: int, weight: Tensor, blocked: bool = True) -> Noise:
    """Rounding errors of inner products of ``terms`` terms and a bias; ``blocked`` if the sums may run in blocks."""
    depth = circuit.arithmetic.depth(terms) if blocked and circuit.arithmetic is not None else terms
    return Noise(depth + 1 + circuit.stored, terms, 1.0, weight)  # + 1 for the bias


@circuit_rule(nn.Conv2d, nn.ConvTranspose2d)
def _convolution(circuit: Circuit, module: Any, value: int) -> int:
    turned, taps = isinstance(module, nn.ConvTranspose2d), math.prod(module.weight.shape[2:])
    weight, size, groups = module.weight.detach(), module.weight.detach().abs(), module.groups
    out = output_shape(module, circuit.shapes[value])
    padding = module.padding
    if not turned and (module.padding_mode != "zeros" or isinstance(padding, str)):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        border = list(module._reversed_padding_repeated_twice)
        padded = F.pad(numbered(circuit.shapes[value]), border, mode=mode)
        value, padding = circuit.select(value, padded[0].long()), (0, 0)
    into = circuit.shapes[value]
    options = {"stride": module.stride, "padding": padding, "dilation": module.dilation, "groups": groups}
    if turned:
        back = functools.partial(F.conv2d, **options)
        ahead: Any = functools.partial(F.conv_transpose2d, output_padding=module.output_padding, **options)
        # Output padding adds windows after those of the inputs: they are dropped.
        adjoint = lambda a: back(a, weight)[..., : into[1], : into[2]]  # noqa: E731
    else:
        ahead = functools.partial(F.conv2d, **options)
        adjoint = lambda a: conv2d_input((len(a), *into), weight, a, **options)  # noqa: E731
    counts = module.in_channels // groups * taps, module.out_channels // groups * taps
    bias = None if module.bias is None else module.bias.detach()[:, None, None].expand(out)
    # The blocked evaluator sums only these in blocks.
    noise = inner_products(circuit, counts[0], size, type(module) is nn.Conv2d and groups == 1)
    return circuit.linear(value, Linear(out, adjoint, lambda h: ahead(h, size), counts[1], bias, noise))


def _by_gradient(module: nn.Module, shape: Shape) -> Callable[[Tensor], Tensor]:
    """The adjoint of a linear module, evaluated by torch's gradient."""

    def adjoint(a: Tensor) -> Tensor:
        with torch.enable_grad():
            x = a.new_zeros(len(a), *shape).requires_grad_()
            return torch.autograd.grad(module(x), x, a)[0]

    return adjoint


@circuit_rule(nn.AvgPool2d, nn.AdaptiveAvgPool2d, Mean, EnlargeBilinear, LayerCenter)
def _averages(circuit: Circuit, module: Any, value: int) -> int:
    shape = circuit.shapes[value]
    out = output_shape(module, shape)
    centred = isinstance(module, LayerCenter)
    most = abs(module.divisor_override or 0) if isinstance(module, nn.AvgPool2d) else 0
    if centred:
        terms = math.prod(shape)
    else:
        terms = 4 * module.rows * module.cols if type(module) is EnlargeBilinear else window_terms(module, shape)
    moduli = (lambda h: h + h.mean(module.dims, keepdim=True)) if centred else (lambda h: module(h).abs())
    noise = Noise(terms + 8, terms + 8, float(max(terms, most) + 4))
    return circuit.linear(value, Linear(out, _by_gradient(module, shape), moduli, terms + 8, None, noise))


@circuit_rule(Affine)
def _scaled(circuit: Circuit, module: Affine, value: int) -> int:
    shape = circuit.shapes[value]
    rest = (1,) * (len(shape) - module.scale.ndim)  # scales belong to the first dimension, channels
    scale, shift = (t.detach().reshape(*t.shape, *rest) for t in (module.scale, module.shift))
    size = scale.abs()
    # A product and a sum, with one to spare, and the rounding of the stored scale and shift.
    noise = Noise(3 + 2 * circuit.stored, 8, 2.0, size)
    linear = Linear(shape, lambda a: a * scale, lambda h: h * size, 1, shift.expand(shape), noise)
    return circuit.linear(value, linear)


# Rules that are one call of the circuit.
circuit_rule(*ACTIVATIONS, HalfAbs)(lambda circuit, module, value: circuit.scalar(value, module))
circuit_rule(Concatenate)(lambda circuit, module, *values: circuit.stack(values, module.dim))
circuit_rule(Maximum)(lambda circuit, module, *values: functools.reduce(circuit.maximum, values))


@circuit_rule(Network, SandwichBlock, SlopeResidual)
def _chain(circuit: Circuit, module: Any, value: int) -> int:
    start = value
    for part in module if type(module) is Network else (module.first, module.activation, module.second):
        value = circuit.module(part, value)
    return circuit.total((start, value), (1.0, 1.0), Noise(1, 2, 2.0)) if type(module) is SlopeResidual else value


@circuit_rule(Graph)
def _graph(circuit: Circuit, module: Graph, value: int) -> int:
    values = [value]
    for node, read in zip(module.nodes, module.sources, strict=True):
        values.append(circuit.module(node, *(values[i] for i in read)))
    return values[-1]


@circuit_rule(Add)
def _sum(circuit: Circuit, module: Add, *values: int) -> int:
    return circuit.total(values, [float(sign) for sign in module.signs], Noise(len(values) - 1, len(values), 2.0))


@circuit_rule(Blend)
def _blend(circuit: Circuit, module: Blend, *values: int) -> int:
    share = float(module.share.detach().double())
    rest = 1 - share
    # A rounded share is off by u |share|, that is by u ratio of the rest; one below the normal range counts as 0.
    ratio = abs(share / rest) if rest else 0.0
    if not ratio <= 1e6:
        raise NoRuleError(f"local bounds: expected a Blend with |s / (1 - s)| of at most 1e6, got s = {share}")
    depth = 4 + circuit.stored * (2 + math.ceil(ratio))  # 1 - share, two products, one sum
    size = torch.tensor([abs(share), abs(rest)], dtype=torch.float64)
    return circuit.total(values, (share, rest), Noise(depth, 8, 2.0, size))


@circuit_rule(MaxMin, GroupSort)
def _pairs(circuit: Circuit, module: MaxMin | GroupSort, value: int) -> int:
    shape, grid = circuit.shapes[value], numbered(circuit.shapes[value])[0].long()
    if isinstance(module, GroupSort) and (module.group_size or shape[0]) != 2:
        raise NoRuleError(f"local bounds: expected groups of 2, got {module}")
    halves = grid.chunk(2) if isinstance(module, MaxMin) else (grid[::2], grid[1::2])
    a, b = (circuit.select(value, half) for half in halves)
    # With m = relu(a - b) the larger one is b + m, the smaller one a - m.
    more = circuit.scalar(circuit.total((a, b), (1.0, -1.0)), nn.ReLU(), exact=True)
    parts = circuit.total((b, more), (1.0, 1.0), flushed=True), circuit.total((a, more), (1.0, -1.0), flushed=True)
    sorted_ = circuit.stack(parts, 1)
    if isinstance(module, MaxMin):
        return sorted_
    return circuit.select(sorted_, torch.stack(grid.chunk(2), 1).flatten(0, 1))  # pairs side by side again


@circuit_rule(nn.MaxPool2d)
def _max_pool(circuit: Circuit, module: nn.MaxPool2d, value: int) -> int:
    shape = circuit.shapes[value]
    if module.return_indices:
        raise NoRuleError("local bounds: expected a pooling that returns no indices")
    options = module.kernel_size, module.stride, module.padding, module.dilation
    kernel, stride, padding, dilation = (tuple(pair(option)) for option in options)
    out, border = output_shape(module, shape), list[int]()
    for n, size, k, s, p, d in zip(out[-2:], shape[-2:], kernel, stride, padding, dilation, strict=True):
        border = [p, (n - 1) * s + (k - 1) * d + 1 - size - p, *border]  # below 0: no window has these entries
    grid = F.pad(numbered(shape).reshape(-1, 1, *shape[-2:]), border)  # 0 beyond the image
    windows = F.unfold(grid, kernel, dilation, stride=stride)  # (C, taps, places)
    # Taps beyond the border repeat one that the window has.
    index = torch.where(windows > 0, windows, windows.amax(1, keepdim=True)).long()
    taps = [circuit.select(value, tap.reshape(out)) for tap in index.unbind(1)]
    while len(taps) > 1:
        pairs = [circuit.maximum(a, b) for a, b in zip(taps[::2], taps[1::2], strict=False)]
        taps = pairs + taps[len(taps) - len(taps) % 2 :]  # an odd one waits for the next round
    return taps[0]
