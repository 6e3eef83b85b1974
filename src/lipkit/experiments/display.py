"""Where a run reports to while it works, and how it writes durations and tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lipkit.text import printable

if TYPE_CHECKING:
    from lipkit.training import Progress


class Display(Protocol):
    """Where a pipeline reports to."""

    def note(self, text: str) -> None:
        """Show one line."""

    def progress(self, event: Progress) -> None:
        """Show where training stands."""


class Silent:
    """Shows nothing."""

    def note(self, text: str) -> None: ...

    def progress(self, event: Progress) -> None: ...


def duration(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> duration(7), duration(75), duration(3700), duration(float("nan"))
    ('0:07', '1:15', '1:01:40', '-:--')
    """
    if seconds != seconds:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns, all to the left.

    >>> print(columns([["small", "a network"], ["kwlarge", "another"]]))
    small    a network
    kwlarge  another
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
