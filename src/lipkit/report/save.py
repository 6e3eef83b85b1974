"""Put an evaluation into a run folder: everything the report is made from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lipkit.errors import RunError
from lipkit.evaluation import Evaluation
from lipkit.report.examples import save_examples
from lipkit.report.record import RECORD, Record, write_record
from lipkit.report.run_files import RADII

if TYPE_CHECKING:
    from lipkit.data import Split


def save_evaluation(
    folder: str | os.PathLike[str], evaluation: Evaluation, split: Split, record: Record, *, examples: int = 8
) -> None:
    """Write ``radii.csv``, ``examples.safetensors`` and, last, ``record.json`` into a run folder.

    Args:
        folder: the run folder; it must exist.
        evaluation: from `lipkit.evaluation.evaluate`.
        split: the samples that were evaluated.
        record: from `lipkit.report.record.from_evaluation`.
        examples: images kept of each group.

    Raises:
        RunError: the folder does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"expected a run folder, got {folder}: no such folder")
    evaluation.certificate.save_csv(folder / RADII)
    save_examples(folder, evaluation.certificate, split, examples)
    write_record(record, folder / RECORD)
