"""A vision transformer of constant 1: attention that never expands, MLPs of orthogonal layers, no normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.layers import MemoryAttention, PositionCode, TokenAttention
from lipkit.models._parts import Layers, check_sizes
from lipkit.models.frame import Image, architecture


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

    Attention is the residual branch itself (a gradient step), so nothing is added and nothing is normalised.

    Args:
        layer: acronym of the family of all linear layers (``lipkit list layers``).
        patch, width, depth: side p of the patches, features of a token, number of blocks.
        heads: of `lipkit.layers.TokenAttention`, a divisor of ``width``.
        slots: rows of the `lipkit.layers.MemoryAttention` that follows it in each block; None for none.
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
    check_sizes(patch=patch, width=width, depth=depth, heads=heads, slots=1 if slots is None else slots, dense=dense)
    made, side = Layers(layer, options, activation), image.divided(patch)
    layers = [made.bare(image.channels, width, 1, patch), PositionCode(width, *side)]
    for _ in range(depth):
        layers.append(TokenAttention(width, heads=heads))
        if slots is not None:
            layers.append(MemoryAttention(width, slots))
        layers += [*made.conv(width, width, 1), *made.conv(width, width, 1)]
    sizes = [width * image.pixels(patch), *dense]
    return [*layers, nn.Flatten(), *made.dense(*sizes), made.last(sizes[-1], image.classes)]
