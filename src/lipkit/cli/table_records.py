"""Records kept apart from their runs, a few kB each: ``FOLDER/TABLE/ROW/SCALE-seedN.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipkit.cli.table_runs import TableRun, slug
from lipkit.cli.tables import SCALES, Row, Scale
from lipkit.errors import RunError
from lipkit.files import MAX_TEXT, read_bytes, write_atomic
from lipkit.report.measurement import MeasurementRecord, read_any_record
from lipkit.report.record import RECORD, AnyRecord

# Where and how fast a run was made, and what it is called: not what was run.
_INCIDENTAL = {
    "name", "description", "data.root", "train.accelerator", "train.devices", "train.strategy", "train.seed",
    "train.evaluate_every", "train.evaluate_samples", "certify.batch_size",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A record of a row.

    Attributes:
        scale: at which it was made.
        seed: of the run.
        record: what it holds.
        data: data in place of the paper's, in words; empty for those themselves.
        current: whether its recipe is that of the row as it is now.
    """

    scale: Scale
    seed: int
    record: AnyRecord | MeasurementRecord
    data: str = ""
    current: bool = True


def keep(runs: Sequence[TableRun], folder: Path) -> list[Path]:
    """Copy the records of finished runs, without weights, to ``folder/ROW/SCALE-seedN.json``.

    Raises:
        RunError: the record of another run is there: it is not replaced.
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
    """A record without the folder that the data lay in: it names a place on somebody's machine.

    >>> without_places(b'{"recipe": {"data": {"spec": "mnist", "root": "/home/a"}}}').decode().split()
    ['{', '"recipe":', '{', '"data":', '{', '"spec":', '"mnist",', '"root":', 'null', '}', '}', '}']
    """
    content = json.loads(record)
    section = (content.get("recipe") or {}).get("data")
    if isinstance(section, dict) and "root" in section:
        section["root"] = None
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def made(runs: Sequence[TableRun], row: Row) -> list[Found]:
    """The records of a row's finished runs, from their folders."""
    return [
        Found(run.scale, run.seed, read_any_record(run.folder), run.data) for run in runs if run.row == row and run.done
    ]


def kept(folder: Path, row: Row, runs: Sequence[TableRun], scale: Scale | None = None) -> list[Found]:
    """The kept records of a row, at one scale: the given one, or the best at which there are any.

    Args:
        folder: of the table.
        row: the row.
        runs: the row's runs as they would be made now, at every scale (`plan`), to see whether the recipe has changed.
        scale: at which; None for the best.

    Raises:
        RunError: a file is not a record.
    """
    for wanted in SCALES if scale is None else (scale,):
        paths = sorted((folder / slug(row.label)).glob(f"{wanted}-seed*.json"), key=_seed)
        if paths:
            now = [run for run in runs if run.row == row and run.scale == wanted]
            found = [(path, read_any_record(path)) for path in paths]
            return [
                Found(wanted, _seed(path), record, current=any(_same(record, run) for run in now))
                for path, record in found
            ]
    return []


def _seed(path: Path) -> int:
    match = re.search(r"-seed(\d+)\.json$", path.name)
    return int(match[1]) if match else 0


def _same(record: AnyRecord | MeasurementRecord, run: TableRun) -> bool:
    """Whether a record is of this run; fields that the record's recipe did not have yet are not compared."""
    if isinstance(record, MeasurementRecord):
        return record.measure == run.row.measure and record.options == dict(run.options)
    if run.recipe is None:
        return False
    then, now = _flat(record.recipe), _flat(run.recipe.plain())
    return all(then[key] == now[key] for key in then.keys() & now.keys() if key not in _INCIDENTAL)


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and not key.endswith("options"):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
