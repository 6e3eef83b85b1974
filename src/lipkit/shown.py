"""How results are shown: their text, of which `print` and notebooks show at most a screen, and the axes of plots."""

import dataclasses
import html
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from lipkit.errors import OptionError
from lipkit.text import printable, table

LINES, COLUMNS = 25, 100
"""Limits of the printed text of a result."""

Told = Callable[[str, int, int], None]
"""Callback of progress: (what was done, such as "certified"; number of samples done; number of all samples)."""


class Shown:
    """Base of results: `describe` gives the whole text; ``print``, ``repr`` and notebooks cut it by `screen`."""

    def describe(self) -> str:
        """A table of all fields; tensors and networks are shown by their size."""
        fields = [f.name for f in dataclasses.fields(self) if f.repr]  # type: ignore[arg-type]
        return "\n".join([type(self).__name__, table([], [[name, brief(getattr(self, name))] for name in fields])])

    def __str__(self) -> str:
        return screen(self.describe())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def screen(text: str) -> str:
    r"""A text cut to `LINES` lines of `COLUMNS` characters; the last line then says how much is left out.

    >>> len(screen("a\n" * 99).splitlines()), screen("a\n" * 99).splitlines()[-1]
    (25, '... and 75 lines more: describe() has all')
    """
    lines = text.splitlines()
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... and {len(lines) - LINES + 1} lines more: describe() has all"]
    return "\n".join(printable(line, COLUMNS) for line in lines)


def preformatted(text: str) -> str:
    """The text as HTML, for notebooks."""
    return f"<pre>{html.escape(text)}</pre>"


def upper(value: float, digits: int = 8) -> str:
    """An upper bound in a few digits, rounded up, so that the printed number is a bound, too.

    >>> upper(1.00000012), upper(1.0), upper(1.00000012, 4), upper(float("inf"))
    ('1.0000002', '1', '1.001', 'inf')
    """
    return _rounded(value, digits, ROUND_CEILING)


def lower(value: float, digits: int = 8) -> str:
    """A lower bound in a few digits, rounded down.

    >>> lower(0.9999999), lower(0.9999999, 4), lower(-0.12345, 4)
    ('0.9999999', '0.9999', '-0.1235')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    # Every float is an exact decimal. So few digits survive the conversion to float and back.
    return f"{float(Context(prec=digits, rounding=rounding).create_decimal(value)):.{digits}g}"


def figures(metrics: Mapping[str, float]) -> str:
    """Figures by name, one per line.

    >>> print(figures({"clean": 0.97, "lipschitz": 1.00000012}))
    clean      0.97
    lipschitz  1.0000002
    """
    return table([], [[name, upper(v) if name == "lipschitz" else f"{v:.8g}"] for name, v in metrics.items()])


def brief(value: Any) -> str:
    """One line for a value: numbers in eight digits, tensors and long containers by type and size.

    >>> brief(0.1 + 0.2), brief([1, 2]), brief(dict.fromkeys(range(99)))
    ('0.3', '[1, 2]', 'dict of 99')
    """
    if hasattr(value, "shape"):
        return f"{type(value).__name__} {str(value.dtype).rpartition('.')[2]} {tuple(value.shape)}"  # torch.float32
    if isinstance(value, float):
        return f"{value:.8g}"
    if len(shown := str(value)) <= 70 and "\n" not in shown:
        return shown
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else shown.splitlines()[0]


def axes(ax: Any, x: str, y: str) -> Any:
    """The axes of a plot, ``ax`` or new ones of matplotlib.pyplot, with labels ``x`` and ``y`` and a grid."""
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ModuleNotFoundError as error:
            raise OptionError('expected matplotlib to plot, got none: pip install "lipkit[train]"') from error
        ax = plt.figure(layout="constrained").add_subplot()
    ax.set(xlabel=x, ylabel=y)
    ax.grid(alpha=0.3)
    return ax
