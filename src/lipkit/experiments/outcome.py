"""The end of a run: certify, attack or search, measure the latency, record, report; and displays of progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import lipkit
from lipkit import modules
from lipkit.data import Data, Split
from lipkit.evaluation import Attack, Evaluation, RegressionEvaluation, evaluate, evaluate_regression, latency
from lipkit.experiments.recipe import Recipe, to_yaml
from lipkit.files import write_atomic
from lipkit.report import Record, RegressionRecord, save_evaluation, write_report
from lipkit.report.curve import CURVE
from lipkit.report.examples import EXAMPLES
from lipkit.report.html import REPORT
from lipkit.report.record import PREDICTIONS, RECORD, Facts, from_evaluation, from_regression
from lipkit.report.run_files import CERTIFICATE, NETWORK
from lipkit.shown import Shown, figures
from lipkit.training import Progress
from lipkit.training.checkpoints import create


class Display:
    """Receives the progress of a run. This base class shows nothing."""

    def note(self, text: str) -> None:
        """Show one line."""

    def progress(self, event: Progress) -> None:
        """Show the progress of training."""


def duration(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> duration(7), duration(75), duration(3700), duration(float("nan"))
    ('0:07', '1:15', '1:01:40', '-:--')
    """
    if seconds != seconds:  # NaN
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


RECIPE, AGAIN = "recipe.yaml", "certify"
CHECKER = "lipkit_check.py"  # a module outside the package; every folder with a certificate gets a copy
WRITTEN = (RECORD, NETWORK, CERTIFICATE, CHECKER, EXAMPLES, PREDICTIONS, CURVE, REPORT)  # at the end of a run


@dataclass(frozen=True, repr=False)
class Outcome(Shown):
    """Folder, figures and record of a run that has ended.

    Attributes:
        folder: the run's folder; for a later certification, its folder inside the run's.
        metrics: figures by name: clean, certified(36/255), pgd(36/255), lipschitz, ... or test_mse, tightness, ...
        record: the record that holds these figures.
    """

    folder: Path
    metrics: Mapping[str, float]
    record: Record | RegressionRecord

    def describe(self) -> str:
        """The figures and their folder."""
        return f"{figures(self.metrics)}\n{self.folder}"


def finish(
    folder: Path, recipe: Recipe, network: modules.Network, data: Data, facts: Facts, display: Display,
    device: torch.device,
) -> Outcome:  # fmt: skip
    """Evaluate an exported network as the recipe says, and write record and report.

    Both go into the run's folder; a later certification gets a subfolder, ``certify-001``, with its recipe. If a
    certificate is disproved, a CertificateViolation is raised and nothing is written.
    """
    facts = {**facts, "latency": latency(network), "recipe": recipe.model_dump(mode="json")}
    section, split = recipe.certify, data.test
    search = {"restarts": section.search_restarts, "steps": section.search_steps, "seed": recipe.train.seed}
    record: Record | RegressionRecord
    found: Evaluation | RegressionEvaluation
    if recipe.task == "regression":
        display.note(f"certifying {len(split)} test samples, searching for steep secants from {search['restarts']}")
        found = evaluate_regression(
            network, split, delta=section.delta, batch_size=section.batch_size, device=device, **search
        )
    else:
        attacked = min(len(split), section.attack_samples or len(split)) if section.attack_eps else 0  # None: all
        display.note(f"certifying {len(split)} test samples, attacking {attacked}")
        # Decode once for evaluation, examples and certificate file: image files are decoded at every access.
        split = Split(*split.batch(slice(None)))
        attack = Attack(
            eps=section.attack_eps, steps=section.attack_steps, restarts=section.attack_restarts,
            samples=section.attack_samples, box=data.input_range, seed=recipe.train.seed,
        )  # fmt: skip
        found = evaluate(
            network, split, method=section.method, eps=section.eps, attack=attack, classes=data.classes,
            confidence=section.confidence, batch_size=section.batch_size, device=device,
            large_eps=data.input_range is not None,  # checked when the recipe was read
            progress=told(display),
        )  # fmt: skip
    target, name = folder, folder.name
    if (folder / RECORD).exists():  # the record is what a certification writes last
        target = create(folder, AGAIN)
        name = f"{folder.name}/{target.name}"
        write_atomic(target / RECIPE, to_yaml(recipe).encode())
    if isinstance(found, RegressionEvaluation):
        record = from_regression(found, name=name, data=data.name, search=search, **facts)
    else:
        record = from_evaluation(found, name=name, data=data.name, classes=data.classes, **facts)
        write_atomic(target / CHECKER, (Path(lipkit.__file__).parents[1] / CHECKER).read_bytes())
    save_evaluation(target, found, network, split, record)
    write_report(target)  # from the files just written, so that anybody can repeat it
    return Outcome(target, record.metrics(), record)


def told(display: Display) -> Callable[[str, int, int], None]:
    """A ``progress`` for `lipkit.certify` that notes the samples done and the time left, at most every ten seconds."""
    begun: dict[str, float] = {}
    noted = called = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal noted, called
        start = begun.setdefault(what, called)
        if (called := time.monotonic()) - noted >= 10 and done < total:
            noted, left = called, (called - start) / done * (total - done)
            display.note(f"{done} of {total} samples {what}, left {duration(left)}")

    return tell
