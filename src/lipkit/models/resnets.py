"""Residual networks: ResNet9 and wide ones of constant 1 (convex skips, norm-1 pooling), and ones without a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import Residual, ScaledAvgPool2d
from lipkit.models.frame import Common, Image, Layers, architecture
from lipkit.modules import Add, Graph


@architecture()
def resnet9(
    image: Image, layer: str = "cayley", width: int = 64, *, kernel_size: int = 3, **options: Any
) -> list[nn.Module]:
    """Six convolutions and two skips: w, 2w, pool, [2w, 2w], 4w, pool, 8w, pool, [8w, 8w], pool, two linear layers.

    The last pooling has windows of 2 x 2 instead of 4 x 4, which leaves four times the features for the additional
    linear layer.

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
    (unconstrained ones have a real stride and the whole kernel). The windows of the last pooling have half the usual
    side (4 instead of 8 for 32 x 32 images); one more linear layer follows.

    Args:
        depth: 6 n + 4 with n >= 1.
        widen: widening factor, at least 1.
        layer, options: as in `resnet9`.
        kernel_size: of the layers of stride 1.
        image: (C, H, W) with H and W multiples of 16, and equal.

    >>> from lipkit.lowering import lipschitz
    >>> lipschitz(wide_resnet(10, 1, input_shape=(3, 16, 16))).item()
    1.0

    References:
        [Cayley] section 5 (WideResNet10-10); Zagoruyko & Komodakis, BMVC 2016.
    """
    made = Layers(layer, options)
    rows, columns = image.divided(16)
    if rows != columns:
        got = f"{image.rows} x {image.columns}"
        raise OptionError(f"input_shape: expected a square image for the last pooling, got {got}")

    def block(cin: int, cout: int, stride: int) -> nn.Module:
        first = made.bare(cin, cout, made.strided(kernel_size) if stride > 1 else kernel_size, stride)
        # Here the activation comes first; `behind` gives none to layers that contain their own.
        body = nn.Sequential(*made.behind(), first, *made.behind(), made.bare(cout, cout, kernel_size))
        same = cin == cout and stride == 1  # else the skip needs a layer of its own
        return Residual(body, shortcut=None if same else made.bare(cin, cout, 1, stride))

    first = made.bare(image.channels, 16, kernel_size)
    blocks, current = _groups(depth, widen, block)
    pool = [*made.behind(), ScaledAvgPool2d(2 * rows), nn.Flatten()]  # leaves 2 x 2 pixels of 4 rows x 4 rows
    return [first, *blocks, *pool, *made.dense(current * 4, current), made.last(current, image.classes)]


@architecture()
def wrn_plain(
    image: Image, depth: int = 28, widen: int = 10, *, dropout: float = 0.0, **common: Unpack[Common]
) -> list[nn.Module]:
    """WRN-depth-widen with batch norm and ReLU, without a bound: a chain of torch's modules and graphs that add a skip.

    conv 16; three groups of (depth - 4) / 6 blocks (norm, ReLU, conv, norm, ReLU, dropout, conv, added to their input)
    with 16, 32, 64 times ``widen`` channels, the second and third at half the size; norm, ReLU, mean over the image,
    linear. Where the channels change, the skip is a 1 x 1 convolution of the activated input.

    Args:
        depth: 6 n + 4 with n >= 1.
        widen: widening factor, at least 1.
        image: (C, H, W) with H and W multiples of 4.
        dropout: probability, in [0, 1).

    >>> sum(p.numel() for p in wrn_plain(28, 10).parameters())
    36479194

    References:
        Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016; WRN-28-10 is the network of [LipBound] section 6.
    """
    pool = nn.AvgPool2d(image.divided(4))
    if not 0 <= dropout < 1:
        raise OptionError(f"dropout: expected a probability in [0, 1), got {dropout}")
    first = _conv(image.channels, 16, 3)
    blocks, current = _groups(depth, widen, lambda cin, cout, stride: _block(cin, cout, stride, dropout))
    return [first, *blocks, *_activated(current), pool, nn.Flatten(), nn.Linear(current, image.classes)]


@architecture(input_shape=(3, 224, 224), classes=1000)
def resnet_plain(
    image: Image, blocks: Sequence[int] = (3, 4, 23, 3), width: int = 64, **common: Unpack[Common]
) -> list[nn.Module]:
    """ResNet of bottlenecks with batch norm and ReLU, without a bound: (3, 4, 23, 3) blocks are ResNet-101.

    conv 7 x 7 of ``width`` channels with stride 2, max pooling of 3 with stride 2; four stages of blocks (conv 1 x 1,
    3 x 3, 1 x 1 to four times the channels, each with batch norm, added to their input) with 1, 2, 4, 8 times
    ``width`` channels, of which all but the first begin with stride 2 in a 3 x 3; mean over the image; linear.

    Args:
        blocks: of the four stages, at least 1 each; (3, 4, 6, 3) is ResNet-50, (3, 8, 36, 3) ResNet-152.
        width: channels of the first layer, 64 in the paper.
        image: (C, H, W) with H and W multiples of 32.

    >>> len(resnet_plain((1, 1, 1, 1), 4, input_shape=(3, 32, 32), classes=10))
    15

    References:
        He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016; ResNet-101 is the network of
        [LipBound] table 3.
    """
    pool = nn.AvgPool2d(image.divided(32))  # the whole image at the end of the stages
    if len(blocks) != 4:
        raise OptionError(f"blocks: expected those of four stages, got {list(blocks)}")
    layers: list[nn.Module] = [_conv(image.channels, width, 7, 2), *_activated(width), nn.MaxPool2d(3, 2, 1)]
    current = width
    for stage, count in enumerate(blocks):
        inner, cout = width * 2**stage, 4 * width * 2**stage
        for i in range(count):
            stride = 2 if stage and not i else 1  # the first stage follows the pooling
            body = [
                _conv(current, inner, 1), *_activated(inner), _conv(inner, inner, 3, stride), *_activated(inner),
                _conv(inner, cout, 1), nn.BatchNorm2d(cout),
            ]  # fmt: skip
            skip = nn.Identity() if current == cout and stride == 1 else nn.Sequential(
                _conv(current, cout, 1, stride), nn.BatchNorm2d(cout)
            )  # fmt: skip
            layers += [_sum(nn.Sequential(*body), skip), nn.ReLU()]
            current = cout
    return [*layers, pool, nn.Flatten(), nn.Linear(current, image.classes)]


def _groups(depth: int, widen: int, block: Callable[[int, int, int], nn.Module]) -> tuple[list[nn.Module], int]:
    """The groups of a wide residual network after 16 channels, by ``block(cin, cout, stride)``; and the last width."""
    if depth < 10 or depth % 6 != 4:
        raise OptionError(f"depth: expected 6 n + 4 with n >= 1 (10, 16, 22, 28, ...), got {depth}")
    blocks, widths = list[nn.Module](), [16, 16 * widen, 32 * widen, 64 * widen]
    for (current, target), stride in zip(pairwise(widths), (1, 2, 2), strict=True):
        blocks.append(block(current, target, stride))
        blocks += [block(target, target, 1) for _ in range((depth - 4) // 6 - 1)]
    return blocks, widths[-1]


def _conv(cin: int, cout: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(cin, cout, size, stride, size // 2, bias=False)
    with torch.no_grad():
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _sum(body: nn.Module, skip: nn.Module) -> Graph:
    return Graph([body, skip, Add(1, 1)], [[0], [0], [1, 2]])


def _activated(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU()]


def _block(cin: int, cout: int, stride: int, dropout: float) -> nn.Module:
    middle: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    body = [_conv(cin, cout, 3, stride), *_activated(cout), *middle, _conv(cout, cout, 3)]
    if cin == cout and stride == 1:
        return _sum(nn.Sequential(*_activated(cin), *body), nn.Identity())
    return nn.Sequential(*_activated(cin), _sum(nn.Sequential(*body), _conv(cin, cout, 1, stride)))
