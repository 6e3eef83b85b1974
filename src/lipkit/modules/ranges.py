r"""Ranges of all values of a plain network for inputs in a box, and limits of its products from them.

Interval arithmetic, entry by entry: of a linear map, :math:`f(c) \pm |W| r` around the centre c of the box with radii
r; of a monotone function, its values at both ends; of a scalar function of slope s, :math:`f(c) \pm s r`; of anything
else, :math:`f(c) \pm L \|r\|_2`. No certificate rests on a range: limits are part of the network
(`lipkit.modules.products`). Ranges say where it is the function that it was made from.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.modules.activations import ACTIVATIONS, GroupSort, MaxMin, slope_restricted
from lipkit.modules.dense import Affine, Elementwise
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Join, Maximum
from lipkit.modules.network import Network
from lipkit.modules.pooling import Mean
from lipkit.modules.products import Limited, MatrixProduct, Product
from lipkit.modules.rearrange import RESHAPES
from lipkit.modules.registry import _LIMITS, lipschitz
from lipkit.modules.views import VIEWS, Enlarge, EnlargeBilinear, Expand

# Relative allowance for float64 rounding of a range.
_SLACK = 1e-6


class Range(NamedTuple):
    """Lowest and highest value of each entry, float64, ``(1, *shape)``."""

    low: Tensor
    high: Tensor

    @property
    def centre(self) -> Tensor:
        """Halfway."""
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Tensor:
        """Half of the width."""
        return (self.high - self.low) / 2

    @property
    def largest(self) -> float:
        """The largest modulus of an entry."""
        return float(torch.maximum(self.low.abs(), self.high.abs()).max())


def around(centre: Tensor, radius: Tensor) -> Range:
    """``centre +- radius``."""
    return Range(centre - radius, centre + radius)


def limited(network: Network, box: tuple[float, float]) -> Network:
    """The network with limits on its products that no input with entries in the box exceeds.

    Raises:
        NoRuleError: the range of a factor is not finite.

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
    multipliers = network.multipliers()
    result = Network(modules, network.input_shape, multipliers)
    result.input_range = box
    return result


def _through(plain: nn.Module, double: nn.Module, given: Range) -> tuple[Range, nn.Module]:
    """The range behind a module, and the module with limits."""
    if type(plain) is not Graph:
        return _range_of(double, given), plain
    assert isinstance(double, Graph)
    values: list[Range] = [given]
    nodes: list[nn.Module] = []
    for node, twin, read in zip(plain.nodes, double.nodes, plain.sources, strict=True):
        parts = [values[value] for value in read]
        if isinstance(node, Limited):
            node = node.limited(_limits(node, parts).to(node.limits))
            assert isinstance(twin, Limited)
            twin = twin.limited(node.limits.double())
        if isinstance(node, Join):
            values.append(_joined(twin, parts))
            nodes.append(node)
            continue
        found, module = _through(node, twin, parts[0])
        values.append(found)
        nodes.append(module)
    return values[-1], Graph(nodes, plain.sources)


def _limits(product: Limited, parts: Iterable[Range]) -> Tensor:
    largest = torch.tensor([part.largest for part in parts], dtype=torch.float64) * (1 + _SLACK)
    if not bool(largest.isfinite().all()):
        name = product.where or type(product).__name__
        raise NoRuleError(f"{name}: expected factors that are bounded on the box, got {largest.tolist()}")
    return torch.minimum(largest, product.limits.double())


_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_ONE_SIGN = (*VIEWS, Enlarge, EnlargeBilinear, Expand, Mean, nn.AvgPool2d, nn.AdaptiveAvgPool2d, *RESHAPES)
_MONOTONE = (MaxMin, GroupSort, nn.MaxPool2d)


def _range_of(module: Any, x: Range) -> Range:
    kind = type(module)
    if kind in _LINEAR:
        positive = copy.deepcopy(module)
        positive.weight = nn.Parameter(module.weight.abs(), requires_grad=False)
        positive.bias = None
        return around(module(x.centre), positive(x.radius))
    if kind in (Affine, Elementwise):
        return around(module(x.centre), kind(module.scale.abs(), torch.zeros_like(module.shift))(x.radius))
    if kind in _ONE_SIGN:
        return around(module(x.centre), module(x.radius).abs())  # a divisor may be negative
    if kind in _MONOTONE or slope_restricted(module):
        return Range(module(x.low), module(x.high))
    if kind in ACTIVATIONS:
        return around(module(x.centre), float(lipschitz(module)) * x.radius)
    if kind is nn.Softmax:
        return Range(torch.zeros_like(x.low), torch.ones_like(x.high))
    if kind is nn.LayerNorm:
        # |x_i - mean| <= sqrt(n - 1) times the standard deviation.
        size = math.sqrt(max(math.prod(module.normalized_shape) - 1, 0)) * torch.ones_like(x.low)
        weight = size if module.weight is None else size * module.weight.abs()
        centre = torch.zeros_like(x.low) if module.bias is None else torch.zeros_like(x.low) + module.bias
        return around(centre, weight)
    out = module(x.centre)
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
        corners = torch.stack([a * b for a in u for b in v])
        return Range(corners.amin(0), corners.amax(0))
    if kind is MatrixProduct:
        most = [torch.maximum(part.low.abs(), part.high.abs()) for part in parts]
        size = most[0] @ most[1]
        return Range(-size, size)
    raise NoRuleError(f"expected a join whose range is known, got {kind.__qualname__}")


_LIMITS["limited"] = limited
