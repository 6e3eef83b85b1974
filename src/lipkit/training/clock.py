"""When a long run saves in the middle of an epoch, and when its time is up."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

from lipkit.errors import OptionError

Wish = Literal["", "save", "stop"]


class Clock:
    """Wall-clock limits of one call of ``fit``, which the first process keeps for all.

    Args:
        max_minutes: after which training stops at a checkpoint; None for no limit.
        checkpoint_seconds: between checkpoints in the middle of an epoch; None for none there.

    Raises:
        OptionError: a limit that is not a finite number > 0.

    >>> Clock(max_minutes=None, checkpoint_seconds=60).wish_alone()
    ''
    """

    def __init__(self, max_minutes: float | None, checkpoint_seconds: float | None) -> None:
        for name, value in (("max_minutes", max_minutes), ("checkpoint_seconds", checkpoint_seconds)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise OptionError(f"expected {name} as a finite number > 0 or None, got {value}")
        self._limited = max_minutes is not None or checkpoint_seconds is not None
        self._end = time.monotonic() + 60 * max_minutes if max_minutes is not None else math.inf
        self._pause = checkpoint_seconds if checkpoint_seconds is not None else math.inf
        self._saved = time.monotonic()

    def wish_alone(self) -> Wish:
        """What this process' clock says now."""
        now = time.monotonic()
        if now >= self._end:
            return "stop"
        return "save" if now - self._saved >= self._pause else ""

    def wish(self, fabric: Any) -> Wish:
        """What the first process' clock says now, in all processes: they must save and stop together."""
        if not self._limited:
            return ""
        mine = self.wish_alone()
        return fabric.broadcast(mine, src=0) if fabric.world_size > 1 else mine

    def saved(self) -> None:
        """Take note of a checkpoint."""
        self._saved = time.monotonic()
