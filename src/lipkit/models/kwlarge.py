"""KWLarge: the convolutional network of the certified-robustness tables; and a small sibling for 8 x 8 to 28 x 28."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import families
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


def kwlarge(
    layer: str = "cayley",
    width: int = 1,
    *,
    kernel_size: int = 3,
    dense: Sequence[int] | None = None,
    activation: str | nn.Module | None = None,
    pool: bool = False,
    input_shape: Shape = (3, 32, 32),
    classes: int = 10,
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
    """conv 32w, conv 32w /2, conv 64w, conv 64w /2, linear 512w, linear 512, linear classes; MaxMin between
    (families whose layers contain their activation have theirs).

    Args:
        layer: acronym of the family (``lipkit list layers``), or ``plain`` or ``plain_conv``: unconstrained.
        width: w, multiplies the channels.
        kernel_size: of the layers of stride 1; strided layers act on 4 times the channels with half of it, rounded
            down (3 -> 1); unconstrained ones have a stride, and the whole kernel.
        dense: units of the two hidden linear layers instead of (512w, 512).
        activation: name such as 'relu', or a module, instead of MaxMin; for layers with an inner activation, that one.
        pool: no strides, but the sums of 4 x 4 pixels over 4 (of norm 1, as in the code that [LBDN] published) in
            front of the linear layers, for families that have no strided layer in the papers.
        input_shape: (C, H, W) with H and W multiples of 4.
        classes: number of outputs.
        lipschitz: target constant of the network behind the normalisation.
        mean, std: input normalisation, part of the network.
        options: options of the family's convolution.

    >>> from lipkit.modules import lipschitz
    >>> float(lipschitz(kwlarge(input_shape=(3, 8, 8))))
    1.0

    References:
        [Cayley] section 5; Wong & Kolter's "large" network as used by Li et al., NeurIPS 2019; [LBDN] table 5 (dense,
        activation, pool).
    """
    family = find(layer)
    channels, rows, columns = check_image(input_shape, 4, "kwlarge")
    check_classes(classes)
    check_options(options)
    check_positive(kernel_size=kernel_size)
    units = [512 * width, 512] if dense is None else list(dense)
    if len(units) != 2:
        raise OptionError(f"dense: expected the units of two layers, got {dense!r}")
    check_positive(**{f"dense[{i}]": n for i, n in enumerate(units)})
    if family.own_activation and activation is not None:
        options["activation"] = activation

    def conv(cin: int, cout: int, stride: int) -> list[nn.Module]:
        if stride == 1 or pool:
            return activated(family, family.conv(cin, cout, kernel_size, **options), activation)
        kernel = strided_kernel(family, kernel_size, max(1, kernel_size // 2))
        return activated(family, family.conv(cin, cout, kernel, stride=stride, **options), activation)

    features = 64 * width * (rows // 4) * (columns // 4)
    shared = dense_options(family, options)
    layers = [
        *conv(channels, 32 * width, 1),
        *conv(32 * width, 32 * width, 2),
        *conv(32 * width, 64 * width, 1),
        *conv(64 * width, 64 * width, 2),
        *([nn.AvgPool2d(4, divisor_override=4)] if pool else []),
        nn.Flatten(),
        *activated(family, family.linear(features, units[0], **shared), activation),
        *activated(family, family.linear(units[0], units[1], **shared), activation),
        family.last(units[1], classes),
    ]
    return bounded(layers, lipschitz, mean, std, channels)


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
    _, rows, columns = check_image(input_shape, 2, "small")
    twice = max(rows, columns) > 12
    channels, rows, columns = check_image(input_shape, 4 if twice else 2, "small")
    check_classes(classes)
    check_options(options)
    dense = dense_options(family, options)
    layers = [
        *activated(family, family.conv(channels, 16 * width, kernel_size, **options)),
        *activated(family, family.conv(16 * width, 32 * width, 1, stride=2, **options)),
    ]
    if twice:
        layers += activated(family, family.conv(32 * width, 32 * width, 1, stride=2, **options))
    pixels = rows * columns // (16 if twice else 4)
    layers += [
        nn.Flatten(),
        *activated(family, family.linear(32 * width * pixels, 256 * width, **dense)),
        family.last(256 * width, classes),
    ]
    return bounded(layers, lipschitz, mean, std, channels)
