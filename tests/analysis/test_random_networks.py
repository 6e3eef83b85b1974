"""Random networks as directed acyclic graphs: the bound is never below a Jacobian, at any point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit.analysis import analyze
from lipkit.testing.reference import jacobians

SHAPE = (2, 4, 4)
# Ops on one value (B, 2, 4, 4), on two, and what they are drawn with.
UNARY = {
    "conv": lambda net, i, x: net.convs[i](x),
    "grouped": lambda net, i, x: net.grouped[i](x),
    "norm": lambda net, i, x: net.norms[i](x),
    "conv norm": lambda net, i, x: net.norms[i](net.convs[i](x)),
    "relu": lambda net, i, x: torch.relu(x),
    "in place": lambda net, i, x: F.leaky_relu(x, -1.5, inplace=True),
    "gelu": lambda net, i, x: F.gelu(x),
    "pool": lambda net, i, x: F.max_pool2d(x, 3, 1, 1),
    "average": lambda net, i, x: F.avg_pool2d(x, 3, 1, 1),
    "mean": lambda net, i, x: x - 0.5 * x.mean((2, 3), keepdim=True),
    "scaled": lambda net, i, x: (1.5 - i) * x / net.temperature,
    "shuffle": lambda net, i, x: x.transpose(1, 2).reshape(x.size(0), *SHAPE).flip(3),
    "strided": lambda net, i, x: F.interpolate(net.strided[i](x), scale_factor=2),
    "halves": lambda net, i, x: torch.cat((net.small[i](x[:, :1]), x[:, 1:]), 1),
    "pieces": lambda net, i, x: net.coupled(i, *x.chunk(2, 1)),
    "linear": lambda net, i, x: (x @ net.matrix).tanh(),
}
BINARY = {
    "add": lambda net, x, y: x + y,
    "add in place": lambda net, x, y: x.mul(1.0).add_(y, alpha=-2),
    "subtract": lambda net, x, y: torch.sub(x, y),
    "maximum": lambda net, x, y: torch.maximum(x, y),
    "cat": lambda net, x, y: net.mix(torch.cat((x, y), 1)),
    "broadcast": lambda net, x, y: x + y.sum(1, keepdim=True),
}


class Net(nn.Module):
    """A program of (op, which weights, which values) on a growing list of values."""

    def __init__(self, program: list[tuple[str, int, int, int]]) -> None:
        super().__init__()
        self.program = program
        self.convs = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1)])
        self.grouped = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1, groups=2) for _ in range(2)])
        self.strided = nn.ModuleList([nn.Conv2d(2, 2, 3, stride=2, padding=1) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(2), nn.BatchNorm2d(2)])
        self.small = nn.ModuleList([nn.Conv2d(1, 1, 3, padding=1) for _ in range(2)])
        self.mix = nn.Conv2d(4, 2, 1)
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("temperature", torch.tensor(0.7))
        for norm in self.norms:
            norm.running_var.uniform_(0.3, 2.0)
            norm.weight.data.uniform_(-2, 2)

    def coupled(self, i: int, a: Tensor, b: Tensor) -> Tensor:
        a = a + self.small[i](b)
        return torch.cat((b - self.small[i](a), a), 1)

    def forward(self, x: Tensor) -> Tensor:
        values = [x.clone()]
        for op, i, first, second in self.program:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(UNARY[op](self, i, a) if op in UNARY else BINARY[op](self, a, b))
        return values[-1]


STEP = st.tuples(st.sampled_from([*UNARY, *BINARY, *BINARY]), st.integers(0, 1), st.integers(0, 9), st.integers(0, 9))


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(program=st.lists(STEP, min_size=1, max_size=7), seed=st.integers(0, 999))
def test_no_jacobian_is_above_the_bound(program: list[tuple[str, int, int, int]], seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Net(program).double().eval()
        x = 2 * torch.randn(3, *SHAPE, dtype=torch.float64)
    found = analyze(net, SHAPE, restarts=0)
    with torch.no_grad():
        for point in x:
            # By differences: in-place calls cannot always be differentiated.
            ends = torch.cat((point[None], point + 1e-6 * torch.eye(32, dtype=torch.float64).reshape(32, *SHAPE)))
            y = net(ends).flatten(1).numpy()
            norm = np.linalg.norm((y[1:] - y[0]) / 1e-6, 2)
            assert norm <= found.upper * (1 + 1e-4) + 1e-6, (program, norm, found.upper)
        a, b = net(x).flatten(1), net(x.roll(1, 0)).flatten(1)
        assert bool(((a - b).norm(dim=1) <= found.upper * (x - x.roll(1, 0)).flatten(1).norm(dim=1) * (1 + 1e-9)).all())


def test_the_reference_sees_a_bound_that_is_too_small() -> None:
    torch.manual_seed(0)
    net = Net([("conv", 0, 0, 0), ("add", 0, 1, 1)]).double().eval()
    norm = max(np.linalg.norm(j, 2) for j in jacobians(net, torch.randn(1, *SHAPE, dtype=torch.float64)))
    upper = analyze(net, SHAPE, restarts=0).upper
    assert 0.6 * upper < norm <= upper
