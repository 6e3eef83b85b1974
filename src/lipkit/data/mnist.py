"""MNIST from its four IDX files."""

from __future__ import annotations

from pathlib import Path

import torch

from lipkit.data.idx import read_idx
from lipkit.data.split import Data, Split
from lipkit.errors import DataError

CLASSES = tuple("0123456789")
INPUT_SHAPE = (1, 28, 28)
SOURCE = (
    "put the four IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
    "t10k-labels-idx1-ubyte; raw or .gz) into MNIST/raw under the data root ($LIPKIT_DATA or ./data); "
    "they are at https://ossci-datasets.s3.amazonaws.com/mnist/"
)


def load_mnist(root: Path) -> Data:
    """Load MNIST: 60 000 training and 10 000 test images of 28 x 28 handwritten digits, uint8.

    Args:
        root: the data root; the files are `root/MNIST/raw/*-ubyte`, or the same names with `.gz`. A raw file
            is taken before a gzipped one.

    Raises:
        DataError: if a file is missing or is not what its header says.
    """
    folder = root / "MNIST" / "raw"
    return Data("mnist", _split(folder, "train"), _split(folder, "t10k"), CLASSES)


def _split(folder: Path, part: str) -> Split:
    images_path = _find(folder / f"{part}-images-idx3-ubyte")
    labels_path = _find(folder / f"{part}-labels-idx1-ubyte")
    labels = read_idx(labels_path, 1, source=SOURCE)
    images = read_idx(images_path, 3, source=SOURCE)
    if tuple(images.shape[1:]) != INPUT_SHAPE[1:]:
        raise DataError(f"{images_path}: expected images of 28 x 28, got {images.shape[1]} x {images.shape[2]}")
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: expected {len(images)} labels, one for each image, got {len(labels)}")
    if int(labels.max()) > 9:
        raise DataError(f"{labels_path}: expected labels 0 to 9, got {int(labels.max())}")
    return Split(images[:, None], labels.to(torch.int64))


def _find(path: Path) -> Path:
    zipped = path.with_name(path.name + ".gz")
    return zipped if zipped.exists() and not path.exists() else path
