"""The clocks of training: limits of one call, and a budget of time or samples that the schedule follows."""

from __future__ import annotations

import math
import re
import time
from typing import Any, Literal

from lipkit.text import printable

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?)\s*(s|m|min|h)?\s*(cpu|wall)?", re.ASCII)
_SAMPLES = re.compile(r"(\d+(?:\.\d*)?)\s*([kM]?)\s*(?:images|samples)", re.ASCII)


def parse_budget(text: str) -> tuple[float, Literal["cpu", "wall", "samples"]]:
    """A budget as (seconds, clock) or (samples, "samples"); ``ValueError`` for another text, or less than one sample.

    A time is a number, a unit (s, min or h; default s) and a clock: cpu (CPU time of this process, the default) or
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


class Budget:
    """Time or samples that training may use, resumes included. The used fraction sets the rate; 1 ends training.

    Time counts between `start` and `charge` only, so evaluations and checkpoints are free. Steps that an interruption
    lost do not count, because they are made again.

    ``text`` is read by `parse_budget`, None is no limit; ``used`` is the amount used before a resume; ``now`` replaces
    the clock (in seconds) that ``text`` names.

    >>> budget = Budget("10s", used=4.0, now=iter([0.0, 1.0]).__next__)
    >>> budget.start()
    >>> budget.charge()
    >>> budget.fraction
    0.5
    """

    def __init__(self, text: str | None, used: float = 0.0, now: Any = None) -> None:
        self.amount, self.unit = (math.inf, "") if text is None else parse_budget(text)
        self.used = used  # 0 without a limit
        self._now = now or (time.process_time if self.unit == "cpu" else time.monotonic)
        self._since = 0.0

    @property
    def timed(self) -> bool:
        """True for a budget of time: the fraction used at the end of a step is not known before it."""
        return self.unit in ("cpu", "wall")

    def start(self) -> None:
        """Count the time from now."""
        self._since = self._now()

    def begin_step(self, samples: int) -> None:
        """Count the samples of a step before it is made: its rate is that at its end, as without a budget."""
        if self.unit == "samples":
            self.used += samples

    def charge(self) -> None:
        """Count the time that has passed since the last call."""
        if self.timed:
            now = self._now()
            self.used, self._since = self.used + now - self._since, now

    @property
    def fraction(self) -> float:
        """The used fraction of the budget, at most 1."""
        return min(1.0, self.used / self.amount)


Request = Literal["", "save", "stop"]


class Clock:
    """Wall-clock limits of one call of ``fit``; the first process decides for all.

    ``max_minutes`` is the time after which training ends at a checkpoint, ``checkpoint_seconds`` the time between
    checkpoints; None is no limit.

    >>> Clock(max_minutes=None, checkpoint_seconds=60).own_request()
    ''
    """

    def __init__(self, max_minutes: float | None, checkpoint_seconds: float | None) -> None:
        self._limited = max_minutes is not None or checkpoint_seconds is not None
        self._end = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._pause = math.inf if checkpoint_seconds is None else checkpoint_seconds
        self._saved = time.monotonic()

    def own_request(self) -> Request:
        """The action due by this process' clock: ``"stop"``, ``"save"`` or ``""``."""
        now = time.monotonic()
        if now >= self._end:
            return "stop"
        return "save" if now - self._saved >= self._pause else ""

    def request(self, fabric: Any) -> Request:
        """The first process' `own_request`, in all processes: they must save and stop together."""
        if not self._limited:
            return ""  # saves a broadcast
        mine = self.own_request()
        return fabric.broadcast(mine, src=0) if fabric.world_size > 1 else mine

    def saved(self) -> None:
        """Restart the time between checkpoints."""
        self._saved = time.monotonic()
