"""Clocks, runs that take turns, and the arithmetic of their samples: medians over shared rounds, geometric means."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from lipkit.errors import OptionError
from lipkit.linalg.precision import on_threads

Work = Callable[[], object]
Clock = Callable[[Work, int], float]
"""Seconds of one call, from a number of calls in a row."""
Samples = Sequence[float | None]
"""Seconds of one contender by round; None where it sat a round out."""

# Shorter samples would measure the clock and the interpreter's hiccups.
SHORTEST_SAMPLE = 2e-3


def cpu_clock(work: Work, calls: int) -> float:
    """Process time per call: what other processes take from the core does not count."""
    start = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - start) / calls


def cuda_clock(work: Work, calls: int) -> float:
    """Time between two events on the current stream, per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def clock_of(device: str) -> Clock:
    """The clock of this device.

    Raises:
        OptionError: neither the CPU nor a CUDA device that is there.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return cpu_clock
    if kind == "cuda" and torch.cuda.is_available():
        return cuda_clock
    raise OptionError(f"device: expected cpu, or cuda where there is one, got {device!r}")


@contextmanager
def measuring(device: str) -> Iterator[None]:
    """One thread; on CUDA, float32 products without TF32 and cuDNN's fastest algorithm. All settings are given back."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    cudnn, searched = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = torch.device(device).type == "cuda"
    try:
        with on_threads(1):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
        torch.backends.cudnn.benchmark = searched


def interleaved(
    work: Mapping[str, Work], clock: Clock, *, seconds: float = 0.6, repeats: int = 20, least: int = 3
) -> dict[str, list[float | None]]:
    """Samples of every contender, taken in turns, so that a change of the machine's pace meets all alike.

    Each runs once unmeasured. Then, round by round and in alternating order, each runs until it has used ``seconds``
    (but at least ``least`` times) or has ``repeats`` samples. The first contender is the reference and runs in every
    round in which another one does.

    Args:
        work: contenders by name, the reference first.
        clock: what times them.
        seconds: budget of one contender.
        repeats, least: most and fewest samples of one contender.

    Returns:
        By name one entry per round: seconds of one call, or None where it did not run.

    >>> ticks = iter([1.0] * 100)
    >>> samples = interleaved({"a": int, "b": int}, lambda work, calls: next(ticks), seconds=2.0, repeats=5)
    >>> samples["a"]
    [1.0, 1.0, 1.0]
    """
    if min(repeats, least) < 1:
        raise OptionError(f"expected repeats and least >= 1, got repeats={repeats}, least={least}")
    least = min(least, repeats)
    names = list(work)
    calls = {}
    for name in names:
        # Where the first call is short, its second one says how long a call takes once everything is in place.
        once = clock(work[name], 1)
        once = clock(work[name], 1) if once < 10 * SHORTEST_SAMPLE else once
        calls[name] = max(1, math.ceil(SHORTEST_SAMPLE / max(once, 1e-7)))
    spent = dict.fromkeys(names, 0.0)
    done = dict.fromkeys(names, 0)
    samples: dict[str, list[float | None]] = {name: [] for name in names}
    while True:
        due = [n for n in names if done[n] < repeats and (done[n] < least or spent[n] < seconds)]
        if not due:
            return samples
        turn = list(dict.fromkeys([names[0], *due]))
        for name in turn if len(samples[names[0]]) % 2 == 0 else reversed(turn):
            value = clock(work[name], calls[name])
            samples[name].append(value)
            spent[name] += value * calls[name]
            done[name] += 1
        for name in set(names) - set(turn):
            samples[name].append(None)


def median(samples: Samples) -> float:
    """Median of the rounds that were run; nan if there are none.

    >>> median([3.0, None, 1.0, 2.0])
    2.0
    """
    present = [value for value in samples if value is not None]
    return statistics.median(present) if present else math.nan


def ratio(samples: Samples, reference: Samples) -> float:
    """Median of ``samples`` over median of ``reference``, both over the rounds in which both ran.

    A slow contender runs in the first rounds only; what the machine did later does not enter its ratio.

    >>> ratio([4.0, 6.0, None, None], [2.0, 2.0, 9.0, 9.0])
    2.5
    """
    pairs = [(a, b) for a, b in zip(samples, reference, strict=True) if a is not None and b is not None]
    if not pairs:
        return math.nan
    above, below = (statistics.median(values) for values in zip(*pairs, strict=True))
    return above / below if below > 0 else math.nan


def geometric_mean(values: Iterable[float]) -> float:
    """Exponential of the mean logarithm; nan for no values, or for one that is not positive.

    >>> geometric_mean([0.5, 2.0, 8.0])
    2.0
    """
    logs = [math.log(value) if value > 0 else math.nan for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan
