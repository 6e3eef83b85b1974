"""Wide residual networks, 1-Lipschitz: convex skips, norm-1 pooling, one more linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import MaxMin, Residual, ScaledAvgPool2d
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


def wide_resnet(
    depth: int = 10,
    widen: int = 10,
    layer: str = "cayley",
    *,
    kernel_size: int = 3,
    input_shape: Shape = (3, 32, 32),
    classes: int = 10,
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
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
        input_shape: (C, H, W) with H and W multiples of 16.
        classes: number of outputs.
        lipschitz: target constant of the network behind the normalisation.
        mean, std: input normalisation, part of the network.
        options: options of the family's convolution.

    Raises:
        OptionError: depth is not 6 n + 4 with n >= 1, or widen is below 1.

    >>> from lipkit.modules import lipschitz
    >>> lipschitz(wide_resnet(10, 1, input_shape=(3, 16, 16))).item()
    1.0

    References:
        [Cayley] section 5 (WideResNet10-10); Zagoruyko & Komodakis, BMVC 2016.
    """
    family = find(layer)
    channels, rows, columns = check_image(input_shape, 16, "wide_resnet")
    check_classes(classes)
    check_options(options)
    check_positive(kernel_size=kernel_size)
    if depth < 10 or depth % 6 != 4:
        raise OptionError(f"depth: expected 6 n + 4 with n >= 1 (10, 16, 22, ...), got {depth}")
    if widen < 1:
        raise OptionError(f"widen: expected at least 1, got {widen}")
    half = strided_kernel(family, kernel_size, max(1, kernel_size // 2))
    # Layers that contain their activation have none before them either.
    before = [] if family.own_activation else [MaxMin()]

    def block(cin: int, cout: int, stride: int) -> nn.Module:
        first = half if stride > 1 else kernel_size
        body = nn.Sequential(
            *before,
            family.conv(cin, cout, first, stride=stride, **options),
            *before,
            family.conv(cout, cout, kernel_size, **options),
        )
        same = cin == cout and stride == 1
        return Residual(body, shortcut=None if same else family.conv(cin, cout, 1, stride=stride, **options))

    layers: list[nn.Module] = [family.conv(channels, 16, kernel_size, **options)]
    current = 16
    for group, stride in enumerate((1, 2, 2)):
        target = 16 * widen * 2**group
        for i in range((depth - 4) // 6):
            layers.append(block(current, target, stride if i == 0 else 1))
            current = target
    pool_h, pool_w = rows // 8, columns // 8
    if pool_h != pool_w:
        raise OptionError(f"input_shape: expected a square image for the last pooling, got {rows} x {columns}")
    layers += [
        *before,
        ScaledAvgPool2d(pool_h),
        nn.Flatten(),
        *activated(family, family.linear(current * 4, current, **dense_options(family, options))),
        family.last(current, classes),
    ]
    return bounded(layers, lipschitz, mean, std, channels)
