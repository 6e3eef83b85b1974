r"""Products of two values, each limited: :math:`y = \mathrm{clip}(u, a)\,\mathrm{clip}(v, b)`.

A product of two values that depend on the input has no Lipschitz constant on all of space, but on a bounded set of
inputs it has one: where :math:`|u| \le a` and :math:`|v| \le b`, clipping changes nothing, and

.. math:: \|\Delta (u v)\| \le b \|\Delta u\| + a \|\Delta v\|

everywhere. So limits need no proof: a network with them has its constant on all of space, and is the function that it
was made from wherever its values stay within them (`limited` finds such limits for a box of inputs).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.configuration import COUNT
from lipkit.modules.elementary import REMEDY, Elementary
from lipkit.modules.forms import Form, added
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Join, Joining, Maximum, check_alike
from lipkit.modules.machine import local_error
from lipkit.modules.network import Network
from lipkit.modules.normalization import UnitNorm
from lipkit.modules.plain import Plain, Stored, add_plain, row_of
from lipkit.modules.ranges import Range, around
from lipkit.modules.registry import LATER, lipschitz
from lipkit.proof.roundoff import FLOAT64, Line, gamma, grow, root, size, to_double


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

    def limited(self, limits: Tensor) -> Self:
        """A copy of the product with these limits."""
        made = copy.deepcopy(self)
        made.limits = limits.detach().clone()
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


_empty = Stored({}, make=lambda: Product(torch.zeros(2)))
_sizes = Stored(
    dict.fromkeys(("rows", "inner", "cols"), COUNT), make=lambda **sizes: MatrixProduct(**sizes, limits=torch.zeros(2))
)
add_plain(Plain(Product, stored=_empty, join=_joining(lambda product: 3)))
add_plain(Plain(MatrixProduct, stored=_sizes, join=_joining(lambda product: product.inner + 3)))

# Relative allowance for the rounding of limits, none of which is subnormal.
_SLACK, _LEAST = 1e-6, 2.0**-100


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
    double = copy.deepcopy(network).cpu().double()
    with torch.no_grad():
        for plain, twin in zip(network, double, strict=True):
            found, module = _through(plain, twin, found)
            modules.append(module)
    result = Network(modules, network.input_shape, network.multipliers())
    result.input_range = box
    return result


def _through(plain: nn.Module, double: nn.Module, given: Range) -> tuple[Range, nn.Module]:
    """The range of a module's output for inputs in the range ``given``, and the module with limits on its products.

    ``double`` is the float64 copy of the module ``plain``; it computes the range.
    """
    if isinstance(plain, UnitNorm):
        return _rounded(double, [given]), plain.within(given)
    if isinstance(plain, Elementary):
        made = plain.within(given)
        return _rounded(copy.deepcopy(made).cpu().double(), [given]), made
    if type(plain) is not Graph:
        return _rounded(double, [given]), plain
    assert isinstance(double, Graph)
    values, nodes = [given], list[nn.Module]()
    for node, twin, read in zip(plain.nodes, double.nodes, plain.sources, strict=True):
        parts = [values[value] for value in read]
        if isinstance(node, Limited):
            slack = max(_SLACK, torch.finfo(node.limits.dtype).eps)
            largest = torch.tensor([max(part.largest, _LEAST) for part in parts], dtype=torch.float64) * (1 + slack)
            if not bool(largest.isfinite().all()):
                name = node.where or type(node).__name__
                raise NoRuleError(f"{name}: expected factors that are bounded on the box, got {largest.tolist()}")
            node = node.limited(torch.minimum(largest, node.limits.double()).to(node.limits))  # smaller ones stay
            assert isinstance(twin, Limited)
            twin = twin.limited(node.limits.double())  # as rounded to the network's format
        found, node = (_rounded(twin, parts), node) if isinstance(node, Join) else _through(node, twin, parts[0])
        values.append(found)
        nodes.append(node)
    return values[-1], Graph(nodes, plain.sources)


def _rounded(module: nn.Module, parts: list[Range]) -> Range:
    """The range of a module's output, widened by its rounding errors and those of the range's centre and radius."""
    if isinstance(module, Join):
        found, joining = _joined(module, parts), row_of(type(module)).join
        most = [Line(size(torch.maximum(part.low.abs(), part.high.abs())), 0.0) for part in parts]
        own = joining.error(module, most).times(gamma(joining.operations(module) + 8))
    else:
        found, (x,) = _range_of(module, *parts), parts
        own = local_error(module, tuple(x.low.shape[1:]), FLOAT64)(x.centre).error.below(Line(size(x.radius), 0.0))
    room = 4 * float(own.at) + 2.0**-48 * torch.maximum(found.low.abs(), found.high.abs())
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
        most = [torch.maximum(part.low.abs(), part.high.abs()) for part in parts]
        size = most[0] @ most[1]
        return Range(-size, size)
    raise NoRuleError(f"expected a join whose range is known, got {kind.__qualname__}")


LATER.update(limited=limited, refused=refuse_unlimited)
