r"""Margins and the radii they certify: pure functions on logits, in float64, every radius rounded down.

If the difference ``y_t - y_i`` of two logits is ``K_ti``-Lipschitz, no input closer than ``(y_t - y_i) / K_ti`` lets
class ``i`` reach class ``t``. Two proved values of ``K_ti`` are offered and the smaller one counts, pair by pair:

    sqrt(2) L              for an L-Lipschitz network                                     (`global_constants`)
    L_b ||w_t - w_i||      for a last layer with rows w_i after an L_b-Lipschitz body     (`last_layer_constants`)

so ``radius = min_{i != t} (y_t - y_i) / K_ti`` is never below the better of the two classical certificates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.errors import OptionError, ShapeError, check_labels
from lipkit.proof.roundoff import next_down, next_up, product, root


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
