"""Rules of torch's own modules, with their true constants."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from lipkit.bounds import circular, spectral_norm, symbol_sup
from lipkit.bounds.lmi import gain_bound
from lipkit.bounds.rounding import to_double, up
from lipkit.errors import NoRuleError, ShapeError
from lipkit.plain import Affine, Network
from lipkit.protocol.pooling import average_norm, average_norm_any_size, max_pool_constant
from lipkit.protocol.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.protocol.slopes import slope_runs

# Largest slope of each activation whose slope is a constant of nature, rounded up in the last digit given.
# GELU: at x = sqrt 2, Phi(x) + x phi(x). SiLU and Mish: maximum of the derivative, found to 1e-12 by bisection of the
# second derivative (tests/protocol/test_slopes.py). Softmax: its Jacobian diag(p) - p p^T has norm <= 1/2.
SLOPES: dict[type[nn.Module], float] = {
    nn.ReLU: 1.0,
    nn.ReLU6: 1.0,
    nn.CELU: 1.0,
    nn.Tanh: 1.0,
    nn.Softplus: 1.0,
    nn.Softsign: 1.0,
    nn.LogSigmoid: 1.0,
    nn.Hardtanh: 1.0,
    nn.Softshrink: 1.0,
    nn.Tanhshrink: 1.0,
    nn.Sigmoid: 0.25,
    nn.Hardsigmoid: math.nextafter(1 / 6, 1),
    nn.Hardswish: 1.5,
    nn.SiLU: 1.0998393202,
    nn.Mish: 1.0884981618,
    nn.SELU: 1.7580993409,
    nn.Softmax: 0.5,
}
GELU_SLOPES = {"none": 1.1289041452, "tanh": 1.1289930687}
ISOMETRIES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d)


@lipschitz_rule(*SLOPES)
def _constant_slope(module: nn.Module, input_shape: Shape | None) -> float:
    return SLOPES[type(module)]


@lipschitz_rule(*ISOMETRIES)
def _isometry(module: nn.Module, input_shape: Shape | None) -> float:
    return 1.0


@lipschitz_rule(nn.GELU)
def _gelu(module: nn.GELU, input_shape: Shape | None) -> float:
    return GELU_SLOPES[module.approximate]


@lipschitz_rule(nn.LeakyReLU)
def _leaky_relu(module: nn.LeakyReLU, input_shape: Shape | None) -> float:
    return max(1.0, abs(module.negative_slope))


@lipschitz_rule(nn.ELU)
def _elu(module: nn.ELU, input_shape: Shape | None) -> float:
    return max(1.0, abs(module.alpha))


@lipschitz_rule(nn.PReLU)
def _prelu(module: nn.PReLU, input_shape: Shape | None) -> Tensor:
    return to_double(module.weight).abs().amax().clamp_min(1.0)


@lipschitz_rule(nn.Linear)
def _linear(module: nn.Linear, input_shape: Shape | None) -> Tensor:
    return spectral_norm(module.weight)


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


@lipschitz_rule(nn.Conv2d)
def _conv2d(module: nn.Conv2d, input_shape: Shape | None) -> Tensor:
    kernel, k = module.weight, module.kernel_size
    if module.padding_mode not in ("zeros", "circular"):
        raise NoRuleError(
            f"nn.Conv2d: expected padding_mode 'zeros' or 'circular', got {module.padding_mode!r}: reflected or "
            "repeated borders can exceed the norm of the kernel"
        )
    if module.padding_mode == "zeros":
        return symbol_sup(kernel, groups=module.groups)
    reach = [(size - 1) * d for size, d in zip(k, module.dilation, strict=True)]
    same, none = module.padding == "same", module.padding == "valid"
    padded = reach if same else [0, 0] if none else [2 * int(p) for p in module.padding]
    if any(p > r for p, r in zip(padded, reach, strict=True)):
        raise NoRuleError(
            f"nn.Conv2d with circular padding: expected at most {reach} padded rows and columns in total "
            f"(dilation x (kernel_size - 1)), got {padded}: outputs beyond one period repeat and raise the norm"
        )
    if input_shape is not None and len(input_shape) == 3 and tuple(module.dilation) == (1, 1):
        return circular(kernel, *input_shape[1:], groups=module.groups)
    return symbol_sup(kernel, groups=module.groups)


@lipschitz_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(module: nn.BatchNorm2d, input_shape: Shape | None) -> Tensor:
    scale, _ = _batch_norm_affine(module)
    return up(scale.abs().amax(), 4)


def _batch_norm_affine(module: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    if module.training or module.running_mean is None or module.running_var is None:
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected evaluation mode with running statistics, got "
            f"training={module.training}, track_running_stats={module.track_running_stats}: batch statistics make "
            "it depend on the whole batch; call .eval()"
        )
    scale = (to_double(module.running_var) + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * to_double(module.weight)
    shift = -to_double(module.running_mean) * scale
    if module.bias is not None:
        shift = shift + to_double(module.bias)
    return scale, shift


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
    return max_pool_constant(_pair(module.kernel_size), _pair(module.stride), _pair(module.dilation))


@lipschitz_rule(nn.AvgPool2d)
def _avg_pool(module: nn.AvgPool2d, input_shape: Shape | None) -> float:
    kernels, strides, paddings = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
    axes = list(zip(kernels, strides, paddings, strict=True))
    if module.divisor_override is not None:
        # Every window then divides by the same number: the plain windows with counted padding, rescaled.
        factor = math.prod(kernels) / abs(module.divisor_override)
        return math.nextafter(factor * math.prod(average_norm_any_size(*a, False, True) for a in axes), math.inf)
    flags = (module.ceil_mode, module.count_include_pad)
    if input_shape is None:
        constant = math.prod(average_norm_any_size(*axis, *flags) for axis in axes)
    else:
        sizes = input_shape[-2:]
        constant = math.prod(average_norm(n, *axis, *flags) for n, axis in zip(sizes, axes, strict=True))
    return math.nextafter(constant, math.inf)


@lipschitz_rule(nn.AdaptiveAvgPool2d)
def _adaptive_avg_pool(module: nn.AdaptiveAvgPool2d, input_shape: Shape | None) -> float:
    if tuple(_pair(module.output_size)) != (1, 1) or input_shape is None:  # type: ignore[arg-type]
        raise NoRuleError(
            f"nn.AdaptiveAvgPool2d: expected output_size 1 and a known input_shape, got {module.output_size} and "
            f"{input_shape}: use nn.AvgPool2d, whose windows do not depend on the input"
        )
    return math.nextafter(1 / math.sqrt(math.prod(input_shape[-2:])), math.inf)


@lipschitz_rule(nn.Sequential)
def _sequential(module: nn.Sequential, input_shape: Shape | None) -> Tensor:
    return _product(list(module), input_shape)


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
        factor = _product(part, shape).clamp_max(gain)
        product = product * factor if float(factor) in (0.0, 1.0) else up(product * factor, 1)
        for child in part:
            shape = output_shape(child, shape)
        position += len(part)
    return product


def _product(children: list[nn.Module], input_shape: Shape | None) -> Tensor:
    product = torch.ones((), dtype=torch.float64)
    for i, child in enumerate(children):
        factor = lipschitz(child, input_shape)
        product = up(product * factor, 1) if float(factor.detach()) not in (0.0, 1.0) else product * factor
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


@export_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _export_batch_norm(module: nn.BatchNorm2d, input_shape: Shape) -> nn.Module:
    scale, shift = _batch_norm_affine(module)
    dtype = module.running_var.dtype  # type: ignore[union-attr]
    return Affine(scale.to(dtype), shift.to(dtype))


@export_rule(
    *SLOPES,
    *ISOMETRIES,
    nn.GELU,
    nn.LeakyReLU,
    nn.ELU,
    nn.PReLU,
    nn.Linear,
    nn.Conv2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)
def _copy(module: nn.Module, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return copy.deepcopy(module)
