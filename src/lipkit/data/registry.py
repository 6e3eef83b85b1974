"""The table of data sets, and the one function that loads by name."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lipkit.data import cifar10, cifar100, digits, mnist, square_wave, stl10, tiny_imagenet
from lipkit.data import folder as imagenet
from lipkit.data.arrays import load_npz
from lipkit.data.convert import as_data, as_split
from lipkit.data.folder import load_folder, load_images
from lipkit.data.split import Data
from lipkit.errors import DataError, OptionError

HELD_BYTES = 1 << 31
"""Image files that take at most 2 GiB of memory for each split are decoded once, when they are loaded."""


@dataclass(frozen=True)
class Entry:
    """One data set of the table.

    Args:
        description: one line.
        loader: takes the data root, returns the Data.
        input_shape: the shape of one sample.
        classes: the names of the classes, in label order; empty for regression, and where the files name them.
        source: where to get it, and where to put it.
    """

    description: str
    loader: Callable[[Path], Data]
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    source: str


DATASETS: dict[str, Entry] = {
    "digits": Entry(
        "8 x 8 handwritten digits, 1438 training and 359 test images, comes with scikit-learn",
        digits.load_digits,
        digits.INPUT_SHAPE,
        digits.CLASSES,
        digits.SOURCE,
    ),
    "mnist": Entry(
        "28 x 28 handwritten digits, 60 000 training and 10 000 test images",
        mnist.load_mnist,
        mnist.INPUT_SHAPE,
        mnist.CLASSES,
        mnist.SOURCE,
    ),
    "cifar10": Entry(
        "32 x 32 RGB photographs of ten kinds, 50 000 training and 10 000 test images",
        cifar10.load_cifar10,
        cifar10.INPUT_SHAPE,
        cifar10.CLASSES,
        cifar10.SOURCE,
    ),
    "cifar100": Entry(
        "32 x 32 RGB photographs of a hundred kinds, 50 000 training and 10 000 test images",
        cifar100.load_cifar100,
        cifar100.INPUT_SHAPE,
        cifar100.CLASSES,
        cifar100.SOURCE,
    ),
    "tiny_imagenet": Entry(
        "64 x 64 RGB photographs of 200 kinds, 100 000 training and 10 000 validation images",
        tiny_imagenet.load_tiny_imagenet,
        tiny_imagenet.INPUT_SHAPE,
        (),
        tiny_imagenet.SOURCE,
    ),
    "stl10": Entry(
        "96 x 96 RGB photographs of ten kinds, 5000 training and 8000 test images, read from disk as needed",
        stl10.load_stl10,
        stl10.INPUT_SHAPE,
        stl10.CLASSES,
        stl10.SOURCE,
    ),
    "imagenet": Entry(
        "RGB photographs, resized and cropped to 224 x 224, decoded batch by batch",
        imagenet.load_imagenet,
        imagenet.INPUT_SHAPE,
        (),
        imagenet.SOURCE,
    ),
    "square_wave": Entry(
        "a function of one variable that jumps, for regression: 300 training and 200 test points",
        square_wave.load_square_wave,
        square_wave.INPUT_SHAPE,
        (),
        square_wave.SOURCE,
    ),
}
"""The data sets that :func:`load` knows by name."""


def data_root(root: str | Path | None = None) -> Path:
    """Return `root` if given, else `$LIPKIT_DATA` if set, else `./data`.

    Example:
        >>> data_root("~/sets") == Path.home() / "sets"
        True
    """
    return Path(root or os.environ.get("LIPKIT_DATA") or "data").expanduser()


def load(spec: str, *, root: str | Path | None = None, limit: int | None = None) -> Data:
    """Load a data set by name.

    Args:
        spec: a name of DATASETS (`digits`, `mnist`, `cifar10`, ...); `folder:PATH` (train/CLASS/*, test/CLASS/* or
            val/CLASS/*, images of one size); `images:SIZE:PATH` (the same, images of any size made RGB of SIZE x
            SIZE); `npz:PATH` (x_train, y_train, x_test, y_test); or `pkg.mod:factory` (your function: it is run).
            PATH is relative to the working directory.
        root: where the data sets of the table lie; see `data_root`.
        limit: at most this many samples in each split, drawn at random with a fixed seed; see `Split.take`.

    Raises:
        OptionError: if `spec` is none of these, or `limit` is not a positive integer.
        DataError: if the data are missing or corrupt.

    Example:
        >>> data = load("digits", limit=100)
        >>> len(data.train), len(data.test), data.input_shape, data.task
        (100, 100, (1, 8, 8), 'classification')
    """
    kind, _, rest = spec.partition(":")
    if spec in DATASETS:
        data = DATASETS[spec].loader(data_root(root))
    elif kind == "folder" and rest:
        data = load_folder(Path(rest).expanduser())
    elif kind == "images" and re.fullmatch(r"[0-9]{1,5}:.+", rest):
        size, _, path = rest.partition(":")
        data = load_images(Path(path).expanduser(), int(size))
    elif kind == "npz" and rest:
        data = load_npz(Path(rest).expanduser())
    elif re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", spec) and kind not in ("folder", "images", "npz"):
        data = load_custom(spec)
    else:
        raise OptionError(
            f"expected a data set ({', '.join(DATASETS)}, folder:PATH, images:SIZE:PATH, npz:PATH or "
            f"pkg.mod:factory), got {spec!r}"
        )
    return (data if limit is None else data.take(limit)).held(HELD_BYTES)


def load_custom(spec: str) -> Data:
    """Import `pkg.mod`, call `factory()` and turn what it returns into a Data.

    The factory takes no arguments and returns a Data, or a pair (train, test) of which each is a Split, a
    pair (x, y) of tensors or arrays, or a map-style torch Dataset of such pairs (see `as_split`).

    Args:
        spec: `pkg.mod:factory`. It runs the code of that module: use only what you trust.

    Raises:
        DataError: if it cannot be imported, fails, or returns something else.
    """
    module_name, _, attribute = spec.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except AttributeError as error:
        raise DataError(f"{spec}: expected {module_name} to have {attribute}, got none ({error})") from error
    except Exception as error:  # the module is the user's code and may raise anything
        raise DataError(
            f"{spec}: expected a module that can be imported, got {type(error).__name__}: {error}"
        ) from error
    if not callable(factory):
        raise DataError(f"{spec}: expected a function that makes the data, got {type(factory).__name__}")
    try:
        made = factory()
    except Exception as error:
        raise DataError(f"{spec}: expected data, got {type(error).__name__}: {error}") from error
    if isinstance(made, Data):
        return replace(made, name=spec)
    if not isinstance(made, tuple | list) or len(made) != 2:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        raise DataError(f"{spec}: expected a lipkit.data.Data or a pair (train, test), got {got}")
    return as_data(spec, as_split(made[0], f"{spec}: train"), as_split(made[1], f"{spec}: test"))
