"""How long an exported network takes for one input."""

from __future__ import annotations

import copy
import dataclasses
import time

import numpy as np
import torch

from lipkit import modules
from lipkit.errors import OptionError
from lipkit.linalg.precision import on_threads


@dataclasses.dataclass(frozen=True)
class Latency:
    """Milliseconds for one input: the median, and the 10th and 90th percentile, of ``runs`` on ``threads`` threads."""

    median: float
    low: float
    high: float
    runs: int
    threads: int
    device: str


def latency(network: modules.Network, *, runs: int = 100, seconds: float = 2.0, threads: int = 1) -> Latency:
    """Time a forward pass of an exported network, batch 1 in float32, on the CPU.

    Args:
        runs: number of timed passes; a tenth as many run before, untimed.
        seconds: no new pass starts after this time; at least one is timed.
        threads: of torch during the measurement.

    Raises:
        OptionError: ``runs`` or ``threads`` below 1.

    >>> from torch import nn
    >>> measured = latency(modules.Network([nn.Linear(3, 2)], (3,)), runs=5)
    >>> measured.runs, measured.threads, 0 < measured.low <= measured.median <= measured.high
    (5, 1, True)
    """
    if runs < 1 or threads < 1:
        raise OptionError(f"expected runs and threads >= 1, got runs={runs}, threads={threads}")
    twin = copy.deepcopy(network).cpu().float()
    x = torch.zeros(1, *network.input_shape)
    times: list[float] = []
    warmup = max(1, runs // 10)
    with on_threads(threads), torch.inference_mode():
        end = time.perf_counter() + seconds
        for number in range(warmup + runs):
            if times and time.perf_counter() > end:
                break
            start = time.perf_counter()
            twin(x)
            # A slow network leaves no time to warm up: then its first pass counts.
            if number >= warmup or time.perf_counter() > end:
                times.append(time.perf_counter() - start)
    low, median, high = (1e3 * float(v) for v in np.quantile(times, (0.1, 0.5, 0.9)))
    return Latency(median=median, low=low, high=high, runs=len(times), threads=threads, device="cpu")
