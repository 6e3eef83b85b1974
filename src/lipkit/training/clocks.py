"""The clock of training: a budget of time or samples that the schedule follows, and the limits of one call."""

from __future__ import annotations

import math
import re
import time
from typing import Any, Literal

from lipkit.text import printable

Request = Literal["", "save", "stop"]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?)\s*(s|m|min|h)?\s*(cpu|wall)?", re.ASCII)
_SAMPLES = re.compile(r"(\d+(?:\.\d*)?)\s*([kM]?)\s*(?:images|samples)", re.ASCII)


def parse_budget(text: str) -> tuple[float, Literal["cpu", "wall", "samples"]]:
    """A budget as (seconds, clock) or (samples, "samples"); ``ValueError`` for another text, or less than one sample.

    A time is a number, a unit (s, m or min, h; default s) and a clock: cpu (CPU time of this process, the default) or
    wall. Samples are written as in 1.5M images; "images" and "samples" mean the same.

    >>> parse_budget("400s"), parse_budget("1.5h"), parse_budget("10 min wall"), parse_budget("1.5M images")
    ((400.0, 'cpu'), (5400.0, 'cpu'), (600.0, 'wall'), (1500000.0, 'samples'))
    """
    if match := _SAMPLES.fullmatch(text.strip()):
        amount = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]]  # thousands, millions
        if 1 <= amount < math.inf:
            return amount, "samples"
    elif match := _TIME.fullmatch(text.strip()):
        amount = float(match[1]) * _UNITS[match[2] or ""]
        if 0 < amount < math.inf:
            return amount, "wall" if match[3] == "wall" else "cpu"
    examples = "400s, 10min, 1h or 1h wall, or a number of samples such as 1.5M images"
    raise ValueError(f"expected a time such as {examples}, got {printable(repr(text), 80)}")


class Clock:
    """Limits of time and samples: the budget that the schedule follows, and when to save or stop.

    A budget of time counts from ``since`` to `spend` only, so evaluations and checkpoints are free. Steps that an
    interruption lost do not count, because they are made again. All processes use the clock of the first one, because
    they must save and stop together.

    Attributes:
        amount, unit: size of the budget, infinite without one, and its unit.
        used: how much of the budget is spent, resumes included; the same in all processes. 0 without a budget.
        timed: whether the budget is one of time: what a step costs is known only after it.
        since: reading of ``now`` up to which ``used`` counts. saved: time of the last checkpoint.
    """

    def __init__(
        self, fabric: Any, budget: str | None, max_minutes: float | None, checkpoint_seconds: float | None
    ) -> None:
        self.fabric = fabric
        self.amount, self.unit = (math.inf, "") if budget is None else parse_budget(budget)
        self.timed, self.used, self.since = self.unit in ("cpu", "wall"), 0.0, 0.0
        self.now = time.process_time if self.unit == "cpu" else time.monotonic
        self.saved = time.monotonic()
        self.end = math.inf if max_minutes is None else self.saved + 60 * max_minutes
        self.pause = math.inf if checkpoint_seconds is None else checkpoint_seconds

    def spend(self, samples: int) -> None:
        """Count a step of ``samples`` samples, and the time since ``since``, which becomes now."""
        if self.unit == "samples":
            self.used += samples
        elif self.timed:
            before, self.since = self.since, self.now()
            self.used = self._of_first(self.used + self.since - before)

    def due(self) -> Request:
        """``"stop"`` after ``max_minutes``, ``"save"`` if ``checkpoint_seconds`` have passed, else ``""``."""
        if min(self.end, self.pause) == math.inf:
            return ""  # saves a broadcast
        now = time.monotonic()
        return self._of_first("stop" if now >= self.end else "save" if now - self.saved >= self.pause else "")

    def _of_first(self, value: Any) -> Any:
        return self.fabric.broadcast(value, src=0) if self.fabric.world_size > 1 else value
