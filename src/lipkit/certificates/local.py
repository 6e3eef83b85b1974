r"""Local certificates: linear bounds of the logits that hold on a ball around each sample, proved in floating point.

On the ball of radius R around x, inside the network's ``input_range``, every value v of the machine has
:math:`|v| \le H`, and every number z that goes into an activation lies in [l, u], where two lines enclose the
activation (`lipkit.certificates.relaxation`). Rows C of an inequality on the logits go back through the nodes of the
`Circuit`; row by row

.. math:: C \hat f(x') \ge A x' + c - e, \qquad
          \min_{\|x' - x\| \le r} A x' + c - e = A x + c - e - r \|A\|_2 \quad\text{for every } r \le R,

which is positive up to a radius in closed form. Such rows bound the pre-activations too, from the first layer on.

**Rounding.** The inequality holds for *any* rows, so computed rows are used as they are, and e subtracts the loss of
each step, with H for the values. One vector E per node serves all rows, :math:`e \mathrel{+}= |A| E`. It has the terms

- of a linear map, :math:`\gamma_n |W| H` (products by the adjoint) and :math:`\gamma_m |k|` (its bias), and in the
  evaluator's arithmetic :math:`\gamma_d (|W| H + |k|)`, its own rounding of :math:`W v + k`;
- of an activation, :math:`2 u \max |a| H` (slopes) and :math:`\gamma_m \max |b|`, and the evaluator's error there;
- where rows meet at a shared value, :math:`2 u |A| H` for each sum; at a leaf, :math:`|A|_2` times its ball;
- of the running constant, :math:`\gamma` times the sum of the moduli of its terms; for underflow, the smallest normal
  number per product.

All other numbers (l, u, H, lines, ...) are rounded outward before they are used.

References: Zhang, Weng, Chen, Hsieh, Daniel, "Efficient neural network robustness certification with general
activation functions", NeurIPS 2018 (the lines); Weng et al., "Towards fast computation of certified robustness for
ReLU networks", ICML 2018.
"""

import copy
import itertools
import math

import torch
from torch import Tensor

from lipkit.certificates.circuit import Circuit, Leaf, Linear, Noise, Scalar, Stack, Total
from lipkit.certificates.relaxation import Lines
from lipkit.errors import NoRuleError
from lipkit.modules.machine import ErrorBound, ProvedModule, advance, prepare, start
from lipkit.modules.network import Network
from lipkit.proof.roundoff import FLOAT64, Arithmetic, grow, next_down, next_up, size
from lipkit.shown import Told

_UNIT, _TINY = FLOAT64.unit, FLOAT64.tiny
# Numbers of the widest value in one block of rows: about 10 such tensors are alive at once.
_BLOCK = 1 << 23
# Sums have at most 2^22 terms: factors that cover the rounding of sums of terms >= 0.
_UP = 1 + 2.0**-29
_TOLERANCE = 1e-3
_MOST_PASSES = 16
# Up to this many rows, which are mostly those of the logits, `Ball._inside` tries more splits.
_FEW = 64
_LARGEST = 2.0**40


def dot(rows: Tensor, vector: Tensor) -> Tensor:
    """Inner products (N or 1, R) of rows (N or 1, R, ...) and vectors (N or 1, ...)."""
    a, v = rows.reshape(*rows.shape[:2], -1), vector.reshape(len(vector), -1)
    if len(a) == 1:
        return (a[0] @ v.mT).mT  # rows that all samples share: one product of matrices
    return a @ v[0] if len(v) == 1 else (a @ v[:, :, None])[:, :, 0]


class Ball:
    """Bounds of every value of a circuit for inputs in ``box`` and within a finite ``radius`` (N,) of N samples x.

    ``walks`` are the error bounds of `Bounds.walks`, from which each `Leaf` gets its ball. All is float64.
    """

    def __init__(
        self,
        circuit: Circuit,
        x: Tensor,
        radius: Tensor,
        box: tuple[float | Tensor, float | Tensor] | None,
        walks: dict[int, ErrorBound],
    ) -> None:
        self.circuit, self.x, self.radius, self.walks = circuit, x, radius, walks
        self.wide = radius.reshape(-1, *[1] * (x.ndim - 1))
        low, high = next_down(x - self.wide), next_up(x + self.wide)  # the cube around the ball
        self.moves: tuple[Tensor, Tensor] | None = None
        if box is not None:
            low, high = low.clamp_min(box[0]), high.clamp_max(box[1])  # no input lies outside
            self.moves = next_down(low - x), next_up(high - x)
        self.fits = radius.isfinite()  # samples for which every bound so far is finite and in range
        self.sizes: list[Tensor] = [torch.maximum(low.abs(), high.abs())]
        self.errors: list[Tensor] = []
        self.lost: list[Tensor] = []
        self.lines: dict[int, Lines] = {}
        self.ranges: dict[int, tuple[Tensor, Tensor]] = {0: (low, high)}
        for value, (node, sources) in enumerate(zip(circuit.nodes, circuit.sources, strict=True), 1):
            size, error, lost = self._node(value, node, [self.sizes[source] for source in sources], sources)
            self.fits &= size.flatten(1).isfinite().all(1) & error.flatten(1).isfinite().all(1)
            self.sizes.append(size)
            self.errors.append(error)
            self.lost.append(lost)
            if value in circuit.read:  # bounds by rows are dear: only activations need them
                self.ranges[value] = self._range(value)

    def _node(
        self, value: int, node: object, given: list[Tensor], sources: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """H and E of a node's output (module docstring), and (N,) the most that underflow takes off a row."""
        shape = self.circuit.shapes[value]
        outputs = math.prod(shape)
        lost = sum((size.flatten(1).sum(1) for size in given), torch.zeros_like(self.radius))
        if isinstance(node, Linear):
            sums = grow(node.moduli(given[0]) * _UP)  # |W| H
            error = (FLOAT64.gamma(node.terms + 2) if node.terms else 0.0) * sums  # of rows times W, by the adjoint
            lost = node.terms * lost
            if node.bias is not None:
                error = error + FLOAT64.gamma(outputs + 2) * node.bias.abs()  # of rows times k
                sums = sums + node.bias.abs()  # |W| H + |k|, what the machine rounds
            size, noise = sums, self._noise(sums, node.noise, given)
        elif isinstance(node, Total):
            parts = zip(node.factors, given, strict=True)
            sums = size = grow(torch.stack([abs(factor) * part for factor, part in parts]).sum(0) * _UP)
            exact = all(abs(factor) in (0.0, 1.0) for factor in node.factors)  # signs round nothing
            error = torch.zeros_like(sums) if exact else FLOAT64.gamma(4) * sums
            noise = self._noise(sums, node.noise, given)
            if node.flushed and self.circuit.arithmetic is not None:
                noise = noise + 8 * self.circuit.arithmetic.tiny  # numbers that are compared may be flushed
        elif isinstance(node, Scalar):
            lines = self.lines[value] = node.lines(*self.ranges[sources[0]])
            steep = torch.maximum(lines.low_slope.abs(), lines.high_slope.abs())
            high = torch.maximum(lines.low.abs(), lines.high.abs())
            error = 2 * _UNIT * steep * given[0] + FLOAT64.gamma(2 * outputs + 4) * high
            size = torch.maximum(lines.least.abs(), lines.most.abs())  # the range, tighter than the lines
            noise = torch.zeros_like(size)
            if node.noise is not None:
                noise, peak = node.noise(given[0])
                self._room(peak)
        elif isinstance(node, Stack):
            size = torch.cat([part.expand(len(self.x), *part.shape[1:]) for part in given], node.dim)
            error = noise = torch.zeros_like(size)
        else:
            assert isinstance(node, Leaf)
            walk = self.walks[node.position]
            ball = grow(walk.spread.at + walk.spread.slope * self.radius)  # around the float64 output at the sample
            size = grow(walk.centre.abs() + ball[:, None].reshape(-1, *[1] * len(shape)))
            error, noise = FLOAT64.gamma(outputs + 4) * walk.centre.abs(), torch.zeros_like(size)
            self.fits &= walk.peak.at + walk.peak.slope * self.radius < (self.circuit.arithmetic or FLOAT64).room
        return grow(size + noise), grow((error + noise) * _UP), grow(_TINY * (lost + outputs + 2) * 4)

    def _noise(self, sums: Tensor, noise: Noise | None, given: list[Tensor]) -> Tensor:
        """Bounds of the evaluator's error in each entry of a linear node; ``sums`` adds the moduli of its terms."""
        machine = self.circuit.arithmetic
        if machine is None or noise is None:
            return torch.zeros_like(sums)
        floor = torch.zeros_like(self.radius)
        biggest = 0.0
        if noise.weight is not None and noise.weight.numel():
            biggest = float(noise.weight.amax())  # the stored numbers must not overflow either
            floor = floor + biggest * noise.terms  # inputs below the normal range may count as 0
            if bool(((noise.weight > 0) & (noise.weight < machine.tiny)).any()):
                # Weights below the normal range may count as 0, too.
                floor = floor + sum(part.flatten(1).sum(1) for part in given)
        floor = grow(machine.tiny * (floor + 2 * noise.terms + 2 * noise.depth + 2))
        gamma = machine.gamma(noise.depth)
        self._room(grow(sums * (noise.swell * (1 + gamma)) + biggest))
        return gamma * sums + floor.reshape(-1, *[1] * (sums.ndim - 1))

    def _room(self, peak: Tensor) -> None:
        """Keep in ``fits`` only samples whose intermediate numbers, at most ``peak``, cannot overflow."""
        machine = self.circuit.arithmetic
        if machine is not None:
            self.fits &= (peak.flatten(1) < machine.room).all(1)

    def _range(self, value: int) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of each entry of a value in the machine; tightens ``sizes``, the bound H of moduli."""
        shape = self.circuit.shapes[value]
        entries = math.prod(shape)
        low, high = self.x.new_empty(2, len(self.x), entries)
        # The channels of one place follow each other, so that the rows of a block read the same part of an image.
        order = torch.arange(entries, device=self.x.device).reshape(shape[0], -1).T.flatten()
        widest = max(math.prod(shape) for shape in self.circuit.shapes)
        line = entries // (shape[1] if len(shape) == 3 else 1)  # entries of one line of an image
        for units in order.split(max(1, min(_BLOCK // (2 * widest * len(self.x)), line))):
            rows = torch.zeros(len(units), entries, dtype=torch.float64, device=self.x.device)
            rows[torch.arange(len(units), device=self.x.device), units] = 1.0
            base, norm = self.below(value, rows.reshape(1, -1, *shape), mirrored=True)
            found = next_down(base - next_up(self.radius[:, None] * norm))  # the least v, and the least -v
            low[:, units], negative = found.expand(len(self.x), -1).chunk(2, 1)
            high[:, units] = -negative  # the most of v is minus the least of -v
        low, high, size = low.reshape(-1, *shape), high.reshape(-1, *shape), self.sizes[value]
        # The cheap bound by moduli is sometimes the tighter one.
        low, high = torch.maximum(low, -size), torch.minimum(high, size)
        self.fits &= (low <= high).flatten(1).all(1)  # false for NaN
        known = self.fits.reshape(-1, *[1] * (low.ndim - 1))  # samples that do not fit get the finite range 0
        low, high = torch.where(known, low, 0.0), torch.where(known, high, 0.0)
        self.sizes[value] = torch.maximum(low.abs(), high.abs())
        return low, high

    def below(self, value: int, rows: Tensor, mirrored: bool = False) -> tuple[Tensor, Tensor]:
        r"""(base, norm), both (N or 1, R): ``rows v >= base - r norm`` for the machine's v within any r of a sample.

        ``rows`` is (N or 1, R, *shape of v). ``mirrored`` appends the results for the negated rows. They cost
        nothing between v and the last activation before it, since the map is linear there.
        """
        pending = {value: rows}  # rows that wait at a value until all its readers are done
        const = moduli = error = norm = torch.zeros(1, rows.shape[1], dtype=torch.float64, device=rows.device)
        for at in range(value, -1, -1):  # backwards, so readers come before what they read
            node = self.circuit.nodes[at - 1] if at else None
            # Until here all was linear: negated rows would only have mirrored the rows.
            if mirrored and (node is None or (at in pending and isinstance(node, Scalar))):
                mirrored = False
                pending = {v: torch.cat((a, -a), 1) for v, a in pending.items()}
                const = torch.cat((const, -const), 1)  # a constant changes sign, errors do not
                moduli, error, norm = (torch.cat((t, t), 1) for t in (moduli, error, norm))
            if at not in pending or node is None:
                continue
            sources = self.circuit.sources[at - 1]
            a = pending.pop(at)
            size = a.abs()
            error = error + dot(size, self.errors[at - 1]) + self.lost[at - 1][:, None]  # |A| E
            term, parts = torch.zeros_like(const), list[Tensor]()
            if isinstance(node, Linear):
                if node.bias is not None:
                    term = dot(a, node.bias[None])
                parts = [node.adjoint(a.flatten(0, 1)).unflatten(0, a.shape[:2])]
            elif isinstance(node, Total):
                parts = [a if factor == 1 else a * factor for factor in node.factors]
            elif isinstance(node, Scalar):
                lines = self.lines[at]
                # From below: positive entries take the lower line, negative ones the upper.
                up, down = a.clamp_min(0.0), a.clamp_max(0.0)
                term = dot(up, lines.low) + dot(down, lines.high)
                parts = [up * lines.low_slope[:, None] + down * lines.high_slope[:, None]]
            elif isinstance(node, Stack):
                parts = list(a.split(node.sizes, node.dim + 1))
            else:
                walk = self.walks[node.position]
                term = dot(a, walk.centre)
                length = _norm(a)
                error = error + grow(length * walk.spread.at[:, None])
                norm = norm + grow(length * walk.spread.slope)  # the part of a leaf's ball that grows with r
            const, moduli = const + term, moduli + term.abs()
            for source, part in zip(sources, parts, strict=True):
                if source in pending:
                    part = pending[source] + part
                    error = error + 2 * _UNIT * dot(part.abs(), self.sizes[source])  # the sum of two rows is rounded
                pending[source] = part
        if 0 in pending:
            a = pending[0]
            term = dot(a, self.x)
            inputs = math.prod(self.x.shape[1:])
            error = error + FLOAT64.gamma(inputs + 2) * dot(a.abs(), self.x.abs()) + _TINY * inputs
            const, moduli = const + term, moduli + term.abs()
            const, error, length = self._inside(a, const, error)
            norm = norm + length
        nodes = len(self.circuit.nodes)
        error = grow((error + FLOAT64.gamma(2 * nodes + 16) * (moduli + const.abs())) * _UP)
        return next_down(const - error), grow(norm)  # c - e, rounded down

    def _inside(self, a: Tensor, const: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Bounds ``a d`` from below for all moves d of the input in ball and box; returns new (const, error, norm).

        For any split :math:`A = P + Q`: :math:`A d \ge -r \|P\| + \sum_i \min(Q_i a_i, Q_i b_i)`, d in [a, b]. The
        proposed split attains the minimum: :math:`P = -t d^*`, :math:`d^* = \mathrm{clip}(-A / t, a, b)`, t rising
        to where :math:`\|d^*\| = R`; P = A (the ball alone) and Q = A (the box alone) are tried, too.
        """
        norm = _norm(a)
        if self.moves is None:
            return const, error, norm
        rows, radius = a.flatten(2), self.radius[:, None]
        live = (rows != 0).flatten(0, 1).any(0).nonzero()[:, 0]  # entries that no row reads add nothing
        rows, low, high = rows[..., live], *(move.flatten(1)[:, None, live] for move in self.moves)
        far = _norm(torch.maximum(low.abs(), high.abs()))  # |d| at most
        best, worst = -radius * norm, torch.zeros_like(radius * norm)  # the split P = A: the ball alone
        chosen = norm.expand(len(self.x), -1)
        steep = (norm / radius.clamp_min(_TINY)).clamp_min(2.0**-500)
        # Four splits, each from the norm of the last P, then P = 0, the box alone; one split for many rows.
        for ball in (True, True, True, True, False) if rows.shape[1] <= _FEW else (True,):
            p = torch.clamp(-rows / steep[..., None], low, high) * -steep[..., None] if ball else torch.zeros_like(rows)
            length, q = _norm(p).expand(len(self.x), -1), rows - p
            inside = torch.minimum(q * low, q * high).sum(2)  # the least of Q d, entry by entry
            # Rounding of that sum and of Q = A - P.
            off = FLOAT64.gamma(rows.shape[2] + 4) * _norm(q) * far + 4 * _TINY * rows.shape[2]
            better = inside - off - radius * length > best  # false for NaN
            best = torch.where(better, inside - off - radius * length, best)
            worst = torch.where(better, off - inside, worst)
            chosen = torch.where(better, length, chosen)
            steep = (length / radius.clamp_min(_TINY)).clamp_min(2.0**-500)
        return const, error + worst.clamp_min(0.0) + grow(worst.abs() * 2.0**-50), chosen


def _norm(rows: Tensor) -> Tensor:
    """l2 norms (N, R) of rows, rounded up."""
    return size(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])


class Bounds:
    """Computes local radii for one network of `exact_copy`, batch by batch; they hold for inputs in ``box``.

    ``arithmetic`` None ignores the evaluator's rounding; the rounding of the proof is still subtracted.
    """

    def __init__(self, network: Network, arithmetic: Arithmetic | None, box: tuple[float, float] | None) -> None:
        # A proof made in inference mode has tensors without derivatives; those of a copy made outside of it have them.
        self.network, self.box = copy.deepcopy(network), box
        self.circuit = Circuit(self.network, arithmetic)
        largest = max(math.prod(shape) for shape in self.circuit.shapes)
        if largest > 1 << 22:
            raise NoRuleError(f"local bounds: expected at most 2^22 entries, got {largest}: use method='global'")
        self.steps: list[ProvedModule] = []
        if self.circuit.leaves:
            self.steps = prepare(list(self.network), network.input_shape, arithmetic or FLOAT64)
        self.samples = max(1, min(32, (1 << 20) // largest))  # at once, so that rows and values fit in memory
        self.classes = max(1, _BLOCK // (largest * self.samples))

    def walks(self, x: Tensor) -> dict[int, ErrorBound]:
        """Error bounds after each module, by its index (-1: the input), from the constants of the modules so far."""
        return dict(enumerate(itertools.accumulate(self.steps, advance, initial=start(x)), -1))

    def proved(self, x: Tensor, labels: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        """(proved radii, p(R)), both (N,), by one pass on balls of radius R; p(R) < 0 if bounds fail at the sample."""
        ball = Ball(self.circuit, x, radius, self.box, self.walks(x))
        outputs = math.prod(self.circuit.shapes[self.circuit.output])
        own = torch.nn.functional.one_hot(labels, outputs).double()
        others = torch.arange(outputs - 1, device=x.device)
        others = others + (others >= labels[:, None])  # 0, 1, ... without the label
        found = torch.full_like(radius, math.inf)
        for other in others.split(self.classes, 1):
            rows = own[:, None] - torch.nn.functional.one_hot(other, outputs).double()
            base, norm = ball.below(self.circuit.output, rows)
            # Negative where an inequality fails at the sample itself; the search uses by how much.
            reach = torch.where(norm > 0, next_down(base / torch.where(norm > 0, norm, 1.0)), base * math.inf)
            found = torch.minimum(found, torch.where(reach.isnan(), -math.inf, reach).amin(1))
        found = torch.where(ball.fits & ~found.isneginf(), found, -radius)  # a failed pass: try a smaller radius
        return torch.minimum(found, radius).clamp_min(0.0), found

    def guess(self, x: Tensor, labels: Tensor) -> Tensor:
        """Distances (N,) to the boundary if the network were linear: the start of a search, not a bound.

        0 if another class has the largest logit, 1 if the logits do not depend on the input.
        """
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            values = self.network(point)
            margins = values.gather(1, labels[:, None]) - values  # 0 for the label, which counts as inf below
            order = margins.detach().scatter(1, labels[:, None], math.inf).argsort(1)
            right = margins.detach().scatter(1, labels[:, None], math.inf).amin(1) > 0
            nearest = torch.full((len(x),), math.inf, dtype=torch.float64, device=x.device)
            for i in range(min(3, values.shape[1] - 1)):  # the nearest boundary is mostly among the smallest margins
                margin = margins.gather(1, order[:, i : i + 1])[:, 0]
                if not margin.requires_grad:
                    break
                steep = torch.autograd.grad(margin.sum(), point, retain_graph=True)[0].flatten(1).norm(dim=1)
                nearest = torch.minimum(nearest, margin.detach() / steep)
        return torch.where(right, torch.where(nearest.isfinite(), nearest, 1.0), 0.0)

    def radii(self, x: Tensor, labels: Tensor, start: Tensor, progress: Told | None = None) -> Tensor:
        r"""Radii (N,) of the open balls in which the machine gives the label, 0 where nothing is proved.

        A pass at R proves min(R, p(R)), see `proved`, and p falls with R. Secants search for p(R) = R; the largest
        radius proved by a pass counts. The search starts at ``start`` (N,) or beyond. ``progress`` is called with the
        number of samples done and N.
        """
        found = list[Tensor]()
        with torch.no_grad():
            for part in zip(*(values.split(self.samples) for values in (x, labels, start)), strict=True):
                found.append(self._search(*part))
                if progress is not None:
                    progress("with local radii", sum(map(len, found)), len(x))
        return torch.cat(found)

    def _search(self, x: Tensor, labels: Tensor, start: Tensor) -> Tensor:
        """`radii` of one batch that fits in memory."""
        best, guess = torch.zeros_like(start), self.guess(x, labels)
        # p(R) - R at the ends: positive at the lower one. The upper end is not known at first.
        low, at_low = torch.zeros_like(best), guess
        high, at_high = torch.full_like(best, math.inf), torch.full_like(best, -math.inf)
        # The lines are looser than the network, so the search begins below the guess.
        radius = torch.maximum(0.4 * guess, torch.where(start.isfinite(), start, 0.0)).clamp_max(_LARGEST)
        active, side = guess > 0, torch.zeros_like(best)
        for _ in range(_MOST_PASSES):
            index = active.nonzero()[:, 0]
            if not len(index):
                break
            at = radius[index]
            proved, allowed = self.proved(x[index], labels[index], at)
            best[index] = torch.maximum(best[index], proved)
            gap = allowed - at
            fine = gap >= 0  # all of the radius was proved
            # The end that stays twice loses half of its weight (the Illinois rule).
            kept_high = torch.where(side[index] > 0, at_high[index] / 2, at_high[index])
            kept_low = torch.where(side[index] < 0, at_low[index] / 2, at_low[index])
            at_high[index], at_low[index] = torch.where(fine, kept_high, gap), torch.where(fine, gap, kept_low)
            side[index] = torch.where(fine, 1.0, -1.0).double()
            low[index] = torch.where(fine, at, low[index])
            high[index] = torch.where(fine, high[index], at)
            width = high - low
            # A little beyond the root of the secant: p is nearly linear there, so that both ends move.
            share = (at_low / (at_low - at_high)).nan_to_num(0.5) + _TOLERANCE / 4 * low / width
            closed = low + width * share.nan_to_num(0.5).clamp(0.01, 0.99)
            # Without an upper end, go on by what p allows, at most to twice the lower end.
            open_ = torch.maximum(low * 1.5, low + 0.5 * torch.minimum(at_low, 2 * low))
            radius = torch.where(high.isfinite(), closed, open_.clamp_max(_LARGEST))
            active = active & (torch.minimum(high, _LARGEST * torch.ones_like(high)) - best > _TOLERANCE * best)
            active = active & (low < _LARGEST) & (high > 1e-12 * guess)  # too large, or too small, to matter
        return best
