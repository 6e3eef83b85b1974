"""Text on a screen: tables, settings, radii; foreign text is escaped, so that it cannot pass for lipkit's output."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lipkit.errors import ShapeError


def printable(text: object, longest: int | None = None) -> str:
    r"""One line, at most ``longest`` characters; any that move the cursor, colour, hide or reorder text are escaped.

    Control characters (such as line breaks and ANSI escapes), format characters (such as zero width and overrides of
    the writing direction), surrogates, unassigned characters and all separators but the space become Python escapes.

    >>> print(printable("digits\n\x1b[1mcertified\u202e 100 %"))
    digits\n\x1b[1mcertified\u202e 100 %
    >>> printable("Größe", 4)
    'G...'
    """
    whole = str(text)
    if longest is not None and len(whole) > longest:
        whole = f"{whole[: max(longest - 3, 0)]}..."
    if whole.isprintable():
        return whole
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in whole)


def visible(value: Any) -> Any:
    """A value for a template: a string as `printable`; other values (numbers, markup) unchanged."""
    return printable(value) if type(value) is str else value


def printable_lines(text: str) -> str:
    r"""`printable` for a text of several lines, whose line breaks stay.

    >>> printable_lines("a\nb\x1b")
    'a\nb\\x1b'
    """
    return "\n".join(map(printable, text.split("\n")))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Rows in aligned columns, each cell `printable`; ``ShapeError`` unless all have the same number of cells.

    With a header the first column is aligned to the left and the others, figures, to the right; without one (empty) all
    are aligned to the left. Markdown needs a header.

    >>> print(table(["radius", "certified"], [["36/255", "95.1 %"], ["1", "3.0 %"]]))
    radius  certified
    ------  ---------
    36/255     95.1 %
    1           3.0 %
    >>> print(table(["class", "clean"], [["a|b", "95.1 %"]], markdown=True))
    | class |  clean |
    |:------|-------:|
    | a\\|b  | 95.1 % |
    >>> print(table([], [["small", "a network"], ["kwlarge", "another"]]))
    small    a network
    kwlarge  another
    """
    whole = [header, *rows] if header else rows
    for row in whole:
        if len(row) != len(whole[0]):
            raise ShapeError(f"expected rows of {len(whole[0])} cells, got {len(row)}: {list(row)}")
    if markdown:
        whole = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in whole]
    whole = [[printable(cell) for cell in row] for row in whole]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    lines = []
    for row in whole:
        cells = [c.rjust(w) if i and header else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip())
    if header:
        rules = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]  # ":" aligns
        lines.insert(1, f"|{'|'.join(rules)}|" if markdown else "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    r"""Rows as CSV, numbers as Python writes them, so that they read back exactly.

    >>> csv_text([["a", "b"], [1, 0.1]])
    'a,b\n1,0.1\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def format_radius(eps: float) -> str:
    r"""A radius as people write it: ``36/255`` where it is a whole number of 255ths of a pixel's range, else a decimal.

    >>> format_radius(36 / 255), format_radius(0.15), format_radius(1.0), format_radius(0.0)
    ('36/255', '0.15', '1', '0')
    >>> format_radius(float("inf"))
    'inf'
    """
    if not math.isfinite(eps) or eps == int(eps):
        return f"{eps:g}"
    steps = round(eps * 255)  # of 8-bit pixels
    if steps > 0 and abs(eps * 255 - steps) <= 1e-9 * steps:
        return f"{steps}/255"
    return f"{eps:.6g}"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and values, in order; radii (keys that hold "eps") as k/255 where exact.

    >>> list(flatten({"model": {"name": "small", "width": 1}, "eps": [36 / 255, 1.0]}))
    [('model.name', 'small'), ('model.width', '1'), ('eps', '36/255, 1')]
    """
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, ", ".join(_shown(name, item) for item in value)
        else:
            yield name, _shown(name, value)


def _shown(name: str, value: object) -> str:
    return format_radius(value) if isinstance(value, float) and "eps" in name.rpartition(".")[2] else str(value)
