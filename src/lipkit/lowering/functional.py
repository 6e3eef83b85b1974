"""Functions of torch that compute what a module does: `FUNCTIONAL` makes that module from the arguments of a call.

A maker is called with the call, its operand and its constants, and returns the module, which is bounded and exported by
the rules of its type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import LipkitError, NoRuleError
from lipkit.lowering.axes import RULES, along, behind, viewed
from lipkit.lowering.interpreter import FunctionCall, Operand, function_name
from lipkit.modules.activations import ACTIVATIONS

Maker = Callable[..., nn.Module]

FUNCTIONAL: dict[Any, Maker] = {}
"""Functions, and tensor methods by name, to ``make(call, operand, *constants) -> module``."""


def function_module(*targets: Callable[..., Any] | str) -> Callable[[Maker], Maker]:
    """Register ``make(call, operand, *constants) -> module`` for exactly these functions and tensor methods (by name).

    The module must compute the same as the function. With it, networks that call the function are bounded, exported
    and certified; a rule for bounds alone is `lipkit.analysis.function_rule`.

    Raises:
        NoRuleError: a target already has a maker.

    >>> def twice(x): return 2 * x
    >>> @function_module(twice)
    ... def _(call, x): return nn.LeakyReLU(2.0)  # it had better be the same function
    >>> FUNCTIONAL.pop(twice) is _
    True
    """

    def put(make: Maker) -> Maker:
        for target in targets:
            if target in FUNCTIONAL:
                raise NoRuleError(f"{function_name(target)} already has a module; expected one for each function")
            FUNCTIONAL[target] = make
        return make

    return put


def covered(call: FunctionCall, rule: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``rule(call, ...)``.

    Raises:
        NoRuleError: arguments that the rule does not cover.
    """
    try:
        inspect.signature(rule).bind(call, *args, **kwargs)
    except TypeError as error:
        raise call.refuse(f"expected arguments that its rule covers, got other ones: {error}") from None
    try:
        return rule(call, *args, **kwargs)
    except LipkitError:
        raise
    except Exception as error:  # arguments of kinds that the rule does not expect
        raise call.refuse(f"expected arguments that its rule covers, got other ones: {error}") from error


def first_operand(call: FunctionCall, make: Maker, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operand:
    """The tensor that the module of a call is applied to."""
    return call.operand(inspect.signature(make).bind(call, *args, **kwargs).args[1])


def _activation(make: Callable[..., nn.Module], *targets: Callable[..., Any] | str) -> None:
    """Activations whose functional arguments are those of the module."""

    @function_module(*targets)
    def made(call: FunctionCall, input: Operand, *args: Any, inplace: bool = False, **kwargs: Any) -> nn.Module:
        call.constant([*args, *kwargs.values()], "argument")
        try:
            return make(*args, **kwargs)
        except TypeError as error:
            raise call.refuse(f"expected the arguments of nn.{make.__name__}, got other ones: {error}") from None


for _row in ACTIVATIONS.values():
    if _row.functions:
        _activation(_row.kind, *_row.functions)
        RULES.update(dict.fromkeys(_row.functions, viewed))
_activation(nn.PixelShuffle, F.pixel_shuffle)
_activation(nn.PixelUnshuffle, F.pixel_unshuffle)
_activation(nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
_activation(nn.AvgPool2d, F.avg_pool2d)


@function_module(F.max_pool2d)
def _max_pool2d(
    call: FunctionCall,
    input: Operand,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> nn.Module:
    return nn.MaxPool2d(kernel_size, stride, padding, dilation, return_indices, ceil_mode)


# torch.max_pool2d has no return_indices.
@function_module(torch.max_pool2d)
def _torch_max_pool2d(
    call: FunctionCall,
    input: Operand,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> nn.Module:
    stride = stride if isinstance(stride, int) or stride else None
    return nn.MaxPool2d(kernel_size, stride, padding, dilation, False, ceil_mode)


@function_module(F.interpolate)
def _interpolate(
    call: FunctionCall,
    input: Operand,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    **options: Any,
) -> nn.Module:
    call.constant([size, scale_factor], "size")
    if any(value not in (None, False) for value in options.values()):
        raise call.refuse(f"expected size or scale_factor and a mode, got {sorted(options)}")
    scale = tuple(map(float, scale_factor)) if isinstance(scale_factor, (tuple, list)) else scale_factor
    return nn.Upsample(None if size is None else tuple(call.shape[1:]), scale, mode)


@function_module(F.softmax, torch.softmax, "softmax")
def _softmax(call: FunctionCall, input: Operand, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> nn.Module:
    call.dims(call.operand(input), dim)
    return nn.Softmax(dim)


@function_module(F.dropout, F.dropout2d, torch.dropout, torch.dropout_)
def _dropout(
    call: FunctionCall, input: Operand, p: float = 0.5, training: Any = True, inplace: bool = False, train: Any = None
) -> nn.Module:
    return nn.Dropout(p).train(bool(training if train is None else train))


@function_module(F.linear)
def _linear(call: FunctionCall, input: Operand, weight: Any, bias: Any = None) -> nn.Module:
    matrix: Tensor = call.constant(weight, "weight")
    if matrix.ndim != 2:
        raise call.refuse(f"expected a matrix as weight, got {tuple(matrix.shape)}")
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], device="meta")
    return with_tensors(call, layer, weight=matrix, bias=bias)


def _convolution(make: type[nn.Conv1d | nn.Conv2d], axes: int, target: Callable[..., Any]) -> None:
    @function_module(target)
    def made(
        call: FunctionCall,
        input: Operand,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> nn.Module:
        kernel = _checked_kernel(call, weight, axes)
        size: Any = tuple(kernel.shape[2:])
        channels = (kernel.shape[1] * groups, kernel.shape[0])
        layer = make(*channels, size, stride, padding, dilation, groups, device="meta")
        return with_tensors(call, layer, weight=kernel, bias=bias)


def _transposed(make: type[nn.ConvTranspose1d | nn.ConvTranspose2d], axes: int, target: Callable[..., Any]) -> None:
    @function_module(target)
    def made(
        call: FunctionCall,
        input: Operand,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> nn.Module:
        kernel = _checked_kernel(call, weight, axes)
        size: Any = tuple(kernel.shape[2:])
        channels = (kernel.shape[0], kernel.shape[1] * groups)
        layer = make(*channels, size, stride, padding, output_padding, groups, True, dilation, device="meta")
        return with_tensors(call, layer, weight=kernel, bias=bias)


def _checked_kernel(call: FunctionCall, weight: Any, axes: int) -> Tensor:
    kernel: Tensor = call.constant(weight, "weight")
    if kernel.ndim != axes + 2:
        raise call.refuse(f"expected a weight of {axes + 2} dimensions, got {tuple(kernel.shape)}")
    return kernel


_convolution(nn.Conv1d, 1, F.conv1d)
_convolution(nn.Conv2d, 2, F.conv2d)
_transposed(nn.ConvTranspose1d, 1, F.conv_transpose1d)
_transposed(nn.ConvTranspose2d, 2, F.conv_transpose2d)


@function_module(F.batch_norm)
def _batch_norm(
    call: FunctionCall,
    input: Operand,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> nn.Module:
    statistics = [call.constant(t, "statistic") for t in (running_mean, running_var)]
    channels = call.operand(input).shape[0]
    norm = {3: nn.BatchNorm2d, 4: nn.BatchNorm3d}.get(len(input.shape), nn.BatchNorm1d)
    module = norm(channels, eps, device="meta").train(training)
    module.num_batches_tracked = None  # it counts batches and enters no output
    module.running_mean, module.running_var = statistics
    return with_tensors(call, module, weight=weight, bias=bias)


@function_module(F.layer_norm)
def _layer_norm(
    call: FunctionCall, input: Operand, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> nn.Module:
    module = nn.LayerNorm(normalized_shape, call.constant(eps, "eps"), device="meta")
    return with_tensors(call, module, weight=weight, bias=bias)


@function_module(F.group_norm)
def _group_norm(
    call: FunctionCall, input: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> nn.Module:
    channels = call.operand(input).shape[0]
    module = nn.GroupNorm(call.constant(num_groups, "number"), channels, call.constant(eps, "eps"), device="meta")
    return with_tensors(call, module, weight=weight, bias=bias)


RULES.update(dict.fromkeys((F.softmax, torch.softmax, "softmax"), along(1)))
RULES.update(dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), viewed))
RULES[F.linear] = behind(lambda *given: 1)
RULES[F.layer_norm] = behind(lambda x, shape, *rest: len(shape))


def with_tensors(call: FunctionCall, module: nn.Module, **tensors: Any) -> nn.Module:
    """``module`` with these constants as its parameters."""
    for name, value in tensors.items():
        tensor = call.constant(value, name)
        setattr(module, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
    return module
