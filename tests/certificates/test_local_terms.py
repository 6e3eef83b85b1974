"""Each term that a local certificate takes off for rounding: without it, one small network has a bound that is wrong.

Networks are made so that all cancels but for one step. What is exact is computed in rational numbers; what a machine
computes, by torch in float32, or is 0 where a machine may flush.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import sys
import types
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lipkit import modules
from lipkit.certificates import local
from lipkit.proof.roundoff import FLOAT32

DOUBLE = torch.float64
U = 2.0**-53


def built(file: str = "", old: str = "", new: str = "") -> Any:
    """The module ``local`` with what it is made of, one text changed in a file."""
    found = types.ModuleType("none")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("relaxation", "circuit", "local"):
            text = (Path(local.__file__).parent / f"{name}.py").read_text()
            if name == file:
                assert text.count(old) == 1, (old, text.count(old))
                text = text.replace(old, new)
            found = types.ModuleType(f"lipkit.certificates.{name}")
            patch.setitem(sys.modules, found.__name__, found)
            exec(compile(text, name, "exec"), found.__dict__)
    return found


def network(*parts: nn.Module, inputs: int | tuple[int, ...] = 1) -> modules.Network:
    return modules.Network(parts, (inputs,) if isinstance(inputs, int) else inputs)


def graph(*nodes: nn.Module, sources: list[list[int]], inputs: int = 1) -> modules.Network:
    return network(modules.Graph(nodes, sources), inputs=inputs)


def dense(weight: Any, bias: Any = None, dtype: torch.dtype = DOUBLE) -> nn.Linear:
    weight = torch.as_tensor(weight, dtype=dtype)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=dtype)
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(torch.as_tensor(bias, dtype=dtype))
    return layer


def ball(m: Any, net: modules.Network, x: Any, radius: float = 0.0, box: Any = None, machine: Any = None) -> Any:
    x = torch.as_tensor(x, dtype=DOUBLE).reshape(1, *net.input_shape)
    bounds = m.Bounds(net.double(), machine, box)
    return m.Ball(bounds.circuit, x, torch.full((1,), radius, dtype=DOUBLE), box, bounds.walks(x))


def below(found: Any, rows: Any) -> Fraction:
    """The bound of a row on the outputs in the whole ball."""
    circuit = found.circuit
    rows = torch.as_tensor(rows, dtype=DOUBLE).reshape(1, 1, *circuit.shapes[circuit.output])
    base, norm = found.below(circuit.output, rows)
    return Fraction(float(base)) - Fraction(float(found.radius)) * Fraction(float(norm))


def cancelling(n: int, seed: int, factors: Sequence[float] | None = None) -> tuple[list[float], Fraction]:
    """Numbers a with sum a_i f_i = 0 but for rounding, f_n = 1; and that sum."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n - 1, generator=generator, dtype=DOUBLE).tolist()
    f = [1.0] * n if factors is None else list(factors)
    total = sum((Fraction(p) * Fraction(q) for p, q in zip(a, f, strict=False)), Fraction(0))
    a.append(-float(total))
    return a, total + Fraction(a[-1])


# Cases: of a module ``local``, true where its bounds hold.
Case = Callable[[Any], bool]
SEEDS = range(12)


def map_of(make: Callable[[list[float]], modules.Network], count: int, share: Fraction | None = None) -> Case:
    """A linear map whose first column begins with the numbers f, or has shares only: its adjoint."""

    def holds(m: Any) -> bool:
        for seed in SEEDS:
            f = torch.randn(count, generator=torch.Generator().manual_seed(seed + 99), dtype=DOUBLE).tolist()
            f = [*f[:-1], 1.0] if share is None else [1.0] * count
            net = make(f)
            a, exact = cancelling(count, seed, f)
            found = ball(m, net, torch.eye(math.prod(net.input_shape), dtype=DOUBLE)[:1])
            rows = torch.zeros(math.prod(found.circuit.shapes[found.circuit.output]), dtype=DOUBLE)
            rows[:count] = torch.tensor(a, dtype=DOUBLE)
            if below(found, rows) > exact * (share or 1):
                return False
        return True

    return holds


def conv_of(f: list[float]) -> modules.Network:
    layer = nn.Conv2d(1, 1, (1, len(f)), padding=(0, len(f) - 1), bias=False, dtype=DOUBLE)
    layer.weight.data.copy_(torch.tensor(f[::-1], dtype=DOUBLE))
    return network(layer, inputs=(1, 1, 1))


def turned_of(f: list[float]) -> modules.Network:
    layer = nn.ConvTranspose2d(1, 1, (1, len(f)), bias=False, dtype=DOUBLE)
    layer.weight.data.copy_(torch.tensor(f, dtype=DOUBLE))
    return network(layer, inputs=(1, 1, 1))


def bias(m: Any) -> bool:
    for seed in SEEDS:
        k = torch.randn(6, generator=torch.Generator().manual_seed(seed + 99), dtype=DOUBLE)
        k[-1] = 1.0
        a, exact = cancelling(6, seed, k.tolist())
        if below(ball(m, network(dense(torch.zeros(6, 1), k)), [0.0]), a) > exact:
            return False
    return True


def factor(m: Any) -> bool:
    share, zero = torch.tensor(1 / 3, dtype=DOUBLE), dense([[0.0]])
    net = graph(zero, modules.Blend(share), modules.Concatenate(1), sources=[[0], [0, 1], [2, 0]])
    for seed in SEEDS:
        a, _ = cancelling(2, seed, [float(share), 1.0])
        if below(ball(m, net, [1.0]), a) > Fraction(a[0]) * Fraction(float(share)) + Fraction(a[1]):
            return False
    return True


def meeting(m: Any) -> bool:
    net = graph(modules.Concatenate(1), sources=[[0] * 4])
    found = ball(m, net, [1.0])
    return all(below(found, a) <= exact for a, exact in (cancelling(4, seed) for seed in SEEDS))


def constant(m: Any) -> bool:
    steps = [modules.Affine(torch.ones(1).double(), torch.tensor([-0.4 * U]).double()) for _ in range(60)]
    return below(ball(m, network(*steps, dense([[1.0]], [1.0])), [0.0]), [1.0]) <= 1 - 60 * Fraction(0.4 * U)


def entry(m: Any) -> bool:
    for seed in SEEDS:
        x = torch.randn(30, generator=torch.Generator().manual_seed(seed + 99), dtype=DOUBLE)
        x[-1] = 1.0
        a, exact = cancelling(30, seed, x.tolist())
        if below(ball(m, network(nn.Flatten(), inputs=30), x), a) > exact:
            return False
    return True


def lost(m: Any) -> bool:
    found = ball(m, network(dense([[2.0**-600]])), [2.0**300])
    return below(found, [-(2.0**-600)]) <= -(Fraction(2) ** -900)


def sizes(net: modules.Network, x: Any, radius: float = 0.0, machine: Any = None) -> Case:
    """The last value lies within H at x + radius."""

    def holds(m: Any) -> bool:
        found = ball(m, net, x, radius, machine=machine)
        at = torch.as_tensor(x, dtype=DOUBLE).reshape(1, *net.input_shape) + radius
        return bool((found.sizes[-1] >= net(at).abs()).all())

    return holds


def machine(net: modules.Network, x: Any) -> Case:
    """What torch computes in float32, of numbers that may be stored wider, is never below the bound of a row."""
    plain = copy.deepcopy(net).double()
    wide = any(not torch.equal(t.float().double(), t) for t in plain.state_dict().values())
    x = torch.as_tensor(x, dtype=torch.float32).reshape(-1, *net.input_shape)
    computed = copy.deepcopy(net).float()(x).double().flatten(1)
    arithmetic = dataclasses.replace(FLOAT32, stored=int(wide))

    def holds(m: Any) -> bool:
        for point, values in zip(x, computed.tolist(), strict=True):
            found = ball(m, plain, point, machine=arithmetic)
            for (i, value), sign in itertools.product(enumerate(values), (1.0, -1.0)):
                rows = torch.zeros(len(values))
                rows[i] = sign
                if below(found, rows) > Fraction(sign * value):
                    return False
        return True

    return holds


def flushed(net: modules.Network, x: Any) -> Case:
    """A machine that flushes has 0 in the first output."""
    rows = torch.zeros(8)
    rows[0] = 1.0
    return lambda m: below(f := ball(m, net, x, machine=FLOAT32), rows[: math.prod(f.circuit.shapes[-1])]) <= 0


def overflows(net: modules.Network, x: Any) -> Case:
    """A number on the way does not fit float32."""
    return lambda m: not bool(ball(m, net, x, 1e-3, machine=FLOAT32).fits)


def intercepts(m: Any) -> bool:
    n = 1 << 16
    found = ball(m, network(nn.Hardtanh(), inputs=n), [2.0] + [-2.0] * (n - 1))
    return below(found, [1.0] + [0.4 * U] * (n - 1)) <= 1 - (n - 1) * Fraction(0.4 * U)


def leaf(m: Any) -> bool:
    n = 1 << 12
    found = ball(m, network(modules.GroupSort(None), inputs=n), torch.ones(n))
    return below(found, [1.0] + [-0.4 * U] * (n - 1)) <= 1 - (n - 1) * Fraction(0.4 * U)


def leaf_moves(m: Any) -> bool:
    found = ball(m, network(modules.GroupSort(None), inputs=3), [1.0, 0.0, 0.0], 0.5)
    return below(found, [1.0, 0.0, 0.0]) <= 0.5


def norm(m: Any) -> bool:
    n = 1 << 16
    rows = torch.full((n,), 2.0**-27, dtype=DOUBLE)
    rows[0] = 1.0
    bounds = m.Bounds(network(dense(torch.stack([rows, 0 * rows]), [1.0, 0.0]), inputs=n), None, None)
    r = bounds.proved(torch.zeros(1, n).double(), torch.tensor([0]), torch.ones(1).double())[0].item()
    return Fraction(r) ** 2 * (1 + (n - 1) * Fraction(2) ** -54) <= 1


def tiny_norm(m: Any) -> bool:
    bounds = m.Bounds(network(dense([[2.0**-600] * 2, [0.0] * 2], [2.0**-590, 0.0]), inputs=2), None, None)
    x, r = torch.zeros(1, 2).double(), torch.full((1,), 2.0**20).double()
    return bool(bounds.proved(x, torch.tensor([0]), r)[0] <= 2.0**10)


def moves(m: Any) -> bool:
    net = network(nn.Flatten(), inputs=3)
    for seed, r in itertools.product(range(20), (0.1, 0.9)):
        x = torch.rand(3, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) / 3
        found = ball(m, net, x, r, (0.0, 1.0))
        for low, high, size, at in zip(
            *(t[0].tolist() for t in (*found.moves, found.sizes[0])), x.tolist(), strict=True
        ):
            ends = max(Fraction(0), Fraction(at) - Fraction(r)), min(Fraction(1), Fraction(at) + Fraction(r))
            if not (low <= ends[0] - Fraction(at) and high >= ends[1] - Fraction(at) and size >= ends[1]):
                return False
    return True


def kinks(m: Any) -> bool:
    """Lines of ReLU at the ends of intervals and at 0, in rational numbers."""
    generator = torch.Generator().manual_seed(0)
    low, high = (torch.randn(2, 500, 1, generator=generator, dtype=DOUBLE) * 1e3).sort(0).values
    lines = m.Circuit(network(nn.ReLU()), None).nodes[0].lines(low, high)
    rows = zip(*(t.flatten().tolist() for t in (low, high, *lines)), strict=True)
    for start, end, a, b, c, d, least, most in rows:
        for z in (start, end, 0.0):
            if start <= z <= end:
                s, z = Fraction(max(z, 0.0)), Fraction(z)
                if not (Fraction(a) * z + Fraction(b) <= s <= Fraction(c) * z + Fraction(d) and least <= s <= most):
                    return False
    return True


def enclosed(activation: nn.Module, low: float, high: float, steps: int = 40) -> Case:
    """Lines of a curve on an interval against a thousand of its values, to 1e-10."""

    def holds(m: Any) -> bool:
        lines_of = m.Circuit(network(activation), None).nodes[0].lines
        ends = (torch.full((1, 1), end, dtype=DOUBLE) for end in (low, high))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(lines_of.__call__.__globals__, "_STEPS", steps)
            lines = lines_of(*ends)
        z = torch.linspace(low, high, 1001, dtype=DOUBLE)
        s = torch.log1p(torch.exp(z)) if isinstance(activation, nn.Softplus) else activation(z)
        inside = (lines.low_slope * z + lines.low <= s + 1e-10) & (s - 1e-10 <= lines.high_slope * z + lines.high)
        return bool((inside & (lines.least <= s + 1e-10) & (s - 1e-10 <= lines.most)).all())

    return holds


def slopes(m: Any) -> bool:
    """Slopes count beside intercepts, whose own rounding is as large: so much is taken off."""
    found = ball(m, network(nn.LeakyReLU(1 / 3), inputs=2), [3.0, 3.0], 0.5)
    off = 2 * U * found.lines[1].low_slope * 3.0 + 6 * U * found.lines[1].high.abs()
    return bool((found.errors[0] >= off).all())


def single(*parts: nn.Module, inputs: int | tuple[int, ...], count: int = 6) -> Case:
    torch.manual_seed(3)
    net = network(*parts, inputs=inputs)
    return machine(net, torch.randn(count, *net.input_shape))


def at_the_edge(wide: bool) -> Case:
    """One product and one sum, both off by nearly the unit."""
    generator = torch.Generator().manual_seed(0)
    w, x = (1 + 2.0**-8 * torch.rand(2, 4000, generator=generator, dtype=DOUBLE)).unbind()
    w, x = (w if wide else w.float().double()), x.float().double()
    bias = torch.full((4000,), -(2.0**-24) * 0.99, dtype=DOUBLE).float().double()
    values = (w.float() * x.float() + bias.float()).double()
    off = (w * x + bias - values).abs().argmax()
    return machine(network(dense([[w[off]]], [bias[off]])), x[off])


TINY = 2.0**-140  # subnormal in float32
POINTS = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
residual = modules.SlopeResidual(dense([[1.0]]), nn.ReLU(), dense([[2.0**-20]]), torch.ones(1))
apart = modules.Piece(1, 0, 1), modules.Piece(1, 1, 2)
both = graph(modules.Concatenate(1), sources=[[0, 0]])
# Not here: what another term covers. Ends of `Ball._range`, bases and quotients are rounded outward by an ulp, and the
# running constant takes off more; bounds of sums are grown, by `_UP` and `grow`, where errors have a percent to spare;
# `_inside` takes off less than `_UP` of its sum does for rows of 2^22 numbers; slopes of activations are off by less
# than the lines' own rounding.
# What is taken out: a name, the file, the text, what stands there then, and the case that finds it.
TERMS: list[tuple[str, str, str, str, Case]] = [
    ("products", "local", "error = (FLOAT64.gamma(node.terms + 2) if node.terms else 0.0) * sums", "error = 0 * sums",
     map_of(lambda f: network(dense([[w] for w in f])), 5)),
    ("their number", "circuit", "F.linear(h, size), module.out_features, bias", "F.linear(h, size), 0, bias",
     map_of(lambda f: network(dense([[w] for w in f])), 5)),
    ("products of convolutions", "circuit", "out, adjoint, lambda h: ahead(h, size), counts[1], bias, noise",
     "out, adjoint, lambda h: ahead(h, size), 0, bias, noise", map_of(conv_of, 5)),
    ("products of transposed ones", "circuit",
     "out, adjoint, lambda h: ahead(h, size), counts[1], bias, noise",
     "out, adjoint, lambda h: ahead(h, size), 0, bias, noise", map_of(turned_of, 5)),
    ("products of averages", "circuit", "_by_gradient(module, shape), moduli, terms + 8, None",
     "_by_gradient(module, shape), moduli, 0, None",
     map_of(lambda f: network(nn.AvgPool2d(3, 1, 1), inputs=(1, 2, 2)), 4, Fraction(1, 9))),
    ("copies", "circuit", "most if most > 1 else 0", "0",
     map_of(lambda f: network(modules.Expand(5)), 5, Fraction(1))),
    ("a bias", "local", "error = error + FLOAT64.gamma(outputs + 2) * node.bias.abs()", "pass", bias),
    ("a bias in H", "local", "sums = sums + node.bias.abs()", "pass", sizes(network(dense([[1.0]], [9.0])), [1.0])),
    ("factors", "local", "else FLOAT64.gamma(4) * sums", "else 0 * sums", factor),
    ("meetings", "local", "error = error + 2 * _UNIT * dot(part.abs(), self.sizes[source])", "pass", meeting),
    ("the running constant", "local", "error + FLOAT64.gamma(2 * nodes + 16) * (moduli + const.abs())", "error",
     constant),
    ("the product with x", "local", "FLOAT64.gamma(inputs + 2) * dot(a.abs(), self.x.abs())", "0", entry),
    ("underflow", "local", " + self.lost[at - 1][:, None]", "", lost),
    ("errors", "local", "error = error + dot(size, self.errors[at - 1])", "error = error", bias),
    ("slopes", "local", "2 * _UNIT * steep * given[0]", "0 * given[0]", slopes),
    ("intercepts", "local", "FLOAT64.gamma(2 * outputs + 4) * high", "0 * high", intercepts),
    ("values of a leaf", "local", "FLOAT64.gamma(outputs + 4) * walk.centre.abs()", "0 * walk.centre", leaf),
    ("the move of a leaf", "local", "norm = norm + grow(length * walk.spread.slope)", "pass", leaf_moves),
    ("the error of a leaf", "local", "error = error + grow(length * walk.spread.at[:, None])", "pass",
     single(nn.Linear(4, 6), modules.GroupSort(3), inputs=4)),
    ("a leaf in H", "local", "ball[:, None].reshape(-1, *[1] * len(shape))", "0",
     sizes(network(modules.GroupSort(None), inputs=3), [1.0, 0.0, 0.0], 0.5)),
    ("overflow in a leaf", "local", "self.fits &= walk.peak.at + walk.peak.slope * self.radius <", "_ = walk.peak.at <",
     overflows(graph(dense(torch.full((3, 3), 1e38)), modules.GroupSort(3), sources=[[0], [1]], inputs=3),
     torch.full((3,), 9.0))),
    ("norms", "local", "return size(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])",
     "return torch.linalg.vector_norm(rows.flatten(2), dim=2)", norm),
    ("norms that underflow", "local", "return size(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])",
     "return torch.linalg.vector_norm(rows.flatten(2), dim=2) * (1 + FLOAT64.gamma(len(rows) + 99))", tiny_norm),
    ("moves outward", "local", "self.moves = next_down(low - x), next_up(high - x)",
     "self.moves = low - x, high - x", moves),
    ("ends outward", "local", "low, high = next_down(x - self.wide), next_up(x + self.wide)",
     "low, high = x - self.wide, x + self.wide", moves),
    ("the machine's products", "local", "return gamma * sums + floor", "return 0 * sums + floor", at_the_edge(False)),
    ("the machine's bias", "circuit", "return Noise(depth + 1 + circuit.stored",
     "return Noise(depth + circuit.stored", at_the_edge(False)),
    ("weights that are stored wider", "circuit", "return Noise(depth + 1 + circuit.stored", "return Noise(depth + 1",
     at_the_edge(True)),
    ("the machine's scaling", "circuit", "Noise(3 + 2 * circuit.stored, 8, 2.0, size)", "None",
     single(modules.Affine(POINTS[0], POINTS[1]), inputs=2)),
    ("the machine's sums", "circuit", "Noise(len(values) - 1, len(values), 2.0)", "None",
     machine(graph(*apart, modules.Add(1, -1), sources=[[0], [0], [1, 2]], inputs=2), POINTS)),
    ("the machine's residual", "circuit", "Noise(1, 2, 2.0)", "None", machine(network(residual), POINTS[:, :1])),
    ("the machine's blend", "circuit", "Noise(depth, 8, 2.0, size)", "None",
     machine(graph(*apart, modules.Blend(torch.tensor(0.3)), sources=[[0], [0], [1, 2]], inputs=2), POINTS)),
    ("the machine's averages", "circuit", "Noise(terms + 8, terms + 8, float(max(terms, most) + 4))", "None",
     single(nn.AvgPool2d(3), inputs=(1, 3, 3))),
    ("the machine's activation", "local", "noise, peak = node.noise(given[0])", "_, peak = node.noise(given[0])",
     single(nn.Tanh(), inputs=1, count=2)),
    ("inputs that are flushed", "local", "floor = floor + biggest * noise.terms", "pass",
     flushed(network(dense([[2.0**100]])), [TINY])),
    ("weights that are flushed", "local", "floor = floor + sum(part.flatten(1).sum(1) for part in given)", "pass",
     flushed(network(dense([[TINY]])), [2.0**100])),
    ("results that are flushed", "local", "floor + 2 * noise.terms + 2 * noise.depth + 2", "floor",
     flushed(network(dense([[2.0**-70]])), [2.0**-70])),
    ("maxima that are flushed", "circuit", "nn.ReLU(), exact=True)), (1.0, 1.0), flushed=True)",
     "nn.ReLU(), exact=True)), (1.0, 1.0))",
     flushed(graph(modules.Add(-1), modules.Maximum(), sources=[[0], [0, 1]]), [TINY])),
    ("larger ones of pairs", "circuit", "circuit.total((b, more), (1.0, 1.0), flushed=True)",
     "circuit.total((b, more), (1.0, 1.0))",
     flushed(network(both, modules.MaxMin()), [TINY])),
    ("smaller ones of pairs", "circuit", "circuit.total((a, more), (1.0, -1.0), flushed=True)",
     "circuit.total((a, more), (1.0, -1.0))",
     flushed(network(both, modules.MaxMin(), modules.Piece(1, 1, 2)), [TINY])),
    ("what is flushed there", "local", "noise = noise + 8 * self.circuit.arithmetic.tiny", "pass",
     flushed(network(both, modules.MaxMin()), [TINY])),
    ("overflow", "local", "self._room(grow(sums * (noise.swell * (1 + gamma)) + biggest))", "pass",
     overflows(network(dense([[1e38]])), [9.0])),
    ("weights that overflow", "local", "(1 + gamma)) + biggest))", "(1 + gamma))))",
     overflows(network(dense([[1e39]])), [0.0])),
    ("overflow in an activation", "local", "self._room(peak)", "pass",
     overflows(network(nn.Softplus(1.0, 200.0)), [100.0])),
    ("lines of pieces", "relaxation", "slack = wrong + grow(2.0**-50 * size)\n        return below",
     "slack = wrong\n        return below", kinks),
    ("the activation's own error", "relaxation", "wrong = grow(self.error[0] + self.error[1] * largest)",
     "wrong = 0 * largest", enclosed(nn.Softplus(), 20.0001, 20.0002)),
    ("tangents", "relaxation", " - bend * grow(slack * (1 + 2.0**-40))", "", enclosed(nn.Tanh(), 0.1, 3.0, steps=1)),
    ("lines by slopes", "relaxation", "grow((q - p) / 4 * width * (1 + 2.0**-40))", "0 * width",
     enclosed(nn.Mish(), -2.0, 3.0)),
    ("ranges by slopes", "relaxation", "grow(max(abs(p), abs(q)) * width / 2 * (1 + 2.0**-40))", "0 * width",
     enclosed(nn.Mish(), -2.0, 3.0)),
]  # fmt: skip


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term[0])
def test_a_term_that_is_taken_out_is_found(term: tuple[str, str, str, str, Case]) -> None:
    _, file, old, new, holds = term
    assert holds(local)
    assert not holds(built(file, old, new))
