"""Checks of a user's samples, and the exact distance of two small samples by optimal assignment."""

import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lipkit.data.split import as_tensor
from lipkit.errors import DataError, OptionError, ShapeError


def as_samples(values: Any, name: str, least: int = 4) -> Tensor:
    """Samples as a floating-point tensor (n, *shape): uint8 images are divided by 255, vectors may come as (n,).

    >>> as_samples(np.zeros(5), "x").shape
    torch.Size([5, 1])
    """
    values = as_tensor(values, name)
    if values.ndim == 0:
        raise ShapeError(f"{name}: expected samples of shape (n, *shape), got a single number")
    if values.dtype == torch.uint8:
        values = values.to(torch.float32) / 255
    elif not values.is_floating_point():
        raise DataError(f"{name}: expected floating-point samples or uint8 images, got dtype {values.dtype}")
    if len(values) < least or values.numel() == 0:
        raise DataError(f"{name}: expected at least {least} samples of at least one number, got {tuple(values.shape)}")
    if not bool(torch.isfinite(values).all()):
        raise DataError(f"{name}: expected finite samples, got NaN or infinity")
    return values[:, None] if values.ndim == 1 else values


def as_pair(x: Any, y: Any, least: int = 4) -> tuple[Tensor, Tensor]:
    """Both samples, as `as_samples` makes them; refused unless their samples agree in shape and unit."""
    first, second = as_samples(x, "x", least), as_samples(y, "y", least)
    for given, other in ((x, second), (y, first)):
        if str(given.dtype) in ("uint8", "torch.uint8") and float(other.max()) > 1:
            got = f"uint8 images and values up to {float(other.max()):g}"
            raise DataError(f"expected x and y in the same units (bytes count as x / 255, in [0, 1]), got {got}")
    if first.shape[1:] != second.shape[1:]:
        raise ShapeError(f"expected x and y of one shape, got {tuple(first.shape[1:])} and {tuple(second.shape[1:])}")
    return first, second


def centre_and_unit(*samples: Tensor) -> tuple[Tensor, float]:
    """Mean of the samples' means, float32, and a power of 2 near the mean modulus of all deviations; 1 if that is 0."""
    given = [s.detach().cpu() for s in samples]  # not every device has float64
    centre = torch.stack([s.mean(0, dtype=torch.float64) for s in given]).mean(0)
    sums = (float((part - centre).abs().sum()) / s.numel() for s in given for part in s.split(1024))
    unit = 2.0 ** math.frexp(sum(sums) / len(samples) / 1.5)[1]
    if not 1e-37 <= unit <= 1e38:
        limits = "a spread from 1e-37 to 1e38, as float32 holds it"
        raise OptionError(f"samples: expected {limits}, got about {unit:.0e}: choose another unit")
    return centre.float(), unit


MAX_SAMPLES = 4096


def assignment(x: Any, y: Any) -> float:
    r"""W1 of the two empirical distributions of n samples each (l2 cost).

    .. math:: W_1(P_n, Q_n) = \min_\pi \frac1n \sum_i \lVert x_i - y_{\pi(i)} \rVert_2

    Guarantee:
        Exact up to rounding, for these samples. As an estimate of W1(P, Q) it is biased upwards: its expectation
        over samples is at least W1(P, Q), and exceeds it by the order of :math:`n^{-1/d}` in d > 2 dimensions.

    Cost:
        :math:`O(n^3)` time and :math:`8 n^2` bytes; one second for n = 2000.

    Args:
        x, y: n <= MAX_SAMPLES samples each of P and of Q, as in `distance`.

    Raises:
        ShapeError: the shapes differ. OptionError: too many samples. DataError: none, or see `as_samples`.

    >>> assignment(torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [0.0]]))
    1.0

    References:
        Crouse, "On implementing 2D rectangular assignment algorithms", IEEE TAES 52 (2016), as in SciPy.
    """
    x, y = as_pair(x, y, least=1)
    if x.shape != y.shape:
        raise ShapeError(f"expected two samples of one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
    if len(x) > MAX_SAMPLES:
        raise OptionError(f"expected at most {MAX_SAMPLES} samples, got {len(x)}")
    a, b = (t.cpu().double().flatten(1).numpy() for t in (x, y))
    power = np.frexp(max(np.abs(a).max(), np.abs(b).max()))[1]
    a, b = np.ldexp(a, -power), np.ldexp(b, -power)  # so that squares neither overflow nor vanish
    cost = np.empty((len(a), len(b)))
    for i, row in enumerate(a):  # not by the expanded square, which cancels for close samples
        cost[i] = np.linalg.norm(b - row, axis=1)
    rows, columns = linear_sum_assignment(cost)
    return float(np.ldexp(cost[rows, columns].mean(), power))
