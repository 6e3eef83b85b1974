"""Rules of torch's own modules but for convolutions and activations, with their true constants."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lipkit.bounds import spectral_norm
from lipkit.bounds.lmi import gain_bound
from lipkit.bounds.rounding import gamma, multiply_up
from lipkit.errors import NoRuleError, ShapeError
from lipkit.plain import Network
from lipkit.protocol.pooling import average_norm, average_norm_any_size, max_pool_constant
from lipkit.protocol.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.protocol.slopes import slope_runs

RESHAPES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d)


def _check_dims(module: nn.Module, input_shape: Shape | None, least: int, most: int = 9) -> None:
    """``ShapeError`` where the module would take the batch for channels or pixels, as it does for unbatched input."""
    if input_shape is not None and not least <= len(input_shape) <= most:
        dims = f"{least}" if least == most else f"at least {least}"
        raise ShapeError(f"nn.{type(module).__name__}: expected {dims} dimensions without the batch, got {input_shape}")


def _check_keeps_batch(module: nn.Module, dim: object, input_shape: Shape | None, last_is_safe: bool) -> None:
    """``NoRuleError`` unless dimension ``dim`` (batch included) is known not to be the batch."""
    if isinstance(dim, int) and not isinstance(dim, bool):
        if dim > 0 or (dim == -1 and last_is_safe):
            return
        if dim < 0 and input_shape is not None and -dim <= len(input_shape):
            return
    raise NoRuleError(
        f"nn.{type(module).__name__}: expected dimensions that leave the batch (dimension 0) alone, got {dim!r} for "
        f"inputs of shape {input_shape}: its output would mix samples; count from 1"
    )


@lipschitz_rule(nn.Identity)
def _identity(module: nn.Identity, input_shape: Shape | None) -> float:
    return 1.0


@lipschitz_rule(nn.Flatten)
def _flatten(module: nn.Flatten, input_shape: Shape | None) -> float:
    _check_keeps_batch(module, module.start_dim, input_shape, last_is_safe=True)
    return 1.0


@lipschitz_rule(nn.Unflatten)
def _unflatten(module: nn.Unflatten, input_shape: Shape | None) -> float:
    _check_keeps_batch(module, module.dim, input_shape, last_is_safe=True)
    return 1.0


@lipschitz_rule(nn.PixelShuffle, nn.PixelUnshuffle)
def _pixel_shuffle(module: nn.Module, input_shape: Shape | None) -> float:
    _check_dims(module, input_shape, 3)
    return 1.0


@lipschitz_rule(nn.ZeroPad2d)
def _zero_pad(module: nn.ZeroPad2d, input_shape: Shape | None) -> float:
    # Negative padding crops: still at most 1.
    _check_dims(module, input_shape, 2)
    return 1.0


@lipschitz_rule(nn.Softmax)
def _softmax(module: nn.Softmax, input_shape: Shape | None) -> float:
    # Its Jacobian diag(p) - p p^T has norm at most 1/2.
    _check_keeps_batch(module, module.dim, input_shape, last_is_safe=True)
    return 0.5


@lipschitz_rule(nn.Linear)
def _linear(module: nn.Linear, input_shape: Shape | None) -> Tensor:
    return spectral_norm(module.weight)


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


@lipschitz_rule(nn.Dropout, nn.Dropout2d, nn.AlphaDropout)
def _dropout(module: nn.Dropout, input_shape: Shape | None) -> float:
    if module.training:
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected evaluation mode, got training mode, where the output is random; "
            "call .eval()"
        )
    return 1.0


@lipschitz_rule(nn.MaxPool2d)
def _max_pool(module: nn.MaxPool2d, input_shape: Shape | None) -> float:
    _check_dims(module, input_shape, 2)
    if module.return_indices:
        raise NoRuleError("nn.MaxPool2d: expected return_indices=False, got True: indices are not Lipschitz")
    return max_pool_constant(_pair(module.kernel_size), _pair(module.stride), _pair(module.dilation))


@lipschitz_rule(nn.AvgPool2d)
def _avg_pool(module: nn.AvgPool2d, input_shape: Shape | None) -> float:
    kernels, strides, paddings = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
    _check_dims(module, input_shape, 2)
    axes = list(zip(kernels, strides, paddings, strict=True))
    if module.divisor_override is not None:
        # Every window then divides by the same number: the plain windows with counted padding, rescaled.
        factor = math.prod(kernels) / abs(module.divisor_override)
        return factor * math.prod(average_norm_any_size(*a, False, True) for a in axes) * (1 + gamma(8))
    flags = (module.ceil_mode, module.count_include_pad)
    if input_shape is None:
        constant = math.prod(average_norm_any_size(*axis, *flags) for axis in axes)
    else:
        sizes = input_shape[-2:]
        constant = math.prod(average_norm(n, *axis, *flags) for n, axis in zip(sizes, axes, strict=True))
    return constant * (1 + gamma(4))


@lipschitz_rule(nn.AdaptiveAvgPool2d)
def _adaptive_avg_pool(module: nn.AdaptiveAvgPool2d, input_shape: Shape | None) -> float:
    _check_dims(module, input_shape, 2)
    if module.output_size not in (1, (1, 1), [1, 1]):
        raise NoRuleError(
            f"nn.AdaptiveAvgPool2d: expected output_size 1, got {module.output_size}: use nn.AvgPool2d, whose windows "
            "do not depend on the input"
        )
    if input_shape is None:
        raise ShapeError(
            "nn.AdaptiveAvgPool2d: expected an input_shape, because its constant depends on the image, got none: "
            "lipkit.lipschitz(network, input_shape=(3, 32, 32)), for instance"
        )
    return 1 / math.sqrt(math.prod(input_shape[-2:])) * (1 + gamma(4))


@lipschitz_rule(nn.Sequential)
def _sequential(module: nn.Sequential, input_shape: Shape | None) -> Tensor:
    return chain_constant(list(module), input_shape)


@lipschitz_rule(Network)
def _network(module: Network, input_shape: Shape | None) -> Tensor:
    if input_shape not in (None, module.input_shape):
        raise ShapeError(f"network exported for inputs of shape {module.input_shape}, got {input_shape}")
    gains = {run.start: (run, gain_bound(run.weights, run.multipliers)) for run in slope_runs(module)}
    product, shape, position = torch.ones((), dtype=torch.float64), module.input_shape, 0
    children = list(module)
    while position < len(children):
        run, gain = gains.get(position, (None, math.inf))
        part = children[position : run.stop if run else position + 1]
        factor = chain_constant(part, shape)
        if bool(factor.isfinite()):  # a bias that is not finite shows there only
            factor = factor.clamp_max(gain)
        product = multiply_up(product, factor)
        for child in part:
            shape = output_shape(child, shape)
        position += len(part)
    return product


def chain_constant(children: Sequence[nn.Module], input_shape: Shape | None) -> Tensor:
    """The product of the constants of modules that follow each other, rounded up."""
    product = torch.ones((), dtype=torch.float64)
    for i, child in enumerate(children):
        factor = lipschitz(child, input_shape)
        product = multiply_up(product, factor)
        if input_shape is not None and i + 1 < len(children):
            input_shape = output_shape(child, input_shape)
    return product


@export_rule(nn.Sequential, Network)
def _export_sequential(module: nn.Sequential, input_shape: Shape) -> nn.Module:
    parts: list[nn.Module] = []
    for child in module:
        part = export(child, input_shape)
        input_shape = output_shape(part, input_shape)
        parts.append(part)
    return nn.Sequential(*parts)


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
