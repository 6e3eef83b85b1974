"""The table of data sets, and the one function that loads by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lipkit.data import cifar10, digits, mnist, square_wave
from lipkit.data.arrays import load_npz
from lipkit.data.custom import load_custom
from lipkit.data.folder import load_folder
from lipkit.data.split import Data
from lipkit.errors import OptionError


@dataclass(frozen=True)
class Entry:
    """One data set of the table.

    Args:
        description: one line.
        loader: takes the data root, returns the Data.
        input_shape: the shape of one sample.
        classes: the names of the classes, in label order; empty for regression.
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
    "square_wave": Entry(
        "a function of one variable that jumps, for regression: 300 training and 200 test points",
        square_wave.load_square_wave,
        square_wave.INPUT_SHAPE,
        (),
        square_wave.SOURCE,
    ),
}


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
        spec: a name of DATASETS (`digits`, `mnist`, `cifar10`, `square_wave`); `folder:PATH` (train/CLASS/*,
            test/CLASS/*); `npz:PATH` (x_train, y_train, x_test, y_test); or `pkg.mod:factory` (your function: it is
            run). PATH is relative to the working directory.
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
    elif kind == "npz" and rest:
        data = load_npz(Path(rest).expanduser())
    elif re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", spec) and kind not in ("folder", "npz"):
        data = load_custom(spec)
    else:
        raise OptionError(
            f"expected a data set ({', '.join(DATASETS)}, folder:PATH, npz:PATH or pkg.mod:factory), got {spec!r}"
        )
    return data if limit is None else data.take(limit)
