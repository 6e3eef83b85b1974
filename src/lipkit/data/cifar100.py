"""CIFAR-100 from its binary version, or from its python version; labels are the hundred fine ones."""

from __future__ import annotations

from pathlib import Path

from lipkit.data.cifar10 import read_binary, read_python, to_split
from lipkit.data.split import Data
from lipkit.errors import DataError

CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum",
    "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)  # fmt: skip
INPUT_SHAPE = (3, 32, 32)
SOURCE = (
    "unpack cifar-100-binary.tar.gz or cifar-100-python.tar.gz in the data root ($LIPKIT_DATA or ./data); "
    "they are at https://www.cs.toronto.edu/~kriz/cifar.html"
)


def load_cifar100(root: Path) -> Data:
    """Load CIFAR-100: 50 000 training and 10 000 test RGB images of 32 x 32, uint8.

    Args:
        root: the data root. `root/cifar-100-binary/{train,test}.bin` is taken before
            `root/cifar-100-python/{train,test}`, whose pickles are read by `read_pickle`.

    Raises:
        DataError: if a file is missing, corrupt, or names anything but arrays.
    """
    binary, python = root / "cifar-100-binary", root / "cifar-100-python"
    if binary.is_dir():
        parts = [read_binary(binary / f"{p}.bin", label_bytes=2, classes=100, source=SOURCE) for p in ("train", "test")]
    elif python.is_dir():
        parts = [read_python(python / p, key="fine_labels", classes=100, source=SOURCE) for p in ("train", "test")]
    else:
        raise DataError(f"expected the folder {binary} or {python}, got neither; {SOURCE}")
    return Data("cifar100", to_split(parts[:1]), to_split(parts[1:]), CLASSES)
