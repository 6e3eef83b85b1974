"""The deep sandwich networks of the certified-robustness table of [LBDN]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import NormalizedLinear
from lipkit.layers.base import check_positive
from lipkit.models._parts import (
    activated,
    bounded,
    check_classes,
    check_image,
    check_options,
    dense_options,
    find,
    strided_kernel,
)
from lipkit.modules import Shape


def lbdn_conv(
    layer: str = "sandwich",
    blocks: int = 3,
    width: int = 64,
    *,
    hidden: Sequence[int] = (2048, 2048, 1024),
    last_layer_normalization: bool = True,
    kernel_size: int = 3,
    input_shape: Shape = (3, 32, 32),
    classes: int = 100,
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
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
        input_shape: (C, H, W) with H and W multiples of 2 to the power of ``blocks``.
        classes: number of outputs.
        lipschitz: target constant of the layers before the last one.
        mean, std: input normalisation, part of the network.
        options: options of the family's convolution.

    Raises:
        OptionError: another number of blocks or units than above. ShapeError: an input shape that does not fit.

    >>> net = lbdn_conv(width=4, hidden=[32], input_shape=(3, 8, 8))
    >>> type(net[-1]).__name__, net[-1].out_features
    ('NormalizedLinear', 100)

    References:
        [LBDN] table 6, section 5.2; Singla, Singla & Feizi, ICLR 2022 (last-layer normalisation).
    """
    family = find(layer)
    check_positive(blocks=blocks, width=width, kernel_size=kernel_size)
    check_positive(**{f"hidden[{i}]": n for i, n in enumerate(hidden)})
    channels, rows, columns = check_image(input_shape, 2**blocks, "lbdn_conv")
    check_classes(classes)
    check_options(options)
    if not isinstance(last_layer_normalization, bool):
        raise OptionError(f"last_layer_normalization: expected true or false, got {last_layer_normalization!r}")
    strided = strided_kernel(family, kernel_size, max(1, kernel_size // 2))
    layers: list[nn.Module] = []
    current = channels
    for block in range(blocks):
        target = width * 2**block
        layers += activated(family, family.conv(current, target, kernel_size, **options))
        layers += activated(family, family.conv(target, target, strided, stride=2, **options))
        current = target
    layers.append(nn.Flatten())
    current *= rows * columns // 4**blocks
    for units in hidden:
        layers += activated(family, family.linear(current, units, **dense_options(family, options)))
        current = units
    layers.append(NormalizedLinear(current, classes) if last_layer_normalization else family.last(current, classes))
    return bounded(layers, lipschitz, mean, std, channels)
