from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from lipkit.cli import console
from lipkit.training import Progress

ROW = {"epoch": 1, "loss": 0.25, "accuracy": 0.5, "clean": 0.75, "certified(36/255)": 0.625, "lr": 0.1, "seconds": 1.0}


def events(epochs=2, steps=40, start=1):
    for epoch in range(start, epochs + 1):
        yield Progress(epoch, epochs, 20, steps, 0.5, 0.4, seconds_left=9.0)
        yield Progress(epoch, epochs, 40, steps, 0.25, 0.5, ROW | {"epoch": epoch}, seconds_left=7.0)


def test_lines_are_one_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    lines = console.Lines()
    lines.note("hello")
    for event in events():
        lines.progress(event)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "hello"
    assert shown[1].startswith(
        "epoch 1/2  loss 0.2500  accuracy 50.0 %  clean 75.0 %  certified(36/255) 62.5 %  left 0:07"
    )
    assert shown[2] == "epoch 2/2  loss 0.2500  accuracy 50.0 %  clean 75.0 %  certified(36/255) 62.5 %"


def test_a_long_epoch_has_lines_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    lines = console.Lines()
    for step in range(20, 2001, 20):
        clock[0] += 4.0
        row = ROW if step == 2000 else None
        lines.progress(Progress(1, 1, step, 2000, 0.5, None, row, seconds_left=2000 / step))
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "epoch 1/1  step 200/2000  loss 0.5000  left 0:10"
    assert len(shown) == 10
    assert shown[-1].startswith("epoch 1/1  loss 0.2500  accuracy 50.0 %  clean")


def test_the_bar_shows_loss_accuracy_certified_accuracy_and_time_left():
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=140)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
    with Bar(*columns, console=terminal, auto_refresh=False) as bar:
        shown = console.Terminal(bar)
        for event in events(start=2, epochs=3):
            shown.progress(event)
            bar.refresh()
        shown.note("[not markup]")
        assert bar.tasks[0].completed == bar.tasks[0].total == 120
        for event in events(epochs=1):  # the next seed gets a bar of its own
            shown.progress(event)
        assert len(bar.tasks) == 2
    text = out.getvalue()
    for part in (
        "epoch 2/3",
        "epoch 3/3",
        "loss 0.5000",
        "accuracy 40.0 %",
        "certified(36/255) 62.5 %",
        "0:09 left",
        "done",
    ):
        assert part in text, part
    assert "[not markup]" in text


def test_without_a_terminal_there_are_plain_lines(capsys):
    with console.display() as shown:
        assert isinstance(shown, console.Lines)
        shown.note("a")
    assert capsys.readouterr().err == "a\n"


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    with console.display() as shown:
        assert isinstance(shown, console.Terminal)
        for event in events():
            shown.progress(event)


@pytest.mark.parametrize("epochs", [2, 20, 200])
@pytest.mark.parametrize("width", [40, 48, 60, 72, 80, 140])
def test_a_narrow_terminal_keeps_epoch_and_certified_accuracy(monkeypatch, width, epochs):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    with console.display() as shown:
        for event in events(epochs=epochs, start=epochs - 1):
            shown.progress(event)
        shown._bar.refresh()
        with shown._bar.console.capture() as captured:
            shown._bar.console.print(shown._bar.get_renderable())
    line = Text.from_ansi(captured.get().splitlines()[-1]).plain
    assert len(line) <= width
    assert f"epoch {epochs}/{epochs}" in line
    assert "certified(36/255) 62.5 %" in line
    assert all((part in line) or width < 80 for part in ("loss 0.2500", "accuracy 50.0 %", "done"))
    assert all((part not in line) or width > 40 for part in ("loss", "accuracy", "done"))


def test_regression_figures():
    assert console.describe({"loss": 0.5, "test_mse": 0.0123456}) == "loss 0.5000  test mse 0.01235"
