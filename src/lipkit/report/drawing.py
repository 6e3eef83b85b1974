"""How plots look: SVG strings drawn through matplotlib's objects, no pyplot, no window, no shared state.

The colours in the SVG are CSS variables with a fallback, so the same picture follows a page's light or dark theme and
still stands alone.
"""

from __future__ import annotations

import io
import re

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# matplotlib draws with these, each of which occurs nowhere else; the SVG gets the variable instead
INK, GRID = "#010203", "#010204"
SERIES = ("#010205", "#010206", "#010207", "#010208")
_VARIABLES = {
    INK: "var(--plot-ink, #40464f)",
    GRID: "var(--plot-grid, #d9dde3)",
    SERIES[0]: "var(--plot-1, #2563eb)",
    SERIES[1]: "var(--plot-2, #c2410c)",
    SERIES[2]: "var(--plot-3, #0f766e)",
    SERIES[3]: "var(--plot-4, #7c3aed)",
}


def figure_of(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side."""
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = [figure.add_subplot(1, panels, number + 1) for number in range(panels)]
    for axis in axes:
        axis.patch.set_visible(False)
        axis.grid(color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(which="both", colors=INK, length=3, labelsize=9)
        axis.xaxis.label.set_color(INK)
        axis.yaxis.label.set_color(INK)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GRID)
    figure.patch.set_visible(False)
    return figure, axes


def legend(axis: Axes) -> None:
    """A legend without a frame, if there is anything to name."""
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page; ``name`` keeps its ids apart from those of other plots."""
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
