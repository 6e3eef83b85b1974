"""A run on disk: settings, metrics, checkpoints. A crash leaves it consistent; a run is never overwritten.

RUN/
  settings.json                      the options of fit
  .lock                              held by the process that trains
  metrics.jsonl                      one line per epoch
  checkpoints/epoch-0007/            the last two; of a finished run the last one, without the optimiser's state
    model.safetensors, state.pt      weights; optimiser and random state (torch.load with weights_only=True)
    checkpoint.json                  written last: epoch and hashes; without it the checkpoint does not exist
  checkpoints/epoch-0007-step-000120/    the same, 120 steps into the eighth epoch
"""

import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from lipkit.errors import LipkitError, RunError
from lipkit.files import MAX_TEXT, append_line, read_bytes, write_atomic

SETTINGS, METRICS, CHECKPOINTS, MANIFEST = "settings.json", "metrics.jsonl", "checkpoints", "checkpoint.json"
_NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?")
_FORMAT = 1


def create(parent: Path, name: str) -> Path:
    """Make a new folder ``parent/name-001``, or with the next free number, and return it."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(m[1]) for p in parent.iterdir() if (m := re.fullmatch(re.escape(name) + r"-(\d+)", p.name))]
        number = max(taken, default=0)
        while True:
            number += 1
            folder = parent / f"{name}-{number:03d}"
            with suppress(FileExistsError):  # two runs started at once get two folders
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        raise RunError(f"expected a folder to write to, got {parent}: {error.strerror or error}") from None


@contextmanager
def opened(
    folder: Path, settings: Mapping[str, Any], resume: bool = False, *,
    name: str | None = None, files: Mapping[str, bytes] | None = None, taken: Sequence[str] = (),
) -> Iterator[Path]:  # fmt: skip
    """Hold the folder of a run inside the block, so that nobody else trains in it; yields the folder.

    The run is new, or with ``resume`` an earlier one with the same settings. With ``name`` a new run gets its own
    folder in ``folder``, see `create`. A new run's folder gets ``files``. If a LipkitError (labels that do not fit,
    say) or an OSError ends a new run before its first epoch or checkpoint, the files that it made are removed, and no
    others.

    Raises:
        RunError: another process, thread or call holds the folder; the folder cannot be written; a resume finds no
            run, or other settings; a new run finds in its folder a run, a file named in ``taken``, or one of ``files``
            with other content.
    """
    files = files or {}
    contents = {**files, SETTINGS: json.dumps(settings, indent=2, allow_nan=False).encode()}
    # Absolute paths: the user's code may change the working directory before the folder is left.
    made = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
    if name is not None:
        folder = create(folder, name)
        made.insert(0, folder.absolute())
    begun = [folder.absolute() / part for part in (METRICS, CHECKPOINTS)]
    own = [path for part in (*contents, ".lock") if not (path := folder.absolute() / part).exists()]

    def check_new() -> None:
        for part in (*contents, METRICS, CHECKPOINTS, *taken):
            path = folder / part
            if os.path.lexists(path) and not (part in files and path.is_file() and read_bytes(path) == files[part]):
                raise RunError(f"expected a new run folder, got {folder} with {part} in it: resume it, or name another")

    if resume:  # before locking, which makes a file in a folder that may hold no run
        before = read_json(folder / SETTINGS)
        now = json.loads(json.dumps(dict(settings)))  # as read from a file: tuples become lists
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                raise RunError(
                    f"expected {key} = {before.get(key)!r}, as the run in {folder} was started, got {now.get(key)!r}"
                )
    elif name is None:
        check_new()
    lock = FileLock(folder / ".lock")  # each call its own: a thread that holds it does not get it twice
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise RunError(f"expected a run that no process trains, got {folder}, which another process holds") from None
    except OSError as error:
        raise RunError(f"expected a folder to write to, got {folder}: {error.strerror or error}") from None
    try:
        if not resume and name is None:
            check_new()  # another process may have been faster
        try:
            for part, content in {} if resume else contents.items():
                write_atomic(folder / part, content)
            yield folder
        except (LipkitError, OSError):
            if not resume and not any(path.exists() for path in begun):
                with suppress(OSError):  # the user may have added files; Windows keeps a lock that is held
                    for path in own:
                        path.unlink(missing_ok=True)
                    for path in made:
                        path.rmdir()
            raise
    finally:
        lock.release()


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Add one epoch's line to the metrics; NaN and infinity, which JSON lacks, become null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    append_line(folder / METRICS, json.dumps(clean, allow_nan=False))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics, one dict per epoch. An incomplete last line is left out; any other wrong line is a RunError."""
    path = folder / METRICS
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    try:
        lines = read_bytes(path, MAX_TEXT).splitlines(keepends=True)
    except OSError as error:
        raise RunError(f"{path}: expected metrics, got {error.strerror or error}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break  # torn
            raise RunError(f"expected a JSON object on line {number} of {path}, got {line[:60]!r}") from error
        rows.append(row)
    return rows


def truncate_metrics(folder: Path, epochs_done: int) -> list[dict[str, Any]]:
    """Drop the lines of epochs after ``epochs_done``, and return the others."""
    rows = [row for row in read_metrics(folder) if row.get("epoch", 0) <= epochs_done]
    if (folder / METRICS).exists():
        write_atomic(folder / METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def save_checkpoint(
    folder: Path, epoch: int, model: nn.Module, state: Mapping[str, Any], *, step: int = 0, keep: int = 2
) -> Path:
    """Write the checkpoint after ``epoch`` epochs and ``step`` steps, then delete those before the last ``keep``.

    The model's state_dict must hold tensors only; ``state`` plain containers, numbers and tensors, as
    ``torch.load(weights_only=True)`` requires. Returns the checkpoint's folder.
    """
    weights = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise RunError(f"expected tensors in the model's state_dict, got {type(value).__name__} at {name!r}")
        weights[name] = value.detach().to("cpu", copy=True).contiguous()  # a copy: tied weights share memory
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    contents = {"model.safetensors": save(weights), "state.pt": buffer.getvalue()}

    target = folder / CHECKPOINTS / (f"epoch-{epoch:04d}" + (f"-step-{step:06d}" if step else ""))
    (target / MANIFEST).unlink(missing_ok=True)  # invalidates an older checkpoint there
    target.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomic(target / name, content)
    sha256 = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    # The manifest comes last: a folder without it is not taken for a checkpoint.
    write_atomic(target / MANIFEST, json.dumps({"format": _FORMAT, "epoch": epoch, "sha256": sha256}).encode())
    found = _checkpoints(folder)  # newer ones than this are damaged, or the run would have continued from them
    for old in found[found.index(target) + keep :]:
        (old / MANIFEST).unlink(missing_ok=True)  # first, so that half a folder does not count
        shutil.rmtree(old)
    return target


def load_checkpoint(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """The newest intact checkpoint as (epochs done, weights, state); None if none was completed yet.

    Interrupted and damaged ones are skipped; ``RunError`` if all complete ones are damaged.
    """
    damaged = None
    for path in _checkpoints(folder):
        if not (path / MANIFEST).exists():
            continue  # interrupted
        try:
            manifest = read_json(path / MANIFEST)
            contents = {name: read_bytes(path / name) for name in ("model.safetensors", "state.pt")}
            for name, content in contents.items():
                if hashlib.sha256(content).hexdigest() != manifest["sha256"][name]:
                    raise ValueError(f"{name} is damaged")
            state = torch.load(io.BytesIO(contents["state.pt"]), weights_only=True, map_location="cpu")
            return int(manifest["epoch"]), load(contents["model.safetensors"]), state
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, UnpicklingError, SafetensorError) as error:
            damaged = f"{path}: {error}"  # a RecursionError is a RuntimeError
    if damaged is not None:
        raise RunError(f"expected an intact checkpoint in {folder / CHECKPOINTS}, got damaged ones only ({damaged})")
    return None


def newest_checkpoint(folder: Path) -> Path | None:
    """The folder of the newest complete checkpoint; None without one."""
    return next((path for path in _checkpoints(folder) if (path / MANIFEST).exists()), None)


def check_weights(model: nn.Module, weights: Mapping[str, Tensor], origin: Path) -> None:
    """Raise RunError unless ``model`` has the names and shapes of a checkpoint's weights."""
    own, there = ({name: tuple(value.shape) for name, value in ws.items()} for ws in (model.state_dict(), weights))
    for name in sorted(own.keys() | there.keys()):
        if own.get(name) != there.get(name):
            sides = [f"none of {name}" if s is None else f"{name} {s}" for s in (there.get(name), own.get(name))]
            raise RunError(f"expected the model of the run in {origin}, with {sides[0]}, got another, with {sides[1]}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ``RunError`` if the file is missing or holds something else."""
    try:
        content = json.loads(read_bytes(path, MAX_TEXT))
    except FileNotFoundError as error:
        raise RunError(f"expected a run folder with {path.name}, got none at {path}") from error
    except OSError as error:
        raise RunError(f"expected JSON in {path}, got {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"expected JSON in {path}, got: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"expected a JSON object in {path}, got {type(content).__name__}")
    return content


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, the newest first, whether complete or not."""
    found = [(p, _NAME.fullmatch(p.name)) for p in (folder / CHECKPOINTS).glob("epoch-*")]
    places = {p: (int(match[1]), int(match[2] or 0)) for p, match in found if match}
    return sorted(places, key=places.__getitem__, reverse=True)
