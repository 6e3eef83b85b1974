"""A data set of image files, one folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lipkit.data.reading import MAX_BYTES
from lipkit.data.split import Data, Split
from lipkit.errors import DataError

MAX_PIXELS = 1 << 24
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".webp")
# Only decoders of plain raster formats: others of Pillow's start programs of their own (EPS).
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
_CHANNELS = {"1": 1, "L": 1, "P": 3, "RGB": 3}


def load_folder(path: Path) -> Data:
    """Load `path/train/CLASS/*` and `path/test/CLASS/*`, images of one size, as uint8 of shape (C, H, W).

    The classes are the folders of `train`, sorted by name; `test` may lack some of them. Images are grey
    (C = 1) or RGB (C = 3), as the first one is. Names that start with a dot are skipped.

    Args:
        path: the folder.

    Raises:
        DataError: if a folder is missing or empty, a file is not a readable image, has more than MAX_PIXELS
            pixels, or differs from the first one in size or channels; or if Pillow is not installed.
    """
    classes = tuple(folder.name for folder in _visible(path / "train"))
    for folder in _visible(path / "test"):
        if folder.name not in classes:
            raise DataError(f"expected in {path / 'test'} only the classes of train, got {folder.name}")
    train = _split(path / "train", classes, None)
    test = _split(path / "test", classes, tuple(train.x.shape[1:]))
    return Data(f"folder:{path}", train, test, classes)


def _split(folder: Path, classes: tuple[str, ...], shape: tuple[int, ...] | None) -> Split:
    files = [
        (file, label)
        for label, name in enumerate(classes)
        if (folder / name).exists()
        for file in _visible(folder / name)
    ]
    if not files:
        raise DataError(f"expected images in {folder}/CLASS, got none")
    images = None
    for i, (file, _) in enumerate(files):
        pixels = _read(file)
        shape = shape or pixels.shape
        if pixels.shape != shape:
            raise DataError(f"{file}: expected an image of shape {shape} (C, H, W) as the first, got {pixels.shape}")
        if images is None:
            if (size := len(files) * pixels.size) > MAX_BYTES:
                raise DataError(f"{folder}: expected at most {MAX_BYTES} bytes of images, got {size}")
            images = torch.empty(len(files), *shape, dtype=torch.uint8)
        images[i] = torch.from_numpy(pixels)
    assert images is not None
    return Split(images, torch.tensor([label for _, label in files]))


def _read(file: Path) -> np.ndarray:
    """Decode one image file to uint8 of shape (C, H, W); its size is checked before it is decoded."""
    image_module = _pillow()
    if file.suffix.lower() not in SUFFIXES:
        raise DataError(f"{file}: expected an image file ({', '.join(SUFFIXES)}), got {file.suffix or 'no suffix'}")
    try:
        with image_module.open(file, formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"expected at most {MAX_PIXELS} pixels, got {image.width} x {image.height}")
            if image.mode not in _CHANNELS:
                raise DataError(f"expected a grey or RGB image of 8 bits without transparency, got mode {image.mode}")
            channels = _CHANNELS[image.mode]
            pixels = np.array(image.convert("L" if channels == 1 else "RGB"), dtype=np.uint8)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    except Exception as error:  # the decoders of a corrupt image raise many kinds of error
        raise DataError(f"{file}: expected a complete image, got {type(error).__name__}: {error}") from error
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1))


def _visible(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"expected a folder at {folder}, got none; the layout is train/CLASS/* and test/CLASS/*")
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError('expected Pillow to read images, got none; pip install "lipkit[data]"') from error
    return Image
