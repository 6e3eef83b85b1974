"""CIFAR-10 from its binary version, or from its python version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lipkit.data.pickles import read_pickle
from lipkit.data.reading import check_claim, file_size, read_exactly, reading
from lipkit.data.split import Data, Split
from lipkit.errors import DataError
from lipkit.files import open_regular

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
        parts = [[read_binary(binary / f"{name}.bin") for name in part] for part in (_TRAIN, _TEST)]
    elif python.is_dir():
        parts = [[read_python(python / name) for name in part] for part in (_TRAIN, _TEST)]
    else:
        raise DataError(f"expected the folder {binary} or {python}, got neither; {SOURCE}")
    train, test = (to_split(part) for part in parts)
    return Data("cifar10", train, test, CLASSES)


def read_binary(
    path: Path, *, label_bytes: int = 1, classes: int = 10, source: str = SOURCE
) -> tuple[np.ndarray, np.ndarray]:
    """Read one file of the binary version: per image its label bytes, then 1024 red, green and blue bytes each.

    Args:
        path: the file.
        label_bytes: before each image; the last of them is its label (CIFAR-100 has two, coarse and fine).
        classes: number of labels.
        source: what to add to the message when the file is missing.

    Returns:
        (images, labels): uint8 of shapes (n, 3072) and (n,).

    Raises:
        DataError: if the size is not a positive multiple of one image's, or a label is too large.
    """
    size, each = file_size(path, source), label_bytes + _PIXELS
    if size == 0 or size % each:
        raise DataError(f"{path}: expected a positive multiple of {each} bytes, got {size}")
    check_claim(path, size, size, compressed=False)
    with reading(path), open_regular(path) as stream:
        rows = np.frombuffer(read_exactly(stream, size, path), np.uint8).reshape(-1, each)
    labels = rows[:, label_bytes - 1]
    if (largest := int(labels.max())) >= classes:
        raise DataError(f"{path}: expected labels 0 to {classes - 1}, got {largest}")
    return rows[:, label_bytes:], labels


def read_python(
    path: Path, *, key: str = "labels", classes: int = 10, source: str = SOURCE
) -> tuple[np.ndarray, np.ndarray]:
    """Read one file of the python version: a pickled dict of `data`, uint8 (n, 3072), and a list of labels.

    Args:
        path: the file.
        key: of the labels.
        classes: number of labels.
        source: what to add to the message when the file is missing.

    Returns:
        (images, labels): uint8 of shapes (n, 3072) and (n,).

    Raises:
        DataError: if the pickle is not of that form (see `read_pickle`), or a label is out of range.
    """
    batch = read_pickle(path, source=source)
    images, labels = batch.get("data"), batch.get(key)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != _PIXELS or not len(images):
        got = images.shape if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(f"{path}: expected 'data' as an array of shape (n, {_PIXELS}), got {got}")
    if not isinstance(labels, list) or len(labels) != len(images):
        got = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{path}: expected '{key}' as a list of {len(images)} numbers, got {got}")
    if wrong := [label for label in labels if type(label) is not int or not 0 <= label < classes]:
        got = wrong[0] if isinstance(wrong[0], int) else type(wrong[0]).__name__
        raise DataError(f"{path}: expected labels 0 to {classes - 1}, got {got}")
    return images, np.array(labels, dtype=np.uint8)


def to_split(parts: list[tuple[np.ndarray, np.ndarray]]) -> Split:
    """The images and labels of several files as one split."""
    images = np.concatenate([images for images, _ in parts]).reshape(-1, *INPUT_SHAPE)
    labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    return Split(torch.from_numpy(images), torch.from_numpy(labels))
