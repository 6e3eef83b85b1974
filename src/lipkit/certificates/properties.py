r"""Properties of a network: on boxes of inputs (proved, refuted by a point or left open), and monotone outputs.

A case of a property (`lipkit.certificates.vnnlib`) is a box and half-spaces :math:`b_k y \le c_k` of the outputs; a
counterexample lies in the box and meets them all. Linear bounds go back through the network as for local certificates,
here on the box :math:`[l, u]`, and rounding is subtracted in the same way:

.. math:: b_k f(x) \ge A_k x + d_k \ge A_k m + d_k - |A_k|\,(u - l) / 2, \qquad m = (l + u) / 2 .

A box in which one of the conditions fails everywhere has no counterexample. A box that stays open is cut in half, where
:math:`|A_{ki}| (u_i - l_i)` is largest. Points are searched for by descent, and in every open box.

That an output is monotone in an input follows from the signs of the stored weights:

.. math:: \partial y_i / \partial x_j \ge 0 \text{ everywhere, if every path from } x_j \text{ to } y_i \text{ has a
   product of weights} \ge 0

through activations that do not decrease (`ReLU`, `tanh`, `MaxMin`, ...). No number is rounded: a sign is exact.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from lipkit.certificates.evaluators import Evaluator, arithmetic, machine, settings, violations
from lipkit.certificates.evaluators import evaluator as evaluator_of
from lipkit.certificates.local import Ball, Bounds, _norm
from lipkit.certificates.measurement import check_network
from lipkit.certificates.vnnlib import Case
from lipkit.errors import NoRuleError, OptionError, finite
from lipkit.linalg.matrices import all_finite, check_integer
from lipkit.linalg.precision import check_underflow
from lipkit.modules import GroupSort, MaxMin, Network
from lipkit.modules.activations import slope_restricted
from lipkit.modules.dense import Affine
from lipkit.modules.guarding import type_name
from lipkit.modules.storage import exact_copy
from lipkit.proof.roundoff import FLOAT64, grow, next_down, next_up, up
from lipkit.shown import Shown, lower

_STARTS, _STEPS = 256, 40


@dataclass(frozen=True, eq=False, repr=False)
class Answer(Shown):
    """The answer to a property.

    Attributes:
        answer: ``"holds"``: proved; ``"violated"``: by `point`; ``"unknown"``.
        evaluator: the evaluation that the answer holds for.
        point: (*input_shape) a counterexample in the evaluator's format, or None.
        outputs: the evaluator's outputs there, or None.
        boxes: number of boxes that were bounded.
        proved: fraction of the volume that is proved free of counterexamples.
    """

    answer: str
    evaluator: Evaluator
    point: Tensor | None
    outputs: Tensor | None
    boxes: int
    proved: float

    def describe(self) -> str:
        """The answer, and the point or the evaluation that it holds for."""
        if self.point is not None and self.outputs is not None:
            x, y = (", ".join(f"{v!r}" for v in t.flatten().tolist()) for t in (self.point, self.outputs))
            return f"violated\nat X = {x}\nwhere the {self.evaluator.name} evaluation is Y = {y}"
        real = f"{self.answer}\nproved in real arithmetic and for {self.evaluator.name} evaluation, on "
        real += f"{self.boxes} box{'es' * (self.boxes != 1)}"
        return real if self.answer == "holds" else f"{real}: {lower(100 * self.proved, 4)} % of the volume"


class _Box(Ball):
    """`Ball` for boxes (N, *input_shape) in place of balls; `below` also keeps, as ``rows``, its rows at the input."""

    def __init__(self, bounds: Bounds, low: Tensor, high: Tensor) -> None:
        centre = torch.minimum(torch.maximum(low / 2 + high / 2, low), high)  # halves first: their sum stays finite
        reach = next_up(torch.maximum(high - centre, centre - low))  # half widths, rounded up
        self.rows = torch.zeros(0)  # before the bounds of the activations call _inside
        super().__init__(bounds.circuit, centre, _norm(reach[:, None])[:, 0], (low, high), bounds.walks(centre))

    def _inside(self, a: Tensor, const: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.moves is not None
        self.rows = a
        low, high = (move.flatten(1)[:, None] for move in self.moves)
        rows = a.flatten(2)
        lost = -torch.minimum(rows * low, rows * high).sum(2)  # the most that the box takes off, entry by entry
        most, entries = grow(lost * (1 + FLOAT64.gamma(rows.shape[2] + 4))), rows.shape[2]
        return const, error + most + 4 * FLOAT64.tiny * entries, torch.zeros_like(lost)


def _rounded(exact: Sequence[Fraction], up: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rational numbers rounded to a format, all up (``up``) or all down."""
    try:
        numbers = torch.tensor([float(v) for v in exact], dtype=torch.float64).to(dtype)
        wrong = [Fraction(n) < v if up else Fraction(n) > v for n, v in zip(numbers.tolist(), exact, strict=True)]
    except OverflowError:
        raise OptionError(f"expected numbers in the range of {dtype}, got one beyond") from None
    beyond = numbers.nextafter(torch.full_like(numbers, math.inf if up else -math.inf))
    # One number further where rounding went the wrong way.
    return torch.where(torch.tensor(wrong, dtype=torch.bool), beyond, numbers)


class _Group:
    """The cases that share a box: all their conditions on outputs as rows, and the rows that each case has."""

    def __init__(self, cases: Sequence[Case], network: Network, dtype: torch.dtype, outputs: int) -> None:
        self.cases, self.network, self.dtype, shape = cases, network, dtype, network.input_shape
        atoms = list(dict.fromkeys(itertools.chain(*(case.outputs for case in cases))))
        exact = [dict(atom.factors).get(("Y", i), Fraction()) for atom in atoms for i in range(outputs)]
        self.rows, below = (_rounded(exact, up).reshape(-1, outputs) for up in (True, False))
        # How far each factor is from the exact one.
        self.off = torch.where(self.rows == below, 0.0, next_up(self.rows - below))
        self.limits = _rounded([atom.bound for atom in atoms], True)
        self.has = torch.tensor([[atom in case.outputs for atom in atoms] for case in cases], dtype=torch.bool)
        low, high = zip(*cases[0].box, strict=True)
        # Lowest and highest inputs, outwards for proofs and inwards for points.
        self.ends = torch.stack((_rounded(low, False), _rounded(high, True))).unflatten(1, shape)
        self.inner = torch.stack((_rounded(low, True, dtype), _rounded(high, False, dtype))).unflatten(1, shape)

    def among(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Move each x into the box; return the first point that meets a case exactly, and its outputs, or None."""
        points = torch.minimum(torch.maximum(x.to(self.dtype), self.inner[0]), self.inner[1])
        y = self.network(points).flatten(1)
        # Floating point finds conditions that are nearly met; fractions decide.
        room = 2.0**-40 * (y.double().abs() @ self.rows.mT.abs() + self.limits.abs())
        near = (y.double() @ self.rows.mT - self.limits <= room) & y.isfinite().all(1, keepdim=True)
        for i, k in (near[:, None] | ~self.has).all(2).nonzero()[:64].tolist():  # points with all conditions of a case
            alone = self.network(points[i : i + 1]).flatten()  # repeatable: a batch may round otherwise
            both = {"X": points[i].flatten().tolist(), "Y": alone.tolist()}
            if all(atom.met(both) for atom in (*self.cases[k].inputs, *self.cases[k].outputs)):
                return points[i], alone
        return None

    def descend(self, network: Network, end: float) -> tuple[Tensor, Tensor] | None:
        """Search for a point of `among` by signed gradient descent from random points; None if none is found.

        Each start has one case, and a step lowers the condition of it that is furthest from being met. The search stops
        at time ``end``.
        """
        low, width = self.ends[0], self.ends[1] - self.ends[0]
        random = torch.rand(_STARTS, *low.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x, cases = low + width * random, torch.arange(_STARTS) % len(self.cases)
        scale = self.rows.abs().sum(1).clamp_min(1e-300)  # so that conditions of all sizes compare
        for step in range(_STEPS):
            if (found := self.among(x)) is not None or time.monotonic() > end or not len(self.rows):
                return found
            with torch.enable_grad():
                x.requires_grad_()
                values = (network(x).flatten(1) @ self.rows.mT - self.limits) / scale
                worst = torch.where(self.has[cases], values, -math.inf).amax(1)  # of the point's own case
                (slope,) = torch.autograd.grad(worst.sum(), x)
            x = x.detach() - width * slope.sign() * 0.25 * 0.85**step
            x = torch.minimum(torch.maximum(x, low), low + width)
        return None


def _check_cases(cases: Sequence[object], inputs: int, outputs: int) -> None:
    """Raise unless ``cases`` holds one or more cases for this number of inputs and outputs."""
    if not cases:
        raise OptionError("cases: expected one or more, got none: no input meets the conditions, so nothing is proved")
    for case in cases:
        if not isinstance(case, Case):
            got = type(case).__name__
            raise OptionError(f"cases: expected those of read_vnnlib(path, network), got a sequence of {got}")
        last = max((i for atom in case.outputs for (_, i), _ in atom.factors), default=-1)
        if len(case.box) != inputs or last >= outputs:
            raise OptionError(
                f"cases: expected those of a network with {inputs} inputs and {outputs} outputs, got some with "
                f"{len(case.box)} inputs" + (f" and Y_{last}" if last >= 0 else "")
            )


def verify_property(
    network: Network,
    cases: Sequence[Case],
    *,
    seconds: float = 60.0,
    evaluator: str | None = None,
    batch: int = 128,
) -> Answer:
    r"""Prove that no input meets one of the cases, or find one that does.

    Args:
        network: result of ``lipkit.export``.
        cases: of the property, from `lipkit.certificates.vnnlib.read_vnnlib`.
        seconds: after which the answer is ``"unknown"``; a batch that is begun is finished.
        evaluator: ``"float32"``, ``"float64"`` or ``"float32_blocked"``, as in `lipkit.certify`; None is the format of
            the network, and float64 where torch's settings break float32 (`lipkit.certificates.evaluators`).
        batch: boxes that are bounded at once.

    Guarantee:
        ``"holds"`` is a proof: no real input meets a case with the outputs of the stored numbers in exact arithmetic,
        nor does an input in the evaluator's format with the outputs of the machine, in any order of sums
        (`docs/rounding.md`). ``"violated"`` names an input in the evaluator's format that meets a case exactly, with
        outputs that this machine computed.

    Raises:
        NoRuleError: a network that is not exported. OptionError: no cases, or cases for other numbers of inputs and
            outputs; ``seconds`` or ``batch`` out of range; settings of torch that break the evaluator's arithmetic.

    >>> from torch import nn; from lipkit.certificates.vnnlib import cases
    >>> net = Network([nn.Linear(1, 2), nn.ReLU()], (1,))
    >>> unsafe = "(assert (>= X_0 0)) (assert (<= X_0 1)) (assert (<= Y_0 {}))"
    >>> [verify_property(net, cases(unsafe.format(c), 1, 2)).answer for c in (-0.1, 9)]
    ['holds', 'violated']
    """
    check_network(network, "check")
    check_integer("batch", batch, 1)
    end = time.monotonic() + (seconds if seconds == math.inf else finite("seconds", seconds, least=0))
    if evaluator is None:
        wide = any(t.dtype == torch.float64 for t in (*network.parameters(), *network.buffers()))
        evaluator = "float64" if wide or violations("float32", "cpu", settings("cpu"), network) else "float32"
    made_for = evaluator_of(evaluator, "cpu", network)
    bounds = Bounds(exact_copy(network), arithmetic(evaluator, network), None)
    out, shape, run = bounds.circuit.output, network.input_shape, machine(network, evaluator)
    outputs = math.prod(bounds.circuit.shapes[out])
    cases = list(cases or ())  # an iterator is read once
    _check_cases(cases, math.prod(shape), outputs)
    dtype = torch.float64 if evaluator == "float64" else torch.float32
    by_box: dict[object, list[Case]] = {}
    for case in cases:
        by_box.setdefault(case.box, []).append(case)  # one bound of a box serves all its cases
    groups = [_Group(each, run, dtype, outputs) for each in by_box.values()]
    boxes, volume = 0, 0.0

    def answer(name: str, found: tuple[Tensor, Tensor] | None = None) -> Answer:
        point, y = found or (None, None)
        return Answer(name, made_for, point, y, boxes, volume / len(groups))

    if not all_finite(*network.parameters(), *network.buffers()):
        return answer("unknown")
    with torch.no_grad():
        for group in groups:
            if (found := group.descend(bounds.network, end)) is not None:
                return answer("violated", found)
        for group in groups:
            # Open boxes, each with its fraction of the volume. The newest are bounded first, so that few are open.
            left, parts = group.ends[None], torch.ones(1, dtype=torch.float64)
            while len(left):
                if time.monotonic() > end or not len(group.rows):
                    return answer("unknown")
                (left, now), (parts, part) = ((t[:-batch], t[-batch:]) for t in (left, parts))
                boxes += len(now)
                box = _Box(bounds, now[:, 0], now[:, 1])
                box.rows = torch.zeros(1, len(group.rows), *shape, dtype=torch.float64)
                base, norm = box.below(out, group.rows.reshape(1, -1, *bounds.circuit.shapes[out]))
                base = next_down(base - next_up(box.radius[:, None] * norm))  # norm: leaves are bounded on balls
                slack = base - grow(up(box.sizes[out].flatten(1) @ group.off.mT, outputs)) - group.limits
                fails = (slack > 0) & box.fits[:, None]
                still = ~(fails[:, None] & group.has).any(2).all(1)  # boxes where some case has no condition that fails
                volume += float(part[~still].sum())
                rows = box.rows.expand(len(now), -1, *shape)[still]
                now, part, slack = now[still], part[still], slack.masked_fill(fails, -math.inf)[still]
                # The corner where each linear bound is least.
                lowest = torch.where(rows > 0, now[:, :1], now[:, 1:]).flatten(0, 1)
                if (found := group.among(torch.cat((box.x[still], lowest)))) is not None:
                    return answer("violated", found)
                middle = now[:, 0] / 2 + now[:, 1] / 2
                can = ((middle > now[:, 0]) & (middle < now[:, 1])).flatten(1)  # neighbouring numbers have no middle
                if not bool(can.any(1).all()):  # a point that stays open cannot be cut
                    return answer("unknown")
                # Cut along the input with the largest effect on the condition nearest to failing.
                steep = ((rows.abs() + 2.0**-100) * (now[:, 1:] - now[:, :1])).flatten(2)
                nearest = (slack / steep.sum(2).clamp_min(1e-300)).argmax(1)
                at = torch.where(can, steep[torch.arange(len(now)), nearest], -1.0).argmax(1)
                each, halves = torch.arange(len(now)), now.flatten(2).repeat(2, 1, 1)
                # The upper end of one half is the lower end of the other.
                halves[each, 1, at] = halves[len(now) + each, 0, at] = middle.flatten(1)[each, at]
                left, parts = torch.cat((left, halves.unflatten(2, shape))), torch.cat((parts, part / 2, part / 2))
    return answer("holds")


def monotone(network: Network) -> Tensor:
    """A matrix that tells which outputs are proved monotone in which inputs.

    Args:
        network: result of ``lipkit.export``: dense layers, scalings and activations of slopes in [0, 1] or sorting,
            in a chain, for inputs that are vectors.

    Returns:
        (outputs, inputs) int64: 1 where the output never decreases with the input, -1 where it never increases, 0 where
        neither is proved. An output that does not depend on the input counts as 1.

    Guarantee:
        Everywhere, not only in an input range; for the exact function of the stored numbers.

    Raises:
        NoRuleError: another module, numbers that are not finite, or inputs that are not vectors.
        OptionError: torch.set_flush_denormal(True), under which the sign of a small weight is lost.

    >>> net = Network([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)], (2,))
    >>> _ = net[0].weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 3.0]])), net[2].weight.fill_(1.0)
    >>> monotone(net).tolist()
    [[1, 0]]
    """
    check_network(network, "check")
    check_underflow()
    if len(network.input_shape) != 1:
        raise NoRuleError(f"monotone: expected inputs that are vectors, got the shape {network.input_shape}")
    (count,) = network.input_shape
    same = torch.eye(count, dtype=torch.bool)
    # (units, inputs) each: True if the unit never falls with the input, and if it never rises.
    up, down = torch.ones_like(same), ~same
    for module in exact_copy(network):
        if not all_finite(*module.parameters(), *module.buffers()):
            raise NoRuleError(f"monotone: expected finite numbers, got NaN or infinity in {module}")
        if type(module) is nn.Linear:
            rising, falling = (module.weight > 0).double(), (module.weight < 0).double()
            # These weights break a rise: positive ones of units that may fall, negative ones of units that may rise.
            against = [rising @ (~a).double() + falling @ (~b).double() for a, b in ((up, down), (down, up))]
            up, down = against[0] == 0, against[1] == 0
        elif type(module) is Affine:
            scale = module.scale.expand(len(up))[:, None]
            up, down = ((scale == 0) | torch.where(scale > 0, a, b) for a, b in ((up, down), (down, up)))
        elif type(module) is MaxMin:
            up, down = (a.view(2, -1, count).all(0).repeat(2, 1) for a in (up, down))  # max and min rise if both do
        elif type(module) is GroupSort:
            size = module.group_size or len(up)
            up, down = (a.view(-1, size, count).all(1).repeat_interleave(size, 0) for a in (up, down))
        elif not (slope_restricted(module) or type(module) is nn.Flatten):
            kind = type_name(type(module))
            raise NoRuleError(f"monotone: expected dense layers and activations that never fall, got {kind}")
    return torch.where(up, 1, torch.where(down, -1, 0))
