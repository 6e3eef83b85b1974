"""The record of a run: one JSON file that holds every figure a report or a table needs.

Rule of the schema: later versions only add fields. A reader keeps fields that it does not know, and refuses a file
with another major version. JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity" and
"-Infinity" and read back as numbers wherever the schema says number.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lipkit.certificates.intervals import Share
from lipkit.errors import RunError
from lipkit.evaluation import Evaluation
from lipkit.files import write_atomic
from lipkit.report.machine import Hardware, hardware, versions

SCHEMA_VERSION = "1.0"
RECORD = "record.json"


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="strings")


class ShareRecord(_Model):
    """A share of samples with its Clopper-Pearson interval."""

    value: float
    count: int
    total: int
    low: float
    high: float


class CertifiedRecord(_Model):
    """Certified accuracy at one l2 radius (units of the input)."""

    eps: float
    share: ShareRecord


class AttackedRecord(_Model):
    """Accuracy under attack at one l2 radius, and the certified accuracy of the same samples."""

    eps: float
    share: ShareRecord
    certified: ShareRecord


class ClassRecord(_Model):
    """One class; ``certified`` runs in parallel with the record's list of certified radii."""

    name: str
    clean: ShareRecord
    certified: list[ShareRecord]


class AttackRecord(_Model):
    """The attack's settings, and its comparison with the certificates: smallest norm / radius of any example."""

    name: str = "PGD l2, margin loss"
    steps: int
    restarts: int
    samples: int | None
    seed: int
    box: tuple[float, float] | None
    compared: int
    closest: float


class LipschitzRecord(_Model):
    """``claimed`` by the model as trained; ``computed`` from the exported numbers: the one that certifies."""

    claimed: float | None
    computed: float
    body: float | None
    method: str
    dtype: str


class DataRecord(_Model):
    """What was trained and tested on."""

    name: str
    input_shape: tuple[int, ...]
    classes: list[str]
    train_samples: int | None
    test_samples: int


class HardwareRecord(_Model):
    """The machine: processor, usable cores, accelerator (or cpu)."""

    cpu: str
    cores: int
    device: str
    platform: str


class Record(_Model):
    """Everything a run reports. Times are seconds, shares are in [0, 1], radii l2 in units of the input."""

    schema_version: str = SCHEMA_VERSION
    name: str
    created: str
    recipe: dict[str, Any]
    versions: dict[str, str]
    seed: int | None
    hardware: HardwareRecord
    data: DataRecord
    parameters: int | None
    lipschitz: LipschitzRecord
    network_sha256: str
    confidence: float
    clean: ShareRecord
    certified: list[CertifiedRecord]
    attacked: list[AttackedRecord]
    attack: AttackRecord
    per_class: list[ClassRecord]
    times: dict[str, float] = Field(default_factory=dict)

    @field_validator("schema_version")
    @classmethod
    def _major(cls, value: str) -> str:
        if value.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
            raise ValueError(f"expected a record of schema version {SCHEMA_VERSION.split('.')[0]}, got {value}")
        return value


def from_evaluation(
    evaluation: Evaluation,
    *,
    name: str,
    data: str,
    classes: Sequence[str] = (),
    train_samples: int | None = None,
    recipe: Mapping[str, Any] | None = None,
    seed: int | None = None,
    claimed: float | None = None,
    parameters: int | None = None,
    times: Mapping[str, float] | None = None,
    device: str = "cpu",
) -> Record:
    """The record of an evaluation and of the run that led to it.

    Args:
        evaluation: from `lipkit.evaluation.evaluate`.
        name: of the run.
        data: name of the data set.
        classes: class names.
        train_samples: size of the training split.
        recipe: everything the run was started with, as plain values.
        seed: of the training.
        claimed: Lipschitz constant of the model before export (``lipschitz(model)``).
        parameters: number of trained parameters.
        times: seconds by name; those of the evaluation are added.
        device: where the training ran.
    """
    certificate, attack = evaluation.certificate, evaluation.attack
    return Record(
        name=name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        recipe=dict(recipe or {}),
        versions=versions(),
        seed=seed,
        hardware=_hardware(hardware(device)),
        data=DataRecord(
            name=data,
            input_shape=certificate.input_shape,
            classes=list(classes),
            train_samples=train_samples,
            test_samples=len(certificate),
        ),
        parameters=parameters,
        lipschitz=LipschitzRecord(
            claimed=claimed,
            computed=certificate.constant,
            body=certificate.body_constant,
            method=certificate.method,
            dtype=certificate.dtype,
        ),
        network_sha256=certificate.network_sha256,
        confidence=evaluation.confidence,
        clean=_share(evaluation.clean),
        certified=[
            CertifiedRecord(eps=eps, share=_share(share))
            for eps, share in zip(evaluation.eps, evaluation.certified, strict=True)
        ],
        attacked=[
            AttackedRecord(eps=row.eps, share=_share(row.share), certified=_share(row.certified))
            for row in evaluation.attacked
        ],
        attack=AttackRecord(
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
        times={**(times or {}), **evaluation.times},
    )


def write_record(record: Record, path: str | os.PathLike[str]) -> None:
    """Write a record as indented JSON, atomically."""
    write_atomic(Path(path), record.model_dump_json(indent=2).encode() + b"\n")


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read a record; ``path`` is the file or the run folder that holds ``record.json``.

    Raises:
        RunError: the file is missing, is not JSON, or is not a record of this major schema version.
    """
    path = Path(path)
    path = path / RECORD if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: expected a record, got {error.strerror or error}") from None
    try:
        found = json.loads(content)
    except ValueError as error:
        raise RunError(f"{path}: expected a JSON record, got {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("schema_version"), str):
        raise RunError(f"{path}: expected a record with a schema_version, got none")
    try:
        return Record.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def _share(share: Share) -> ShareRecord:
    return ShareRecord(value=share.value, count=share.count, total=share.total, low=share.low, high=share.high)


def _hardware(machine: Hardware) -> HardwareRecord:
    return HardwareRecord(**machine.__dict__)
