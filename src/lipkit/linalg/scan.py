r"""Discrete-time systems run over sequences, with a backward pass written by hand.

A system with states x, inputs u, outputs y and units :math:`w = \phi(v)` is one matrix M and one vector b:

.. math:: (v_t,\, x_{t+1},\, y_t) = M\, (w_t,\, x_t,\, u_t) + b, \qquad w_t = \phi(v_t),

    M = \begin{pmatrix} D_{11} & C_1 & D_{12} \\ B_1 & A & B_2 \\ D_{21} & C_2 & D_{22} \end{pmatrix} .

Entries of :math:`D_{11}` on and above its diagonal blocks count as 0: each block of units reads the blocks before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import ShapeError
from lipkit.linalg.precision import without_autocast
from lipkit.linalg.transforms import plain_gradients, transformed

Function = Callable[[Tensor], Tensor]


def _in_blocks(parts: Sequence[Tensor], rows: Sequence[Tensor], phi: Function) -> Tensor:
    """Solve w = phi(v + D11 w) block by block, for ``parts`` of v and ``rows`` of D11 (without the first block's)."""
    w = phi(parts[0])
    for v, row in zip(parts[1:], rows, strict=True):
        w = torch.cat((w, phi(F.linear(w, row) + v)), 1)
    return w


class Stream:
    """:func:`simulate` step by step, for ``batch`` sequences at once; a step costs little more than its two products.

    >>> half = torch.tensor([[0.5, 1.0], [1.0, 0.0]])
    >>> stream = Stream(half, torch.zeros(2), 1, (0, 0), 1, torch.relu, 1)
    >>> [stream.step(torch.ones(1, 1)).item() for _ in range(3)]
    [0.0, 1.0, 1.5]
    """

    def __init__(
        self, matrix: Tensor, bias: Tensor, states: int, units: tuple[int, int], block: int, phi: Function, batch: int
    ) -> None:
        (nv, nw), m, b = units, matrix.detach(), bias.detach()
        given = m.shape[1] - nw
        # (x, u, w) in one piece of memory: each block of units reads its first columns.
        known, after = m.new_zeros(batch, m.shape[1]), m.new_zeros(batch, len(m) - nv)
        self.x, self._u, self._known, self._after = known[:, :states], known[:, states:given], known, after
        self._next, self._y = after[:, :states], after[:, states:]
        self._blocks = list[tuple[Tensor, ...]]()
        for i in range(0, nv, block):
            j, k = (i + block, i + block) if block < nv else (nv, nw)
            weight = torch.cat((m[i:j, nw:], m[i:j, :i]), 1).t().contiguous()
            self._blocks.append((b[i:j].clone(), known[:, : given + i], weight, known[:, given + i : given + k]))
        self._last = (b[nv:].clone(), torch.cat((m[nv:, nw:], m[nv:, :nw]), 1).t().contiguous())
        self._phi = _into(phi)

    def step(self, u: Tensor) -> Tensor:
        """The output ``(batch, ny)`` for the next input ``(batch, nu)``; ``x`` is then the next state."""
        if u.shape != self._u.shape:  # `copy_` would repeat one input for all
            raise ShapeError(f"expected an input of shape {tuple(self._u.shape)}, got {tuple(u.shape)}")
        with torch.no_grad():
            self._u.copy_(u)
            for bias, known, weight, w in self._blocks:
                self._phi(torch.addmm(bias, known, weight), w)
            torch.addmm(self._last[0], self._known, self._last[1], out=self._after)
            self.x.copy_(self._next)
            return self._y.clone()


def simulate(
    matrix: Tensor, bias: Tensor, states: int, units: tuple[int, int], block: int, phi: Function, u: Tensor, alone: bool
) -> tuple[Tensor, Tensor]:
    """Run the discrete-time system (M, b) over sequences, from rest: :math:`x_0 = 0`. Its equations: top of the file.

    Args:
        matrix, bias: M ``(nv + nx + ny, nw + nx + nu)`` and b ``(nv + nx + ny,)``.
        states, units: nx, and ``(nv, nw)``.
        block: how many units are computed at once; it divides nv.
        phi: ``(B, nv) -> (B, nw)``.
        u: ``(B, T, nu)``.
        alone: True if phi acts elementwise, by each unit's place in its block; the fast backward pass needs this.

    Returns:
        y ``(B, T, ny)``, and (w_t, x_t) at all steps, ``(T, B, nw + nx)``.
    """
    nv, nw = units
    steps, inputs = u.transpose(0, 1), matrix[:, nw + states :]
    # What the inputs add to v and x in all steps: M's last columns, with the biases.
    driven = F.linear(steps, inputs[: nv + states], bias[: nv + states])
    own = matrix[:, : nw + states]
    if alone and not transformed() and not torch.compiler.is_compiling():
        after: Tensor = _Scan.apply(driven, own[: nv + states], states, block, phi)  # (w_t, x_t) at all steps
    else:
        after = _loop(driven, own[: nv + states], states, (nv, nw), block, phi)
    y = F.linear(after, own[nv + states :]) + F.linear(steps, inputs[nv + states :], bias[nv + states :])
    return y.transpose(0, 1), after


def _loop(driven: Tensor, own: Tensor, states: int, units: tuple[int, int], block: int, phi: Function) -> Tensor:
    """The loop over the steps in plain operations of torch; returns (w_t, x_t) at all steps."""
    (nv, nw), found = units, list[Tensor]()
    x = driven.new_zeros(driven.shape[1], states)
    # Sliced before the loop: an export to ONNX takes 50 ms for each call that it records.
    read, write, rows = own[:nv, nw:], own[nv:], [own[i : i + block, :i] for i in range(block, nv, block)]
    for to_v, to_x in zip(*_parted(driven, nv), strict=True):
        v = to_v + F.linear(x, read)
        w = (phi(v) if block >= nv else _in_blocks(v.split(block, 1), rows, phi)) if nv else v
        found.append(torch.cat((w, x), 1))
        x = to_x + F.linear(found[-1], write)
    return torch.stack(found)


def _into(phi: Function) -> Callable[[Tensor, Tensor], Any]:
    """phi as a function that writes into its second argument."""
    if type(phi) is nn.Tanh:
        return lambda v, w: torch.tanh(v, out=w)
    if type(phi) is nn.ReLU:
        return lambda v, w: torch.clamp(v, min=0, out=w)
    if type(phi) is nn.LeakyReLU and phi.negative_slope == -1:
        return lambda v, w: torch.abs(v, out=w)
    return lambda v, w: w.copy_(phi(v))


class _Scan(torch.autograd.Function):
    """:func:`_loop` for elementwise phi, 3.5 to 5 times as fast (AMD EPYC, T = 200, 64 sequences)."""

    @staticmethod
    def forward(ctx: Any, driven: Tensor, own: Tensor, states: int, block: int, phi: Function) -> Tensor:
        (count, batch, _), nv = driven.shape, driven.shape[2] - states
        after, before = driven.new_zeros(count, batch, nv + states), driven.new_empty(count, batch, nv)
        read, within, write = own[:nv, nv:].t().contiguous(), own[:nv, :nv].t(), own[nv:].t().contiguous()
        apply, xs = _into(phi), after[..., nv:].unbind(0)
        steps = zip(after.unbind(0), before.unbind(0), after[..., :nv].unbind(0), *_parted(driven, nv), strict=True)
        for t, (now, v, w, to_v, to_x) in enumerate(steps):
            if nv:
                torch.addmm(to_v, xs[t], read, out=v)
            if 0 < nv <= block:
                apply(v, w)
            else:
                for i in range(0, nv, block):
                    part = slice(i, i + block)
                    if i:
                        v[:, part].addmm_(w[:, :i], within[:i, part])
                    apply(v[:, part], w[:, part])
            if t + 1 < count:
                torch.addmm(to_x, now, write, out=xs[t + 1])
        ctx.save_for_backward(driven, own, after, before)
        ctx.options = states, (nv, nv), block, phi
        return after

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (driven, own, after, before), (*_, block, phi) = ctx.saved_tensors, ctx.options
        if torch.is_grad_enabled() or transformed(grad):
            return *plain_gradients(lambda d, o: _loop(d, o, *ctx.options), (driven, own), grad), None, None, None
        (count, batch, nv), width = before.shape, after.shape[2]
        # The slopes of all units in all steps at once, so that the loop does not call phi.
        slopes = before
        if nv:
            with torch.enable_grad():
                rows = before.reshape(-1, block).detach().requires_grad_()
                slopes = torch.autograd.grad(phi(rows).sum(), rows)[0].reshape(before.shape)
        read, within, write = own[:nv, nv:].contiguous(), own[:nv, :nv], own[nv:].contiguous()
        found = grad.new_zeros(count, batch, width)
        to_v, to_x = _parted(found, nv)
        steps = [*zip(grad.unbind(0), slopes.unbind(0), to_v, to_x, strict=True)]
        for t in range(count - 1, -1, -1):
            g, slope, v, x = steps[t]
            if t + 1 < count:
                g = torch.addmm(g, x, write)
            if nv <= block:
                torch.mul(g[:, :nv], slope, out=v)
            else:
                for i in range(nv - block, -1, -block):
                    part = slice(i, i + block)
                    torch.mul(g[:, part], slope[:, part], out=v[:, part])
                    if i:
                        g[:, :i].addmm_(v[:, part], within[part, :i])
            if t:
                torch.addmm(g[:, nv:], v, read, out=to_x[t - 1])
        own_grad = found.reshape(-1, width).t() @ after.reshape(-1, width)
        order = torch.arange(nv, device=grad.device) // block
        own_grad[:nv, :nv] *= order[:, None] > order  # D11 counts only below its diagonal blocks
        return found, own_grad, None, None, None


def _parted(rows: Tensor, nv: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Split ``rows`` (T, B, nv + nx) into the parts for v and for x, one view for each step."""
    return rows[..., :nv].unbind(0), rows[..., nv:].unbind(0)
