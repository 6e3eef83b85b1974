"""The record of a run: one JSON file that holds every figure a report or a table needs.

Its fields are those of `lipkit.report.schema`. JSON has no NaN and no infinity: they are written as the strings "NaN",
"Infinity" and "-Infinity" and read back as numbers wherever the schema says number.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from pydantic import ValidationError

import lipkit
from lipkit import modules
from lipkit.certificates import Certificate, RegressionCertificate
from lipkit.certificates.intervals import Share
from lipkit.errors import RunError
from lipkit.evaluation import Evaluation, Latency, RegressionEvaluation
from lipkit.files import MAX_TEXT, read_bytes, write_atomic
from lipkit.report.curve import curve_of, save_curve
from lipkit.report.examples import save_examples
from lipkit.report.run_files import RADII
from lipkit.report.schema import (
    AnyRecord,
    AttackedRecord,
    AttackRecord,
    CertifiedRecord,
    ClassRecord,
    DataRecord,
    HardwareRecord,
    LatencyRecord,
    LipschitzRecord,
    MeasurementRecord,
    OutputRecord,
    Record,
    RegressionRecord,
    RoundingRecord,
    SearchRecord,
    SeenRecord,
    ShareRecord,
)

if TYPE_CHECKING:
    from lipkit.data import Split

RECORD, PREDICTIONS = "record.json", "predictions.csv"
# Inputs of more numbers (images) stay out of the record.
_MOST_NUMBERS = 64


def from_evaluation(
    evaluation: Evaluation, *, name: str, data: str, classes: Sequence[str] = (), **facts: Unpack[Facts]
) -> Record:
    """The record of a classification and of the run that led to it."""
    certificate, attack = evaluation.certificate, evaluation.attack
    ignored = evaluation.certified_ignored or (None,) * len(evaluation.eps)
    return Record(
        **_common(name, data, certificate, facts, evaluation.times, classes),
        confidence=evaluation.confidence,
        clean=_share(evaluation.clean),
        certified=[
            CertifiedRecord(eps=eps, share=_share(share), ignored=None if other is None else _share(other))
            for eps, share, other in zip(evaluation.eps, evaluation.certified, ignored, strict=True)
        ],
        attacked=[
            AttackedRecord(eps=row.eps, share=_share(row.share), certified=_share(row.certified))
            for row in evaluation.attacked
        ],
        attack=AttackRecord(
            name="PGD l2, margin loss" if attack.name == "pgd" else f"{attack.name} {attack.norm}",
            steps=attack.steps,
            restarts=attack.restarts,
            samples=attack.samples,
            seed=attack.seed,
            box=None if attack.box == "auto" else attack.box,
            compared=evaluation.cross_check.compared,
            closest=evaluation.cross_check.closest,
        ),
        per_class=[
            ClassRecord(name=row.name, clean=_share(row.clean), certified=[_share(s) for s in row.certified])
            for row in evaluation.per_class
        ],
    )


def from_regression(
    evaluation: RegressionEvaluation, *, name: str, data: str, search: Mapping[str, int], **facts: Unpack[Facts]
) -> RegressionRecord:
    """The record of a regression and of the run that led to it.

    ``search`` holds ``restarts``, ``steps`` and ``seed`` of the search for the steepest pair of inputs.
    """
    certificate, found = evaluation.certificate, evaluation.search
    columns = (
        evaluation.rmse,
        certificate.output_constants.tolist(),
        certificate.output_deviation.tolist(),
        evaluation.output_slopes,
    )
    short = found.x.numel() <= _MOST_NUMBERS
    return RegressionRecord(
        **_common(name, data, certificate, facts, evaluation.times),
        mse=evaluation.mse,
        delta=certificate.delta,
        deviation=certificate.deviation,
        lower=evaluation.lower,
        tightness=evaluation.tightness,
        outputs=[
            OutputRecord(rmse=rmse, constant=constant, deviation=deviation, steepest=steepest)
            for rmse, constant, deviation, steepest in zip(*columns, strict=True)
        ],
        search=SearchRecord(
            **search, x=found.x.flatten().tolist() if short else [], y=found.y.flatten().tolist() if short else []
        ),
    )


class Facts(TypedDict, total=False):
    """Facts of a run that its record holds in addition to the evaluation.

    Attributes:
        train_samples: size of the training split.
        recipe: the complete recipe of the run, as plain values.
        seed: of the training.
        claimed: Lipschitz constant of the model before export (``lipschitz(model)``).
        parameters: number of trained parameters.
        seen: counts of steps, samples and epochs, from `seen`.
        times: seconds by name; those of the evaluation are added.
        device: of the training.
        latency: from `lipkit.evaluation.latency`.
        changed: dotted keys in which the recipe differs from the packaged one of the same name.
    """

    train_samples: int | None
    recipe: Mapping[str, Any] | None
    seed: int | None
    claimed: float | None
    parameters: int | None
    seen: SeenRecord | None
    times: Mapping[str, float] | None
    device: str
    latency: Latency | None
    changed: Sequence[str]


def _common(
    name: str,
    data: str,
    certificate: Certificate | RegressionCertificate,
    facts: Facts,
    times: Mapping[str, float],
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """The fields of `RunRecord`."""
    latency = facts.get("latency")
    return {
        "name": name,
        "created": now(),
        "recipe": dict(facts.get("recipe") or {}),
        "changed": list(facts.get("changed") or ()),
        "versions": versions(),
        "seed": facts.get("seed"),
        "hardware": hardware(facts.get("device", "cpu")),
        "data": DataRecord(
            name=data,
            input_shape=certificate.input_shape,
            classes=list(classes),
            train_samples=facts.get("train_samples"),
            test_samples=len(certificate),
        ),
        "parameters": facts.get("parameters"),
        "seen": facts.get("seen"),
        "lipschitz": LipschitzRecord(
            claimed=facts.get("claimed"),
            computed=certificate.constant,
            body=getattr(certificate, "body_constant", None),
            method=certificate.method,
            dtype=certificate.dtype,
        ),
        "rounding": _rounding(certificate),
        "network_sha256": certificate.network_sha256,
        "latency": None if latency is None else LatencyRecord(**dataclasses.asdict(latency)),
        "times": {**(facts.get("times") or {}), **times},
    }


def seen(history: Sequence[Mapping[str, Any]], train_samples: int) -> SeenRecord | None:
    """Steps, samples and pace of a training from ``Run.history``; None if a row (of an older version) lacks them.

    >>> seen([{"steps": 2, "samples": 100, "cpu_seconds": 0.5}], train_samples=50).samples_per_cpu_second
    200.0
    """
    if not history or not all({"steps", "samples", "cpu_seconds"} <= row.keys() for row in history):
        return None
    steps, samples, seconds = (sum(row[key] for row in history) for key in ("steps", "samples", "cpu_seconds"))
    return SeenRecord(
        steps=steps,
        samples=samples,
        epochs=round(samples / train_samples, 3),
        samples_per_cpu_second=round(samples / max(seconds, 1e-3), 1),
    )


def measurement_record(
    name: str, measure: str, options: Mapping[str, Any], seed: int, figures: Mapping[str, float], seconds: float
) -> MeasurementRecord:
    """The record of a measurement on this machine, made now.

    >>> measurement_record("a", "kernel_bounds", {}, 0, {"ratio": 1.0}, 0.1).metrics()
    {'ratio': 1.0}
    """
    return MeasurementRecord(
        name=name,
        created=now(),
        measure=measure,
        options=dict(options),
        seed=seed,
        figures=dict(figures),
        versions=versions(),
        hardware=hardware(),
        times={"measure": seconds},
    )


def write_record(record: AnyRecord, path: str | os.PathLike[str]) -> None:
    """Write a record as indented JSON, atomically."""
    write_atomic(Path(path), record.model_dump_json(indent=2).encode() + b"\n")


def read_record(path: str | os.PathLike[str]) -> AnyRecord:
    """Read the record of a run; ``path`` is the file or the run folder that holds ``record.json``.

    Raises:
        RunError: the file is missing, is not JSON, or is not a run's record of this major schema version.
    """
    record = read_any_record(path)
    if isinstance(record, MeasurementRecord):
        raise RunError(f"{path}: expected the record of a run, got that of the measurement {record.name}")
    return record


def read_any_record(path: str | os.PathLike[str]) -> AnyRecord | MeasurementRecord:
    """Read the record of a run or of a measurement; see `read_record`.

    Raises:
        RunError: there is no record, or not of this schema.
    """
    path = Path(path)
    path = path / RECORD if path.is_dir() else path
    try:
        found = json.loads(read_bytes(path, MAX_TEXT))
    except OSError as error:
        raise RunError(f"{path}: expected a record, got {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: expected a JSON record, got {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("schema_version"), str):
        raise RunError(f"{path}: expected a record with a schema_version, got none")
    kinds: dict[Any, type[AnyRecord | MeasurementRecord]]
    kinds = {"regression": RegressionRecord, "measurement": MeasurementRecord}
    task = found.get("task")
    try:
        return kinds.get(task if isinstance(task, str) else None, Record).model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def _rounding(certificate: Certificate | RegressionCertificate) -> RoundingRecord:
    """The rounding statement of a certificate; ``OptionError`` if torch's settings are not those of its evaluator."""
    made = certificate.evaluator
    made.check()
    values = {key: value for key, value in dataclasses.asdict(made).items() if key != "name"}
    return RoundingRecord(rounding=certificate.rounding, evaluator=made.name, **values)


def _share(share: Share) -> ShareRecord:
    return ShareRecord(value=share.value, **dataclasses.asdict(share))


def now() -> str:
    """The time of a record."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result.

    >>> sorted(versions())
    ['lipkit', 'numpy', 'python', 'scipy', 'torch']
    """
    found = {"python": platform.python_version()}
    for name in ("numpy", "scipy"):
        found[name] = importlib.metadata.version(name)
    # torch's metadata leaves out +cpu and +cu; lipkit may run from a source tree that is not installed
    return found | {"torch": str(torch.__version__), "lipkit": lipkit.__version__}


def hardware(device: str = "cpu") -> HardwareRecord:
    """This machine, as seen by a run on ``device``.

    >>> hardware().cores >= 1
    True
    """
    index = torch.device(device)
    cuda = index.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(index) if cuda else index.type
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return HardwareRecord(
        cpu=_processor(),
        cores=cores,
        device=name,
        platform=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "unknown"


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
        network: that was evaluated.
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
