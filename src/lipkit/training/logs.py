"""Metrics for other tools: a CSV table in every run folder, TensorBoard where its package is installed."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lipkit.errors import OptionError
from lipkit.files import write_atomic

CSV, TENSORBOARD = "metrics.csv", "tensorboard"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each row under a line of names; what a row does not have is left empty.

    >>> print(csv_text([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25, "clean": 0.9}]), end="")
    epoch,loss,clean
    1,0.5,
    2,0.25,0.9
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_csv(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows to the run's ``metrics.csv``, atomically."""
    write_atomic(folder / CSV, csv_text(rows).encode())


class TensorBoard:
    """Scalars of each epoch as TensorBoard events in the run's folder ``tensorboard``.

    Args:
        folder: the run's folder.
        epochs_done: events of later epochs, which a resume repeats, are hidden.

    Raises:
        OptionError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, epochs_done: int = 0) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=epochs_done + 1)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write the finite numbers of one epoch's row, at step ``row["epoch"]``."""
        for name, value in row.items():
            if name != "epoch" and isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(name, value, row["epoch"])
        self._writer.flush()


class NoBoard:
    """Writes nothing."""

    def add(self, row: Mapping[str, Any]) -> None: ...


def board(folder: Path | None, wanted: bool, epochs_done: int) -> AbstractContextManager[TensorBoard | NoBoard]:
    """A `TensorBoard` if one is wanted, else what writes nothing."""
    return TensorBoard(folder, epochs_done) if wanted and folder is not None else nullcontext(NoBoard())


def require_tensorboard() -> None:
    """Raise OptionError unless the package tensorboard is installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"expected the package tensorboard for tensorboard=True (pip install tensorboard), got none: {error}"
        ) from error
