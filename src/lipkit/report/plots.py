"""Plots as SVG strings, drawn through matplotlib's objects: no pyplot, no window, no shared state.

The colours in the SVG are CSS variables with a fallback, so the same picture follows a page's light or dark theme and
still stands alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lipkit.certificates.units import format_radius
from lipkit.report.record import Record
from lipkit.report.run_files import Radii

# matplotlib draws with these, each of which occurs nowhere else; the SVG gets the variable instead
_INK, _GRID = "#010203", "#010204"
_SERIES = ("#010205", "#010206", "#010207", "#010208")
_VARIABLES = {
    _INK: "var(--plot-ink, #40464f)",
    _GRID: "var(--plot-grid, #d9dde3)",
    _SERIES[0]: "var(--plot-1, #2563eb)",
    _SERIES[1]: "var(--plot-2, #c2410c)",
    _SERIES[2]: "var(--plot-3, #0f766e)",
    _SERIES[3]: "var(--plot-4, #7c3aed)",
}
_SHARES = re.compile(r"acc|clean|certified|pgd|robust", re.IGNORECASE)


def accuracy_curve(record: Record, radii: Radii | None = None) -> str:
    """Certified accuracy against the l2 radius as a curve (from all radii) and PGD accuracy at the attacked radii.

    Bars are Clopper-Pearson intervals. The true robust accuracy of the network lies between the two.
    """
    figure, axes = _figure(1)
    axis = axes[0]
    marked = [row.eps for row in record.certified] + [row.eps for row in record.attacked]
    right = 1.15 * max([*marked, 1e-3])
    if radii is not None and radii.correct.any():
        finite = radii.radius[radii.correct & np.isfinite(radii.radius)]
        # to the end of the curve, unless a few samples with huge radii would squeeze the rest
        longest = float(np.quantile(finite, 0.999)) if len(finite) else right
        right = max(right, min(1.02 * longest, 3 * right))
        eps = np.linspace(0, right, 400)
        axis.plot(eps, radii.certified(eps), color=_SERIES[0], label="certified (proved)", gid="certified-curve")
    points: Sequence[tuple[str, str, Sequence]] = (
        ("certified" if radii is None else "", _SERIES[0], record.certified),
        ("PGD (found by attack)", _SERIES[1], record.attacked),
    )
    for label, colour, rows in points:
        if not rows:
            continue
        rows = sorted(rows, key=lambda row: row.eps)
        values = np.array([row.share.value for row in rows])
        bars = [values - [row.share.low for row in rows], [row.share.high for row in rows] - values]
        axis.errorbar(
            [row.eps for row in rows],
            values,
            yerr=np.clip(bars, 0, 1),
            color=colour,
            marker="o",
            markersize=4,
            linestyle="--" if label else "none",
            linewidth=1.2,
            capsize=3,
            label=label or None,
        )
    axis.set_xlim(0, right)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("l2 radius")
    axis.set_ylabel("share of test samples")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    top = axis.secondary_xaxis("top")
    ticks = sorted({row.eps for row in record.certified if row.eps > 0})
    top.set_xticks(ticks, [format_radius(eps) for eps in ticks])
    top.tick_params(colors=_INK, length=3, labelsize=9)
    top.spines["top"].set_visible(False)
    _legend(axis)
    return _svg(figure, "accuracy")


def training_curves(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Loss and accuracies against the epoch, side by side; an empty string if there are neither.

    Args:
        series: (epoch, value) pairs by name. Names with "loss" go left, accuracies and other shares right.
    """
    losses = [name for name in series if "loss" in name.lower()]
    shares = [name for name in series if name not in losses and _is_share(name, series[name])]
    panels = [(title, names) for title, names in (("loss", losses), ("accuracy", shares)) if names]
    if not panels:
        return ""
    figure, axes = _figure(len(panels))
    for axis, (title, names) in zip(axes, panels, strict=True):
        for number, name in enumerate(names):
            epochs, values = zip(*series[name], strict=True)
            axis.plot(
                epochs,
                values,
                color=_SERIES[number % len(_SERIES)],
                linestyle=("-", "--", ":", "-.")[number // len(_SERIES) % 4],
                marker="o" if len(epochs) == 1 else None,
                label=name.replace("_", " ").replace("$", r"\$"),
            )
        axis.set_xlabel("epoch")
        axis.set_ylabel(title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if title == "accuracy":
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif all(value > 0 for name in names for _, value in series[name]):
            axis.set_yscale("log")
        _legend(axis)
    return _svg(figure, "training")


def _is_share(name: str, points: Sequence[tuple[float, float]]) -> bool:
    return _SHARES.search(name) is not None and all(0 <= value <= 1 for _, value in points)


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = [figure.add_subplot(1, panels, number + 1) for number in range(panels)]
    for axis in axes:
        axis.patch.set_visible(False)
        axis.grid(color=_GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(which="both", colors=_INK, length=3, labelsize=9)
        axis.xaxis.label.set_color(_INK)
        axis.yaxis.label.set_color(_INK)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_GRID)
    figure.patch.set_visible(False)
    return figure, axes


def _legend(axis: Axes) -> None:
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(frameon=False, labelcolor=_INK, fontsize=9)


def _svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    # text stays text (selectable, in the page's fonts); the salt makes ids differ between plots and agree between runs
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=empty)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # no XML prologue, no document type: it goes into HTML
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1class="plot" role="img"', text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*" ', r"<svg \1", text, count=1)
    text = text.replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.strip()
