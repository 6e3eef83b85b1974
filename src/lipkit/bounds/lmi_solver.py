r"""Multipliers that make the LMI of :mod:`lipkit.bounds.lmi` as tight as possible, by a primal-dual method.

Minimise gamma over :math:`x = (\gamma, \lambda)` with :math:`H(x) \succ 0`; with the dual matrix X,
:math:`\langle X, H \rangle` is the duality gap. Every hidden unit i enters H by a matrix of rank two,
:math:`e_i v_i^\top + v_i e_i^\top` with :math:`v_i = e_i - w_i` (:math:`w_i` its row of weights), so with :math:`G =
H^{-1}` and the columns :math:`e_i` of E, :math:`v_i` of V, a Newton step has the matrix

.. math:: M_{il} = P^X_{il} P^G_{li} + P^X_{li} P^G_{il} + Q^X_{il} R^G_{il} + R^X_{il} Q^G_{il}, \qquad
          P^Y = E^\top Y V,\quad Q^Y = V^\top Y V,\quad R^Y = E^\top Y E .

A step costs an inverse and two dense products of the total width and a solve of the number of hidden units; 10 to 20
steps suffice. No proof rests on this file: its answer is proved, or rejected, by :func:`lipkit.bounds.lmi.proves_gain`.

Given multipliers can be balanced between input and output: a common factor t > 0 turns :math:`G = C M^+ C^\top`
(`lipkit.bounds.lmi.couplings`) into :math:`D G D`, :math:`D = \mathrm{diag}(\sqrt t\, I, I / \sqrt t)`, whose largest
eigenvalue is the gain.

Source: Helmberg, Rendl, Vanderbei & Wolkowicz, SIAM Journal on Optimization 6 (1996), for the direction; Mehrotra, SIAM
Journal on Optimization 2 (1992), for its second-order term. Using rank two and the layers is new here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lipkit.bounds.lmi import couplings, gain_bound, lmi_matrix
from lipkit.errors import OptionError
from lipkit.proof.norms import spectral_norms
from lipkit.proof.roundoff import product, size, to_double, up

_GOLDEN = (math.sqrt(5) - 1) / 2


def balance(weights: Sequence[Tensor], multipliers: Sequence[Tensor]) -> float:
    """The positive t for which ``t * multipliers`` should prove the smallest gain. The result itself proves nothing.

    Use it where multipliers were found for all outputs of a network, but only some outputs count. Arguments: those of
    `lipkit.bounds.lmi.proves_gain`, with at least one multiplier.

    >>> one = torch.ones(1, 1)
    >>> round(balance([2 * one, 0.5 * one], [torch.ones(1)]), 3)  # the gains 4t/2 and 0.25/(2t) agree
    0.25
    """
    if not bool(lmi_matrix(weights, multipliers, 0.0).isfinite().all()):
        return 1.0
    source, target = couplings(weights, multipliers)
    if not source.shape[1] or not bool((source.square().sum() + target.square().sum()).isfinite()):
        return 1.0  # no coupling, or one whose Gram matrices overflow
    if source.shape[0] > source.shape[1]:
        source = torch.linalg.qr(source, mode="r").R  # smaller, with the same eigenvalues of G
    a, b, c = source @ source.mT, target @ target.mT, source @ target.mT

    def gain(exponent: float) -> float:
        t = 2.0**exponent
        joint = torch.cat((torch.cat((t * a, c), dim=1), torch.cat((c.mT, b / t), dim=1)))
        return float(torch.linalg.eigvalsh(joint)[-1])

    top_a, top_b = (float(torch.linalg.matrix_norm(m, 2)) for m in (a, b))
    if not (top_a > 0 and top_b > 0):
        return 1.0
    # Start at equal norms of both diagonal blocks: the eigenvalue is convex in log t, and the coupling moves it little.
    centre = 0.5 * math.log2(top_b / top_a)
    low, high = centre - 4, centre + 4
    for _ in range(32):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if gain(left) < gain(right) else (left, high)
    return 2.0 ** min(max((low + high) / 2, -500.0), 500.0)


# Norms between this and its inverse keep all intermediate numbers in range.
_SMALLEST = 2.0**-120


def _reduced(weights: list[Tensor]) -> list[Tensor]:
    """Weights with fewer columns for x and fewer rows for y, but the same Gram matrices: the LMI has the same gains."""
    last, inputs = weights[-1], weights[0].shape[1]
    if last.shape[0] > last.shape[1]:
        weights = [*weights[:-1], torch.linalg.qr(last, mode="r").R]
    places = [inputs, *(inputs if len(a) < b.shape[1] else 0 for a, b in pairwise(weights))]  # columns that read x
    reads = [w[:, :place] for w, place in zip(weights, places, strict=True) if place]
    if inputs <= sum(map(len, reads)):
        return weights
    fewer = iter(torch.linalg.qr(torch.cat(reads).mT, mode="r").R.mT.split([*map(len, reads)]))
    return [torch.cat((next(fewer), w[:, k:]), 1) if k else w for w, k in zip(weights, places, strict=True)]


class GainProgram:
    """Minimises gamma over x = (gamma, lambda) with H(x) >= 0, by primal-dual Newton steps."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights
        self.widths = [w.shape[0] for w in weights[:-1]]
        self.n0, hidden = weights[0].shape[1], sum(self.widths)
        self.size = self.n0 + hidden + weights[-1].shape[0]
        self.units = slice(self.n0, self.n0 + hidden)
        self.ends = torch.ones(self.size, dtype=torch.bool)
        self.ends[self.units] = False

    def inside(self, x: Tensor) -> bool:
        """True if H(x) is positive definite."""
        return bool((x > 0).all()) and _is_definite(self.matrix(x))

    def matrix(self, x: Tensor) -> Tensor:
        return lmi_matrix(self.weights, list(x[1:].split(self.widths)), float(x[0]))

    def _reads(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield, for each layer, its units, the columns of H that they read, and their weights."""
        row = 0
        for w in self.weights[:-1]:
            yield slice(row, row + len(w)), slice(self.n0 + row - w.shape[1], self.n0 + row), w
            row += len(w)

    def differences(self, y: Tensor) -> Tensor:
        """``y V``, V with the columns v_i."""
        out = y[:, self.units].clone()
        for units, seen, w in self._reads():
            out[:, units] -= y[:, seen] @ w.mT
        return out

    def changed(self, y: Tensor, differences: Tensor, d: Tensor) -> Tensor:
        """The product ``y dH``, dH the change of H for a step ``d`` of x; ``differences`` is ``y V``."""
        out = torch.zeros_like(y)
        out[:, self.ends] = d[0] * y[:, self.ends]
        scaled = d[1:] * y[:, self.units]
        out[:, self.units] = scaled + d[1:] * differences
        for units, seen, w in self._reads():
            out[:, seen] -= scaled[:, units] @ w
        return out

    def newton_matrix(self, dual: Tensor, g: Tensor, xv: Tensor, gv: Tensor) -> Tensor:
        """M of the module docstring, after a row and a column for gamma, from X, G, ``X V`` and ``G V``."""
        units, ends, half = self.units, self.ends, xv[self.units] * gv[self.units].mT
        system = g.new_empty(len(half) + 1, len(half) + 1)
        system[1:, 1:] = half + half.mT + self.differences(xv.mT).mT * g[units, units]
        system[1:, 1:] += self.differences(gv.mT).mT * dual[units, units]
        system[0, 0] = (dual[ends][:, ends] * g[ends][:, ends]).sum()
        system[0, 1:] = (dual[ends][:, units] * gv[ends] + xv[ends] * g[ends][:, units]).sum(0)
        system[1:, 0] = system[0, 1:]
        return system

    def minimum(self, x: Tensor, accuracy: float = 1e-5, max_steps: int = 300) -> tuple[Tensor, int]:
        """Minimise gamma to a relative ``accuracy`` from a strictly feasible x; returns the point and the steps."""
        units, ends = self.units, self.ends
        dual = x.new_empty(0)
        for step in range(max_steps):
            h = self.matrix(x)
            g = torch.cholesky_inverse(torch.linalg.cholesky(h))
            if not step:
                dual = g / g.diagonal()[ends].sum()
            gap = float((dual * h).sum())
            if gap < accuracy * float(x[0]):
                return x, step
            centre, gv, xv = 0.2 * gap / self.size, self.differences(g), self.differences(dual)  # G V and X V
            system = self.newton_matrix(dual, g, xv, gv)
            # Jacobi scaling: multipliers may differ by many orders of magnitude.
            scale = system.diagonal().clamp_min(1e-300).rsqrt()
            factor, info = torch.linalg.cholesky_ex(scale[:, None] * system * scale)
            if int(info):
                return x, step
            right = centre * torch.cat((g.diagonal()[ends].sum()[None], 2 * gv[units].diagonal()))
            right[0] -= 1  # the objective is gamma
            change, direction, second = torch.zeros_like(h), x, x.new_zeros(())
            for corrects in (False, True):
                if corrects:  # second-order term: the changes of both matrices in the first direction
                    second = self.changed(change, self.differences(change), direction)
                    right[0] -= (second[ends] * g[ends]).sum()
                    right[1:] -= (second[units] * gv.mT + self.differences(second.mT).mT * g[units]).sum(1)
                direction = scale * torch.cholesky_solve((scale * right)[:, None], factor)[:, 0]
                moved = (self.changed(dual, xv, direction) + second) @ g
                change = centre * g - dual - (moved + moved.mT) / 2
            a = _length(dual, change, _is_definite)  # primal and dual steps differ
            b = _length(x, direction, self.inside)
            if max(a, b) < 1e-3:
                return x, step
            dual, x = dual + a * change, x + b * direction
        return x, max_steps


def _is_definite(h: Tensor) -> bool:
    return int(torch.linalg.cholesky_ex(h)[1]) == 0


def _length(start: Tensor, change: Tensor, inside: Callable[[Tensor], bool]) -> float:
    """Nearly the longest step length, at most 1, that stays ``inside``; 0 if it is below 1e-4."""
    step = 1.0
    while step > 1e-4 and not inside(start + step * change):
        step *= 0.85
    return 0.95 * step if step > 1e-4 else 0.0


def newton(barrier: Any, x: Tensor, weight: float, budget: int) -> tuple[Tensor, int]:
    """Minimise ``weight * x[0] + barrier.value(x)`` from a strictly feasible x; returns the point and the steps."""
    goal = torch.zeros_like(x)
    goal[0] = weight
    for step in range(1, budget + 1):
        gradient, hessian = barrier.derivatives(x)
        gradient = gradient + goal
        # Jacobi scaling: multipliers may differ by many orders of magnitude.
        scale = hessian.diagonal().clamp_min(1e-300).rsqrt()
        factor, info = torch.linalg.cholesky_ex(scale[:, None] * hessian * scale[None, :])
        if int(info):
            return x, step
        direction = -scale * torch.cholesky_solve((scale * gradient)[:, None], factor)[:, 0]
        decrement = -float(gradient @ direction)
        if not decrement > 1e-6:
            return x, step
        now, length = weight * float(x[0]) + barrier.value(x), 1.0
        while length > 1e-8:
            trial = x + length * direction
            if weight * float(trial[0]) + barrier.value(trial) <= now - 0.1 * length * decrement:
                break
            length /= 2
        else:
            return x, step
        x = trial
    return x, budget


def repaired(
    weights: Sequence[Tensor], found: Sequence[Tensor], safe: Sequence[Tensor], errors: Sequence[Tensor] = ()
) -> tuple[float, list[Tensor]]:
    """A proved gain (or ``inf``) and its multipliers: ``found``, or a mixture with the strictly feasible ``safe``."""
    # H is affine in (gamma, lambda): mixing with a strictly feasible point repairs what rounding spoiled.
    for share in (0.0, 1e-9, 1e-7, 1e-5, 1e-3, 1e-1, 1.0):
        mixed = [(1 - share) * a + share * b for a, b in zip(found, safe, strict=True)]
        gain = gain_bound(weights, mixed, errors)
        if math.isfinite(gain):
            return gain, mixed
    return math.inf, list(safe)


def minimise_gain(
    weights: Sequence[Tensor], errors: Sequence[Tensor] = (), accuracy: float = 1e-5
) -> tuple[float, list[Tensor], int]:
    """Nearly the smallest gain the LMI can prove for W_0 .. W_L, multipliers that prove it, and the Newton steps taken.

    `lipkit.bounds.lmi.proves_gain` has proved the gain, or, where each weight reads the layer before only, it is the
    product of the layers' norms, rounded up, if that is smaller. It is inf if nothing is proved.
    Arguments are those of `proves_gain`; the search ends at a relative ``accuracy``.

    Guarantee:
        Upper bound of the l2 gain for any activations with slopes in [0, 1], in exact arithmetic on these weights.
    """
    weights, errors = [to_double(w.detach()).cpu() for w in weights], [e.cpu() for e in errors]
    if not all(bool(torch.isfinite(w).all()) for w in weights):
        raise OptionError("weights: expected finite numbers, got NaN or infinity")
    bound, failed = math.inf, list[Tensor]()
    if all(b.shape[1] == len(a) for a, b in pairwise(weights)):
        norms = [float(spectral_norms(w)) for w in weights]
        for k, e in enumerate(errors):
            if bool(e.any()):
                off = torch.minimum(up(e.sum(), e.numel()), size(e[None])[0])  # of tiny ones, squares underflow
                norms[k] = float(up(norms[k] + off, 1))
        bound, failed = product(*norms), [torch.ones(len(w), dtype=torch.float64) for w in weights[:-1]]
        # Multipliers for weights of other norms leave the range of float64.
        if min(norms) < _SMALLEST or not max(norms) < 1 / _SMALLEST:
            return bound, failed, 0
    if len(weights) == 1:
        return bound, failed, 0
    gain, start = _feasible(weights)
    # The last weight is divided by this gain, which must be a normal number.
    if not (1e-100 < gain < 1e100 and 1e-200 < min(start) <= max(start) < 1e200):
        return bound, failed, 0
    safe = [torch.full((len(w),), value / gain, dtype=torch.float64) for w, value in zip(weights, start, strict=False)]
    program = GainProgram(_reduced([*weights[:-1], weights[-1] / gain]))
    x = torch.cat((torch.tensor([1.1], dtype=torch.float64), *(values / gain for values in safe)))
    if not program.inside(x):  # rounding can spoil the start
        return bound, failed, 0
    x, steps = program.minimum(x, accuracy)
    found, proved = repaired(weights, list((x[1:] * gain).split(program.widths)), safe, errors)
    return (found, proved, steps) if found <= bound else (bound, safe, steps)


def _feasible(weights: Sequence[Tensor]) -> tuple[float, list[float]]:
    r"""A gain g, and for the multipliers of each layer a number t_k, such that t_k / g is feasible: from all paths.

    In the form of H, the units of layer k, :math:`z_k = \sum_j W_{kj} v_j`, cost at most
    :math:`t_k\, c_k \sum_j \|W_{kj}\|^2 \|v_j\|^2`, where :math:`c_k` of the :math:`W_{kj}` are not 0, and y the same
    with :math:`t = 1`. So it is enough that each :math:`v_j` has more than all that reads it.
    """
    sizes = [weights[0].shape[1], *map(len, weights[:-1])]
    squares = list[list[float]]()  # of each layer, for each value before it
    for k, w in enumerate(weights):
        blocks = [w] if w.shape[1] == sizes[k] else w.split(sizes[: k + 1], 1)  # the layer before, or all values
        norms = [float(torch.linalg.matrix_norm(block, 2)) if block.any() else 0.0 for block in blocks]
        squares.append([0.0] * (k + 1 - len(norms)) + [sum(n > 0 for n in norms) * n * n for n in norms])
    totals = [1.0]  # of the layers from the last one on, y first
    for j in range(len(sizes) - 1, -1, -1):
        readers = [squares[k][j] for k in range(len(squares) - 1, j - 1, -1)]
        totals.append(1.1 * sum(t * s for t, s in zip(totals, readers, strict=True)) or 1e-9 * totals[-1])
    return math.sqrt(totals[-1]), totals[-2:0:-1]
