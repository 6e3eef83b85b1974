r"""Modules that have a Lipschitz constant only within limits: products of two values, and steep functions.

A product of two values that depend on the input has no Lipschitz constant on all of space, but on a bounded set of
inputs it has one: where :math:`|u| \le a` and :math:`|v| \le b`, clipping changes nothing, and

.. math:: y = \mathrm{clip}(u, a)\,\mathrm{clip}(v, b), \qquad \|\Delta y\| \le b \|\Delta u\| + a \|\Delta v\|

everywhere. The exponential, logarithm, root and reciprocal have a constant on a bounded set that keeps away from their
poles: :math:`y = f(\mathrm{clip}(x, l, h))`. The modulus of each slope is monotone, so its maximum is at an end.

So limits need no proof: a network with them has its constant on all of space, and is the function that it was made from
wherever its values stay within them (`limited` finds such limits for a box of inputs).
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError, check_choice
from lipkit.modules.activations import ACTIVATIONS, LIBRARY, pointwise
from lipkit.modules.forms import Form, added
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Join, Joining, Maximum, check_alike
from lipkit.modules.machine import local_error
from lipkit.modules.network import Network
from lipkit.modules.normalization import UnitNorm
from lipkit.modules.plain import COUNT, Plain, Range, RoundingError, Shape, Shown, add_plain, around, either, row_of
from lipkit.modules.registry import LATER, lipschitz
from lipkit.proof.roundoff import FLOAT64, Arithmetic, Line, gamma, grow, root, size, to_double

REMEDY = "give the range of the inputs, such as box=(0, 1), which limits its operands to what they can reach"


# Relative allowance for the rounding of limits, none of which is subnormal.
_SLACK, _LEAST = 1e-6, 2.0**-100


class Limited(Join):
    """The base of products: two factors with ``limits`` (2,) for their moduli, infinite until they are known."""

    limits: Tensor
    where = ""  # how messages name the call in the network
    needs = (
        "expected one factor to be constant, got two that depend on the input: such a product has no Lipschitz "
        "constant on all of space"
    )

    def __init__(self, limits: Tensor | None = None) -> None:
        super().__init__()
        limits = torch.full((2,), math.inf, dtype=torch.float32) if limits is None else limits
        fits = limits.shape == (2,) and limits.is_floating_point()
        if not fits or not (limits.is_meta or bool((limits >= 0).all())):
            raise OptionError(f"{type(self).__name__}: expected two limits >= 0 in floating point, got {limits}")
        self.register_buffer("limits", limits.detach().clone())

    def clipped(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The two factors, each clipped to its limit: entries in [-a, a] and [-b, b]."""
        a, b = self.limits.to(values[0].dtype)
        return torch.maximum(torch.minimum(values[0], a), -a), torch.maximum(torch.minimum(values[1], b), -b)

    def norms(self) -> tuple[float, float]:
        """Bounds of the norm of each factor, seen as a linear map of the other factor."""
        a, b = to_double(self.limits).abs().tolist()  # a file may hold negative ones: then the factor is constant
        return a, b

    def within(self, *factors: Range) -> Self:
        """A copy whose limits are as narrow as possible without clipping any factor in these ranges."""
        made, slack = copy.deepcopy(self), max(_SLACK, torch.finfo(self.limits.dtype).eps)
        ends = [max(float(factor.farthest.max()), _LEAST) for factor in factors]
        largest = torch.tensor(ends, dtype=torch.float64) * (1 + slack)
        if not bool(largest.to(self.limits).isfinite().all()):
            name = self.where or type(self).__name__
            got = "ranges without end, or beyond the format of the network: they grow from layer to layer"
            raise NoRuleError(f"{name}: expected factors that are bounded on the box, got {got}")
        made.limits = torch.minimum(largest, self.limits.double()).to(self.limits)  # smaller ones stay
        return made


class Product(Limited):
    """Two values of one shape, limited and multiplied entry by entry.

    >>> Product(torch.tensor([1.0, 2.0]))(torch.tensor([[3.0]]), torch.tensor([[5.0]])).item()
    2.0
    """

    def forward(self, *values: Tensor) -> Tensor:
        check_alike(self, values, 2)
        u, v = self.clipped(values)
        return u * v


class MatrixProduct(Limited):
    r"""Matrices ``(..., rows, inner)`` times matrices ``(..., inner, cols)``, their entries limited.

    A matrix with entries of at most a has a norm of at most :math:`a \sqrt{rows \cdot inner}`.

    Raises:
        OptionError: sizes below 1. ShapeError: values of other sizes.

    >>> one = torch.ones(1, 2, 2)
    >>> MatrixProduct(2, 2, 2, torch.tensor([1.0, 1.0]))(one, 3 * one).tolist()
    [[[2.0, 2.0], [2.0, 2.0]]]
    """

    def __init__(self, rows: int, inner: int, cols: int, limits: Tensor | None = None) -> None:
        super().__init__(limits)
        if min(rows, inner, cols) < 1:
            raise OptionError(f"MatrixProduct: expected sizes of at least 1, got {rows}, {inner}, {cols}")
        self.rows, self.inner, self.cols = rows, inner, cols

    def forward(self, *values: Tensor) -> Tensor:
        shapes = [tuple(value.shape) for value in values]
        ends = [(self.rows, self.inner), (self.inner, self.cols)]
        if [s[-2:] for s in shapes] != ends or shapes[0][:-2] != shapes[1][:-2] or len(shapes[0]) < 3:
            raise ShapeError(f"MatrixProduct: expected matrices of sizes {ends} for each sample, got {shapes}")
        u, v = self.clipped(values)
        return u @ v

    def norms(self) -> tuple[float, float]:
        a, b = super().norms()
        return grow(a * root(self.rows * self.inner)), grow(b * root(self.inner * self.cols))


# The least distance of limits from a pole: no slope and no square of a limit then leaves the range of a proof.
_NEAREST = 2.0**-100


class Curve(NamedTuple):
    """A monotone function that is steep without bound."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[float], float]  # the modulus of its derivative
    holds: Callable[[float, float], bool]  # True if both are finite from the lower to the upper end of an interval
    where: str  # the same in words, for messages


CURVES = {
    "exp": Curve(torch.exp, math.exp, lambda low, high: high <= 700, "at most 700"),
    "log": Curve(torch.log, lambda x: 1 / x, lambda low, high: low >= _NEAREST, "above 0"),
    "sqrt": Curve(torch.sqrt, lambda x: 0.5 / math.sqrt(x), lambda low, high: low >= _NEAREST, "above 0"),
    "reciprocal": Curve(
        torch.reciprocal, lambda x: 1 / x / x, lambda low, high: low >= _NEAREST or high <= -_NEAREST, "of one sign"
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
        down, up = (max(_SLACK, info.eps) * max(abs(end), info.tiny * (end != 0)) for end in (low, high))
        found = self.limits.new_tensor([low - down, high + up], dtype=torch.float64)
        old = self.limits.double()  # narrower ones stay
        made.limits = torch.stack((torch.maximum(old[0], found[0]), torch.minimum(old[1], found[1]))).to(self.limits)
        made.ends()
        return made


def _steepest(module: Elementary, input_shape: Shape | None) -> float:
    slopes = map(CURVES[module.function].slope, module.ends())
    return grow(grow(max(*slopes, 2.0**-1000)))  # three roundings in float64, and underflow


def _curve_error(module: Elementary, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    (low, high), curve = module.ends(), CURVES[module.function]
    ends = torch.tensor([low, high], dtype=torch.float64)
    largest = grow(float(curve.function(ends).abs().amax()) * (1 + 2.0**-40))
    moved = arithmetic.stored * max(abs(end) * curve.slope(end) for end in (low, high))  # by limits that are rounded
    # A limit that the machine takes for 0 is no limit.
    lost = math.inf if module.function != "exp" and float(ends.abs().amin()) < arithmetic.tiny else 0.0
    most = max(largest, abs(low), abs(high))
    return pointwise(0.0, LIBRARY * largest + moved, lost, input_shape, arithmetic, most)


def _curve_range(module: Elementary, x: Range) -> Range:
    one, other = module(x.low), module(x.high)
    return Range(torch.minimum(one, other), torch.maximum(one, other))


_function = {"function": either(None, *CURVES)}
# A copy as it is: its limits may be unknown yet.
add_plain(Plain(Elementary, _steepest, _curve_error, _function, _curve_range, export=lambda m, _: copy.deepcopy(m)))

ToLimit = Limited | Elementary
"""Modules that have a Lipschitz constant only within limits."""


def refuse_unlimited(network: nn.Module) -> None:
    """Raise ``NoRuleError`` if the network holds a product, or a function without bounded slope, without limits."""
    for module in network.modules():
        if isinstance(module, ToLimit) and not bool(module.limits.isfinite().all()):
            raise NoRuleError(f"{module.where or type(module).__name__}: {module.needs}; {REMEDY}")


def _form(join: Limited, forms: Sequence[Form]) -> Form:
    refuse_unlimited(join)
    a, b = (torch.tensor(norm, dtype=torch.float64) for norm in join.norms())
    return added([forms[0].scaled(b), forms[1].scaled(a)])


def _joining(operations: Callable[[Any], int]) -> Joining:
    def lines(join: Limited, given: Sequence[Line]) -> Line:
        a, b = join.norms()
        return given[0].times(b).plus(given[1].times(a))  # one factor moves while the other is at most its limit

    return Joining(_form, lines, operations, number=lambda product: float(product.limits.abs().max()))


_sizes = {"rows": COUNT, "inner": COUNT, "cols": COUNT}
add_plain(Plain(Product, stored={}, join=_joining(lambda product: 3)))
add_plain(Plain(MatrixProduct, stored=_sizes, join=_joining(lambda product: product.inner + 3)))


def limited(network: Network, box: tuple[float, float]) -> Network:
    """The network with limits on its products and `Elementary` functions that change nothing for inputs in the box.

    >>> from lipkit.lowering import export
    >>> from lipkit.modules import Graph
    >>> square = Network([Graph([Product()], [[0, 0]])], (2,))
    >>> found = limited(square, (-1.0, 3.0))
    >>> round(float(found[0].nodes[0].limits.max()), 3), round(float(lipschitz(found)), 3)
    (3.0, 6.0)
    """
    ones = torch.ones(1, *network.input_shape, dtype=torch.float64)
    found = Range(box[0] * ones, box[1] * ones)
    modules: list[nn.Module] = []
    with torch.no_grad():
        for module in network:
            found, made = _through(module, [found])
            modules.append(made)
    result = Network(modules, network.input_shape, network.multipliers())
    result.input_range = box
    return result


def _through(module: nn.Module, given: list[Range]) -> tuple[Range, nn.Module]:
    """The range of a module's output for values in the ranges ``given``, and the module with limits on its products."""
    if type(module) is Graph:
        values, nodes = [*given], list[nn.Module]()
        for node, read in zip(module.nodes, module.sources, strict=True):
            found, made = _through(node, [values[value] for value in read])
            values.append(found)
            nodes.append(made)
        return values[-1], Graph(nodes, module.sources)
    if isinstance(module, ToLimit):
        module = module.within(*given)
    found = _rounded(copy.deepcopy(module).cpu().double(), given)  # of the limits as rounded to the network's format
    return found, module.within(*given) if isinstance(module, UnitNorm) else module


def _rounded(module: nn.Module, parts: list[Range]) -> Range:
    """The range of a module's output, widened by its rounding errors and those of the range's centre and radius."""
    if isinstance(module, Join):
        found, joining = _joined(module, parts), row_of(type(module)).join
        most = [Line(size(part.farthest), 0.0) for part in parts]
        own = joining.error(module, most).times(gamma(joining.operations(module) + 8))
    else:
        found, (x,) = _range_of(module, *parts), parts
        own = local_error(module, tuple(x.low.shape[1:]), FLOAT64)(x.centre).error.below(Line(size(x.radius), 0.0))
    room = 4 * float(own.at) + 2.0**-48 * found.farthest
    if type(module) in ACTIVATIONS:  # also far from 0, where errors that grow with the input say little
        room = room.clamp_max(2.0**-22 * ACTIVATIONS[type(module)].largest)
    return Range(found.low - room, found.high + room)


def _range_of(module: nn.Module, x: Range) -> Range:
    if (rule := row_of(type(module)).range) is not None:
        return rule(module, x)
    out: Tensor = module(x.centre)
    distance = float(lipschitz(module, tuple(x.low.shape[1:]))) * float(x.radius.norm())
    return around(out, torch.full_like(out, distance, dtype=torch.float64))


def _joined(join: nn.Module, parts: list[Range]) -> Range:
    kind = type(join)
    if kind in (Concatenate, Maximum):
        return Range(join(*(part.low for part in parts)), join(*(part.high for part in parts)))
    if kind is Add:
        return around(join(*(part.centre for part in parts)), torch.stack([part.radius for part in parts]).sum(0))
    if isinstance(join, Blend):
        s = join.share
        radius = s.abs() * parts[0].radius + (1 - s).abs() * parts[1].radius
        return around(join(*(part.centre for part in parts)), radius)
    u, v = parts
    if kind is Product:
        corners = torch.stack([a * b for a in u for b in v])  # a product on a box is extreme at a corner
        low = corners.amin(0)
        return Range(low.clamp_min(0.0) if u is v else low, corners.amax(0))  # a square
    if kind is MatrixProduct:
        most = u.farthest @ v.farthest
        return Range(-most, most)
    raise NoRuleError(f"expected a join whose range is known, got {kind.__qualname__}")


LATER.update(limited=limited, refused=refuse_unlimited)
