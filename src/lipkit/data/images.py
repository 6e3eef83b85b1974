"""Images: files decoded a batch at a time, so that a data set need not fit in memory; and augmentation of a batch."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from lipkit.errors import DataError, ShapeError
from lipkit.files import open_regular
from lipkit.linalg.matrices import check_integer

MAX_PIXELS = 1 << 26
"""The most pixels an image may claim before it is decoded."""
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".webp")
WORKERS = 8
RESIZE = 256 / 224
"""Short side before the centre crop, as a multiple of the crop: the usual evaluation of ImageNet."""
# End of the error for a folder whose images differ in size or mode.
REMEDY = "; images:SIZE:PATH in place of folder:PATH makes all of them RGB of SIZE x SIZE"
# Decoders of plain raster formats only: some of Pillow's start other programs (EPS).
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
_CHANNELS = {"1": 1, "L": 1, "P": 3, "RGB": 3}
# Modes of 8 bits per channel, whose scale `convert("RGB")` keeps.
_CONVERTIBLE = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images on disk that index like a uint8 tensor (N, C, H, W): each access decodes its files.

    Args:
        files: paths of the images.
        sample_shape: (C, H, W) of every image.
        fit: whether images of other sizes are resized (short side to RESIZE times the side, bilinear) and cropped
            around the centre; without it they are refused.
        convert: whether grey, CMYK and transparent images become RGB (transparency is dropped); without it only grey
            and RGB images are taken, as `sample_shape` says.
    """

    files: Sequence[str]
    sample_shape: tuple[int, int, int]
    fit: bool = False
    convert: bool = False

    ndim: ClassVar[int] = 4
    dtype: ClassVar[torch.dtype] = torch.uint8

    @property
    def shape(self) -> torch.Size:
        """(N, C, H, W)."""
        return torch.Size((len(self.files), *self.sample_shape))

    @property
    def nbytes(self) -> int:
        """Bytes of all images when decoded."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Decode the images at ``index``."""
        files = self.files[index] if isinstance(index, slice) else self.subset(index).files
        images = torch.empty(len(files), *self.sample_shape, dtype=torch.uint8)

        def put(i: int) -> None:
            images[i] = torch.from_numpy(self._read(files[i]))

        # Silence Pillow's warning of huge images: lipkit's limit is lower and raises an error.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=_pillow().DecompressionBombWarning)
            # The decoders release the interpreter's lock.
            with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
                list(pool.map(put, range(len(files))))  # list() raises the errors of the threads
        return images

    def subset(self, index: Tensor) -> ImageFiles:
        """The files selected by ``index``, integers or a mask; nothing is decoded."""
        index = index.nonzero()[:, 0] if index.dtype == torch.bool else index
        return replace(self, files=[self.files[i] for i in index.tolist()])

    def _read(self, file: str) -> np.ndarray:
        pixels = decode(Path(file), self.sample_shape[1:] if self.fit else None, self.convert)
        if pixels.shape != self.sample_shape:
            remedy = "" if self.convert else REMEDY
            raise DataError(
                f"{file}: expected an image of shape {tuple(self.sample_shape)} (C, H, W), got {pixels.shape}{remedy}"
            )
        return pixels


def decode(file: Path, fit: tuple[int, ...] | None = None, convert: bool = False) -> np.ndarray:
    """Decode one image file to uint8 (C, H, W), rotated as its EXIF data say; the size is checked first.

    ``fit`` is (height, width) to resize and crop to; ``convert`` is that of `ImageFiles`.
    """
    image_module = _pillow()
    from PIL import ImageOps

    if file.suffix.lower() not in SUFFIXES:
        raise DataError(f"{file}: expected an image file ({', '.join(SUFFIXES)}), got {file.suffix or 'no suffix'}")
    try:
        with open_regular(file) as stream, image_module.open(stream, formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"expected at most {MAX_PIXELS} pixels, got {image.width} x {image.height}")
            if convert and image.mode not in _CONVERTIBLE:
                raise DataError(f"expected an image of 8 bits per channel, got mode {image.mode}")
            if not convert and image.mode not in _CHANNELS:
                remedy = REMEDY if image.mode in _CONVERTIBLE else ""
                raise DataError(
                    f"expected a grey or RGB image of 8 bits without transparency, got mode {image.mode}{remedy}"
                )
            channels = 3 if convert else _CHANNELS[image.mode]
            made = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")  # also palettes, bitmaps
            pixels = np.array(made if fit is None else _fitted(made, *fit), dtype=np.uint8)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    except image_module.DecompressionBombError as error:
        raise DataError(f"{file}: expected at most {MAX_PIXELS} pixels, got more: {error}") from None
    except FileNotFoundError:
        raise DataError(f"expected an image at {file}, got none") from None
    except Exception as error:  # the decoders of a corrupt image raise many kinds of error
        raise DataError(f"{file}: expected a complete image, got {type(error).__name__}: {error}") from error
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1))


def _fitted(image: Any, height: int, width: int) -> Any:
    """The image resized to cover RESIZE times the size, then cropped around the centre."""
    scale = max(RESIZE * height / image.height, RESIZE * width / image.width)
    size = (max(width, round(scale * image.width)), max(height, round(scale * image.height)))
    if max(size) > MAX_PIXELS // min(size):  # a strip one pixel wide would grow without bound
        raise DataError(f"expected at most {MAX_PIXELS} pixels after resizing, got {size[0]} x {size[1]}")
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    resized = image.resize(size, _pillow().Resampling.BILINEAR)
    return resized.crop((left, top, left + width, top + height))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError('expected Pillow to read images, got none; pip install "lipkit[data]"') from error
    return Image


def random_crop(x: Tensor, padding: int, generator: Generator) -> Tensor:
    """Shift each image by its own random offset, zeros coming in from the border (He et al. 2016, section 4.2).

    Args:
        x: images of shape (N, C, H, W), any dtype; the result is a new tensor like it.
        padding: largest offset along an axis, in pixels; offsets are uniform from -padding to padding.
        generator: the only source of randomness. One on the CPU gives the same numbers for `x` on any device.

    Raises:
        ShapeError, OptionError: another shape or padding.

    >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> random_crop(x, 1, torch.Generator().manual_seed(0)).shape
    torch.Size([1, 1, 2, 2])
    """
    _check_images(x)
    check_integer("padding", padding, 0)
    n, _, height, width = x.shape
    # Drawn where the generator lives, then moved: two numbers per image.
    offset = torch.randint(2 * padding + 1, (2, n), generator=generator, device=generator.device).to(x.device)
    padded = functional.pad(x, (padding,) * 4)  # the last two axes, both ends
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, 2p + 1, 2p + 1, H, W)
    return windows[torch.arange(n, device=x.device), :, offset[0], offset[1]]


def random_flip(x: Tensor, generator: Generator) -> Tensor:
    """Mirror each image left to right with probability 1/2; arguments, result and errors are those of `random_crop`.

    >>> x = torch.arange(3.0).reshape(1, 1, 1, 3).repeat(4, 1, 1, 1)
    >>> random_flip(x, torch.Generator().manual_seed(1))[:, 0, 0, 0].unique()
    tensor([0., 2.])
    """
    _check_images(x)
    chosen = torch.randint(2, (len(x),), generator=generator, device=generator.device).to(x.device).bool()
    return torch.where(chosen[:, None, None, None], x.flip(-1), x)


def _check_images(x: Tensor) -> None:
    if x.ndim != 4:
        raise ShapeError(f"expected images of shape (N, C, H, W), got {tuple(x.shape)}")
