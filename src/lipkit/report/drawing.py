"""How plots look: SVG strings drawn through matplotlib's objects, no pyplot, no window, no shared state.

The colours in the SVG are CSS variables with a fallback, so the same picture follows a page's light or dark theme and
still stands alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

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


# A phone's page is 332 px wide: at this width in points its 9-point text is more than 11 px high.
NARROW = 3.7


def figure_of(panels: int, narrow: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, or, for narrow pages, one below the other."""
    figure = Figure(figsize=(NARROW, 3.5 * panels) if narrow else (7.6, 3.9), layout="constrained")
    FigureCanvasSVG(figure)
    rows, columns = (panels, 1) if narrow else (1, panels)
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(panels)]
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


def legend(axis: Axes, above: float = 3) -> None:
    """A legend that many points above the axes, where it covers no curve, if there is anything to name."""
    handles, labels = axis.get_legend_handles_labels()
    figure, grid = axis.get_figure(root=True), axis.get_gridspec()
    if not handles or figure is None or grid is None:
        return
    # from the panel's left edge on, over the labels of the axis
    corner = axis.transAxes + ScaledTranslation(-36 / 72, above / 72, figure.dpi_scale_trans)
    for columns in range(min(4, len(labels)), 0, -1):
        made = axis.legend(
            handles, labels, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), bbox_transform=corner,
            frameon=False, labelcolor=INK, fontsize=9, borderaxespad=0, handlelength=1.8, columnspacing=1.2,
        )  # fmt: skip
        if made.get_window_extent().width <= figure.bbox.width / grid.ncols - 8:
            return


def both(draw: Callable[[bool], Figure], name: str) -> str:
    """A plot twice, for wide and for narrow pages: ``.wide`` and ``.narrow``, of which the page shows one."""
    return "\n".join(
        f'<div class="{width}">{svg(draw(narrow), f"{name}-{width}")}</div>'
        for narrow, width in ((False, "wide"), (True, "narrow"))
    )


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
    spoken = f'class="plot" role="img" aria-label="plot: {name.partition("-")[0]}"'
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', rf"<svg \1{spoken}", text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*" ', r"<svg \1", text, count=1)
    text = text.replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.strip()
