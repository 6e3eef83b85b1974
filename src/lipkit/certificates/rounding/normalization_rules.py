r"""Rounding errors of normalisations by the sample's own statistics.

A group of n numbers x with mean :math:`\mu`, variance v and mean square q becomes :math:`w (x - \mu) / \sqrt{v +
\epsilon} + b`. Assumed is, with :math:`\Gamma = \gamma_{4 n + 32}`,

.. math:: |\hat\mu - \mu| \le \Gamma \sqrt q, \qquad |\hat v - v| \le 2 \Gamma \sqrt{v q} + \Gamma^2 q

which holds for two passes and for merged moments (Welford; Chan, Golub & LeVeque, "Algorithms for computing the
sample variance", 1983) with room, and for group normalisation, which torch evaluates by sums of squares on images
stored channels last, only :math:`|\hat v - v| \le 2 \Gamma q`. While :math:`\rho = |\hat v - v| / (v + \epsilon)` and
the rounding of :math:`\epsilon` stay below 1/2, the reciprocal root is within a relative :math:`\rho + \gamma_9`. With
:math:`v / (v + \epsilon)^{3/2} \le 0.385 / \sqrt\epsilon` and :math:`\sqrt v / (v + \epsilon)^{3/2} \le 0.385 /
\epsilon` a group is then within

.. math:: \max|w| \Big(\frac{5 \Gamma}{\sqrt\epsilon} \|x\|
          + \Big[\frac{\Gamma}{\epsilon \sqrt n} \|x\|^2 \text{ for sums of squares}\Big]\Big) + \gamma_4 \|b\|

(of the 5: at most 1.5 for the mean, 1.5 for the operations on single numbers, 1.2 for the variance). Around a sample
c, :math:`\|x\|^2 \le 2 \|c\|^2 + 2 S s` for s <= S: beyond S, and where :math:`\rho` may exceed 1/2, nothing is
certified.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipkit.certificates.rounding.arithmetic import Arithmetic, Line, grow_number, size
from lipkit.certificates.rounding.linear_rules import running_statistics
from lipkit.certificates.rounding.registry import Local, Measure, entries, rounding_rule
from lipkit.protocol.normalization_rules import own_constant
from lipkit.protocol.registry import Shape


def own_statistics(
    module: nn.LayerNorm | nn.GroupNorm | nn.InstanceNorm2d,
    terms: int,
    input_shape: Shape,
    arithmetic: Arithmetic,
    squares: bool = False,
) -> Measure:
    """The bound of the module docstring.

    Args:
        terms: n, the numbers of one group, which lie beside each other.
        squares: whether the variance may be a difference of two squares.
    """
    eps, numbers, up = module.eps, entries(input_shape), 1 + 2.0**-40
    gain = float(own_constant(module).detach())
    weight, bias = (0.0 if t is None else float(t.detach().abs().amax()) for t in (module.weight, module.bias))
    weight = 1.0 if module.weight is None else weight
    shift = 0.0 if module.bias is None else float(size(module.bias[None])) * math.sqrt(numbers / module.bias.numel())
    gamma = arithmetic.gamma(4 * terms + 32)
    cap = math.sqrt(terms * eps / (5 * gamma)) if squares else math.sqrt(terms * eps) / (4 * gamma)
    cap = min(cap, math.sqrt(arithmetic.largest) / 8)  # squares must not overflow either
    # What is flushed to zero must not count beside eps.
    usable = gamma < math.inf and eps * arithmetic.unit >= 64 * (terms + 8) * arithmetic.tiny * (1 + cap)
    rising = arithmetic.room / cap * up if usable else math.inf
    linear = 5 * gamma * gain * up + 4 * arithmetic.tiny
    flushed = arithmetic.tiny * (12 * (terms + 8) * gain + 8 * weight + 8)
    constant = grow_number(arithmetic.gamma(4) * shift + math.sqrt(numbers) * flushed)
    quadratic = 2 * gamma * gain / math.sqrt(eps * terms) * up if squares else 0.0
    # The slope of the peak keeps a factor of 2^22 below the range of float64, for the gain of what comes before.
    most = max(1.0, 2 * math.sqrt(numbers * eps), arithmetic.room * 2.0**-1000)

    def measure(x: Tensor) -> Local:
        groups = size(x.detach().double().reshape(-1, terms)).view(len(x), -1)
        reached, furthest = Line(size(x), 1.0), Line(groups.amax(1), 1.0)
        error = reached.times(linear).plus(Line(torch.full_like(reached.at, constant), 0.0))
        peak = reached.times(grow_number(4 + 6 * gain))
        peak = Line(peak.at + 2 * shift + max(weight, bias, eps, 2 * gain), peak.slope)
        if rising == math.inf:
            peak = Line(torch.full_like(reached.at, math.inf), 0.0)
        else:
            peak = peak.most(furthest.times(rising))
        if squares:
            error = error.plus(Line(size(groups.square()), grow_number(most)).times(quadratic))
            peak = peak.most(Line(torch.zeros_like(reached.at), arithmetic.room / most * up))
        return Local(error, peak)

    return measure


@rounding_rule(nn.LayerNorm)
def _layer_norm(module: nn.LayerNorm, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return own_statistics(module, math.prod(module.normalized_shape), input_shape, arithmetic)


@rounding_rule(nn.GroupNorm)
def _group_norm(module: nn.GroupNorm, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return own_statistics(module, entries(input_shape) // module.num_groups, input_shape, arithmetic, squares=True)


@rounding_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_norm(module: nn.InstanceNorm2d, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    if module.track_running_stats:
        return running_statistics(module, input_shape, arithmetic)
    return own_statistics(module, math.prod(input_shape[1:]), input_shape, arithmetic)
