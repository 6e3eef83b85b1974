"""Kernels trained for a few steps: peaked symbols, unlike those of random kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(scope="session")
def trained_kernels() -> list[Tensor]:
    """Kernels of k = 2, 3, 5, 7 from small networks fitted to shifted and blurred random images."""
    kernels = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for k in (2, 3, 5, 7):
            net = nn.Sequential(nn.Conv2d(2, 6, k, padding=k // 2), nn.ReLU(), nn.Conv2d(6, 3, k, padding=k // 2))
            optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
            for _ in range(30):
                x = torch.randn(8, 2, 12, 12)
                y = nn.functional.avg_pool2d(nn.functional.pad(x, (2, 1, 1, 2)), 3, 1)
                out = net(x)
                target = nn.functional.interpolate(y[:, :1], out.shape[2:]).expand_as(out)
                optimizer.zero_grad()
                (out - target).square().mean().backward()
                optimizer.step()
            kernels += [net[0].weight.detach(), net[2].weight.detach()]
    return kernels
