"""Modules that move numbers or drop them: reshapes, pixel shuffles, shifts, dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.configuration import COUNT, INTEGER
from lipkit.modules.machine import exact
from lipkit.modules.plain import Plain, Shape, add_plain
from lipkit.modules.ranges import one_sign
from lipkit.modules.views import Pad


def _dropout(module: nn.Module, input_shape: Shape | None) -> float:
    if module.training:
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected evaluation mode, got training mode, where the output is random; "
            "call .eval()"
        )
    return 1.0


def _without_dropout(module: nn.Module, input_shape: Shape) -> nn.Module:
    _dropout(module, input_shape)
    return nn.Identity()


for _kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout):
    add_plain(Plain(_kind, _dropout, export=_without_dropout))

for _row in (
    Plain(nn.Identity, stored={}),
    Plain(nn.ZeroPad2d, export=lambda module, input_shape: Pad(*module.padding), dims=(2, 9)),
    Plain(nn.Flatten, stored={"start_dim": INTEGER, "end_dim": INTEGER}),
    Plain(nn.Unflatten, stored={"dim": INTEGER, "unflattened_size": INTEGER}),
    Plain(nn.PixelUnshuffle, stored={"downscale_factor": INTEGER}, dims=(3, 9)),
    Plain(nn.PixelShuffle, stored={"upscale_factor": INTEGER}, dims=(3, 9)),
):
    add_plain(_row._replace(constant=1.0, rounding=exact, range=one_sign))


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


add_plain(Plain(Shift2d, 1.0, exact, {"channels": COUNT, "moved": COUNT}))
