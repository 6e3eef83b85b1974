"""The deep sandwich networks of the certified-robustness table of [LBDN]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.layers import NormalizedLinear
from lipkit.models._parts import Layers, check_flag, check_sizes
from lipkit.models.frame import Image, architecture


@architecture(classes=100)
def lbdn_conv(
    image: Image,
    layer: str = "sandwich",
    blocks: int = 3,
    width: int = 64,
    *,
    hidden: Sequence[int] = (2048, 2048, 1024),
    last_layer_normalization: bool = True,
    kernel_size: int = 3,
    **options: Any,
) -> list[nn.Module]:
    """Blocks of conv w, conv w /2 with w = 64, 128, 256 (, 512), then linear 2048, 2048, 1024 and a last layer of
    unit rows.

    Args:
        layer: acronym of the family (``lipkit list layers``).
        blocks: number of blocks; each halves the image and doubles the channels. The paper: 3 for 32 x 32 images, 4
            for 64 x 64.
        width: channels of the first block.
        hidden: units of the hidden linear layers.
        last_layer_normalization: whether the last layer has rows of unit norm and is otherwise free (the network is
            then not 1-Lipschitz; the pairwise certificate takes the last layer's rows into account). False: a
            layer of the family.
        kernel_size: of the layers of stride 1; strided layers have half of it, rounded down, after downsampling.
        image: (C, H, W) with H and W multiples of 2 to the power of ``blocks``.
        options: options of the family's convolution.

    Raises:
        OptionError: another number of blocks or units than above. ShapeError: an input shape that does not fit.

    >>> net = lbdn_conv(width=4, hidden=[32], input_shape=(3, 8, 8))
    >>> type(net[-1]).__name__, net[-1].out_features
    ('NormalizedLinear', 100)

    References:
        [LBDN] table 6, section 5.2; Singla, Singla & Feizi, ICLR 2022 (last-layer normalisation).
    """
    check_sizes(blocks=blocks, width=width, kernel_size=kernel_size, hidden=hidden)
    check_flag(last_layer_normalization=last_layer_normalization)
    made, pixels = Layers(layer, options), image.pixels(2**blocks)
    layers: list[nn.Module] = []
    current = image.channels
    for block in range(blocks):
        target = width * 2**block
        layers += made.conv(current, target, kernel_size)
        layers += made.conv(target, target, made.strided(kernel_size), 2)
        current = target
    layers.append(nn.Flatten())
    current *= pixels
    for units in hidden:
        layers += made.linear(current, units)
        current = units
    last = NormalizedLinear if last_layer_normalization else made.last
    return [*layers, last(current, image.classes)]
