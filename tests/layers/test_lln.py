"""Last-layer normalisation: unit rows, an honest constant, and the pairwise certificate that it is made for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lipkit import certify, export, lipschitz
from lipkit.layers import CayleyLinear, MaxMin, NormalizedLinear


def test_rows_have_unit_norm_whatever_the_scale() -> None:
    torch.manual_seed(0)
    layer = NormalizedLinear(5, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.free.mul_(torch.tensor([[1e-6], [1.0], [1e6], [3.0]]))
    expected = layer.free.detach().numpy()
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.allclose(layer.weight().detach().numpy(), expected, rtol=1e-13)


def test_the_constant_is_the_spectral_norm_not_one() -> None:
    layer = NormalizedLinear(5, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.free.copy_(torch.ones(4, 5))
    assert lipschitz(layer).item() == pytest.approx(2.0, rel=1e-9)
    assert lipschitz(export(layer, (5,))).item() >= 2.0


def test_zero_row_is_finite() -> None:
    layer = NormalizedLinear(3, 2)
    with torch.no_grad():
        layer.free[0].zero_()
    layer(torch.ones(1, 3)).sum().backward()
    assert torch.isfinite(layer.free.grad).all()


def test_pairwise_certificate_uses_row_differences() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(CayleyLinear(6, 6), MaxMin(), NormalizedLinear(6, 3)).double()
    x = torch.randn(50, 6, dtype=torch.float64)
    logits = net(x).detach()
    certificate = certify(export(net, (6,)), x, logits.argmax(1))
    w = net[2].weight().detach()
    for i in range(50):
        top = int(logits[i].argmax())
        radius = min(float((logits[i, top] - logits[i, j]) / (w[top] - w[j]).norm()) for j in range(3) if j != top)
        assert float(certificate.radius[i]) == pytest.approx(radius, rel=1e-6)
