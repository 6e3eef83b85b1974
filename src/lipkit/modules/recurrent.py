r"""Constant recurrent networks: a gain over sequences and a contraction rate, proved from their numbers.

**Rounding.** Let E_t bound, in the norm of P, how far the machine's state is from the exact one. One exact step
contracts by a, and one step of the machine adds a local error k_t (of its inner products and of phi, measured at the
states of the sample), so :math:`E_{t+1} \le a E_t + k_t`: for a < 1 the error stays below :math:`\max k / (1 - a)`
however long the sequence is. An output is off by at most :math:`\sqrt\gamma\, a E_t` and its own local error.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds.dissipation import System, least_gain, proves_dissipation
from lipkit.bounds.lmi import is_positive_semidefinite, is_positive_within
from lipkit.errors import NoRuleError, ShapeError
from lipkit.linalg.precision import autocast_off, autocast_on
from lipkit.linalg.scan import Stream, simulate
from lipkit.modules.activations import ACTIVATIONS, slope_restricted
from lipkit.modules.dense import linear
from lipkit.modules.graph import Concatenate, Graph, beside
from lipkit.modules.guarding import guard
from lipkit.modules.isometric import HalfAbs
from lipkit.modules.machine import exact, local_error
from lipkit.modules.network import Network
from lipkit.modules.parametrised import settled
from lipkit.modules.plain import (
    COUNT,
    Plain,
    RoundingBound,
    RoundingError,
    Shape,
    Stored,
    add_plain,
    real,
    submodule,
    whole,
)
from lipkit.modules.registry import export_part, lipschitz
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import FLOAT64, UNIT, Arithmetic, Line, product, to_double, up


class Recurrent(nn.Module):
    r"""A discrete-time system on sequences, from rest: ``(B, T, in_features) -> (B, T, out_features)``.

    .. math:: (v_t,\, x_{t+1},\, y_t) = M\, (w_t,\, x_t,\, u_t) + b, \qquad w_t = \phi(v_t), \qquad x_0 = 0

    Args:
        matrix: M ``(nv + nx + ny, nw + nx + nu)``. In D11, its part from w to v, all on and above the diagonal blocks
            is ignored.
        bias: b ``(nv + nx + ny,)``.
        metric: P ``(nx, nx)``; only its lower triangle is read.
        multiplier: diagonal of Lambda ``(nv,)``.
        phi: a module on ``(B, nv)``: an activation or, if all units are one block, any plain network.
        states, units, block: nx, (nv, nw), and how many units are computed at once.
        gain, rate: the bounds that P and Lambda are to prove by `lipkit.bounds.dissipation`. All four are claims,
            checked wherever they are used, never trusted.

    Raises:
        ShapeError: sizes that do not fit.

    >>> half = torch.tensor([[0.5, 1.0], [1.0, 0.0]])
    >>> system = Recurrent(half, torch.zeros(2), torch.eye(1), torch.ones(0), nn.Identity(), 1, (0, 0), 1, 2.001, 1.0)
    >>> system(torch.ones(1, 3, 1)).flatten().tolist(), lipschitz(system).item()
    ([0.0, 1.0, 1.5], 2.001)
    """

    matrix: Tensor
    bias: Tensor
    metric: Tensor
    multiplier: Tensor

    def __init__(
        self,
        matrix: Tensor,
        bias: Tensor,
        metric: Tensor,
        multiplier: Tensor,
        phi: nn.Module,
        states: int,
        units: tuple[int, int],
        block: int,
        gain: float,
        rate: float,
    ) -> None:
        super().__init__()
        (nv, nw), self.states, self.block = units, operator.index(states), operator.index(block)
        self.units, self.gain, self.rate = (operator.index(nv), operator.index(nw)), float(gain), float(rate)
        self.in_features = matrix.shape[-1] - nw - states  # columns are those of (w, x, u)
        self.out_features = matrix.shape[0] - nv - states  # rows are those of (v, next x, y)
        wanted = [(nv + states + self.out_features,), (states, states), (nv,)]
        positive = min(self.in_features, self.out_features, states, block) > 0 and min(nv, nw) >= 0
        given = [tuple(t.shape) for t in (bias, metric, multiplier)]
        if matrix.ndim != 2 or not positive or given != wanted or nv % block or (nv != nw and not 0 < nv <= block):
            raise ShapeError(
                f"Recurrent: expected bias, metric and multiplier of shapes {wanted} and blocks that divide the units, "
                f"got {given} for a matrix {tuple(matrix.shape)}, {states} states, units {units} in blocks of {block}"
            )
        for name, value in (("matrix", matrix), ("bias", bias), ("metric", metric), ("multiplier", multiplier)):
            self.register_buffer(name, value.detach().clone())
        self.phi = phi

    def forward(self, u: Tensor) -> Tensor:
        if u.ndim != 3 or u.shape[2] != self.in_features:
            raise ShapeError(f"Recurrent: expected sequences (B, T, {self.in_features}), got {tuple(u.shape)}")
        return self.run(u)[0]

    def run(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs, and the units and states of all steps, as `lipkit.linalg.scan.simulate`."""
        alone = not self.units[0] or unitwise(self.phi)
        given = u.to(self.matrix.dtype) if autocast_on(u) else u
        with autocast_off(u):
            return simulate(self.matrix, self.bias, self.states, self.units, self.block, self.phi, given, alone)

    def step(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The next states ``(B, nx)`` and outputs ``(B, ny)``, from states (zeros at first) and inputs ``(B, nu)``."""
        if x.shape[1:] != (self.states,):  # `copy_` would repeat one state for all
            raise ShapeError(f"expected states of shape (B, {self.states}), got {tuple(x.shape)}")
        stream = self.stream(len(x))
        stream.x.copy_(x)
        y = stream.step(u)
        return stream.x, y

    def stream(self, batch: int = 1) -> Stream:
        """:meth:`step` for loops in real time: it holds the states in its own memory."""
        return Stream(self.matrix, self.bias, self.states, self.units, self.block, self.phi, batch)

    def one_step(self) -> Network:
        """:meth:`step` as a network from (x, u) in one vector to (next x, y): to be written as ONNX or C."""
        (nv, nw), m, b = self.units, self.matrix, self.bias
        nodes, sources, inner, known = list[nn.Module](), list[list[int]](), list[int](), 0
        for i in range(0, nv, self.block):
            rows = slice(i, i + self.block)  # units that are computed at once
            nodes += [linear(torch.cat((m[rows, :i], m[rows, nw:]), 1), b[rows].clone()), self.phi, Concatenate(1)]
            inner.append(len(nodes) - 1)
            sources += [[known], [len(nodes) - 2], [*inner, 0]]
            known = len(nodes)
        last = linear(m[nv:].clone(), b[nv:].clone())
        return Network([Graph([*nodes, last], [*sources, [known]]) if nv else last], (self.states + self.in_features,))

    def system(self) -> tuple[System, Tensor]:
        """The system without its claims, and the multiplier of each unit."""
        guard(self.phi)
        nv = self.units[0]
        if self.block < nv and not unitwise(self.phi):
            raise NoRuleError(
                f"Recurrent: expected one block, or a phi that acts on each unit alone, got blocks of {self.block} of "
                f"{nv} units and {type(self.phi).__name__}, whose constant may depend on how many units it takes"
            )
        bound = None if nv and slope_restricted(self.phi) else lipschitz(self.phi, (nv,) if nv else None).item()
        multiplier = self.multiplier if not nv or unitwise(self.phi) else self.multiplier[:1].expand(nv)
        return System(self.matrix, self.states, self.units, self.block, bound), multiplier

    def proved(self, gain: float) -> bool:
        """True if the metric and the multiplier prove this gain, and the rate, for the numbers as they are stored."""
        guard(self)
        system, multiplier = self.system()
        return proves_dissipation(system, self.metric, multiplier, gain, self.rate)

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.out_features}, states={self.states}, units={self.units[0]}"
        return f"{sizes}, gain={self.gain:.6g} claimed, rate={self.rate:.6g} claimed"


def unitwise(phi: nn.Module) -> bool:
    """True if phi acts on each unit alone and on all alike, or is `HalfAbs`, which acts on half of each block."""
    return type(phi) is HalfAbs or (type(phi) in ACTIVATIONS and not list(phi.parameters()))


def contraction(module: Recurrent) -> float:
    r"""The proved rate a, else infinity: states under equal inputs approach, :math:`\|x_t\|_P \le a^t \|x_0\|_P`.

    >>> half = torch.tensor([[0.5, 1.0], [1.0, 0.0]])
    >>> contraction(Recurrent(half, half[0], torch.eye(1), half[0, :0], nn.Identity(), 1, (0, 0), 1, 9.0, 0.75))
    0.75
    """
    if not isinstance(module, Recurrent):
        raise NoRuleError(f"contraction: expected a Recurrent of an exported network, got {type(module).__name__}")
    return module.rate if math.isfinite(_gain(module)) else math.inf


def _gain(module: Recurrent) -> float:
    """The first gain that is proved, of candidates from the claimed one up to twice that; infinity if none is."""
    if not bool(module.bias.isfinite().all()):
        return math.inf
    candidates = (module.gain, *(up(module.gain, 2) * (1 + 10.0**-k) for k in range(9, -1, -1)))
    return next((gain for gain in candidates if module.proved(gain)), math.inf)


def _over(gain: float, rate: float, input_shape: Shape | None) -> float:
    """The gain over T steps: ``gain``, times ``rate^(T - 1)`` if the rate is above 1."""
    if rate <= 1 or not math.isfinite(gain):
        return gain
    if input_shape is None:
        raise ShapeError(
            f"expected an input_shape, because a system that expands at a rate of {rate} has a gain over T steps only, "
            "got none: lipkit.lipschitz(module, input_shape=(T, features))"
        )
    return product(gain, *[rate] * (input_shape[0] - 1)) if input_shape[0] < 2000 else math.inf


class _Numbers(NamedTuple):
    """Bounds of the norms of the blocks of M, of the metric and of the map through phi."""

    state: float  # ||x|| / ||x||_P
    metric: float  # ||x||_P / ||x||
    read: float  # of the map from (x, u) to v
    within: float  # D11
    solve: float  # of the map from r to w = phi(r + D11 w)
    write: float  # B1, from w to the next x
    show: float  # D21, from w to y


def _numbers(module: Recurrent) -> _Numbers:
    system, multiplier = module.system()
    (v, s, o), (nv, nw), phi = system.rows(), system.units, 1.0 if system.lipschitz is None else system.lipschitz
    lower = to_double(module.metric).tril()
    p, eye = lower + lower.tril(-1).mT, torch.eye(module.states, dtype=torch.float64, device=lower.device)
    least = float(torch.linalg.eigvalsh(p)[0]) * (1 - 1e-9) - 1e-12 * float(p.diagonal().max())
    if not (least > 0 and is_positive_semidefinite(p - least * eye, 4 * UNIT * float(torch.linalg.matrix_norm(p)))):
        least = 0.0  # nothing is proved
    blocks = (v[:, nw:], v[:, :nw], s[:, :nw], o[:, :nw])
    read, within, write, show = (float(spectral_norm(part)) if part.numel() else 0.0 for part in blocks)
    # D11 is block triangular with a zero diagonal: its power by the number of blocks is 0.
    solve = phi * sum(product(*[phi * within] * k) for k in range(max(nv // module.block, 1))) * (1 + 2.0**-30)
    if system.lipschitz is None and nv > module.block:
        solve = min(solve, _monotone(v[:, :nw], to_double(multiplier)))
    root = math.inf if least <= 0 else up(1 / math.sqrt(least), 4)
    return _Numbers(root, up(math.sqrt(float(spectral_norm(p))), 4), read, within, solve, write, show)


def _monotone(d11: Tensor, lam: Tensor) -> float:
    r"""A bound of :math:`\|w\| / \|r\|` in :math:`w = \sigma(D_{11} w + r)`, slopes in [0, 1].

    :math:`\Lambda - \Lambda D_{11} \ge \mu \Lambda` gives :math:`\mu \|w\|_\Lambda^2 \le w^\top \Lambda r`.
    """
    pulled = lam[:, None] * d11
    for k in range(1, 40):
        mu = 2.0**-k  # the largest power of two that is proved
        h = 2 * (1 - mu) * lam.diag() - pulled - pulled.mT
        if bool((lam > 0).all()) and is_positive_within(h, 4 * UNIT * (h.abs() + 2 * lam.diag())):
            return up(math.sqrt(float(lam.max() / lam.min())) / mu, 6)
    return math.inf


class _Locals(NamedTuple):
    """Bounds of the rounding errors that one step adds, in one arithmetic."""

    v: RoundingBound
    phi: RoundingBound
    s: RoundingBound  # of the next states
    o: RoundingBound  # of the outputs


def _rounding(module: Recurrent, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    guard(module)
    nv, parts = module.units[0], [module.units[0], module.states, module.out_features]
    gain, rate, n = _gain(module), module.rate, _numbers(module)
    rows, b = torch.cat(module.system()[0].rows()), module.bias

    def rules(machine: Arithmetic) -> list[RoundingError]:
        machine = dataclasses.replace(machine, block=None)  # evaluators in blocks leave this module as it is
        none = exact(module, input_shape, machine)
        v, s, o = (
            local_error(linear(m, c), (rows.shape[1],), machine) if len(c) else none
            for m, c in zip(rows.split(parts), b.split(parts), strict=True)
        )
        return [v, local_error(module.phi, (nv,), machine) if nv else none, s, o]

    machine, double = rules(arithmetic), rules(FLOAT64)
    root = up(math.sqrt(gain), 4)
    moves = _over(root, rate, input_shape)

    def measure(x: Tensor) -> RoundingBound:
        h = torch.cat((module.run(x)[1], x.transpose(0, 1)), -1)
        points, shape = h.flatten(0, 1), h.shape[:2]
        pre = F.linear(points, rows[:nv], b[:nv])

        def at_steps(measures: list[RoundingError]) -> list[_Locals]:
            found = [rule(pre if k == 1 else points) for k, rule in enumerate(measures)]  # 1: of phi, which reads v
            return [
                _Locals(*(RoundingBound(*(Line(line.at.view(shape)[t], line.slope) for line in one)) for one in found))
                for t in range(shape[0])
            ]

        # First the errors of the float64 states at which rounding is measured, then the machine's around them.
        centre = _walk(at_steps(double), None, n, root, rate, 0.0)
        steps = _walk(at_steps(machine), centre, n, root, rate, moves)
        peak = functools.reduce(Line.most, (step.peak for step in steps))
        return RoundingBound(beside([step.y for step in steps]), peak)  # of all outputs together

    return measure


class _Step(NamedTuple):
    """Bounds at one step: of the errors of x (in the norm of P), v, w and y, and of every intermediate number."""

    x: Line
    v: Line
    w: Line
    y: Line
    peak: Line


def _walk(
    local: list[_Locals], centre: list[_Step] | None, n: _Numbers, root: float, rate: float, moves: float
) -> list[_Step]:
    """Bounds of the rounding errors at each step, by the recursion :math:`E_{t+1} = a E_t + k_t` (top of the file).

    Without ``centre``: the errors of the float64 run at whose states rounding is measured. With ``centre``, the result
    of that first call: the errors of the machine. ``moves`` bounds, in the norm of P, how far states move for an input
    that moves by 1.
    """
    found = list[_Step]()
    error = Line(torch.zeros_like(local[0].s.error.at), 0.0)
    zero = error
    for t, now in enumerate(local):
        of = _Step(zero, zero, zero, zero, zero) if centre is None else centre[t]
        # Distances of the machine's (x, u), w and v from where their errors were measured.
        far = zero
        if centre is not None:
            far = error.plus(of.x).plus(Line(zero.at, moves)).times(n.state).plus(Line(zero.at, 1.0))
        w_far = far.times(product(n.solve, n.read)).plus(of.w)
        v_far = far.times(n.read).plus(w_far.times(n.within)).plus(of.v)
        # What an error of w adds to itself through the rounding of D11 w: e <= first + q e.
        read = now.v.error.below(far.plus(w_far))
        first = read.times(n.solve).plus(now.phi.error.below(v_far.plus(read)).times(up(1 + n.solve * n.within, 2)))
        v_slope, phi_slope = now.v.error.slope, now.phi.error.slope
        q = up(n.solve * v_slope + phi_slope * (1 + n.solve * n.within) * (n.within + v_slope), 8)
        w = first.times(up(1 / (1 - q), 4) if q < 0.5 else math.inf)
        h_far = far.plus(w_far).plus(w)
        v = now.v.error.below(h_far).plus(w.times(n.within))
        y = now.o.error.below(h_far).plus(w.times(n.show)).plus(error.times(product(root, rate)))
        peak = now.phi.peak.below(v_far.plus(v))
        for one in (now.v, now.s, now.o):
            peak = peak.most(one.peak.below(h_far))
        found.append(_Step(error, v, w, y, peak))
        kick = now.s.error.below(h_far).plus(w.times(n.write)).times(n.metric)
        error = error.times(rate).plus(kick)
    return found


def _made(in_features: int, out_features: int, units: Any, states: int, **rest: Any) -> Recurrent:
    nv, nw = units
    matrix = torch.zeros(nv + states + out_features, nw + states + in_features)
    sizes = torch.zeros(len(matrix)), torch.zeros(states, states), torch.zeros(nv)
    return Recurrent(matrix, *sizes, states=states, units=units, **rest)


def _export(module: Recurrent, input_shape: Shape) -> nn.Module:
    if input_shape[1:] != (module.in_features,):
        raise ShapeError(f"expected input of shape (T, {module.in_features}), got {input_shape}")
    guard(module)
    plain = copy.deepcopy(module)
    plain.phi = export_part(module.phi, (module.units[0] or 1,))
    return plain


def _of_torch(module: Any) -> tuple[Any, Tensor, System]:
    """The ``nn.RNN`` in a module, its biases b and its system in float64; the states are the previous step's units."""
    rnn: Any = settled(module.rnn) if isinstance(module, Outputs) else module
    guard(rnn)
    if (kind := type(rnn)) is not nn.RNN:
        raise NoRuleError(f"expected exactly an nn.RNN, got {kind.__name__}, whose forward pass may differ")
    if not rnn.batch_first or rnn.bidirectional or (rnn.dropout and rnn.training):
        raise NoRuleError(
            "nn.RNN: expected batch_first=True, one direction and no dropout in training, got "
            f"batch_first={rnn.batch_first}, bidirectional={rnn.bidirectional}, dropout={rnn.dropout}"
        )
    n, layers, inputs = rnn.hidden_size, rnn.num_layers, rnn.input_size
    nx = n * layers
    m = torch.zeros(2 * nx + n, 2 * nx + inputs, dtype=torch.float64, device=rnn.weight_ih_l0.device)
    b = m.new_zeros(len(m))
    for k in range(layers):
        own = slice(k * n, (k + 1) * n)
        given = slice(2 * nx, None) if k == 0 else slice((k - 1) * n, k * n)  # u, or the layer below
        m[own, given] = to_double(getattr(rnn, f"weight_ih_l{k}").detach())
        m[own, nx + k * n : nx + (k + 1) * n] = to_double(getattr(rnn, f"weight_hh_l{k}").detach())
        if rnn.bias:
            both = (getattr(rnn, f"bias_{part}_l{k}").detach() for part in ("ih", "hh"))
            b[own] = sum(to_double(one) for one in both)
    m[nx : 2 * nx, :nx] = torch.eye(nx)  # the next states are the units
    m[2 * nx :, nx - n : nx] = torch.eye(n)  # outputs are the units of the last layer
    return rnn, b, System(m, nx, (nx, nx), n)


def _torch_constant(module: nn.RNN | Outputs, input_shape: Shape | None) -> float:
    found = least_gain(_of_torch(module)[2])
    return _over(found.gain, found.rate, input_shape)


def _torch_export(module: nn.RNN | Outputs, input_shape: Shape) -> nn.Module:
    rnn, b, system = _of_torch(module)
    if input_shape[1:] != (rnn.input_size,):
        raise ShapeError(f"expected input of shape (T, {rnn.input_size}), got {input_shape}")
    found, phi = least_gain(system), nn.ReLU() if rnn.nonlinearity == "relu" else nn.Tanh()
    m, b, p, lam = (t.to(rnn.weight_ih_l0) for t in (system.matrix, b, found.metric, found.multiplier))
    made = Recurrent(m, b, p, lam, phi, *system[1:4], min(found.gain, 1e290), found.rate)  # `real` accepts no more
    made.gain = min(_gain(made), made.gain * 2)  # the claim is what the rounded metric proves
    return made


class Outputs(nn.Module):
    """An ``nn.RNN`` that returns its outputs at all steps only, not the last state: replaces it in traced networks."""

    def __init__(self, rnn: nn.RNN) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, u: Tensor) -> Tensor:
        outputs: Tensor = self.rnn(u)[0]
        return outputs


_sizes = {"in_features": COUNT, "out_features": COUNT, "states": COUNT, "units": whole(0, count=2), "block": COUNT}
_stored = Stored({**_sizes, "phi": submodule, "gain": real, "rate": real}, make=_made)
add_plain(Plain(Recurrent, lambda m, s: _over(_gain(m), m.rate, s), _rounding, _stored, export=_export, dims=(2, 2)))
for _kind in (nn.RNN, Outputs):
    add_plain(Plain(_kind, _torch_constant, export=_torch_export, dims=(2, 2)))
