"""What a report reads from a run folder besides the record: radii by sample, and metrics by epoch."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np

from lipkit.errors import RunError
from lipkit.training.run_folder import read_metrics

RADII = "radii.csv"


@dataclasses.dataclass(frozen=True, eq=False)
class Radii:
    """The columns of ``radii.csv`` that curves need: (N,) bool and (N,) float64."""

    correct: np.ndarray
    radius: np.ndarray

    def certified(self, eps: np.ndarray) -> np.ndarray:
        """Certified accuracy at each of the radii ``eps`` (M,): share of samples, correct with a radius above it.

        >>> Radii(np.array([True, True, False]), np.array([0.1, 0.3, 0.0])).certified(np.array([0.0, 0.1, 0.2]))
        array([0.66666667, 0.33333333, 0.33333333])
        """
        ordered = np.sort(self.radius[self.correct])
        return (len(ordered) - np.searchsorted(ordered, eps, side="right")) / max(len(self.radius), 1)


def read_radii(folder: Path) -> Radii | None:
    """Read ``radii.csv`` as `lipkit.certificates.Certificate.save_csv` writes it; None if there is none.

    Raises:
        RunError: a column is missing or a cell is not a number.
    """
    path = folder / RADII
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        try:
            cells = [(int(row["correct"]), float(row["radius"])) for row in rows]
        except (KeyError, ValueError, TypeError) as error:
            raise RunError(f"{path}: expected columns correct and radius of numbers, got {error!r}") from None
    if any(correct not in (0, 1) or math.isnan(radius) or radius < 0 for correct, radius in cells):
        raise RunError(f"{path}: expected correct to be 0 or 1 and radius >= 0")
    correct, radius = zip(*cells, strict=True) if cells else ((), ())
    return Radii(np.array(correct, dtype=bool), np.array(radius, dtype=np.float64))


def read_series(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Numbers of ``metrics.jsonl`` by name: (epoch, value) pairs; lines without an epoch count from 1."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(read_metrics(folder), 1):
        epoch = row.get("epoch", number)
        if not _is_number(epoch):
            continue
        for name, value in row.items():
            if name != "epoch" and _is_number(value):
                series.setdefault(name, []).append((float(epoch), float(value)))
    return series


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
