"""How long an exported network takes for one input."""

import copy
import dataclasses
import time

import numpy as np
import torch

from lipkit import modules
from lipkit.certificates.measurement import check_network
from lipkit.linalg.precision import on_threads

RUNS, SECONDS = 100, 2.0


@dataclasses.dataclass(frozen=True)
class Latency:
    """Milliseconds for one input: median, 10th percentile (``low``) and 90th (``high``) of ``runs`` passes."""

    median: float
    low: float
    high: float
    runs: int
    threads: int
    device: str


def latency(network: modules.Network) -> Latency:
    """Time a forward pass of an exported network, batch 1 in float32, on one thread of the CPU.

    It times `RUNS` passes after a warm-up of a tenth as many, but starts none after `SECONDS`; at least one is timed.

    >>> from torch import nn
    >>> measured = latency(modules.Network([nn.Linear(3, 2)], (3,)))
    >>> measured.threads, 0 < measured.low <= measured.median <= measured.high
    (1, True)
    """
    check_network(network, "time")
    twin = copy.deepcopy(network).cpu().float()
    x = torch.zeros(1, *network.input_shape)
    times: list[float] = []
    warmup = max(1, RUNS // 10)
    with on_threads(1), torch.inference_mode():
        end = time.perf_counter() + SECONDS
        for number in range(warmup + RUNS):
            if times and time.perf_counter() > end:
                break
            start = time.perf_counter()
            twin(x)
            # A slow network leaves no time to warm up: then its first pass counts.
            if number >= warmup or time.perf_counter() > end:
                times.append(time.perf_counter() - start)
    low, median, high = (1e3 * float(v) for v in np.quantile(times, (0.1, 0.5, 0.9)))
    return Latency(median=median, low=low, high=high, runs=len(times), threads=1, device="cpu")
