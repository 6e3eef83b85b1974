"""Modules that move numbers or drop them: reshapes, pixel shuffles, padding, dropout, fewer or more channels."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.configuration import COUNT, INTEGER, stored
from lipkit.modules.machine import Local, Measure, nothing, rounding_rule
from lipkit.modules.registry import Shape, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.proof.arithmetic import Arithmetic

RESHAPES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d)


@lipschitz_rule(*RESHAPES)
def _reshape(module: nn.Module, input_shape: Shape | None) -> float:
    # Negative padding crops: still at most 1.
    return 1.0


@lipschitz_rule(nn.Dropout, nn.Dropout2d, nn.AlphaDropout)
def _dropout(module: nn.Dropout, input_shape: Shape | None) -> float:
    if module.training:
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected evaluation mode, got training mode, where the output is random; "
            "call .eval()"
        )
    return 1.0


@export_rule(nn.Dropout, nn.Dropout2d, nn.AlphaDropout)
def _export_dropout(module: nn.Module, input_shape: Shape) -> nn.Module:
    lipschitz(module)  # refuses training mode
    return nn.Identity()


@export_rule(*RESHAPES, nn.Softmax, nn.Linear, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
def export_copy(module: nn.Module, input_shape: Shape) -> nn.Module:
    """A copy of a module that is plain already, once ``lipschitz`` has not refused it."""
    if not isinstance(module, nn.Linear):
        lipschitz(module, input_shape)  # refuses what mixes the samples of a batch
    output_shape(module, input_shape)
    plain = copy.deepcopy(module)
    if hasattr(plain, "inplace"):
        # A constant network leaves its input as it is.
        setattr(plain, "inplace", False)  # noqa: B010
    return plain


def export_same(module: nn.Module, input_shape: Shape) -> nn.Module:
    """A copy of a module that is plain already, whose constant is proved elsewhere."""
    output_shape(module, input_shape)
    return copy.deepcopy(module)


class ResizeChannels(nn.Module):
    """Zero channels appended, or the last ones dropped (dimension 1): 1-Lipschitz.

    Args:
        in_channels, out_channels: channels before and after.

    Raises:
        OptionError: a number below 1. ShapeError: an input with other channels.

    >>> ResizeChannels(2, 3)(torch.ones(1, 2)).tolist(), ResizeChannels(2, 1)(torch.ones(1, 2)).tolist()
    ([[1.0, 1.0, 0.0]], [[1.0]])
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        if min(in_channels, out_channels) < 1:
            raise OptionError(f"channels: expected at least 1, got {in_channels} and {out_channels}")
        self.in_channels, self.out_channels = in_channels, out_channels

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.in_channels:
            raise ShapeError(
                f"ResizeChannels: expected {self.in_channels} channels in dimension 1, got {tuple(x.shape)}"
            )
        if self.out_channels <= self.in_channels:
            return x[:, : self.out_channels]
        return F.pad(x, [0, 0] * (x.ndim - 2) + [0, self.out_channels - self.in_channels])

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


# One pixel down, up, right and left, as (dimension, shift) of torch.roll.
MOVES = ((2, 1), (2, -1), (3, 1), (3, -1))


def shift(x: Tensor, moved: int) -> Tensor:
    """The last 4 ``moved`` channels moved circularly by one pixel: ``moved`` each down, up, right and left.

    A permutation, so an isometry: between pointwise layers it lets neighbours meet, without a product.

    Args:
        x: ``(B, C, H, W)`` with C >= 4 ``moved``.
        moved: channels of each direction, at least 1.

    >>> x = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2).repeat(1, 4, 1, 1)
    >>> shift(x, 1)[0, :, 0].tolist()  # a single row has no other to move to
    [[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [2.0, 1.0]]

    References:
        Wu et al., CVPR 2018 (shift instead of spatial convolutions); LipNeXt, ICLR 2026 (as an isometry).
    """
    kept, *groups = x.split([x.shape[1] - 4 * moved, *[moved] * 4], dim=1)
    return torch.cat([kept, *(g.roll(by, dim) for g, (dim, by) in zip(groups, MOVES, strict=True))], dim=1)


class Shift2d(nn.Module):
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

    def extra_repr(self) -> str:
        return f"{self.channels}, moved={self.moved}"


@lipschitz_rule(ResizeChannels, Shift2d)
def _resize(module: nn.Module, input_shape: Shape | None) -> float:
    return 1.0


@export_rule(ResizeChannels)
def _export_resize(module: ResizeChannels, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return ResizeChannels(module.in_channels, module.out_channels)


@export_rule(Shift2d)
def _export_shift(module: Shift2d, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return Shift2d(module.channels, module.moved)


@rounding_rule(
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ZeroPad2d,
    nn.Dropout,
    nn.Dropout2d,
    nn.AlphaDropout,
    ResizeChannels,
    Shift2d,
)
def _move(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return lambda x: Local(nothing(x), nothing(x))


stored(nn.Identity)
stored(nn.ZeroPad2d, padding=INTEGER)
stored(nn.Flatten, start_dim=INTEGER, end_dim=INTEGER)
stored(nn.Unflatten, dim=INTEGER, unflattened_size=INTEGER)
stored(nn.PixelUnshuffle, downscale_factor=INTEGER)
stored(nn.PixelShuffle, upscale_factor=INTEGER)
stored(ResizeChannels, in_channels=COUNT, out_channels=COUNT)
stored(Shift2d, channels=COUNT, moved=COUNT)
