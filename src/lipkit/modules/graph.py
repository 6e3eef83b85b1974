r"""Networks that branch: modules that read earlier values, and joins that bring values together.

**Constant.** Every value v has a bound :math:`\|\Delta v\| \le \sum_i g_i \|\Delta s_i\|` (`lipkit.modules.forms`):
products along chains, sums at `Add`, roots of sums of squares at `Concatenate` and `Maximum`, and the maximum over
branches that read disjoint pieces.

**Rounding.** For inputs within s of the sample, the machine's value is within E(s) of the exact one, and the exact one
moves by at most D(s) = G s, where G is the proved gain of that value. Errors of the terms of a sum add up; those of the
parts of a concatenation count by the root of the sum of their squares.
"""

import collections
import copy
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.forms import Form, added, blended, cut, source, stacked
from lipkit.modules.guarding import guard, type_name
from lipkit.modules.machine import ErrorBound, ProvedModule, advance, nothing, prove_module, reach, start
from lipkit.modules.normalization import fold_norm
from lipkit.modules.plain import (
    INTEGER,
    ROWS,
    Plain,
    RoundingBound,
    RoundingError,
    Shape,
    Shown,
    Stored,
    add_plain,
    row_of,
    submodules,
)
from lipkit.modules.registry import export_plain, lipschitz, output_shape
from lipkit.modules.views import Piece, Reshape
from lipkit.proof.roundoff import FLOAT64, Arithmetic, Line, flat, grow


class Join(Shown):
    """A module of a `Graph` that reads several values of one sample."""


class Add(Join):
    r"""``y = +-x_1 +- x_2 ...``: values of one shape with their signs, 1 or -1 each.

    Raises:
        OptionError: other signs. ShapeError: values of different shapes (one would be repeated).

    >>> Add(1, -1)(torch.ones(1, 2), torch.ones(1, 2)).tolist()
    [[0.0, 0.0]]
    """

    def __init__(self, *signs: int) -> None:
        super().__init__()
        if not signs or any(sign not in (1, -1) for sign in signs):
            raise OptionError(f"Add: expected one sign, 1 or -1, for each value, got {signs}")
        self.signs = tuple(int(sign) for sign in signs)

    def forward(self, *values: Tensor) -> Tensor:
        check_alike(self, values, len(self.signs))
        total = values[0] if self.signs[0] > 0 else -values[0]  # exact: a sign is no rounding
        for value, sign in zip(values[1:], self.signs[1:], strict=True):
            total = total + value if sign > 0 else total - value
        return total


class Concatenate(Join):
    """Values concatenated along dimension ``dim`` >= 1; 0 is the batch.

    Raises:
        OptionError: ``dim`` below 1.

    >>> Concatenate(1)(torch.zeros(1, 1), torch.ones(1, 2)).tolist()
    [[0.0, 1.0, 1.0]]
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        if dim < 1:
            raise OptionError(f"Concatenate: expected a dimension after the batch, at least 1, got {dim}")
        self.dim = dim

    def forward(self, *values: Tensor) -> Tensor:
        return torch.cat(values, self.dim)


class Maximum(Join):
    """The largest of several values of one shape, entry by entry.

    >>> Maximum()(torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]])).tolist()
    [[0.0, 1.0]]
    """

    def forward(self, *values: Tensor) -> Tensor:
        check_alike(self, values, len(values))
        return functools.reduce(torch.maximum, values)


class Blend(Join):
    """``y = s x_1 + (1 - s) x_2`` with a constant share s; for s in [0, 1] a residual connection stays 1-Lipschitz.

    Raises:
        ShapeError: ``share`` is not 0-d, or values of different shapes.

    >>> Blend(torch.tensor(0.25))(torch.ones(1, 2), torch.zeros(1, 2)).tolist()
    [[0.25, 0.25]]
    """

    share: Tensor

    def __init__(self, share: Tensor) -> None:
        super().__init__()
        if share.ndim:
            raise ShapeError(f"Blend: expected a 0-d share, got shape {tuple(share.shape)}")
        self.register_buffer("share", share.detach().clone())

    def forward(self, *values: Tensor) -> Tensor:
        check_alike(self, values, 2)
        return self.share * values[0] + (1 - self.share) * values[1]


def check_alike(join: Join, values: Sequence[Tensor], count: int) -> None:
    if len(values) != count or any(value.shape != values[0].shape for value in values[1:]):
        shapes = [tuple(value.shape) for value in values]
        raise ShapeError(f"{type(join).__name__}: expected {count} values of one shape, got {shapes}")


class Joining(NamedTuple):
    """The rules of one type of join; each rule takes the join as its first argument."""

    form: Callable[[Any, Sequence[Form]], Form]  # Lipschitz bound of the result, from the bounds of the values
    error: Callable[[Any, Sequence[Line]], Line]  # bounds the move of the exact result, from the moves of the values
    operations: Callable[[Any], int]  # number of chained roundings in one entry of the result
    plain: Callable[[Any], Join] = copy.deepcopy  # its export: the join with constant numbers
    number: Callable[[Any], float] = lambda join: 0.0  # largest modulus of its stored numbers, which the machine rounds


def beside(lines: Sequence[Line]) -> Line:
    """Bound of a concatenation of values: ``|| a_i + b_i s || <= || a || + || b || s``."""
    at = torch.linalg.vector_norm(torch.stack([line.at for line in lines]), dim=0)  # parts are orthogonal
    rounding = 1 + (len(lines) + 8) * 2.0**-52
    return Line(grow(at * rounding), grow(math.hypot(*(line.slope for line in lines)) * rounding))


def blend_of(share: Callable[[Any], Tensor]) -> Joining:
    """The `Joining` of a join that computes ``share x_1 + (1 - share) x_2``."""

    def lines(join: Join, given: Sequence[Line]) -> Line:
        s = float(share(join).detach())
        return given[0].times(abs(s)).plus(given[1].times(abs(1 - s) * (1 + 2.0**-50)))

    return Joining(
        lambda join, forms: blended(share(join), forms),
        lines,
        lambda join: 3,
        lambda join: Blend(share(join).detach()),
        lambda join: abs(float(share(join).detach())),
    )


class Graph(nn.Module):
    """Modules in order of computation: value 0 is the input, value i + 1 what module i returns, the last the output.

    Args:
        modules: each has one input or is a `Join`.
        sources: for each module the numbers of the values that it reads.

    Raises:
        OptionError: a value is read before it is made, or never; a module that is not a `Join` reads several.

    >>> block = Graph([nn.ReLU(), Add(1, -1)], [[0], [0, 1]])
    >>> block(torch.tensor([[-2.0, 2.0]])).tolist()
    [[-2.0, 0.0]]
    """

    def __init__(self, modules: Iterable[nn.Module], sources: Iterable[Sequence[int]]) -> None:
        super().__init__()
        self.nodes = nn.ModuleList(modules)
        self.sources = tuple(tuple(operator.index(i) for i in read) for read in sources)
        if not 0 < len(self.nodes) == len(self.sources):
            got = f"{len(self.nodes)} and {len(self.sources)}"
            raise OptionError(f"Graph: expected one or more modules with their sources, got {got}")
        for i, (node, read) in enumerate(zip(self.nodes, self.sources, strict=True)):
            if not read or not all(0 <= value <= i for value in read):
                raise OptionError(f"Graph: expected module {i} to read values 0 to {i}, got {read}")
            if len(read) > 1 and not isinstance(node, Join):
                raise OptionError(f"Graph: expected one source for the {type(node).__name__} {i}, got {read}")
        unread = sorted({*range(len(self.nodes))} - {value for read in self.sources for value in read})
        if unread:
            raise OptionError(f"Graph: expected every value but the last to be read, got values {unread} that are not")

    def forward(self, x: Tensor) -> Tensor:
        last = {value: i for i, read in enumerate(self.sources) for value in read}  # after that its memory is free
        values = {0: x}
        for i, (node, read) in enumerate(zip(self.nodes, self.sources, strict=True)):
            values[i + 1] = node(*(values[value] for value in read))
            for value in set(read):
                if last[value] == i:
                    del values[value]
        return values[len(self.nodes)]

    def extra_repr(self) -> str:
        return "sources=[" + ", ".join(f"[{', '.join(map(str, read))}]" for read in self.sources) + "]"


def refuse_inplace(module: nn.Module) -> None:
    """Raise ``NoRuleError`` if a branch can overwrite the input that the other branch reads."""
    for name, child in module.named_modules():
        if getattr(child, "inplace", False):
            raise NoRuleError(
                f"{type(module).__name__}: expected branches that leave their input as it is, got the in-place "
                f"{type(child).__name__} at {name!r}: set its inplace=False"
            )


def value_shapes(graph: Graph, input_shape: Shape) -> list[Shape]:
    """The shape of every value of one sample: the input, then the output of each module."""
    shapes = [input_shape]
    for i, (node, read) in enumerate(zip(graph.nodes, graph.sources, strict=True)):
        try:
            shapes.append(output_shape(node, *(shapes[value] for value in read)))
        except ShapeError as error:
            raise ShapeError(f"module {i}: {error}") from None
        if not shapes[-1]:
            raise ShapeError(f"module {i}, {type_name(type(node))}: expected outputs with dimensions besides the batch")
    return shapes


def _joining(node: nn.Module) -> Joining:
    guard(node)
    found: Joining | None = row_of(type(node)).join
    if found is None:
        known = ", ".join(kind.__name__ for kind, row in ROWS.items() if row.join is not None)
        got = f"got {type_name(type(node))}: nothing is assumed to be 1-Lipschitz"
        raise NoRuleError(f"expected joins {known} exactly, {got}")
    return found


def value_forms(graph: Graph, constants: Sequence[Any]) -> list[Form]:
    """The bound of every value, from the constants of the modules (None for joins)."""
    nodes, sources = list(graph.nodes), graph.sources
    return forms_of(nodes, sources, lambda i, forms: forms[sources[i][0]].scaled(constants[i].cpu()))


def forms_of(
    nodes: Sequence[nn.Module], sources: Sequence[Sequence[int]], behind: Callable[[int, Sequence[Form]], Form]
) -> list[Form]:
    """The bound of every value of a wiring.

    For a module that is not a join, ``behind`` maps its number and the bounds so far to the bound of its output.
    """
    pieces = _disjoint(nodes, sources)
    forms, cuts = [source()], dict[tuple[int, int], dict[range, Form]]()
    for i, (node, read) in enumerate(zip(nodes, sources, strict=True)):
        if isinstance(node, Join):
            forms.append(_joining(node).form(node, [forms[value] for value in read]))
        elif type(node) is Piece and (key := (read[0], node.dim)) in pieces:
            if key not in cuts:
                cuts[key] = dict(zip(pieces[key], cut(forms[read[0]], len(pieces[key])), strict=True))
            forms.append(cuts[key][node.entries])
        else:
            forms.append(behind(i, forms))
    return forms


def _disjoint(nodes: Sequence[nn.Module], sources: Sequence[Sequence[int]]) -> dict[tuple[int, int], list[range]]:
    """The pieces of each (value, dimension) that is cut; cuts with overlapping pieces are left out."""
    found: dict[tuple[int, int], list[range]] = {}
    for node, read in zip(nodes, sources, strict=True):
        if type(node) is Piece:
            known = found.setdefault((read[0], node.dim), [])
            if node.entries not in known:
                known.append(node.entries)
    total = {key: sum(map(len, ranges)) for key, ranges in found.items()}
    return {key: ranges for key, ranges in found.items() if len(set().union(*ranges)) == total[key]}


def graph_constant(module: Graph, input_shape: Shape | None) -> Tensor:
    guard(module.nodes)
    refuse_inplace(module)
    shapes = [None] * (len(module.nodes) + 1) if input_shape is None else value_shapes(module, input_shape)
    return value_forms(module, _constants(module, shapes))[-1].total()


def _constants(graph: Graph, shapes: Sequence[Shape | None]) -> list[Tensor | None]:
    """The constant of every module; None for a join."""
    return [
        None if isinstance(node, Join) else lipschitz(node, shapes[read[0]])
        for node, read in zip(graph.nodes, graph.sources, strict=True)
    ]


class Wiring:
    """A graph that grows: `add` modules, then take the `chain`."""

    def __init__(self) -> None:
        self.modules: list[Any] = []  # or the operations of an integer program
        self.sources: list[tuple[int, ...]] = []

    def add(self, module: Any, *values: int) -> int:
        """Append a module that reads these values; return the number of its output."""
        self.modules.append(module)
        self.sources.append(values)
        return len(self.modules)

    def used(self, output: int) -> list[int]:
        """The values that ``output`` depends on, itself included, the network's input excluded, in ascending order."""
        found = {output}
        for value in range(output, 0, -1):  # a module reads earlier values alone
            found.update(self.sources[value - 1] if value in found else ())
        return sorted(found - {0})

    def chain(self, output: int) -> list[nn.Module]:
        """The modules that compute value ``output`` from the input, as a chain with a `Graph` wherever values branch.

        >>> wiring = Wiring()
        >>> y = wiring.add(nn.ReLU(), wiring.add(nn.Linear(2, 2), 0))
        >>> z = wiring.add(nn.Tanh(), wiring.add(Add(1, 1), 0, y))
        >>> [type(m).__name__ for m in wiring.chain(z)]
        ['Graph', 'Tanh']
        """
        kept = self.used(output)
        last = {value: after for after in kept for value in self.sources[after - 1]}
        chain: list[nn.Module] = []
        begin, part, open_until = 0, list[int](), last.get(0, 0)
        for value in kept:
            part.append(value)
            # Everything passes through a value if nothing before it is read after it.
            if open_until <= value:
                first = self.modules[part[0] - 1]
                alone = len(part) == 1 and self.sources[value - 1] == (begin,) and not isinstance(first, Join)
                chain.append(first if alone else Graph(*self.part(part, begin)))
                begin, part = value, []
            open_until = max(open_until, last.get(value, 0))  # the last reader of any value so far
        return chain

    def part(self, values: Sequence[int], begin: int = 0) -> tuple[list[Any], list[list[int]]]:
        """The modules that compute ``values`` from value ``begin``, and their sources, numbered as in a `Graph`."""
        number = {begin: 0} | {value: i + 1 for i, value in enumerate(values)}  # value 0 is the part's input
        sources = [[number[value] for value in self.sources[after - 1]] for after in values]
        return [self.modules[value - 1] for value in values], sources


def export_graph(module: Graph, input_shape: Shape) -> nn.Module:
    guard(module.nodes)
    refuse_inplace(module)
    shapes, wiring, place = value_shapes(module, input_shape), Wiring(), [0]
    readers = collections.Counter(value for read in module.sources for value in read)
    # Readers of each value of the wiring (1, not listed, inside an exported chain). An identity shares its input's.
    waiting = {0: readers[0]}
    for i, (node, read) in enumerate(zip(module.nodes, module.sources, strict=True)):
        given = [place[value] for value in read]
        if isinstance(node, Join):
            given = [wiring.add(_joining(node).plain(node), *given)]
        else:
            # Look through reshapes as long as nothing else reads their values.
            layer = given[0]
            while layer and waiting.get(layer, 1) == 1 and type(wiring.modules[layer - 1]) is Reshape:
                (layer,) = wiring.sources[layer - 1]
            alone = layer and waiting.get(layer, 1) == 1
            folded = fold_norm(wiring.modules[layer - 1], node, shapes[read[0]]) if alone else None
            if folded is not None:
                wiring.modules[layer - 1] = folded
            else:
                plain = export_plain(node, shapes[read[0]])
                for part in (plain,) if plain.multipliers() else plain:
                    given = [wiring.add(part, *given)]
        place += given
        waiting[place[-1]] = waiting.get(place[-1], 1) - 1 + readers[i + 1]
    return nn.Sequential(*wiring.chain(place[-1]))


def _graph_error(module: Graph, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    refuse_inplace(module)
    shapes = value_shapes(module, input_shape)
    nodes = list(zip(module.nodes, module.sources, strict=True))
    steps = [
        None if constant is None else prove_module(node, shapes[read[0]], arithmetic, constant)
        for (node, read), constant in zip(nodes, _constants(module, shapes), strict=True)
    ]
    constants = [None if step is None else torch.tensor(step.gain, dtype=torch.float64) for step in steps]
    gains = [grow(float(form.total())) for form in value_forms(module, constants)]
    last = {value: i for i, (_, read) in enumerate(nodes) for value in read}

    def measure(x: Tensor) -> RoundingBound:
        bounds, peak = {0: start(x)}, nothing(x)
        with torch.no_grad():
            for i, ((node, read), step) in enumerate(zip(nodes, steps, strict=True)):
                given = [bounds[value] for value in read]
                bound = _advanced(node, step, given, shapes[i + 1], arithmetic)
                bounds[i + 1] = bound._replace(move=Line(nothing(x).at, gains[i + 1]))  # by its gain over all paths
                peak = peak.most(bound.peak)
                for value in set(read):
                    if last[value] == i:
                        del bounds[value]
        return RoundingBound(bounds[len(nodes)].error, peak)

    return measure


def _advanced(
    node: nn.Module, step: ProvedModule | None, given: list[ErrorBound], shape: Shape, arithmetic: Arithmetic
) -> ErrorBound:
    """The bounds after one more module or join, but for ``move``, which the caller sets."""
    if step is not None:
        return advance(given[0], step)
    joining = _joining(node)
    reaches = [reach(bound) for bound in given]
    reached, number, operations = joining.error(node, reaches), joining.number(node), joining.operations(node)
    floor = 4 * (operations + 1) * math.sqrt(math.prod(shape))  # units below the normal range, in every entry

    def own(machine: Arithmetic) -> Line:
        # A number that is rounded is off by u of it, and one below the normal range by all of it.
        lost = machine.stored * machine.unit * number + machine.tiny if number else 0.0
        found = reached.times(machine.gamma(operations))
        for one in reaches:
            found = found.plus(one.times(lost))
        return found.plus(flat(reached.at, floor * machine.tiny))

    before = joining.error(node, [Line(bound.centre_error, 0.0) for bound in given])
    return ErrorBound(
        centre=node(*(bound.centre for bound in given)),
        centre_error=before.plus(Line(own(FLOAT64).at, 0.0)).at,  # at the sample: s = 0
        error=joining.error(node, [bound.error for bound in given]).plus(own(arithmetic)),
        move=given[0].move,
        peak=Line(reached.at * 2 + number, reached.slope * 2),  # partial sums, and the stored number
    )


def _wired(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(read, list) and 0 < len(read) <= 4096 and all(type(i) is int and i >= 0 for i in read)
        for read in value
    )


_sum = Joining(
    lambda _, forms: added(forms), lambda _, lines: functools.reduce(Line.plus, lines), lambda join: len(join.signs) - 1
)
_beside = Joining(lambda _, forms: stacked(forms), lambda _, lines: beside(lines), lambda join: 0)
_blend = Stored({}, make=lambda: Blend(torch.zeros(())))
add_plain(Plain(Add, stored={"signs": INTEGER}, join=_sum))
add_plain(Plain(Concatenate, stored={"dim": INTEGER}, join=_beside))
add_plain(Plain(Maximum, stored={}, join=_beside))
add_plain(Plain(Blend, stored=_blend, join=blend_of(lambda join: join.share)))
_graph_stored = Stored(
    {"modules": submodules, "sources": _wired},
    lambda m: {"modules": tuple(m.nodes), "sources": tuple(list(read) for read in m.sources)},
)
add_plain(Plain(Graph, graph_constant, _graph_error, _graph_stored, export=export_graph))
