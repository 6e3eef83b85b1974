r"""Rounding errors of modules that move, compare or transform single numbers.

A scalar function that the machine evaluates within :math:`u (a |h| + b) + j` of the exact one has an error of at most
:math:`u (a \|h\| + b \sqrt{n}) + j \sqrt{n}` on n numbers. The coefficients follow from the formulas that torch
evaluates, with an **allowance of 16 units in the last place** for each function of the mathematical library (exp,
expm1, log1p, tanh, erf): the libraries in use promise 4 or better. The exponential of a softmax is allowed 64.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lipkit.certificates.rounding.arithmetic import Arithmetic, Line, grow, grow_number, size
from lipkit.certificates.rounding.registry import Local, Measure, entries, nothing, rounding_rule
from lipkit.plain import GroupSort, MaxMin, ResizeChannels
from lipkit.protocol.registry import Shape, output_shape

# One unit in the last place is at most 2 u of the result.
LIBRARY = 2 * 16.0
SOFTMAX_EXP = 2 * 64.0


def pointwise(
    a: float, b: float, jump: float, input_shape: Shape, arithmetic: Arithmetic, largest: float = 0.0
) -> Measure:
    """A scalar function within ``u (a |h| + b) + jump`` on every number.

    Args:
        largest: modulus of the largest parameter that torch converts to the format; one beyond it breaks the function.
    """
    root = math.sqrt(entries(input_shape))
    # Few operations: second-order terms and what is flushed to zero on the way stay below these.
    factor = grow_number(a * arithmetic.unit * (1 + 2.0**-10))
    constant = grow_number(root * (b * arithmetic.unit * (1 + 2.0**-10) + jump + 8 * (1 + a + b) * arithmetic.tiny))

    def measure(x: torch.Tensor) -> Local:
        reached = Line(size(x), 1.0)
        found = reached.times(factor).plus(Line(torch.full_like(reached.at, constant), 0.0))
        peak = reached.times(grow_number(4.0 + a)).plus(Line(torch.full_like(reached.at, 8.0 + b + largest), 0.0))
        return Local(found, peak)

    return measure


def _rule(kind: type[nn.Module], a: float, b: float) -> None:
    @rounding_rule(kind)
    def _(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
        return pointwise(a, b, 0.0, input_shape, arithmetic)


for _kind, _a, _b in (
    (nn.ReLU, 0.0, 0.0),
    (nn.ReLU6, 0.0, 0.0),
    (nn.Tanh, LIBRARY + 2, 0.0),
    # x - tanh(x), |tanh(x)| <= |x|
    (nn.Tanhshrink, LIBRARY + 4, 0.0),
    # 1 / (1 + e^-x): the exponential's relative error counts a quarter, then two operations on at most 1
    (nn.Sigmoid, 1.0, LIBRARY + 4),
    # min(0, x) - log1p(e^-|x|), with log1p <= log 2
    (nn.LogSigmoid, 2.0, 2 * LIBRARY + 4),
    # x / (1 + |x|)
    (nn.Softsign, 6.0, 0.0),
    # (x + 3) / 6 and its product by x inside (-3, 3); a rounded 1 / 6
    (nn.Hardsigmoid, 4.0, 8.0),
    (nn.Hardswish, 16.0, 0.0),
    # x / (1 + e^-x) or x times the sigmoid
    (nn.SiLU, LIBRARY + 8, 0.0),
    # x tanh(log1p(e^x)): the slope of tanh at s times s is below 1/2
    (nn.Mish, 4 * LIBRARY + 8, 0.0),
    # 1.0508 x and 1.7581 (e^x - 1), the latter perhaps as a difference
    (nn.SELU, 2 * LIBRARY + 8, 2 * LIBRARY + 8),
    # x / 2 (1 + erf or tanh): the bracket is within (library + 8) u of its value, its argument within a few u
    (nn.GELU, 2 * LIBRARY + 16, 0.0),
):
    _rule(_kind, _a, _b)


@rounding_rule(nn.LeakyReLU, nn.PReLU)
def _leaky_relu(module: nn.LeakyReLU | nn.PReLU, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    slope = float(module.weight.detach().abs().amax()) if isinstance(module, nn.PReLU) else abs(module.negative_slope)
    lost = arithmetic.tiny / arithmetic.unit  # a slope below the normal range may count as 0
    return pointwise(3 * slope + lost, 0.0, 0.0, input_shape, arithmetic, slope)


@rounding_rule(nn.ELU)
def _elu(module: nn.ELU, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    alpha = max(1.0, abs(module.alpha))
    return pointwise((LIBRARY + 4) * alpha, (LIBRARY + 4) * alpha, 0.0, input_shape, arithmetic)


@rounding_rule(nn.CELU)
def _celu(module: nn.CELU, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    # alpha (e^(x / alpha) - 1) by a rounded 1 / alpha: one below the normal range may count as 0, and with it all of x
    inverse = 1 / module.alpha
    lost = 0.0 if inverse >= arithmetic.tiny else 2 / arithmetic.unit
    largest = max(module.alpha, inverse)
    return pointwise(LIBRARY + 8 + lost, (LIBRARY + 8) * module.alpha, 0.0, input_shape, arithmetic, largest)


@rounding_rule(nn.Softplus)
def _softplus(module: nn.Softplus, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    # log1p(e^(beta x)) / beta, and x itself beyond the threshold: a jump of log1p(e^-threshold) / beta, at a threshold
    # that beta x reaches within its rounding
    beta, threshold = float(module.beta), float(module.threshold)
    jump = math.exp(-threshold * (1 - 2.0**-20)) / beta * (1 + 2.0**-40)
    found = pointwise(LIBRARY + 8, (2 * LIBRARY + 8) / beta, jump, input_shape, arithmetic, max(beta, threshold))
    # The exponential must not overflow: below a low threshold it stays under a 64th of the range. Otherwise, with
    # z = beta x and the largest z that is allowed, m, e^z <= 1 + e^m z / m up to there: a bound that is linear in x and
    # uses up the room at m. Entries of an input at a distance s are below the largest one of the sample plus s.
    most = math.log(arithmetic.largest / 64)
    if threshold * (1 + 2.0**-20) <= most:
        return found
    slope = grow_number(arithmetic.room / most * beta)

    def measure(x: torch.Tensor) -> Local:
        local, furthest = found(x), x.detach().double().flatten(1).amax(1).clamp_min(0.0)
        rising = Line(furthest, 1.0).times(slope) if slope < math.inf else Line(torch.full_like(furthest, slope), 0.0)
        return local._replace(peak=local.peak.plus(rising))

    return measure


@rounding_rule(nn.Hardtanh)
def _hardtanh(module: nn.Hardtanh, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    # The limits are rounded to the format.
    return pointwise(0.0, max(abs(module.min_val), abs(module.max_val)), 0.0, input_shape, arithmetic)


@rounding_rule(nn.Softshrink)
def _softshrink(module: nn.Softshrink, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return pointwise(2.0, 4 * abs(module.lambd), 0.0, input_shape, arithmetic)


@rounding_rule(MaxMin, GroupSort, nn.MaxPool2d)
def _compare(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    shape = output_shape(module, input_shape)
    return pointwise(0.0, 0.0, 0.0, shape if entries(shape) > entries(input_shape) else input_shape, arithmetic)


@rounding_rule(
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ZeroPad2d,
    nn.Dropout,
    nn.Dropout2d,
    nn.AlphaDropout,
    ResizeChannels,
)
def _move(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return lambda x: Local(nothing(x), nothing(x))


@rounding_rule(nn.Softmax)
def _softmax(module: nn.Softmax, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    # e^-d / sum, d >= 0 the distance to the largest entry: rounding d moves e^-d by at most u d e^-d <= 0.37 u, and
    # the sum of n of them by at most 0.37 n u; the results have a norm of at most 1 in each group of n.
    # The implicit dimension counts as the whole sample.
    dim = module.dim
    n = entries(input_shape)
    if isinstance(dim, int) and dim != 0 and -len(input_shape) <= dim <= len(input_shape):
        n = input_shape[dim - 1] if dim > 0 else input_shape[dim]
    groups = math.sqrt(entries(input_shape) / n)
    each = arithmetic.gamma(2 * SOFTMAX_EXP + 2 * n + 8) + arithmetic.unit * math.sqrt(n)
    constant = grow_number(groups * each + 8 * math.sqrt(entries(input_shape)) * arithmetic.tiny)

    def measure(x: torch.Tensor) -> Local:
        reached = Line(size(x), 1.0)
        peak = reached.times(4.0).plus(Line(torch.full_like(reached.at, 4.0 * n), 0.0))
        return Local(Line(grow(torch.full_like(reached.at, constant)), 0.0), peak)

    return measure
