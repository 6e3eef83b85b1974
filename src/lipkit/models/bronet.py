"""BRONet and LiResNet: one backbone of patches, blocks and dense Cholesky layers; after the networks, for one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Unpack

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import BroConv2d, CholeskyConv2d, CholeskyLinear, LiResConv2d, MaxMin, NormalizedLinear
from lipkit.models._parts import check_sizes
from lipkit.models.frame import Common, Image, architecture
from lipkit.modules import Center, L2NormPool2d


def backbone(
    image: Image,
    block: Callable[[int], list[nn.Module]],
    patch: int,
    width: int,
    blocks: int,
    neck: int | None,
    dense: Sequence[int],
) -> list[nn.Module]:
    """Patches, ``blocks`` times ``block(width)``, 2 x 2 patches or pooling, dense layers, unit rows."""
    check_sizes(patch=patch, width=width, blocks=blocks, neck=2 if neck is None else neck, dense=dense)
    if width % 2 or (neck or 2) % 2 or any(n % 2 for n in dense):
        raise OptionError(f"width, neck, dense: expected even numbers for MaxMin, got {width}, {neck}, {list(dense)}")
    pixels = image.pixels(patch if neck is None else 2 * patch)
    layers: list[nn.Module] = [CholeskyConv2d(image.channels, width, 1, patch), MaxMin()]
    for _ in range(blocks):
        layers += block(width)
    if neck is None:
        layers.append(L2NormPool2d())
    else:
        layers += [CholeskyConv2d(width, neck, 1, 2), MaxMin()]
        width = neck * pixels
    sizes = [width, *dense]
    hidden = [m for p, q in pairwise(sizes) for m in (CholeskyLinear(p, q), MaxMin())]
    return [*layers, nn.Flatten(), *hidden, NormalizedLinear(sizes[-1], image.classes)]


@architecture()
def bronet(
    image: Image,
    patch: int = 4,
    width: int = 64,
    blocks: int = 6,
    *,
    rank: int | None = None,
    neck: int | None = 64,
    dense: Sequence[int] = (512,),
    **common: Unpack[Common],
) -> list[nn.Module]:
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
        image: (C, H, W) with H and W multiples of 2 p (of p with pooling).

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

    return backbone(image, block, patch, width, blocks, neck, dense)


@architecture()
def liresnet(
    image: Image,
    patch: int = 4,
    width: int = 64,
    blocks: int = 6,
    *,
    padding_mode: str = "circular",
    center: bool = True,
    neck: int | None = 64,
    dense: Sequence[int] = (512,),
    **common: Unpack[Common],
) -> list[nn.Module]:
    r"""Blocks ``MaxMin(K x + b - mean)`` with K = I + noise, each divided by a proved bound of its norm.

    Stem, neck and dense layers are those of `lipkit.models.bronet`; a block is `LiResConv2d` 3 x 3,
    `lipkit.modules.Center`, MaxMin.

    Args:
        patch: side of the patches.
        width: channels of the blocks, even.
        blocks: how many, at least 1; also the depth from which the kernels start.
        padding_mode: of the blocks, 'circular' or 'zeros'.
        center: whether the blocks subtract the mean of each channel.
        neck: channels behind the 2 x 2 patches; None for l2 pooling of the whole image.
        dense: units of the hidden dense layers.
        image: (C, H, W) with H and W multiples of 2 p (of p with pooling).

    Raises:
        OptionError: sizes that are not as above. ShapeError: another input shape.

    >>> net = liresnet(2, 16, 2, neck=8, dense=[16], input_shape=(1, 8, 8))
    >>> [type(m).__name__ for m in net][2:5]
    ['LiResConv2d', 'Center', 'MaxMin']

    References:
        Hu, Zou, Wang, Leino & Fredrikson, "Unlocking Deterministic Robustness Certification on ImageNet", NeurIPS 2023
        (there with norms in the loss, zero padding, 12 blocks of 256 channels, and more data).
    """

    def block(n: int) -> list[nn.Module]:
        conv = LiResConv2d(n, n, 3, padding_mode=padding_mode, depth=blocks)
        return [conv, *([Center(n)] if center else []), MaxMin()]

    return backbone(image, block, patch, width, blocks, neck, dense)
