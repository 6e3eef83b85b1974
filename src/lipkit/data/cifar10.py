"""CIFAR-10 from its binary version, or from its python version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lipkit.data.pickles import read_pickle
from lipkit.data.reading import check_claim, file_size, read_exactly, reading
from lipkit.data.split import Data, Split
from lipkit.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
INPUT_SHAPE = (3, 32, 32)
SOURCE = (
    "unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz in the data root ($LIPKIT_DATA or ./data); "
    "they are at https://www.cs.toronto.edu/~kriz/cifar.html"
)
_PIXELS = 3 * 32 * 32
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = ("test_batch",)


def load_cifar10(root: Path) -> Data:
    """Load CIFAR-10: 50 000 training and 10 000 test RGB images of 32 x 32, uint8.

    Args:
        root: the data root. `root/cifar-10-batches-bin` (the binary version) is taken before
            `root/cifar-10-batches-py` (the python version, whose pickles are read by `read_pickle`).

    Raises:
        DataError: if a file is missing, corrupt, or names anything but arrays.
    """
    binary, python = root / "cifar-10-batches-bin", root / "cifar-10-batches-py"
    if binary.is_dir():
        read, files = read_binary, [[binary / f"{name}.bin" for name in part] for part in (_TRAIN, _TEST)]
    elif python.is_dir():
        read, files = read_python, [[python / name for name in part] for part in (_TRAIN, _TEST)]
    else:
        raise DataError(f"expected the folder {binary} or {python}, got neither; {SOURCE}")
    train, test = (_split([read(path) for path in part]) for part in files)
    return Data("cifar10", train, test, CLASSES)


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one file of the binary version: per image a label byte, then 1024 red, green and blue bytes each.

    Returns:
        (images, labels): uint8 of shapes (n, 3072) and (n,).

    Raises:
        DataError: if the size is not a positive multiple of 3073, or a label exceeds 9.
    """
    size = file_size(path, SOURCE)
    if size == 0 or size % (1 + _PIXELS):
        raise DataError(f"{path}: expected a positive multiple of {1 + _PIXELS} bytes, got {size}")
    check_claim(path, size, size, compressed=False)
    with reading(path), path.open("rb") as stream:
        rows = np.frombuffer(read_exactly(stream, size, path), np.uint8).reshape(-1, 1 + _PIXELS)
    if (largest := int(rows[:, 0].max())) > 9:
        raise DataError(f"{path}: expected labels 0 to 9, got {largest}")
    return rows[:, 1:], rows[:, 0]


def read_python(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one file of the python version: a pickled dict of `data`, uint8 (n, 3072), and a list `labels`.

    Returns:
        (images, labels): uint8 of shapes (n, 3072) and (n,).

    Raises:
        DataError: if the pickle is not of that form (see `read_pickle`), or a label is not 0 to 9.
    """
    batch = read_pickle(path, source=SOURCE)
    images, labels = batch.get("data"), batch.get("labels")
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != _PIXELS or not len(images):
        got = images.shape if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(f"{path}: expected 'data' as an array of shape (n, {_PIXELS}), got {got}")
    if not isinstance(labels, list) or len(labels) != len(images):
        got = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{path}: expected 'labels' as a list of {len(images)} numbers, got {got}")
    if wrong := [label for label in labels if type(label) is not int or not 0 <= label <= 9]:
        got = wrong[0] if isinstance(wrong[0], int) else type(wrong[0]).__name__
        raise DataError(f"{path}: expected labels 0 to 9, got {got}")
    return images, np.array(labels, dtype=np.uint8)


def _split(parts: list[tuple[np.ndarray, np.ndarray]]) -> Split:
    images = np.concatenate([images for images, _ in parts]).reshape(-1, *INPUT_SHAPE)
    labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    return Split(torch.from_numpy(images), torch.from_numpy(labels))
