"""The losses against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit.errors import OptionError
from lipkit.wasserstein import hinge_kr_loss, kr_loss


def values(seed: int, n: int) -> torch.Tensor:
    return 2 * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n", "m"), [(7, 7), (5, 9)])
@pytest.mark.parametrize(("alpha", "margin"), [(10.0, 1.0), (0.5, 0.3), (0.0, 1.0)])
def test_against_numpy(n, m, alpha, margin):
    fx, fy = values(0, n), values(1, m)
    a, b = fx.numpy(), fy.numpy()
    dual = b.mean() - a.mean()
    hinge = (np.maximum(0, margin - a).mean() + np.maximum(0, margin + b).mean()) / 2
    assert kr_loss(fx, fy).item() == pytest.approx(dual, rel=1e-12)
    options = {} if (alpha, margin) == (10.0, 1.0) else {"alpha": alpha, "margin": margin}
    assert hinge_kr_loss(fx, fy, **options).item() == pytest.approx(dual + alpha * hinge, rel=1e-12)


def test_gradients():
    fx, fy = values(0, 4).requires_grad_(), values(1, 5).requires_grad_()
    assert torch.autograd.gradcheck(kr_loss, (fx, fy))
    assert torch.autograd.gradcheck(hinge_kr_loss, (fx, fy))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha: expected a finite number >= 0, got -1"),
        ({"alpha": float("nan")}, "alpha: expected a finite number >= 0, got nan"),
        ({"margin": 0.0}, "margin: expected a positive finite number, got 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(OptionError, match=message):
        hinge_kr_loss(values(0, 3), values(1, 3), **options)
