r"""Conformal prediction sets and intervals of exported networks that keep their coverage under attack.

With n calibration samples, exchangeable with the test sample, and q the k-th smallest of their scores,
:math:`k = \lceil (n + 1)(1 - \alpha) \rceil`, split conformal prediction covers with probability at least
:math:`1 - \alpha`. For the score :math:`s_y(x) = \max_{i \ne y} f_i(x) - f_y(x)` and proved constants :math:`K_{iy}` of
the differences the set

.. math:: C_\varepsilon(x') = \{y : \max_{i \ne y} (f_i(x') - f_y(x') - K_{iy}\varepsilon) \le q\}

contains the plain set of every x with :math:`\|x' - x\| \le \varepsilon`. The interval of a regression is
:math:`f(x') \pm (q + K\varepsilon)`. Calibration needs no attack. Rounding errors are bounded, and only enlarge sets.

Coverage is marginal: over calibration and test samples together, not for each input, class or group.

Source: Vovk, Gammerman & Shafer, "Algorithmic learning in a random world", 2005 (split conformal); Massena et al.,
"Efficient robust conformal prediction via Lipschitz-bounded networks", ICML 2025 (with a global constant).
"""

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor

from lipkit.certificates import margins
from lipkit.certificates.measurement import Measurement, Proof, Samples, as_tensor, check_inputs, evaluate, measure_by
from lipkit.certificates.regression import columns, output_constants, reach, with_targets
from lipkit.errors import OptionError, ShapeError, finite
from lipkit.modules import Network
from lipkit.modules.guarding import guard
from lipkit.proof.roundoff import grow, next_down, next_up
from lipkit.shown import Shown, upper
from lipkit.text import format_radius


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PredictionSets(Shown):
    """Sets of classes for N samples that hold the label with probability at least ``1 - alpha``.

    Attributes:
        sets: (N, K) bool.
        alpha: allowed probability of a miss, over calibration and test samples together.
        eps: l2 radius within which each input may have moved.
    """

    sets: Tensor
    alpha: float
    eps: float

    @property
    def mean_size(self) -> float:
        """Mean number of classes in a set."""
        return float(self.sets.double().sum(1).mean())

    def coverage(self, y: Samples) -> float:
        """Fraction of the labels (N,) that are in their sets: measured, while ``1 - alpha`` is proved."""
        labels = as_tensor(y).cpu()
        labels = labels if labels.is_floating_point() else labels.long()
        margins.check_logits(self.sets.double(), labels)
        return float(self.sets.gather(1, labels[:, None]).double().mean())

    def describe(self) -> str:
        """The guaranteed coverage in words, and the mean size of the sets."""
        count, classes = self.sets.shape
        return f"{count} sets of {classes} classes {_covers(self)}\nmean size {self.mean_size:.3f}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PredictionIntervals(Shown):
    """Intervals for N samples and d outputs that hold each target with probability at least ``1 - alpha``.

    ``low`` and ``high`` are (N, d) float64; ``alpha`` and ``eps`` as in `PredictionSets`.
    """

    low: Tensor
    high: Tensor
    alpha: float
    eps: float

    @property
    def mean_width(self) -> float:
        """Mean width over samples and outputs."""
        return float((self.high - self.low).mean())

    def coverage(self, y: Samples) -> float:
        """Fraction of the targets (N,) or (N, d) inside their intervals."""
        y = columns(as_tensor(y).cpu())
        if y.shape != self.low.shape:
            raise ShapeError(f"expected targets of shape {tuple(self.low.shape)}, got {tuple(y.shape)}")
        return float(((self.low <= y) & (y <= self.high)).double().mean())

    def describe(self) -> str:
        """The guaranteed coverage in words, and the mean width of the intervals."""
        return f"{len(self.low)} intervals {_covers(self)}\nmean width {self.mean_width:.6g}"


def _covers(found: PredictionSets | PredictionIntervals) -> str:
    moved = f"inputs moved by up to {format_radius(found.eps)} (l2)"
    return f"cover with probability at least {1 - Decimal(repr(float(found.alpha)))} (marginal), {moved}"  # exactly


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Calibration(Shown):
    """Conformity scores of a network on data that it was not trained on.

    ``scores`` are (n, 1) for a classifier (``labels``), (n, d) for a regression: float64, rounded up, sorted by column.
    """

    scores: Tensor
    labels: bool
    proof: Proof = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.scores)

    def describe(self) -> str:
        """The number of scores, the smallest alpha, and the proved constant."""
        kind = "classifier" if self.labels else f"regression of {self.scores.shape[1]} outputs"
        return (
            f"calibrated on {len(self)} samples: {kind}, alpha >= 1/{len(self) + 1} = {1 / (len(self) + 1):.4g}\n"
            f"L <= {upper(self.proof.constant)} proved from the stored numbers"
        )

    def quantile(self, alpha: float) -> Tensor:
        r"""The :math:`\lceil (n + 1)(1 - \alpha) \rceil`-th smallest score of each column; 1 / (n + 1) <= alpha < 1."""
        least = Fraction(1, len(self) + 1)
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        # As it is written: 0.3 is three tenths.
        written = Fraction(repr(float(alpha))) if number and math.isfinite(alpha) else Fraction(0)  # 0 is refused below
        if not least <= written < 1:
            raise OptionError(
                f"alpha: expected a number from 1/(n + 1) = {upper(float(least))} (of {len(self)} calibration samples) "
                f"to below 1, got {alpha!r}"
            )
        return self.scores[math.ceil((len(self) + 1) * (1 - written)) - 1]  # k - 1: rows count from 0

    def predict_set(self, x: Samples, alpha: float = 0.1, eps: float = 0.0) -> PredictionSets:
        r"""Sets of classes for samples that may have moved by eps: see the top of this module.

        **Guarantee.** If calibration and test samples are exchangeable, and x' is within eps of the test sample, the
        set of x' holds the label with probability at least ``1 - alpha``.

        Args:
            x: (N, *input_shape), attacked or not.
            alpha: allowed probability of a miss, at least 1 / (n + 1).
            eps: l2 radius in units of the input; 0 for plain sets.
        """
        eps = self._checked(True, eps)
        q, outputs = float(self.quantile(alpha)), _measured(self.proof, x)
        sets = ~(_scores(outputs, eps, lower=True) > q)  # not <=: a NaN leaves the label in
        return PredictionSets(sets, alpha, eps)

    def predict_interval(self, x: Samples, alpha: float = 0.1, eps: float = 0.0) -> PredictionIntervals:
        r"""Intervals :math:`f_j(x') \pm (q_j + K_j \varepsilon)`, rounded outwards; otherwise as `predict_set`.

        **Guarantee.** As for `predict_set`, for each output by itself.
        """
        eps = self._checked(False, eps)
        q, measured = self.quantile(alpha), _measured(self.proof, x)
        outputs = columns(measured.outputs)
        half = grow(q + reach(output_constants(self.proof, outputs.shape[1])[0], eps) + measured.errors(0.0)[0])
        half = torch.where(outputs.isfinite(), half, math.inf)  # what overflowed may be anything
        outputs = outputs.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return PredictionIntervals(next_down(outputs - half), next_up(outputs + half), alpha, eps)

    def _checked(self, labels: bool, eps: float) -> float:
        """Return ``eps``; raise unless the calibration's targets are labels (if ``labels``), or numbers (if not)."""
        if self.labels is not labels:
            wanted, other = ("labels", "predict_interval") if labels else ("numbers", "predict_set")
            raise OptionError(f"expected a calibration with {wanted} as targets, got another one: use {other}")
        return finite("eps", eps, least=0)


def calibrate(network: Network, x: Samples, y: Samples, *, proof: Proof | None = None) -> Calibration:
    r"""Conformity scores of a network: of a classifier for integer labels, of a regression for floating-point targets.

    Args:
        network: exported.
        x: (n, *input_shape), not used in training.
        y: (n,) int64 labels, or (n,) or (n, d) targets, scored by :math:`|y - f(x)|` output by output.
        proof: of this network, from `lipkit.prove` for its default evaluator.

    >>> net = Network([torch.nn.Linear(1, 2, bias=False)], (1,))
    >>> _ = net[0].weight.copy_(torch.tensor([[-0.5], [0.5]]))
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> found = calibrate(net, x, (x[:, 0] > 0).long())
    >>> found.predict_set(torch.tensor([[0.3]]), alpha=0.1).sets.tolist()
    [[False, True]]
    >>> found.predict_set(torch.tensor([[0.3]]), alpha=0.1, eps=0.4).sets.tolist()
    [[True, True]]
    """
    x, y = as_tensor(x), as_tensor(y)
    labels, measured = not y.is_floating_point(), measure_by(network, x, proof)
    if measured.logits is None:
        raise OptionError("proof: expected one with rounding='sound', got rounding='ignore'")
    if labels:
        y = y.long().cpu()
        margins.check_logits(measured.outputs, y)
        scores = _scores(measured, 0.0, lower=False).gather(1, y[:, None])
    else:
        outputs, target = with_targets(measured.outputs, y)
        if not bool(target.isfinite().all()):
            raise OptionError("expected finite targets, got NaN or infinity")
        distances = grow((outputs - target).abs() + measured.errors(0.0)[0])
        scores = torch.where(outputs.isfinite(), distances, math.inf)
    return Calibration(scores.sort(0).values, labels, measured.proof)


def _measured(proof: Proof, x: Samples) -> Measurement:
    x = as_tensor(x)
    check_inputs(proof.network, x)
    proof.evaluator.check(proof.network)
    guard(*proof.network.modules())
    return evaluate(proof, x, proof.evaluator)


def _scores(measured: Measurement, eps: float, *, lower: bool) -> Tensor:
    """Lower or upper bounds (N, K) of the scores of all classes, over all inputs within eps of each sample."""
    outputs, proof, logits = measured.outputs, measured.proof, measured.logits
    margins.check_logits(outputs)
    assert logits is not None
    constants, rows = proof.pair_constants(outputs.shape[1])
    moved = grow(constants * eps)  # K eps, pair by pair
    found = []
    for k in range(outputs.shape[1]):
        label = torch.full((len(outputs),), k, dtype=torch.int64)
        error = grow(margins.margin_errors(logits, label, rows)[0] + moved[k])
        over = outputs - outputs[:, [k]]  # 0 at k itself, which is no rival
        ends = next_down(next_down(over) - error) if lower else next_up(next_up(over) + error)
        found.append(ends.scatter(1, label[:, None], -math.inf).amax(1))
    unknown = -math.inf if lower else math.inf  # so that the label counts as in (lower), or as missed
    return torch.where(outputs.isfinite().all(1, keepdim=True), torch.stack(found, 1), unknown)


__all__ = ["Calibration", "PredictionIntervals", "PredictionSets", "calibrate"]

__dir__ = __all__.copy
