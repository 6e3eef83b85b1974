"""Linear modules, scalar activations and graphs of them: one walk that makes matrices, and all that reads them."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.dense import Affine
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, value_shapes
from lipkit.modules.network import Network
from lipkit.modules.normalization import LayerCenter
from lipkit.modules.plain import Shape
from lipkit.modules.pooling import EnlargeBilinear, Mean, window_terms
from lipkit.modules.registry import output_shape
from lipkit.modules.views import Expand, Pad, Permute, Piece, Reshape, Roll, Shift2d
from lipkit.proof.roundoff import gamma, known, to_double, up

LARGEST = 2**22
"""Most entries of a matrix."""

MOST_ROWS = 3000
"""Most inputs, units and outputs in one LMI."""

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)

LAYERS = (*CONVOLUTIONS, Graph)
"""Modules that begin a run, besides dense layers."""


class Action(NamedTuple):
    """A linear module or join, without its shift: ``of`` its values, ``moduli`` the same with moduli of its numbers.

    ``terms`` is the most numbers in one sum; 0 if numbers are only copied.
    """

    of: Callable[..., Tensor]
    moduli: Callable[..., Tensor]
    terms: int = 0


def numbers(stored: Tensor) -> Tensor:
    """Stored numbers in float64, on the CPU."""
    return to_double(stored.detach()).cpu()


def _linear(node: nn.Linear, shape: Shape) -> Action:
    weight = numbers(node.weight)
    return Action(lambda v: F.linear(v, weight), lambda v: F.linear(v, weight.abs()), node.in_features)


def _affine(node: Affine, shape: Shape) -> Action:
    scale = numbers(node.scale)
    scale = scale.view(*scale.shape, *[1] * (len(shape) - scale.ndim))
    return Action(lambda v: scale * v, lambda v: scale.abs() * v, 1)


def _blend(node: Blend, shape: Shape) -> Action:
    share = numbers(node.share)
    rest = 1 - share
    return Action(lambda a, b: share * a + rest * b, lambda a, b: share.abs() * a + rest.abs() * b, 3)


def _convolution(node: nn.Conv2d | nn.ConvTranspose2d, shape: Shape) -> Action:
    weight = numbers(node.weight)

    def by(kernel: Tensor) -> Callable[..., Tensor]:
        given = {"weight": kernel} | ({} if node.bias is None else {"bias": kernel.new_zeros(node.out_channels)})
        return lambda v: functional_call(node, given, (v,))

    return Action(by(weight), by(weight.abs()), node.in_channels // node.groups * math.prod(node.kernel_size))


def _average(node: Any, shape: Shape) -> Action:
    return Action(node, lambda v: node(v).abs(), window_terms(node, shape) + 8)


def _centred(node: LayerCenter, shape: Shape) -> Action:
    terms = 2 + math.prod(shape[dim - 1] for dim in node.dims)
    return Action(node, lambda v: v + v.mean(node.dims, keepdim=True), terms)


def _add(node: Add, shape: Shape) -> Action:
    return Action(node, lambda *values: functools.reduce(operator.add, values), len(node.signs))


ACTIONS: dict[type[nn.Module], Callable[[Any, Shape], Action]] = {
    nn.Linear: _linear, Affine: _affine, Blend: _blend, Add: _add, LayerCenter: _centred,
    nn.Conv2d: _convolution, nn.ConvTranspose2d: _convolution,
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AvgPool2d, EnlargeBilinear, Mean), _average),
    **dict.fromkeys(
        (Concatenate, Expand, nn.Flatten, Pad, Permute, Piece, Reshape, Roll, Shift2d),
        lambda node, shape: Action(node, node),
    ),
}  # fmt: skip
"""The action of each linear module and join on samples; the shape is that of its first value."""

Known = tuple[Tensor, Tensor]
"""Values in float64, (count, *shape), and a bound of the error of each entry."""


def acted(act: Action, given: Sequence[Known]) -> Known:
    """The result of an action on values that are known up to errors."""
    found, errors = zip(*given, strict=True)
    error = act.moduli(*errors)
    if act.terms:
        # | fl(A v) - A v' | <= gamma_n |A| |v| + |A| |v - v'|, and a number below the normal range for each term.
        error = up(error + gamma(act.terms + 2) * act.moduli(*(v.abs() for v in found)), 2 * act.terms + 8)
        error = error + 4 * act.terms * 2.0**-1074
    return act.of(*found), error


def mapped(act: Action, parts: Sequence[Known], shapes: Sequence[Shape]) -> Known:
    """`acted` on matrices, each column a value of one of these shapes; an error that is not known is infinite."""
    rows = [(a.mT.reshape(-1, *size), e.mT.reshape(-1, *size)) for (a, e), size in zip(parts, shapes, strict=True)]
    found, error = acted(act, rows)
    return found.flatten(1).mT, known(error.flatten(1).mT)


T = TypeVar("T")


def walked(
    module: Any, given: Sequence[T], shapes: Sequence[Shape], activated: Callable[[Any, T, Shape], T],
    moved: Callable[[Action, Any, Sequence[T], Sequence[Shape]], T],
) -> T:  # fmt: skip
    """The value behind a module whose `units` are known, from the values that it reads, of these shapes.

    ``activated(activation, value, shape)`` and ``moved(action, module, values, shapes)`` make new values.
    """
    kind, value, shape = type(module), given[0], shapes[0]
    if kind is Network:
        for child in module:
            value, shape = walked(child, [value], [shape], activated, moved), output_shape(child, shape)
        return value
    if kind is Graph:
        values, sizes = [value], value_shapes(module, shape)
        for node, read in zip(module.nodes, module.sources, strict=True):
            values.append(walked(node, [values[k] for k in read], [sizes[k] for k in read], activated, moved))
        return values[-1]
    if kind in ACTIVATIONS:
        return activated(module, value, shape)
    return moved(ACTIONS[kind](module, shape), module, given, shapes)


def units(module: Any, shape: Shape, takes: Callable[[Any], bool]) -> float:
    """The number of units of a graph of linear modules, and of activations that it ``takes``; inf for other graphs.

    It is inf for a value of more than `MOST_ROWS` entries, too.
    """
    kind = type(module)
    if math.prod(shape) > MOST_ROWS:
        return math.inf
    if kind is Network:
        total, size = 0.0, shape
        for child in module:
            total, size = total + units(child, size, takes), output_shape(child, size)
        return total
    if kind is Graph:
        sizes = value_shapes(module, shape)
        return sum(units(node, sizes[read[0]], takes) for node, read in zip(module.nodes, module.sources, strict=True))
    if kind in ACTIVATIONS:
        return math.prod(shape) if takes(module) else math.inf
    return 0.0 if kind in ACTIONS else math.inf


def is_linear(module: nn.Module, shape: Shape) -> bool:
    """True for a linear module, or a graph of them, if the matrices of its values have not too many entries.

    At most `LARGEST`, for convolutions a quarter: 1,024 inputs and outputs.
    """
    if units(module, shape, lambda activation: False):
        return False
    values = value_shapes(module, shape) if type(module) is Graph else [shape, output_shape(module, shape)]
    entries = math.prod(shape) * max(map(math.prod, values))
    return entries <= (LARGEST // 4 if type(module) in CONVOLUTIONS else LARGEST)  # their columns take longer
