"""The constant forms of residual layers with slope-restricted activations (SLL, CPL)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import OptionError, ShapeError


class ResizeChannels(nn.Module):
    """Zero channels appended, or the last ones dropped (dimension 1): 1-Lipschitz.

    Args:
        in_channels, out_channels: channels before and after.

    Raises:
        OptionError: a number below 1. ShapeError: an input with other channels.

    >>> import torch
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
        extra = self.out_channels - self.in_channels
        return F.pad(x, [0, 0] * (x.ndim - 2) + [0, extra])

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


class SlopeResidual(nn.Module):
    r"""``y = x + second(activation(first(x)))`` with a multiplier that proves its constant.

    With linear parts W1, W2 and an activation of slope in [0, 1], a positive diagonal :math:`\Lambda` with
    :math:`W_2 = -W_1^\top \Lambda` and :math:`\|\Lambda^{1/2} W_1\|^2 \le 2` proves that y is 1-Lipschitz.

    Args:
        first, second: both ``nn.Linear``, or both ``nn.Conv2d`` (circular, stride 1).
        activation: a scalar activation.
        multiplier: diagonal of Lambda, ``(hidden,)``.

    >>> import torch
    >>> zero = nn.Linear(2, 3), nn.Linear(3, 2, bias=False)
    >>> _ = [nn.init.zeros_(layer.weight) for layer in zero]
    >>> SlopeResidual(zero[0], nn.ReLU(), zero[1], torch.ones(3))(torch.ones(1, 2)).tolist()
    [[1.0, 1.0]]
    """

    multiplier: Tensor

    def __init__(self, first: nn.Module, activation: nn.Module, second: nn.Module, multiplier: Tensor) -> None:
        super().__init__()
        if multiplier.ndim != 1:
            raise ShapeError(f"multiplier: expected shape (hidden,), got {tuple(multiplier.shape)}")
        self.first, self.activation, self.second = first, activation, second
        self.register_buffer("multiplier", multiplier.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.activation(self.first(x)))
        if y.shape != x.shape:
            raise ShapeError(f"SlopeResidual: expected parts that keep shape {tuple(x.shape)}, got {tuple(y.shape)}")
        return x + y
