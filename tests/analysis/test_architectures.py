"""Networks with their own forward pass: ResNet, DenseNet and ShuffleNet blocks, and one with everything in it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.architectures import settle
from torch import Tensor, nn

from lipkit.analysis import analyze, lipschitz_lower_bound
from lipkit.testing.reference import jacobians


class BasicBlock(nn.Module):
    """Of ResNet-18, with the in-place calls that are usual there."""

    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Stem with overlapping pooling, two blocks, global pooling, linear layer."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(2, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.Sequential(BasicBlock(width, width), BasicBlock(width, 2 * width, 2))
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class DenseLayer(nn.Module):
    def __init__(self, cin: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu = nn.BatchNorm2d(cin), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(cin, 2 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * growth)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        return self.conv2(self.relu(self.norm2(self.conv1(self.relu(self.norm1(x))))))


class DenseNet(nn.Module):
    """One dense block, transition by average pooling, linear layer."""

    def __init__(self, growth: int = 2) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(1, 2, 3, padding=1)
        self.layers = nn.ModuleList([DenseLayer(2 + i * growth, growth) for i in range(3)])
        self.transition = nn.Conv2d(2 + 3 * growth, 3, 1)
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.conv0(x)]
        for layer in self.layers:
            features.append(layer(features))
        y = nn.functional.avg_pool2d(self.transition(torch.cat(features, 1)), 2)
        return self.fc(y.mean([2, 3]))


class Everything(nn.Module):
    """Residual sum, concatenation, grouped and strided convolutions, overlapping pooling, batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.pool = nn.MaxPool2d(3, stride=2)
        self.left, self.right = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 3, 3, padding=1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.pool(x + torch.relu(self.grouped(x)))
        x = torch.cat((self.left(x), self.right(x)), dim=1)
        return self.head(x.mean((2, 3)))


class Shuffled(nn.Module):
    """One half of the channels passes by, the other goes through a convolution (ShuffleNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        x = torch.cat((a, self.conv(b)), 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


CASES = {
    "resnet": (ResNet, (2, 6, 6)),
    "densenet": (DenseNet, (1, 6, 6)),
    "everything": (Everything, (2, 11, 11)),
    "shuffled": (Shuffled, (4, 5, 5)),
}


def steepest(model: nn.Module, shape: tuple[int, ...], points: int = 3) -> float:
    x = torch.randn(points, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return max(float(np.linalg.norm(j, 2)) for j in jacobians(lambda t: model(t.clone()), x))


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_the_bound_is_above_the_jacobian(name: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model = settle(make())
    found = analyze(model, shape, restarts=2, steps=5)
    norm = steepest(model, shape)
    assert norm <= found.upper < 20
    assert 0 < found.lower <= found.upper
    assert math.isclose(math.prod(layer.factor for layer in found.layers), found.product, rel_tol=1e-6)


def positive(model: nn.Module) -> nn.Module:
    """Weights without cancellation, so that bounds can be nearly reached: on positive inputs every ReLU is open."""
    settle(model)
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            parameter.data.abs_()
    return model


@pytest.mark.thorough
def test_a_long_search_does_not_beat_the_bound() -> None:
    torch.manual_seed(3)
    model = positive(Everything())
    upper = analyze(model, (2, 11, 11), restarts=0).upper
    start = 3 + torch.rand(8, 2, 11, 11, dtype=torch.float64)
    found = lipschitz_lower_bound(model, start=start, restarts=8, steps=150)
    assert 0.05 * upper < found.lower <= upper


@pytest.mark.slow
def test_ten_thousand_steps_do_not_beat_the_bound() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = positive(Everything()) if seed else settle(Everything())
        upper = analyze(model, (2, 11, 11), restarts=0).upper
        start = 3 * torch.rand(4, 2, 11, 11, dtype=torch.float64)
        assert lipschitz_lower_bound(model, start=start, restarts=4, steps=10_000, seed=seed).lower <= upper
