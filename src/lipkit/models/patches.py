"""Networks on patches: PatchNet, BRONet and LiResNet (after the published networks), and a vision transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Unpack

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import (
    BroConv2d,
    LiResConv2d,
    MaxMin,
    MemoryAttention,
    NormalizedLinear,
    PositionCode,
    StiefelConv2d,
    StiefelLinear,
    TokenAttention,
)
from lipkit.models.frame import Common, Image, Layers, architecture, make_activation
from lipkit.modules import Center, L2NormPool2d, MaxMinShift2d, Shift2d


@architecture()
def patchnet(
    image: Image,
    patch: int = 4,
    stages: Sequence[Sequence[int]] = ((64, 4),),
    *,
    narrow: int | None = None,
    dense: Sequence[int] = (512, 512),
    moved: float = 1 / 16,
    activation: str | nn.Module | None = None,
    position: bool = False,
    **common: Unpack[Common],
) -> list[nn.Module]:
    r"""Patches, blocks of pointwise layers with shifts that mix neighbouring pixels, dense layers, unit rows.

    ========== ======================================================================================================
    stage 1    `StiefelConv2d` on patches, then blocks: `StiefelConv2d` 1 x 1, MaxMin, `lipkit.modules.Shift2d`
    stage s    `StiefelConv2d` on 2 x 2 patches of the stage before, then blocks
    narrow     `StiefelConv2d` 1 x 1 to fewer channels, MaxMin
    dense      `StiefelLinear`, MaxMin for each; `NormalizedLinear` with one row for each class
    ========== ======================================================================================================

    Every layer but the last has norm 1 and costs no more than a plain matrix product. Train it with
    `lipkit.training.SpectralDescent` (``train.optimizer: spectral``). The first layer of a stage counts as one of its
    blocks.

    Args:
        patch: p, side of the patches.
        stages: (channels, blocks) of each stage. With fewer channels than numbers in a patch, the patch is projected.
        narrow: channels in front of the dense layers; None keeps those of the last stage.
        dense: units of the hidden dense layers, at least one.
        moved: fraction of the channels that move in each of the four directions; 0 for none.
        activation: name such as 'halfabs', or a module, instead of MaxMin.
        position: whether `lipkit.modules.PositionCode` follows the first layer.
        image: (C, H, W) with H and W multiples of p 2^(stages - 1).

    >>> net = patchnet(2, [(16, 2), (32, 1)], narrow=8, dense=[16], input_shape=(1, 8, 8))
    >>> [type(m).__name__ for m in net][:4]
    ['StiefelConv2d', 'MaxMinShift2d', 'StiefelConv2d', 'MaxMinShift2d']
    >>> net[-1]
    NormalizedLinear(16, 10, bias=True)
    """
    if not stages or not all(isinstance(stage, Sequence) and len(stage) == 2 for stage in stages):
        raise OptionError(f"stages: expected one or more pairs (channels, blocks), got {stages!r}")
    if not dense:
        raise OptionError("dense: expected the units of at least one layer, got none")
    if not 0 <= moved <= 0.25:
        raise OptionError(f"moved: expected a fraction from 0 to 1/4, got {moved}")
    pixels = image.pixels(patch * 2 ** (len(stages) - 1))  # each stage but the first halves the sides again
    layers: list[nn.Module] = []
    width = image.channels
    for number, (wide, blocks) in enumerate(stages):
        for block in range(blocks):
            stride = 1 if block else patch if number == 0 else 2  # the first layer of a stage takes patches
            layers.append(StiefelConv2d(width, wide, 1, stride))
            if position and not number and not block:
                layers.append(PositionCode(wide, *image.divided(patch)))
            width, each = wide, int(wide * moved)  # channels that move in each direction
            if each and activation is None:  # the fused form of the two modules below
                layers.append(MaxMinShift2d(wide, each))
            else:
                layers += [make_activation(activation), *([Shift2d(wide, each)] if each else [])]
    if narrow is not None:
        layers += [StiefelConv2d(width, narrow, 1), make_activation(activation)]
        width = narrow
    sizes = [width * pixels, *dense]
    hidden = [m for p, q in pairwise(sizes) for m in (StiefelLinear(p, q), make_activation(activation))]
    return [*layers, nn.Flatten(), *hidden, NormalizedLinear(sizes[-1], image.classes)]


def backbone(
    image: Image, block: Callable[[int], list[nn.Module]], patch: int, width: int, blocks: int, neck: int | None,
    dense: Sequence[int],
) -> list[nn.Module]:  # fmt: skip
    """The layers of `bronet` and `liresnet`: stem, ``blocks`` times ``block(width)``, neck or pooling, dense layers."""
    if width % 2 or (neck or 2) % 2 or any(n % 2 for n in dense):
        raise OptionError(f"width, neck, dense: expected even numbers for MaxMin, got {width}, {neck}, {list(dense)}")
    made, pixels = Layers("cholesky", {}), image.pixels(patch if neck is None else 2 * patch)
    layers = made.conv(image.channels, width, 1, patch)  # 1 x 1 on whole patches
    layers += [m for _ in range(blocks) for m in block(width)]
    if neck is None:
        layers.append(L2NormPool2d())
    else:
        layers += made.conv(width, neck, 1, 2)
        width = neck * pixels  # of the flattened image
    sizes = [width, *dense]
    return [*layers, nn.Flatten(), *made.dense(*sizes), NormalizedLinear(sizes[-1], image.classes)]


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
        blocks: number of blocks, at least 1; the initial reflectors depend on it (``depth`` of `BroConv2d`).
        rank: of the reflectors, half of the width by default.
        neck: channels after the 2 x 2 patches; None for pooling.
        dense: units of the hidden dense layers.
        image: (C, H, W) with H and W multiples of 2 p (of p with pooling).

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
    neck: int | None = 64,
    dense: Sequence[int] = (512,),
    **common: Unpack[Common],
) -> list[nn.Module]:
    r"""Blocks ``MaxMin(K x + b - mean)`` with kernels K = I + a free part, divided by proved bounds of their norms.

    Stem, neck and dense layers are those of `lipkit.models.bronet`; a block is `LiResConv2d` 3 x 3,
    `lipkit.modules.Center`, MaxMin.

    Args:
        patch, width, neck, dense: as in `bronet`.
        blocks: number of blocks, at least 1; the initial kernels depend on it (``depth`` of `LiResConv2d`).
        padding_mode: of the blocks, 'circular' or 'zeros'.
        image: (C, H, W) with H and W multiples of ``2 patch`` (of ``patch`` with ``neck=None``).

    >>> net = liresnet(2, 16, 2, neck=8, dense=[16], input_shape=(1, 8, 8))
    >>> [type(m).__name__ for m in net][2:5]
    ['LiResConv2d', 'Center', 'MaxMin']

    References:
        Hu, Zou, Wang, Leino & Fredrikson, "Unlocking Deterministic Robustness Certification on ImageNet", NeurIPS 2023
        (there with norms in the loss, zero padding, 12 blocks of 256 channels, and more data).
    """

    def block(n: int) -> list[nn.Module]:
        conv = LiResConv2d(n, n, 3, padding_mode=padding_mode, depth=blocks)  # depth sets the size of the initial noise
        return [conv, Center(n), MaxMin()]

    return backbone(image, block, patch, width, blocks, neck, dense)


@architecture()
def vision_transformer(
    image: Image,
    layer: str = "cayley",
    patch: int = 4,
    width: int = 64,
    depth: int = 2,
    *,
    heads: int = 4,
    slots: int | None = None,
    dense: Sequence[int] = (512,),
    activation: str | nn.Module | None = None,
    **options: Any,
) -> list[nn.Module]:
    r"""Patches as tokens, a position code, ``depth`` blocks of attention and two pointwise layers, dense layers.

    Each attention layer is x plus a gradient step, a skip connection; there are no others, and no normalisation.

    Args:
        layer: acronym of the family of all linear layers (``lipkit list layers``).
        patch, width, depth: side p of the patches, features of a token, number of blocks.
        heads: of `lipkit.layers.TokenAttention`, a divisor of ``width``.
        slots: rows of the `lipkit.layers.MemoryAttention` after the attention in each block; None for no such layer.
        dense: units of the hidden dense layers on all tokens.
        activation: name such as 'relu', or a module, instead of MaxMin; for layers with an inner activation, that one.
        image: (C, H, W) with H and W multiples of p.
        options: options of the family's convolution.

    >>> from lipkit.lowering import lipschitz
    >>> float(lipschitz(vision_transformer(patch=2, width=8, depth=1, heads=2, dense=[16], input_shape=(1, 8, 8))))
    1.0

    References:
        Dosovitskiy et al., ICLR 2021, for the shape.
    """
    made, side = Layers(layer, options, activation), image.divided(patch)  # patches on each side
    layers = [made.bare(image.channels, width, 1, patch), PositionCode(width, *side)]
    for _ in range(depth):
        layers.append(TokenAttention(width, heads=heads))
        if slots is not None:
            layers.append(MemoryAttention(width, slots))
        layers += [*made.conv(width, width, 1), *made.conv(width, width, 1)]
    sizes = [width * image.pixels(patch), *dense]
    return [*layers, nn.Flatten(), *made.dense(*sizes), made.last(sizes[-1], image.classes)]
