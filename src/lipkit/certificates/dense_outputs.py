r"""Worst-case accuracy of many decisions at once: all positions of an output share one budget.

For an L-Lipschitz network an input that moves by at most :math:`\varepsilon` moves *all* outputs together by at most
:math:`L\varepsilon` in l2. To turn a right decision of margin m takes the energy :math:`e = m^2/2` if it compares two
logits, which move towards each other, and :math:`m^2` if it compares one with 0. All share :math:`(L\varepsilon)^2`, so

.. math:: \max\{k : e_1 + \dots + e_k \le (L\varepsilon)^2\}, \qquad e_1 \le e_2 \le \dots

decisions can turn at most. A last layer that acts on each position alone, with rows :math:`w_i` after a body of
constant :math:`L_b`, gives :math:`e = \min_i m_i^2 / \|w_t - w_i\|^2` and the budget :math:`(L_b\varepsilon)^2` too;
the better of both counts. Yes-or-no labels at one position read the same features: each has the whole budget.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.certificates.margins import last_layer_constants, row_distances
from lipkit.certificates.measurement import (
    Measurement,
    Proof,
    Samples,
    as_tensor,
    check_proof,
    dtype_name,
    measure_by,
)
from lipkit.errors import OptionError, ShapeError, finite
from lipkit.linalg.matrices import check_integer
from lipkit.modules import Network
from lipkit.proof.roundoff import gamma, grow, next_down, product, root, size
from lipkit.shown import Shown
from lipkit.text import format_radius


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DenseCertificate(Shown):
    r"""Decisions that stay right for every input within eps. All tensors are on the CPU.

    Attributes:
        eps: l2 radius in units of the input.
        positions: (N,) decisions of each sample, ignored ones left out.
        right: (N,) how many of them are right at the sample itself.
        worst: (N,) how many are right at least, anywhere within eps.
        alone: (N,) the same if each position had the whole budget for itself: one radius for each.
        iou: (K,) intersection over union of each class over all samples together, at the samples; NaN for a class that
            neither labels nor predictions hold.
        worst_iou: (K,) a lower bound of `iou` if every input may move by eps.
        proof: of the network; its evaluator is the one that decides.
    """

    eps: float
    positions: Tensor
    right: Tensor
    worst: Tensor
    alone: Tensor
    iou: Tensor
    worst_iou: Tensor
    proof: Proof

    def _fraction(self, count: Tensor) -> float:
        return float(count.sum() / self.positions.sum())

    @property
    def clean_accuracy(self) -> float:
        """Fraction of the decisions that are right."""
        return self._fraction(self.right)

    @property
    def worst_accuracy(self) -> float:
        """Lower bound of the fraction of right decisions if every input moves by at most eps."""
        return self._fraction(self.worst)

    @property
    def mean_iou(self) -> float:
        """Mean of `iou` over the classes that occur."""
        return float(self.iou.nanmean())

    @property
    def worst_mean_iou(self) -> float:
        """Lower bound of `mean_iou` if every input moves by at most eps."""
        return float(self.worst_iou.nanmean())

    def describe(self) -> str:
        """Accuracy and IoU at the samples and in the worst case, and what the bound holds for."""
        return (
            f"{len(self.right)} samples, {int(self.positions.sum()):,} decisions: {100 * self.clean_accuracy:.1f} % "
            f"right, mean IoU {self.mean_iou:.3f}\n"
            f"within {format_radius(self.eps)} (l2) at least {100 * self.worst_accuracy:.1f} % and "
            f"{self.worst_mean_iou:.3f} (one radius for each position: {100 * self._fraction(self.alone):.1f} %)\n"
            + self.proof.describe()
        )


def dense(
    network: Network,
    x: Samples,
    y: Samples,
    eps: float,
    *,
    dim: int = 1,
    ignore_index: int = -100,
    proof: Proof | None = None,
) -> DenseCertificate:
    r"""Worst-case accuracy and IoU of segmentations, sequences and multi-label outputs: see the top of this module.

    **Guarantee.** For every x' with ``|x' - x| <= eps`` in l2 the machine decides at least ``worst`` positions of that
    sample as labelled (which ones may depend on x'); rounding is part of the budget. ``worst_iou`` bounds the IoU of a
    class over all samples: attackers take pixels out of the intersection and add some to the union, and each turned
    decision costs its energy e of the module docstring.

    Args:
        network: exported.
        x: (N, *input_shape).
        y: labels of int64. Classes: (N, *positions) for outputs (N, K, *positions). Multi-label: of the shape of the
            outputs, 0 or 1, decided by the sign of each output.
        eps: l2 radius in units of the input.
        dim: of the outputs, which holds the classes (of multi-label outputs the labels); -1 for sequences (N, T, K).
        ignore_index: a label of positions that do not count.
        proof: from `lipkit.prove`, for another evaluator or rounding; not of an integer program.

    Raises:
        NoRuleError, ShapeError, OptionError: as `lipkit.certify`; an eps that is not a number >= 0.

    >>> net = Network([nn.Conv2d(1, 2, 1)], (1, 2, 2))
    >>> _ = net[0].weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)), net[0].bias.zero_()
    >>> x = torch.tensor([1.0, 0.1, 0.1, 0.1]).view(1, 1, 2, 2)
    >>> found = dense(net, x, torch.zeros(1, 2, 2, dtype=torch.int64), 0.15)
    >>> int(found.worst), int(found.alone)  # an input that moves by 0.15 turns two of the pixels, not three
    (2, 1)

    References: the count of pixels is a fractional knapsack over margins; Dinkelbach, "On nonlinear fractional
    programming", Management Science 13 (1967), for the smallest IoU.
    """
    eps = finite("eps", eps, least=0)
    check_integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
    if proof is not None and check_proof(proof).program is not None:
        raise OptionError("evaluator: expected float64, float32 or float32_blocked for dense outputs, got 'integer'")
    x, y = as_tensor(x), as_tensor(y)
    if y.is_floating_point():
        raise OptionError(f"expected integer labels (int64), got {dtype_name(y)}")
    measured = measure_by(network, x, proof)
    outputs, labels = measured.outputs, y.cpu().long()
    if type(dim) is not int or not -outputs.ndim <= dim < outputs.ndim or dim % outputs.ndim == 0:
        raise OptionError(f"dim: expected a dimension of the outputs {tuple(outputs.shape)} but the first, got {dim}")
    budgets = _budgets(measured, dim % outputs.ndim, eps)
    outputs = outputs.movedim(dim, 1)
    multi_label = labels.ndim == outputs.ndim
    labels = labels.movedim(dim, 1) if multi_label else labels
    _check_labels(outputs, labels, ignore_index)
    decide = _signs if multi_label else _classes
    outputs = outputs.reshape(*outputs.shape[:2], -1)
    labels = labels.reshape(outputs.shape if multi_label else (len(outputs), -1))
    found = [decide(outputs, labels, ignore_index, b) for b in budgets]
    first = found[0]

    def best(bound: Callable[[_Decisions, Tensor], Tensor]) -> Tensor:
        """The largest of the bounds that the budgets prove."""
        return torch.stack([bound(d, b.square) for d, b in zip(found, budgets, strict=True)]).amax(0)

    return DenseCertificate(
        eps=float(eps),
        positions=first.counts,
        right=first.right.sum((1, 2)),
        worst=best(_kept),
        alone=best(lambda d, square: (d.right & (d.turn > square[:, None, None])).sum((1, 2))),
        iou=first.intersection.sum(0).double() / first.union.sum(0),
        worst_iou=best(_worst_iou),
        proof=measured.proof,
    )


class _Budget(NamedTuple):
    """The l2 distance that all outputs, or the features read by a last layer, can move together.

    Attributes:
        square: (N,) the square of that distance.
        pairs, single: (K, K) and (K,): the most that a unit of distance moves a difference of two outputs, or one.
        error: (N,) further error of every output.
        together: whether the outputs of one position read the same features, so that each has the whole budget.
    """

    square: Tensor
    pairs: Tensor
    single: Tensor
    error: Tensor
    together: bool


class _Decisions(NamedTuple):
    """Decisions of N samples, in G groups: a budget is shared within a group, and each group has all of it.

    Attributes:
        counts: (N,) number of decisions that are not ignored.
        right: (N, G, P) which of them are right.
        turn: (N, G, P) the energy that makes each right decision wrong.
        leave, join: (N, K, P) the energies that take a decision out of the intersection of a class, and that add it to
            the predictions of a class; inf where none can.
        intersection, union: (N, K) number of positions in intersection and union of labels and predictions.
    """

    counts: Tensor
    right: Tensor
    turn: Tensor
    leave: Tensor
    join: Tensor
    intersection: Tensor
    union: Tensor


def _budgets(measured: Measurement, dim: int, eps: float) -> list[_Budget]:
    """The budget of the outputs; then that of the features, if a last layer acts on ``dim`` at each position alone."""
    proof, chain, classes = measured.proof, measured.proof.chain, measured.outputs.shape[dim]
    error = torch.zeros(len(measured.outputs), dtype=torch.float64)
    if measured.logits is not None:
        centre, machine = measured.errors(eps)
        error = grow(size(centre) + size(machine))  # of all outputs of a sample together
    pairs = torch.full((classes, classes), root(2), dtype=torch.float64)  # two logits that move towards each other
    single = torch.ones(classes, dtype=torch.float64)
    moved = grow(product(chain.constant * chain.slack, eps) + error)
    found = [_Budget(grow(moved * moved), pairs, single, torch.zeros_like(error), False)]
    last: Any = proof.network[-1] if len(proof.network) else None
    pointwise = type(last) is nn.Conv2d and {*last.weight.shape[2:], last.groups} == {1}
    pointwise = pointwise and last.padding in ("valid", (0, 0))  # no border: each position reads its own features
    last_dim = 1 if pointwise else measured.outputs.ndim - 1 if type(last) is nn.Linear else None
    if dim == last_dim and last.weight.shape[0] == classes:
        rows = last.weight.detach().cpu().flatten(1)
        reach = torch.full_like(error, product(chain.prefixes[-2] * chain.slack, eps), dtype=torch.float64)
        # Distances from a row of zeros are the norms of the rows.
        distances = last_layer_constants(row_distances(torch.cat((rows, torch.zeros_like(rows[:1])))), 1.0)
        found.append(_Budget(grow(reach * reach), distances[:-1, :-1], distances[-1, :-1], error, True))
    return found


def _energy(margin: Tensor, error: Tensor, norm: Tensor) -> Tensor:
    """The energy that brings margins to 0, ``((margin - sqrt(2) error) / norm)^2`` rounded down; inf if none does."""
    left = next_down(margin - grow(root(2) * error)).clamp_min(0)  # two outputs of a vector that is off by the error
    quotient = next_down(left / torch.where(norm > 0, norm, 1.0))
    energy = next_down(quotient * quotient).clamp_min(0)
    # Where no input moves the margin, a decision stays right at any price, or was never right.
    return torch.where(norm > 0, energy, torch.where(left > 0, math.inf, 0.0))


def _classes(outputs: Tensor, labels: Tensor, ignored: int, budget: _Budget) -> _Decisions:
    """The decisions of a classifier at each position, from outputs (N, K, P) and labels (N, P)."""
    counts = labels != ignored
    labels = torch.where(counts, labels, 0)  # any class: ignored positions count nowhere
    known = outputs.isfinite().all(1)
    outputs = outputs.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    classes = outputs.shape[1]
    predicted = outputs.argmax(1)
    one_hot = torch.nn.functional.one_hot
    labelled = one_hot(labels, classes).movedim(2, 1).bool() & counts[:, None]
    chosen = one_hot(predicted, classes).movedim(2, 1).bool() & counts[:, None]

    def over(reference: Tensor) -> Tensor:
        """Energy (N, K, P) with which each class can reach the class ``reference``."""
        margin = next_down(outputs.gather(1, reference[:, None]) - outputs)
        norm = budget.pairs[reference].movedim(2, 1)
        return torch.where(known[:, None], _energy(margin, budget.error[:, None, None], norm), 0.0)

    turn = over(labels).scatter(1, labels[:, None], math.inf).amin(1)  # the cheapest rival
    margin = outputs.gather(1, labels[:, None])[:, 0] - outputs.scatter(1, labels[:, None], -math.inf).amax(1)
    right = counts & known & (margin > 0)
    turn = torch.where(right, turn, math.inf)
    inside = labelled & right[:, None]
    return _Decisions(
        counts=counts.sum(1),
        right=right[:, None],
        turn=turn[:, None],
        leave=torch.where(inside, turn[:, None], math.inf),  # only what is in can leave
        join=torch.where(counts[:, None] & ~labelled & ~chosen, over(predicted), math.inf),
        intersection=inside.sum(2),
        union=(labelled | chosen).sum(2),
    )


def _signs(outputs: Tensor, labels: Tensor, ignored: int, budget: _Budget) -> _Decisions:
    """The decisions of a multi-label network: yes where an output is positive; outputs and labels are (N, K, P)."""
    counts, yes = labels != ignored, labels == 1
    outputs = outputs.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    right = counts & torch.where(yes, outputs > 0, outputs < 0)
    norm = budget.single[None, :, None].expand_as(outputs)
    energy = _energy(outputs.abs(), budget.error[:, None, None], norm)  # one output against the threshold 0
    turn = torch.where(right, energy, math.inf)
    inside, groups = right & yes, outputs.shape[1] if budget.together else 1
    return _Decisions(
        counts=counts.flatten(1).sum(1),
        right=right.reshape(len(right), groups, -1),
        turn=turn.reshape(len(right), groups, -1),
        leave=torch.where(inside, energy, math.inf),
        join=torch.where(right & ~yes, energy, math.inf),
        intersection=inside.sum(2),
        union=(counts & (yes | (outputs >= 0))).sum(2),
    )


def _sums(energies: Tensor) -> Tensor:
    """The sums of the 0, 1, 2, ... smallest entries along the last dimension, rounded down."""
    total = energies.sort(-1).values.cumsum(-1) * (1 - gamma(energies.shape[-1] + 8))  # the cheapest first
    return torch.cat((torch.zeros_like(total[..., :1]), total), -1)


def _kept(decisions: _Decisions, square: Tensor) -> Tensor:
    """Number (N,) of decisions that stay right in the worst case."""
    # Counts sums that the budget pays; it never pays an infinite one.
    turned, right = (_sums(decisions.turn)[..., 1:] <= square[:, None, None]).sum(2), decisions.right.sum(2)
    return (right - torch.minimum(turned, right)).sum(1)


def _worst_iou(decisions: _Decisions, square: Tensor) -> Tensor:
    """Lower bounds (K,) of the IoU of each class over all samples together, by Dinkelbach's iteration."""
    found = []
    for k in range(decisions.leave.shape[1]):
        away, more = _sums(decisions.leave[:, k]), _sums(decisions.join[:, k])
        rest = square[:, None] - away  # what is left after i decisions left the intersection
        # How many decisions the rest can add.
        joined = torch.searchsorted(more.contiguous(), grow(rest.clamp_min(0)).contiguous(), right=True) - 1
        joined = torch.minimum(joined, more.isfinite().sum(1)[:, None] - 1)  # an infinite price is never paid
        leaving, joined = torch.arange(away.shape[1], dtype=torch.float64).expand_as(away), joined.double()
        inside, union = decisions.intersection[:, k], decisions.union[:, k]
        possible = (away <= square[:, None]) & (leaving <= inside[:, None])  # only what is in can leave
        if int(union.sum() + joined[possible].sum()) == 0:  # no label or prediction has this class
            found.append(math.nan)
            continue
        best, value = math.inf, 1.0
        while value < best:  # the quotient falls to the smallest one in a few steps
            best = value
            # For each sample the attack with the least inside - leaving - best * (union + joined).
            attack = torch.where(possible, leaving + best * joined, -1.0).argmax(1, keepdim=True)
            top = int((inside - leaving.gather(1, attack)[:, 0]).sum())
            bottom = int((union + joined.gather(1, attack)[:, 0]).sum())
            value = min(best, top / bottom) if bottom else best
        found.append(best * (1 - 2.0**-40))  # the quotients were rounded
    return torch.tensor(found, dtype=torch.float64)


def _check_labels(outputs: Tensor, labels: Tensor, ignored: int) -> None:
    shape = (len(outputs), *outputs.shape[2:])
    if labels.shape not in (shape, outputs.shape):
        raise ShapeError(
            f"expected labels of shape {shape}, or {tuple(outputs.shape)} for a yes or no of each output, got "
            f"{tuple(labels.shape)}"
        )
    top = 2 if labels.ndim == outputs.ndim else outputs.shape[1]
    counted = labels[labels != ignored]
    if not len(counted):
        raise OptionError(f"expected a label other than ignore_index={ignored}, got none")
    if not 0 <= int(counted.min()) <= int(counted.max()) < top:
        raise OptionError(f"expected labels from 0 to {top - 1}, got {int(counted.min())} to {int(counted.max())}")
