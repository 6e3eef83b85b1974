"""AutoAttack where it can run, and its refusal where it cannot."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn

from lipkit.attacks import autoattack, run_attack
from lipkit.attacks.ascent import ball, misclassified
from lipkit.errors import OptionError

installed = importlib.util.find_spec("pyautoattack") is not None


def network(classes: int = 5, pixels: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels**2, 16), nn.ReLU(), nn.Linear(16, classes)).eval()


def images(count: int, pixels: int = 6) -> Tensor:
    return torch.rand(count, 1, pixels, pixels, generator=torch.Generator().manual_seed(1))


def linear(norm: str) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """A linear network, images, their classes, and the distances of its boundary where they do not reach the box."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 5)).eval()
    x = images(6) * 0.5 + 0.25
    y = net(x).argmax(dim=1)
    weight, logits = net[1].weight.detach(), net(x).detach()
    step = weight[y][:, None] - weight
    # The gap over the dual norm.
    gaps = (logits.gather(1, y[:, None]) - logits) / step.norm(p=2 if norm == "l2" else 1, dim=2)
    return net, x, y, gaps.masked_fill(gaps.isnan(), torch.inf).amin(1)


@pytest.mark.thorough
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
        found, again = (autoattack(net, x, y, eps=eps, norm=norm, parts=None) for _ in range(2))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(old)
    assert torch.equal(found, again)
    assert misclassified(net(found), y).all()
    assert (ball(norm).distance(found, x) <= eps).all()
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
    found = autoattack(net, x, y, eps=eps, norm=norm)
    assert (ball(norm).distance(found, x) <= eps).all()
    assert torch.equal(misclassified(net(found), y), (found != x).flatten(1).any(dim=1))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.thorough
@pytest.mark.skipif(not installed, reason="needs the extra attack")
@pytest.mark.parametrize(
    ("name", "ran"),
    [
        ("autoattack", "AutoAttack standard"),
        ("autoattack_early", "AutoAttack, lipkit's APGD and FAB before its Square"),
        ("autoattack_apgd", "AutoAttack's APGD-CE and APGD-DLR"),
    ],
)
def test_its_name_says_the_version_that_ran(name: str, ran: str) -> None:
    net, x = network(), images(2)
    found = run_attack(name, net, x, net(x).argmax(dim=1), eps=3.0)
    assert found.ran.startswith(f"{ran} (pyautoattack ")


@pytest.mark.thorough
@pytest.mark.skipif(not installed, reason="needs the extra attack")
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_square_gets_what_our_search_leaves_and_hopeless_starts_are_given_up(
    norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Tensor] = []
    monkeypatch.setattr(sys.modules[autoattack.__module__], "_run", lambda parts, model, x, *_: left.append(x) or x)
    net, x, y, radius = linear(norm)
    y[0], count = (y[0] + 1) % 5, 0  # misclassified: not attacked
    eps = float(radius[1:].sort().values[2:4].mean())

    def model(points: Tensor) -> Tensor:
        nonlocal count
        count += len(points)
        return net(points)

    found = autoattack(model, x, y, eps=eps, norm=norm, batch_size=7, parts=None)
    stands = radius >= eps
    stands[0] = False
    assert torch.equal(~misclassified(net(found), y), stands)
    assert torch.equal(left[0], x[stands])
    assert (ball(norm).distance(found, x) <= eps).all()
    count = 0
    autoattack(model, x[1:], y[1:], eps=eps / 1000, norm=norm, parts=None)
    # One look of ten steps for the margin and for each of four rivals, and the evaluations around them.
    assert count <= 5 * (5 * 11 + 3)


@pytest.mark.thorough
@pytest.mark.skipif(not installed, reason="needs the extra attack")
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_untargeted_parts_run_alone_and_find_the_examples_of_a_linear_network(
    norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyautoattack.autoattack as package

    for part in ("APGDAttack_targeted", "FABAttack_PT", "SquareAttack"):
        kind = type(part, (), {"__init__": lambda self, *_, **__: None, "n_target_classes": 9})
        monkeypatch.setattr(package, part, kind)  # without a method that could attack
    net, x, y, radius = linear(norm)
    eps = float(radius.sort().values[2:4].mean())
    found = run_attack("autoattack_apgd", net, x, y, eps=eps, norm=norm).points
    assert torch.equal(misclassified(net(found), y), radius < eps)
    assert (ball(norm).distance(found, x) <= eps).all()


@pytest.mark.parametrize(
    ("classes", "pixels", "options", "reason"),
    [
        (3, 6, {}, "needs at least 4 classes, got 3"),
        (5, 4, {}, "needs images of at least 5 x 5 pixels, got 4 x 4"),
        (5, 6, {"box": None}, r"knows only the box \[0, 1\], got None"),
        (5, 6, {"box": (-1.0, 1.0)}, r"knows only the box \[0, 1\], got \(-1.0, 1.0\)"),
        (5, 6, {"eps": torch.tensor([0.1, 0.2, 0.1])}, "needs one eps > 0 for all samples, got 0.1 to 0.2"),
        (5, 6, {"eps": 0.0}, "needs one eps > 0 for all samples, got 0 to 0"),
    ],
)
def test_it_is_refused_where_it_cannot_run(classes: int, pixels: int, options: dict, reason: str) -> None:
    net, x = network(classes, pixels), images(3, pixels)
    with pytest.raises(OptionError, match=f"AutoAttack can run on: it {reason}; the attack 'apgd' takes any"):
        autoattack(net, x, net(x).argmax(1), **({"eps": 0.1} | options))
    flat = nn.Linear(36, 5)
    with pytest.raises(OptionError, match=r"needs images \(N, C, H, W\), got shape \(3, 36\)"):
        autoattack(flat, images(3).flatten(1), torch.zeros(3, dtype=torch.int64), eps=0.1)


def test_without_the_package_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    net, x = network(), images(3)
    with pytest.raises(OptionError, match=r"expected the package pyautoattack .*pip install lipkit\[attack\]"):
        run_attack("autoattack", net, x, net(x).argmax(1), eps=0.1)


@pytest.mark.skipif(not installed, reason="needs the extra attack")
def test_ties_that_the_package_stumbles_over_give_one_sentence() -> None:
    with pytest.raises(OptionError, match="expected logits that pyautoattack can attack, got its error: cannot"):
        autoattack(lambda x: x.new_zeros(len(x), 5), images(2), torch.zeros(2).long(), eps=0.1, parts=["square"])
