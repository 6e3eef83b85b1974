r"""Scalar activations and their table, sorting and softmax, with their rounding errors.

A scalar function that the machine evaluates within :math:`u (a |h| + b) + j` of the exact one has an error of at most
:math:`u (a \|h\| + b \sqrt{n}) + j \sqrt{n}` on n numbers. The coefficients follow from the formulas that torch
evaluates, with an **allowance of 16 units in the last place** for each function of the mathematical library (exp,
expm1, log, log1p, tanh, erf, sin, cos, atan, asinh): the libraries in use promise 4 or better. That of a softmax is
allowed 64.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.linalg.transforms import transformed
from lipkit.modules.machine import proportional
from lipkit.modules.plain import (
    COUNT,
    INTEGER,
    Accepts,
    Plain,
    Range,
    RoundingBound,
    RoundingError,
    RoundingRule,
    Shape,
    Shown,
    add_plain,
    around,
    either,
    export_rule,
    monotone,
    real,
)
from lipkit.modules.registry import lipschitz, output_shape
from lipkit.modules.views import Shift2d, channels_of, shift
from lipkit.proof.roundoff import Arithmetic, Line, flat, grow, to_double


class _MaxMinShift(torch.autograd.Function):
    """``shift(maxmin(x), moved)``, or :func:`maxmin` for ``moved = 0``, without copies between the two steps.

    One mask gives the derivative, which is a permutation even where both values are equal.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, moved: int) -> Tensor:
        (a, b), y = x.chunk(2, dim=1), torch.empty_like(x)
        ordered, ctx.moved, kept = a >= b, moved, a.shape[1] - 4 * moved
        ctx.save_for_backward(ordered)
        top, bottom = y.chunk(2, dim=1)
        torch.maximum(a, b, out=top)  # straight into the result
        if moved:
            bottom[:, kept:] = shift(torch.minimum(a[:, kept:], b[:, kept:]), moved)
            a, b, bottom = a[:, :kept], b[:, :kept], bottom[:, :kept]
        torch.minimum(a, b, out=bottom)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (g,), (ordered,), moved = grads, ctx.saved_tensors, ctx.moved
        if g.dtype is torch.float16 or torch.is_grad_enabled() or transformed(g):
            return _exchanged(ordered, shift(g, moved, -1) if moved else g), None
        made, weight, kept = torch.empty_like(g), ordered.to(g.dtype), ordered.shape[1] - 4 * moved
        rows = [[*g.chunk(2, dim=1), weight, *made.chunk(2, dim=1)]]  # two gradients, the choice, two results
        if moved:
            rows, last = [[t[:, :kept] for t in rows[0]]], [t[:, kept:] for t in rows[0]]  # moved channels separately
            rows.append([last[0], shift(last[1], moved, -1), *last[2:]])
        for above, below, share, first, second in rows:
            torch.lerp(below, above, share, out=first)
            torch.lerp(above, below, share, out=second)
        return made, None


def _exchanged(keep: Tensor, x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    if x.dtype is torch.float16:  # a - b may overflow
        return torch.cat((torch.where(keep, a, b), torch.where(keep, b, a)), dim=1)
    # At weights 0 and 1 an interpolation is exact, and on a CPU three times as fast as a choice by a mask of bools.
    weight = keep.to(x.dtype)
    return torch.cat((torch.lerp(b, a, weight), torch.lerp(a, b, weight)), dim=1)


def maxmin(x: Tensor) -> Tensor:
    """The halves a, b of dimension 1, of even size, become (max(a, b), min(a, b)): an isometry at almost every point.

    Raises:
        ShapeError: an odd number of channels, or a sample without its batch.

    >>> maxmin(torch.tensor([[1.0, 5.0, 3.0, 2.0]])).tolist()
    [[3.0, 5.0, 1.0, 2.0]]

    References:
        Anil, Lucas & Grosse, ICML 2019 (:func:`group_sort` with groups of 2).
    """
    channels = channels_of(x, "MaxMin")
    if channels % 2:
        raise ShapeError(f"MaxMin: expected an even number of channels, got {channels} in shape {tuple(x.shape)}")
    a, b = x.chunk(2, dim=1)
    if torch.compiler.is_compiling() or not x.requires_grad:
        return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), dim=1)
    if transformed():
        keep = a >= b
        return torch.cat((torch.where(keep, a, b), torch.where(keep, b, a)), dim=1)  # the same derivative
    return _MaxMinShift.apply(x, 0)


def group_sort(x: Tensor, group_size: int | None) -> Tensor:
    """Sort each group of ``group_size`` neighbouring channels (dimension 1) in descending order; None sorts all.

    >>> group_sort(torch.tensor([[1.0, 5.0, 3.0, 2.0]]), 2).tolist()
    [[5.0, 1.0, 3.0, 2.0]]

    References:
        Anil, Lucas & Grosse, ICML 2019.
    """
    channels = channels_of(x, "GroupSort")
    group_size = channels if group_size is None else group_size
    if channels % group_size:
        raise ShapeError(
            f"GroupSort: expected a number of channels that is a multiple of {group_size}, "
            f"got {channels} in shape {tuple(x.shape)}"
        )
    return x.unflatten(1, (-1, group_size)).sort(dim=2, descending=True).values.flatten(1, 2)


class MaxMin(nn.Module):
    """:func:`maxmin` as a module. 1-Lipschitz; not scalar, so not allowed inside sandwich, SLL or CPL layers.

    >>> MaxMin()(torch.tensor([[0.0, 1.0]])).tolist()
    [[1.0, 0.0]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return maxmin(x)


class MaxMinShift2d(Shift2d):
    """`MaxMin`, then `Shift2d`: one pass over memory in training, exported as the two modules. 1-Lipschitz.

    >>> x = torch.randn(2, 16, 4, 4, requires_grad=True)
    >>> torch.equal(MaxMinShift2d(16, 2)(x), Shift2d(16, 2)(MaxMin()(x)))
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        plain = torch.compiler.is_compiling() or transformed() or not x.requires_grad
        if plain or x.ndim != 4 or x.shape[1] != self.channels or self.channels % 2 or 8 * self.moved > self.channels:
            return super().forward(maxmin(x))
        return _MaxMinShift.apply(x, self.moved)


class GroupSort(Shown):
    """:func:`group_sort` as a module. 1-Lipschitz.

    Raises:
        OptionError: ``group_size`` is below 2.
    """

    def __init__(self, group_size: int | None = 2) -> None:
        super().__init__()
        if group_size is not None and group_size < 2:
            raise OptionError(f"group_size: expected at least 2, got {group_size}")
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        return group_sort(x, self.group_size)


class Sine(nn.Module):
    """The sine: 1-Lipschitz, with values in [-1, 1].

    >>> Sine()(torch.zeros(1, 1)).item()
    0.0
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Cosine(nn.Module):
    """The cosine: 1-Lipschitz, with values in [-1, 1].

    >>> Cosine()(torch.zeros(1, 1)).item()
    1.0
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x)


class Arctan(nn.Module):
    """The arctangent: 1-Lipschitz, of slopes in [0, 1], with values in (-pi / 2, pi / 2).

    >>> Arctan()(torch.zeros(1, 1)).item()
    0.0
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan(x)


class Arcsinh(nn.Module):
    """The inverse hyperbolic sine, log(x + sqrt(x^2 + 1)): 1-Lipschitz, of slopes in [0, 1].

    >>> Arcsinh()(torch.zeros(1, 1)).item()
    0.0
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.asinh(x)


# One unit in the last place is at most 2 u of the result.
LIBRARY = 2 * 16.0

SOFTMAX_EXP = 2 * 64.0


def pointwise(
    a: float, b: float, jump: float, input_shape: Shape, arithmetic: Arithmetic, largest: float = 0.0
) -> RoundingError:
    """Rounding rule of a scalar function with an error of at most ``u (a |h| + b) + jump`` for each number h.

    ``largest`` bounds the moduli of the constants that it computes with.
    """
    root = math.sqrt(math.prod(input_shape))  # the norm of an error of 1 in every entry
    # Few operations: second-order terms and what is flushed to zero on the way stay below these.
    factor = grow(a * arithmetic.unit * (1 + 2.0**-10))
    constant = grow(root * (b * arithmetic.unit * (1 + 2.0**-10) + jump + 8 * (1 + a + b) * arithmetic.tiny))
    return proportional(factor, constant, grow(4.0 + a), 8.0 + b + largest)


def _leaky_relu_error(module: nn.LeakyReLU | nn.PReLU, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    slope = float(module.weight.detach().abs().amax()) if isinstance(module, nn.PReLU) else abs(module.negative_slope)
    lost = arithmetic.tiny / arithmetic.unit  # a slope below the normal range may count as 0
    return pointwise(3 * slope + lost, 0.0, 0.0, input_shape, arithmetic, slope)  # a product by a rounded slope


def _hardtanh_error(module: nn.Hardtanh, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    def rounded(limit: float) -> float:
        # A number that the format has is not rounded: its significand is a multiple of the unit.
        whole = (math.frexp(limit)[0] / arithmetic.unit).is_integer()
        return 0.0 if limit == 0 or (whole and arithmetic.tiny <= abs(limit) <= arithmetic.largest) else abs(limit)

    limits = float(module.min_val), float(module.max_val)
    largest = max(map(abs, limits))
    return pointwise(0.0, max(map(rounded, limits)), 0.0, input_shape, arithmetic, largest)


def _elu_error(module: nn.ELU, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    factor = (LIBRARY + 4) * max(1.0, abs(module.alpha))
    return pointwise(factor, factor, 0.0, input_shape, arithmetic)


def _celu_error(module: nn.CELU, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    # alpha (e^(x / alpha) - 1) by a rounded 1 / alpha; below the normal range it may count as 0, and all of x is lost.
    inverse = 1 / module.alpha
    lost = 0.0 if inverse >= arithmetic.tiny else 2 / arithmetic.unit
    largest = max(module.alpha, inverse)
    return pointwise(LIBRARY + 8 + lost, (LIBRARY + 8) * module.alpha, 0.0, input_shape, arithmetic, largest)


def _softplus_error(module: nn.Softplus, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    # log1p(e^(beta x)) / beta, and x itself beyond the threshold: a jump of log1p(e^-threshold) / beta, at a threshold
    # that beta x reaches within its rounding
    beta, threshold = float(module.beta), float(module.threshold)
    jump = math.exp(-threshold * (1 - 2.0**-20)) / beta * (1 + 2.0**-40)
    found = pointwise(LIBRARY + 8, (2 * LIBRARY + 8) / beta, jump, input_shape, arithmetic, max(beta, threshold))
    # The exponential must not overflow. A low threshold keeps it under a 64th of the range. Otherwise let m be the
    # largest z = beta x that is allowed: e^z <= 1 + e^m z / m for z <= m is linear in x, and uses up the room at m.
    # Entries of an input at distance s are at most the largest one of the sample plus s.
    most = math.log(arithmetic.largest / 64)
    if threshold * (1 + 2.0**-20) <= most:
        return found
    slope = grow(arithmetic.room / most * beta)

    def measure(x: torch.Tensor) -> RoundingBound:
        local, furthest = found(x), x.detach().double().flatten(1).amax(1).clamp_min(0.0)
        rising = Line(furthest, 1.0).times(slope) if slope < math.inf else flat(furthest, slope)
        return local._replace(peak=local.peak.plus(rising))

    return measure


def _positive(module: nn.Module, name: str, why: str, least: float = 0.0) -> float:
    """The slope 1; ``NoRuleError`` unless the option ``name`` is positive, finite and at least ``least``."""
    value = getattr(module, name)
    if not (math.isfinite(value) and value > 0 and value >= least):
        wanted = f"at least {least:g}" if least else "a positive finite number"
        raise NoRuleError(f"nn.{type(module).__name__}: expected {name} {wanted}, got {value}: {why}")
    return 1.0


def _at_least_one(slope: float) -> float:
    return math.inf if math.isnan(slope) else max(1.0, abs(slope))  # the other side has slope 1


# Beyond its threshold t, Softplus returns x, which is too low by log(1 + e^-t) / beta: a jump. At a threshold of 20
# (torch's default) or more it is below float32 rounding of the output.
SOFTPLUS_THRESHOLD = 20.0


def _softplus(module: nn.Softplus) -> float:
    _positive(module, "beta", "it has no rule otherwise")
    return _positive(module, "threshold", "it jumps at a lower one, so no constant bounds it", SOFTPLUS_THRESHOLD)


# On CUDA torch multiplies by 1 / 6 as rounded to float32, in float64, too: it is larger by this share.
_SIXTH = 2.0**-25

GELU_SLOPES = {"none": 1.1289041452, "tanh": 1.1289930687}


class Activation(NamedTuple):
    """One row of the table of scalar activations.

    Attributes:
        kind: its type, matched exactly.
        slope: largest modulus of its derivative, rounded up; a number, or a function of the module.
        rounding: (a, b), which bound the machine's error on a number h by ``u (a |h| + b)``; or a rounding rule.
        arguments: the stored arguments, each with a test of its value; None if it exports as another type.
        restricted: True if its slope lies in [0, 1] everywhere, as sandwich, SLL and CPL layers and the LMI need; a
            bool, or a function of the module.
        functions: functions of torch and methods of tensors that compute it, with the same arguments.
        largest: bounds the modulus of its values; of the machine's up to `_SIXTH` of it.
    """

    kind: type[nn.Module]
    slope: float | Callable[[Any], float | Tensor]
    rounding: tuple[float, float] | RoundingRule
    arguments: Mapping[str, Accepts] | None = MappingProxyType({})
    restricted: bool | Callable[[Any], bool] = False
    functions: tuple[Callable[..., Any] | str, ...] = ()
    largest: float = math.inf


ACTIVATIONS: dict[type[nn.Module], Activation] = {}
"""The scalar activations by type. A new activation is one row here; all code about activations reads this table."""

BY_NAME: dict[str, type[nn.Module]] = {}
"""Activations by their names in options and recipes: those that have a slope in [0, 1] for some arguments."""


def add_activation(row: Activation) -> None:
    """Make an activation known everywhere: to ``lipschitz``, ``export``, certificates, storage, and options by name.

    The lowering reads ``row.functions`` when it is first imported. Later, register them by
    `lipkit.lowering.function_module`.

    Raises:
        NoRuleError: its type has rules already.

    >>> add_activation(Activation(nn.ReLU, 1.0, (0.0, 0.0)))
    Traceback (most recent call last):
    lipkit.errors.NoRuleError: torch.nn.modules.activation.ReLU already has a rule; expected one rule for each type
    """

    slope, rounding = row.slope, row.rounding

    def range_of(module: nn.Module, x: Range) -> Range:
        if slope_restricted(module):
            return monotone(module, x)
        found = around(module(x.centre), float(lipschitz(module)) * x.radius)  # entry by entry
        return Range(*(t.clamp(-row.largest, row.largest) for t in found))

    constant = (lambda module, _: slope(module)) if callable(slope) else slope
    error = (lambda _, *at: pointwise(*rounding, 0.0, *at)) if isinstance(rounding, tuple) else rounding
    add_plain(Plain(row.kind, constant, error, row.arguments, range_of))
    ACTIVATIONS[row.kind] = row
    if row.restricted:
        BY_NAME[row.kind.__name__.lower()] = row.kind


def slope_restricted(module: nn.Module) -> bool:
    """True for a scalar activation with slope in [0, 1] everywhere, parameters considered.

    >>> slope_restricted(nn.ReLU()), slope_restricted(nn.GELU()), slope_restricted(nn.LeakyReLU(0.1))
    (True, False, True)
    """
    row = ACTIVATIONS.get(type(module))
    restricted = False if row is None else row.restricted
    return restricted(module) if callable(restricted) else restricted


# GELU has its largest slope at sqrt 2, Phi(x) + x phi(x). SiLU and Mish: maximum of the derivative, found to 1e-12 by
# bisection of the second derivative (tests/modules/test_slopes.py). All slopes are rounded up in the last digit given.
for _row in (
    Activation(nn.ReLU, 1.0, (0.0, 0.0), {}, True, (F.relu, F.relu_, torch.relu, "relu", "relu_")),
    Activation(nn.ReLU6, 1.0, (0.0, 0.0), None, True, (F.relu6,)),
    Activation(nn.CELU, lambda m: _positive(m, "alpha", "it grows exponentially otherwise"), _celu_error,
               {"alpha": real}, lambda m: 0 < m.alpha < math.inf, (F.celu, torch.celu, torch.celu_)),
    Activation(nn.Tanh, 1.0, (LIBRARY + 2, 0.0), {}, True, (F.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"), 1.0),
    # |arctan x| and |arcsinh x| are at most |x|
    Activation(Arctan, 1.0, (LIBRARY + 2, 0.0), {}, True,
               (torch.atan, torch.atan_, torch.arctan, torch.arctan_, "atan", "atan_", "arctan", "arctan_"),
               math.pi / 2),
    Activation(Arcsinh, 1.0, (LIBRARY + 2, 0.0), {}, True,
               (torch.asinh, torch.asinh_, torch.arcsinh, torch.arcsinh_, "asinh", "asinh_", "arcsinh", "arcsinh_")),
    # 1 / (1 + e^-x): the exponential's relative error counts a quarter, then two operations on at most 1
    Activation(nn.Sigmoid, 0.25, (1.0, LIBRARY + 4), {}, True,
               (F.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"), 1.0),
    # (x + 3) / 6 inside (-3, 3), at most 1, and its product by x
    Activation(nn.Hardsigmoid, math.nextafter(1 / 6, 1), lambda m, *at: pointwise(4.0, 8.0, _SIXTH, *at), {}, True,
               (F.hardsigmoid,), 1.0),
    Activation(nn.Softplus, _softplus, _softplus_error, {"beta": real, "threshold": real},
               lambda m: 0 < m.beta < math.inf and SOFTPLUS_THRESHOLD <= m.threshold < math.inf, (F.softplus,)),
    # x / (1 + |x|)
    Activation(nn.Softsign, 1.0, (6.0, 0.0), {}, True, (F.softsign,), 1.0),
    # min(0, x) - log1p(e^-|x|), with log1p <= log 2
    Activation(nn.LogSigmoid, 1.0, (2.0, 2 * LIBRARY + 4), {}, True, (F.logsigmoid,)),
    Activation(nn.Hardtanh, lambda m: 1.0 if -math.inf < m.min_val <= m.max_val < math.inf else math.inf,
               _hardtanh_error, {"min_val": real, "max_val": real},
               lambda m: -math.inf < m.min_val <= m.max_val < math.inf, (F.hardtanh, F.hardtanh_)),
    Activation(nn.Softshrink, lambda m: 1.0 if 0 <= m.lambd < math.inf else math.inf,
               lambda m, *at: pointwise(2.0, 4 * abs(m.lambd), 0.0, *at), {"lambd": real},
               lambda m: 0 <= m.lambd < math.inf, (F.softshrink,)),
    # x - tanh(x), |tanh(x)| <= |x|
    Activation(nn.Tanhshrink, 1.0, (LIBRARY + 4, 0.0), {}, True, (F.tanhshrink,)),
    Activation(nn.LeakyReLU, lambda m: _at_least_one(m.negative_slope), _leaky_relu_error, {"negative_slope": real},
               lambda m: 0 <= m.negative_slope <= 1, (F.leaky_relu, F.leaky_relu_)),
    Activation(nn.ELU, lambda m: _at_least_one(m.alpha), _elu_error, {"alpha": real},
               lambda m: 0 <= m.alpha <= 1, (F.elu, F.elu_)),
    Activation(nn.PReLU, lambda m: to_double(m.weight).abs().amax().clamp_min(1.0), _leaky_relu_error,
               {"num_parameters": COUNT}),
    # 1.0508 x and 1.7581 (e^x - 1), the latter perhaps as a difference
    Activation(nn.SELU, 1.7580993409, (2 * LIBRARY + 8, 2 * LIBRARY + 8), functions=(F.selu, torch.selu, torch.selu_)),
    # x / 2 (1 + erf or tanh): the bracket is within (library + 8) u of its value, its argument within a few u
    Activation(nn.GELU, lambda m: GELU_SLOPES.get(m.approximate, math.inf), (2 * LIBRARY + 16, 0.0),
               {"approximate": either(None, "none", "tanh")}, functions=(F.gelu,)),
    # x / (1 + e^-x) or x times the sigmoid
    Activation(nn.SiLU, 1.0998393202, (LIBRARY + 8, 0.0), functions=(F.silu,)),
    # x tanh(log1p(e^x)): the slope of tanh at s times s is below 1/2
    Activation(nn.Mish, 1.0884981618, (4 * LIBRARY + 8, 0.0), functions=(F.mish,)),
    Activation(nn.Hardswish, 1.5, lambda m, shape, a: pointwise(16.0 + _SIXTH / a.unit, 0.0, 0.0, shape, a),
               functions=(F.hardswish,)),
    Activation(Sine, 1.0, (0.0, LIBRARY), functions=(torch.sin, torch.sin_, "sin", "sin_"), largest=1.0),
    Activation(Cosine, 1.0, (0.0, LIBRARY), functions=(torch.cos, torch.cos_, "cos", "cos_"), largest=1.0),
):  # fmt: skip
    add_activation(_row)

export_rule(nn.ReLU6)(lambda module, input_shape: nn.Hardtanh(0.0, 6.0))


def comparing(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    """Rounding rule of a module that only compares and moves numbers: it errs only below the normal range."""
    larger = max(input_shape, output_shape(module, input_shape), key=math.prod)
    return pointwise(0.0, 0.0, 0.0, larger, arithmetic)


# Not scalar: sorting and softmax.
add_plain(Plain(MaxMin, 1.0, comparing, {}, monotone))
add_plain(Plain(MaxMinShift2d, 1.0, export=lambda m, _: nn.Sequential(MaxMin(), Shift2d(m.channels, m.moved))))
add_plain(Plain(GroupSort, 1.0, comparing, {"group_size": either(INTEGER, None)}, monotone))


def _softmax_error(module: nn.Softmax, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    # The results are e^-d / sum, with the distances d >= 0 to the largest entry. Rounding d moves e^-d by at most
    # u d e^-d <= 0.37 u, and the sum of n of them by at most 0.37 n u. Each group of n results has a norm of at most 1.
    # Without a dimension, the whole sample counts as one group.
    dim = module.dim
    n = math.prod(input_shape)
    if isinstance(dim, int) and dim != 0 and -len(input_shape) <= dim <= len(input_shape):
        n = input_shape[dim - 1] if dim > 0 else input_shape[dim]
    groups = math.sqrt(math.prod(input_shape) / n)
    each = arithmetic.gamma(2 * SOFTMAX_EXP + 2 * n + 8) + arithmetic.unit * math.sqrt(n)
    constant = grow(groups * each + 8 * math.sqrt(math.prod(input_shape)) * arithmetic.tiny)
    return proportional(0.0, constant, 4.0, 4.0 * n)  # sums of n exponentials of at most 1


_dim, _unit = {"dim": either(INTEGER, None)}, lambda module, x: Range(torch.zeros_like(x.low), torch.ones_like(x.low))
# Its Jacobian diag(p) - p p^T has norm at most 1/2.
add_plain(Plain(nn.Softmax, 0.5, _softmax_error, _dim, _unit))
