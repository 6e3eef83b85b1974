"""The exact distance of two small samples, by optimal assignment: the independent check of the dual estimate."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lipkit.errors import OptionError, ShapeError

MAX_SAMPLES = 4096


def assignment(x: Tensor, y: Tensor) -> float:
    r"""W1 of the two empirical distributions of n samples each (l2 cost).

    .. math:: W_1(P_n, Q_n) = \min_\pi \frac1n \sum_i \lVert x_i - y_{\pi(i)} \rVert_2

    Guarantee:
        Exact up to rounding, for these samples. As an estimate of W1(P, Q) it is biased upwards: its expectation
        over samples is at least W1(P, Q), and exceeds it by the order of :math:`n^{-1/d}` in d > 2 dimensions.

    Cost:
        :math:`O(n^3)` time and :math:`8 n^2` bytes; a second for n = 2000.

    Args:
        x: samples of P, (n, *shape) with n <= MAX_SAMPLES.
        y: samples of Q, of the same shape.

    Raises:
        ShapeError: the shapes differ. OptionError: no samples, or too many.

    >>> import torch
    >>> assignment(torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [0.0]]))
    1.0

    References:
        Crouse, "On implementing 2D rectangular assignment algorithms", IEEE TAES 52 (2016), as in SciPy.
    """
    if x.shape != y.shape:
        raise ShapeError(f"expected two samples of one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
    if not 1 <= len(x) <= MAX_SAMPLES:
        raise OptionError(f"expected 1 to {MAX_SAMPLES} samples, got {len(x)}")
    a, b = (t.detach().cpu().double().flatten(1).numpy() for t in (x, y))
    cost = np.empty((len(a), len(b)))
    for i, row in enumerate(a):  # differences first: the expanded square would cancel for close samples
        cost[i] = np.linalg.norm(b - row, axis=1)
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].mean())
