r"""Margins and the radii they certify, of exact logits and of the machine's: in float64, every radius rounded down.

If the difference ``y_t - y_i`` of two logits is ``K_ti``-Lipschitz, no input closer than ``(y_t - y_i) / K_ti`` lets
class ``i`` reach class ``t``. Two proved values of ``K_ti`` are offered and the smaller one counts, pair by pair:

    sqrt(2) L              for an L-Lipschitz network                                     (`global_constants`)
    L_b ||w_t - w_i||      for a last layer with rows w_i after an L_b-Lipschitz body     (`last_layer_constants`)

so ``radius = min_{i != t} (y_t - y_i) / K_ti`` is never below the better of the two classical certificates.

A radius that holds for the machine subtracts every rounding error possible in the ball. With t the label, i another
class, the machine's logits :math:`\hat y` and the exact ones y,

.. math::
    \hat y_t(x') - \hat y_i(x') \ge m_{ti} - c_{ti} - e_{ti}(s) - K_{ti} s \qquad\text{for } \|x' - x\| \le s

with the margin :math:`m_{ti}` measured in float64 at the sample, the error :math:`c_{ti}` of that measurement, the
error :math:`e_{ti}(s) = a_{ti} + b_{ti} s` of the machine anywhere in the ball, and the proved constant
:math:`K_{ti}` of the exact difference. All are positive and known before s, so that

.. math:: r = \min_i \frac{m_{ti} - c_{ti} - a_{ti}}{K_{ti} + b_{ti}}

certifies the open ball. The radius is cut where a number on the way could overflow.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipkit.errors import OptionError, ShapeError, check_labels
from lipkit.integer.program import Program
from lipkit.modules.chains import ChainProof
from lipkit.modules.dense import last_layer, moduli_sizes
from lipkit.modules.machine import ErrorBound, by_norms, norm_factors, through
from lipkit.proof.roundoff import FLOAT64, Arithmetic, Line, flat, grow, known, next_down, next_up, product, root, size


def predictions(logits: Tensor) -> Tensor:
    """The predicted class, (N,) int64: the first largest logit, or -1 where a logit is NaN (never correct).

    >>> predictions(torch.tensor([[1.0, 3.0], [float("nan"), 0.0]])).tolist()
    [1, -1]
    """
    return torch.where(logits.isnan().any(dim=1), -1, logits.argmax(dim=1))


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Signed margins ``y_t - max_{i != t} y_i``: positive exactly where the label wins alone.

    (N,) float64 of logits (N, K) and labels (N,); NaN where a logit is NaN or infinite.

    >>> margins(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.tensor([0, 1])).tolist()
    [-2.0, 0.0]
    """
    check_logits(logits, labels)
    logits = logits.double()
    own = logits.gather(1, labels[:, None])
    rest = logits.scatter(1, labels[:, None], -math.inf).amax(dim=1)  # of the other classes
    margin = own[:, 0] - rest  # to nearest, for display: radii round their own difference down
    return torch.where(logits.isfinite().all(dim=1), margin, math.nan)


def global_constants(constant: float, classes: int) -> Tensor:
    r"""``K_ti = sqrt(2) L`` for every pair of the K classes of an L-Lipschitz network, rounded up; the diagonal is 0.

    L is a proved upper bound; with ``inf`` (nothing is known) radii are 0.
    """
    check_constant(constant)
    return torch.full((classes, classes), product(root(2), constant), dtype=torch.float64).fill_diagonal_(0.0)


def row_distances(weight: Tensor) -> Tensor:
    """``||w_t - w_i||`` of the rows of a matrix, rounded up: (K, K) float64, 0 where two rows are equal."""
    if weight.ndim != 2:
        raise ShapeError(f"expected a last-layer weight of shape (K, n), got {tuple(weight.shape)}")
    rows = weight.detach().double()
    # Two units of roundoff for each term: more than its square, sum, root and scaling lose.
    slack = 1.0 + (rows.shape[1] + 8) * torch.finfo(torch.float64).eps
    result = []  # in parts: K^2 n numbers at once would not fit for many classes
    for some in rows.split(max(1, 2**18 // max(1, rows.numel()))):
        difference = (rows - some[:, None]).abs()  # rounded once
        largest = difference.amax(dim=2, keepdim=True)  # scaled, so that the squares cannot underflow to 0
        scaled = difference / torch.where(largest > 0, largest, 1.0)
        result.append(scaled.square().sum(dim=2).sqrt() * largest[:, :, 0] * slack)
    found = torch.cat(result)
    # Below the normal range each of the two products may round down by half of the smallest number.
    return torch.where((found > 0) & (found < 2.0**-1000), found + 2.0**-1073, found)


def last_layer_constants(distances: Tensor, body_constant: float) -> Tensor:
    r"""``K_ti = L_b ||w_t - w_i||`` for a network that ends in a linear layer, (K, K), rounded up.

    The ``distances`` are `row_distances` of the last layer's weight, L_b is a proved upper bound for everything before
    it. 0 on the diagonal, and where two rows are equal: then the difference of the two logits is the same for every
    input.
    """
    check_constant(body_constant)
    if body_constant == 0:
        return torch.where(distances.isfinite(), 0.0, math.inf).fill_diagonal_(0.0)  # 0 * inf is unknown, not 0
    # Equal rows stay a proved 0, but only after a finite body: 0 * inf proves nothing.
    equal = 0.0 if math.isfinite(body_constant) else math.inf
    return torch.where(distances == 0, equal, next_up(distances * body_constant)).fill_diagonal_(0.0)


def pair_constants(proof: ChainProof, classes: int) -> tuple[Tensor, Tensor | None]:
    """Proved constants (K, K) of differences of two outputs; and the distances of the last layer's rows, or None."""
    constants = global_constants(proof.constant * proof.slack, classes)
    if proof.last is None or proof.body_constant is None:
        return constants, None
    distances = row_distances(proof.last.weight.cpu())
    body = last_layer_constants(distances, proof.body_constant * proof.slack)
    return torch.minimum(constants, body), last_layer_constants(distances, 1.0)


def radii(logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
    r"""Certified radii ``min_{i != t} (y_t - y_i) / K_ti``, (N,) float64 in units of the input's l2 norm.

    ``constants`` K (K, K) are from `global_constants`, `last_layer_constants` or the elementwise minimum of both.

    **Guarantee.** A lower bound of the distance to the nearest input that is classified differently, if ``K_ti`` are
    proved Lipschitz constants of the logit differences and the logits are exact: the prediction is constant on the
    open ball. Subtraction and division are rounded down.

    Radius 0: a wrong prediction, a tie, a NaN or infinite logit, a NaN or infinite constant. Where ``K_ti`` is 0 (a
    constant network, two equal last-layer rows) the pair never changes order: it allows every radius (``inf``) if
    ``y_t - y_i`` is positive, and none otherwise; 0/0 does not occur.

    >>> y = torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    >>> radii(y, torch.tensor([0, 0]), global_constants(1.0, 3))  # 2 / sqrt(2), and a tie
    tensor([1.4142, 0.0000], dtype=torch.float64)
    """
    check_logits(logits, labels)
    classes = logits.shape[1]
    if constants.shape != (classes, classes):
        raise ShapeError(f"expected constants of shape {(classes, classes)}, got {tuple(constants.shape)}")
    logits = logits.double()
    difference = next_down(logits.gather(1, labels[:, None]) - logits)
    radius = nearest(difference, constants.double().to(logits.device)[labels], labels)
    return torch.where(logits.isfinite().all(dim=1), radius, 0.0)


def nearest(gap: Tensor, slope: Tensor, labels: Tensor) -> Tensor:
    """The smallest ``gap / slope`` (N, K) over the classes but the label, rounded down; 0 and inf as in `radii`."""
    positive = (gap > 0) & slope.isfinite()
    moving = positive & (slope > 0)
    quotient = next_down(gap / torch.where(moving, slope, 1.0))  # 1 only where it is not used
    # Pairs that cannot move keep their order at every distance.
    pair = torch.where(moving, quotient, torch.where(positive, math.inf, 0.0)).clamp_min(0.0)
    return pair.scatter(1, labels[:, None], math.inf).amin(dim=1)  # the label is no rival of itself


def check_logits(logits: Tensor, labels: Tensor | None = None) -> None:
    """Raise unless ``logits`` is (N, K >= 2), and ``labels``, if given, N integers in [0, K)."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ShapeError(
            f"expected logits of shape (N, K) with K >= 2 classes, got {tuple(logits.shape)}: numbers are certified by "
            "lipkit.certificates.certify_regression"
        )
    if labels is not None:
        check_labels(labels, len(logits), logits.shape[1])


def check_constant(constant: float) -> None:
    """Raise unless ``constant`` is a number >= 0 (``inf`` included)."""
    if not constant >= 0:  # not <: NaN is refused, too
        raise OptionError(f"expected a Lipschitz constant >= 0, got {constant}")


class Own(NamedTuple):
    """Errors (N, K) of the last layer: ``at64`` in float64; ``at + slope d`` in the machine, for an input off by d."""

    at64: Tensor
    at: Tensor
    slope: Tensor


class Logits(NamedTuple):
    r"""Outputs at N samples, and the rounding errors around them.

    Attributes:
        values: (N, K) computed in float64.
        walk: error bounds before the last dense layer; after the whole network if it does not end in one.
        own: errors of that last layer itself; None without one.
        peak: bounds every intermediate number.
    """

    values: Tensor
    walk: ErrorBound
    own: Own | None
    peak: Line


def merged(parts: Sequence[Any], merge: Callable[[Any], Tensor]) -> Any:
    """Merge nested tuples of the same structure, tensor by tensor; other values must be equal in all of them."""
    first = parts[0]
    if isinstance(first, tuple):
        return type(first)(*(merged(each, merge) for each in zip(*parts, strict=True)))
    return merge(parts) if isinstance(first, Tensor) else first


class Evaluation:
    """Outputs of a network with their rounding errors, batch by batch.

    Args:
        proof: of the network in float64, module by module.
        arithmetic: of the evaluator.
        zero: (1, *input_shape) zeros in float64.

    In float64 errors are small against most margins, so `by_norms` bounds them in one pass through the network. For
    samples where its bounds could cost 2^-30 of the margin, `through` makes better ones in two passes.
    """

    def __init__(self, proof: ChainProof, arithmetic: Arithmetic, zero: Tensor) -> None:
        self.steps, self.last = proof.steps, proof.last
        if self.last is not None:
            self.machine = last_layer(self.last, arithmetic)
            self.double = self.machine if arithmetic == FLOAT64 else last_layer(self.last, FLOAT64)
            self.largest, rows = self.last.weight.abs().amax(), size(self.last.weight)
            self.norm = float(rows.amax()) if bool(self.largest > 0) else 0.0
        self.factors = None
        if arithmetic == FLOAT64 and self.steps:
            self.factors = norm_factors(self.steps, zero, [moduli_sizes(step.module) for step in self.steps])
            features = self.factors.origin.centre
            values = features if self.last is None else self.last(features)
            self.factors = self.factors if values.ndim == 2 and values.shape[1] > 1 else None

    def __call__(self, x: Tensor) -> Logits:
        if self.factors is None:
            found = self._logits(through(self.steps, x))
        else:
            walk, far = by_norms(self.steps, self.factors, x, self._spare)
            found = self._logits(walk)
            rows = (far | ~(found.peak.at < FLOAT64.room * 2.0**-40)).nonzero()[:, 0]  # also near an overflow
            if len(rows):
                near = self._logits(through(self.steps, x[rows]))
                found = merged([found, near], lambda tensors: tensors[0].index_copy(0, rows, tensors[1]))
        outputs = found._replace(walk=found.walk._replace(centre=torch.empty(0)))  # frees the features
        on_cpu: Logits = outputs if x.device.type == "cpu" else merged([outputs], lambda tensors: tensors[0].cpu())
        return on_cpu

    def _spare(self, features: Tensor) -> Tensor:
        """(N,) l2 errors of the features that change the gap of the two largest outputs by at most 2^-30 of it."""
        values = features if self.last is None else self.last(features)
        first, second = values.topk(2).values.unbind(1)
        return (first - second) * (2.0**-30 / (2.0 if self.last is None else max(2 * self.norm, 2.0**-1000)))

    def _logits(self, walk: ErrorBound) -> Logits:
        if self.last is None:
            return Logits(walk.centre, walk, None, walk.peak)
        features = walk.centre
        measure, slope = self.machine
        own, numbers = measure(features)
        biggest = Line(numbers.amax(1) + self.largest, self.norm)  # a weight times a feature that moved
        peak = walk.peak.most(biggest.below(walk.spread))
        with torch.no_grad():
            values = self.last(features)
        own64 = own if self.double is self.machine else self.double[0](features)[0]
        return Logits(values, walk, Own(own64, own, slope.expand_as(own)), peak)


def integer_logits(program: Program, x: Tensor) -> Logits:
    """The outputs of an integer program at x; they are exact integers, so no measurement error is added.

    At x and at every other input, the program's outputs differ from the exact network's by at most its proved error.
    """
    values = program(x)
    # Slope 0: whatever the distance of x', the program clamps and rounds it itself.
    error, zero = flat(values[:, 0], program.body_error), flat(values[:, 0], 0.0)
    walk = ErrorBound(torch.empty(0), error.at, error, zero, zero)  # the values at x and at x' are both off by it
    if program.own_error is None:
        return Logits(values, walk, None, zero)
    own = program.own_error.expand_as(values)
    return Logits(values, walk, Own(own, own, torch.zeros_like(own)), zero)


def sound_radii(
    logits: Logits, labels: Tensor, constants: Tensor, rows: Tensor | None, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """Radii (N,) with rounding errors (see the module docstring), and those of `radii`; 0 where nothing is certified.

    ``constants`` and ``rows`` are those of `pair_constants`.
    """
    values, constants = logits.values, constants[labels]
    difference = next_down(values.gather(1, labels[:, None]) - values)  # m, its subtraction rounded down
    at, slope = margin_errors(logits, labels, rows)
    gaps, slopes = (next_down(difference - at), difference), (grown(constants + slope), constants)
    radius, ignored = nearest(torch.cat(gaps), torch.cat(slopes), labels.repeat(2)).chunk(2)
    room = arithmetic.room - logits.peak.at  # how far numbers may still grow
    cap = room * (1 - 2.0**-40) / logits.peak.slope if logits.peak.slope > 0 else torch.full_like(room, math.inf)
    finite = values.isfinite().all(dim=1)
    positive = finite & (room > 0)  # false for NaN, too
    return torch.where(positive, torch.minimum(radius, cap), 0.0), torch.where(finite, ignored, 0.0)


def margin_errors(logits: Logits, labels: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Error bounds (N, K) of the label's margin over each class: at the samples, and their growth per distance.

    ``rows`` (K, K) holds the distances between rows of the last layer; None bounds margins by the whole output's error.
    """
    values, walk, own = logits.values, logits.walk, logits.own
    spread = walk.spread
    if own is None or rows is None:
        # Two outputs of a vector that is off by E: their difference is off by at most sqrt(2) E.
        two = grow(math.sqrt(2.0))
        at = grow(two * (walk.centre_error + walk.error.at))[:, None].expand_as(values)
        slope = torch.full_like(values, grow(two * walk.error.slope), dtype=torch.float64)
    else:
        apart = rows[labels]
        pair = _both(own.slope, labels)  # by how much both rows' own errors grow
        at = grow(_both(own.at64, labels) + _both(own.at, labels))
        at = grow(at + pair * spread.at[:, None])  # the machine's features are off by up to the spread
        # Features that are off move both logits, by the difference of their rows.
        at = grow(at + apart * (walk.centre_error + walk.error.at)[:, None])
        slope = grown(grown(pair * spread.slope) + grown(apart * walk.error.slope))
    return at, slope


def output_errors(
    logits: Logits, distance: float, weight: Tensor | None, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """Error bounds (N, 1 or K) of the float64 outputs at the samples, and of the machine's within ``distance``.

    ``weight`` is that of the last dense layer, or None.
    """
    walk, own = logits.walk, logits.own
    peak = logits.peak.at + (logits.peak.slope * distance if logits.peak.slope > 0 else 0.0)
    overflow = torch.where(peak < arithmetic.room, 0.0, math.inf)[:, None]  # an infinite error certifies nothing
    body = grow(walk.error.at + walk.error.slope * distance)[:, None]
    if own is None or weight is None:  # the error of the whole vector bounds that of each output
        return known(walk.centre_error[:, None]), known(body + overflow)
    norms, spread = size(weight), walk.spread
    centre = grow(own.at64 + norms * walk.centre_error[:, None])
    reached = grow(spread.at + spread.slope * distance)[:, None]
    return known(centre), known(grow(own.at + grow(own.slope * reached) + grow(norms * body)) + overflow)


def _both(each: Tensor, labels: Tensor) -> Tensor:
    """``each_t + each_i``, (N, K), for the label t and every class i."""
    return each.gather(1, labels[:, None]) + each  # twice the label's own at the label, which `nearest` leaves out


def grown(values: Tensor) -> Tensor:
    """`grow` applied to the positive entries; a 0 stays 0."""
    return torch.where(values > 0, grow(values), values)
