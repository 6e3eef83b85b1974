"""The 8 x 8 handwritten digits that come with scikit-learn: real data that needs no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from lipkit.data.split import Data, Entry, Split, fixed_permutation
from lipkit.errors import DataError

CLASSES = tuple("0123456789")
INPUT_SHAPE = (1, 8, 8)
SOURCE = 'comes with scikit-learn: pip install "lipkit[train]"'
SPLIT_SEED = 0


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
    x = torch.from_numpy(table[:, :64].astype(np.float32) / 16).reshape(-1, *INPUT_SHAPE)  # counts 0..16: k/16 is exact
    y = torch.from_numpy(labels)
    train, test = (torch.from_numpy(index) for index in stratified_split(labels, 0.2, SPLIT_SEED))
    return Data("digits", Split(x[train], y[train]), Split(x[test], y[test]), CLASSES)


def _table() -> np.ndarray:
    """The 64 pixels and the label of each digit, ``(1797, 65)``."""
    # Read the file of scikit-learn directly: importing that package takes longer than an epoch of training.
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise DataError(f"expected scikit-learn for the data set digits, got none; {SOURCE}")
    for folder in found.submodule_search_locations or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(f"expected scikit-learn for the data set digits, got none; {SOURCE}") from error
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


ENTRY = Entry(
    "8 x 8 handwritten digits, 1438 training and 359 test images, comes with scikit-learn", load_digits, SOURCE
)
