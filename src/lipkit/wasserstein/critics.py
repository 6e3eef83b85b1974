"""Critics: networks with one output and a Lipschitz constant of at most 1, for vectors and for images."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import nn

from lipkit.layers import families
from lipkit.models import mlp
from lipkit.models.frame import Layers
from lipkit.modules import Shape

HIDDEN, CHANNELS, UNITS = (64, 64), (16, 32), 128


def critic(input_shape: Shape, family: str = "cayley", **options: Any) -> nn.Sequential:
    """A critic of one family's layers: dense for vectors, convolutional for images.

    Vectors, and images with an odd side, get dense layers of 64, 64 and 1 units. Images (C, H, W) with even sides get a
    3 x 3 convolution to 16 channels, one of stride 2 to 32 (smaller kernels if the family needs them), and dense layers
    of 128 and 1 units. Between them is MaxMin or the family's own activation. ``options`` are those of the family's
    convolution, or of its dense layer for vectors.

    >>> [type(m).__name__ for m in critic((3,))]
    ['CayleyLinear', 'MaxMin', 'CayleyLinear', 'MaxMin', 'CayleyLinear']
    >>> [type(m).__name__ for m in critic((1, 8, 8), "rko")]
    ['RkoConv2d', 'MaxMin', 'RkoConv2d', 'MaxMin', 'Flatten', 'BjorckLinear', 'MaxMin', 'BjorckLinear']
    """
    made = Layers(families.get(family).name, options)
    if len(input_shape) != 3 or input_shape[1] % 2 or input_shape[2] % 2 or not math.prod(input_shape):
        return mlp(HIDDEN, family, input_shape=input_shape, classes=1, **options)
    channels, height, width = input_shape
    wide, deep = CHANNELS
    # The largest kernel up to 3 x 3 that the family accepts at each size.
    fits = made.family.accepts
    first, second = (next(k for k in (3, 2, 1) if fits(k, height // s, width // s) or k == 1) for s in (1, 2))
    return nn.Sequential(
        *made.conv(channels, wide, first),
        *made.conv(wide, deep, second, 2),
        nn.Flatten(),
        *made.dense(deep * height * width // 4, UNITS),  # the stride halved both sides
        made.last(UNITS, 1),
    )


def instance(given: str | nn.Module | None, input_shape: Shape) -> nn.Module:
    """A critic to train: a copy of a module, or a new critic of the named family (None: "cayley")."""
    return copy.deepcopy(given) if isinstance(given, nn.Module) else critic(input_shape, given or "cayley")
