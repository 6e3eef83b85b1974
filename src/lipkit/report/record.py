"""The record of a run: one JSON file that holds every figure a report or a table needs.

Its fields are those of `lipkit.report.schema`. JSON has no NaN and no infinity: they are written as the strings "NaN",
"Infinity" and "-Infinity" and read back as numbers wherever the schema says number.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from pydantic import ValidationError

from lipkit.certificates import Certificate, RegressionCertificate
from lipkit.certificates.intervals import Share
from lipkit.errors import RunError
from lipkit.evaluation import Evaluation, Latency, RegressionEvaluation
from lipkit.files import MAX_TEXT, read_bytes, write_atomic
from lipkit.report.machine import hardware, versions
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
    OutputRecord,
    Record,
    RegressionRecord,
    RoundingRecord,
    SearchRecord,
    ShareRecord,
)

RECORD = "record.json"
# Inputs of more numbers (images) stay out of the record.
_MOST_NUMBERS = 64


def from_evaluation(
    evaluation: Evaluation,
    *,
    name: str,
    data: str,
    classes: Sequence[str] = (),
    **facts: Unpack[Facts],
) -> Record:
    """The record of a classification and of the run that led to it.

    Args:
        evaluation: from `lipkit.evaluation.evaluate`.
        name: of the run.
        data: name of the data set.
        classes: class names.
        facts: what else is known of the run, see `Facts`.
    """
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
            box=attack.box,
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

    Args:
        evaluation: from `lipkit.evaluation.evaluate_regression`.
        name: of the run.
        data: name of the data set.
        search: ``restarts``, ``steps`` and ``seed`` of the search for steep secants.
        facts: what else is known of the run, see `Facts`.
    """
    certificate, secant = evaluation.certificate, evaluation.secant
    columns = (
        evaluation.rmse,
        certificate.output_constants.tolist(),
        certificate.output_deviation.tolist(),
        evaluation.output_slopes,
    )
    short = secant.x.numel() <= _MOST_NUMBERS
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
            **search,
            x=secant.x.flatten().tolist() if short else [],
            y=secant.y.flatten().tolist() if short else [],
        ),
    )


class Facts(TypedDict, total=False):
    """What a record holds beside the evaluation.

    Attributes:
        train_samples: size of the training split.
        recipe: everything the run was started with, as plain values.
        seed: of the training.
        claimed: Lipschitz constant of the model before export (``lipschitz(model)``).
        parameters: number of trained parameters.
        times: seconds by name; those of the evaluation are added.
        device: where the training ran.
        latency: from `lipkit.evaluation.latency`.
    """

    train_samples: int | None
    recipe: Mapping[str, Any] | None
    seed: int | None
    claimed: float | None
    parameters: int | None
    times: Mapping[str, float] | None
    device: str
    latency: Latency | None


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
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "recipe": dict(facts.get("recipe") or {}),
        "versions": versions(),
        "seed": facts.get("seed"),
        "hardware": HardwareRecord(**dataclasses.asdict(hardware(facts.get("device", "cpu")))),
        "data": DataRecord(
            name=data,
            input_shape=certificate.input_shape,
            classes=list(classes),
            train_samples=facts.get("train_samples"),
            test_samples=len(certificate),
        ),
        "parameters": facts.get("parameters"),
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


def write_record(record: AnyRecord, path: str | os.PathLike[str]) -> None:
    """Write a record as indented JSON, atomically."""
    write_atomic(Path(path), record.model_dump_json(indent=2).encode() + b"\n")


def read_record(path: str | os.PathLike[str]) -> AnyRecord:
    """Read a record; ``path`` is the file or the run folder that holds ``record.json``.

    Raises:
        RunError: the file is missing, is not JSON, or is not a record of this major schema version.
    """
    path = Path(path)
    path = path / RECORD if path.is_dir() else path
    try:
        content = read_bytes(path, MAX_TEXT)
    except OSError as error:
        raise RunError(f"{path}: expected a record, got {error.strerror or error}") from None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: expected a JSON record, got {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("schema_version"), str):
        raise RunError(f"{path}: expected a record with a schema_version, got none")
    kind = RegressionRecord if found.get("task") == "regression" else Record
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def _rounding(certificate: Certificate | RegressionCertificate) -> RoundingRecord:
    """The evaluator of a certificate; raises ``OptionError`` where torch is not set as it was when it was made."""
    made = certificate.evaluator
    made.check()
    values = {key: value for key, value in dataclasses.asdict(made).items() if key != "name"}
    return RoundingRecord(rounding=certificate.rounding, evaluator=made.name, **values)


def _share(share: Share) -> ShareRecord:
    return ShareRecord(value=share.value, count=share.count, total=share.total, low=share.low, high=share.high)
