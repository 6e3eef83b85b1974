"""Put an evaluation into a run folder: everything the report is made from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lipkit import modules
from lipkit.errors import RunError
from lipkit.evaluation import Evaluation, RegressionEvaluation
from lipkit.report.curve import curve_of, save_curve
from lipkit.report.examples import save_examples
from lipkit.report.record import RECORD, write_record
from lipkit.report.run_files import RADII
from lipkit.report.schema import Record, RegressionRecord

if TYPE_CHECKING:
    from lipkit.data import Split

PREDICTIONS = "predictions.csv"


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
    folder = _existing(folder)
    evaluation.certificate.save_csv(folder / RADII)
    save_examples(folder, evaluation.certificate, split, examples)
    write_record(record, folder / RECORD)


def save_regression(
    folder: str | os.PathLike[str],
    evaluation: RegressionEvaluation,
    network: modules.Network,
    split: Split,
    record: RegressionRecord,
) -> None:
    """Write ``predictions.csv``, ``curve.safetensors`` (inputs of one number) and, last, ``record.json`` into a run.

    Args:
        folder: the run folder; it must exist.
        evaluation: from `lipkit.evaluation.evaluate_regression`.
        network: what was evaluated.
        split: the samples that were evaluated.
        record: from `lipkit.report.record.from_regression`.

    Raises:
        RunError: the folder does not exist.
    """
    folder = _existing(folder)
    evaluation.certificate.save_csv(folder / PREDICTIONS)
    curve = curve_of(network, evaluation, split)
    if curve is not None:
        save_curve(folder, curve)
    write_record(record, folder / RECORD)


def _existing(folder: str | os.PathLike[str]) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"expected a run folder, got {folder}: no such folder")
    return folder
