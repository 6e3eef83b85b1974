"""MNIST from its four IDX files, and other data sets in this format."""

from __future__ import annotations

import gzip
import io
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from lipkit.data.reading import check_claim, file_size, read_exactly, reading
from lipkit.data.split import Data, Split, labels_of
from lipkit.errors import DataError
from lipkit.files import open_regular

CLASSES = tuple("0123456789")
INPUT_SHAPE = (1, 28, 28)
SOURCE = (
    "put the four IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
    "t10k-labels-idx1-ubyte; raw or .gz) into MNIST/raw under the data root ($LIPKIT_DATA or ./data); "
    "they are at https://ossci-datasets.s3.amazonaws.com/mnist/"
)


def load_mnist(root: Path) -> Data:
    """Load MNIST: 60 000 training and 10 000 test images of 28 x 28 handwritten digits, uint8.

    The files are `root/MNIST/raw/*-ubyte`, or the same names with `.gz`. A raw file is preferred to a gzipped one.
    """
    folder = root / "MNIST" / "raw"
    train, test = (_split(folder, part, len(CLASSES)) for part in ("train", "t10k"))
    for part in (train, test):
        if tuple(part.x.shape[1:]) != INPUT_SHAPE:
            raise DataError(f"{folder}: expected images of 28 x 28, got {part.x.shape[2]} x {part.x.shape[3]}")
    return Data("mnist", train, test, CLASSES)


def load_idx(folder: Path) -> Data:
    """Load grey images from a folder with four files named as MNIST's: Fashion-MNIST, KMNIST or EMNIST.

    The classes are 0 to the largest training label, named by their numbers.
    """
    train, test = (_split(folder, part) for part in ("train", "t10k"))
    return Data(f"idx:{folder}", train, test, tuple(map(str, range(int(train.y.max()) + 1))))


def _split(folder: Path, part: str, classes: int = 256) -> Split:
    labels_path = _find(folder / f"{part}-labels-idx1-ubyte")
    labels = read_idx(labels_path, 1, source=SOURCE)
    images = read_idx(_find(folder / f"{part}-images-idx3-ubyte"), 3, source=SOURCE)
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: expected {len(images)} labels, one for each image, got {len(labels)}")
    return Split(images[:, None], labels_of(labels_path, labels.numpy(), classes))  # with a channel axis


def _find(path: Path) -> Path:
    zipped = path.with_name(path.name + ".gz")
    return zipped if zipped.exists() and not path.exists() else path


def read_idx(path: Path, ndim: int, *, source: str = "check the path") -> Tensor:
    """Read an IDX file of unsigned bytes, raw or gzipped (by the suffix `.gz`); `ndim` is 1 for labels, 3 for images.

    The layout is `00 00 08 ndim`, then `ndim` big-endian uint32 sizes, then the values in row-major order.
    The sizes are compared with the file before memory is taken, and decompression stops at the claimed size.
    A missing or damaged file raises ``DataError``; `source` ends the message about a missing one.

    References:
        LeCun, Cortes, Burges, "The MNIST database of handwritten digits", section on file formats.
    """
    stored = file_size(path, source)
    compressed = path.suffix == ".gz"
    with reading(path), open_regular(path) as raw:
        stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if compressed else raw
        header = stream.read(4 + 4 * ndim)
        magic = bytes([0, 0, 8, ndim])  # 8: unsigned bytes
        if header[:4] != magic:
            raise DataError(f"{path}: expected the IDX magic number {magic.hex()}, got {header[:4].hex() or 'nothing'}")
        if len(header) < 4 + 4 * ndim:
            raise DataError(f"{path}: expected an IDX header of {4 + 4 * ndim} bytes, got {len(header)}")
        shape = struct.unpack(f">{ndim}I", header[4:])  # big-endian
        size = math.prod(shape)
        if size == 0:
            raise DataError(f"{path}: expected at least one value, got the sizes {shape}")
        check_claim(path, size, stored if compressed else stored - len(header), compressed=compressed)
        values = read_exactly(stream, size, path)
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)
