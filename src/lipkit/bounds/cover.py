r"""From finitely many frequencies to all of them: cells whose centres prove a bound of the supremum.

Let :math:`G(w) = \sum_l A[l] e^{i\langle l, w\rangle}`, and :math:`M = \sup_w \|G(w)\|` be attained at :math:`w^*` by
the unit vector v. Then :math:`p(w) = v^*G(w)v` is a trigonometric polynomial of degrees :math:`m_1, m_2` with values in
[0, M] and :math:`p(w^*) = M`. By the inequality of Bernstein and Szego for :math:`q = p - M/2`,
:math:`q'^2 \le m^2 (M^2/4 - q^2)`, the angle :math:`\arccos(2p/M - 1)` changes by at most :math:`m_i` per unit along
axis i, so at the centre :math:`w_0 = w^* + \delta` of the cell that holds :math:`w^*`

.. math:: \|G(w_0)\| \ge p(w_0) \ge M \cos^2\varphi, \qquad \varphi = \tfrac12 (m_1|\delta_1| + m_2|\delta_2|)
          \quad\text{over the cell.}

The gradient of p vanishes at :math:`w^*`, so also :math:`p(w_0) \ge M - 2\varphi^2 \kappa` with :math:`\kappa = \sum_l
\|A[l]\| \max_i (l_i/m_i)^2`: the better bound for nearly constant symbols. Hence, if :math:`\|G(w_0)\|` in every cell
of a partition is at most the larger bound for :math:`M = \tau^2`, then :math:`M \le \tau^2`. Cells are diamonds, each
made of four of half the size; where G is far below the supremum they stay large.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lipkit.bounds.gram_symbol import GramSymbol
from lipkit.bounds.peak import half_turn
from lipkit.proof.roundoff import UNIT

# The plan of the first size assumes at most this many divisions of a cell.
_DEPTH = 10


class Cover(NamedTuple):
    """A proved upper bound (level) of sup ``||G||``, and the group and frequency, 2 pi point / periods, that set it."""

    level: float
    group: int
    point: tuple[int, int]
    periods: tuple[int, int]


def fraction(symbol: GramSymbol, periods: tuple[int, int], level: float) -> float:
    """Lower bound of ``||G|| / level`` at the centre of the cell in which ||G|| peaks at ``level``; void unless > 0."""
    phi = max(m * math.pi / n for m, n in zip(symbol.degrees, periods, strict=True))
    return float(_fractions(np.float64(phi), symbol.curvature / level))


def _fractions(phi: np.ndarray | np.float64, curvature: float) -> np.ndarray:
    """The larger of the module docstring's two lower bounds of p(w_0) / M, rounded down; ``curvature`` is kappa / M."""
    # Angles are rounded up, squares of cosines down.
    phi = phi * (1 + 8 * UNIT)
    bernstein = np.where(phi < math.pi / 2, np.cos(phi) ** 2 - 8 * UNIT, 0.0)
    return np.maximum(bernstein, 1 - 2 * phi * phi * (curvature * (1 + 16 * UNIT)) - 8 * UNIT)


def first_cells(symbol: GramSymbol, periods: tuple[int, int]) -> Tensor:
    """Group and centre, ``(N, 3)``, of cells that cover half of all frequencies: enough, as G(-w) = conj(G(w))."""
    n1, n2 = periods
    if n1 == 1 or n2 == 1:
        # Intervals, centred at odd multiples of half their length.
        line = torch.arange(1, max(n1, n2) // 2 + 1, 2)
        points = torch.stack((line, 0 * line) if n2 == 1 else (0 * line, line), 1)
    else:
        points = half_turn(periods)
        points = points[points.sum(1) % 2 == 0]
    group = torch.arange(symbol.groups).repeat_interleave(len(points))
    return torch.cat((group[:, None], points.repeat(symbol.groups, 1)), 1).to(symbol.lags.device)


def divided(cells: Tensor, periods: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Divide ``cells`` into cells of half the size; returns these and their ``periods``."""
    moves = [[1, 0], [-1, 0], [0, 1], [0, -1]]
    kept = [move for move in moves if all(n > 1 or not step for n, step in zip(periods, move, strict=True))]
    first, second = (2 if n > 1 else 1 for n in periods)  # an axis of one tap is not divided
    finer = periods[0] * first, periods[1] * second
    offsets = cells.new_tensor([[0, *move] for move in kept], dtype=torch.int64)
    children = ((cells * cells.new_tensor([1, first, second], dtype=torch.int64))[:, None] + offsets).flatten(0, 1)
    children[:, 1:] = torch.remainder(children[:, 1:], cells.new_tensor(finer, dtype=torch.int64))
    return children, finer


def choose_periods(symbol: GramSymbol, sample: Tensor, level: float) -> tuple[tuple[int, int], float]:
    """The ``periods`` with the fewest expected tests if ``||G||`` is distributed as in ``sample``, and that number."""
    axes = sum(m > 0 for m in symbol.degrees)
    one, two = symbol.degrees
    # Even numbers of points per turn, about q per degree.
    choices = [(2 * math.ceil(one * q / 2) or 1, 2 * math.ceil(two * q / 2) or 1) for q in range(1, 26)]
    first = [max(m * math.pi / n for m, n in zip(symbol.degrees, p, strict=True)) for p in choices]
    count = np.array([math.prod(p) for p in choices])
    depth = np.arange(_DEPTH)
    parts = _fractions(np.array(first)[:, None] / 2.0**depth, symbol.curvature / level)
    ordered = np.sort(sample.flatten().cpu().numpy())
    open_ = 1 - np.searchsorted(ordered, parts * level) / len(ordered)
    # Cells that are expected to fail at one depth are divided and tested at the next.
    tests = 1 + (open_ * 2.0 ** (axes * (depth + 1))).sum(1)
    total = count / 2 / axes * symbol.groups * tests
    best = int(total.argmin())
    return choices[best], float(total[best])


def cover(symbol: GramSymbol, start: Cover, sample: Tensor, tolerance: float) -> Cover:
    """Prove an upper bound of the supremum of ``||G||``: ``start.level``, raised as little as needed.

    A positive ``start.level`` below the supremum only costs time. The values of ``||G||`` in ``sample`` choose the size
    of cells; no proof rests on them. The level proved is at most ``start.level`` or ``(1 + tolerance)`` times the
    supremum, whichever is larger.
    """
    level, group, point, where = start
    periods, _ = choose_periods(symbol, sample, level)
    cells = first_cells(symbol, periods)
    while True:
        part = fraction(symbol, periods, level)
        if part > 0:
            cells = cells[~symbol.below(cells, periods, level * part, max(1 - part, tolerance))]
        if not len(cells):
            return Cover(level, group, point, where)
        if part < 1 / (1 + tolerance / 4):
            cells, periods = divided(cells, periods)
            continue
        # A cell this small fails only if the level is too low: raise it just above the norm at the cell's centre.
        g, i, j = cells[0].tolist()
        norm = float(torch.linalg.eigvalsh(symbol.at(cells[0], periods))[-1])
        raised = (norm + symbol.error) * (1 + tolerance * 0.9)
        # If that is no higher, only rounding (below 1e-6) made the test fail: leave room for it.
        level = raised if raised > level else level * (1 + tolerance / 4)
        group, point, where = g, (i, j), periods
