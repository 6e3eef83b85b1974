"""KWLarge, the convolutional network of the certified-robustness tables, and a small sibling for 8 x 8 to 28 x 28."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.models._parts import Layers, check_sizes
from lipkit.models.frame import Image, architecture


@architecture()
def kwlarge(
    image: Image,
    layer: str = "cayley",
    width: int = 1,
    *,
    kernel_size: int = 3,
    dense: Sequence[int] | None = None,
    activation: str | nn.Module | None = None,
    pool: bool = False,
    **options: Any,
) -> list[nn.Module]:
    """conv 32w, conv 32w /2, conv 64w, conv 64w /2, linear 512w, linear 512, linear classes; MaxMin between
    (not for families whose layers contain an activation).

    Args:
        layer: acronym of the family (``lipkit list layers``), or ``plain`` or ``plain_conv``: unconstrained.
        width: w, multiplies the channels.
        kernel_size: of the layers of stride 1; strided layers act on 4 times the channels with half of it, rounded
            down (3 -> 1); unconstrained ones have a stride, and the whole kernel.
        dense: units of the two hidden linear layers instead of (512w, 512).
        activation: name such as 'relu', or a module, instead of MaxMin; for layers with an inner activation, that one.
        pool: no strides, but the sums of 4 x 4 pixels over 4 (of norm 1, as in the code that [LBDN] published) in
            front of the linear layers, for families that have no strided layer in the papers.
        image: (C, H, W) with H and W multiples of 4.
        options: options of the family's convolution.

    >>> from lipkit.lowering import lipschitz
    >>> float(lipschitz(kwlarge(input_shape=(3, 8, 8))))
    1.0

    References:
        [Cayley] section 5; Wong & Kolter's "large" network as used by Li et al., NeurIPS 2019; [LBDN] table 5 (dense,
        activation, pool).
    """
    units = [512 * width, 512] if dense is None else list(dense)
    if len(units) != 2:
        raise OptionError(f"dense: expected the units of two layers, got {dense!r}")
    check_sizes(kernel_size=kernel_size, dense=units)
    made, features = Layers(layer, options, activation), 64 * width * image.pixels(4)
    down = (kernel_size, 1) if pool else (made.strided(kernel_size), 2)
    return [
        *made.conv(image.channels, 32 * width, kernel_size),
        *made.conv(32 * width, 32 * width, *down),
        *made.conv(32 * width, 64 * width, kernel_size),
        *made.conv(64 * width, 64 * width, *down),
        *([nn.AvgPool2d(4, divisor_override=4)] if pool else []),
        nn.Flatten(),
        *made.linear(features, units[0]),
        *made.linear(units[0], units[1]),
        made.last(units[1], image.classes),
    ]


@architecture(input_shape=(1, 8, 8))
def small(
    image: Image, layer: str = "cayley", width: int = 1, *, kernel_size: int = 3, **options: Any
) -> list[nn.Module]:
    """conv 16w, conv 32w /2 (and conv 32w /2 again above 12 x 12), linear 256w, linear classes; MaxMin between
    (for families whose layers contain their activation, none).

    Args:
        layer: acronym of the family (``lipkit list layers``), or ``plain`` or ``plain_conv``: unconstrained.
        width: w, multiplies the channels.
        kernel_size: of the first layer; strided layers use 1, unconstrained ones the whole kernel.
        image: (C, H, W) with H and W even (multiples of 4 above 12 x 12).
        options: options of the family's convolution.

    >>> small(input_shape=(1, 8, 8), classes=3)[-1].out_features
    3
    """
    made, twice = Layers(layer, options), max(image.rows, image.columns) > 12
    features = 32 * width * image.pixels(4 if twice else 2)
    down = made.strided(kernel_size, 1), 2
    return [
        *made.conv(image.channels, 16 * width, kernel_size),
        *made.conv(16 * width, 32 * width, *down),
        *(made.conv(32 * width, 32 * width, *down) if twice else []),
        nn.Flatten(),
        *made.linear(features, 256 * width),
        made.last(256 * width, image.classes),
    ]
