"""A small sibling of KWLarge for images of 8 x 8 to 28 x 28."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.layers import families
from lipkit.models._parts import activated, bounded, check_classes, check_image, check_options, dense_options
from lipkit.modules import Shape


def small(
    layer: str = "cayley",
    width: int = 1,
    *,
    kernel_size: int = 3,
    input_shape: Shape = (1, 8, 8),
    classes: int = 10,
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
    """conv 16w, conv 32w /2 (and conv 32w /2 again above 12 x 12), linear 256w, linear classes; MaxMin between
    (for families whose layers contain their activation, none).

    Args:
        layer: acronym of the family (``lipkit list layers``).
        width: w, multiplies the channels.
        kernel_size: of the first layer; strided layers use 1.
        input_shape: (C, H, W) with H and W even (multiples of 4 above 12 x 12).
        classes: number of outputs.
        lipschitz: target constant of the network behind the normalisation.
        mean, std: input normalisation, part of the network.
        options: options of the family's convolution.

    >>> small(input_shape=(1, 8, 8), classes=3)[-1].out_features
    3
    """
    family = families.get(layer)
    _, height, breadth = check_image(input_shape, 2, "small")
    twice = max(height, breadth) > 12
    channels, height, breadth = check_image(input_shape, 4 if twice else 2, "small")
    check_classes(classes)
    check_options(options)
    dense = dense_options(family, options)
    layers = [
        *activated(family, family.conv(channels, 16 * width, kernel_size, **options)),
        *activated(family, family.conv(16 * width, 32 * width, 1, stride=2, **options)),
    ]
    if twice:
        layers += activated(family, family.conv(32 * width, 32 * width, 1, stride=2, **options))
    pixels = height * breadth // (16 if twice else 4)
    layers += [
        nn.Flatten(),
        *activated(family, family.linear(32 * width * pixels, 256 * width, **dense)),
        family.last(256 * width, classes),
    ]
    return bounded(layers, lipschitz, mean, std, channels)
