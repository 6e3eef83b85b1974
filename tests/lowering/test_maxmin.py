"""MaxMin as people write it, max(a, b) beside min(a, b), permutes entries: constant 1. What only looks like it: not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lipkit.analysis import analyze
from lipkit.errors import NoRuleError
from lipkit.lowering import export, lipschitz


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], dim: int) -> None:
        super().__init__()
        self.function, self.dim = function, dim

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*x.chunk(2, self.dim))


def interleaved(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((torch.max(a, b), torch.min(a, b)), 2).flatten(1, 2)


@pytest.mark.thorough
@pytest.mark.usual(15)
@pytest.mark.parametrize("shape", [(8,), (3, 8), (8, 4, 4)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.cat([torch.max(a, b), torch.min(a, b)], 1),
        lambda a, b: torch.cat((torch.minimum(b, a), torch.maximum(a, b)), dim=1),
        lambda a, b: torch.cat([torch.max(a, b), -torch.max(-a, -b)], -1),
        lambda a, b: torch.stack([torch.min(a, b), torch.max(b, a)], 1),
        lambda a, b: torch.stack([torch.max(a, b), torch.min(b, a)], -1),
        interleaved,
    ],
    ids=["cat", "min first", "by negation", "stack", "stack last", "interleaved"],
)
def test_max_beside_min_has_constant_one(function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    if function is interleaved and len(shape) == 1:
        function = lambda a, b: torch.stack((torch.max(a, b), torch.min(a, b)), 2).flatten(1)  # noqa: E731
    net = Net(function, 1 if len(shape) > 2 else -1).eval()
    plain = export(net, shape)
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(x), net(x))
    for bound in (float(lipschitz(plain)), float(analyze(net, shape, restarts=0).upper)):
        assert 1 <= bound < 1 + 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.cat([torch.max(a, b), torch.max(b, a)], 1),
        lambda a, b: torch.cat([torch.max(a, b), torch.min(a, b + 1)], 1),
        lambda a, b: torch.cat([torch.max(a, b), -torch.max(3 - a, -b)], 1),  # shifts: a bound leaves their numbers out
        lambda a, b: torch.cat([torch.max(a, b), torch.min(a, a)], 1),
    ],
    ids=["max twice", "another pair", "a shift", "one value"],
)
def test_what_only_looks_like_it_keeps_its_constant(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = Net(function, 1).eval()
    for bound in (float(lipschitz(export(net, (8,)))), float(analyze(net, (8,), restarts=0).upper)):
        assert bound >= 2**0.5 - 1e-9
    # Somewhere both halves move with a: where a lies between b and b + 1, or above 3.
    a = torch.linspace(-1, 5, 61, dtype=torch.float64)[:, None]
    x = torch.cat([a, torch.zeros_like(a)], 1)
    steepest = (net(x[1:]) - net(x[:-1])).norm(dim=1).max() / 0.1
    assert float(steepest) == pytest.approx(2**0.5, rel=1e-9)


class Sorts(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def unpacked(x: Tensor) -> Tensor:
    values, _ = torch.sort(x.reshape(-1, 4, 2), dim=2)
    return values.flatten(1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(x.shape[0], -1, 2).sort(-1).values.reshape(x.shape),
        lambda x: torch.sort(x, 1, descending=True)[0],
        unpacked,
    ],
    ids=["values", "descending", "unpacked"],
)
def test_sorting_has_constant_one(function: Callable[[Tensor], Tensor]) -> None:
    net = Sorts(function).eval()
    plain = export(net, (8,))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(x), net(x))
    assert float(lipschitz(plain)) == float(analyze(net, (8,), restarts=0).upper) == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.sort(1).indices.float(), "whole numbers"),
        (lambda x: torch.sort(x, 1)[-1] + x, "whole numbers"),
        (lambda x: x.gather(1, x.sort(1)[1]), "whole numbers"),
        (lambda x: x.sort(0)[0], "other than the batch"),
    ],
    ids=["indices", "last", "gather", "batch"],
)
def test_where_the_sorted_entries_were_is_refused(function: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(NoRuleError, match=message):
        export(Sorts(function).eval(), (8,))
