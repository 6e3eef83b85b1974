"""The schema of records, one class for each task.

Later versions only add fields. A reader keeps unknown fields, and refuses a file with another major version.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lipkit.attacks import ATTACKS
from lipkit.evaluation import Latency
from lipkit.text import format_radius

SCHEMA_VERSION = "1.0"


class _Model(BaseModel):
    # from_attributes: records are made from result objects, whose attributes have the names of the fields
    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="strings", from_attributes=True)


class ShareRecord(_Model):
    """A fraction of samples with its Clopper-Pearson interval."""

    value: float
    count: int
    total: int
    low: float
    high: float


class CertifiedRecord(_Model):
    """Certified accuracy at one l2 radius (units of the input); ``ignored`` neglects rounding errors."""

    eps: float
    share: ShareRecord
    ignored: ShareRecord | None = None


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
    """The attack's settings, and its comparison with the certificates: ``closest`` is the smallest norm / radius."""

    name: str = "PGD l2, margin loss"
    steps: int | None
    restarts: int | None
    samples: int | None
    seed: int
    box: tuple[float, float] | None
    compared: int
    closest: float  # infinite if nothing was compared

    @property
    def short(self) -> str:
        """The attack's name in `lipkit.attacks.ATTACKS`, or "attack": the prefix of its figures in `Record.metrics`."""
        word = self.name.partition(" ")[0].lower()
        return word if word in ATTACKS else "attack"


class LipschitzRecord(_Model):
    """Lipschitz constants: ``claimed`` by the trained model; ``computed`` from the export, used by certificates."""

    claimed: float | None
    computed: float
    body: float | None  # constant of the layers before the last linear one
    method: str  # of the radii
    dtype: str  # of the exported numbers


class RoundingRecord(_Model):
    """The treatment of rounding in certificates, and the evaluator they hold for (`lipkit.modules`)."""

    rounding: str
    evaluator: str
    dtype: str
    block: int | None  # terms that are summed at a time
    device: str
    torch: str  # its version
    settings: dict[str, str]  # arithmetic settings of torch


class DataRecord(_Model):
    """The data set, and the sizes of its training and test split."""

    name: str
    input_shape: tuple[int, ...]
    classes: list[str]
    train_samples: int | None
    test_samples: int


class HardwareRecord(_Model):
    """The machine, as seen by the process that wrote the record; ``threads`` of torch are None in old records."""

    cpu: str
    cores: int
    device: str
    platform: str
    threads: int | None = None


class SeenRecord(_Model):
    """Counts of a training: optimiser steps, samples and epochs, and samples per second of one process' CPU time."""

    steps: int
    samples: int
    epochs: float
    samples_per_cpu_second: float


class Versioned(_Model):
    """A record that states the version of its schema."""

    schema_version: str = SCHEMA_VERSION

    @field_validator("schema_version")
    @classmethod
    def _major(cls, value: str) -> str:
        if value.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
            raise ValueError(f"expected a record of schema version {SCHEMA_VERSION.split('.')[0]}, got {value}")
        return value


class RunRecord(Versioned):
    """The figures of a run of any task. Times are seconds.

    ``changed`` are keys of the recipe that differ from the packaged one of its name. ``further`` are figures measured
    after the run, ``after`` the options of those measurements. ``seen`` is None in records before 26 November 2026.
    """

    name: str
    created: str
    recipe: dict[str, Any]
    changed: list[str] = Field(default_factory=list)
    versions: dict[str, str]
    seed: int | None
    hardware: HardwareRecord
    data: DataRecord
    parameters: int | None
    seen: SeenRecord | None = None
    lipschitz: LipschitzRecord
    rounding: RoundingRecord | None = None
    network_sha256: str
    latency: Latency | None = None
    times: dict[str, float] = Field(default_factory=dict)
    further: dict[str, float] = Field(default_factory=dict)
    after: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Record(RunRecord):
    """The record of a classification. Accuracies are in [0, 1], radii are l2 norms in units of the input."""

    task: Literal["classification"] = "classification"
    confidence: float
    clean: ShareRecord
    certified: list[CertifiedRecord]
    attacked: list[AttackedRecord]
    attack: AttackRecord
    per_class: list[ClassRecord]

    def metrics(self) -> dict[str, float]:
        """Flat numbers by name: ``clean``, ``certified(36/255)``, ``pgd(36/255)`` or another attack, ``lipschitz``."""
        return {name: share.value for name, share in self.shares().items()} | {"lipschitz": self.lipschitz.computed}

    def shares(self) -> dict[str, ShareRecord]:
        """Those figures of `metrics` that are fractions of samples, with their intervals."""
        result = {"clean": self.clean}
        result |= {f"certified({format_radius(row.eps)})": row.share for row in self.certified}
        return result | {f"{self.attack.short}({format_radius(row.eps)})": row.share for row in self.attacked}


class OutputRecord(_Model):
    """One output of a regression: its error, the constant proved for it alone, the steepest slope seen."""

    rmse: float
    constant: float
    deviation: float
    steepest: float


class SearchRecord(_Model):
    """The search for a steep slope: its settings, and the two inputs of the steepest one."""

    restarts: int
    steps: int
    seed: int
    x: list[float] = Field(default_factory=list)
    y: list[float] = Field(default_factory=list)


class RegressionRecord(RunRecord):
    """The record of a regression. ``lower`` is the steepest slope found, ``tightness`` ``lower / lipschitz.computed``.

    Deviations are the largest changes of the outputs for an input that moves by ``delta`` (l2, units of the input).
    """

    task: Literal["regression"] = "regression"
    mse: float
    delta: float
    deviation: float
    lower: float
    tightness: float
    outputs: list[OutputRecord]
    search: SearchRecord

    def metrics(self) -> dict[str, float]:
        """Flat numbers by name: ``test_mse``, ``lipschitz``, ``lower``, ``tightness``.

        If the model claims a constant, also ``reached``: ``lower / claimed`` (an export may prove a smaller one).
        """
        computed, claimed = self.lipschitz.computed, self.lipschitz.claimed
        found = {"test_mse": self.mse, "lipschitz": computed, "lower": self.lower, "tightness": self.tightness}
        return found | ({"reached": self.lower / claimed} if claimed else {})


AnyRecord = Record | RegressionRecord
