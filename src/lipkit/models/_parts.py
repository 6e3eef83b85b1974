"""Parts of the architectures: checked options, activations, families and their unconstrained counterparts."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import CayleyLinear, Family, MaxMin, families
from lipkit.layers.base import check_positive
from lipkit.modules import GroupSort, HalfAbs, Shape
from lipkit.modules.activations import BY_NAME, slope_restricted

ACTIVATIONS: dict[str, type[nn.Module]] = {"maxmin": MaxMin, "halfabs": HalfAbs, **BY_NAME}


def check_sizes(**sizes: Any) -> None:
    """Raise ``OptionError`` unless each size, or each in a list of them, is an integer of at least 1.

    >>> check_sizes(width=3, dense=[16, 0])
    Traceback (most recent call last):
    lipkit.errors.OptionError: dense[1]: expected an integer of at least 1, got 0
    """
    for name, value in sizes.items():
        if isinstance(value, list | tuple):
            check_sizes(**{f"{name}[{i}]": each for i, each in enumerate(value)})
        else:
            check_positive(**{name: value})


def check_flag(**flags: Any) -> None:
    """Raise ``OptionError`` unless each is a boolean."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name}: expected true or false, got {value!r}")


def sizes_of(input_shape: Shape) -> Shape:
    """The sizes of an input shape; empty if it is not a sequence of positive integers."""
    shape = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    return shape if all(type(n) is int and n >= 1 for n in shape) else ()  # `type`: True is no size


def flat_size(input_shape: Shape) -> int:
    """Number of entries of one input; ``ShapeError`` unless the shape consists of positive integers."""
    if not (shape := sizes_of(input_shape)):
        raise ShapeError(f"input_shape: expected positive sizes without the batch, got {input_shape!r}")
    return math.prod(shape)


def make_activation(activation: str | nn.Module | None) -> nn.Module:
    """The activation of this name, or a copy of this module; ``None`` is MaxMin.

    >>> make_activation(None), make_activation("relu")
    (MaxMin(), ReLU())
    """
    if activation is None:
        return MaxMin()
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return ACTIVATIONS[activation]()
    sorting = type(activation) in (MaxMin, GroupSort, HalfAbs)
    if isinstance(activation, nn.Module) and (sorting or slope_restricted(activation)):
        return copy.deepcopy(activation)
    raise OptionError(
        f"activation: expected one of {', '.join(sorted(ACTIVATIONS))}, or a module of these types, got {activation!r}"
    )


def plain_conv2d(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, *, padding_mode: Any = "zeros", **named: Any
) -> nn.Conv2d:
    """``nn.Conv2d`` with odd kernels whose output is as large as the input divided by the stride.

    >>> plain_conv2d(3, 8, 3, stride=2).padding
    (1, 1)
    """
    if kernel_size % 2 == 0:
        raise OptionError(f"kernel_size: expected an odd number for plain convolutions, got {kernel_size}")
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, kernel_size // 2, padding_mode=padding_mode, **named
    )


_plain = partial(Family, paper="", equation="", claim="none", sizes="odd kernels, any image")
# Not in the table of families: these layers are unconstrained, so the table's laws do not hold for them.
UNCONSTRAINED: dict[str, Family] = {
    "plain": _plain(name="plain", title="nn.Conv2d and nn.Linear", conv=plain_conv2d, linear=nn.Linear),
    "plain_conv": _plain(
        name="plain_conv",
        title="circular nn.Conv2d, dense layers by the Cayley transform",
        conv=partial(plain_conv2d, padding_mode="circular"),
        linear=CayleyLinear,
    ),
}


def find(name: str) -> Family:
    """The family of this acronym, or one of the two unconstrained ones; the OptionError for another lists all.

    >>> find("plain").linear.__name__, find("cayley").linear.__name__
    ('Linear', 'CayleyLinear')
    """
    if name in UNCONSTRAINED:
        return UNCONSTRAINED[name]
    try:
        return families.get(name)
    except OptionError as error:
        raise OptionError(str(error).replace(", got ", f", {', '.join(UNCONSTRAINED)}, got ", 1)) from None


class Layers:
    """Layers of a family, each followed by an activation (None: MaxMin) unless the family has one inside its layers.

    ``options`` are those of its convolutions; an activation among them is used in the dense layers, too.

    >>> made = Layers("cayley", {})
    >>> made.dense(4, 2), made.strided(5), Layers("plain", {}).strided(5)
    ([CayleyLinear(4, 2, bias=True), MaxMin()], 2, 5)
    """

    def __init__(self, name: str, options: Mapping[str, Any], activation: str | nn.Module | None = None) -> None:
        self.family = find(name)
        self.outer: list[nn.Module] = [] if self.family.own_activation else [make_activation(activation)]
        inner = {"activation": activation} if self.family.own_activation and activation is not None else {}
        self.options = {**options, **inner}
        self.inner = {k: v for k, v in self.options.items() if self.family.own_activation and k == "activation"}

    def conv(self, cin: int, cout: int, kernel_size: int, stride: int = 1) -> list[nn.Module]:
        return [self.bare(cin, cout, kernel_size, stride), *self.behind()]

    def bare(self, cin: int, cout: int, kernel_size: int, stride: int = 1) -> nn.Module:
        """A convolution without an activation after it."""
        return self.family.conv(cin, cout, kernel_size, stride=stride, **self.options)

    def dense(self, *sizes: int) -> list[nn.Module]:
        """Hidden dense layers, from each size to the next."""
        return [m for p, q in pairwise(sizes) for m in (self.family.linear(p, q, **self.inner), *self.behind())]

    def last(self, inputs: int, outputs: int) -> nn.Module:
        return self.family.last(inputs, outputs)

    def behind(self) -> list[nn.Module]:
        """The modules after a layer: a copy of the activation, or none."""
        return copy.deepcopy(self.outer)

    def strided(self, kernel_size: int, emulated: int | None = None) -> int:
        """Kernel size of a strided layer: a constrained one downsamples first, and takes half of it or ``emulated``."""
        if self.family.name in UNCONSTRAINED:  # a real stride
            return kernel_size
        return max(1, kernel_size // 2) if emulated is None else emulated
