"""The matrix of a `Graph` that is linear as a whole: heads of one value, sums, concatenations, moves."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.modules.dense import Affine
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, value_shapes
from lipkit.modules.plain import Shape
from lipkit.modules.pooling import Mean
from lipkit.modules.views import Expand, Pad, Permute, Piece, Reshape, Roll
from lipkit.proof.roundoff import gamma, to_double, up

LARGEST = 2**22
"""Most entries of a matrix."""


class Action(NamedTuple):
    """A linear module or join, without its shift: ``of`` its values, ``moduli`` the same with moduli of its numbers.

    ``terms`` is the most numbers in one sum; 0 if numbers are only copied.
    """

    of: Callable[..., Tensor]
    moduli: Callable[..., Tensor]
    terms: int = 0


def _linear(node: nn.Linear, shape: Shape) -> Action:
    weight = to_double(node.weight.detach())
    return Action(lambda v: F.linear(v, weight), lambda v: F.linear(v, weight.abs()), node.in_features)


def _affine(node: Affine, shape: Shape) -> Action:
    scale = to_double(node.scale)
    scale = scale.view(*scale.shape, *[1] * (len(shape) - scale.ndim))
    return Action(lambda v: scale * v, lambda v: scale.abs() * v, 1)


def _blend(node: Blend, shape: Shape) -> Action:
    share = to_double(node.share)
    rest = 1 - share
    return Action(lambda a, b: share * a + rest * b, lambda a, b: share.abs() * a + rest.abs() * b, 3)


def _mean(node: Mean, shape: Shape) -> Action:
    return Action(node, node, math.prod(shape[dim - 1] for dim in node.dims))


def _add(node: Add, shape: Shape) -> Action:
    return Action(node, lambda *values: functools.reduce(operator.add, values), len(node.signs))


ACTIONS: dict[type[nn.Module], Callable[[Any, Shape], Action]] = {
    nn.Linear: _linear, Affine: _affine, Blend: _blend, Mean: _mean, Add: _add,
    **dict.fromkeys(
        (Concatenate, Expand, nn.Flatten, Pad, Permute, Piece, Reshape, Roll), lambda node, shape: Action(node, node)
    ),
}  # fmt: skip
"""What each linear module and join does to a sample of a shape, that of its first value."""

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


def linear_graph(module: nn.Module, shape: Shape) -> Known | None:
    """The matrix (outputs, inputs) of a linear `Graph`, float64, with a bound of each entry's error.

    Shifts are left out. None for other modules, and where a matrix would be larger than `LARGEST`.
    """
    if type(module) is not Graph or any(type(node) not in ACTIONS for node in module.nodes):
        return None
    shapes, inputs = value_shapes(module, shape), math.prod(shape)
    if inputs * max(map(math.prod, shapes)) > LARGEST:
        return None
    units = torch.eye(inputs, dtype=torch.float64).reshape(inputs, *shape)
    values = [(units, torch.zeros_like(units))]  # responses to the unit vectors, one after the other
    for node, read in zip(module.nodes, module.sources, strict=True):
        values.append(acted(ACTIONS[type(node)](node, shapes[read[0]]), [values[k] for k in read]))
    matrix, error = (value.flatten(1).mT for value in values[-1])
    return matrix, error
