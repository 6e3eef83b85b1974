"""Peak memory of a training step and of an evaluation pass: resident set of a fresh process, bytes of saved tensors.

python -m benchmarks.speed.memory '{"label": "cayley:lipkit", "shape": "128@16", "batch": 128, "phase": "train"}'
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from benchmarks.speed.clock import Work, measuring
from benchmarks.speed.shapes import Shape, parse
from benchmarks.speed.work import REFERENCE, contenders
from torch import Tensor

from lipkit.errors import RunError
from lipkit.layers.families import get

STATUS = Path("/proc/self/status")


def resident(field: str) -> int:
    """Bytes of the resident set of this process: now (``VmRSS``) or at its peak (``VmHWM``); 0 where not known."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def saved_bytes(work: Work) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward pass.

    >>> x = torch.ones(1000, requires_grad=True)
    >>> saved_bytes(lambda: x.exp())
    4000
    """
    kept: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (tensor, storage.nbytes())  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(size for _, size in kept.values())


def here(label: str, shape: Shape, batch: int, phase: str, device: str = "cpu") -> dict[str, int]:
    """Measure in this process, which should be a fresh one.

    Args:
        label: a key of `contenders`, such as ``conv`` or ``cayley:lipkit``.
        shape, batch, phase, device: as there.

    Returns:
        Bytes: ``peak``, the whole resident set at its peak; ``added``, by how much that exceeds the resident set
        before the first step (inputs, gradient and layer are in place; on CUDA both count the allocator's bytes);
        ``saved``, tensors kept for the backward pass.
    """
    name, _, maker = label.partition(":")
    families = [get(name)] if maker else []
    # Once with a tiny input: libraries load what they need, and none of it counts as the layer's.
    tiny = Shape(shape.cin, shape.cout, 3 * shape.stride, shape.stride)
    contenders(families, tiny, 2, phase, device, makers=(maker,))[label]()
    work = contenders(families, shape, batch, phase, device, makers=(maker,))[label]
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        _reset_peak()
        before = resident("VmRSS")
    for _ in range(2):
        work()
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    saved = saved_bytes(work) if phase == "train" else 0
    return {"peak": peak, "added": max(peak - before, 0), "saved": saved}


def fresh(label: str, shape: Shape, batch: int, phase: str, device: str = "cpu") -> dict[str, int]:
    """The same in a process of its own.

    Raises:
        RunError: that process failed.
    """
    asked = {"label": label, "shape": str(shape), "batch": batch, "phase": phase, "device": device}
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.speed.memory", json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RunError(f"memory of {label} at {shape}: expected a measurement, got {last}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _reset_peak() -> None:
    # What building the layer left on the heap, free but resident, would hide a part of the step's own memory.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    # Without it the peak is that of the whole process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main(arguments: list[str]) -> None:
    asked: dict[str, Any] = json.loads(arguments[0])
    device = asked.get("device", "cpu")
    with measuring(device):
        found = here(asked.get("label", REFERENCE), parse(asked["shape"]), asked["batch"], asked["phase"], device)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
