"""Modules of torch that move numbers or drop them, as those of `lipkit.modules.views`; shifts of channels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.configuration import COUNT
from lipkit.modules.machine import exact
from lipkit.modules.plain import Plain, Shape, Shown, add_plain
from lipkit.modules.ranges import one_sign
from lipkit.modules.registry import output_shape
from lipkit.modules.views import Pad, Permute, Reshape, reshaped


def _dropout(module: nn.Module, input_shape: Shape | None) -> float:
    if module.training:
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected evaluation mode, got training mode, where the output is random; "
            "call .eval()"
        )
    return 1.0


def _without_dropout(module: nn.Module, input_shape: Shape) -> nn.Module:
    _dropout(module, input_shape)
    return nn.Sequential()


for _kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout):
    add_plain(Plain(_kind, _dropout, export=_without_dropout))


def _regrouped(apart: Shape, order: Iterable[int], together: Shape) -> nn.Module:
    return nn.Sequential(Reshape(*apart), Permute(*order), Reshape(*together))


def _channel_shuffle(module: nn.ChannelShuffle, input_shape: Shape | None) -> float:
    if input_shape is not None and input_shape[0] % module.groups:
        raise ShapeError(f"nn.ChannelShuffle: expected channels in {module.groups} groups, got {input_shape[0]}")
    return 1.0


def _export_channel_shuffle(module: nn.ChannelShuffle, input_shape: Shape) -> nn.Module:
    _channel_shuffle(module, input_shape)
    channels, *rest = input_shape
    apart = (module.groups, channels // module.groups, *rest)
    return _regrouped(apart, (2, 1, *range(3, 3 + len(rest))), input_shape)


def _export_pixels(module: nn.PixelShuffle | nn.PixelUnshuffle, input_shape: Shape) -> nn.Module:
    (*lead, c, h, w), together = input_shape, output_shape(module, input_shape)
    if isinstance(module, nn.PixelShuffle):
        r = module.upscale_factor
        apart, order = (c // r**2, r, r, h, w), (1, 4, 2, 5, 3)  # a row of pixels and its r channels, then columns
    else:
        r = module.downscale_factor
        apart, order = (c, h // r, r, w // r, r), (1, 3, 5, 2, 4)
    n = len(lead)
    return _regrouped((*lead, *apart), (*range(1, n + 1), *(n + dim for dim in order)), together)


def _export_flat(module: nn.Flatten | nn.Unflatten, input_shape: Shape) -> nn.Module:
    return reshaped(output_shape(module, input_shape))


_whole_sample = {"start_dim": lambda dim: dim == 1, "end_dim": lambda dim: dim == -1}
add_plain(Plain(nn.Identity, 1.0, range=one_sign, export=lambda module, input_shape: nn.Sequential()))
add_plain(Plain(nn.ZeroPad2d, 1.0, export=lambda module, input_shape: Pad(*module.padding), dims=(2, 9)))
add_plain(Plain(nn.Flatten, 1.0, exact, _whole_sample, one_sign, export=_export_flat))
add_plain(Plain(nn.Unflatten, 1.0, export=_export_flat))
for _pixels in (nn.PixelShuffle, nn.PixelUnshuffle):
    add_plain(Plain(_pixels, 1.0, export=_export_pixels, dims=(3, 9)))
add_plain(Plain(nn.ChannelShuffle, _channel_shuffle, export=_export_channel_shuffle))


# One pixel down, up, right and left, as (dimension, shift) of torch.roll.
MOVES = ((2, 1), (2, -1), (3, 1), (3, -1))


def shift(x: Tensor, moved: int, steps: int = 1) -> Tensor:
    """The last 4 ``moved`` channels moved circularly by one pixel: ``moved`` each down, up, right and left.

    A permutation, so an isometry: between pointwise layers it lets neighbours meet, without a product.

    Args:
        x: ``(B, C, H, W)`` with C >= 4 ``moved``.
        moved: channels of each direction, at least 1.
        steps: pixels; -1 undoes what 1 does.

    >>> x = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2).repeat(1, 4, 1, 1)
    >>> shift(x, 1)[0, :, 0].tolist()  # a single row has no other to move to
    [[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [2.0, 1.0]]

    References:
        Wu et al., CVPR 2018 (shift instead of spatial convolutions); LipNeXt, ICLR 2026 (as an isometry).
    """
    kept, *groups = x.split([x.shape[1] - 4 * moved, *[moved] * 4], dim=1)
    return torch.cat([kept, *(g.roll(steps * by, dim) for g, (dim, by) in zip(groups, MOVES, strict=True))], dim=1)


class Shift2d(Shown):
    """:func:`shift` as a module: 1-Lipschitz.

    Args:
        channels: of the input.
        moved: channels of each of the four directions, at least 1.

    Raises:
        OptionError: fewer than 4 ``moved`` channels. ShapeError: an input with other channels, or no image.

    >>> Shift2d(16, 2)(torch.zeros(1, 16, 4, 4)).shape
    torch.Size([1, 16, 4, 4])
    """

    def __init__(self, channels: int, moved: int) -> None:
        super().__init__()
        if moved < 1 or channels < 4 * moved:
            raise OptionError(f"Shift2d: expected at least 4 moved >= 4 channels, got {channels} with moved={moved}")
        self.channels, self.moved = channels, moved

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ShapeError(f"Shift2d: expected images (B, {self.channels}, H, W), got {tuple(x.shape)}")
        return shift(x, self.moved)


add_plain(Plain(Shift2d, 1.0, exact, {"channels": COUNT, "moved": COUNT}))
