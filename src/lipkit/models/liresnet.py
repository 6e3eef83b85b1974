"""LiResNet: linear residual blocks on patches, then dense Cholesky layers; after the network of that name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from lipkit.layers import LiResConv2d, MaxMin
from lipkit.models.bronet import backbone
from lipkit.models.frame import Common, Image, architecture
from lipkit.modules import Center


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
