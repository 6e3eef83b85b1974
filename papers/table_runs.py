"""Plans the runs of a table, makes the missing ones, several at a time, and prints their figures beside the paper's.

Every run has its own folder, ``OUT/TABLE/ROW-seedN-HASH``. The hash is of the whole recipe, so a changed recipe gets a
new folder. A run that another table has already made is reused.
"""

import functools
import hashlib
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from lipkit import modules
from lipkit.certificates.intervals import clopper_pearson
from lipkit.errors import RunError
from lipkit.experiments import run as pipeline
from lipkit.experiments.build import load_data
from lipkit.experiments.recipe import Recipe, load_recipe, seeded, to_yaml
from lipkit.experiments.run import Display
from lipkit.files import MAX_TEXT, read_bytes, write_atomic
from lipkit.memory import keep_freed_memory
from lipkit.report.record import RECORD, RUNS, AnyRecord, Record, hardware, now, read_record, versions, write_record
from lipkit.report.schema import HardwareRecord, Versioned
from lipkit.text import table as aligned
from lipkit.training.checkpoints import SETTINGS
from lipkit.training.options import PLACEMENT
from papers import measures
from papers.measures.trained import ATTACKED
from papers.tables import NAMES, SCALES, STAND_INS, Row, Scale, Table, is_fraction


@dataclass(frozen=True)
class TableRun:
    """One training, or one measurement, of a row of a table."""

    row: Row
    scale: Scale
    seed: int
    out: Path  # folder of the table's runs
    recipe: Recipe | None = None  # of the training; None for a measurement
    options: Mapping[str, Any] = field(default_factory=dict)  # of the measurement
    # Name -> measurement of the trained network and its options, made after the training.
    after: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    data: str = ""  # substitute for the paper's data, in words; empty if the run uses the paper's
    missing: str = ""  # name of a data set that was not found; empty if the run can be made
    root: Path | None = None  # folder of the data sets, for measurements

    @property
    def folder(self) -> Path:
        """Where its record is, or will be: in this table, or where another table has finished the same run."""
        made = to_yaml(self.recipe) if self.recipe else json.dumps([self.row.measure, self.options], sort_keys=True)
        name = f"seed{self.seed}-{hashlib.sha256(made.encode()).hexdigest()[:8]}"
        own = self.out / f"{slug(self.row.label)}-{name}"
        finished = (other for other in sorted(self.out.parent.glob(f"*/*-{name}")) if (other / RECORD).is_file())
        return own if own.exists() else next(finished, own)

    @property
    def trained(self) -> bool:
        """True once the training is complete: it writes its record last."""
        return (self.folder / RECORD).is_file()

    @property
    def done(self) -> bool:
        """True once the run has a record with all its figures."""
        return self.trained and (not self.after or self.after.keys() <= read_record(self.folder).after.keys())

    @property
    def begun(self) -> bool:
        """True if the run was started and can be resumed."""
        return (self.folder / pipeline.RECIPE).is_file() and (self.folder / SETTINGS).is_file()


def plan(
    table: Table,
    out: Path = Path("runs"),
    overrides: Sequence[str] = (),
    seeds: int | None = None,
    *,
    scale: Scale = "full",
    available: Callable[[str], bool] | None = None,
    root: Path | None = None,
    thin: bool = True,
) -> list[TableRun]:
    """Every run of the table, row by row, each with its recipe and its folder.

    Args:
        out: folder of the table's runs; the folders of other tables are next to it.
        overrides: changes of every recipe.
        seeds: runs of each row; None for the table's number at the scale full, else one.
        scale: which changes of the table and of its rows apply.
        available: tells which data sets are at hand; None: all. At the scale smoke, substitutes replace missing ones.
        root: folder of the data sets, for measurements.
        thin: whether rows that the table marks as thin are planned, too.
    """
    count = seeds or (table.seeds if scale == "full" else 1)
    runs: list[TableRun] = []
    for row in table.rows:
        if row.absent or (row.thin and not thin):
            continue
        if row.measure:
            options = table.options(row, scale)
            data = options.get("data", "")
            missing = data if available is not None and not available(data) else ""
            more: dict[str, Any] = {"options": options, "missing": missing, "root": root}
            runs += [TableRun(row, scale, seed, out, **more) for seed in range(count)]
            continue
        name = table.recipe_of(row)
        assert name is not None
        changes = [*table.overrides(row, scale), *overrides]
        recipe = load_recipe(name, changes)
        wanted, words, missing = recipe.data.spec, "", ""
        if available is not None and not available(wanted):
            if scale == "smoke":
                used = next(filter(available, STAND_INS[wanted]))
                recipe, words = load_recipe(name, [*changes, f"data.spec={used}"]), NAMES.get(used, used)
            else:
                missing = wanted
        more = {"after": table.after_options(scale), "data": words, "missing": missing}
        seeds_of_row = range(recipe.train.seed, recipe.train.seed + count)
        runs += [TableRun(row, scale, seed, out, seeded(recipe, seed), **more) for seed in seeds_of_row]
    return runs


def slug(label: str) -> str:
    """A label as part of a folder's name.

    >>> slug("sandwich, gamma 1")
    'sandwich-gamma-1'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-").lower()


def make_missing(runs: Sequence[TableRun], *, workers: int, display: Display, keep_going: bool = False) -> list[str]:
    """Make the runs without a record, resume interrupted ones, and return a line for each failure.

    A failure is raised unless ``keep_going``. Runs without their data are skipped. Up to ``workers`` processes train at
    the same time, on one thread each; with one worker, this process trains, on torch's threads.
    """
    for spec in sorted({run.missing for run in runs if run.missing}):
        display.note(f"data set {spec} not found: its rows are skipped (lipkit list datasets says where to get it)")
    possible = [run for run in runs if not run.missing]
    missing = [run for run in possible if not run.done]
    display.note(f"{len(possible) - len(missing)} of {len(possible)} runs are finished, {len(missing)} to make")
    failed: list[str] = []

    def succeeds(run: TableRun, make: Callable[[], None]) -> bool:
        try:
            make()
        except Exception as error:
            if not keep_going:
                raise
            text = f"{run.row.label}, seed {run.seed}: {type(error).__name__}: {' '.join(str(error).split())}"
            display.note(f"failed: {text}")
            failed.append(text)
            return False
        return True

    if workers == 1 or len(missing) <= 1:
        for number, run in enumerate(missing, 1):
            display.note(f"{number}/{len(missing)}  {run.row.label}, seed {run.seed}")
            succeeds(run, functools.partial(make_run, run, display))
        return failed
    # A fresh interpreter for each worker: a forked one would inherit torch's thread pool, in an unknown state.
    with ProcessPoolExecutor(min(workers, len(missing)), get_context("spawn"), _start_worker) as pool:
        waiting = {pool.submit(make_run, run): run for run in missing}
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                run = waiting[future]
                if succeeds(run, future.result):
                    display.note(f"{number}/{len(missing)}  {run.row.label}, seed {run.seed}: {_shown(run)}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def _start_worker() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()


def make_run(run: TableRun, display: Display | None = None) -> None:
    """Make one run, resuming from its last checkpoint, then take the measurements that follow it."""
    if run.done:  # meanwhile, by an equal row
        return
    if run.row.measure:
        start = time.perf_counter()
        place = {"root": run.root} if "data" in run.options else {}
        figures = measures.MEASURES[run.row.measure](seed=run.seed, **place, **run.options)
        seconds = time.perf_counter() - start
        made = measurement_record(run.row.label, run.row.measure, run.options, run.seed, figures, seconds)
        run.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(run.folder / RECORD, made.model_dump_json(indent=2).encode() + b"\n")
        return
    assert run.recipe is not None
    if not run.trained:
        where: dict[str, Any] = {"resume" if run.begun else "folder": run.folder}
        pipeline.train(run.recipe, display=display, **where)
    for name, (measure, options) in run.after.items():
        record = read_record(run.folder)
        if name not in record.after:
            if measure in measures.OF_FOLDER:
                figures = measures.OF_FOLDER[measure](run.folder, **options)
            else:
                network, data = modules.load(run.folder / pipeline.NETWORK), load_data(run.recipe)
                figures = measures.AFTER[measure](network, data, seed=run.seed, **options)
            further = {"further": {**record.further, **figures}, "after": {**record.after, name: dict(options)}}
            write_record(record.model_copy(update=further), run.folder / RECORD)


class MeasurementRecord(Versioned):
    """The record of a measurement without training: how it was made, and its figures. Times are seconds."""

    task: Literal["measurement"] = "measurement"
    name: str
    created: str
    measure: str
    options: dict[str, Any]
    seed: int
    figures: dict[str, float]
    versions: dict[str, str]
    hardware: HardwareRecord
    times: dict[str, float] = Field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The figures by name."""
        return dict(self.figures)


def read_any_record(path: Path) -> AnyRecord | MeasurementRecord:
    """Read the record of a run or of a measurement; ``RunError`` as in `read_record`."""
    return read_record(path, {**RUNS, "measurement": MeasurementRecord})


def measurement_record(
    name: str, measure: str, options: Mapping[str, Any], seed: int, figures: Mapping[str, float], seconds: float
) -> MeasurementRecord:
    """The record of a measurement made on this machine now.

    >>> measurement_record("a", "kernel_bounds", {}, 0, {"ratio": 1.0}, 0.1).metrics()
    {'ratio': 1.0}
    """
    return MeasurementRecord(
        name=name, created=now(), measure=measure, options=dict(options), seed=seed, figures=dict(figures),
        versions=versions(), hardware=hardware(), times={"measure": seconds},
    )  # fmt: skip


@dataclass(frozen=True)
class TableRecord:
    """A record of one run of a row."""

    scale: Scale  # at which it was made
    seed: int
    record: AnyRecord | MeasurementRecord
    data: str = ""  # substitute for the paper's data, in words; empty for the paper's
    current: bool = True  # whether its recipe is the row's present one


def figures(record: AnyRecord | MeasurementRecord) -> dict[str, float]:
    """Every figure of a record by name, including further measurements, what training saw, and the network's size."""
    parameters = getattr(record, "parameters", None)
    size = {"million_parameters": parameters / 1e6} if parameters else {}
    seen = getattr(record, "seen", None)
    counts = {"epochs": seen.epochs, "samples_per_cpu_second": seen.samples_per_cpu_second} if seen else {}
    return record.metrics() | size | counts | getattr(record, "further", {})


def slow(row: Row, record: AnyRecord | MeasurementRecord) -> bool:
    """True if a run saw fewer than nine tenths of its reference's samples: its machine was slow or busy."""
    seen = getattr(record, "seen", None)
    return bool(seen and row.samples and seen.samples < 0.9 * row.samples)


def by_figure(found: Sequence[TableRecord]) -> dict[str, list[float]]:
    """Name of a figure -> its values in the records that have it."""
    values: dict[str, list[float]] = {}
    for one in found:
        for name, value in figures(one.record).items():
            values.setdefault(name, []).append(value)
    return values


def interval(found: Sequence[TableRecord], name: str) -> tuple[float, float] | None:
    """The 95 % interval (Clopper-Pearson) of a fraction of test samples in a single run; None for other figures."""
    record = found[0].record if len(found) == 1 else None
    if not isinstance(record, Record):
        return None
    if name in record.shares():
        share = record.shares()[name]
        return share.low, share.high
    for key, options in record.after.items():
        made = "clean_attacked" if key == "accuracy" else options.get("name")
        if name in record.further and name.partition("(")[0].removesuffix("_linf") == made:
            total = min(options.get("samples", ATTACKED), record.data.test_samples)
            return clopper_pearson(round(record.further[name] * total), total)
    return None


def _shown(run: TableRun) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures(read_any_record(run.folder)).items())


# Keys of a recipe that `_agree` ignores: name, data folder, speed, progress and seed of a run.
_INCIDENTAL = {
    *("name", "description", "data.root", "certify.batch_size"),
    *(f"train.{key}" for key in (*PLACEMENT, "seed", "evaluate_every", "evaluate_samples")),
}


def keep(runs: Sequence[TableRun], folder: Path) -> list[Path]:
    """Copy the records of finished runs, without weights, to ``folder/ROW/SCALE-seedN.json``.

    Raises:
        RunError: the path holds the record of another run, which is not replaced.
    """
    made = []
    for run in runs:
        if run.done:
            path = folder / slug(run.row.label) / f"{run.scale}-seed{run.seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            there = read_any_record(path).created if path.exists() else None
            if there not in (None, read_any_record(run.folder).created):
                raise RunError(
                    f"expected no record of another run at {path}, got one made at {there}: move it, or keep "
                    "the new ones in another folder"
                )
            write_atomic(path, without_places(read_bytes(run.folder / RECORD, MAX_TEXT)))
            made.append(path)
    return made


def without_places(record: bytes) -> bytes:
    """A record without the folder of its data, a path on somebody's machine.

    >>> without_places(b'{"recipe": {"data": {"spec": "mnist", "root": "/home/a"}}}').decode().split()
    ['{', '"recipe":', '{', '"data":', '{', '"spec":', '"mnist",', '"root":', 'null', '}', '}', '}']
    """
    content = json.loads(record)
    section = (content.get("recipe") or {}).get("data")
    if isinstance(section, dict) and "root" in section:
        section["root"] = None
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def made(runs: Sequence[TableRun], row: Row) -> list[TableRecord]:
    """The records of a row's finished runs, from their folders."""
    return [
        TableRecord(run.scale, run.seed, read_any_record(run.folder), run.data)
        for run in runs
        if run.row == row and run.done
    ]


def kept(table: Table, folder: Path, scale: Scale | None = None) -> dict[str, list[TableRecord]]:
    """The records in ``folder`` of each row, by its label, at the given scale or the largest that has records.

    A record is ``current`` if its recipe agrees with that of a run in the row's present plan.
    """
    found: dict[str, list[TableRecord]] = {row.label: [] for row in table.rows}
    scales = SCALES if scale is None else (scale,)
    runs = [run for each in scales for run in plan(table, scale=each)] if folder.is_dir() else []
    for row in table.rows:
        for wanted in scales:
            paths = sorted((folder / slug(row.label)).glob(f"{wanted}-seed*.json"), key=_seed)
            now = [run for run in runs if run.row == row and run.scale == wanted]
            for path in paths:
                record = read_any_record(path)
                current = any(_same(record, run) for run in now)
                found[row.label].append(TableRecord(wanted, _seed(path), record, current=current))
            if paths:
                break
    return found


def _seed(path: Path) -> int:
    match = re.search(r"-seed(\d+)\.json$", path.name)
    return int(match[1]) if match else 0


def _same(record: AnyRecord | MeasurementRecord, run: TableRun) -> bool:
    """True if the record is of this measurement or recipe; keys that an older recipe lacks are ignored."""
    if isinstance(record, MeasurementRecord):
        return record.measure == run.row.measure and record.options == dict(run.options)
    return run.recipe is not None and _agree(record.recipe, run.recipe.model_dump(mode="json"))


def _agree(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> bool:
    """True if two recipes agree in all keys that both have; a null section differs from a section with keys."""
    for key in then.keys() & now.keys():
        one, other = then[key], now[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping) and not key.endswith("options"):
            if not _agree(one, other, f"{prefix}{key}."):
                return False
        elif one != other and f"{prefix}{key}" not in _INCIDENTAL:
            return False
    return True


NOT_MADE = "not made"


def render(table: Table, found: Mapping[str, Sequence[TableRecord]]) -> str:
    """The whole table as text; ``found`` maps labels of rows to records. A row without records is `NOT_MADE`."""
    counted = any(getattr(one.record, "seen", None) for records in found.values() for one in records)
    also = [*table.also, *(["epochs"] if counted else [])]
    header = ["row", "figure", "scale", "runs", "published", "measured", "deviation", "difference", *also]
    lines = [line for row in table.rows for line in compare(table, row, found.get(row.label, ()), also)]
    notes = _notes(table, found)
    return f"{table.source}: {table.description}\n\n{aligned([], [header, *lines])}" + (f"\n\n{notes}" if notes else "")


def compare(table: Table, row: Row, found: Sequence[TableRecord], also: Sequence[str]) -> list[list[str]]:
    """Cells of one row, a line for each figure: label, figure, scale, runs, published, mean, deviation, difference.

    ``also`` names the figures in further columns. If there is one run, and the figure is a fraction of test images,
    its 95 % interval takes the place of the deviation.
    """
    measured = by_figure(found)
    means = {name: statistics.fmean(values) for name, values in measured.items()}
    names = dict(table.columns) or {name: name for name in measured or [""]}
    published = table.published(row)
    marks = [("" if one.current else "*") + (", slow machine" if slow(row, one.record) else "") for one in found]
    scale = ", ".join(dict.fromkeys(one.scale + mark for one, mark in zip(found, marks, strict=True)))
    lines = []
    for column, name in names.items():
        values, mean, paper = measured.get(name, []), means.get(name), published.get(column)
        deviation = statistics.stdev(values) if len(values) > 1 else None
        difference = None if mean is None or paper is None else mean - paper
        ends = interval(found, name)
        spread = f"{100 * ends[0]:.2f} to {100 * ends[1]:.2f} %" if ends else shown(name, deviation)
        ours = NOT_MADE if not found else shown(name, mean) or "n/a"
        lines.append(
            [
                row.label, column, scale, str(len(values)) if found else "", shown(name, paper), ours,
                spread, shown(name, difference, sign=True), *(shown(other, means.get(other)) for other in also),
            ]
        )  # fmt: skip
    return lines


def shown(name: str, value: float | None, sign: bool = False) -> str:
    """A figure as people write it: fractions in per cent.

    >>> shown("tightness", 0.9937), shown("test_mse", 0.01234), shown("clean", -0.005, sign=True), shown("clean", None)
    ('99.37 %', '0.01234', '-0.50 %', '')
    """
    if value is None:
        return ""
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.2f} %" if is_fraction(name) else f"{value:{plus}.4g}"


def _notes(table: Table, found: Mapping[str, Sequence[TableRecord]]) -> str:
    """The notes below a table: what differs from the paper, and why rows are missing."""
    lines = []
    everything = [(row, one) for row in table.rows for one in found.get(row.label, ())]
    for scale, meaning in _MEANINGS.items():
        if any(one.scale == scale for _, one in everything):
            changes = table.budget if scale == "budget" else table.smoke
            more = f" Changed in every row: {' '.join(changes)}." if changes else ""
            lines.append(f"{scale}: {meaning}{more}")
    for data in sorted({one.data for _, one in everything if one.data}):
        rows = [row.label for row, one in everything if one.data == data]
        which = "every row" if len(rows) == len(everything) else "; ".join(dict.fromkeys(rows))
        lines.append(f"data: {data}, in place of the paper's, which are not at hand, in {which}.")
    if any(not one.current for _, one in everything):
        lines.append("*: made with other settings than the row's recipe has now; they are in the record.")
    lines += [f"{row.label}: {row.absent}" for row in table.rows if row.absent]
    return "\n".join([*lines, *table.notes])


_MEANINGS: dict[Scale, str] = {
    "budget": "NOT the paper's setting but 400 seconds of one CPU core for each network: compare rows, not columns.",
    "smoke": "NOT the paper's setting but a few seconds on a few hundred images, to see that it runs: no result.",
}
