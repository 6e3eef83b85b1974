"""The graph of a regression network of one variable, kept with a run and drawn from there.

It lies in ``curve.safetensors``, all float64: ``x`` (M,) ascending and ``y`` (M, d), the network on a grid that is fine
around ``centre`` (1,), the steepest place found; ``sample_x`` (N,) and ``sample_y`` (N, d), the test data.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lipkit import modules
from lipkit.data import Split
from lipkit.errors import RunError
from lipkit.evaluation import RegressionEvaluation
from lipkit.modules.storage import float64_copy
from lipkit.report.plots import GRID, SERIES, both, figure_of, legend
from lipkit.report.run_files import read_tensors
from lipkit.report.schema import RegressionRecord
from lipkit.shown import upper

CURVE = "curve.safetensors"
_GRID_POINTS, _ZOOM_POINTS = 801, 401


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """The columns of ``curve.safetensors``."""

    x: Tensor  # (M,) ascending
    y: Tensor  # (M, d)
    sample_x: Tensor  # (N,)
    sample_y: Tensor  # (N, d)
    centre: Tensor  # (1,)

    def __post_init__(self) -> None:
        pairs = ((self.x, self.y), (self.sample_x, self.sample_y))
        if any(a.ndim != 1 or b.ndim != 2 or len(a) != len(b) or not len(a) for a, b in pairs):
            raise ValueError(f"expected (M,) with (M, d), got {[(tuple(a.shape), tuple(b.shape)) for a, b in pairs]}")
        if self.y.shape[1] != self.sample_y.shape[1] or self.centre.shape != (1,):
            raise ValueError("expected one centre, and as many outputs as targets")


def curve_of(network: modules.Network, evaluation: RegressionEvaluation, split: Split) -> Curve | None:
    """The graph of a network with inputs of shape (1,), sampled in float64; None for other networks."""
    if tuple(network.input_shape) != (1,):
        return None
    sample_x = split.batch(torch.arange(len(split)))[0].cpu().double()[:, 0]
    sample_y = evaluation.certificate.target
    low, high = (float(v) for v in torch.aminmax(sample_x))
    margin = 0.05 * (high - low) or 1.0  # 1 if all samples are equal
    centre = (evaluation.search.x + evaluation.search.y).double() / 2
    reach = zoom(float(sample_y.max() - sample_y.min()), evaluation.certificate.constant, high - low)
    ends = (low - margin, high + margin, _GRID_POINTS), (float(centre) - reach, float(centre) + reach, _ZOOM_POINTS)
    x = torch.cat([torch.linspace(*grid, dtype=torch.float64) for grid in ends]).sort().values
    with torch.no_grad():
        y = float64_copy(network)(x[:, None])
    return Curve(x, y, sample_x, sample_y, centre.reshape(1))


def zoom(rise: float, constant: float, width: float) -> float:
    """Half the width of the close view, which is three times the width in which the steepest line climbs ``rise``."""
    return min(1.5 * rise / constant, width / 2) if rise > 0 and constant > 0 else width / 2 or 1.0


def load_curve(folder: Path) -> Curve | None:
    """Read ``curve.safetensors``; None if there is none, RunError if its tensors do not fit together."""
    path = folder / CURVE
    tensors = read_tensors(path, [field.name for field in dataclasses.fields(Curve)])
    try:
        return None if tensors is None else Curve(**tensors)
    except ValueError as error:
        raise RunError(f"{path}: expected the graph of a network, got {error!r}") from None


def curve_plot(record: RegressionRecord, curve: Curve) -> str:
    """Two plots: data and network; and a close view of the steepest place, with the cone of the proved constant."""
    return both(lambda narrow: _curve(record, curve, narrow), "curve")


def _curve(record: RegressionRecord, curve: Curve, narrow: bool) -> Figure:
    figure, (whole, close) = figure_of(2, narrow)
    centre = float(curve.centre)
    x, y = curve.x.numpy(), curve.y.numpy()
    outputs = y.shape[1]
    steepest = max(range(outputs), key=lambda j: record.outputs[j].steepest)
    rise, width = (float(values.max() - values.min()) for values in (curve.sample_y, curve.sample_x))
    reach = zoom(rise, record.lipschitz.computed, width)
    near = np.abs(x - centre) <= reach
    # The cone that the steepest output cannot leave: top +- slope |x - centre|.
    slope, top = record.outputs[steepest].constant, float(np.interp(centre, x, y[:, steepest]))
    ends = np.array([centre - reach, centre, centre + reach])
    below, above = top - slope * np.abs(ends - centre), top + slope * np.abs(ends - centre)
    proved = f"proved slope {upper(slope, 4)}"
    close.fill_between(ends, below, above, color=SERIES[2], alpha=0.15, linewidth=0, label=proved, gid="cone")
    for sign in (-1, 1):
        close.plot(ends, top + sign * slope * (ends - centre), color=SERIES[2], linewidth=0.8, linestyle="--")
    sample_x, sample_y = curve.sample_x.numpy(), curve.sample_y.numpy()
    inside = np.abs(sample_x - centre) <= reach
    for axis, chosen, samples in ((whole, np.ones_like(near), np.ones_like(inside)), (close, near, inside)):
        for j in range(outputs):
            colour = SERIES[j % len(SERIES)]
            name = "network" if outputs == 1 else f"network, output {j}"
            data = SERIES[1] if outputs == 1 else colour
            label = "test data" if j == 0 else None
            points = sample_x[samples], sample_y[samples, j]
            axis.plot(*points, ".", color=data, markersize=4, alpha=0.7, label=label)
            axis.plot(x[chosen], y[chosen, j], color=colour, linewidth=1.4, label=name)
        axis.set_xlabel("input")
        axis.set_ylabel("output")
    whole.axvline(centre, color=GRID, linewidth=1.2, linestyle="--")
    close.set_xlim(centre - reach, centre + reach)
    shown = np.concatenate((y[near, steepest], sample_y[:, steepest]))
    margin = 0.08 * (float(shown.max() - shown.min()) or 1.0)  # 1 for constant values
    close.set_ylim(float(shown.min()) - margin, float(shown.max()) + margin)
    legend(whole)
    legend(close)
    return figure
