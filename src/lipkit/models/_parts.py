"""Parts of the architectures: checked options, head and tail of the target constant, unconstrained counterparts."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import CayleyLinear, Family, MaxMin, Normalize, Scale, families
from lipkit.modules import GroupSort, HalfAbs, Shape
from lipkit.modules.activations import BY_NAME, slope_restricted

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "maxmin": MaxMin,
    "halfabs": HalfAbs,
    **BY_NAME,
}


def check_image(input_shape: Shape, multiple: int, model: str) -> tuple[int, int, int]:
    """(C, H, W), or ``ShapeError`` unless H and W are multiples of ``multiple``."""
    shape = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    sizes = len(shape) == 3 and all(type(n) is int and n >= 1 for n in shape)
    if not sizes or shape[1] % multiple or shape[2] % multiple:
        raise ShapeError(
            f"{model}: expected an input shape (C, H, W) with H and W multiples of {multiple}, got {input_shape}"
        )
    return shape[0], shape[1], shape[2]


def check_classes(classes: int) -> None:
    """Raise ``OptionError`` unless there are at least two classes."""
    if type(classes) is not int or classes < 2:
        raise OptionError(f"classes: expected an integer of at least 2, got {classes!r}")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ``OptionError`` for options that would reach only the convolutions and so break the model."""
    for name in ("device", "dtype"):
        if name in options:
            raise OptionError(f"{name}: expected no such option, got {options[name]}: move the whole model with .to()")


def bounded(
    layers: Sequence[nn.Module],
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channels: int | None = None,
) -> nn.Sequential:
    """A chain with an optional input normalisation in front and a gain of ``lipschitz`` after it.

    The gain comes before the layers, so that the last module of a classifier stays its last linear layer. Dividing
    by std multiplies the constant of the whole network by ``1 / min(std)``; ``lipschitz`` is that of the rest.
    """
    head: list[nn.Module] = []
    if (mean is None) != (std is None):
        raise OptionError(f"mean and std: expected both or neither, got mean={mean}, std={std}")
    if mean is not None and std is not None:
        if channels is not None and len(mean) != channels:
            raise OptionError(f"mean and std: expected {channels} numbers, one per channel, got mean={mean}")
        head.append(Normalize(mean, std))
    if lipschitz != 1.0:
        head.append(Scale(lipschitz))
    return nn.Sequential(*head, *layers)


def split_gain(model: nn.Module) -> nn.Module:
    """A chain whose gain is in equal parts: the m-th root of L in front of each of its m layers with parameters.

    A residual block is one layer. Without biases the function is the same where activations are homogeneous.

    References:
        [Cayley] section 5.1, "Ensuring Lipschitz constraints".
    """
    gain = next((layer for layer in model.children() if isinstance(layer, Scale)), None)
    if gain is None:  # of 1
        return model
    layers = [layer for layer in model.children() if layer is not gain]
    owners = [layer for layer in layers if next(layer.parameters(), None) is not None]
    part = float(gain.gamma()) ** (1 / len(owners))
    return nn.Sequential(*(m for layer in layers for m in ((Scale(part), layer) if layer in owners else (layer,))))


def flat_size(input_shape: Shape) -> int:
    """How many numbers one input has; ``ShapeError`` unless the shape is positive integers."""
    shape = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    if not shape or not all(type(n) is int and n >= 1 for n in shape):
        raise ShapeError(f"input_shape: expected positive sizes without the batch, got {input_shape!r}")
    return math.prod(shape)


def make_activation(activation: str | nn.Module | None) -> nn.Module:
    """The activation of this name, or a copy of this module; ``None`` is MaxMin.

    >>> make_activation(None), make_activation("relu")
    (MaxMin(), ReLU())
    """
    if activation is None:
        return MaxMin()
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return ACTIVATIONS[activation]()
    sorting = type(activation) in (MaxMin, GroupSort, HalfAbs)
    if isinstance(activation, nn.Module) and (sorting or slope_restricted(activation)):
        return copy.deepcopy(activation)
    raise OptionError(
        f"activation: expected one of {', '.join(sorted(ACTIVATIONS))}, or a module of these types, got {activation!r}"
    )


def activated(family: Family, layer: nn.Module, activation: str | nn.Module | None = None) -> list[nn.Module]:
    """The layer and an activation after it (MaxMin by default), or the layer alone if it contains its own."""
    return [layer] if family.own_activation else [layer, make_activation(activation)]


def dense_options(family: Family, options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a convolution's options that goes to the dense layers too: the activation they contain."""
    return {k: v for k, v in options.items() if family.own_activation and k == "activation"}


def plain_conv2d(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, *, padding_mode: Any = "zeros", **named: Any
) -> nn.Conv2d:
    """``nn.Conv2d`` with odd kernels whose output is as large as the input divided by the stride.

    >>> plain_conv2d(3, 8, 3, stride=2).padding
    (1, 1)
    """
    if kernel_size % 2 == 0:
        raise OptionError(f"kernel_size: expected an odd number for plain convolutions, got {kernel_size}")
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, kernel_size // 2, padding_mode=padding_mode, **named
    )


_COMMON: dict[str, Any] = {"paper": "", "equation": "", "claim": "none", "sizes": "odd kernels, any image"}

# Not in the table of families: nothing constrains them, so the laws of that table are not theirs.
UNCONSTRAINED: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="plain", title="nn.Conv2d and nn.Linear", conv=plain_conv2d, linear=nn.Linear, **_COMMON),
        Family(
            name="plain_conv",
            title="circular nn.Conv2d, dense layers by the Cayley transform",
            conv=partial(plain_conv2d, padding_mode="circular"),
            linear=CayleyLinear,
            **_COMMON,
        ),
    )
}


def find(name: str) -> Family:
    """The family of this acronym, or one of the two unconstrained ones.

    Raises:
        OptionError: unknown acronym; the message lists the known ones.

    >>> find("plain").linear.__name__, find("cayley").linear.__name__
    ('Linear', 'CayleyLinear')
    """
    if name in UNCONSTRAINED:
        return UNCONSTRAINED[name]
    try:
        return families.get(name)
    except OptionError as error:
        raise OptionError(str(error).replace(", got ", f", {', '.join(UNCONSTRAINED)}, got ", 1)) from None


def strided_kernel(family: Family, kernel_size: int, emulated: int) -> int:
    """Kernel of a strided layer: ``emulated`` where the stride is an invertible downsampling, else the usual one.

    >>> strided_kernel(find("cayley"), 3, 1), strided_kernel(find("plain"), 3, 1)
    (1, 3)
    """
    return kernel_size if family.name in UNCONSTRAINED else emulated
