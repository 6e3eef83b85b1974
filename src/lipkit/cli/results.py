"""What a run ends with: certify, attack or search, measure the latency, record, report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lipkit import plain
from lipkit.certificates.certificate_file import describe, write_certificate
from lipkit.cli.console import Display
from lipkit.data import Data, Split
from lipkit.evaluation import evaluate, evaluate_regression, latency
from lipkit.report import Record, RegressionRecord, save_evaluation, save_regression, write_report
from lipkit.report.record import Facts, from_evaluation, from_regression
from lipkit.training.recipe import Recipe

CERTIFICATE = "certificate.jsonl"


@dataclass(frozen=True)
class Outcome:
    """What a run ended with.

    Attributes:
        folder: the run's folder.
        metrics: its figures by name: clean, certified(36/255), pgd(36/255), lipschitz, ... or test_mse, tightness, ...
        record: the record they are in.
    """

    folder: Path
    metrics: Mapping[str, float]
    record: Record | RegressionRecord | None


def finish(
    folder: Path,
    recipe: Recipe,
    network: plain.Network,
    data: Data,
    facts: Facts,
    display: Display,
    device: torch.device,
) -> Outcome:
    """Evaluate an exported network as the recipe says, and write record and report into the run's folder.

    Raises:
        CertificateViolation: the certificate was disproved.
    """
    facts = {**facts, "latency": latency(network), "recipe": recipe.plain()}
    certify = _regression if recipe.task == "regression" else _classification
    outcome = certify(folder, recipe, network, data, facts, display, device)
    write_report(folder)
    return outcome


def _classification(
    folder: Path,
    recipe: Recipe,
    network: plain.Network,
    data: Data,
    facts: Facts,
    display: Display,
    device: torch.device,
) -> Outcome:
    section = recipe.certify
    attacked = min(len(data.test), section.attack_samples or len(data.test))
    display.note(f"certifying {len(data.test)} test samples, attacking {attacked}")
    # Read once for evaluation, examples and certificate file: image files are decoded at every access.
    x, y = data.test.batch(slice(None))
    test = Split(x, y)
    evaluation = evaluate(
        network,
        test,
        eps=section.eps,
        attack_eps=section.attack_eps,
        attack_steps=section.attack_steps,
        attack_restarts=section.attack_restarts,
        attack_samples=section.attack_samples,
        classes=data.classes,
        box=_box(data),
        confidence=section.confidence,
        batch_size=section.batch_size,
        seed=recipe.train.seed,
        device=device,
    )
    record = from_evaluation(evaluation, name=folder.name, data=data.name, classes=data.classes, **facts)
    save_evaluation(folder, evaluation, test, record)
    write_certificate(describe(evaluation.certificate, network, x, y, data.name), folder / CERTIFICATE)
    return Outcome(folder, record.metrics(), record)


def _regression(
    folder: Path,
    recipe: Recipe,
    network: plain.Network,
    data: Data,
    facts: Facts,
    display: Display,
    device: torch.device,
) -> Outcome:
    section = recipe.certify
    search = {"restarts": section.search_restarts, "steps": section.search_steps, "seed": recipe.train.seed}
    display.note(f"certifying {len(data.test)} test samples, searching for steep secants from {search['restarts']}")
    evaluation = evaluate_regression(
        network, data.test, delta=section.delta, batch_size=section.batch_size, device=device, **search
    )
    record = from_regression(evaluation, name=folder.name, data=data.name, search=search, **facts)
    save_regression(folder, evaluation, network, data.test, record)
    return Outcome(folder, record.metrics(), record)


def _box(data: Data) -> tuple[float, float] | None:
    """Where attacks stay: images are in [0, 1], other inputs have no limits."""
    return (0.0, 1.0) if len(data.input_shape) == 3 else None
