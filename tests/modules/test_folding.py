"""An export folds a batch normalisation into the layer before it, where nobody else reads either."""

from __future__ import annotations

import pytest
import torch
from benchmarks.architectures import NETWORKS, SMALL, settle
from torch import Tensor, nn

from lipkit import export
from lipkit.errors import NoRuleError


def norms(model: nn.Module) -> int:
    return sum("BatchNorm" in type(m).__name__ or type(m).__name__ == "Affine" for m in model.modules())


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "left"), [("ResNet-18", 0), ("MobileNetV2", 0), ("U-Net", 0), ("WRN-16-4", 6)])
def test_the_same_function_with_fewer_norms(name: str, left: int) -> None:
    torch.manual_seed(0)
    shape = NETWORKS[name][1]
    model = settle(SMALL[name]())
    folded = export(model, shape)
    assert norms(folded) == left
    x = torch.randn(3, *shape, dtype=torch.float64)
    assert torch.allclose(folded(x), model(x), rtol=1e-9, atol=1e-9)


class Shared(nn.Module):
    """A layer whose output is read twice, and a normalisation that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.n, self.m = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.n(y) + y + self.m(self.b(x)) + self.m(self.b(y))


class Renamed(nn.Module):
    """A layer under two names, whose weight another product may read too, and a normalisation whose number is read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a = kind, nn.Linear(4, 4)
        self.body = nn.Sequential(self.a, nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.kind == "weight":
            return y @ self.a.weight
        return y * self.body[1].eps if self.kind == "number" else y


# The product with eps is an entrywise map of its own.
@pytest.mark.parametrize(
    ("model", "left"), [(Shared(), 1), (Renamed("name"), 0), (Renamed("weight"), 0), (Renamed("number"), 1)]
)
def test_what_is_read_elsewhere_keeps_its_function(model: nn.Module, left: int) -> None:
    model = settle(model)
    x = torch.randn(5, 4, dtype=torch.float64)
    exported = export(model, (4,))
    assert torch.allclose(exported(x), model(x))
    assert norms(exported) == left


class Signals(nn.Module):
    """Convolutions of signals, whose outputs stand behind a `Reshape` in an export; the second is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(4, 4, 3, padding=1), nn.ConvTranspose1d(4, 4, 3, padding=1)
        self.n, self.m = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.n(self.a(x)))
        return y + self.m(y)


TURNED = nn.Sequential(nn.ConvTranspose1d(4, 6, 3, padding=1, groups=2), nn.BatchNorm1d(6))


@pytest.mark.parametrize(
    ("model", "left"), [(Signals(), 1), (nn.Sequential(Signals().a, nn.BatchNorm1d(4)), 0), (TURNED, 0)]
)
def test_a_norm_is_folded_through_a_new_shape(model: nn.Module, left: int) -> None:
    model = settle(model)
    x = torch.randn(5, 4, 6, dtype=torch.float64)
    exported = export(model, (4, 6))
    assert torch.allclose(exported(x), model(x))
    assert norms(exported) == left


def test_training_mode_is_refused() -> None:
    with pytest.raises(NoRuleError, match=r"training|evaluation mode"):
        export(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), (2,))
