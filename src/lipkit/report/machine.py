"""What a run ran on: software versions and hardware."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import lipkit


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Processor, cores this process may use, accelerator (or cpu), operating system, threads of torch.

    The threads decide the order of sums, so the last bits of a training on a CPU.
    """

    cpu: str
    cores: int
    device: str
    platform: str
    threads: int


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result.

    >>> sorted(versions())
    ['lipkit', 'numpy', 'python', 'scipy', 'torch']
    """
    found = {"python": platform.python_version()}
    for name in ("numpy", "scipy"):
        found[name] = importlib.metadata.version(name)
    # torch's metadata leaves out +cpu and +cu; lipkit may run from a source tree that is not installed
    return found | {"torch": str(torch.__version__), "lipkit": lipkit.__version__}


def hardware(device: str = "cpu") -> Hardware:
    """This machine, as seen by a run on ``device``.

    >>> hardware().cores >= 1
    True
    """
    index = torch.device(device)
    cuda = index.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(index) if cuda else index.type
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Hardware(
        cpu=_processor(),
        cores=cores,
        device=name,
        platform=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "unknown"
