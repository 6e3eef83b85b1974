r"""The rounding error of a chain of modules, by recursion.

Exact activations :math:`h_l` at an input x' with :math:`\|x' - x\| \le s`, the machine's :math:`\hat h_l`, and the
activations :math:`c_l` at the sample x, measured in float64. With :math:`L_l` a proved constant of module l and
:math:`\rho_l` its own error (`lipkit.certificates.rounding.registry`) at inputs within a distance of :math:`c_l`:

.. math::
    \|\hat h_{l+1} - h_{l+1}\| &\le E_{l+1} = L_l E_l + \rho_l(C_l + D_l + E_l) \\
    \|h_{l+1} - f_{l+1}(x)\| &\le D_{l+1} = L_l D_l, \qquad D_0 = s \\
    \|c_{l+1} - f_{l+1}(x)\| &\le C_{l+1} = L_l C_l + \rho^{64}_l(0), \qquad E_0 = C_0 = 0

for :math:`\|\hat h_l - c_l\| \le C_l + D_l + E_l`. Everything is linear in s: a `Line`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipkit.certificates.rounding.arithmetic import FLOAT64, Arithmetic, Line, grow, grow_number, size
from lipkit.certificates.rounding.registry import Measure, local_error, nothing
from lipkit.protocol.registry import Shape, lipschitz, output_shape


class Step(NamedTuple):
    """One module of a chain: its proved constant, and its own error in the evaluator's arithmetic and in float64."""

    module: nn.Module
    gain: float
    machine: Measure
    double: Measure


class Walk(NamedTuple):
    """What is known after a chain, for inputs within s of each of N samples.

    Attributes:
        centre: the output at the sample, computed in float64.
        centre_error: (N,) bounds its distance from the exact one, C.
        error: bounds the error of the machine, E.
        move: bounds how far the exact output has moved, D.
        peak: bounds every number on the way.
    """

    centre: Tensor
    centre_error: Tensor
    error: Line
    move: Line
    peak: Line

    @property
    def spread(self) -> Line:
        """Bounds the distance of the machine's output from ``centre``."""
        return self.error.plus(self.move).plus(Line(self.centre_error, 0.0))


def gain_of(module: nn.Module, input_shape: Shape) -> float:
    """``lipschitz``, rounded up by more than what the stored transform of a Fourier layer can lack in norm."""
    return grow_number(float(lipschitz(module, input_shape).detach()) * (1 + 2.0**-44))


def prepare(
    modules: Sequence[nn.Module], input_shape: Shape, arithmetic: Arithmetic, gains: Sequence[float] | None = None
) -> tuple[list[Step], Shape]:
    """The steps of a chain for inputs of one shape, and the shape of its output.

    Args:
        modules: in float64.
        gains: their proved constants, where they are known already.
    """
    steps = []
    for i, module in enumerate(modules):
        gain = gain_of(module, input_shape) if gains is None else gains[i]
        machine = local_error(module, input_shape, arithmetic)
        double = machine if arithmetic == FLOAT64 else local_error(module, input_shape, FLOAT64)
        steps.append(Step(module, gain, machine, double))
        input_shape = output_shape(module, input_shape)
    return steps, input_shape


def start(x: Tensor) -> Walk:
    """Before the first module: the machine's input is exact, at a distance of at most s."""
    zero = nothing(x)
    # The machine's inputs are finite numbers of its format: they are no peak themselves.
    return Walk(x, zero.at, zero, Line(zero.at, 1.0), zero)


def advance(walk: Walk, step: Step) -> Walk:
    """After one more module."""
    spread, own = walk.spread, step.machine(walk.centre)
    own64 = own if step.double is step.machine else step.double(walk.centre)
    return Walk(
        centre=step.module(walk.centre),
        centre_error=Line(walk.centre_error, 0.0).times(step.gain).plus(Line(own64.error.at, 0.0)).at,
        error=walk.error.times(step.gain).plus(own.error.below(spread)),
        move=walk.move.times(step.gain),
        peak=walk.peak.most(own.peak.below(spread)),
    )


def through(steps: Sequence[Step], x: Tensor) -> Walk:
    """The whole chain, at a batch x in float64."""
    walk = start(x)
    with torch.no_grad():
        for step in steps:
            walk = advance(walk, step)
    return walk


def reach(walk: Walk) -> Line:
    """Bounds the norm of the machine's output."""
    return walk.spread.plus(Line(grow(size(walk.centre)), 0.0))


Runner = Callable[[Tensor], Walk]


def runner(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> Runner:
    """The walk of one module, or of a ``nn.Sequential`` of them."""
    modules = list(module) if type(module) is nn.Sequential else [module]
    steps, _ = prepare(modules, input_shape, arithmetic)
    return lambda x: through(steps, x)
