"""Plots of a run as SVG in HTML: accuracy against the radius, training against the epoch."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from matplotlib.transforms import ScaledTranslation

from lipkit.certificates import Certificate
from lipkit.report.run_files import certified_curve
from lipkit.report.schema import Record
from lipkit.text import format_radius, printable

# Placeholder colours for matplotlib, unlike any other; `svg` replaces them by CSS variables.
INK, GRID = "#010203", "#010204"
SERIES = ("#010205", "#010206", "#010207", "#010208")
VARIABLES = {
    INK: "var(--plot-ink, #40464f)",
    GRID: "var(--plot-grid, #d9dde3)",
    SERIES[0]: "var(--plot-1, #2563eb)",
    SERIES[1]: "var(--plot-2, #c2410c)",
    SERIES[2]: "var(--plot-3, #0f766e)",
    SERIES[3]: "var(--plot-4, #7c3aed)",
}

# Width in inches for phones: shown 332 px wide, its 9-point text is more than 11 px high.
NARROW = 3.7


def figure_of(panels: int, narrow: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, or, for narrow pages, one below the other."""
    figure = Figure(figsize=(NARROW, 3.5 * panels) if narrow else (7.6, 3.9), layout="constrained")
    FigureCanvasSVG(figure)
    rows, columns = (panels, 1) if narrow else (1, panels)
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(panels)]
    for axis in axes:
        dress(axis)
    figure.patch.set_visible(False)
    return figure, axes


def dress(axis: Axes) -> None:
    """Give ``axis`` the colours and the grid that all plots have."""
    axis.patch.set_visible(False)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", colors=INK, length=3, labelsize=9)
    axis.xaxis.label.set_color(INK)
    axis.yaxis.label.set_color(INK)
    for side, spine in axis.spines.items():  # only the left and bottom lines of the frame
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def legend(axis: Axes, above: float = 3) -> None:
    """Put a legend ``above`` points over the axes, where it hides no curve; none if no curve has a label."""
    handles, labels = axis.get_legend_handles_labels()  # of the curves that have one
    figure, grid = axis.get_figure(root=True), axis.get_gridspec()
    if not handles or figure is None or grid is None:
        return
    # start left of the axis, above its labels
    corner = axis.transAxes + ScaledTranslation(-36 / 72, above / 72, figure.dpi_scale_trans)
    for columns in range(min(4, len(labels)), 0, -1):
        made = axis.legend(
            handles, labels, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), bbox_transform=corner,
            frameon=False, labelcolor=INK, fontsize=9, borderaxespad=0, handlelength=1.8, columnspacing=1.2,
        )  # fmt: skip
        if made.get_window_extent().width <= figure.bbox.width / grid.ncols - 8:
            return


def both(draw: Callable[[bool], Figure], name: str) -> str:
    """A plot in two versions, ``.wide`` and ``.narrow``; the page shows the one that fits."""
    return "\n".join(
        f'<div class="{width}">{svg(draw(narrow), f"{name}-{width}")}</div>'
        for narrow, width in ((False, "wide"), (True, "narrow"))
    )


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for HTML. ``name`` prefixes its ids, so that plots on one page do not collide."""
    buffer = io.StringIO()
    # Text stays text (selectable, in the page's fonts). The salt makes ids unique to a plot and reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=empty)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # without XML prologue and document type, for HTML
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    spoken = f'class="plot" role="img" aria-label="plot: {name.partition("-")[0]}"'
    # Drop width and height, so that the page sets the size; the viewBox stays.
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', rf"<svg \1{spoken}", text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*" ', r"<svg \1", text, count=1)
    text = text.replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text.strip()


_ACCURACY = re.compile(r"acc|clean|certified|pgd|robust", re.IGNORECASE)


def accuracy_curve(record: Record, certificate: Certificate | None = None) -> str:
    """Plot of accuracy against the l2 radius: certified as a curve (with ``certificate``), under attack as points.

    Bars are Clopper-Pearson intervals. The true robust accuracy of the network lies between the two.
    """
    return both(lambda narrow: _accuracy(record, certificate, narrow), "accuracy")


def _accuracy(record: Record, certificate: Certificate | None, narrow: bool) -> Figure:
    figure, (axis,) = figure_of(1, narrow)
    marked = [row.eps for row in record.certified] + [row.eps for row in record.attacked]
    right = 1.15 * max([*marked, 1e-3])  # the end of the axis
    if certificate is not None and certificate.correct.any():
        finite = certificate.radius[certificate.correct & certificate.radius.isfinite()]
        # Up to the end of the curve, unless a few huge radii would squeeze the rest.
        longest = float(finite.quantile(0.999)) if len(finite) else right
        right = max(right, min(1.02 * longest, 3 * right))
        eps = np.linspace(0, right, 400)
        shares, name = certified_curve(certificate, eps), "certified (proved)"
        axis.plot(eps, shares, color=SERIES[0], label=name, gid="certified-curve")
    attacked = max((row.share.total for row in record.attacked), default=0)
    points: Sequence[tuple[str, str, Sequence]] = (
        ("certified" if certificate is None else "", SERIES[0], record.certified),
        (f"{record.attack.short.upper()} ({attacked} attacked)", SERIES[1], record.attacked),
    )
    for label, colour, rows in points:
        if not rows:
            continue
        rows = sorted(rows, key=lambda row: row.eps)
        values = np.array([row.share.value for row in rows])
        bars = [values - [row.share.low for row in rows], [row.share.high for row in rows] - values]
        axis.errorbar(
            [row.eps for row in rows], values, yerr=np.clip(bars, 0, 1), color=colour, capsize=3, label=label or None,
            marker="o", markersize=4, linestyle="none",  # nothing is known between two radii
        )  # fmt: skip
    axis.set(xlim=(0, right), ylim=(0, 1.02), xlabel="l2 radius", ylabel="fraction of test samples")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    top = axis.secondary_xaxis("top")  # the radii of the record as k/255
    ticks = sorted({row.eps for row in record.certified if row.eps > 0})
    top.set_xticks(ticks, _apart([format_radius(eps) for eps in ticks], [eps / right for eps in ticks], narrow))
    top.tick_params(colors=INK, length=3, labelsize=9)
    top.spines["top"].set_visible(False)
    legend(axis, above=20)  # over the labels of the top axis
    return figure


def certified_curves(curves: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """Plot of certified accuracy against the l2 radius, with one curve (radii, fractions) for each name."""

    def draw(narrow: bool) -> Figure:
        figure, (axis,) = figure_of(1, narrow)
        for number, (name, (eps, values)) in enumerate(curves.items()):
            axis.plot(eps, values, **_look(number, name))
        axis.set(xlim=(0, None), ylim=(0, 1.02), xlabel="l2 radius", ylabel="certified accuracy")
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        legend(axis)
        return figure

    return both(draw, "comparison")


def _look(number: int, name: str) -> dict[str, Any]:
    """Colour, line style and label of a curve by number; the line style changes when the colours are used up."""
    line = ("-", "--", ":", "-.")[number // len(SERIES) % 4]
    label = printable(name, 40).replace("$", r"\$")  # $...$ is mathematics to matplotlib
    return {"color": SERIES[number % len(SERIES)], "linestyle": line, "label": label}


def _apart(labels: Sequence[str], places: Sequence[float], narrow: bool) -> list[str]:
    """The labels, blank where they would overlap the previous one; ``places`` are in [0, 1]."""
    kept, end = [], -1.0
    for label, place in zip(labels, places, strict=True):
        half = (0.013 if narrow else 0.006) * (len(label) + 1)  # half the label, in widths of the axes
        kept.append(label if place - half >= end else "")
        end = place + half if kept[-1] else end
    return kept


def training_curves(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Loss and accuracies against the epoch, side by side; an empty string if none of them has two epochs.

    ``series`` are (epoch, value) pairs by name. Losses and squared errors go left, accuracies right.
    """
    losses = [name for name in series if "loss" in name.lower() or name.endswith("mse")]
    shares = [name for name, points in series.items() if all(0 <= value <= 1 for _, value in points)]
    accuracies = [name for name in shares if name not in losses and _ACCURACY.search(name)]
    panels = [(title, names) for title, names in (("loss", losses), ("accuracy", accuracies)) if names]
    if all(len(series[name]) < 2 for _, names in panels for name in names):
        return ""

    def draw(narrow: bool) -> Figure:
        figure, axes = figure_of(len(panels), narrow)
        for axis, (title, names) in zip(axes, panels, strict=True):
            for number, name in enumerate(names):
                epochs, values = zip(*series[name], strict=True)
                marker = "o" if len(epochs) == 1 else None  # a line of one point is invisible
                axis.plot(epochs, values, marker=marker, **_look(number, name.replace("_", " ")))
            axis.set(xlabel="epoch", ylabel=title)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            if title == "accuracy":
                axis.yaxis.set_major_formatter(PercentFormatter(1.0))
            elif all(value > 0 for name in names for _, value in series[name]):
                # Plain numbers as ticks: the exponents of powers would be too small on a phone.
                seen = [value for name in names for _, value in series[name]]
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(seen) < 30 * min(seen) else (1,)))
                axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.yaxis.set_minor_formatter(NullFormatter())
            legend(axis)
        return figure

    return both(draw, "training")
