"""Layers of other libraries: those of orthogonium and deel-torchlip, where installed, and figures read from a table.

None of them is a dependency of lipkit. Figures of what pip does not bring are measured elsewhere: a file of
comma-separated values with the columns of :data:`COLUMNS`, by default `others.csv`.
"""

from __future__ import annotations

import copy
import csv
import importlib
import importlib.metadata
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.shapes import PHASES, Shape, parse
from torch import nn
from torch.nn.utils import parametrize

from lipkit.errors import OptionError
from lipkit.files import read_text

COLUMNS = ("library", "family", "shape", "batch", "phase", "ratio")
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


# (library, family of lipkit) -> module and class; all take the arguments of nn.Conv2d.
LAYERS = {
    ("orthogonium", "cayley"): ("orthogonium.legacy.cayley_ortho_conv", "Cayley"),
    ("orthogonium", "soc"): ("orthogonium.layers.conv.adaptiveSOC", "AdaptiveSOCConv2d"),
    ("orthogonium", "bcop"): ("orthogonium.layers.conv.AOC", "AdaptiveOrthoConv2d"),
    ("orthogonium", "aol"): ("orthogonium.layers.conv.AOL.aol", "AOLConv2D"),
    ("torchlip", "rko"): ("deel.torchlip", "SpectralConv2d"),
}
LIBRARIES = {"orthogonium": "orthogonium", "torchlip": "deel-torchlip"}


def installed() -> dict[str, str]:
    """Versions of the libraries that are installed, by name.

    >>> set(installed()) <= {"orthogonium", "torchlip"}
    True
    """
    found = {}
    for name, distribution in LIBRARIES.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def build(library: str, family: str, shape: Shape) -> nn.Module:
    """The layer of that library that comes closest to a family: circular, kernel 3, its own way of striding.

    Raises:
        LookupError: it has none. Otherwise whatever that library raises.
    """
    module, name = LAYERS[library, family]
    make: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    if name == "Cayley":  # halves the kernel of a strided layer by itself; its padding is that of the transform
        strided = {"stride": shape.stride} if shape.stride > 1 else {}
        return make(shape.cin, shape.cout, kernel_size=3, **strided)
    # The kernel of orthogonium's SOC grows with its exponential, and so does the padding that keeps the size.
    padding = "same" if shape.stride == 1 and library == "orthogonium" else 1
    return make(shape.cin, shape.cout, kernel_size=3, stride=shape.stride, padding=padding, padding_mode="circular")


def evaluated(layer: nn.Module) -> nn.Module:
    """What that library's documentation recommends for evaluation: constant weights where it knows how."""
    frozen = copy.deepcopy(layer).eval()
    export: Any = getattr(frozen, "vanilla_export", None)
    if export is not None:
        plain: nn.Module = export()
        return plain.eval()
    if parametrize.is_parametrized(frozen):
        for name in list(frozen.parametrizations):  # type: ignore[arg-type]
            parametrize.remove_parametrizations(frozen, name)
    return frozen
