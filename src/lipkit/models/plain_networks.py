"""Networks of ordinary layers, which nothing constrains: a small convolutional one, and wide residual ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import Sum
from lipkit.layers.base import check_positive
from lipkit.models._parts import bounded, check_classes, check_image
from lipkit.modules import Shape


def convnet(
    width: int = 1,
    *,
    input_shape: Shape = (1, 8, 8),
    classes: int = 10,
    batch_norm: bool = True,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Sequential:
    """conv 16w, conv 32w /2, conv 32w /2, linear 64w, linear classes; 3 x 3 kernels, batch norm and ReLU between.

    Args:
        width: w, multiplies the channels.
        input_shape: (C, H, W) with H and W multiples of 4.
        classes: number of outputs.
        batch_norm: whether batch norm follows each hidden layer (which then has no bias of its own).
        mean, std: input normalisation, part of the network.

    >>> [type(m).__name__ for m in convnet(batch_norm=False)][:3], convnet()[-1].out_features
    (['Conv2d', 'ReLU', 'Conv2d'], 10)
    """
    channels, rows, columns = check_image(input_shape, 4, "convnet")
    check_classes(classes)
    check_positive(width=width)
    if not isinstance(batch_norm, bool):
        raise OptionError(f"batch_norm: expected true or false, got {batch_norm!r}")
    layers: list[nn.Module] = []
    cin = channels
    for cout, stride in ((16 * width, 1), (32 * width, 2), (32 * width, 2)):
        layers.append(nn.Conv2d(cin, cout, 3, stride, 1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(cout), nn.ReLU()] if batch_norm else [nn.ReLU()]
        cin = cout
    layers += [nn.Flatten(), nn.Linear(cin * rows * columns // 16, 64 * width, bias=not batch_norm)]
    layers += [nn.BatchNorm1d(64 * width), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return bounded([*layers, nn.Linear(64 * width, classes)], 1.0, mean, std, channels)


def wrn_plain(
    depth: int = 28,
    widen: int = 10,
    *,
    input_shape: Shape = (3, 32, 32),
    classes: int = 10,
    dropout: float = 0.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Sequential:
    """WRN-depth-widen with batch norm and ReLU, and no bound: a chain of torch's modules and ``Sum``.

    conv 16; three groups of (depth - 4) / 6 blocks (norm, ReLU, conv, norm, ReLU, dropout, conv, added to their input)
    with 16, 32, 64 times ``widen`` channels, the second and third at half the size; norm, ReLU, mean over the image,
    linear. Where the channels change, the skip is a 1 x 1 convolution of the activated input.

    Args:
        depth: 6 n + 4.
        widen: widening factor.
        input_shape: (C, H, W) with H and W multiples of 4.
        classes: number of outputs.
        dropout: probability, in [0, 1).
        mean, std: input normalisation, part of the network.

    Raises:
        OptionError: depth is not 6 n + 4 with n >= 1, or another option outside its range.

    >>> sum(p.numel() for p in wrn_plain(28, 10).parameters())
    36479194

    References:
        Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016; WRN-28-10 is the network of [LipBound] section 6.
    """
    channels, rows, columns = check_image(input_shape, 4, "wrn_plain")
    check_classes(classes)
    check_positive(depth=depth, widen=widen)
    if depth < 10 or depth % 6 != 4:
        raise OptionError(f"depth: expected 6 n + 4 with n >= 1 (10, 16, 22, 28, ...), got {depth}")
    if not 0 <= dropout < 1:
        raise OptionError(f"dropout: expected a probability in [0, 1), got {dropout}")

    layers: list[nn.Module] = [_conv(channels, 16, 3)]
    current = 16
    for group, stride in enumerate((1, 2, 2)):
        target = 16 * widen * 2**group
        for i in range((depth - 4) // 6):
            layers.append(_block(current, target, stride if i == 0 else 1, dropout))
            current = target
    layers += [
        *_activated(current),
        nn.AvgPool2d((rows // 4, columns // 4)),
        nn.Flatten(),
        nn.Linear(current, classes),
    ]
    return bounded(layers, 1.0, mean, std, channels)


def _conv(cin: int, cout: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(cin, cout, size, stride, size // 2, bias=False)
    with torch.no_grad():
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _activated(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU()]


def _block(cin: int, cout: int, stride: int, dropout: float) -> nn.Module:
    middle: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    body = [_conv(cin, cout, 3, stride), *_activated(cout), *middle, _conv(cout, cout, 3)]
    if cin == cout and stride == 1:
        return Sum(nn.Sequential(*_activated(cin), *body), nn.Identity())
    return nn.Sequential(*_activated(cin), Sum(nn.Sequential(*body), _conv(cin, cout, 1, stride)))
