"""ResNet9, 1-Lipschitz: convex skips, norm-1 pooling, one more linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.layers import Residual, ScaledAvgPool2d
from lipkit.models._parts import activated, bounded, check_classes, check_image, check_options, dense_options, find
from lipkit.modules import Shape


def resnet9(
    layer: str = "cayley",
    width: int = 64,
    *,
    kernel_size: int = 3,
    input_shape: Shape = (3, 32, 32),
    classes: int = 10,
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
    """Six convolutions and two skips: w, 2w, pool, [2w, 2w], 4w, pool, 8w, pool, [8w, 8w], pool, two linear layers.

    The last pooling is 2 instead of 4, which leaves four times the features for the additional linear layer.

    Args:
        layer: acronym of the family (``lipkit list layers``), or ``plain`` or ``plain_conv``: unconstrained.
        width: w, channels of the first layer.
        kernel_size: of every convolution.
        input_shape: (C, H, W) with H and W multiples of 16.
        classes: number of outputs.
        lipschitz: target constant of the network behind the normalisation.
        mean, std: input normalisation, part of the network.
        options: options of the family's convolution.

    >>> from lipkit.modules import lipschitz
    >>> lipschitz(resnet9(width=4)).item()
    1.0

    References:
        [Cayley] section 5 and Appendix B (1-Lipschitz ResNet9).
    """
    family = find(layer)
    channels, rows, columns = check_image(input_shape, 16, "resnet9")
    check_classes(classes)
    check_options(options)

    def conv(cin: int, cout: int) -> list[nn.Module]:
        return activated(family, family.conv(cin, cout, kernel_size, **options))

    def skip(c: int) -> nn.Module:
        return Residual(nn.Sequential(*conv(c, c), *conv(c, c)))

    features = 8 * width * (rows // 16) * (columns // 16)
    layers = [
        *conv(channels, width),
        *conv(width, 2 * width),
        ScaledAvgPool2d(2),
        skip(2 * width),
        *conv(2 * width, 4 * width),
        ScaledAvgPool2d(2),
        *conv(4 * width, 8 * width),
        ScaledAvgPool2d(2),
        skip(8 * width),
        ScaledAvgPool2d(2),
        nn.Flatten(),
        *activated(family, family.linear(features, 8 * width, **dense_options(family, options))),
        family.last(8 * width, classes),
    ]
    return bounded(layers, lipschitz, mean, std, channels)
