"""The record of a run: one JSON file that holds every figure a report or a table needs.

Its fields are those of `lipkit.report.schema`. JSON has no NaN and no infinity: they are written as the strings "NaN",
"Infinity" and "-Infinity" and read back as numbers where the schema has a number.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from pydantic import ValidationError

import lipkit
from lipkit import modules
from lipkit.certificates.certificate_file import describe, write_certificate
from lipkit.data import Split
from lipkit.errors import RunError
from lipkit.evaluation import Evaluation, Latency, RegressionEvaluation
from lipkit.files import write_atomic
from lipkit.report.curve import CURVE, curve_of
from lipkit.report.examples import save_examples
from lipkit.report.run_files import CERTIFICATE, write_tensors
from lipkit.report.schema import AnyRecord, HardwareRecord, Record, RegressionRecord, SeenRecord
from lipkit.text import printable
from lipkit.training.checkpoints import read_json

RECORD, PREDICTIONS = "record.json", "predictions.csv"
# Larger inputs, such as images, are not written to the record.
_MOST_NUMBERS = 64


def from_evaluation(
    evaluation: Evaluation, *, name: str, data: str, classes: Sequence[str] = (), **facts: Unpack[Facts]
) -> Record:
    """The record of a classification: its evaluation and the facts of the run."""
    attack, check = evaluation.attack, evaluation.cross_check
    found = {
        "confidence": evaluation.confidence,
        "clean": evaluation.clean,
        "certified": [
            {"eps": eps, "share": share, "ignored": other}
            for eps, share, other in zip(
                evaluation.eps, evaluation.certified, evaluation.certified_ignored, strict=True
            )
        ],
        "attacked": evaluation.attacked,
        "attack": {
            "name": "PGD l2, margin loss" if attack.name == "pgd" else f"{attack.name} {attack.norm}",
            **{key: getattr(attack, key) for key in ("steps", "restarts", "samples", "seed")},
            "box": None if attack.box == "auto" else attack.box,
            "compared": check.compared,
            "closest": check.closest,
        },
        "per_class": evaluation.per_class,
    }
    return Record.model_validate(_common(name, data, evaluation, facts, classes) | found)


def from_regression(
    evaluation: RegressionEvaluation, *, name: str, data: str, search: Mapping[str, int], **facts: Unpack[Facts]
) -> RegressionRecord:
    """The record of a regression; ``search`` holds ``restarts``, ``steps`` and ``seed`` of the search."""
    certificate, pair = evaluation.certificate, evaluation.search
    columns = {
        "rmse": evaluation.rmse,
        "constant": certificate.output_constants.tolist(),
        "deviation": certificate.output_deviation.tolist(),
        "steepest": evaluation.output_slopes,
    }
    short = pair.x.numel() <= _MOST_NUMBERS  # the pair itself
    found = {
        "mse": evaluation.mse,
        "delta": certificate.delta,
        "deviation": certificate.deviation,
        "lower": evaluation.lower,
        "tightness": evaluation.tightness,
        "outputs": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        "search": {**search, **({"x": pair.x.flatten().tolist(), "y": pair.y.flatten().tolist()} if short else {})},
    }
    return RegressionRecord.model_validate(_common(name, data, evaluation, facts) | found)


class Facts(TypedDict, total=False):
    """Facts of a run that its record holds in addition to the evaluation."""

    train_samples: int | None  # size of the training split
    recipe: Mapping[str, Any] | None  # complete, as plain values
    seed: int | None  # of the training
    claimed: float | None  # Lipschitz constant of the model before export
    parameters: int | None  # number of trained parameters
    seen: SeenRecord | None  # from `seen`
    times: Mapping[str, float] | None  # seconds by name; those of the evaluation are added
    device: str  # of the training
    latency: Latency | None  # from `lipkit.evaluation.latency`
    changed: Sequence[str]  # dotted keys in which the recipe differs from the packaged one of the same name


def _common(
    name: str, data: str, evaluation: Evaluation | RegressionEvaluation, facts: Facts, classes: Sequence[str] = ()
) -> dict[str, Any]:
    """The fields that the records of both tasks share: those of `RunRecord`."""
    certificate = evaluation.certificate
    certificate.evaluator.check()  # refuses other settings of torch than the evaluator's
    evaluator = dataclasses.asdict(certificate.evaluator)
    return {
        "name": name,
        "created": now(),
        "recipe": facts.get("recipe") or {},
        "changed": facts.get("changed") or (),
        "versions": versions(),
        "hardware": hardware(facts.get("device", "cpu")),
        "data": {
            "name": data,
            "input_shape": certificate.input_shape,
            "classes": classes,
            "train_samples": facts.get("train_samples"),
            "test_samples": len(certificate),
        },
        **{key: facts.get(key) for key in ("seed", "parameters", "seen", "latency")},
        "lipschitz": {
            "claimed": facts.get("claimed"),
            "computed": certificate.constant,
            "body": getattr(certificate, "body_constant", None),
            "method": certificate.method,
            "dtype": certificate.dtype,
        },
        "rounding": {"rounding": certificate.rounding, "evaluator": evaluator.pop("name"), **evaluator},
        "network_sha256": certificate.network_sha256,
        "times": {**(facts.get("times") or {}), **evaluation.times},
    }


def seen(history: Sequence[Mapping[str, Any]], train_samples: int) -> SeenRecord | None:
    """Steps, samples and pace of a training from ``Run.history``; None if a row (of an older version) lacks them."""
    if not history or not all({"steps", "samples", "cpu_seconds"} <= row.keys() for row in history):
        return None
    steps, samples, seconds = (sum(row[key] for row in history) for key in ("steps", "samples", "cpu_seconds"))
    pace = round(samples / max(seconds, 1e-3), 1)  # cpu_seconds have three decimals
    return SeenRecord(
        steps=steps, samples=samples, epochs=round(samples / train_samples, 3), samples_per_cpu_second=pace
    )


def write_record(record: AnyRecord, path: str | os.PathLike[str]) -> None:
    """Write a record as indented JSON, atomically."""
    write_atomic(Path(path), record.model_dump_json(indent=2).encode() + b"\n")


# Task -> the record of a run of this task.
RUNS: Mapping[str, type[AnyRecord]] = {"classification": Record, "regression": RegressionRecord}


def read_record(path: str | os.PathLike[str], kinds: Mapping[str, Any] = RUNS) -> AnyRecord:
    """Read the record of a run from its file or folder; ``RunError`` if there is none of this major schema version.

    ``kinds`` may name other tasks, and the schemas of their records.
    """
    path = Path(path)
    path = path / RECORD if path.is_dir() else path
    found = read_json(path)
    if not isinstance(found.get("schema_version"), str):
        raise RunError(f"{path}: expected a record with a schema_version, got none")
    task = str(found.get("task", "classification"))  # the oldest records have no task
    if task not in kinds:
        got = " ".join(printable(part, 60) for part in (task, found.get("name")))
        raise RunError(f"{path}: expected the record of a run, got that of the {got}")
    try:
        return kinds[task].model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))  # the dotted key
        raise RunError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def now() -> str:
    """The present time in UTC, as records hold it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results."""
    found = {name: importlib.metadata.version(name) for name in ("numpy", "scipy")}
    found["python"] = platform.python_version()
    # From the modules: torch's metadata lack +cpu and +cu, and lipkit may not be installed.
    return found | {"torch": str(torch.__version__), "lipkit": lipkit.__version__}


def hardware(device: str = "cpu") -> HardwareRecord:
    """This machine, as seen by a run on ``device``."""
    index = torch.device(device)  # cuda or cuda:1
    cuda = index.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(index) if cuda else index.type
    # The cores that this process may use, if the system tells.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine, cpu = platform.machine(), platform.processor() or platform.machine() or "unknown"
    with suppress(OSError):  # not Linux
        models = re.findall(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = " ".join(models[0].split()) if models else cpu
    system, threads = f"{platform.system()} {machine}", torch.get_num_threads()
    return HardwareRecord(cpu=cpu, cores=cores, device=name, platform=system, threads=threads)


def save_evaluation(
    folder: str | os.PathLike[str], evaluation: Evaluation | RegressionEvaluation, network: modules.Network,
    split: Split, record: AnyRecord,
) -> None:  # fmt: skip
    """Write the files of an evaluation and, last, ``record.json`` into a run folder, which must exist.

    A classification has ``certificate.jsonl`` and ``examples.safetensors``, a regression ``predictions.csv`` and, for
    scalar inputs, ``curve.safetensors``.

    Args:
        evaluation: of ``network`` on the samples of ``split``.
        record: its record, from `from_evaluation` or `from_regression`.

    Raises:
        RunError: the folder does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"expected a run folder, got {folder}: no such folder")
    if isinstance(evaluation, RegressionEvaluation):
        evaluation.certificate.save_csv(folder / PREDICTIONS)
        curve = curve_of(network, evaluation, split)
        if curve is not None:
            write_tensors(folder / CURVE, vars(curve))
    else:
        file = describe(evaluation.certificate, network, *split.batch(slice(None)), record.data.name)
        write_certificate(file, folder / CERTIFICATE)
        save_examples(folder, evaluation.certificate, split)
    write_record(record, folder / RECORD)
