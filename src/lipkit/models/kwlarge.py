"""KWLarge: the convolutional network of the certified-robustness tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.layers import families
from lipkit.layers._base import check_positive
from lipkit.models._parts import activated, bounded, check_classes, check_image, check_options, dense_options
from lipkit.protocol import Shape


def kwlarge(
    layer: str = "cayley",
    width: int = 1,
    *,
    kernel_size: int = 3,
    input_shape: Shape = (3, 32, 32),
    classes: int = 10,
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
    """conv 32w, conv 32w /2, conv 64w, conv 64w /2, linear 512w, linear 512, linear classes; MaxMin between
    (for families whose layers contain their activation, none).

    Args:
        layer: acronym of the family (``lipkit list layers``).
        width: w, multiplies the channels.
        kernel_size: of the layers of stride 1; strided layers act on 4 times the channels with half of it, rounded
            down (3 -> 1).
        input_shape: (C, H, W) with H and W multiples of 4.
        classes: number of outputs.
        lipschitz: target constant of the network behind the normalisation.
        mean, std: input normalisation, part of the network.
        options: options of the family's convolution.

    >>> from lipkit.protocol import lipschitz
    >>> float(lipschitz(kwlarge(input_shape=(3, 8, 8))))
    1.0

    References:
        [Cayley] section 6.1; Wong & Kolter's "large" network as used by Li et al., NeurIPS 2019.
    """
    family = families.get(layer)
    channels, height, breadth = check_image(input_shape, 4, "kwlarge")
    check_classes(classes)
    check_options(options)
    check_positive(kernel_size=kernel_size)
    half = max(1, kernel_size // 2)
    pixels = (height // 4) * (breadth // 4)
    dense = dense_options(family, options)
    layers = [
        *activated(family, family.conv(channels, 32 * width, kernel_size, **options)),
        *activated(family, family.conv(32 * width, 32 * width, half, stride=2, **options)),
        *activated(family, family.conv(32 * width, 64 * width, kernel_size, **options)),
        *activated(family, family.conv(64 * width, 64 * width, half, stride=2, **options)),
        nn.Flatten(),
        *activated(family, family.linear(64 * width * pixels, 512 * width, **dense)),
        *activated(family, family.linear(512 * width, 512, **dense)),
        family.last(512, classes),
    ]
    return bounded(layers, lipschitz, mean, std, channels)
