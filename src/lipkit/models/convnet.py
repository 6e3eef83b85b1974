"""A small network of ordinary convolutions: unconstrained, the plain sibling of ``small``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lipkit.errors import OptionError
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
    channels, height, breadth = check_image(input_shape, 4, "convnet")
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
    layers += [nn.Flatten(), nn.Linear(cin * height * breadth // 16, 64 * width, bias=not batch_norm)]
    layers += [nn.BatchNorm1d(64 * width), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return bounded([*layers, nn.Linear(64 * width, classes)], 1.0, mean, std, channels)
