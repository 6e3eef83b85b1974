"""The SLL networks of Araujo et al.: residual layers at constant width, without strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import NormalizedLinear
from lipkit.layers.sll import SllConv2d, SllLinear
from lipkit.models._parts import check_flag, check_sizes
from lipkit.models.frame import Image, architecture
from lipkit.modules.views import Pad

# Channels, convolutions, dense layers.
SIZES = {"small": (45, 20, 7), "medium": (60, 30, 10), "large": (90, 50, 10), "xlarge": (120, 70, 15)}
POOL = 4


@architecture()
def sllnet(
    image: Image,
    size: str = "small",
    *,
    channels: int | None = None,
    depth: int | None = None,
    dense: Sequence[int] | None = None,
    inner: int = 5,
    last_layer_normalization: bool = False,
    **options: Any,
) -> list[nn.Module]:
    """Zeros as further channels, ``depth`` SLL convolutions, sums of 4 x 4 pixels over 4, SLL dense layers, classes.

    Every layer is a residual one of constant width. ``size`` sets channels, convolutions and dense layers (of 2048
    inner units): small 45, 20, 7; medium 60, 30, 10; large 90, 50, 10; xlarge 120, 70, 15. Most of the parameters
    (41, 79, 118 and 236 million for 32 x 32 images) are in the dense layers.

    Args:
        size: small, medium, large or xlarge; what follows replaces its parts.
        channels: width of the convolutions.
        depth: number of convolutions.
        dense: inner units of each dense layer.
        inner: inner channels of each convolution.
        last_layer_normalization: whether a last layer with rows of unit norm and free otherwise follows. False: the
            first outputs are the classes, without parameters.
        image: (C, H, W) with H and W multiples of 4.
        options: options of the layers: ``activation``.

    Raises:
        OptionError: an unknown size, fewer features than classes. ShapeError: an input shape that does not fit.

    >>> net = sllnet(channels=4, depth=2, dense=[8], input_shape=(1, 8, 8), last_layer_normalization=True)
    >>> [type(layer).__name__ for layer in net]
    ['SllConv2d', 'SllConv2d', 'AvgPool2d', 'Flatten', 'SllLinear', 'NormalizedLinear']

    References:
        Araujo et al., ICLR 2023, section 5 and appendix; the inner channels are those of its code, and the only ones
        that give the printed numbers of parameters. Convolutions are circular here, zero-padded there.
    """
    if size not in SIZES:
        raise OptionError(f"size: expected one of {', '.join(SIZES)}, got {size!r}")
    check_flag(last_layer_normalization=last_layer_normalization)
    width, convolutions, linears = SIZES[size]
    width = width if channels is None else channels
    convolutions = convolutions if depth is None else depth
    units = [2048] * linears if dense is None else list(dense)
    check_sizes(channels=width, depth=convolutions, inner=inner, dense=units)
    features = width * image.pixels(POOL)
    if width < image.channels:
        raise OptionError(f"channels: expected at least the {image.channels} of the images, got {width}")
    if features < image.classes:
        raise OptionError(
            f"channels: expected at least as many features as the {image.classes} classes, got {features}"
        )
    inputs = [image.channels, *[width] * (convolutions - 1)]
    layers: list[nn.Module] = [SllConv2d(n, width, 3, hidden=inner, **options) for n in inputs]
    # Of norm 1: sixteen weights of a quarter.
    layers += [nn.AvgPool2d(POOL, divisor_override=POOL), nn.Flatten()]
    layers += [SllLinear(features, features, hidden=n, **options) for n in units]
    dropped = Pad(0, image.classes - features)
    return [*layers, NormalizedLinear(features, image.classes) if last_layer_normalization else dropped]
