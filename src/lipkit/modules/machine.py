"""The rounding error of one module, read from its row (`local_error`), and of a chain of modules."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.modules.guarding import guard, type_name
from lipkit.modules.plain import RoundingBound, RoundingError, Shape, row_of
from lipkit.modules.registry import lipschitz, output_shape
from lipkit.proof.roundoff import FLOAT64, Arithmetic, Line, flat, grow, size


def local_error(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    """The rounding rule of a module, prepared for inputs of one shape.

    Raises:
        NoRuleError: no rule for exactly this type, or a module whose forward pass may not be that of its type.
    """
    guard(module)
    rule = row_of(type(module)).rounding
    if rule is None:
        raise NoRuleError(
            "rounding='sound': expected modules with a bound of their rounding error, got "
            f"{type_name(type(module))}, which has none: export the network, give one to its row "
            "(lipkit.modules.add_plain), or certify with rounding='ignore' and method='global'"
        )
    return rule(module, input_shape, arithmetic)


def exact(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    """Rounding rule of a module that only moves numbers, drops them or changes their signs: the error is 0."""
    return lambda x: RoundingBound(nothing(x), nothing(x))


def proportional(error: float, floor: float, peak: float, least: float = 0.0) -> RoundingError:
    """Rounding rule: at h the error is at most ``error ||h|| + floor``, each number at most ``peak ||h|| + least``."""

    def measure(x: Tensor) -> RoundingBound:
        norms = Line(size(x), 1.0)
        found, largest = flat(norms.at, floor), flat(norms.at, least)
        return RoundingBound(norms.times(error).plus(found), norms.times(peak).plus(largest))

    return measure


def nothing(x: Tensor) -> Line:
    """The bound 0 for each sample of x."""
    return Line(x.new_zeros(len(x)).double(), 0.0)


class ProvedModule(NamedTuple):
    """One module of a chain, with its proved constant and rounding rules."""

    module: Callable[[Tensor], Tensor]
    gain: float
    machine: RoundingError  # in the arithmetic of the evaluator
    double: RoundingError  # in float64


class ErrorBound(NamedTuple):
    """Error bounds after the first modules of a chain, for inputs within s of each of N samples."""

    centre: Tensor  # the output at the sample, computed in float64
    centre_error: Tensor  # (N,) bounds the distance of ``centre`` from the exact output, C
    error: Line  # bounds the machine's error, E
    move: Line  # bounds the distance between the exact outputs at an input and at its sample, D
    peak: Line  # bounds the modulus of every intermediate number

    @property
    def spread(self) -> Line:
        """Bounds the distance of the machine's output from ``centre``."""
        return self.error.plus(self.move).plus(Line(self.centre_error, 0.0))


def prove_module(module: nn.Module, input_shape: Shape, arithmetic: Arithmetic, constant: Tensor) -> ProvedModule:
    """A module, given in float64, with its ``constant`` and its rounding rules."""
    machine = local_error(module, input_shape, arithmetic)
    double = machine if arithmetic == FLOAT64 else local_error(module, input_shape, FLOAT64)
    return ProvedModule(module, enlarged(constant), machine, double)


def enlarged(constant: Tensor) -> float:
    """A proved constant, enlarged because with the exact transform a Fourier layer may have a slightly larger one."""
    return grow(float(constant.detach()) * (1 + 2.0**-44))


def prepare(modules: Sequence[nn.Module], input_shape: Shape, arithmetic: Arithmetic) -> list[ProvedModule]:
    """The proved modules of a chain in float64."""
    steps = []
    for module in modules:
        steps.append(prove_module(module, input_shape, arithmetic, lipschitz(module, input_shape)))
        input_shape = output_shape(module, input_shape)
    return steps


def start(x: Tensor) -> ErrorBound:
    """The bounds before the first module: the machine's input is exact and within s of the sample."""
    zero = nothing(x)
    # Inputs are finite numbers of the machine's format, so they do not count as a peak.
    return ErrorBound(x, zero.at, zero, Line(zero.at, 1.0), zero)


def advance(bound: ErrorBound, step: ProvedModule) -> ErrorBound:
    r"""The bounds after one more module of constant L: :math:`E' = L E + \text{own}(E + D + C)`, :math:`D' = L D`.

    own is the rounding error of that module alone, at a distance from ``centre``; C, D, E: see `ErrorBound`.
    """
    spread, own = bound.spread, step.machine(bound.centre)
    own64 = own if step.double is step.machine else step.double(bound.centre)
    return ErrorBound(
        centre=step.module(bound.centre),
        centre_error=Line(bound.centre_error, 0.0).times(step.gain).plus(Line(own64.error.at, 0.0)).at,
        error=bound.error.times(step.gain).plus(own.error.below(spread)),
        move=bound.move.times(step.gain),
        peak=bound.peak.most(own.peak.below(spread)),
    )


def through(steps: Sequence[ProvedModule], x: Tensor) -> ErrorBound:
    """The bounds after the whole chain, for a batch x in float64."""
    bound = start(x)
    with torch.no_grad():
        for step in steps:
            bound = advance(bound, step)
    return bound


# Maps a batch x to bounds (N,), from below and above, of what a module's own error is proportional to, such as ||x||.
Sizes = Callable[[Tensor], tuple[Tensor, Tensor]]


def norm_sizes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the norm of each sample: 0 from below, the norm rounded up from above."""
    return nothing(x).at, size(x)


class NormFactors(NamedTuple):
    """Numbers of a chain of K modules that are the same for all samples, for `by_norms`."""

    errors: Tensor  # (K + 1, 2): factors of 1 and of the norms of the K inputs, in ``error.at`` and ``centre_error``
    slopes: list[float]  # of the modules' own errors
    sizes: Sequence[Sizes]  # what counts as the norm of each module's input
    origin: ErrorBound  # the bounds around the input 0


def norm_factors(steps: Sequence[ProvedModule], zero: Tensor, sizes: Sequence[Sizes]) -> NormFactors:
    """The factors of a chain: the error ``own(0) + slope ||h||`` of each module at its input h, times later gains."""
    origin, factors, slopes = through(steps, zero), start(zero.new_zeros(len(steps) + 1, 1)), list[float]()
    with torch.no_grad():
        for place, step in enumerate(steps, 1):
            line = step.machine(torch.zeros_like(zero)).error
            slopes.append(line.slope)
            at = torch.zeros_like(factors.centre_error)
            at[0], at[place] = line.at[0], line.slope
            own = RoundingBound(Line(at, line.slope), nothing(at))
            factors = advance(factors, ProvedModule(nn.Identity(), step.gain, *[lambda _, own=own: own] * 2))
            zero = step.module(zero)  # the exact value for the input 0
    return NormFactors(torch.stack((factors.error.at, factors.centre_error), 1), slopes, sizes, origin)


def by_norms(
    steps: Sequence[ProvedModule], factors: NormFactors, x: Tensor, spare: Callable[[Tensor], Tensor]
) -> tuple[ErrorBound, Tensor]:
    """The bounds of `through` in float64 arithmetic, faster: modules' errors follow from the norms of their inputs.

    ``spare`` maps outputs to negligible errors (N,), which change no decision. For samples where the norms may
    overestimate the error by more than that, the modules with the largest errors are measured. The second result (N,)
    is True where `through` could still lower the bound by more than ``spare``.
    """
    errors, slopes, sizes, origin = factors
    most = (errors[1:, 0] > errors[1:, 0].amax() / 16).tolist()  # few modules make nearly all of the error
    norms, before, x = [(nothing(x).at, x.new_ones(len(x)))], dict[int, Tensor](), x.clone()  # modules work in place
    peak = Line(size(x), 1.0).times(origin.peak.slope).plus(Line(origin.peak.at, 0.0))
    with torch.no_grad():
        for place, step in enumerate(steps):
            norms.append(sizes[place](x) if slopes[place] else norms[0])  # its factor is 0: any norm will do
            if most[place]:
                before[place] = x.clone()
            x = step.module(x)
    sums = 1 + FLOAT64.gamma(len(norms) + 4)  # covers the rounding of the products below
    least, norm = (torch.stack(each, 1) for each in zip(*norms, strict=True))
    beside = norm * sums
    total, enough = beside @ errors, spare(x)
    close = ~(total.sum(1) < 2.0**24 * enough)  # a part of the error could be much of what it leaves of a margin
    far = close | ~((total - least @ errors).sum(1) < enough)  # how much less `through` could find
    if len(rows := far.nonzero()[:, 0]):
        measured = torch.zeros_like(beside[rows])
        for place, value in before.items():
            at = steps[place].machine(value[rows]).error.at
            measured[:, place + 1] = torch.minimum(grow(at / max(slopes[place], 2.0**-1000)), norm[rows, place + 1])
        rest = torch.where(measured > 0, 0.0, beside[rows]) @ errors
        total[rows] = rest + (measured * sums) @ errors
        far[rows] = close[rows] | ~(rest.sum(1) < enough[rows])  # what is not measured may alone be too large
    error, centre = grow(total).unbind(1)  # the machine's error, and that of the float64 centre
    error_line, move = Line(error, origin.error.slope), Line(nothing(x).at, origin.move.slope)
    return ErrorBound(x, centre, error_line, move, peak._replace(slope=origin.peak.slope)), far


def reach(bound: ErrorBound) -> Line:
    """Bound of the norm of the machine's output: ``||centre|| + spread``."""
    return bound.spread.plus(Line(grow(size(bound.centre)), 0.0))


def chain_error(modules: Sequence[nn.Module], input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    """The rounding rule of a chain of modules."""
    steps = prepare(modules, input_shape, arithmetic)

    def measure(x: Tensor) -> RoundingBound:
        bound = through(steps, x)
        return RoundingBound(bound.error, bound.peak)

    return measure
