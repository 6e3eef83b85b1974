"""PatchNet: orthogonal layers on patches and their neighbours, then dense ones: certified accuracy in little time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Unpack

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import NormalizedLinear, StiefelConv2d, StiefelLinear
from lipkit.models._parts import check_sizes, make_activation
from lipkit.models.frame import Common, Image, architecture
from lipkit.modules import MaxMinShift2d, PositionCode, Shift2d


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
    r"""Patches, blocks of pointwise layers between which neighbours meet by shifts, dense layers, unit rows.

    ========== ======================================================================================================
    stage 1    `StiefelConv2d` on patches, then blocks: `StiefelConv2d` 1 x 1, MaxMin, `lipkit.modules.Shift2d`
    stage s    `StiefelConv2d` on 2 x 2 patches of the stage before, then blocks
    narrow     `StiefelConv2d` 1 x 1 to fewer channels, MaxMin
    dense      `StiefelLinear`, MaxMin for each; `NormalizedLinear` with one row for each class
    ========== ======================================================================================================

    Every layer but the last has norm 1 and costs a plain product, so that nearly all of the time goes into learning:
    train it with `lipkit.training.SpectralDescent` (``train.optimizer: spectral``). The first layer of a stage counts
    as one of its blocks.

    Args:
        patch: p, side of the patches.
        stages: (channels, blocks) of each stage. Fewer channels than a patch has numbers drop what a projection drops.
        narrow: channels in front of the dense layers; None for those of the last stage.
        dense: units of the hidden dense layers, at least one.
        moved: fraction of the channels that move in each of the four directions; 0 for none.
        activation: name such as 'halfabs', or a module, instead of MaxMin.
        position: whether a `lipkit.modules.PositionCode` follows the first layer.
        image: (C, H, W) with H and W multiples of p 2^(stages - 1).

    Raises:
        OptionError: sizes that are not as above. ShapeError: another input shape.

    >>> net = patchnet(2, [(16, 2), (32, 1)], narrow=8, dense=[16], input_shape=(1, 8, 8))
    >>> [type(m).__name__ for m in net][:4]
    ['StiefelConv2d', 'MaxMinShift2d', 'StiefelConv2d', 'MaxMinShift2d']
    >>> net[-1]
    NormalizedLinear(16, 10, bias=True)

    References:
        docs/accuracy.md, which compares it with the networks of the papers at equal time.
    """
    plan = [tuple(stage) for stage in stages]
    if not plan or any(len(stage) != 2 for stage in plan):
        raise OptionError(f"stages: expected one or more pairs (channels, blocks), got {stages!r}")
    check_sizes(patch=patch, stages=plan, narrow=1 if narrow is None else narrow, dense=dense)
    if not dense:
        raise OptionError("dense: expected the units of at least one layer, got none")
    if not 0 <= moved <= 0.25:
        raise OptionError(f"moved: expected a fraction from 0 to 1/4, got {moved}")
    pixels = image.pixels(patch * 2 ** (len(plan) - 1))  # each stage but the first halves the sides again
    layers: list[nn.Module] = []
    width = image.channels
    for number, (wide, blocks) in enumerate(plan):
        for block in range(blocks):
            stride = 1 if block else patch if number == 0 else 2
            layers.append(StiefelConv2d(width, wide, 1, stride))
            if position and not number and not block:
                layers.append(PositionCode(wide, *image.divided(patch)))
            width, each = wide, int(wide * moved)  # channels that move in each direction
            if each and activation is None:
                layers.append(MaxMinShift2d(wide, each))
            else:
                layers += [make_activation(activation), *([Shift2d(wide, each)] if each else [])]
    if narrow is not None:
        layers += [StiefelConv2d(width, narrow, 1), make_activation(activation)]
        width = narrow
    sizes = [width * pixels, *dense]
    hidden = [m for p, q in pairwise(sizes) for m in (StiefelLinear(p, q), make_activation(activation))]
    return [*layers, nn.Flatten(), *hidden, NormalizedLinear(sizes[-1], image.classes)]
