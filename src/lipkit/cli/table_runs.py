"""The runs of a table: which there are, which are missing, and how to train those, several at a time.

Every run has a folder of its own, ``OUT/TABLE/ROW-seedN-HASH``, named by the row, the seed and its whole recipe, so
that a changed recipe never passes for the one before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from lipkit.cli import pipeline
from lipkit.cli.console import Display
from lipkit.cli.tables import Row, Table
from lipkit.report import Record, RegressionRecord, read_record
from lipkit.report.record import RECORD
from lipkit.training.recipe import Recipe, load_recipe, to_yaml
from lipkit.training.run_folder import SETTINGS


@dataclass(frozen=True)
class TableRun:
    """One training of a row of a table."""

    row: Row
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def done(self) -> bool:
        """Whether the run has a record: it is written last."""
        return (self.folder / RECORD).is_file()

    @property
    def begun(self) -> bool:
        """Whether there is something to resume."""
        return (self.folder / pipeline.RECIPE).is_file() and (self.folder / SETTINGS).is_file()


def plan(table: Table, out: Path, overrides: Sequence[str] = (), seeds: int | None = None) -> list[TableRun]:
    """Every run of the table, row by row, each with its recipe and its folder under ``out``.

    Raises:
        RecipeError: an override does not fit a recipe.
    """
    runs = []
    for row in table.rows:
        recipe = load_recipe(row.recipe, [*row.overrides, *overrides])
        first = recipe.train.seed
        for seed in range(first, first + (seeds or table.seeds)):
            own = pipeline.seeded(recipe, seed)
            digest = hashlib.sha256(to_yaml(own).encode()).hexdigest()[:8]
            runs.append(TableRun(row, seed, own, out / f"{slug(row.label)}-seed{seed}-{digest}"))
    return runs


def slug(label: str) -> str:
    """A label as part of a folder's name.

    >>> slug("sandwich, gamma 1")
    'sandwich-gamma-1'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-").lower()


def train_missing(runs: Sequence[TableRun], *, workers: int, display: Display) -> None:
    """Train the runs that have no record, resuming those that were cut.

    Args:
        runs: from `plan`.
        workers: processes at a time, each on one thread; 1 trains in this process, on torch's threads.
        display: where to report.
    """
    missing = [run for run in runs if not run.done]
    display.note(f"{len(runs) - len(missing)} of {len(runs)} runs are there, {len(missing)} to train")
    if workers == 1 or len(missing) <= 1:
        for run in missing:
            display.note(f"{run.row.label}, seed {run.seed}")
            train_run(run, display)
        return
    # A fresh interpreter for each worker: a forked one would inherit torch's thread pool, in an unknown state.
    with ProcessPoolExecutor(min(workers, len(missing)), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        waiting = {pool.submit(train_run, run): run for run in missing}
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                future.result()
                run = waiting[future]
                display.note(f"{number}/{len(missing)}  {run.row.label}, seed {run.seed}: {_shown(run)}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_run(run: TableRun, display: Display | None = None) -> None:
    """Train one run, from its last checkpoint if it has begun."""
    if run.begun:
        pipeline.train(run.recipe, resume=run.folder, display=display)
    else:
        pipeline.train(run.recipe, folder=run.folder, display=display)


def records(runs: Sequence[TableRun], row: Row) -> list[Record | RegressionRecord]:
    """The records of a row's runs that are there, read from their files."""
    return [read_record(run.folder) for run in runs if run.row == row and run.done]


def _shown(run: TableRun) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in read_record(run.folder).metrics().items())
