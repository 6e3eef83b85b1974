"""Bisection against the closed form on a linear model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lipkit.attacks import ATTACKS, carlini_wagner, fab, run_attack, shrink
from lipkit.attacks.ascent import misclassified
from lipkit.errors import OptionError, ShapeError


def threshold(x: Tensor) -> Tensor:
    return torch.stack([0.5 - x[:, 0], x[:, 0] - 0.5], dim=1)


def test_finds_the_boundary_on_the_segment_from_outside() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64)
    far = torch.tensor([[1.0, 0, 0, 0], [2.0, 2.0, 0, 0], [0.6, 0, 0, 3.0]], dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.int64)
    near = shrink(threshold, x, far, y, steps=40)
    assert misclassified(threshold(near), y).all()
    torch.testing.assert_close(near[:, 0], torch.full((3,), 0.5, dtype=torch.float64), rtol=1e-10, atol=0)
    torch.testing.assert_close(near[1, 1].item(), 0.5, rtol=1e-10, atol=0)


def test_leaves_what_is_not_adversarial() -> None:
    x, other = torch.zeros(1, 2), torch.tensor([[0.4, 0.1]])
    assert torch.equal(shrink(threshold, x, other, torch.tensor([0])), other)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pgd", "apgd", "fab", "cw"])
def test_what_lies_outside_eps_is_no_success(name: str) -> None:
    x, y = torch.tensor([[0.1, 0.0], [0.4, 0.0]]), torch.zeros(2, dtype=torch.int64)
    attack = partial(run_attack, name, threshold, x, y, steps=100 if name == "cw" else 10)
    found = attack(eps=0.2).points
    assert misclassified(threshold(found), y).tolist() == [False, True]
    assert bool((torch.linalg.vector_norm(found - x, dim=1) <= 0.2).all())
    own = attack(eps=torch.tensor([0.5, 0.05])).points
    assert misclassified(threshold(own), y).tolist() == [True, False]
    for eps in (-1.0, math.nan, math.inf, torch.tensor([0.1, -0.1])):
        with pytest.raises(OptionError, match="expected every eps to be finite and >= 0"):
            run_attack(name, threshold, x, y, eps=eps)
    with pytest.raises(ShapeError, match="expected one eps or 2 of them"):
        run_attack(name, threshold, x, y, eps=torch.ones(3))
    for key in {"steps", "restarts"} & set(ATTACKS[name].takes):
        for count in (0, 1.5, "3"):
            with pytest.raises(OptionError, match=f"{key}: expected an integer of at least 1, got {count!r}"):
                run_attack(name, threshold, x, y, **{"eps": 0.05, "steps": 1, key: count})
    if ATTACKS[name].minimum_norm:
        assert misclassified(threshold(attack(eps=None).points), y).all()
    else:
        with pytest.raises(OptionError, match=f"expected a radius eps for the attack '{name}', got None"):
            run_attack(name, threshold, x, y, eps=None)


@pytest.mark.parametrize("attack", [fab, carlini_wagner])
def test_networks_without_gradients_are_warned_of(attack: Callable[..., Tensor]) -> None:
    def steps(x: Tensor) -> Tensor:
        return threshold((x * 4).floor() / 4 + 0 * x)

    x, y = torch.tensor([[0.1, 0.0], [0.9, 0.0]]), torch.zeros(2, dtype=torch.int64)
    with pytest.warns(
        UserWarning, match="could not search at 1 of 1 samples that it found no example for: the gradient"
    ):
        assert torch.equal(attack(steps, x, y, steps=3), x)


@pytest.mark.parametrize("box", [(0.0, math.inf), (-math.inf, 1.0), (-math.inf, math.inf), None])
def test_carlini_and_wagner_search_in_boxes_with_an_infinite_end(box: tuple[float, float] | None) -> None:
    x, y = torch.tensor([[0.1, 0.0], [0.9, 1.0]]), torch.tensor([0, 1])
    found = carlini_wagner(threshold, x, y, box=box)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.0], [0.5, 1.0]]), rtol=0, atol=0.01)
    assert misclassified(threshold(found), y).all()


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"\(1, 2\), got \(1, 3\)"):
        shrink(threshold, torch.zeros(1, 2), torch.zeros(1, 3), torch.tensor([0]))
    x, y = torch.zeros(1, 2), torch.tensor([0])
    for steps in (0, 2.5):
        with pytest.raises(OptionError, match=f"steps: expected an integer of at least 1, got {steps}"):
            shrink(threshold, x, x, y, steps=steps)
    for attack, name, value, least in (
        (fab, "polish", -1, 0), (fab, "targets", 0, 1), (fab, "targets", -1, 1),
        (carlini_wagner, "searches", 2.5, 1), (carlini_wagner, "targets", 0, 1),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=f"{name}: expected an integer of at least {least}, got {value}"):
            attack(threshold, x, y, **{name: value})
    with pytest.raises(OptionError, match="confidence"):
        carlini_wagner(threshold, x, y, confidence=-1.0)
