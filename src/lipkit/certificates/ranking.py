r"""Certified AUROC of a detector: the probability that a positive scores above a negative if samples move within eps.

A score of constant L changes by at most :math:`L\varepsilon`, so a pair keeps its order if its scores are more than
:math:`2L\varepsilon` apart (:math:`L\varepsilon` where only one side moves). On finite samples the fraction of those
pairs is the smallest AUROC that these intervals of scores allow.
"""

import dataclasses

import torch
from torch import Tensor

from lipkit.certificates.measurement import Proof, Samples, as_tensor, check_inputs, measure_by
from lipkit.certificates.regression import output_constants, reach
from lipkit.errors import OptionError, ShapeError, check_choice, finite
from lipkit.modules import Network
from lipkit.proof.roundoff import grow, next_down, next_up
from lipkit.shown import Shown
from lipkit.text import format_radius


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AurocCertificate(Shown):
    """AUROC of a detector on N positives and M negatives, and the worst one within eps.

    Attributes:
        eps: l2 radius in units of the input.
        moves: who may move by eps: ``"both"``, ``"positives"`` or ``"negatives"``.
        auroc: at the samples; a tie counts half.
        worst_auroc: lower bound if every sample of ``moves`` moves by at most eps.
        positive_scores, negative_scores: (N,) and (M,) float64.
        proof: of the network; its evaluator is the one that scores.
    """

    eps: float
    moves: str
    auroc: float
    worst_auroc: float
    positive_scores: Tensor
    negative_scores: Tensor
    proof: Proof

    def describe(self) -> str:
        """AUROC at the samples and in the worst case, and what the bound holds for."""
        counts = f"{len(self.positive_scores)} positives, {len(self.negative_scores)} negatives"
        who = "every sample moves" if self.moves == "both" else f"the {self.moves} move"
        return (
            f"{counts}: AUROC {self.auroc:.4f}\n"
            f"at least {self.worst_auroc:.4f} if {who} by up to {format_radius(self.eps)} (l2)\n"
            + self.proof.describe()
        )


def auroc(
    network: Network,
    positives: Samples,
    negatives: Samples,
    eps: float,
    *,
    moves: str = "both",
    proof: Proof | None = None,
) -> AurocCertificate:
    r"""Worst-case area under the ROC curve of a network with one output, larger for positives.

    .. math:: \frac{1}{NM} \#\{(i, j): s_i - L\varepsilon - e_i > s_j + L\varepsilon + e_j\}

    **Guarantee.** Whatever each sample of ``moves`` becomes within eps in l2, the AUROC of the machine's scores is no
    smaller: e are the errors of the measured score and of the machine within eps. It holds for these samples.

    Args:
        network: exported, with outputs (N,) or (N, 1).
        positives, negatives: (N, *input_shape) and (M, *input_shape).
        eps: l2 radius in units of the input.
        moves: ``"both"``, ``"positives"`` or ``"negatives"``.
        proof: from `lipkit.prove`, for another evaluator or rounding.

    Raises:
        NoRuleError, ShapeError, OptionError: as `lipkit.certify`; a network with several outputs.

    >>> net = Network([torch.nn.Linear(1, 1, bias=False)], (1,))
    >>> _ = net[0].weight.fill_(1.0)
    >>> found = auroc(net, torch.tensor([[2.0], [3.0]]), torch.tensor([[1.0], [0.0]]), 0.6)
    >>> found.auroc, found.worst_auroc  # the pair (2, 1) may change its order
    (1.0, 0.75)
    """
    eps = finite("eps", eps, least=0)
    check_choice("moves", moves, ("both", "positives", "negatives"))
    given = as_tensor(positives), as_tensor(negatives)
    for x in given:
        check_inputs(network, x)
    measured = measure_by(network, torch.cat([x.cpu().double() for x in given]), proof)
    scores, proof = measured.outputs, measured.proof
    if scores[0].numel() != 1 or scores.ndim > 2:
        raise ShapeError(f"expected one score for each sample, outputs (N,) or (N, 1), got {tuple(scores.shape)}")
    scores = scores.flatten()
    if not bool(scores.isfinite().all()):
        raise OptionError("expected finite scores, got NaN or infinity")
    constants, count = output_constants(proof, 1)[0], len(given[0])

    def room(distance: float) -> Tensor:
        """Bounds of the difference between the machine's score within ``distance`` and the measured one."""
        moved, (centre, machine) = reach(constants, distance), measured.errors(distance)
        return moved if measured.logits is None else grow(moved + (centre + machine).flatten())

    # The lowest score that a positive can get, and the highest of a negative.
    low = next_down(scores - room(0.0 if moves == "negatives" else eps))[:count]
    high = next_up(scores + room(0.0 if moves == "positives" else eps))[count:]
    first, second = scores[:count], scores[count:]
    # Pairs in order and half of the ties, which are neither above nor below.
    above = (pairs_above(first, second) + 1 - pairs_above(second, first)) / 2
    return AurocCertificate(
        eps=float(eps),
        moves=moves,
        auroc=above,
        worst_auroc=pairs_above(low, high),
        positive_scores=first,
        negative_scores=second,
        proof=proof,
    )


def pairs_above(left: Tensor, right: Tensor) -> float:
    """The fraction of pairs (l, r) with l > r, by sorting.

    >>> pairs_above(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    0.75
    """
    below = torch.searchsorted(right.sort().values, left.contiguous())  # how many on the right are smaller, strictly
    return int(below.sum()) / (len(left) * len(right))
