"""Rules of torch's activations, entry by entry: the largest slope is the constant."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lipkit.bounds.rounding import to_double
from lipkit.errors import NoRuleError
from lipkit.protocol.registry import Shape, export_rule, lipschitz_rule
from lipkit.protocol.torch_rules import export_copy

# Largest slope of each activation whose slope is a constant of nature, rounded up in the last digit given.
# GELU: at x = sqrt 2, Phi(x) + x phi(x). SiLU and Mish: maximum of the derivative, found to 1e-12 by bisection of the
# second derivative (tests/protocol/test_slopes.py).
SLOPES: dict[type[nn.Module], float] = {
    nn.ReLU: 1.0,
    nn.ReLU6: 1.0,
    nn.Tanh: 1.0,
    nn.Softsign: 1.0,
    nn.LogSigmoid: 1.0,
    nn.Tanhshrink: 1.0,
    nn.Sigmoid: 0.25,
    nn.Hardsigmoid: math.nextafter(1 / 6, 1),
    nn.Hardswish: 1.5,
    nn.SiLU: 1.0998393202,
    nn.Mish: 1.0884981618,
    nn.SELU: 1.7580993409,
}
GELU_SLOPES = {"none": 1.1289041452, "tanh": 1.1289930687}
# Softplus returns x itself beyond its threshold t, which is lower by log(1 + e^-t) / beta: a jump, below float32
# rounding of the output from t = 20 (torch's default) on.
SOFTPLUS_THRESHOLD = 20.0


@lipschitz_rule(*SLOPES)
def _constant_slope(module: nn.Module, input_shape: Shape | None) -> float:
    return SLOPES[type(module)]


def _positive(module: nn.Module, name: str, why: str, least: float = 0.0) -> None:
    value = getattr(module, name)
    if not (math.isfinite(value) and value > 0 and value >= least):
        wanted = f"at least {least:g}" if least else "a positive finite number"
        raise NoRuleError(f"nn.{type(module).__name__}: expected {name} {wanted}, got {value}: {why}")


@lipschitz_rule(nn.Hardtanh)
def _hardtanh(module: nn.Hardtanh, input_shape: Shape | None) -> float:
    return 1.0 if -math.inf < module.min_val <= module.max_val < math.inf else math.inf


@lipschitz_rule(nn.Softshrink)
def _softshrink(module: nn.Softshrink, input_shape: Shape | None) -> float:
    return 1.0 if 0 <= module.lambd < math.inf else math.inf


@lipschitz_rule(nn.CELU)
def _celu(module: nn.CELU, input_shape: Shape | None) -> float:
    _positive(module, "alpha", "it grows exponentially otherwise")
    return 1.0


@lipschitz_rule(nn.Softplus)
def _softplus(module: nn.Softplus, input_shape: Shape | None) -> float:
    _positive(module, "beta", "it has no rule otherwise")
    _positive(module, "threshold", "it jumps at a lower one, so no constant bounds it", SOFTPLUS_THRESHOLD)
    return 1.0


@lipschitz_rule(nn.GELU)
def _gelu(module: nn.GELU, input_shape: Shape | None) -> float:
    return GELU_SLOPES[module.approximate]


def _at_least_one(slope: float) -> float:
    return math.inf if math.isnan(slope) else max(1.0, abs(slope))


@lipschitz_rule(nn.LeakyReLU)
def _leaky_relu(module: nn.LeakyReLU, input_shape: Shape | None) -> float:
    return _at_least_one(module.negative_slope)


@lipschitz_rule(nn.ELU)
def _elu(module: nn.ELU, input_shape: Shape | None) -> float:
    return _at_least_one(module.alpha)


@lipschitz_rule(nn.PReLU)
def _prelu(module: nn.PReLU, input_shape: Shape | None) -> Tensor:
    return to_double(module.weight).abs().amax().clamp_min(1.0)


export_rule(*SLOPES, nn.Hardtanh, nn.Softshrink, nn.CELU, nn.GELU, nn.Softplus, nn.LeakyReLU, nn.ELU, nn.PReLU)(
    export_copy
)
