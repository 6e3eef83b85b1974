"""Rules of ``torch.nn.functional``: each is the module of the same computation, bounded by that module's rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.analysis.calls import Call, Operand, function_rule
from lipkit.analysis.forms import Form
from lipkit.modules.activations import ACTIVATIONS


def _activation(make: Callable[..., nn.Module], *targets: Callable[..., Any] | str) -> None:
    """Activations whose functional arguments are those of the module."""

    @function_rule(*targets)
    def rule(call: Call, input: Operand, *args: Any, inplace: bool = False, **kwargs: Any) -> Form:
        call.constant([*args, *kwargs.values()], "argument")
        try:
            module = make(*args, **kwargs)
        except TypeError as error:
            raise call.refuse(f"expected the arguments of nn.{make.__name__}, got other ones: {error}") from None
        return call.module(input, module)


for _row in ACTIVATIONS.values():
    if _row.functions:
        _activation(_row.kind, *_row.functions)
_activation(nn.PixelShuffle, F.pixel_shuffle)
_activation(nn.PixelUnshuffle, F.pixel_unshuffle)
_activation(nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
_activation(nn.AvgPool2d, F.avg_pool2d)


@function_rule(F.max_pool2d)
def _max_pool2d(
    call: Call,
    input: Operand,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Form:
    return call.module(input, nn.MaxPool2d(kernel_size, stride, padding, dilation, return_indices, ceil_mode))


# torch.max_pool2d has no return_indices.
@function_rule(torch.max_pool2d)
def _torch_max_pool2d(
    call: Call,
    input: Operand,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Form:
    stride = stride if isinstance(stride, int) or stride else None
    return call.module(input, nn.MaxPool2d(kernel_size, stride, padding, dilation, False, ceil_mode))


@function_rule(F.softmax, torch.softmax, "softmax")
def _softmax(call: Call, input: Operand, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Form:
    call.dims(call.operand(input), dim)
    return call.module(input, nn.Softmax(dim))


@function_rule(F.dropout, F.dropout2d, torch.dropout, torch.dropout_)
def _dropout(
    call: Call, input: Operand, p: float = 0.5, training: Any = True, inplace: bool = False, train: Any = None
) -> Form:
    return call.module(input, nn.Dropout(p).train(bool(training if train is None else train)))


@function_rule(F.linear)
def _linear(call: Call, input: Operand, weight: Any, bias: Any = None) -> Form:
    call.constant(bias, "bias")
    return call.module(input, with_weight(nn.Linear(1, 1, device="meta"), call.constant(weight, "weight")))


def _convolution(make: type[nn.Conv1d | nn.Conv2d], axes: int, target: Callable[..., Any]) -> None:
    @function_rule(target)
    def rule(
        call: Call,
        input: Operand,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Form:
        kernel = _checked_kernel(call, weight, bias, axes)
        channels = (kernel.shape[1] * groups, kernel.shape[0])
        size: Any = tuple(kernel.shape[2:])
        layer = make(*channels, size, stride, padding, dilation, groups, device="meta")
        return call.module(input, with_weight(layer, kernel))


def _transposed(make: type[nn.ConvTranspose1d | nn.ConvTranspose2d], axes: int, target: Callable[..., Any]) -> None:
    @function_rule(target)
    def rule(
        call: Call,
        input: Operand,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Form:
        kernel = _checked_kernel(call, weight, bias, axes)
        channels = (kernel.shape[0], kernel.shape[1] * groups)
        size: Any = tuple(kernel.shape[2:])
        layer = make(*channels, size, stride, padding, output_padding, groups, True, dilation, device="meta")
        return call.module(input, with_weight(layer, kernel))


def _checked_kernel(call: Call, weight: Any, bias: Any, axes: int) -> Tensor:
    call.constant(bias, "bias")
    kernel: Tensor = call.constant(weight, "weight")
    if kernel.ndim != axes + 2:
        raise call.refuse(f"expected a weight of {axes + 2} dimensions, got {tuple(kernel.shape)}")
    return kernel


_convolution(nn.Conv1d, 1, F.conv1d)
_convolution(nn.Conv2d, 2, F.conv2d)
_transposed(nn.ConvTranspose1d, 1, F.conv_transpose1d)
_transposed(nn.ConvTranspose2d, 2, F.conv_transpose2d)


@function_rule(F.batch_norm)
def _batch_norm(
    call: Call,
    input: Operand,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Form:
    statistics = [call.constant(t, "statistic") for t in (running_mean, running_var)]
    channels = call.operand(input).shape[0]
    module = nn.BatchNorm2d(channels, eps, device="meta").train(training)
    module.num_batches_tracked = None  # it counts batches and enters no output
    module.running_mean, module.running_var = statistics
    return call.module(input, _with_affine(call, module, weight, bias))


@function_rule(F.layer_norm)
def _layer_norm(
    call: Call, input: Operand, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Form:
    module = nn.LayerNorm(normalized_shape, call.constant(eps, "eps"), device="meta")
    return call.module(input, _with_affine(call, module, weight, bias))


@function_rule(F.group_norm)
def _group_norm(
    call: Call, input: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Form:
    channels = call.operand(input).shape[0]
    module = nn.GroupNorm(call.constant(num_groups, "number"), channels, call.constant(eps, "eps"), device="meta")
    return call.module(input, _with_affine(call, module, weight, bias))


def _with_affine(call: Call, module: nn.Module, weight: Any, bias: Any) -> nn.Module:
    for name, value in (("weight", call.constant(weight, "weight")), ("bias", call.constant(bias, "bias"))):
        setattr(module, name, None if value is None else nn.Parameter(value, requires_grad=False))
    return module


def with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    """``module`` with this weight and no bias."""
    module.weight, module.bias = nn.Parameter(weight, requires_grad=False), None  # type: ignore[assignment]
    return module
