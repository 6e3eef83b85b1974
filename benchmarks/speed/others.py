"""Figures that were not measured by this benchmark: those of libraries that pip does not bring, read from a table.

A file of comma-separated values with the columns of :data:`COLUMNS`; `others.csv` is the one that is shown by default.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.speed.shapes import parse

from lipkit.errors import OptionError
from lipkit.files import read_text

COLUMNS = ("library", "family", "shape", "batch", "phase", "ratio")
PHASES = ("train", "forward")
DEFAULT = Path(__file__).with_suffix(".csv")

Case = tuple[str, str, int, str]
"""Family, shape, batch and phase."""
Others = Mapping[Case, Mapping[str, float]]
"""Ratios to nn.Conv2d with circular padding, by library."""


def read_others(path: Path = DEFAULT) -> Others:
    """The ratios in a file, by case and library.

    Raises:
        OptionError: other columns, or a line with a number, shape or phase that is none, or one that comes twice.

    >>> read_others()["cpl", "128@16", 32, "train"]
    {'1LLC': 2.0}
    """
    lines = csv.reader(io.StringIO(read_text(path)))
    head = tuple(next(lines, ()))
    if head != COLUMNS:
        raise OptionError(f"{path}: expected the columns {', '.join(COLUMNS)}, got {', '.join(head) or 'none'}")
    found: dict[Case, dict[str, float]] = {}
    for line in lines:
        where = f"{path}, line {lines.line_num}"
        try:
            library, family, shape, batch, phase, text = line
            case, value = (family, str(parse(shape)), int(batch), phase), float(text)
        except (ValueError, OptionError) as error:
            raise OptionError(f"{where}: expected {', '.join(COLUMNS)}, got {','.join(line)!r} ({error})") from None
        if phase not in PHASES or not (math.isfinite(value) and value > 0):
            raise OptionError(f"{where}: expected the phase train or forward and a positive ratio, got {phase}, {text}")
        ratios = found.setdefault(case, {})
        if library in ratios:
            raise OptionError(f"{where}: expected one ratio of {library} for {', '.join(map(str, case))}, got another")
        ratios[library] = value
    return found
