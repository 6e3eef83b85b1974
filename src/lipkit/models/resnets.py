"""ResNet9 and wide residual networks, 1-Lipschitz: convex skips, norm-1 pooling, one more linear layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import Residual, ScaledAvgPool2d
from lipkit.models.frame import Image, Layers, architecture, check_sizes


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
        *made.dense(features, 8 * width),
        made.last(8 * width, image.classes),
    ]


@architecture()
def wide_resnet(
    image: Image, depth: int = 10, widen: int = 10, layer: str = "cayley", *, kernel_size: int = 3, **options: Any
) -> list[nn.Module]:
    """WRN-depth-widen: 16 channels, then three groups of (depth - 4) / 6 blocks with 16, 32, 64 times ``widen``.

    Each block is MaxMin, conv, MaxMin, conv under a convex skip; where the shape changes, the skip is a 1 x 1 layer of
    the same family. Strided layers act after invertible downsampling with half the kernel, rounded down
    (unconstrained ones have a stride, and the whole kernel). The last pooling is half of the usual one (4 instead of 8
    at 32 x 32), followed by one more linear layer.

    Args:
        depth: 6 n + 4.
        widen: widening factor.
        layer: acronym of the family (``lipkit list layers``), or ``plain`` or ``plain_conv``: unconstrained.
        kernel_size: of the layers of stride 1.
        image: (C, H, W) with H and W multiples of 16.
        options: options of the family's convolution.

    Raises:
        OptionError: depth is not 6 n + 4 with n >= 1, or widen is below 1.

    >>> from lipkit.lowering import lipschitz
    >>> lipschitz(wide_resnet(10, 1, input_shape=(3, 16, 16))).item()
    1.0

    References:
        [Cayley] section 5 (WideResNet10-10); Zagoruyko & Komodakis, BMVC 2016.
    """
    made = Layers(layer, options)
    rows, columns = image.divided(16)
    check_sizes(kernel_size=kernel_size)
    if depth < 10 or depth % 6 != 4:
        raise OptionError(f"depth: expected 6 n + 4 with n >= 1 (10, 16, 22, ...), got {depth}")
    if rows != columns:
        got = f"{image.rows} x {image.columns}"
        raise OptionError(f"input_shape: expected a square image for the last pooling, got {got}")
    if widen < 1:
        raise OptionError(f"widen: expected at least 1, got {widen}")

    def block(cin: int, cout: int, stride: int) -> nn.Module:
        first = made.bare(cin, cout, made.strided(kernel_size) if stride > 1 else kernel_size, stride)
        # `behind` stands in front here: layers that contain their activation have none before them either.
        body = nn.Sequential(*made.behind(), first, *made.behind(), made.bare(cout, cout, kernel_size))
        same = cin == cout and stride == 1  # else the skip needs a layer of its own
        return Residual(body, shortcut=None if same else made.bare(cin, cout, 1, stride))

    layers: list[nn.Module] = [made.bare(image.channels, 16, kernel_size)]
    current = 16
    for group, stride in enumerate((1, 2, 2)):
        target = 16 * widen * 2**group  # 16, 32, 64 times widen
        for i in range((depth - 4) // 6):
            layers.append(block(current, target, stride if i == 0 else 1))
            current = target
    pool = [*made.behind(), ScaledAvgPool2d(2 * rows), nn.Flatten()]  # of rows / 4 by rows / 8: 2 x 2 pixels are left
    return [*layers, *pool, *made.dense(current * 4, current), made.last(current, image.classes)]
