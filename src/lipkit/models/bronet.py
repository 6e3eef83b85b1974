"""BRONet: block reflectors on patches, then dense Cholesky layers; after the network of that name, for one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import BroConv2d, CholeskyConv2d, CholeskyLinear, MaxMin, NormalizedLinear
from lipkit.layers.base import check_positive
from lipkit.models._parts import bounded, check_classes, check_image
from lipkit.modules import L2NormPool2d, Shape


def backbone(
    block: Callable[[int], list[nn.Module]],
    patch: int,
    width: int,
    blocks: int,
    neck: int | None,
    dense: Sequence[int],
    input_shape: Shape,
    classes: int,
) -> list[nn.Module]:
    """Patches, ``blocks`` times ``block(width)``, 2 x 2 patches or pooling, dense layers, unit rows.

    Raises:
        OptionError: sizes that are no integers of at least 1, or no dense layer. ShapeError: another input shape.
    """
    check_positive(patch=patch, width=width, blocks=blocks, **({} if neck is None else {"neck": neck}))
    check_positive(**{f"dense[{i}]": n for i, n in enumerate(dense)})
    if width % 2 or (neck or 2) % 2 or any(n % 2 for n in dense):
        raise OptionError(f"width, neck, dense: expected even numbers for MaxMin, got {width}, {neck}, {list(dense)}")
    check_classes(classes)
    factor = patch if neck is None else 2 * patch
    channels, rows, columns = check_image(input_shape, factor, "backbone")
    layers: list[nn.Module] = [CholeskyConv2d(channels, width, 1, patch), MaxMin()]
    for _ in range(blocks):
        layers += block(width)
    if neck is None:
        layers.append(L2NormPool2d())
    else:
        layers += [CholeskyConv2d(width, neck, 1, 2), MaxMin()]
        width = neck * (rows // factor) * (columns // factor)
    layers.append(nn.Flatten())
    for units in dense:
        layers += [CholeskyLinear(width, units), MaxMin()]
        width = units
    return [*layers, NormalizedLinear(width, classes)]


def bronet(
    patch: int = 4,
    width: int = 64,
    blocks: int = 6,
    *,
    rank: int | None = None,
    neck: int | None = 64,
    dense: Sequence[int] = (512,),
    input_shape: Shape = (3, 32, 32),
    classes: int = 10,
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Sequential:
    r"""Orthogonal 3 x 3 convolutions by block reflectors between a stem on patches and a neck of Cholesky layers.

    ========== ======================================================================================================
    stem       `CholeskyConv2d` on p x p patches, MaxMin
    blocks     `BroConv2d` 3 x 3, MaxMin
    neck       `CholeskyConv2d` on 2 x 2 patches, MaxMin; or `lipkit.modules.L2NormPool2d` of the whole image
    dense      `CholeskyLinear`, MaxMin for each; `NormalizedLinear` with one row for each class
    ========== ======================================================================================================

    Args:
        patch: p, side of the patches.
        width: channels of the blocks, even.
        blocks: how many, at least 1; also the depth from which the reflectors start.
        rank: of the reflectors, half of the width by default.
        neck: channels behind the 2 x 2 patches; None for pooling.
        dense: units of the hidden dense layers.
        input_shape: (C, H, W) with H and W multiples of 2 p (of p with pooling).
        classes: number of outputs.
        lipschitz: target constant of the network in front of its last layer.
        mean, std: input normalisation, part of the network.

    Raises:
        OptionError: sizes that are not as above. ShapeError: another input shape.

    >>> net = bronet(2, 16, 2, neck=8, dense=[16], input_shape=(1, 8, 8))
    >>> [type(m).__name__ for m in net][:4], net[-1]
    (['CholeskyConv2d', 'MaxMin', 'BroConv2d', 'MaxMin'], NormalizedLinear(16, 10, bias=True))

    References:
        Lai et al., "Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing Loss",
        ICML 2025 (there with an unconstrained stem, zero padding, up to 12 blocks of 512 channels, and more data).
    """

    def block(n: int) -> list[nn.Module]:
        return [BroConv2d(n, n, 3, rank=rank, depth=blocks), MaxMin()]

    layers = backbone(block, patch, width, blocks, neck, dense, input_shape, classes)
    return bounded(layers, lipschitz, mean, std, input_shape[0])
