r"""Makes the integer program of a network, proves a bound of its error, and proves that nothing overflows.

An array q of integers with the fraction f stands for :math:`2^{-f} q`. A linear map with integer weights of fraction g
sums exactly in int64 and rounds once, half up, to the fraction f' of its output:

.. math:: q'_i = \Big\lfloor 2^{-s} \Big(b_i + \sum_j w_{ij} q_j + 2^{s-1}\Big) \Big\rfloor, \qquad s = f + g - f'

Everything else (moves, sorting, absolute values) is exact. Inputs are clamped to the network's box with centre c and
half diagonal R. With the exact function h of the first modules, its proved constant L, and what is computed,
:math:`\hat h`,

.. math:: \|\hat h(x) - h(x)\| \le E, \qquad \|\hat h(x) - \hat h(c)\| \le L R + 2 E \quad\text{for every real x}

bound every value, and by Cauchy and Schwarz every partial sum (`docs/rounding.md`). A linear map W with stored weights
:math:`\hat W` and n outputs adds :math:`\|\hat W - W\| \|\hat h\| + \|\hat b - b\| + \sqrt n\, 2^{-f'-1}` to E; a
module of constant L multiplies the E before it by L. No bound depends on the sample.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, interval
from lipkit.integer.program import WORD, IntBlend, IntLinear, Move, Operation, Program, rounded
from lipkit.modules.chains import ChainProof
from lipkit.modules.graph import Wiring
from lipkit.modules.guarding import type_name
from lipkit.modules.machine import enlarged
from lipkit.modules.network import Network
from lipkit.modules.plain import ROWS, IntegerRule, Shape, fill, row_of
from lipkit.modules.registry import lipschitz
from lipkit.proof.roundoff import grow, size


@dataclass(frozen=True, eq=False)
class IntValue:
    """One value of a program, with bounds that hold on the whole box: real numbers, rounded up.

    Attributes:
        index: its number in the program.
        shape: its shape in the network.
        fraction: f.
        centre: (1, n) integers, the value at the centre of the box.
        error: E.
        reach: L R, the largest distance of the exact value from its value at the centre.
        largest, norm: bounds of the entries' moduli, and of the l2 norm, of the computed value.
    """

    index: int
    shape: Shape
    fraction: int
    centre: Tensor
    error: float
    reach: float
    largest: float = math.inf
    norm: float = math.inf

    @property
    def spread(self) -> float:
        """L R + 2 E: largest distance of the computed value from its value at the centre."""
        return grow(self.reach + 2 * self.error)


def integer_rule(*types: type[nn.Module]) -> Callable[[IntegerRule], IntegerRule]:
    """Register ``rule(builder, module, value, gain) -> value`` as the integer program of exactly these types.

    ``gain`` is the proved constant of the module. The returned value has the program's bounds after the module. A new
    module names its rule in its row (`lipkit.modules.Plain`).
    """
    return fill("integer", types)


class Builder:
    """Writes the operations of a program. ``rows`` bounds the error that the last linear map adds to each output."""

    def __init__(self, inputs: int) -> None:
        self.wiring = Wiring()
        self.inputs = inputs
        self.rows = torch.zeros(0).double()

    def put(self, operation: Operation, *reads: int) -> int:
        """Append an operation that reads these values; return the index of its output."""
        if isinstance(operation, Move):
            before = self.wiring.modules[reads[0] - 1] if reads[0] else None
            if torch.equal(operation.index, torch.arange(self.inputs if before is None else before.size)):
                return reads[0]
            if isinstance(before, Move):  # two moves are one
                found = F.pad(before.index, (0, 1), value=-1)[operation.index]  # -1 stays padding
                operation, reads = Move(found), self.wiring.sources[reads[0] - 1]
        return self.wiring.add(operation, *reads)

    def exact(self, operation: Operation, value: IntValue, shape: Shape) -> IntValue:
        """The value after an operation that moves, drops or compares entries: its bounds do not change.

        The operation may also pad by copies of entries, for a convolution in which no window holds an entry twice.
        Norm, error and reach then stay those before padding, as `linear` expects.
        """
        index = self.put(operation, value.index)
        assert not isinstance(operation, IntBlend)
        return _bounded(replace(value, index=index, shape=shape, centre=operation(value.centre)))

    def linear(
        self,
        value: IntValue,
        gain: float,
        shape: Shape,
        weight: Tensor,
        bias: Tensor | None,
        norm: Callable[[Tensor], float],
        image: tuple[int, int, int] | None = None,
        *,
        groups: int = 1,
        stride: tuple[int, ...] = (1, 1),
        dilation: tuple[int, ...] = (1, 1),
        inexact: float = 0.0,
    ) -> IntValue:
        """The value after a linear map, rounded once.

        Args:
            value: the input, already padded.
            gain: the constant of the exact map.
            shape: of the output.
            weight: as in `IntLinear`, or a matrix (rows, channels), in float64.
            bias: (rows,).
            norm: maps a change of the weight to the norm of the change of the map.
            inexact: bound of the norm of (map with ``weight``) - (exact map).
        """
        weight = weight.detach().double()
        weight = weight.view(*weight.shape[:2], *(weight.shape[2:] or (1, 1)))
        bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
        image = image or (len(value.centre[0]), 1, 1)
        terms = weight[0].numel()
        window = math.ceil(min(value.norm, math.sqrt(terms) * value.largest) * (1 + 2.0**-40) * 2.0**value.fraction)
        places = min(_places(float(weight.abs().amax())), 61 - value.fraction)
        while True:
            grid, sums = 2.0**places, 2.0 ** (places + value.fraction)
            q, b = (weight * grid).round(), (bias * sums).round()
            if float(b.abs().amax()) < 2.0**61 and float(q.abs().amax()) <= WORD:
                made = IntLinear(q.long(), b.long(), image, groups, stride, dilation, 1, window)
                if made.fits():
                    break
            places -= 1
            if places < -64:
                raise OverflowError(
                    f"weights up to {_top(weight)}, biases up to {_top(bias)}, inputs up to {value.largest:.3g}"
                )
        # Differences of float64 numbers and their roundings to a grid are exact.
        change, shift = q - weight * grid, (b - bias * sums).abs() / sums
        rows = grow(size(change) / grid * value.norm + shift)
        own = norm(change) / grid * value.norm + inexact * value.norm
        own = grow(own + float(size(shift[None])) * math.sqrt(math.prod(made.places)))
        found = made.sums(value.centre).flatten(1)
        entry = grow(float(size(weight).amax()) + inexact)
        places += value.fraction
        result = self.finish(value, gain, shape, own, found, places, made, entry=entry)
        self.rows = grow(rows + 2.0 ** -(result.fraction + 1))
        return result

    def finish(
        self,
        value: IntValue,
        gain: float,
        shape: Shape,
        own: float,
        sums: Tensor,
        places: int,
        operation: IntLinear | IntBlend,
        reads: Sequence[int] | None = None,
        entry: float = math.inf,
    ) -> IntValue:
        """Append an operation and return its value, rounded to the largest fraction that fits into 32 bits.

        Args:
            own: error that the operation adds before it rounds.
            sums: what the operation sums at the centre of the box, integers of the fraction ``places``.
            operation: its ``shift`` is set here.
            entry: Lipschitz constant of one output (the largest norm of a row), if known.
        """
        moved = grow(min(gain, entry) * value.reach + 2 * (gain * value.error + own))  # an entry's move from the centre
        fraction = min(_places(float(sums.abs().amax()) * 2.0**-places + moved), places - 1)  # a shift of 1 at least
        while fraction >= places - 62:
            error = grow(gain * value.error + own + math.sqrt(sums.shape[1]) * 2.0 ** -(fraction + 1))
            centre = rounded(sums, places - fraction)
            largest = float(centre.abs().amax()) * 2.0**-fraction + min(gain, entry) * value.reach + 2 * error
            try:
                found = _bounded(IntValue(0, shape, fraction, centre, error, grow(gain * value.reach), grow(largest)))
            except OverflowError:
                fraction -= 1
                continue
            index = self.put(replace(operation, shift=places - fraction), *(reads or [value.index]))
            return replace(found, index=index)
        raise OverflowError(f"entries up to {float(sums.abs().amax()) * 2.0**-places + moved:.3g}")

    def blend(
        self, value: IntValue, gain: float, parts: Sequence[IntValue], factors: Sequence[float], *, apart: bool = False
    ) -> IntValue:
        """The value ``p u + q v + ...`` of branches u, v, ... that start at ``value`` and carry their own errors.

        Args:
            gain: the constant of the sum.
            apart: True if at every entry at most one branch is nonzero.
        """
        # The modulus of a product is below 2^62 / len(parts).
        room = (len(parts) - 1).bit_length()
        places = min(part.fraction + _places(abs(f)) - room for part, f in zip(parts, factors, strict=True))
        exact = [math.ldexp(f, places - part.fraction) for part, f in zip(parts, factors, strict=True)]
        own = 0.0
        for part, factor, scaled in zip(parts, factors, exact, strict=True):
            # A factor 1 - p is rounded once before it comes here.
            off = abs(scaled - round(scaled)) * 2.0 ** (part.fraction - places) + 2.0**-52 * max(1.0, abs(factor))
            lost = abs(factor) * part.error + off * part.norm
            own = grow(math.hypot(own, lost) if apart else own + lost)  # disjoint errors are orthogonal
        made = IntBlend(tuple(map(round, exact)), 0, parts[0].centre.shape[1])
        sums, reads = made.sums(*(part.centre for part in parts)), [part.index for part in parts]
        return self.finish(value, gain, parts[0].shape, own, sums, places, made, reads)

    def chain(self, modules: Sequence[nn.Module], value: IntValue, gains: Sequence[float | None]) -> IntValue:
        """The value after a chain of modules; a constant that is None is proved here."""
        for module, gain in zip(modules, gains, strict=True):
            rule = row_of(type(module)).integer
            if rule is None:
                known = ", ".join(kind.__name__ for kind, row in ROWS.items() if row.integer is not None)
                raise NoRuleError(
                    f"evaluator 'integer': expected modules that an integer program can compute ({known}), got "
                    f"{type_name(type(module))}: certify for float64 or float32, or register "
                    "a rule with lipkit.integer.integer_rule"
                )
            value = rule(self, module, value, enlarged(lipschitz(module, value.shape)) if gain is None else gain)
        return value

    def branch(self, modules: Sequence[nn.Module], value: IntValue) -> IntValue:
        """The value after a chain inside a module; its error is counted as if the module's input were exact."""
        return self.chain(modules, replace(value, error=0.0, reach=value.spread), [None] * len(modules))


def _bounded(value: IntValue) -> IntValue:
    """A value with the smaller of its own bounds and those from its centre and spread."""
    scale = 2.0**-value.fraction
    entry = grow(float(value.centre.abs().amax()) * scale + value.spread)
    whole = grow(float(size(value.centre.double())) * scale + value.spread)
    largest = min(value.largest, entry)
    norm = min(value.norm, whole, grow(math.sqrt(value.centre.shape[1]) * largest))
    if not largest * 2.0**value.fraction < WORD:
        raise OverflowError(f"expected entries within 32 bits, got {largest} with {value.fraction} binary places")
    return replace(value, largest=largest, norm=norm)


def _top(t: Tensor) -> str:
    return f"{float(t.abs().amax()):.3g}"


def _places(number: float) -> int:
    """The largest fraction f for which ``number 2^f`` is below 2^31."""
    return min(31 - math.frexp(number)[1], 62) if number > 0 else 31  # number < 2^e, e = frexp(number)[1]


def quantise(network: Network, proof: ChainProof) -> Program:
    """The integer program of an exported network.

    Args:
        network: in float64 on the CPU, with an ``input_range``.
        proof: of that network, with its steps.

    Raises:
        NoRuleError: a module that no integer program can compute.
        OptionError: no ``input_range``, or values too large for any fraction in 32 bits.

    >>> from lipkit.modules.chains import prove_chain
    >>> from lipkit.proof.roundoff import FLOAT64
    >>> net = Network([nn.Linear(2, 2, bias=False).double()], (2,))
    >>> _ = net[0].weight.copy_(torch.tensor([[0.5, 0.25], [-1.0, 0.0]]))
    >>> net.input_range = (0.0, 1.0)
    >>> quantise(net, prove_chain(net, FLOAT64))(torch.ones(1, 2)).tolist()
    [[0.75, -1.0]]
    """
    if network.input_range is None:
        raise OptionError(
            "evaluator 'integer': expected a network whose input_range is known, because 32 bits hold no others, got "
            "None: set network.input_range = (0.0, 1.0), for instance"
        )
    low, high = interval("input_range", network.input_range)
    shape, n = network.input_shape, math.prod(network.input_shape)
    fraction = _places(max(-low, high) * (1 + 2.0**-30))
    empty = Program(shape, (low, high), fraction, 0, (), 0.0, None)  # says how inputs become integers
    middle = (low + high) / 2
    builder = Builder(n)
    half = grow(math.sqrt(n) * max(high - middle, middle - low))
    largest = grow(max(map(abs, empty.ends)) * 2.0**-fraction)
    error = grow(math.sqrt(n) * 2.0 ** -(fraction + 1))
    centre = empty.quantise(torch.full((1, *shape), middle, dtype=torch.float64))
    value = _bounded(IntValue(0, shape, fraction, centre, error, half, largest))
    body = list(network)[: len(network) - (proof.last is not None)]
    try:
        value = builder.chain(body, value, [step.gain for step in proof.steps])
        error = value.error
        if proof.last is not None:
            value = builder.chain([proof.last], value, [None])
    except OverflowError as found:
        raise OptionError(f"evaluator 'integer': the proved ranges of the values are too wide ({found})") from None
    wiring = builder.wiring
    kept, read = wiring.part(wiring.used(len(wiring.modules)))  # others are never read
    operations, own = tuple(zip(kept, map(tuple, read), strict=True)), None if proof.last is None else builder.rows
    return replace(empty, fraction=value.fraction, operations=operations, body_error=error, own_error=own)
