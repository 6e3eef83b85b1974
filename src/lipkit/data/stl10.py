"""STL-10 from its binary files, which stay on disk and are read when a batch asks for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipkit.data.reading import file_size, read_exactly, reading
from lipkit.data.split import Data, Entry, Split, labels_of
from lipkit.errors import DataError
from lipkit.files import open_regular

CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
SOURCE = (
    "unpack stl10_binary.tar.gz in the data root ($LIPKIT_DATA or ./data), which gives stl10_binary/train_X.bin and "
    "the others; it is at https://cs.stanford.edu/~acoates/stl10/"
)
_PIXELS = 3 * 96 * 96


def load_stl10(root: Path) -> Data:
    """Load STL-10: 5000 training and 8000 test RGB images of 96 x 96, uint8.

    The files are `root/stl10_binary/{train,test}_{X,y}.bin`; they are mapped into memory and read only as used.

    References:
        Coates, Lee, Ng, "An analysis of single-layer networks in unsupervised feature learning", AISTATS 2011.
    """
    folder = root / "stl10_binary"
    return Data("stl10", _split(folder, "train"), _split(folder, "test"), CLASSES)


def _split(folder: Path, part: str) -> Split:
    images = read_images(folder / f"{part}_X.bin")
    path = folder / f"{part}_y.bin"
    if (size := file_size(path, SOURCE)) != len(images):
        raise DataError(f"{path}: expected {len(images)} labels, one for each image, got {size}")
    with reading(path), open_regular(path) as stream:
        labels = np.frombuffer(read_exactly(stream, size, path), np.uint8)
    return Split(images, labels_of(path, labels, len(CLASSES), first=1))


def read_images(path: Path) -> Tensor:
    """A file of images as uint8 (N, 3, 96, 96), mapped into memory; writing to it does not change the file."""
    size = file_size(path, SOURCE)
    if size == 0 or size % _PIXELS:
        raise DataError(f"{path}: expected a positive multiple of {_PIXELS} bytes, got {size}")
    with reading(path):
        # Mode "c" copies on write, because torch warns of read-only memory.
        mapped = np.memmap(path, np.uint8, "c", shape=(size // _PIXELS, 3, 96, 96))
    return torch.from_numpy(mapped).transpose(2, 3)  # stored column by column


ENTRY = Entry(
    "96 x 96 RGB photographs of ten kinds, 5000 training and 8000 test images, read from disk as needed",
    load_stl10,
    SOURCE,
)
