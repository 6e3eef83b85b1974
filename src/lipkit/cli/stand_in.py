"""Which data the scale smoke trains on where the paper's are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lipkit import data as datasets
from lipkit.data import Data, Split
from lipkit.errors import DataError, OptionError

DIGITS = "lipkit.cli.stand_in:enlarged_digits"
# What stands in for a data set: images of the same number of channels, in the order of preference.
STAND_INS = {
    "cifar100": ("cifar10", DIGITS),
    "tiny_imagenet": ("cifar10", DIGITS),
    "stl10": ("cifar10", DIGITS),
    "cifar10": (DIGITS,),
    "mnist": ("digits",),
}
NAMES = {DIGITS: "digits enlarged to 3 x 32 x 32"}


def enlarged_digits() -> Data:
    """The 8 x 8 digits with every pixel repeated four times in both directions, in three equal channels.

    >>> enlarged_digits().input_shape
    (3, 32, 32)
    """

    def enlarged(split: Split) -> Split:
        x, y = split.batch(torch.arange(len(split)))
        x = x.repeat_interleave(4, -2).repeat_interleave(4, -1)
        return Split(x.expand(-1, 3, -1, -1).contiguous(), y)

    data = datasets.load("digits")
    return replace(data, train=enlarged(data.train), test=enlarged(data.test))


class Available:
    """Which data sets are there, each looked for once.

    Args:
        root: folder of the data sets; see `lipkit.data.data_root`.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._known: dict[str, bool] = {}

    def __call__(self, spec: str) -> bool:
        """Whether ``spec`` can be loaded; of the user's own data it is assumed, so that what is wrong is said."""
        if spec not in STAND_INS:
            return True
        if spec not in self._known:
            try:
                datasets.load(spec, root=self._root, limit=1)
                self._known[spec] = True
            except (DataError, OptionError):
                self._known[spec] = False
        return self._known[spec]

    def stand_in(self, spec: str) -> str:
        """``spec`` if it is there, else the first stand-in that is."""
        return next(name for name in (spec, *STAND_INS.get(spec, ())) if self(name))
