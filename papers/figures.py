"""The picture of a table: measured figures as points or curves, with the paper's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from papers.panels import Curve, Panel, panels_svg
from papers.table_runs import TableRecord, figures
from papers.tables import Picture, Table, is_fraction

_BRACKETS = re.compile(r"\(([^()]*)\)$")


def draw(name: str, table: Table, found: Mapping[str, Sequence[TableRecord]]) -> str:
    """The picture of a table as the text of an SVG file.

    Args:
        name: of the table.
        table: one that has a figure.
        found: the records of each row, by its label; a row without records shows its published points only.
    """
    assert table.figure is not None
    made = list(panels(table, found))
    curves = [curve for panel in made for curve in panel.curves]
    looks = {"hollow": any(c.published for c in curves), "dashed": any(c.lines for c in curves)}
    printed = " and ".join(look for look, used in looks.items() if used)
    note = f"{printed}: the paper's" if printed else "the paper prints no points of it"
    return panels_svg(
        made, name, f"{table.source}: {table.description} ({note})", logs=(table.figure.log_x, table.figure.log_y)
    )


@dataclass
class _Parts:
    """Points of one curve, measured (``ours``) and the paper's; dashed ``lines`` as (point, slope)."""

    ours: list[tuple[float, ...]] = field(default_factory=list)
    published: list[tuple[float, ...]] = field(default_factory=list)
    lines: list[tuple[tuple[float, float], float]] = field(default_factory=list)


def panels(table: Table, found: Mapping[str, Sequence[TableRecord]]) -> list[Panel]:
    """The panels of a table's figure, from means over the runs of each row.

    Points are sorted by x, or in the order of rows if x is itself a measured figure.
    """
    picture = table.figure
    assert picture is not None
    made: dict[tuple[str, str], dict[str, _Parts]] = {}
    for row in table.rows:
        match = re.fullmatch(picture.rows, row.label)
        if match is None:
            continue
        groups = {"panel": "", "series": row.label, **match.groupdict()}
        known = _mean([figures(one.record) for one in found.get(row.label, ())])
        printed = {table.columns[c]: v for c, v in table.published(row).items() if v is not None}
        for y in picture.y:
            parts = made.setdefault((groups["panel"], y), {}).setdefault(groups["series"], _Parts())
            parts.ours += _points(picture, y, known, groups)
            parts.published += _points(picture, y, printed, groups)
            for one in picture.beside.get(y, ()):
                if one.x is not None:
                    parts.ours += [(one.x, known[one.figure])] if one.figure in known else []
                    parts.published += [(one.x, printed[one.figure])] if one.figure in printed else []
                elif one.figure in printed:
                    value = printed[one.figure]
                    parts.lines.append((one.through, value) if one.through else ((0.0, value), 0.0))
    drawn = [
        Panel(
            title=panel,
            x_label=picture.x_label or picture.x or "",
            y_label=picture.y_labels.get(y, y.partition("(*")[0]),
            per_cent=(picture.x is not None and is_fraction(picture.x), is_fraction(y)),
            curves=[
                Curve(series, _ordered(picture, c.ours), _ordered(picture, c.published), not picture.points, c.lines)
                for series, c in curves.items()
            ],
        )
        for (panel, y), curves in made.items()
    ]
    return [panel for panel in drawn if any(c.ours or c.published or c.lines for c in panel.curves)] or drawn


def _ordered(picture: Picture, points: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return points if picture.x else sorted(points)


def _mean(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    shared = set.intersection(*map(set, runs)) if runs else set()
    return {name: math.fsum(run[name] for run in runs) / len(runs) for name in shared}


def _points(
    picture: Picture, y: str, values: Mapping[str, float], groups: Mapping[str, str]
) -> list[tuple[float, ...]]:
    """One point of a row; for y of the form ``name(*)`` all figures ``name(1)``, ``name(2)``, ... as a curve."""
    if y.endswith("*)"):
        inside = {name: _BRACKETS.search(name) for name in values if name.startswith(f"{y.partition('(')[0]}(")}
        return [(*map(float, match[1].split(",")), values[name]) for name, match in inside.items() if match]
    x = float(groups["x"]) if picture.x is None else values.get(picture.x)
    return [] if x is None or y not in values else [(x, values[y])]
