r"""Products of two values, each limited: :math:`y = \mathrm{clip}(u, a)\,\mathrm{clip}(v, b)`.

A product of two values that depend on the input has no Lipschitz constant on all of space, but on a bounded set of
inputs it has one: where :math:`|u| \le a` and :math:`|v| \le b`, clipping changes nothing, and

.. math:: \|\Delta (u v)\| \le b \|\Delta u\| + a \|\Delta v\|

everywhere. So limits need no proof: a network with them has its constant on all of space, and is the function that it
was made from wherever its values stay within them (`lipkit.modules.ranges` finds such limits for a box of inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.configuration import COUNT, stored
from lipkit.modules.forms import Form, added
from lipkit.modules.graph import Join, Joining, add_join, check_alike
from lipkit.modules.registry import _LIMITS
from lipkit.proof.arithmetic import Line, grow_number
from lipkit.proof.roundoff import root, to_double


class Limited(Join):
    """The base of products: two limits, infinite until they are known.

    Args:
        limits: of the two factors, ``(2,)``, non-negative.

    Raises:
        OptionError: other limits.
    """

    limits: Tensor
    where = ""  # that messages name

    def __init__(self, limits: Tensor | None = None) -> None:
        super().__init__()
        limits = torch.full((2,), math.inf) if limits is None else limits
        if limits.shape != (2,) or not (limits.is_meta or bool((limits >= 0).all())):
            raise OptionError(f"{type(self).__name__}: expected two limits >= 0, got {limits.tolist()}")
        self.register_buffer("limits", limits.detach().clone())

    def clipped(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The two factors within their limits."""
        a, b = self.limits.to(values[0].dtype)
        return torch.maximum(torch.minimum(values[0], a), -a), torch.maximum(torch.minimum(values[1], b), -b)

    def norms(self) -> tuple[float, float]:
        """Bounds of the norms of the first and of the second factor, as multipliers of the other."""
        raise NotImplementedError

    def limited(self, limits: Tensor) -> Limited:
        """A copy of the product with these limits."""
        made = self.made(limits)
        made.where = self.where
        return made

    def made(self, limits: Tensor) -> Limited:
        """A product of this type and these limits."""
        raise NotImplementedError


class Product(Limited):
    """Two values of one shape, limited and multiplied entry by entry.

    >>> Product(torch.tensor([1.0, 2.0]))(torch.tensor([[3.0]]), torch.tensor([[5.0]])).item()
    2.0
    """

    def forward(self, *values: Tensor) -> Tensor:
        check_alike(self, values, 2)
        u, v = self.clipped(values)
        return u * v

    def norms(self) -> tuple[float, float]:
        # A file may hold negative ones: then the factor is constant, of that modulus.
        a, b = to_double(self.limits).abs().tolist()
        return a, b

    def made(self, limits: Tensor) -> Product:
        return Product(limits)


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
        a, b = to_double(self.limits).abs().tolist()
        norms = a * root(self.rows * self.inner), b * root(self.inner * self.cols)
        return grow_number(norms[0]), grow_number(norms[1])

    def made(self, limits: Tensor) -> MatrixProduct:
        return MatrixProduct(self.rows, self.inner, self.cols, limits)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.inner}, {self.cols}"


def refuse_unlimited(network: nn.Module) -> None:
    """Raise ``NoRuleError`` if the network holds a product without limits."""
    for module in network.modules():
        if isinstance(module, Limited) and not bool(module.limits.isfinite().all()):
            raise NoRuleError(
                f"{module.where or type(module).__name__}: expected one factor to be constant, got two that depend on "
                "the input: such a product has no Lipschitz constant on all of space; "
                "lipkit.export(model, input_shape, box=(0, 1)) limits it to what inputs in a box can reach"
            )


_LIMITS["refused"] = refuse_unlimited


def _form(join: Limited, forms: Sequence[Form]) -> Form:
    refuse_unlimited(join)
    a, b = (torch.tensor(norm, dtype=torch.float64) for norm in join.norms())
    return added([forms[0].scaled(b), forms[1].scaled(a)])


def _lines(join: Limited, lines: Sequence[Line]) -> Line:
    a, b = join.norms()
    return lines[0].times(b).plus(lines[1].times(a))


def _joining(operations: Callable[[Any], int]) -> Joining:
    return Joining(
        _form,
        _lines,
        operations,
        lambda product: product.limited(product.limits),
        lambda product: float(product.limits.abs().max()),
    )


add_join(Product, _joining(lambda product: 3))
add_join(MatrixProduct, _joining(lambda product: product.inner + 3))

stored(Product, make=lambda: Product(torch.zeros(2)))
stored(
    MatrixProduct,
    make=lambda rows, inner, cols: MatrixProduct(rows, inner, cols, torch.zeros(2)),
    rows=COUNT,
    inner=COUNT,
    cols=COUNT,
)
