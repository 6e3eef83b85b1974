r"""Residual layers whose weight is used twice, around a slope-restricted activation: dense, and as a convolution.

Both are :math:`y = x - F^* \Lambda\, \sigma(F x + b)` with a positive diagonal :math:`\Lambda` such that
:math:`\|\Lambda^{1/2} F\|^2 \le 2`; how the diagonal is found is left to subclasses. For slopes in [0, 1] the
derivative is :math:`I - F^*\Lambda D F` with :math:`0 \le D \le I`, a symmetric-like map of norm at most 1 in the sense
of the LMI of Araujo et al., ICLR 2023, theorem 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv import adjoint, circular_conv2d, fold
from lipkit.errors import OptionError, ShapeError
from lipkit.layers._base import ConstrainedConv2d, check_dtype, check_positive, half_through_float32, new_bias
from lipkit.layers._export import circular_module, resampled_size, stride_modules
from lipkit.layers.activations import slope_activation
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.modules import Shape
from lipkit.modules.rearrange import ResizeChannels
from lipkit.modules.residual import SlopeResidual


class SlopeResidualLinear(nn.Module, ABC):
    """Dense ``x - F^T Lambda act(F x + b)``; zeros are appended to the input, or outputs dropped, to fit the sizes."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        hidden: int | None = None,
        activation: str | nn.Module = "relu",
    ) -> None:
        super().__init__()
        self.inner = max(in_features, out_features)
        self.hidden = self.inner if hidden is None else hidden
        check_positive(in_features=in_features, out_features=out_features, hidden=self.hidden)
        check_dtype(dtype)
        self.in_features, self.out_features = in_features, out_features
        self.activation = slope_activation(activation)
        # A spread of singular values below 1, as the papers' initialisations have it.
        free = torch.empty(self.hidden, self.inner, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.xavier_normal_(free))
        self.make_multiplier(device, dtype)
        self.register_parameter("bias", new_bias(self.hidden, self.inner, bias, device, dtype))

    def make_multiplier(self, device: Any, dtype: Any) -> None:
        """Create what the multiplier needs besides the weight; nothing by default."""

    @abstractmethod
    def multiplier(self) -> Tensor:
        """Diagonal of Lambda ``(hidden,)``, in float32 or better."""

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ShapeError(
                f"{type(self).__name__}: expected input of shape (..., {self.in_features}), got {tuple(x.shape)}"
            )
        with autocast_off(x):
            free, multiplier = at_least_float32(self.free), self.multiplier()
            x = F.pad(x.to(free.dtype), [0, self.inner - self.in_features])
            bias = None if self.bias is None else self.bias.to(free.dtype)
            inside = self.activation(F.linear(x, free, bias))
            y = x - F.linear(inside, (multiplier[:, None] * free).mT)
        return y[..., : self.out_features]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, hidden={self.hidden}, bias={self.bias is not None}"


class SlopeResidualConv2d(ConstrainedConv2d, ABC):
    """Circular ``x - F^* (Lambda act(F x + b))``; zero channels are appended, or channels dropped, to fit the sizes."""

    def __init__(
        self, *conv: Any, hidden: int | None = None, activation: str | nn.Module = "relu", **named: Any
    ) -> None:
        self.asked_hidden = hidden
        chosen = slope_activation(activation)
        super().__init__(*conv, **named)
        if any(k % 2 == 0 for k in self.kernel_size):
            raise OptionError(f"kernel_size: expected odd sizes, got {self.kernel_size}: the adjoint must be centred")
        self.activation = chosen

    def make_parameters(self, device: Any, dtype: Any) -> None:
        self.inner = max(self.inner_channels, self.out_channels)
        self.hidden = self.inner if self.asked_hidden is None else self.asked_hidden
        check_positive(hidden=self.hidden)
        free = torch.empty(self.hidden, self.inner, *self.kernel_size, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.xavier_normal_(free))
        self.make_multiplier(device, dtype)

    def bias_channels(self) -> int:
        return self.hidden

    def make_multiplier(self, device: Any, dtype: Any) -> None:
        """Create what the multiplier needs besides the kernel; nothing by default."""

    @abstractmethod
    def multiplier(self, height: int, width: int) -> Tensor:
        """Diagonal of Lambda ``(hidden,)`` on ``height x width`` (after downsampling), in float32 or better."""

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        x = self.resample(x)
        with autocast_off(x):
            kernel, multiplier = at_least_float32(self.free), self.multiplier(*x.shape[-2:])
            x = F.pad(x.to(kernel.dtype), [0, 0, 0, 0, 0, self.inner - self.inner_channels])
            inside = circular_conv2d(x, fold(kernel, *x.shape[-2:]))
            if self.bias is not None:
                inside = inside + self.bias[:, None, None]
            back = adjoint(multiplier[:, None, None, None] * kernel)
            y = x - circular_conv2d(self.activation(inside), fold(back, *x.shape[-2:]))
        return y[:, : self.out_channels]


def export_residual_linear(layer: SlopeResidualLinear, input_shape: Shape) -> nn.Module:
    """The layer as two ``nn.Linear`` around its activation."""
    if input_shape != (layer.in_features,):
        raise ShapeError(f"{type(layer).__name__}: expected input_shape ({layer.in_features},), got {input_shape}")
    free, multiplier = at_least_float32(layer.free), layer.multiplier()
    first = nn.Linear(layer.inner, layer.hidden, layer.bias is not None, device=free.device, dtype=free.dtype)
    second = nn.Linear(layer.hidden, layer.inner, False, device=free.device, dtype=free.dtype)
    first.weight.copy_(free)
    if layer.bias is not None:
        first.bias.copy_(layer.bias)
    second.weight.copy_(-(multiplier[:, None] * free).mT)
    block = SlopeResidual(first, slope_activation(layer.activation), second, multiplier)
    return _resized(layer.in_features, layer.inner, layer.out_features, block)


def export_residual_conv(layer: SlopeResidualConv2d, input_shape: Shape) -> nn.Module:
    """The layer at one image size as two circular convolutions around its activation, after its downsampling."""
    size = resampled_size(layer, input_shape)
    kernel, multiplier = at_least_float32(layer.free), layer.multiplier(*size)
    first = circular_module(fold(kernel, *size), layer.bias)
    second = circular_module(fold(adjoint(-multiplier[:, None, None, None] * kernel), *size), None)
    block = SlopeResidual(first, slope_activation(layer.activation), second, multiplier)
    resized = _resized(layer.inner_channels, layer.inner, layer.out_channels, block)
    return nn.Sequential(*stride_modules(layer), resized)


def _resized(before: int, inner: int, after: int, block: nn.Module) -> nn.Sequential:
    head = [ResizeChannels(before, inner)] if before != inner else []
    tail = [ResizeChannels(inner, after)] if after != inner else []
    return nn.Sequential(*head, block, *tail)
