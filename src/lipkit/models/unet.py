"""From images to images: U-Net, autoencoder, and a firmly non-expansive denoiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import HalfThrough
from lipkit.models.frame import Count, Layers, Positive, bounded, check_image, checked
from lipkit.modules import Blend, Graph, Shape

# In float32 the product of proved constants may exceed 1 by this much, so the denoiser's gain is smaller by as much.
SLACK = 1e-4


@checked
def unet(
    channels: int = 32,
    depth: Count = 1,
    blocks: int = 2,
    *,
    layer: str = "bcop",
    kernel_size: int = 3,
    patch: int = 2,
    activation: str | nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
    input_shape: Shape = (3, 48, 48),
    mean: float | None = None,
    lipschitz: Positive = 1.0,
) -> nn.Sequential:
    """A U-Net from images to images of the same shape, of constant 1 if its layers are orthogonal.

    ======== =====================================================================================================
    first    patches (`nn.PixelUnshuffle`), a convolution to ``channels``, activation
    level    ``blocks`` convolutions with activations; `HalfThrough` of the next level; as many convolutions again
    below    half of the channels, in 2 x 2 patches: twice the channels on a quarter of the pixels; then back
    last     a convolution to the channels of a patch, `nn.PixelShuffle`
    ======== =====================================================================================================

    There is no pooling: down- and upsampling are bijections, and the skip is a split, so norms are kept.

    Args:
        channels: of the upper level, a multiple of 2.
        depth: levels below it; 0 for a chain of convolutions.
        blocks: convolutions on each side of a level.
        layer: family of the convolutions; ``plain_conv`` for ordinary convolutions of the same sizes.
        kernel_size: of all convolutions.
        patch: side of the patches of the first level.
        activation: name or module; None for MaxMin.
        options: of the family's convolutions.
        input_shape: (C, H, W), H and W multiples of patch * 2^depth; the kernels fit any other such size, too.
        mean: of the pixel values; subtracted in front, and the initial bias of the last layer.
        lipschitz: gain in front.

    >>> from lipkit.lowering import lipschitz
    >>> net = unet(8, depth=1, blocks=1, input_shape=(1, 8, 8))
    >>> net(torch.rand(2, 1, 8, 8)).shape, round(lipschitz(net, (1, 8, 8)).item(), 5)
    (torch.Size([2, 1, 8, 8]), 1.0)

    References:
        Ronneberger et al., MICCAI 2015, for the shape; the split in place of a concatenation is that of reversible
        networks (Jacobsen et al., "i-RevNet", ICLR 2018).
    """
    if channels % 2:
        raise OptionError(f"channels: expected a multiple of 2, got {channels}")
    made = _layers(layer, options, activation)
    inputs = check_image(input_shape, patch * 2**depth, "unet")[0]
    pixels = inputs * patch**2  # channels of a patch

    def convolutions(*widths: int) -> list[nn.Module]:
        return [m for a, b in pairwise(widths) for m in made.conv(a, b, kernel_size)]

    def level(width: int, below: int) -> list[nn.Module]:
        side = [width] * (blocks + 1)  # as many convolutions as gaps
        if below == 0:
            return convolutions(*side)
        inner = nn.Sequential(nn.PixelUnshuffle(2), *level(2 * width, below - 1), nn.PixelShuffle(2))
        return [*convolutions(*side), HalfThrough(inner), *convolutions(*side)]

    first, last = convolutions(pixels, channels), made.bare(channels, pixels, kernel_size)
    layers = [nn.PixelUnshuffle(patch), *first, *level(channels, depth), last, nn.PixelShuffle(patch)]
    if mean is None:
        return bounded(layers, lipschitz)
    if isinstance(last.bias, nn.Parameter):
        nn.init.constant_(last.bias, mean)
    return bounded(layers, lipschitz, [mean] * inputs, [1.0] * inputs)  # std 1: the constant stays


@checked
def autoencoder(
    stages: Sequence[int] = (32, 64),
    code: int = 16,
    *,
    layer: str = "bcop",
    kernel_size: int = 3,
    activation: str | nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
    input_shape: Shape = (3, 32, 32),
    lipschitz: Positive = 1.0,
) -> nn.Sequential:
    """Encoder and decoder; the constant of each is that of its layers, 1 for orthogonal layers.

    Each stage of the encoder maps 2 x 2 patches to its channels; a last layer reduces them to ``code``. The decoder
    mirrors this. Both are submodules, ``net.encoder`` and ``net.decoder``.

    Args:
        stages: channels of each stage, at least one.
        code: channels of the code, on H / 2^stages x W / 2^stages pixels.
        layer, kernel_size, activation, options: as in `unet`.
        input_shape: (C, H, W), H and W multiples of 2^stages.
        lipschitz: gain in front of the encoder.

    >>> net = autoencoder([8], code=2, input_shape=(1, 8, 8))
    >>> net.encoder(torch.rand(1, 1, 8, 8)).shape, net(torch.rand(1, 1, 8, 8)).shape
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 1, 8, 8]))
    """
    if not stages:
        raise OptionError("stages: expected the channels of at least one stage, got none")
    made, current = _layers(layer, options, activation), check_image(input_shape, 2 ** len(stages), "autoencoder")[0]
    down, up = list[nn.Module](), list[nn.Module]()
    for i, width in enumerate(stages):
        down += [nn.PixelUnshuffle(2), *made.conv(4 * current, width, kernel_size)]
        back = made.conv(width, 4 * current, kernel_size)
        up = [*(back if i else [made.bare(width, 4 * current, kernel_size)]), nn.PixelShuffle(2), *up]
        current = width
    down.append(made.bare(current, code, kernel_size))
    up = [*made.conv(code, current, kernel_size), *up]
    net = nn.Sequential()  # its two parts have names
    net.add_module("encoder", bounded(down, lipschitz))
    net.add_module("decoder", nn.Sequential(*up))
    return net


def denoiser(channels: int = 32, depth: Count = 1, blocks: int = 2, **options: Any) -> Graph:
    r"""A firmly non-expansive denoiser :math:`D = (I + N) / 2`, N a `unet` of constant at most 1.

    .. math:: \|D(x) - D(y)\|^2 \le \langle D(x) - D(y),\, x - y \rangle

    D is then the resolvent of a monotone operator, and a plug-and-play iteration
    :math:`x \leftarrow D(x - \eta A^T(A x - b))` with :math:`0 < \eta < 2 / \|A\|^2` converges to a fixed point if
    one exists; its steps :math:`\|x_{k+1} - x_k\|` never grow. The proof is the constant of N, which is
    ``net.nodes[0]``: ``lipkit.lipschitz`` of its export is at most 1, since N has a gain of 1 - 1e-4 in front.

    The arguments are those of `unet` except ``lipschitz``; ``mean`` is 0.5 by default. With ``layer="plain_conv"``
    nothing is proved.

    >>> import lipkit
    >>> net = denoiser(8, depth=0, blocks=1, input_shape=(1, 8, 8))
    >>> bool(lipkit.lipschitz(lipkit.export(net.nodes[0], (1, 8, 8))) <= 1)
    True

    References:
        Pesquet et al., "Learning maximally monotone operators for image recovery", SIAM J. Imaging Sci. 2021 (there
        with a penalty in place of the proof); Bauschke & Combettes, "Convex Analysis and Monotone Operator Theory in
        Hilbert Spaces", 2nd ed., propositions 4.4 and 5.16.
    """
    if "lipschitz" in options:
        raise OptionError(f"denoiser: expected no option lipschitz, which is fixed, got {options['lipschitz']}")
    body = unet(channels, depth, blocks, lipschitz=1 - SLACK, **{"mean": 0.5, **options})
    return Graph([body, Blend(torch.tensor(0.5))], [[0], [1, 0]])  # value 0 is x, value 1 is N(x)


def _layers(name: str, options: Mapping[str, Any] | None, activation: str | nn.Module | None) -> Layers:
    """`Layers` of a family; refuses families whose layers contain an activation, since the last one must be affine."""
    made = Layers(name, options or {}, activation)
    if made.family.own_activation:
        why = "which contains its activation: the last layer must be affine"
        raise OptionError(f"layer: expected a family of linear convolutions, got {name!r}, {why}")
    return made
