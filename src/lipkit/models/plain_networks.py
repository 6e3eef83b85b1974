"""Networks of unconstrained layers: a small convolutional one, wide residual and deep residual ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from lipkit.errors import OptionError
from lipkit.models.frame import Common, Image, architecture, check_flag, check_sizes
from lipkit.modules import Add, Graph


@architecture(input_shape=(1, 8, 8))
def convnet(image: Image, width: int = 1, *, batch_norm: bool = True, **common: Unpack[Common]) -> list[nn.Module]:
    """conv 16w, conv 32w /2, conv 32w /2, linear 64w, linear classes; 3 x 3 kernels, batch norm and ReLU between.

    Args:
        width: w, multiplies the channels.
        image: (C, H, W) with H and W multiples of 4.
        batch_norm: whether batch norm follows each hidden layer (which then has no bias of its own).

    >>> [type(m).__name__ for m in convnet(batch_norm=False)][:3], convnet()[-1].out_features
    (['Conv2d', 'ReLU', 'Conv2d'], 10)
    """
    pixels = image.pixels(4)
    check_sizes(width=width)
    check_flag(batch_norm=batch_norm)
    layers: list[nn.Module] = []
    cin = image.channels
    for cout, stride in ((16 * width, 1), (32 * width, 2), (32 * width, 2)):
        layers.append(nn.Conv2d(cin, cout, 3, stride, 1, bias=not batch_norm))  # batch norm has a bias itself
        layers += [nn.BatchNorm2d(cout), nn.ReLU()] if batch_norm else [nn.ReLU()]
        cin = cout
    layers += [nn.Flatten(), nn.Linear(cin * pixels, 64 * width, bias=not batch_norm)]
    layers += [nn.BatchNorm1d(64 * width), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return [*layers, nn.Linear(64 * width, image.classes)]


@architecture()
def wrn_plain(
    image: Image, depth: int = 28, widen: int = 10, *, dropout: float = 0.0, **common: Unpack[Common]
) -> list[nn.Module]:
    """WRN-depth-widen with batch norm and ReLU, and no bound: a chain of torch's modules and graphs that add a skip.

    conv 16; three groups of (depth - 4) / 6 blocks (norm, ReLU, conv, norm, ReLU, dropout, conv, added to their input)
    with 16, 32, 64 times ``widen`` channels, the second and third at half the size; norm, ReLU, mean over the image,
    linear. Where the channels change, the skip is a 1 x 1 convolution of the activated input.

    Args:
        depth: 6 n + 4.
        widen: widening factor.
        image: (C, H, W) with H and W multiples of 4.
        dropout: probability, in [0, 1).

    Raises:
        OptionError: depth is not 6 n + 4 with n >= 1, or another option outside its range.

    >>> sum(p.numel() for p in wrn_plain(28, 10).parameters())
    36479194

    References:
        Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016; WRN-28-10 is the network of [LipBound] section 6.
    """
    pool = nn.AvgPool2d(image.divided(4))
    check_sizes(depth=depth, widen=widen)
    if depth < 10 or depth % 6 != 4:
        raise OptionError(f"depth: expected 6 n + 4 with n >= 1 (10, 16, 22, 28, ...), got {depth}")
    if not 0 <= dropout < 1:
        raise OptionError(f"dropout: expected a probability in [0, 1), got {dropout}")

    layers: list[nn.Module] = [_conv(image.channels, 16, 3)]
    current = 16
    for group, stride in enumerate((1, 2, 2)):
        target = 16 * widen * 2**group
        for i in range((depth - 4) // 6):
            layers.append(_block(current, target, stride if i == 0 else 1, dropout))
            current = target
    return [*layers, *_activated(current), pool, nn.Flatten(), nn.Linear(current, image.classes)]


@architecture(input_shape=(3, 224, 224), classes=1000)
def resnet_plain(
    image: Image, blocks: Sequence[int] = (3, 4, 23, 3), width: int = 64, **common: Unpack[Common]
) -> list[nn.Module]:
    """ResNet of bottlenecks with batch norm and ReLU, and no bound: (3, 4, 23, 3) blocks are ResNet-101.

    conv 7 x 7 of ``width`` channels with stride 2, max pooling of 3 with stride 2; four stages of blocks (conv 1 x 1,
    3 x 3, 1 x 1 to four times the channels, each with batch norm, added to their input) with 1, 2, 4, 8 times
    ``width`` channels, after the first at half the size by the first 3 x 3; mean over the image; linear.

    Args:
        blocks: of the four stages; (3, 4, 6, 3) is ResNet-50, (3, 8, 36, 3) ResNet-152.
        width: channels of the first layer, 64 in the paper.
        image: (C, H, W) with H and W multiples of 32.

    Raises:
        OptionError: not four stages of at least one block.

    >>> len(resnet_plain((1, 1, 1, 1), 4, input_shape=(3, 32, 32), classes=10))
    15

    References:
        He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016; ResNet-101 is the network of
        [LipBound] table 3.
    """
    pool = nn.AvgPool2d(image.divided(32))  # the whole image at the end of the stages
    if len(blocks) != 4:
        raise OptionError(f"blocks: expected those of four stages, got {list(blocks)}")
    check_sizes(width=width, blocks=blocks)
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
