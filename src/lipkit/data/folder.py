"""Data sets of image files: one folder per class, ImageNet, Tiny-ImageNet."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from lipkit.data.images import ImageFiles, decode
from lipkit.data.reading import file_size, reading
from lipkit.data.split import Data, Split
from lipkit.errors import DataError
from lipkit.files import read_text
from lipkit.linalg.matrices import check_integer

LAYOUT = "the layout is train/CLASS/* and test/CLASS/* or val/CLASS/*"
MAX_SIDE = 4096
Listed = tuple[list[str], list[int]]  # files and their labels


def load_folder(path: Path) -> Data:
    """Load `path/train/CLASS/*` and `path/test/CLASS/*` (or `val`): images of one size, uint8 of shape (C, H, W).

    The classes are the folders of `train`, sorted by name; `test` may lack some of them. Images are grey
    (C = 1) or RGB (C = 3), as the first one is. Names that start with a dot are skipped. Files are decoded, and so
    checked, when a batch asks for them; `load` decodes a small data set at once.
    """
    train, test, classes = find_images(path, LAYOUT)
    channels, height, width = decode(Path(train[0][0])).shape
    shape = (channels, height, width)  # three numbers to mypy
    return _data(f"folder:{path}", train, test, classes, shape)


def load_images(path: Path, size: int, *, name: str | None = None, layout: str = LAYOUT) -> Data:
    """Load folders as `load_folder` does, with images of any size: they become RGB of shape (3, size, size).

    The short side is resized to 256/224 times `size` (1 to MAX_SIDE), then the central square is cut out. Grey, CMYK
    and transparent images become RGB. `layout` ends the message about a missing folder.
    """
    check_integer("size of images", size, 1, MAX_SIDE)
    train, test, classes = find_images(path, layout)
    return _data(name or f"images:{size}:{path}", train, test, classes, (3, size, size), fit=True, convert=True)


def _data(
    name: str, train: Listed, test: Listed, classes: Sequence[str], shape: tuple[int, int, int], **how: bool
) -> Data:
    first, second = (Split(ImageFiles(files, shape, **how), torch.tensor(labels)) for files, labels in (train, test))
    return Data(name, first, second, tuple(classes))


def find_images(path: Path, layout: str) -> tuple[Listed, Listed, tuple[str, ...]]:
    """(files, labels) of `train` and of `test` or `val`, sorted by class and name; and the classes of `train`."""
    held_out = path / ("val" if (path / "val").exists() and not (path / "test").exists() else "test")
    classes = tuple(_visible(path / "train", layout))
    for name in _visible(held_out, layout):
        if name not in classes:
            raise DataError(f"expected in {held_out} only the classes of train, got {name}; {layout}")
    train = list_images([path / "train" / name for name in classes], layout)
    test = list_images([held_out / name for name in classes], layout, needed=False)
    for folder, (files, _) in ((path / "train", train), (held_out, test)):
        if not files:
            raise DataError(f"expected images in {folder}/CLASS, got none")
    return train, test, classes


def list_images(folders: Sequence[Path], layout: str, needed: bool = True) -> Listed:
    """The files of all folders, sorted by name, each labelled by its folder's index; ``needed`` refuses empty ones."""
    files: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        if needed or folder.exists():
            found = _visible(folder, layout)
            if needed and not found:
                raise DataError(f"expected images in {folder}, got none")
            files += [os.path.join(folder, file) for file in found]
            labels += [label] * len(found)
    return files, labels


def _visible(folder: Path, layout: str) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"expected a folder at {folder}, got {'a file' if folder.exists() else 'none'}; {layout}")
    with reading(folder):
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))


SOURCE = (
    "put the images into imagenet/train/WNID/*.JPEG and imagenet/val/WNID/*.JPEG under the data root ($LIPKIT_DATA or "
    "./data), the validation images sorted into the folders of their classes; they are at https://image-net.org/"
)


def load_imagenet(root: Path) -> Data:
    """Load `imagenet/{train,val}/WNID`: RGB of 224 x 224, the classes named by their WordNet numbers in sorted order.

    References:
        Russakovsky et al., "ImageNet large scale visual recognition challenge", IJCV 115 (2015).
    """
    return load_images(root / "imagenet", 224, name="imagenet", layout=SOURCE)


TINY_SOURCE = (
    "unpack tiny-imagenet-200.zip in the data root ($LIPKIT_DATA or ./data), which gives tiny-imagenet-200/wnids.txt, "
    "train and val; it is at http://cs231n.stanford.edu/tiny-imagenet-200.zip"
)
MAX_TEXT = 1 << 24  # bytes of a list of classes or files


def load_tiny_imagenet(root: Path) -> Data:
    """Load Tiny-ImageNet: 100 000 training and 10 000 validation images, RGB (grey ones become RGB), uint8.

    The classes are the WordNet numbers of `wnids.txt`, sorted; the validation images are the test split (the test
    images have no labels). Reads `wnids.txt`, `train/WNID/images/*`, `val/val_annotations.txt` and `val/images/*` of
    `root/tiny-imagenet-200`.
    """
    folder = root / "tiny-imagenet-200"
    names = sorted(_lines(folder / "wnids.txt"))
    for name in names:
        if not re.fullmatch(r"n\d{1,10}", name):
            raise DataError(f"{folder / 'wnids.txt'}: expected WordNet numbers such as n01443537, got {name!r}")
    if len(set(names)) != len(names) or not names:
        raise DataError(f"{folder / 'wnids.txt'}: expected different classes, got {len(names)} lines")
    train = list_images([folder / "train" / name / "images" for name in names], TINY_SOURCE)
    return _data("tiny_imagenet", train, _annotated(folder, names), names, (3, 64, 64), convert=True)


def _annotated(folder: Path, classes: list[str]) -> Listed:
    """Validation images, all in one folder, and their labels from `val_annotations.txt`."""
    path = folder / "val" / "val_annotations.txt"
    number = {name: label for label, name in enumerate(classes)}
    files: list[str] = []
    labels: list[int] = []
    for line in _lines(path):
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", file) or name not in number:  # a name, not a path
            raise DataError(f"{path}: expected lines of a file name, a tab and a class of wnids.txt, got {line[:80]!r}")
        files.append(os.path.join(folder, "val", "images", file))
        labels.append(number[name])
    if not files:
        raise DataError(f"{path}: expected at least one line, got none")
    return files, labels


def _lines(path: Path) -> list[str]:
    if (size := file_size(path, TINY_SOURCE)) > MAX_TEXT:
        raise DataError(f"{path}: expected a text of at most {MAX_TEXT} bytes, got {size}")
    with reading(path):
        return [line for line in read_text(path, MAX_TEXT).splitlines() if line.strip()]
