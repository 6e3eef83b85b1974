"""Panels of curves as one SVG file: measured points, and a paper's points as hollow markers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, PercentFormatter

from lipkit.report.plots import INK, SERIES, VARIABLES, dress, svg


@dataclass(frozen=True)
class Curve:
    """A curve through points (x, y) in this order, and the points that a paper prints for it.

    Points (x, y, z) on a grid are drawn as contours of z, with the largest marked. ``lines`` are dashed lines that a
    paper prints, each given by a point and its slope.
    """

    name: str
    ours: Sequence[tuple[float, ...]]
    published: Sequence[tuple[float, ...]] = ()
    joined: bool = True
    lines: Sequence[tuple[tuple[float, float], float]] = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``per_cent`` is (x, y), True for an axis of fractions."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    per_cent: tuple[bool, bool] = (False, False)


def panels_svg(panels: Sequence[Panel], name: str, title: str, logs: tuple[bool, bool] = (False, False)) -> str:
    """Panels in rows of three as a self-contained SVG file; published points are hollow.

    Args:
        panels: at least one; a curve has the same look in all.
        name: prefix that keeps the ids of this file distinct from those of others.
        title: above them.
        logs: whether x and y are on logarithmic axes.
    """
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    width = 3.8 * across + 1.8
    figure = Figure(figsize=(width, 3.6 * down + 1), layout="constrained")
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    handles: dict[str, Any] = {}
    for number, panel in enumerate(panels, 1):
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
                made = axis.plot(*zip(*curve.published, strict=True), **hollow)[0]  # type: ignore[arg-type]
                handles.setdefault(curve.name, made)
            for point, slope in curve.lines:
                if slope:
                    made = axis.axline(point, slope=slope, color=style["color"], linestyle="--", linewidth=1)
                else:
                    made = axis.axhline(point[1], color=style["color"], linestyle="--", linewidth=1)
                handles.setdefault(curve.name, made)
        axis.set_title(panel.title.replace("$", r"\$"), color=INK, fontsize=10)
        axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
        for at, (log, side) in enumerate(zip(logs, (axis.xaxis, axis.yaxis), strict=True)):
            if log:
                ticks = {point[at] for curve in panel.curves for point in (*curve.ours, *curve.published)}
                (axis.set_xscale if side is axis.xaxis else axis.set_yscale)("log")
                if len(ticks) < 8:
                    side.set_major_locator(FixedLocator(sorted(ticks)))
                side.set_major_formatter(lambda value, _: f"{value:g}")
                side.set_minor_formatter(NullFormatter())
        for side, fraction in zip((axis.xaxis, axis.yaxis), panel.per_cent, strict=True):
            if fraction:
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
