"""AutoAttack where it can run, and what stands in for it where it cannot."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn

from lipkit.attacks import autoattack
from lipkit.attacks import autoattack as function
from lipkit.attacks.ascent import misclassified
from lipkit.attacks.autoattack import obstacle
from lipkit.attacks.balls import ball

installed = importlib.util.find_spec("pyautoattack") is not None


def network(classes: int = 5, pixels: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels**2, 16), nn.ReLU(), nn.Linear(16, classes)).eval()


def images(count: int, pixels: int = 6) -> Tensor:
    return torch.rand(count, 1, pixels, pixels, generator=torch.Generator().manual_seed(1))


@pytest.mark.skipif(not installed, reason="needs the extra attack")
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_it_runs_and_leaves_no_trace(norm: str) -> None:
    net, x = network(), images(6)
    y = net(x).argmax(dim=1)
    eps = {"l2": 3.0, "linf": 0.5}[norm]  # so large that no slow part is reached
    before = torch.get_rng_state()

    def trace(*_: object) -> None:
        return None

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        found, again = (autoattack(net, x, y, eps, norm=norm) for _ in range(2))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(old)
    assert found.ran.startswith("AutoAttack standard (pyautoattack ")
    assert torch.equal(found.points, again.points)
    assert misclassified(net(found.points), y).all()
    assert (ball(norm).distance(found.points, x) <= eps).all()
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not installed, reason="needs the extra attack")
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("count", [1, 7])
def test_all_four_parts_run(norm: str, count: int) -> None:
    net, x = network(), images(count)
    y = net(x).argmax(dim=1)
    eps = {"l2": 0.05, "linf": 0.01}[norm]
    found = autoattack(net, x, y, eps, norm=norm)
    assert (ball(norm).distance(found.points, x) <= eps).all()
    assert torch.equal(misclassified(net(found.points), y), (found.points != x).flatten(1).any(dim=1))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("classes", "pixels", "box", "reason"),
    [
        (3, 6, (0.0, 1.0), "needs at least 4 classes"),
        (5, 4, (0.0, 1.0), "needs images of at least 5 x 5 pixels"),
        (5, 6, None, "knows only the box"),
        (5, 6, (-1.0, 1.0), "knows only the box"),
    ],
)
def test_the_ensemble_runs_where_it_cannot_and_says_so(
    classes: int, pixels: int, box: tuple[float, float] | None, reason: str
) -> None:
    net, x = network(classes, pixels), images(5, pixels)
    y = net(x).argmax(dim=1)
    found = function(net, x, y, 3.0, box=box, steps=10)
    assert f"instead of AutoAttack, which {reason}" in found.ran
    assert misclassified(net(found.points), y).all()


def test_what_stands_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, box = images(3), (0.0, 1.0)
    same = torch.full((3,), 0.1)
    assert obstacle(x.flatten(1), same, 5, box) == "needs images (N, C, H, W)"
    assert obstacle(x, torch.tensor([0.1, 0.2, 0.1]), 5, box) == "needs one eps > 0 for all samples"
    assert obstacle(x, same * 0, 5, box) == "needs one eps > 0 for all samples"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert obstacle(x, same, 5, box) == 'is not installed (pip install "lipkit[attack]")'
