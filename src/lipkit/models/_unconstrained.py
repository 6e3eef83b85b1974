"""Ordinary convolutions and dense layers in the place of a family: the counterparts that the papers compare with."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import CayleyLinear, Family, families


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
