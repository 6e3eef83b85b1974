"""Chains of convolutions: KWLarge and smaller networks, sandwich networks of [LBDN], LipConvnet, SLL networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, repeat
from typing import Any, Literal, Unpack

from torch import nn

from lipkit.errors import OptionError, check_choice
from lipkit.layers import NormalizedLinear
from lipkit.layers.sll import SllConv2d, SllLinear
from lipkit.models.frame import Common, Image, Layers, Positive, architecture
from lipkit.modules.views import Pad


@architecture()
def kwlarge(
    image: Image,
    layer: str = "cayley",
    width: int = 1,
    *,
    kernel_size: int = 3,
    dense: Sequence[int] | None = None,
    activation: str | nn.Module | None = None,
    pool: bool = False,
    **options: Any,
) -> list[nn.Module]:
    """conv 32w, conv 32w /2, conv 64w, conv 64w /2, linear 512w, linear 512, linear classes; MaxMin between.

    Args:
        layer: acronym of the family (``lipkit list layers``), or ``plain`` or ``plain_conv``: unconstrained.
        width: w, multiplies the channels.
        kernel_size: of the layers of stride 1. Strided layers act on 4 times the channels with half of it, rounded
            down (3 -> 1); unconstrained ones have a real stride and the whole kernel.
        dense: units of the two hidden linear layers instead of (512w, 512).
        activation: name such as 'relu', or a module, instead of MaxMin; for layers with an inner activation, that one.
        pool: whether to replace the strides by sums of 4 x 4 pixels, divided by 4, in front of the linear layers (norm
            1, as in the code of [LBDN]), for families that have no strided layer in the papers.
        image: (C, H, W) with H and W multiples of 4.
        options: options of the family's convolution.

    >>> from lipkit.lowering import lipschitz
    >>> float(lipschitz(kwlarge(input_shape=(3, 8, 8))))
    1.0

    References:
        [Cayley] section 5; Wong & Kolter's "large" network as used by Li et al., NeurIPS 2019; [LBDN] table 5 (dense,
        activation, pool).
    """
    units = [512 * width, 512] if dense is None else list(dense)
    if len(units) != 2:
        raise OptionError(f"dense: expected the units of two layers, got {dense!r}")
    made, features = Layers(layer, options, activation), 64 * width * image.pixels(4)
    down = (kernel_size, 1) if pool else (made.strided(kernel_size), 2)  # kernel and stride of the second of each pair
    return [
        *made.conv(image.channels, 32 * width, kernel_size),
        *made.conv(32 * width, 32 * width, *down),
        *made.conv(32 * width, 64 * width, kernel_size),
        *made.conv(64 * width, 64 * width, *down),
        *([nn.AvgPool2d(4, divisor_override=4)] if pool else []),  # sixteen weights of a quarter: norm 1
        nn.Flatten(),
        *made.dense(features, *units),
        made.last(units[1], image.classes),
    ]


@architecture(input_shape=(1, 8, 8))
def small(
    image: Image, layer: str = "cayley", width: int = 1, *, kernel_size: int = 3, **options: Any
) -> list[nn.Module]:
    """conv 16w, conv 32w /2 (and conv 32w /2 again above 12 x 12), linear 256w, linear classes; MaxMin between.

    Args:
        layer, width, options: as in `kwlarge`; layers with an inner activation get no MaxMin.
        kernel_size: of the first layer; strided layers use 1, unconstrained ones the whole kernel.
        image: (C, H, W) with H and W even (multiples of 4 above 12 x 12).

    >>> small(input_shape=(1, 8, 8), classes=3)[-1].out_features
    3
    """
    made, twice = Layers(layer, options), max(image.rows, image.columns) > 12
    features = 32 * width * image.pixels(4 if twice else 2)
    down = made.strided(kernel_size, 1), 2  # kernel and stride
    return [
        *made.conv(image.channels, 16 * width, kernel_size),
        *made.conv(16 * width, 32 * width, *down),
        *(made.conv(32 * width, 32 * width, *down) if twice else []),
        nn.Flatten(),
        *made.dense(features, 256 * width),
        made.last(256 * width, image.classes),
    ]


@architecture(classes=100)
def lbdn_conv(
    image: Image,
    layer: str = "sandwich",
    blocks: int = 3,
    width: int = 64,
    *,
    hidden: Sequence[int] = (2048, 2048, 1024),
    last_layer_normalization: bool = True,
    kernel_size: int = 3,
    **options: Any,
) -> list[nn.Module]:
    """Blocks of conv w, conv w /2 with w = 64, 128, 256 (, 512), then linear layers and a last layer of unit rows.

    Args:
        layer, options: as in `kwlarge`.
        blocks: number of blocks, each of which halves the image and doubles the channels. The paper: 3 for 32 x 32, 4
            for 64 x 64.
        width: channels of the first block.
        hidden: units of the hidden linear layers.
        last_layer_normalization: whether the last layer has rows of unit norm and is otherwise free. The network is
            then not 1-Lipschitz, but the pairwise certificate uses the norms of differences of rows. False: a layer of
            the family.
        kernel_size: of the layers of stride 1; strided layers have half of it, rounded down, after downsampling.
        image: (C, H, W) with H and W multiples of 2 to the power of ``blocks``.

    >>> net = lbdn_conv(width=4, hidden=[32], input_shape=(3, 8, 8))
    >>> type(net[-1]).__name__, net[-1].out_features
    ('NormalizedLinear', 100)

    References:
        [LBDN] table 6, section 5.2; Singla, Singla & Feizi, ICLR 2022 (last-layer normalisation).
    """
    made, pixels = Layers(layer, options), image.pixels(1 << blocks)
    layers: list[nn.Module] = []
    widths = [image.channels, *(width * 2**block for block in range(blocks))]  # half the sides, twice the channels
    for current, target in pairwise(widths):
        layers += made.conv(current, target, kernel_size)
        layers += made.conv(target, target, made.strided(kernel_size), 2)
    sizes = [widths[-1] * pixels, *hidden]
    last = NormalizedLinear if last_layer_normalization else made.last
    return [*layers, nn.Flatten(), *made.dense(*sizes), last(sizes[-1], image.classes)]


# (channels of group 1, channels of group 2, stride of group 2) of each block.
BLOCKS = ((32, 64, 2), (64, 128, 2), (128, 256, 2), (256, 512, 3), (512, 1024, 1))


@architecture()
def lipconvnet(
    image: Image,
    depth: int = 5,
    first_blocks: str = "soc",
    last_blocks: str = "eco",
    first: Literal[0, 1, 2, 3, 4, 5] = 2,
    *,
    layer: str | None = None,
    width: Positive = 1.0,
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
        first: number of first blocks, 0 to 5; l in the paper's ablation.
        layer: one family for all blocks, instead of the three arguments above; ``plain`` or ``plain_conv`` for
            ordinary convolutions (and an ordinary or a Cayley last layer).
        width: factor on the channels.
        kernel_size: of the convolutions on more than one pixel.
        side: working size, a multiple of 24.
        first_options, last_options: options of the two families' convolutions.

    >>> net = lipconvnet(5, layer="cayley", width=0.125)
    >>> from lipkit.lowering import lipschitz
    >>> lipschitz(net).item()
    1.0

    References:
        [ECO] Table 1, section 5.1; Singla & Feizi, ICML 2021.
    """
    if depth % 5:
        raise OptionError(f"depth: expected a multiple of 5, got {depth}")
    if first not in range(6):
        raise OptionError(f"first: expected a number of blocks from 0 to 5, got {first!r}")
    if side % 24:
        raise OptionError(f"side: expected a multiple of 24, got {side}")
    if layer is not None:
        first_blocks = last_blocks = layer  # `first` does not matter then
    layers: list[nn.Module] = []
    if (image.rows, image.columns) != (side, side):
        top, left = (side - image.rows) // 2, (side - image.columns) // 2  # negative ones crop
        layers.append(nn.ZeroPad2d((left, side - image.columns - left, top, side - image.rows - top)))
    front, back = Layers(first_blocks, first_options or {}), Layers(last_blocks, last_options or {})
    current, size = image.channels, side
    for block, (inner, last, stride) in enumerate(BLOCKS):
        made = front if block < first else back
        # Channels and stride of each layer of the block.
        for target, step in chain(repeat((inner, 1), depth // 5 - 1), [(last, stride)]):
            before, size = size, size // step
            cout = max(2, 2 * round(target * width / 2))  # even, for MaxMin
            kernel = 1 if before == 1 else made.strided(kernel_size, kernel_size if size > 1 else 1)
            layers += made.conv(current, cout, kernel, step)
            current = cout
    return [*layers, nn.Flatten(), back.last(current * size**2, image.classes)]


# Channels, convolutions, dense layers.
SIZES = {"small": (45, 20, 7), "medium": (60, 30, 10), "large": (90, 50, 10), "xlarge": (120, 70, 15)}
POOL = 4


@architecture()
def sllnet(
    image: Image,
    size: str = "small",
    *,
    channels: int | None = None,
    depth: int | None = None,
    dense: Sequence[int] | None = None,
    inner: int = 5,
    last_layer_normalization: bool = False,
    **options: Any,
) -> list[nn.Module]:
    """``depth`` SLL convolutions on image and channels of zeros, 4 x 4 sums divided by 4, SLL dense layers, classes.

    Every layer is a residual one of constant width. ``size`` sets channels, convolutions and dense layers (of 2048
    inner units): small 45, 20, 7; medium 60, 30, 10; large 90, 50, 10; xlarge 120, 70, 15. Most of the parameters
    (41, 79, 118 and 236 million for 32 x 32 images) are in the dense layers.

    Args:
        size: small, medium, large or xlarge; the next three arguments override its parts.
        channels: width of the convolutions.
        depth: number of convolutions.
        dense: inner units of each dense layer.
        inner: inner channels of each convolution.
        last_layer_normalization: whether to append a last layer with rows of unit norm, otherwise free. False: the
            first features are the logits, so there must be as many features as classes.
        image: (C, H, W) with H and W multiples of 4.
        options: options of the layers: ``activation``.

    >>> net = sllnet(channels=4, depth=2, dense=[8], input_shape=(1, 8, 8), last_layer_normalization=True)
    >>> [type(layer).__name__ for layer in net]
    ['SllConv2d', 'SllConv2d', 'AvgPool2d', 'Flatten', 'SllLinear', 'NormalizedLinear']

    References:
        Araujo et al., ICLR 2023, section 5 and appendix; the inner channels are those of its code, and the only ones
        that give the printed numbers of parameters. Convolutions are circular here, zero-padded there.
    """
    check_choice("size", size, SIZES)
    width, convolutions, linears = SIZES[size]
    width = width if channels is None else channels
    convolutions = convolutions if depth is None else depth
    units = [2048] * linears if dense is None else list(dense)
    features = width * image.pixels(POOL)
    if width < image.channels:
        raise OptionError(f"channels: expected at least the {image.channels} of the images, got {width}")
    if features < image.classes:
        raise OptionError(f"channels: expected at least {image.classes} features, one for each class, got {features}")
    # The first layer adds channels of zeros.
    inputs = chain([image.channels], repeat(width, convolutions - 1))
    layers: list[nn.Module] = [SllConv2d(n, width, 3, hidden=inner, **options) for n in inputs]
    # Of norm 1: sixteen weights of a quarter.
    layers += [nn.AvgPool2d(POOL, divisor_override=POOL), nn.Flatten()]
    layers += [SllLinear(features, features, hidden=n, **options) for n in units]
    dropped = Pad(0, image.classes - features)  # a negative pad drops the outputs after the first `classes`
    return [*layers, NormalizedLinear(features, image.classes) if last_layer_normalization else dropped]


@architecture(input_shape=(1, 8, 8))
def convnet(image: Image, width: int = 1, *, batch_norm: bool = True, **common: Unpack[Common]) -> list[nn.Module]:
    """conv 16w, conv 32w /2, conv 32w /2, linear 64w, linear classes; 3 x 3 kernels, batch norm and ReLU between.

    Args:
        width: w, multiplies the channels.
        image: (C, H, W) with H and W multiples of 4.
        batch_norm: whether batch norm follows each hidden layer; its bias then replaces the layer's.

    >>> [type(m).__name__ for m in convnet(batch_norm=False)][:3], convnet()[-1].out_features
    (['Conv2d', 'ReLU', 'Conv2d'], 10)
    """
    pixels = image.pixels(4)
    layers: list[nn.Module] = []
    cin = image.channels
    for cout, stride in ((16 * width, 1), (32 * width, 2), (32 * width, 2)):
        layers.append(nn.Conv2d(cin, cout, 3, stride, 1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(cout), nn.ReLU()] if batch_norm else [nn.ReLU()]
        cin = cout
    layers += [nn.Flatten(), nn.Linear(cin * pixels, 64 * width, bias=not batch_norm)]
    layers += [nn.BatchNorm1d(64 * width), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return [*layers, nn.Linear(64 * width, image.classes)]
