"""Bisection against the closed form on a linear model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lipkit.attacks import shrink
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


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"\(1, 2\), got \(1, 3\)"):
        shrink(threshold, torch.zeros(1, 2), torch.zeros(1, 3), torch.tensor([0]))
    with pytest.raises(OptionError, match="steps >= 1, got 0"):
        shrink(threshold, torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([0]), steps=0)
