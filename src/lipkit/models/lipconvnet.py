"""LipConvnet: five blocks of orthogonal convolutions, the architecture of the SOC and ECO tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn

from lipkit.errors import OptionError
from lipkit.models._parts import Layers, check_sizes
from lipkit.models.frame import Common, Image, architecture

# (channels of group 1, channels of group 2, stride of group 2) of each block.
BLOCKS = ((32, 64, 2), (64, 128, 2), (128, 256, 2), (256, 512, 3), (512, 1024, 1))


@architecture()
def lipconvnet(
    image: Image,
    depth: int = 5,
    first_blocks: str = "soc",
    last_blocks: str = "eco",
    first: int = 2,
    *,
    layer: str | None = None,
    width: float = 1.0,
    kernel_size: int = 3,
    side: int = 24,
    first_options: Mapping[str, Any] | None = None,
    last_options: Mapping[str, Any] | None = None,
    **common: Unpack[Common],
) -> list[nn.Module]:
    """Five blocks of depth / 5 convolutions with MaxMin after each, then one linear layer.

    Block b has depth / 5 - 1 layers of stride 1 and one that downsamples: 24 -> 12 -> 6 -> 3 -> 1 -> 1 pixels and 64,
    128, 256, 512, 1024 channels. Images of another size are cropped around the centre, or padded with zeros, to
    ``side x side`` by the first layer of the model, which is 1-Lipschitz: certificates hold for the whole image.
    Where one pixel is left (from the downsampling layer of block 4 on) a kernel is a single matrix, and its size is 1.

    Args:
        image: (C, H, W) of any size.
        depth: number of convolutions, a multiple of 5.
        first_blocks, last_blocks: families of the first ``first`` blocks and of the others.
        first: l of the paper's ablation, 0 to 5.
        layer: one family for all blocks, instead of the three arguments above; ``plain`` or ``plain_conv`` for
            ordinary convolutions (and an ordinary or a Cayley last layer).
        width: factor on the channels.
        kernel_size: of the convolutions on more than one pixel.
        side: working size, a multiple of 24.
        first_options, last_options: options of the two families' convolutions.

    Raises:
        OptionError: depth is not a multiple of 5, first is not in 0..5, side is not a multiple of 24.

    >>> net = lipconvnet(5, layer="cayley", width=0.125)
    >>> from lipkit.lowering import lipschitz
    >>> lipschitz(net).item()
    1.0

    References:
        [ECO] Table 1, section 5.1; Singla & Feizi, ICML 2021.
    """
    check_sizes(depth=depth)
    if depth % 5:
        raise OptionError(f"depth: expected a multiple of 5, got {depth}")
    if not 0 <= first <= 5:
        raise OptionError(f"first: expected a number of blocks from 0 to 5, got {first}")
    if side < 24 or side % 24:
        raise OptionError(f"side: expected a multiple of 24, got {side}")
    if layer is not None:
        first_blocks = last_blocks = layer
    layers: list[nn.Module] = []
    if (image.rows, image.columns) != (side, side):
        top, left = (side - image.rows) // 2, (side - image.columns) // 2
        # Negative padding crops.
        layers.append(nn.ZeroPad2d((left, side - image.columns - left, top, side - image.rows - top)))
    front, back = Layers(first_blocks, first_options or {}), Layers(last_blocks, last_options or {})
    current, size = image.channels, side
    for block, (inner, last, stride) in enumerate(BLOCKS):
        made = front if block < first else back
        steps = [(inner, 1)] * (depth // 5 - 1) + [(last, stride)]
        for target, step in steps:
            before, size = size, size // step
            cout = max(2, 2 * round(target * width / 2))
            kernel = 1 if before == 1 else made.strided(kernel_size, kernel_size if size > 1 else 1)
            layers += made.conv(current, cout, kernel, step)
            current = cout
    return [*layers, nn.Flatten(), back.last(current * size**2, image.classes)]
