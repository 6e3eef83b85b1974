"""ResNet9, 1-Lipschitz: convex skips, norm-1 pooling, one more linear layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from lipkit.layers import Residual, ScaledAvgPool2d
from lipkit.models._parts import Layers
from lipkit.models.frame import Image, architecture


@architecture()
def resnet9(
    image: Image, layer: str = "cayley", width: int = 64, *, kernel_size: int = 3, **options: Any
) -> list[nn.Module]:
    """Six convolutions and two skips: w, 2w, pool, [2w, 2w], 4w, pool, 8w, pool, [8w, 8w], pool, two linear layers.

    The last pooling is 2 instead of 4, which leaves four times the features for the additional linear layer.

    Args:
        layer: acronym of the family (``lipkit list layers``), or ``plain`` or ``plain_conv``: unconstrained.
        width: w, channels of the first layer.
        kernel_size: of every convolution.
        image: (C, H, W) with H and W multiples of 16.
        options: options of the family's convolution.

    >>> from lipkit.lowering import lipschitz
    >>> lipschitz(resnet9(width=4)).item()
    1.0

    References:
        [Cayley] section 5 and Appendix B (1-Lipschitz ResNet9).
    """
    made, features = Layers(layer, options), 8 * width * image.pixels(16)

    def skip(c: int) -> nn.Module:
        return Residual(nn.Sequential(*made.conv(c, c, kernel_size), *made.conv(c, c, kernel_size)))

    return [
        *made.conv(image.channels, width, kernel_size),
        *made.conv(width, 2 * width, kernel_size),
        ScaledAvgPool2d(2),
        skip(2 * width),
        *made.conv(2 * width, 4 * width, kernel_size),
        ScaledAvgPool2d(2),
        *made.conv(4 * width, 8 * width, kernel_size),
        ScaledAvgPool2d(2),
        skip(8 * width),
        ScaledAvgPool2d(2),
        nn.Flatten(),
        *made.linear(features, 8 * width),
        made.last(8 * width, image.classes),
    ]
