"""Files of a run folder besides the record: radii by sample, and metrics by epoch."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from lipkit.certificates.certificate_file import read_certificate
from lipkit.errors import RunError
from lipkit.files import read_bytes, read_text
from lipkit.text import printable
from lipkit.training.checkpoints import read_metrics

NETWORK, RADII = "network", "radii.csv"
PACKED = "certificate.jsonl.gz"


@dataclasses.dataclass(frozen=True, eq=False)
class Radii:
    """Columns of ``radii.csv``, (N,): ``correct`` bool, ``prediction`` int64, ``radius`` and ``margin`` float64."""

    correct: np.ndarray
    prediction: np.ndarray
    radius: np.ndarray
    margin: np.ndarray

    def __len__(self) -> int:
        return len(self.radius)

    def certified(self, eps: np.ndarray) -> np.ndarray:
        """Certified accuracy at each of the radii ``eps`` (M,): fraction of samples, correct and with a larger radius.

        >>> radius, margin = np.array([0.1, 0.3, 0.0]), np.array([1.0, 3.0, -1.0])
        >>> radii = Radii(np.array([True, True, False]), np.array([4, 2, 7]), radius, margin)
        >>> radii.certified(np.array([0.0, 0.1, 0.2]))
        array([0.66666667, 0.33333333, 0.33333333])
        """
        ordered = np.sort(self.radius[self.correct])  # a wrong prediction is certified at no radius
        return (len(ordered) - np.searchsorted(ordered, eps, side="right")) / max(len(self), 1)


def read_radii(folder: Path) -> Radii | None:
    """Read ``radii.csv`` as `lipkit.certificates.Certificate.save_csv` writes it; None if there is none.

    Networks of the package have a compressed certificate instead. ``RunError`` for a file of another form.
    """
    path = folder / RADII
    if not path.exists() and (folder / PACKED).exists():
        found = read_certificate(folder / PACKED).certificate
        correct = found.label == found.prediction
        return Radii(*(column.numpy() for column in (correct, found.prediction, found.radius, found.margin)))
    if not path.exists():
        return None
    kinds: dict[str, type] = {"correct": int, "prediction": int, "radius": float, "margin": float}
    columns: dict[str, np.ndarray] = {}
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
        for name, kind in kinds.items():
            columns[name] = np.array([kind(row[name]) for row in rows], dtype=kind)
    except (OSError, csv.Error, KeyError, ValueError, TypeError, OverflowError) as error:
        raise RunError(f"{path}: expected columns {', '.join(kinds)} of numbers, got {error!r}") from None
    if not np.isin(columns["correct"], (0, 1)).all() or not (columns["radius"] >= 0).all():
        raise RunError(f"{path}: expected correct to be 0 or 1 and radius >= 0")
    return Radii(**columns | {"correct": columns["correct"] == 1})


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Read the tensors of these names from a safetensors file; None if there is no file, RunError for a corrupt one."""
    if not path.exists():
        return None
    try:
        tensors = load(read_bytes(path))
        return {name: tensors[name] for name in names}
    except (SafetensorError, KeyError, OSError) as error:
        raise RunError(f"{path}: expected the tensors {', '.join(names)}, got {error!r}") from None


def read_series(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Numbers of ``metrics.jsonl`` by name: (epoch, value) pairs; lines without an epoch count from 1."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(read_metrics(folder), 1):
        epoch = row.get("epoch", number)
        if not _is_number(epoch):
            continue
        for name, value in row.items():
            if name != "epoch" and _is_number(value):
                series.setdefault(printable(name, 60), []).append((float(epoch), float(value)))
    return series


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
