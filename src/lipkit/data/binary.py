"""Images in binary files: MNIST and others in IDX files, CIFAR-10 and CIFAR-100 (also python versions), STL-10."""

import gzip
import io
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipkit.data.pickles import read_pickle
from lipkit.data.reading import check_claim, file_size, read_exactly, reading, record_count
from lipkit.data.split import Data, Split, labels_of
from lipkit.errors import DataError
from lipkit.files import open_regular

MNIST_CLASSES = tuple("0123456789")
MNIST_SOURCE = (
    "put the four IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
    "t10k-labels-idx1-ubyte; raw or .gz) into MNIST/raw under the data root ($LIPKIT_DATA or ./data); "
    "they are at https://ossci-datasets.s3.amazonaws.com/mnist/"
)


def load_mnist(root: Path) -> Data:
    """Load MNIST: 60 000 training and 10 000 test images of 28 x 28 handwritten digits, uint8.

    The files are `root/MNIST/raw/*-ubyte`, or the same names with `.gz`. A raw file is preferred to a gzipped one.
    """
    folder = root / "MNIST" / "raw"
    train, test = (_idx_split(folder, part, len(MNIST_CLASSES)) for part in ("train", "t10k"))
    for part in (train, test):
        if part.x.shape[1:] != (1, 28, 28):
            raise DataError(f"{folder}: expected images of 28 x 28, got {part.x.shape[2]} x {part.x.shape[3]}")
    return Data("mnist", train, test, MNIST_CLASSES)


def load_idx(folder: Path) -> Data:
    """Load grey images from a folder with four files named as MNIST's: Fashion-MNIST, KMNIST or EMNIST.

    The classes are 0 to the largest training label, named by their numbers.
    """
    train, test = (_idx_split(folder, part) for part in ("train", "t10k"))
    return Data(f"idx:{folder}", train, test, tuple(map(str, range(int(train.y.max()) + 1))))


def _idx_split(folder: Path, part: str, classes: int = 256) -> Split:
    labels_path = _find(folder / f"{part}-labels-idx1-ubyte")
    labels = read_idx(labels_path, 1, source=MNIST_SOURCE)
    images = read_idx(_find(folder / f"{part}-images-idx3-ubyte"), 3, source=MNIST_SOURCE)
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


_PIXELS = 3 * 32 * 32  # of an image of CIFAR


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100: the names of its files, and their layout."""

    name: str
    binary: str  # folder of the binary version under the data root, taken first
    python: str  # folder of the python version
    train: tuple[str, ...]  # names of the files, which end in ".bin" in the binary version
    test: tuple[str, ...]
    classes: tuple[str, ...]  # names, in label order
    label_bytes: int  # bytes before each image of the binary version; the last one is its label
    key: str  # key of the labels in the python version

    @property
    def source(self) -> str:
        """A sentence for messages: where to get the data set, and where to put it."""
        archive = self.name.replace("cifar", "cifar-")  # of cifar-10-binary.tar.gz
        return (
            f"unpack {archive}-binary.tar.gz or {archive}-python.tar.gz in the data root ($LIPKIT_DATA or ./data); "
            "they are at https://www.cs.toronto.edu/~kriz/cifar.html"
        )


CIFAR10 = Cifar(
    name="cifar10",
    binary="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    label_bytes=1,
    key="labels",
)
_HUNDRED = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = Cifar(
    name="cifar100",
    binary="cifar-100-binary",
    python="cifar-100-python",
    train=("train",),
    test=("test",),
    classes=tuple(_HUNDRED.split()),
    label_bytes=2,  # the coarse label, then the fine one
    key="fine_labels",
)


def load_cifar(root: Path, variant: Cifar) -> Data:
    """Load CIFAR-10 or CIFAR-100: 50 000 training and 10 000 test RGB images of 32 x 32, uint8.

    Reads the folder of the binary version in the data root, else that of the python version (by `read_pickle`).
    """
    binary, python = root / variant.binary, root / variant.python
    for folder, read, suffix in ((binary, read_binary, ".bin"), (python, read_python, "")):
        if folder.is_dir():
            train, test = (
                _to_split([read(folder / f"{name}{suffix}", variant) for name in part])
                for part in (variant.train, variant.test)
            )
            return Data(variant.name, train, test, variant.classes)
    raise DataError(f"expected the folder {binary} or {python}, got neither; {variant.source}")


def read_binary(path: Path, variant: Cifar = CIFAR10) -> tuple[np.ndarray, Tensor]:
    """Images, uint8 (n, 3072), and labels, int64 (n,), of a binary file; ``DataError`` if it is missing or damaged.

    Each image has its label bytes, then 1024 red, green and blue ones.
    """
    label_bytes = variant.label_bytes
    each = label_bytes + _PIXELS
    size = each * record_count(path, each, variant.source)
    check_claim(path, size, size, compressed=False)  # against MAX_BYTES
    with reading(path), open_regular(path) as stream:
        rows = np.frombuffer(read_exactly(stream, size, path), np.uint8).reshape(-1, each)
    return rows[:, label_bytes:], labels_of(path, rows[:, label_bytes - 1], len(variant.classes))


def read_python(path: Path, variant: Cifar = CIFAR10) -> tuple[np.ndarray, Tensor]:
    """Read as `read_binary` does, from a pickled dict of `data`, uint8 (n, 3072), and a list of labels."""
    key = variant.key
    batch = read_pickle(path, source=variant.source)
    images, labels = batch.get("data"), batch.get(key)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != _PIXELS or not len(images):
        got = images.shape if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(f"{path}: expected 'data' as an array of shape (n, {_PIXELS}), got {got}")
    if not isinstance(labels, list) or len(labels) != len(images):
        got = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{path}: expected '{key}' as a list of {len(images)} numbers, got {got}")
    if wrong := [label for label in labels if type(label) is not int]:  # no bool either
        raise DataError(f"{path}: expected labels as whole numbers, got {type(wrong[0]).__name__}")
    return images, labels_of(path, np.array(labels, dtype=object), len(variant.classes))  # of any size


def _to_split(parts: list[tuple[np.ndarray, Tensor]]) -> Split:
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    return Split(torch.from_numpy(images), torch.cat([labels for _, labels in parts]))


STL10_CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
STL10_SOURCE = (
    "unpack stl10_binary.tar.gz in the data root ($LIPKIT_DATA or ./data), which gives stl10_binary/train_X.bin and "
    "the others; it is at https://cs.stanford.edu/~acoates/stl10/"
)


def load_stl10(root: Path) -> Data:
    """Load STL-10: 5000 training and 8000 test RGB images of 96 x 96, uint8.

    The files are `root/stl10_binary/{train,test}_{X,y}.bin`; they are mapped into memory and read only as used.

    References:
        Coates, Lee, Ng, "An analysis of single-layer networks in unsupervised feature learning", AISTATS 2011.
    """
    folder = root / "stl10_binary"
    return Data("stl10", _stl10_split(folder, "train"), _stl10_split(folder, "test"), STL10_CLASSES)


def _stl10_split(folder: Path, part: str) -> Split:
    images = read_images(folder / f"{part}_X.bin")
    path = folder / f"{part}_y.bin"
    if (size := file_size(path, STL10_SOURCE)) != len(images):
        raise DataError(f"{path}: expected {len(images)} labels, one for each image, got {size}")
    with reading(path), open_regular(path) as stream:
        labels = np.frombuffer(read_exactly(stream, size, path), np.uint8)
    return Split(images, labels_of(path, labels, len(STL10_CLASSES), first=1))


def read_images(path: Path) -> Tensor:
    """A file of images as uint8 (N, 3, 96, 96), mapped into memory; writing to it does not change the file."""
    count = record_count(path, 3 * 96 * 96, STL10_SOURCE)
    with reading(path):
        # Mode "c" copies on write, because torch warns of read-only memory.
        mapped = np.memmap(path, np.uint8, "c", shape=(count, 3, 96, 96))
    return torch.from_numpy(mapped).transpose(2, 3)  # stored column by column
