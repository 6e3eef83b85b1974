"""Data sets that need no download: the handwritten digits of scikit-learn, and the square wave of [LBDN]."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipkit.data.split import Data, Split, fixed_permutation
from lipkit.errors import DataError

DIGITS_SOURCE = 'comes with scikit-learn: pip install "lipkit[train]"'
SQUARE_WAVE_SOURCE = "made by a formula, nothing to download"


def load_digits(root: Path | None = None) -> Data:
    """Load the digits: 1438 training and 359 test images of shape (1, 8, 8), float32 in {0, 1/16, ..., 1}.

    The split, 80/20 by `stratified_split` with a fixed seed, does not depend on the version of scikit-learn. `root` is
    not used. ``DataError`` if scikit-learn is not installed.

    >>> data = load_digits()
    >>> len(data.train), len(data.test), data.input_shape
    (1438, 359, (1, 8, 8))

    References:
        Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998
        (its test part).
    """
    table = _table()
    labels = table[:, 64].astype(np.int64)
    x = torch.from_numpy(table[:, :64].astype(np.float32) / 16).reshape(-1, 1, 8, 8)  # counts 0..16: k/16 is exact
    y = torch.from_numpy(labels)
    train, test = (torch.from_numpy(index) for index in stratified_split(labels, 0.2, seed=0))
    return Data("digits", Split(x[train], y[train]), Split(x[test], y[test]), tuple("0123456789"))


def _table() -> np.ndarray:
    """The 64 pixels and the label of each digit, ``(1797, 65)``."""
    # Read the file of scikit-learn directly: importing that package takes longer than an epoch of training.
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise DataError(f"expected scikit-learn for the data set digits, got none; {DIGITS_SOURCE}")
    for folder in found.submodule_search_locations or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(f"expected scikit-learn for the data set digits, got none; {DIGITS_SOURCE}") from error
    images, labels = datasets.load_digits(return_X_y=True)
    return np.column_stack((images, labels))


def stratified_split(labels: np.ndarray, test_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, test): ascending indices; each class gives `test_share` of its samples, rounded, to the test part.

    >>> train, test = stratified_split(np.array([0] * 10 + [1] * 5), 0.2, seed=0)
    >>> len(train), len(test[test < 10]), len(test[test >= 10])
    (12, 2, 1)
    """
    order = fixed_permutation(len(labels), seed)  # of all samples; it also orders the members of each class
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        held_out[members[: round(test_share * len(members))]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


TRAIN, TEST = 300, 200
LOW, HIGH = -2.0, 2.0


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
    x = uniform_points(TRAIN + TEST, seed=0)[:, None]
    y = square_wave(x)
    return Data("square_wave", Split(x[:TRAIN], y[:TRAIN]), Split(x[TRAIN:], y[TRAIN:]))


def uniform_points(n: int, seed: int) -> Tensor:
    """(n,) float32 numbers, uniform in [-2, 2], that depend on ``n`` and ``seed`` only, see `fixed_permutation`."""
    unit = (np.random.PCG64(seed).random_raw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # 53 bits: exact
    return torch.from_numpy((LOW + (HIGH - LOW) * unit).astype(np.float32))
