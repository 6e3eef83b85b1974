"""Draws a table as an SVG file: measured figures as points or curves, the paper's as hollow markers or dashed lines."""

import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, PercentFormatter

from lipkit.report.plots import INK, SERIES, VARIABLES, dress, svg
from papers.table_runs import TableRecord, by_figure
from papers.tables import Picture, Table, is_fraction

_BRACKETS = re.compile(r"\(([^()]*)\)$")
Point = tuple[float, ...]


@dataclass
class Curve:
    """A series of points and what the paper prints for it.

    Attributes:
        name: in the legend.
        joined: whether a line joins the measured points.
        ours: measured points (x, y) in the order of the line; or (x, y, z) on a grid, drawn as contours of z.
        published: points of the paper.
        lines: lines of the paper, each a point and a slope.
    """

    name: str
    joined: bool = True
    ours: list[Point] = field(default_factory=list)
    published: list[Point] = field(default_factory=list)
    lines: list[tuple[tuple[float, float], float]] = field(default_factory=list)


@dataclass
class Panel:
    """One pair of axes; ``per_cent`` tells whether (x, y) are fractions."""

    title: str
    x_label: str
    y_label: str
    per_cent: tuple[bool, bool]
    series: dict[str, Curve] = field(default_factory=dict)

    @property
    def curves(self) -> list[Curve]:
        """The curves, in the order of the rows."""
        return [*self.series.values()]


def panels(table: Table, found: Mapping[str, Sequence[TableRecord]]) -> list[Panel]:
    """The panels of a table's figure, from means over the runs of each row.

    A curve goes through its points by ascending x, or in the order of the rows if x is itself a measured figure.
    """
    picture = table.figure
    assert picture is not None
    made: dict[tuple[str, str], Panel] = {}
    for row in table.rows:
        match = re.fullmatch(picture.rows, row.label)
        if match is None:
            continue
        groups = {"panel": "", "series": row.label, **match.groupdict()}
        known = {name: statistics.fmean(v) for name, v in by_figure(found.get(row.label, ())).items()}
        printed = {table.columns[c]: v for c, v in table.published(row).items() if v is not None}
        for y in picture.y:
            new = Panel(
                title=groups["panel"],
                x_label=picture.x_label or picture.x or "",
                y_label=picture.y_labels.get(y, y.partition("(*")[0]),
                per_cent=(picture.x is not None and is_fraction(picture.x), is_fraction(y)),
            )
            panel = made.setdefault((groups["panel"], y), new)
            curve = panel.series.setdefault(groups["series"], Curve(groups["series"], joined=not picture.points))
            curve.ours += _points(picture, y, known, groups)
            curve.published += _points(picture, y, printed, groups)
            for one in picture.beside.get(y, ()):
                if one.x is not None:
                    curve.ours += [(one.x, known[one.figure])] if one.figure in known else []
                    curve.published += [(one.x, printed[one.figure])] if one.figure in printed else []
                elif one.figure in printed:
                    value = printed[one.figure]
                    curve.lines.append((one.through, value) if one.through else ((0.0, value), 0.0))
    for curve in (curve for panel in made.values() for curve in panel.curves if not picture.x):
        curve.ours.sort()
        curve.published.sort()
    filled = [panel for panel in made.values() if any(c.ours or c.published or c.lines for c in panel.curves)]
    return filled or [*made.values()]


def _points(picture: Picture, y: str, values: Mapping[str, float], groups: Mapping[str, str]) -> list[Point]:
    """The point of a row; for y of the form ``name(*)`` the points of all figures ``name(1)``, ``name(2)``, ..."""
    if y.endswith("*)"):
        inside = {name: _BRACKETS.search(name) for name in values if name.startswith(f"{y.partition('(')[0]}(")}
        return [(*map(float, match[1].split(",")), values[name]) for name, match in inside.items() if match]
    x = float(groups["x"]) if picture.x is None else values.get(picture.x)
    return [] if x is None or y not in values else [(x, values[y])]


def draw(name: str, table: Table, found: Mapping[str, Sequence[TableRecord]]) -> str:
    """The picture of a table as the text of a self-contained SVG file, its panels in rows of three.

    Args:
        name: of the table; the ids in the file begin with it, so that a page can hold several files.
        table: a table with a ``figure``.
        found: the records of each row, by its label; a row without records shows its published points only.
    """
    assert table.figure is not None
    made = panels(table, found)
    curves = [curve for panel in made for curve in panel.curves]
    looks = {"hollow": any(c.published for c in curves), "dashed": any(c.lines for c in curves)}
    printed = " and ".join(look for look, used in looks.items() if used)
    note = f"{printed}: the paper's" if printed else "the paper prints no points of it"
    title = f"{table.source}: {table.description} ({note})"
    across = min(3, len(made))
    down = -(-len(made) // across)
    width = 3.8 * across + 1.8
    figure = Figure(figsize=(width, 3.6 * down + 1), layout="constrained")
    names = list(dict.fromkeys(curve.name for curve in curves))
    handles: dict[str, Any] = {}
    logs = (table.figure.log_x, table.figure.log_y)
    for number, panel in enumerate(made, 1):
        axis = figure.add_subplot(down, across, number)
        dress(axis)
        for curve in panel.curves:
            look = names.index(curve.name)
            style = {
                "color": SERIES[look % len(SERIES)], "marker": "os^D"[look // len(SERIES) % 4],
                "markersize": 3 if len(curve.ours) > 12 else 5,
            }  # fmt: skip
            if curve.ours and len(curve.ours[0]) == 3:
                x, y, z = np.array(curve.ours).T
                axis.tricontour(x, y, z, levels=8, colors=SERIES[0], linewidths=0.8)
                axis.plot(*max(curve.ours, key=lambda point: point[2])[:2], "o", color=SERIES[1])
            elif curve.ours:
                line = "-" if curve.joined else "none"
                handles[curve.name] = axis.plot(*zip(*curve.ours, strict=True), linestyle=line, **style)[0]  # type: ignore[arg-type]
            if curve.published:
                hollow = {**style, "markersize": 8, "fillstyle": "none", "linestyle": "none"}
                mark = axis.plot(*zip(*curve.published, strict=True), **hollow)[0]  # type: ignore[arg-type]
                handles.setdefault(curve.name, mark)
            for point, slope in curve.lines:
                mark = axis.axline(point, slope=slope, color=style["color"], linestyle="--", linewidth=1)
                handles.setdefault(curve.name, mark)
        axis.set_title(panel.title.replace("$", r"\$"), color=INK, fontsize=10)
        axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
        for at, side in enumerate((axis.xaxis, axis.yaxis)):
            if logs[at]:
                ticks = {point[at] for curve in panel.curves for point in (*curve.ours, *curve.published)}
                (axis.set_xscale if side is axis.xaxis else axis.set_yscale)("log")
                if len(ticks) < 8:
                    side.set_major_locator(FixedLocator(sorted(ticks)))
                side.set_major_formatter(lambda value, _: f"{value:g}")
                side.set_minor_formatter(NullFormatter())
            if panel.per_cent[at]:
                side.set_major_formatter(PercentFormatter(1.0))
    figure.suptitle("\n".join(textwrap.wrap(title, int(13 * width))).replace("$", r"\$"), fontsize=10, color=INK)
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=across, frameon=False, fontsize=8,
            labelcolor=INK,
        )  # fmt: skip
    figure.patch.set_facecolor("white")
    text = svg(figure, name)
    for variable in VARIABLES.values():  # many viewers ignore CSS variables
        text = text.replace(variable, variable[-8:-1])
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'
