"""The table of data sets, and the one function that loads by name."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lipkit.data import binary, embedded, folder
from lipkit.data.reading import load_npz
from lipkit.data.split import Data, as_data, as_split
from lipkit.errors import DataError, LipkitError, OptionError

HELD_BYTES = 1 << 31
"""Image files that take at most 2 GiB of memory for each split are decoded once, when they are loaded."""


@dataclass(frozen=True)
class Entry:
    """One data set of the table `lipkit.data.DATASETS`."""

    description: str  # one line
    loader: Callable[[Path], Data]  # takes the data root
    source: str  # where to get it, and where to put it


DATASETS: dict[str, Entry] = {
    "digits": Entry(
        "8 x 8 handwritten digits, 1438 training and 359 test images, comes with scikit-learn",
        embedded.load_digits,
        embedded.DIGITS_SOURCE,
    ),
    "mnist": Entry(
        "28 x 28 handwritten digits, 60 000 training and 10 000 test images", binary.load_mnist, binary.MNIST_SOURCE
    ),
    "cifar10": Entry(
        "32 x 32 RGB photographs of ten kinds, 50 000 training and 10 000 test images",
        partial(binary.load_cifar, variant=binary.CIFAR10),
        binary.CIFAR10.source,
    ),
    "cifar100": Entry(
        "32 x 32 RGB photographs of a hundred kinds, 50 000 training and 10 000 test images",
        partial(binary.load_cifar, variant=binary.CIFAR100),
        binary.CIFAR100.source,
    ),
    "tiny_imagenet": Entry(
        "64 x 64 RGB photographs of 200 kinds, 100 000 training and 10 000 validation images",
        folder.load_tiny_imagenet,
        folder.TINY_SOURCE,
    ),
    "stl10": Entry(
        "96 x 96 RGB photographs of ten kinds, 5000 training and 8000 test images, read from disk as needed",
        binary.load_stl10,
        binary.STL10_SOURCE,
    ),
    "imagenet": Entry(
        "RGB photographs, resized and cropped to 224 x 224, decoded batch by batch", folder.load_imagenet, folder.SOURCE
    ),
    "square_wave": Entry(
        "a function of one variable that jumps, for regression: 300 training and 200 test points",
        embedded.load_square_wave,
        embedded.SQUARE_WAVE_SOURCE,
    ),
}
"""The data sets that :func:`load` knows by name. To add one, write a file with its loader and an entry here."""


def data_root(root: str | Path | None = None) -> Path:
    """`root` if given, else `$LIPKIT_DATA` if set, else `./data`.

    >>> data_root("~/sets") == Path.home() / "sets"
    True
    """
    return Path(root or os.environ.get("LIPKIT_DATA") or "data").expanduser()


def load(
    spec: str, *, root: str | Path | None = None, limit: int | None = None, limits: tuple[float, float] | None = None
) -> Data:
    """Load a data set by name.

    Args:
        spec: a name of DATASETS (`digits`, `mnist`, `cifar10`, ...); `folder:PATH` (train/CLASS/*, test/CLASS/* or
            val/CLASS/*, images of one size); `images:SIZE:PATH` (the same, images of any size made RGB of SIZE x
            SIZE); `idx:PATH` (the four files of Fashion-MNIST and the like); `npz:PATH` (x_train, y_train, x_test,
            y_test); or `pkg.mod:factory` (your function: it is run). PATH is relative to the working directory.
        root: folder of the data sets in DATASETS, see `data_root`.
        limit: at most this many samples in each split, drawn at random with a fixed seed; see `Split.take`.
        limits: (low, high) of every entry, see `Data`; None keeps those of the data set.

    Raises:
        OptionError: if `spec` is none of these, or `limit` is not a positive integer.
        DataError: if the data are missing or corrupt.

    >>> data = load("digits", limit=100)
    >>> len(data.train), len(data.test), data.input_shape, data.task
    (100, 100, (1, 8, 8), 'classification')
    """
    kind, _, rest = spec.partition(":")
    if spec in DATASETS:
        data = DATASETS[spec].loader(data_root(root))
    elif kind == "folder" and rest:
        data = folder.load_folder(Path(rest).expanduser())
    elif kind == "images" and re.fullmatch(r"[0-9]{1,5}:.+", rest):
        size, _, path = rest.partition(":")
        data = folder.load_images(Path(path).expanduser(), int(size))
    elif kind == "idx" and rest:
        data = binary.load_idx(Path(rest).expanduser())
    elif kind == "npz" and rest:
        data = load_npz(Path(rest).expanduser(), limits)
    elif is_code(spec):
        data = load_custom(spec, limits)
    else:
        raise OptionError(
            f"expected a data set ({', '.join(DATASETS)}, folder:PATH, images:SIZE:PATH, idx:PATH, npz:PATH or "
            f"pkg.mod:factory), got {spec!r}"
        )
    data = replace(data, limits=limits or data.limits)
    return (data if limit is None else data.take(limit)).held(HELD_BYTES)  # take first: decode no other files


def is_code(spec: str) -> bool:
    """True for a name ``pkg.mod:factory``, which stands for code that is run."""
    # [^\W\d] is a letter or an underscore.
    return re.fullmatch(r"(?!(folder|images|idx|npz):)[^\W\d][\w.]*:[^\W\d]\w*", spec) is not None


def imported(spec: str, error: type[LipkitError] = OptionError) -> Callable[..., Any]:
    """Import the function ``pkg.mod:factory``. Only here does a name become code: call it with the user's own names.

    Raises ``error`` if it cannot be imported or called.
    """
    module, _, name = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end: installed packages come first
    try:
        factory = getattr(importlib.import_module(module), name)
    except Exception as problem:  # the module is the user's code and may raise anything
        raise error(f"{spec}: expected a function to import, got {type(problem).__name__}: {problem}") from problem
    if not callable(factory):
        raise error(f"{spec}: expected a function to call, got {type(factory).__name__}")
    return factory


def load_custom(spec: str, limits: tuple[float, float] | None = None) -> Data:
    """Import `pkg.mod`, call `factory()` and turn what it returns into a Data. Use only a module whose code you trust.

    The factory takes no arguments and returns a Data, or a pair (train, test) of values that `as_split` takes.
    ``DataError`` if the import or the call fails, or the result is neither.
    """
    factory = imported(spec, DataError)
    try:
        made = factory()
    except Exception as error:
        raise DataError(f"{spec}: expected data, got {type(error).__name__}: {error}") from error
    if isinstance(made, Data):
        return replace(made, name=spec)
    if not isinstance(made, tuple | list) or len(made) != 2:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        raise DataError(f"{spec}: expected a lipkit.data.Data or a pair (train, test), got {got}")
    return as_data(spec, as_split(made[0], f"{spec}: train"), as_split(made[1], f"{spec}: test"), limits=limits)
