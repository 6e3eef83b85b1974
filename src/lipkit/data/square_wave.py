"""The square wave of [LBDN]: a function of one variable that jumps, which no Lipschitz function can follow exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipkit.data.split import Data, Entry, Split

SOURCE = "made by a formula, nothing to download"
TRAIN, TEST = 300, 200
LOW, HIGH = -2.0, 2.0
SEED = 0


def square_wave(x: Tensor) -> Tensor:
    """1 on [-2, -1) and [0, 1), 0 on [-1, 0) and [1, 2]; elementwise, of period 2 elsewhere.

    >>> square_wave(torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0 - 1e-6])).tolist()
    [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    """
    even = torch.floor(x).remainder(2) == 0
    return torch.where(even & (x != HIGH), 1.0, 0.0).to(x.dtype)  # 2 belongs to the last interval, [1, 2]


def load_square_wave(root: Path | None = None) -> Data:
    """300 training and 200 test points, uniform in [-2, 2], with the value of `square_wave`; both (N, 1) float32.

    The points are the same on every machine. `root` is not used.

    >>> data = load_square_wave()
    >>> len(data.train), len(data.test), data.input_shape, data.task
    (300, 200, (1,), 'regression')

    References:
        [LBDN] Wang & Manchester, ICML 2023, section 5.1.
    """
    x = uniform_points(TRAIN + TEST, SEED)[:, None]
    y = square_wave(x)
    return Data("square_wave", Split(x[:TRAIN], y[:TRAIN]), Split(x[TRAIN:], y[TRAIN:]))


def uniform_points(n: int, seed: int) -> Tensor:
    """(n,) float32 numbers, uniform in [-2, 2], that depend on ``n`` and ``seed`` only, see `fixed_permutation`."""
    unit = (np.random.PCG64(seed).random_raw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # 53 bits: exact
    return torch.from_numpy((LOW + (HIGH - LOW) * unit).astype(np.float32))


ENTRY = Entry(
    "a function of one variable that jumps, for regression: 300 training and 200 test points",
    load_square_wave,
    SOURCE,
)
