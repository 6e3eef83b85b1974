"""Functions of torch that compute what a module does, as that module."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.lowering.axes import along, behind, viewed
from lipkit.lowering.build import COMPOSED, FUNCTIONS, Build, Function, function_name
from lipkit.lowering.observe import Operand
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.dense import linear
from lipkit.modules.normalization import UnitNorm

Maker = Callable[..., nn.Module]


def function_module(
    *targets: Callable[..., Any] | str, place: Callable[[Build], Build] | None = None
) -> Callable[[Maker], Maker]:
    """Register ``make(call, operand, *constants) -> module`` for exactly these functions and tensor methods (by name).

    The module must compute the same as the function. Networks that call the function can then be bounded, exported and
    certified. The registration replaces one by `lipkit.analysis.function_rule`, which serves bounds alone.

    Args:
        targets: the functions.
        place: rewrites a call whose batch is not first (`lipkit.lowering.axes`); None refuses such a call.

    Raises:
        NoRuleError: a target already has a module.

    >>> from lipkit.lowering.build import FUNCTIONS
    >>> def twice(x): return 2 * x
    >>> @function_module(twice)
    ... def _(call, x): return nn.LeakyReLU(2.0)  # it had better be the same function
    >>> FUNCTIONS.pop(twice).exported
    True
    """

    def put(make: Maker) -> Maker:
        @functools.wraps(make)
        def rule(call: Build, *args: Any, **kwargs: Any) -> int:
            module = make(call, *args, **kwargs)
            return call.add(module, call.operand(inspect.signature(make).bind(call, *args, **kwargs).args[1]))

        for target in targets:
            if target in COMPOSED or (target in FUNCTIONS and FUNCTIONS[target].exported):
                raise NoRuleError(f"{function_name(target)} already has a module; expected one for each function")
            FUNCTIONS[target] = Function(rule, place)
        return make

    return put


def _constructed(make: Callable[..., nn.Module], *targets: Callable[..., Any] | str, place: Any = None) -> None:
    """Register functions whose arguments after the input are those of ``make``, which constructs the module."""

    @function_module(*targets, place=place)
    def made(call: Build, input: Operand, *args: Any, inplace: bool = False, **kwargs: Any) -> nn.Module:
        call.constant([*args, *kwargs.values()], "argument")
        return make(*args, **kwargs)


for _row in ACTIVATIONS.values():
    _constructed(_row.kind, *_row.functions, place=viewed)
_constructed(nn.PixelShuffle, F.pixel_shuffle)
_constructed(nn.PixelUnshuffle, F.pixel_unshuffle)
_constructed(nn.ChannelShuffle, torch.channel_shuffle)
_constructed(nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d)
_constructed(nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
_constructed(nn.AdaptiveMaxPool1d, F.adaptive_max_pool1d)
_constructed(nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d)
_log = (F.log_softmax, torch.log_softmax, "log_softmax")  # refused by name, as the module is
_constructed(lambda dim=None, _stacklevel=3, dtype=None: nn.LogSoftmax(dim), *_log)


def _average_pool(kind: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda kernel_size, stride=None, *args, **named: kind(kernel_size, stride or None, *args, **named)


def _max_pool(kind: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    # The module has the last two arguments in the other order.
    return lambda kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False: kind(
        kernel_size, stride or None, padding, dilation, return_indices, ceil_mode
    )


_constructed(_average_pool(nn.AvgPool1d), F.avg_pool1d)
_constructed(_average_pool(nn.AvgPool2d), F.avg_pool2d)
_constructed(_max_pool(nn.MaxPool1d), F.max_pool1d, torch.max_pool1d)
_constructed(_max_pool(nn.MaxPool2d), F.max_pool2d, torch.max_pool2d)


@function_module(F.normalize, place=along(2, default=1))
def _normalize(
    call: Build, input: Operand, p: Any = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> nn.Module:
    call.require(call.constant(p, "norm") == 2, f"expected the norm p=2, got {p}")
    return UnitNorm(*call.dims(call.operand(input), dim), eps=call.constant(eps, "eps"))


@function_module(
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_),
    place=viewed,
)
def _dropout(
    call: Build, input: Operand, p: float = 0.5, training: Any = True, inplace: bool = False, train: Any = None
) -> nn.Module:
    return nn.Dropout(p).train(bool(training if train is None else train))  # torch.dropout calls it train


@function_module(F.prelu, "prelu")
def _prelu(call: Build, input: Operand, weight: Any) -> nn.Module:
    slopes = call.number(weight, "slope", torch.flatten)
    return filled(nn.PReLU(slopes.numel(), device="meta"), weight=slopes)


@function_module(F.linear, place=behind(lambda *given: 1))
def _linear(call: Build, input: Operand, weight: Any, bias: Any = None) -> nn.Module:
    matrix: Tensor = call.constant(weight, "weight")
    call.require(matrix.ndim == 2, f"expected a matrix as weight, got {tuple(matrix.shape)}")
    return linear(matrix, call.constant(bias, "bias"))


def _convolution(make: Callable[..., nn.Module], axes: int, target: Callable[..., Any], *options: str) -> None:
    """Register a convolution whose arguments after the bias are the module's ``options``, in this order."""

    @function_module(target)
    def made(call: Build, input: Operand, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> nn.Module:
        kernel = call.constant(weight, "weight")
        call.require(kernel.ndim == axes + 2, f"expected a weight of {axes + 2} dimensions, got {tuple(kernel.shape)}")
        return convolution(
            make, kernel, call.constant(bias, "bias"), **dict(zip(options, args, strict=False)), **kwargs
        )


_CONVOLUTION = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")
_convolution(nn.Conv1d, 1, F.conv1d, *_CONVOLUTION)
_convolution(nn.Conv2d, 2, F.conv2d, *_CONVOLUTION)
_convolution(nn.ConvTranspose1d, 1, F.conv_transpose1d, *_TRANSPOSED)
_convolution(nn.ConvTranspose2d, 2, F.conv_transpose2d, *_TRANSPOSED)


@function_module(F.batch_norm)
def _batch_norm(
    call: Build,
    input: Operand,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> nn.Module:
    mean, var = (call.constant(t, "statistic") for t in (running_mean, running_var))
    factors = call.constant(weight, "weight"), call.constant(bias, "bias")
    return batch_norm(call.operand(input).shape, mean, var, *factors, eps).train(training)


@function_module(F.layer_norm, place=behind(lambda x, shape, *rest: len(shape)))
def _layer_norm(
    call: Build, input: Operand, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> nn.Module:
    if weight is None and bias is not None:  # the module has no bias alone
        weight = torch.ones_like(call.constant(bias, "bias"))
    module = nn.LayerNorm(normalized_shape, call.constant(eps, "eps"), weight is not None, device="meta")
    return filled(module, weight=call.constant(weight, "weight"), bias=call.constant(bias, "bias"))


@function_module(F.group_norm)
def _group_norm(
    call: Build, input: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> nn.Module:
    given = call.constant(num_groups, "number"), call.operand(input).shape[0], call.constant(eps, "eps")
    module = nn.GroupNorm(*given, device="meta")
    return filled(module, weight=call.constant(weight, "weight"), bias=call.constant(bias, "bias"))


# Modules with given numbers.


def filled(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """Put these tensors in place of the module's parameters and buffers, whose shapes they must have; returns it."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (place := getattr(module, name)).shape:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)}, not {tuple(place.shape)}")
        if name in module._buffers:
            module._buffers[name] = tensor
        else:
            setattr(module, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
    return module


def convolution(
    make: Callable[..., nn.Module], weight: Tensor, bias: Tensor | None, *, groups: int = 1, **options: Any
) -> nn.Module:
    """The convolution of this weight and bias; ``make`` is its class."""
    first, second = len(weight), weight.shape[1] * groups
    channels = (first, second) if make in (nn.ConvTranspose1d, nn.ConvTranspose2d) else (second, first)
    layer = make(*channels, tuple(weight.shape[2:]), groups=groups, device="meta", **options)
    return filled(layer, weight=weight, bias=bias)


def batch_norm(
    shape: tuple[int, ...], mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> nn.Module:
    """The batch normalisation of samples of this shape, by these statistics and factors."""
    kind: Any = {3: nn.BatchNorm2d, 4: nn.BatchNorm3d}.get(len(shape), nn.BatchNorm1d)
    module = kind(shape[0], eps, device="meta").eval()
    module.num_batches_tracked = None  # it counts batches and enters no output
    return filled(module, running_mean=mean, running_var=var, weight=weight, bias=bias)
