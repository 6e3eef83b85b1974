"""Displays of progress: a bar on a terminal, plain lines elsewhere, both on stderr. Results go to stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lipkit.experiments.run import Display, duration
from lipkit.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from lipkit.training import Progress


BAR, NARROW = 4, 60  # least columns of a bar, and of a terminal that gets one
WAIT = 10.0  # least seconds between two lines during an epoch


class Lines(Display):
    """One plain line per epoch, and up to ten during a long one, on stderr, for logs and pipes."""

    def __init__(self) -> None:
        self._time, self._place = time.monotonic(), 0

    def note(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def progress(self, event: Progress) -> None:
        now, place = time.monotonic(), position(event)
        if event.row is None and (now - self._time < WAIT or 10 * (place - self._place) < event.steps):
            return  # soon after the last line, or less than a tenth of an epoch
        self._time, self._place = now, place
        left = f"  left {duration(event.seconds_left)}" if place < event.epochs * event.steps else ""
        step, row = "", event.row
        if row is None:
            step, row = f"  step {event.step}/{event.steps}", {"loss": event.loss}
            row |= {} if event.accuracy is None else {"accuracy": event.accuracy}
        self.note(f"epoch {event.epoch}/{event.epochs}{step}  {describe(row)}{left}")


class Terminal(Display):
    """A progress bar on stderr with loss, accuracy, certified accuracy and remaining time, as far as they fit."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task: TaskID | None = None  # the bar of the training in progress
        self._measured = ""

    def note(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def progress(self, event: Progress) -> None:
        done, total = position(event), event.epochs * event.steps
        if event.row is not None:  # keep the last figure only: not every epoch is evaluated, and lines are narrow
            self._measured = (measured(event.row) or self._measured).rpartition("%  ")[2]
        label = f"epoch {event.epoch}/{event.epochs}"
        left = f"{duration(event.seconds_left)} left" if done < total else "done"
        accuracy = "" if event.accuracy is None else f"accuracy {100 * event.accuracy:.1f} %"
        parts = [part for part in (self._measured, left, f"loss {event.loss:.4f}", accuracy) if part]
        width = self._bar.console.width
        while len(parts) > 1 and len(label) + 3 + len("  ".join(parts)) > width - (BAR if width >= NARROW else 0):
            parts.pop()  # the most important come first
        text = "  ".join(parts)
        if self._task is None:
            self._task = self._bar.add_task(label, total=total, completed=done, text=text)
        self._bar.update(self._task, description=label, completed=done, text=text)
        if event.row is not None and event.epoch == event.epochs:
            self._task = None  # the next training gets a bar of its own


@contextmanager
def display() -> Iterator[Display]:
    """A `Terminal` if stderr is one, else `Lines`."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console, column = Console(stderr=True), Column(no_wrap=True)
    bars = [BarColumn(bar_width=None)] if console.width >= NARROW else []
    label, text = (
        TextColumn(f"{{task.{part}}}", markup=False, table_column=column) for part in ("description", "fields[text]")
    )
    with Bar(label, *bars, text, console=console) as bar:
        yield Terminal(bar)


def position(event: Progress) -> int:
    """Number of steps done since training began."""
    return (event.epoch - 1) * event.steps + event.step


def describe(row: Mapping[str, Any]) -> str:
    """The figures of an epoch in words: those of training, then those of `measured`."""
    parts = [f"loss {row['loss']:.4f}"] if "loss" in row else []
    if "accuracy" in row:
        parts.append(f"accuracy {100 * row['accuracy']:.1f} %")
    return "  ".join([*parts, measured(row)]).rstrip()


def measured(row: Mapping[str, Any]) -> str:
    """The results of an evaluation during training: clean and the first certified accuracy, or other numbers.

    >>> measured({"clean": 0.97, "certified(36/255)": 0.92, "certified(1)": 0.1, "lipschitz": 1.0})
    'clean 97.0 %  certified(36/255) 92.0 %'
    """
    parts = [f"clean {100 * row['clean']:.1f} %"] if "clean" in row else []
    certified = [name for name in row if name.startswith("certified(")][:1]
    parts += [f"{name} {100 * row[name]:.1f} %" for name in certified]
    if "test_mse" in row:
        parts.append(f"test mse {row['test_mse']:.4g}")
    return "  ".join(parts)
