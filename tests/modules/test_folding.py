from __future__ import annotations

import pytest
import torch
from benchmarks.architectures import NETWORKS, SMALL, settle
from torch import Tensor, nn

from lipkit import analyze, fold
from lipkit.errors import NoRuleError


@pytest.mark.parametrize(("name", "left"), [("ResNet-18", 0), ("MobileNetV2", 0), ("U-Net", 0), ("WRN-16-4", 6)])
def test_the_same_function_with_fewer_norms(name: str, left: int) -> None:
    torch.manual_seed(0)
    shape = NETWORKS[name][1]
    model = settle(SMALL[name]())
    folded = fold(model, shape)
    assert type(folded) is type(model)
    assert sum("BatchNorm" in type(m).__name__ for m in folded.modules()) == left
    x = torch.randn(3, *shape, dtype=torch.float64)
    assert torch.allclose(folded(x), model(x), rtol=1e-9, atol=1e-9)
    assert any("BatchNorm" in type(m).__name__ for m in model.modules())
    assert analyze(folded, shape, restarts=0).upper <= analyze(model, shape, restarts=0).upper * (1 + 1e-6)


class Shared(nn.Module):
    """What is read twice, or called twice, stays."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.n, self.m = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.n(y) + y + self.m(self.b(x)) + self.m(self.b(y))


def test_what_is_read_elsewhere_is_left_alone() -> None:
    model = settle(Shared())
    folded = fold(model, (4,))
    assert sum(isinstance(m, nn.BatchNorm1d) for m in folded.modules()) == 2
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.allclose(folded(x), model(x))


def test_training_mode_is_refused() -> None:
    with pytest.raises(NoRuleError, match=r"training|evaluation mode"):
        fold(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), (2,))


class Renamed(nn.Module):
    """A layer under two names, one that another call reads too, and a normalisation whose numbers are read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a = kind, nn.Linear(4, 4)
        self.body = nn.Sequential(self.a, nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.kind == "weight":
            return y @ self.a.weight
        return y * self.body[1].eps if self.kind == "number" else y


@pytest.mark.parametrize(("kind", "left"), [("name", 0), ("weight", 1), ("number", None)])
def test_layers_of_several_names_and_uses(kind: str, left: int | None) -> None:
    model = settle(Renamed(kind))
    if left is None:
        with pytest.raises(NoRuleError, match="only calls its normalisations"):
            fold(model, (4,))
        return
    folded = fold(model, (4,))
    assert sum(isinstance(m, nn.BatchNorm1d) for m in folded.modules()) == left
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.allclose(folded(x), model(x))
