"""The record of a measurement that is no training: figures by name, and how they were made."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from lipkit.errors import RunError
from lipkit.files import MAX_TEXT, read_bytes
from lipkit.report.machine import hardware, versions
from lipkit.report.record import RECORD, AnyRecord, read_record
from lipkit.report.schema import SCHEMA_VERSION, HardwareRecord, _Model


class MeasurementRecord(_Model):
    """What was measured, with which options, and the figures. Times are seconds."""

    task: Literal["measurement"] = "measurement"
    schema_version: str = SCHEMA_VERSION
    name: str
    created: str
    measure: str
    options: dict[str, Any]
    seed: int
    figures: dict[str, float]
    versions: dict[str, str]
    hardware: HardwareRecord
    times: dict[str, float] = Field(default_factory=dict)

    @field_validator("schema_version")
    @classmethod
    def _major(cls, value: str) -> str:
        if value.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
            raise ValueError(f"expected a record of schema version {SCHEMA_VERSION.split('.')[0]}, got {value}")
        return value

    def metrics(self) -> dict[str, float]:
        """The figures by name."""
        return dict(self.figures)


def measurement_record(
    name: str, measure: str, options: Mapping[str, Any], seed: int, figures: Mapping[str, float], seconds: float
) -> MeasurementRecord:
    """The record of a measurement on this machine, made now.

    >>> measurement_record("a", "kernel_bounds", {}, 0, {"ratio": 1.0}, 0.1).metrics()
    {'ratio': 1.0}
    """
    return MeasurementRecord(
        name=name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        measure=measure,
        options=dict(options),
        seed=seed,
        figures=dict(figures),
        versions=versions(),
        hardware=HardwareRecord(**dataclasses.asdict(hardware())),
        times={"measure": seconds},
    )


def read_any_record(path: str | os.PathLike[str]) -> AnyRecord | MeasurementRecord:
    """Read the record of a run or of a measurement; see `lipkit.report.read_record`.

    Raises:
        RunError: there is no record, or not of this schema.
    """
    file = Path(path)
    file = file / RECORD if file.is_dir() else file
    try:
        found = json.loads(read_bytes(file, MAX_TEXT))
    except (OSError, ValueError, RecursionError):
        return read_record(file)  # which says what is wrong
    if not isinstance(found, dict) or found.get("task") != "measurement":
        return read_record(file)
    try:
        return MeasurementRecord.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
