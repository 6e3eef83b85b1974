"""A data set of image files, one folder per class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from lipkit.data.images import ImageFiles, decode
from lipkit.data.reading import reading
from lipkit.data.split import Data, Entry, Split
from lipkit.errors import DataError, OptionError

LAYOUT = "the layout is train/CLASS/* and test/CLASS/* or val/CLASS/*"
MAX_SIDE = 4096


def load_folder(path: Path) -> Data:
    """`path/train/CLASS/*` and `path/test/CLASS/*` (or `val`), images of one size, uint8 of shape (C, H, W).

    The classes are the folders of `train`, sorted by name; `test` may lack some of them. Images are grey
    (C = 1) or RGB (C = 3), as the first one is. Names that start with a dot are skipped. Files are decoded when a
    batch asks for them; `load` decodes a small data set at once.

    A file that is no image, has more than MAX_PIXELS pixels or differs from the first one in size or channels raises a
    DataError when it is decoded.
    """
    train, test, classes = find_images(path, LAYOUT)
    channels, height, width = decode(Path(train[0][0])).shape
    shape = (channels, height, width)  # three numbers to mypy
    first, second = (Split(ImageFiles(files, shape), torch.tensor(labels)) for files, labels in (train, test))
    return Data(f"folder:{path}", first, second, classes)


def load_images(path: Path, size: int, *, name: str | None = None, layout: str = LAYOUT) -> Data:
    """Folders as of `load_folder` with images of any size, as ImageNet's: RGB of (3, size, size), resized and cropped.

    The short side becomes 256/224 times `size` (1 to MAX_SIDE), then a square is cut out of the centre; grey, CMYK and
    transparent images become RGB. `layout` is what to add to the message when a folder is missing.
    """
    if not 1 <= size <= MAX_SIDE:
        raise OptionError(f"expected a size of images from 1 to {MAX_SIDE}, got {size}")
    train, test, classes = find_images(path, layout)
    first, second = (
        Split(ImageFiles(files, (3, size, size), fit=True, convert=True), torch.tensor(labels))
        for files, labels in (train, test)
    )
    return Data(name or f"images:{size}:{path}", first, second, classes)


def find_images(
    path: Path, layout: str
) -> tuple[tuple[list[str], list[int]], tuple[list[str], list[int]], tuple[str, ...]]:
    """(files, labels) of `train` and of `test` or `val`, sorted by class and name; the classes, which `train` has."""
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


def list_images(folders: Sequence[Path], layout: str, needed: bool = True) -> tuple[list[str], list[int]]:
    """The files of each folder, sorted by name, and its number as their label; ``needed``: no folder may be empty."""
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
        raise DataError(f"expected a folder at {folder}, got none; {layout}")
    with reading(folder):
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))


INPUT_SHAPE = (3, 224, 224)
SOURCE = (
    "put the images into imagenet/train/WNID/*.JPEG and imagenet/val/WNID/*.JPEG under the data root ($LIPKIT_DATA or "
    "./data), the validation images sorted into the folders of their classes; they are at https://image-net.org/"
)


def load_imagenet(root: Path) -> Data:
    """Load `imagenet/{train,val}/WNID`: RGB of 224 x 224, the classes named by their WordNet numbers in sorted order.

    Raises:
        DataError: see `load_images`.

    References:
        Russakovsky et al., "ImageNet large scale visual recognition challenge", IJCV 115 (2015).
    """
    return load_images(root / "imagenet", INPUT_SHAPE[1], name="imagenet", layout=SOURCE)


IMAGENET = Entry(
    "RGB photographs, resized and cropped to 224 x 224, decoded batch by batch", load_imagenet, INPUT_SHAPE, (), SOURCE
)
