"""Tiny-ImageNet-200: 64 x 64 photographs of 200 kinds."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from lipkit.data.folder import list_images
from lipkit.data.images import ImageFiles
from lipkit.data.reading import file_size, reading
from lipkit.data.split import Data, Entry, Split
from lipkit.errors import DataError
from lipkit.files import read_text

INPUT_SHAPE = (3, 64, 64)
SOURCE = (
    "unpack tiny-imagenet-200.zip in the data root ($LIPKIT_DATA or ./data), which gives tiny-imagenet-200/wnids.txt, "
    "train and val; it is at http://cs231n.stanford.edu/tiny-imagenet-200.zip"
)
MAX_TEXT = 1 << 24


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
    train = list_images([folder / "train" / name / "images" for name in names], SOURCE)
    first, second = (
        Split(ImageFiles(files, INPUT_SHAPE, convert=True), torch.tensor(labels))
        for files, labels in (train, _annotated(folder, names))
    )
    return Data("tiny_imagenet", first, second, tuple(names))


def _annotated(folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """Validation images and their labels: all lie in one folder, and a text names their classes."""
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
    if (size := file_size(path, SOURCE)) > MAX_TEXT:
        raise DataError(f"{path}: expected a text of at most {MAX_TEXT} bytes, got {size}")
    with reading(path):
        return [line for line in read_text(path, MAX_TEXT).splitlines() if line.strip()]


ENTRY = Entry(
    "64 x 64 RGB photographs of 200 kinds, 100 000 training and 10 000 validation images",
    load_tiny_imagenet, INPUT_SHAPE, (), SOURCE,
)  # fmt: skip
