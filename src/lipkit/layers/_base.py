"""What every constrained layer shares: arguments checked once, bias, stride. Exports are in ``_export``."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv import Symbol, apply_symbol, circular_conv2d, downsample, fold
from lipkit.conv.resample import check_divides, patch_kernel
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.precision import autocast_off

Pair = int | tuple[int, int]


def check_positive(**values: int) -> None:
    """Raise ``OptionError`` unless every value is an integer of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}: expected an integer of at least 1, got {value!r}")


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise ``OptionError`` unless parameters of this dtype can be constrained (float32 or float64)."""
    dtype = dtype or torch.get_default_dtype()
    if dtype not in (torch.float32, torch.float64):
        raise OptionError(
            f"dtype: expected torch.float32 or torch.float64, got {dtype}: constraints do not hold in less; "
            "use torch.autocast around the forward pass instead"
        )


def half_through_float32(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """The contract of every family in bfloat16 and float16: weight and products in float32, the output as the input.

    Parameters of half precision are taken as they are; under autocast the products are autocast's.
    """

    @functools.wraps(forward)
    def call(layer: Any, x: Tensor) -> Tensor:
        if x.dtype not in (torch.bfloat16, torch.float16) or _autocast(x.device.type):
            return forward(layer, x)
        return forward(layer, x.float()).to(x.dtype)

    return call


def _autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def new_bias(out: int, fan_in: int, bias: bool, device: Any, dtype: Any) -> nn.Parameter | None:
    """A bias of ``out`` values, uniform in +-1/sqrt(fan_in) as in ``nn.Linear``, or None."""
    if not bias:
        return None
    values = torch.empty(out, device=device, dtype=dtype)
    return nn.Parameter(nn.init.uniform_(values, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in)))


class ConstrainedLinear(nn.Module, ABC):
    """A dense layer ``y = Q x + b`` whose matrix Q = ``weight()`` obeys a constraint by construction.

    Subclasses make their parameters in ``make_parameters`` and return Q, ``(out_features, in_features)``, from
    ``weight()``. Options of a subclass are keyword arguments, checked and set before ``super().__init__``.
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        check_positive(in_features=in_features, out_features=out_features)
        check_dtype(dtype)
        self.in_features, self.out_features = in_features, out_features
        self.make_parameters(device, dtype)
        self.register_parameter("bias", new_bias(out_features, in_features, bias, device, dtype))

    @abstractmethod
    def make_parameters(self, device: Any, dtype: Any) -> None:
        """Create every free parameter; called once, by ``__init__``."""

    @abstractmethod
    def weight(self) -> Tensor:
        """The constrained matrix ``(out_features, in_features)``, in float32 or better."""

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        with autocast_off(x):
            q = self.weight()
        return F.linear(x, q, None if self.bias is None else self.bias.to(q.dtype))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class ConstrainedConv2d(nn.Module, ABC):
    """A circular, size-preserving convolution with emulated stride whose norm is constrained by construction.

    Takes the arguments of ``nn.Conv2d`` in their order. ``stride`` s is an invertible downsampling (the kernel, of
    ``kernel_size`` taps, then acts on s^2 in_channels), ``padding`` is 'same' or the integer that preserves the size.
    Subclasses make their parameters in ``make_parameters``; their options are keyword arguments, checked and set
    before ``super().__init__``.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: str | Pair = "same",
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        if len(kernel) != 2:
            raise OptionError(f"kernel_size: expected one or two integers, got {kernel_size!r}")
        steps = (stride, stride) if isinstance(stride, int) else tuple(stride)
        if len(set(steps)) != 1:
            raise OptionError(f"stride: expected one integer for both axes, got {stride!r}")
        step = steps[0]
        check_positive(in_channels=in_channels, out_channels=out_channels, stride=step)
        check_positive(**{f"kernel_size[{i}]": k for i, k in enumerate(kernel)})
        check_dtype(dtype)
        self.check_padding(kernel, padding, padding_mode)
        if dilation not in (1, (1, 1)):
            raise OptionError(f"dilation: expected 1, got {dilation!r}")
        if groups != 1:
            raise OptionError(f"groups: expected 1, got {groups!r}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = kernel, step
        self.inner_channels = in_channels * step**2
        fan_in = self.inner_channels * kernel[0] * kernel[1]
        self.make_parameters(device, dtype)
        self.register_parameter("bias", new_bias(self.bias_channels(), fan_in, bias, device, dtype))

    @abstractmethod
    def make_parameters(self, device: Any, dtype: Any) -> None:
        """Create every free parameter; called once, by ``__init__``."""

    def bias_channels(self) -> int:
        """Number of biases: one for each output channel, unless the bias sits inside the layer."""
        return self.out_channels

    def check_padding(self, kernel: tuple[int, ...], padding: Any, padding_mode: str) -> None:
        """Raise ``OptionError`` unless padding keeps the size and is circular."""
        if padding_mode != "circular":
            raise OptionError(f"padding_mode: expected 'circular', got {padding_mode!r}")
        sizes = (padding, padding) if isinstance(padding, int) else padding
        same = tuple((k - 1) // 2 for k in kernel) if all(k % 2 for k in kernel) else None
        if padding != "same" and (same is None or tuple(sizes) != same):
            keeps = "'same'" if same is None else f"'same' or {same}"
            raise OptionError(f"padding: expected {keeps} for kernel_size {kernel}, got {padding!r}")

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"bias={self.bias is not None}"
        )

    @property
    def pointwise(self) -> bool:
        """Whether the kernel is 1 x 1: one matrix then serves every frequency, and every s x s patch of the image."""
        return self.kernel_size == (1, 1)

    def check_input(self, x: Tensor) -> None:
        """Raise ``ShapeError`` unless the layer accepts ``x``."""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ShapeError(
                f"{type(self).__name__}: expected input of shape (B, {self.in_channels}, H, W), got {tuple(x.shape)}"
            )
        check_divides(x.shape[-2], x.shape[-1], self.stride)

    def resample(self, x: Tensor) -> Tensor:
        """The input after invertible downsampling, its shape checked."""
        self.check_input(x)
        return downsample(x, self.stride)

    def on_patches(self, x: Tensor, matrix: Tensor) -> Tensor:
        """``matrix`` (out_channels, s^2 in_channels) on each patch, plus bias: a layer with a 1 x 1 kernel."""
        bias = None if self.bias is None else self.bias.to(matrix.dtype)
        return F.conv2d(x, patch_kernel(matrix, self.stride), bias, stride=self.stride)

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]


class SymbolConv2d(ConstrainedConv2d):
    """A convolution constrained at each frequency: subclasses return their symbol for an image size."""

    @abstractmethod
    def symbol(self, height: int, width: int) -> Symbol:
        """The constrained symbol on ``height x width`` (after downsampling), in float32 or better."""

    def matrix(self) -> Tensor:
        """Of a 1 x 1 kernel: the matrix (out_channels, s^2 in_channels) that all frequencies share."""
        return self.symbol(1, 1).real[0]

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if self.pointwise:
            self.check_input(x)
            with autocast_off(x):
                matrix = self.matrix()
                return self.on_patches(x.to(matrix.dtype), matrix)
        x = self.resample(x)
        with autocast_off(x):
            symbol = self.symbol(*x.shape[-2:])
            dtype = symbol.real.dtype
            return apply_symbol(symbol, x.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))


class KernelConv2d(ConstrainedConv2d):
    """A convolution whose constrained object is a kernel: subclasses return it."""

    @abstractmethod
    def kernel(self) -> Tensor:
        """The constrained kernel ``(out_channels, inner_channels, kh, kw)``, in float32 or better."""

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if self.pointwise:
            self.check_input(x)
            with autocast_off(x):
                kernel = self.kernel()
            return self.on_patches(x, kernel.flatten(1))
        x = self.resample(x)
        with autocast_off(x):
            kernel = fold(self.kernel(), *x.shape[-2:])
        return self.add_bias(circular_conv2d(x, kernel))
