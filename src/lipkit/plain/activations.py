"""Gradient-norm preserving activations: they sort groups of channels, so they are 1-Lipschitz and lose nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import OptionError, ShapeError


class _MaxMin(torch.autograd.Function):
    """The sorted halves, with the derivative by one mask: a permutation, also where both values are equal."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _sorted_halves(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        a, b = inputs[0].chunk(2, dim=1)
        ordered = a >= b
        ctx.save_for_backward(ordered)
        ctx.save_for_forward(ordered)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (ordered,) = ctx.saved_tensors
        return _exchanged(ordered, g)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (ordered,) = ctx.saved_tensors
        return _exchanged(ordered, t)


def _sorted_halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), dim=1)


def _exchanged(keep: Tensor, x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    return torch.cat((torch.where(keep, a, b), torch.where(keep, b, a)), dim=1)


def maxmin(x: Tensor) -> Tensor:
    """Split dimension 1 in halves a, b and return (max(a, b), min(a, b)): an isometry at almost every point.

    Args:
        x: ``(B, C, ...)`` with even C.

    Raises:
        ShapeError: C is odd.

    >>> maxmin(torch.tensor([[1.0, 5.0, 3.0, 2.0]])).tolist()
    [[3.0, 5.0, 1.0, 2.0]]

    References:
        Anil, Lucas & Grosse, ICML 2019 (GroupSort with groups of 2).
    """
    channels = x.shape[1]
    if channels % 2:
        raise ShapeError(f"MaxMin: expected an even number of channels, got {channels} in shape {tuple(x.shape)}")
    if torch.compiler.is_compiling() or not x.requires_grad:
        return _sorted_halves(x)
    y: Tensor = _MaxMin.apply(x)
    return y


def group_sort(x: Tensor, group_size: int) -> Tensor:
    """Sort each group of ``group_size`` neighbouring channels (dimension 1) in descending order.

    >>> group_sort(torch.tensor([[1.0, 5.0, 3.0, 2.0]]), 2).tolist()
    [[5.0, 1.0, 3.0, 2.0]]

    References:
        Anil, Lucas & Grosse, ICML 2019.
    """
    channels = x.shape[1]
    if channels % group_size:
        raise ShapeError(
            f"GroupSort: expected a number of channels that is a multiple of {group_size}, "
            f"got {channels} in shape {tuple(x.shape)}"
        )
    return x.unflatten(1, (-1, group_size)).sort(dim=2, descending=True).values.flatten(1, 2)


class MaxMin(nn.Module):
    """:func:`maxmin` as a module. 1-Lipschitz; not allowed inside sandwich, SLL or CPL layers.

    >>> MaxMin()(torch.tensor([[0.0, 1.0]])).tolist()
    [[1.0, 0.0]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return maxmin(x)


class GroupSort(nn.Module):
    """:func:`group_sort` as a module. 1-Lipschitz.

    Args:
        group_size: number of neighbouring channels that are sorted together, at least 2.

    Raises:
        OptionError: ``group_size`` is below 2.

    >>> GroupSort(3)
    GroupSort(group_size=3)
    """

    def __init__(self, group_size: int = 2) -> None:
        super().__init__()
        if group_size < 2:
            raise OptionError(f"group_size: expected at least 2, got {group_size}")
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        return group_sort(x, self.group_size)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}"
