"""How well layers keep the norm of their inputs, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.layers.families import get


def norm_preservation(
    *,
    seed: int = 0,
    root: Path | None = None,
    family: str = "cayley",
    channels: Sequence[int],
    side: int = 16,
    steps: int = 0,
    samples: int = 256,
) -> dict[str, float]:
    r"""The quotient :math:`\|f(x)\| / \|x\|` for normal x and a chain f of convolutions without biases.

    Args:
        family: acronym of the layers.
        channels: (c0, c1, ..., ck) of a chain of k layers.
        side: height and width of the images.
        steps: steps of Adam at rate 0.01 towards random outputs, so that trained weights are measured; 0 for initial
            ones.
        samples: number of inputs.

    Returns:
        ``smallest`` and ``largest`` quotient; ``ppm(Q)``, every fifth percentile Q of the quotient minus 1, in
        millionths; for a chain of several layers ``after(K)``, the mean quotient after K layers.

    >>> found = norm_preservation(channels=[2, 4], side=4, samples=8)
    >>> 0.99999 < found["smallest"] <= found["largest"] < 1.00001
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pairs = pairwise(channels)
        chain = nn.Sequential(*(get(family).conv(cin, cout, 3, bias=False) for cin, cout in pairs))
        x = torch.randn(samples, channels[0], side, side)
        target = torch.randn(min(samples, 32), channels[-1], side, side)
        optimizer = torch.optim.Adam(chain.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(chain(x[: len(target)]), target).backward()
            optimizer.step()
        after: list[Tensor] = []
        with torch.no_grad():
            y = x
            for layer in chain.eval():
                y = layer(y)
                after.append(_norms(y) / _norms(x))
    quotient = after[-1]
    percentages = torch.linspace(0, 1, 21, dtype=torch.float64)
    ppm = 1e6 * (quotient.quantile(percentages) - 1)
    figures = {"smallest": float(quotient.min()), "largest": float(quotient.max())}
    figures |= {f"ppm({round(100 * float(q))})": float(v) for q, v in zip(percentages, ppm, strict=True)}
    return figures | {f"after({k})": float(v.mean()) for k, v in enumerate(after, 1) if len(after) > 1}


def _norms(x: Tensor) -> Tensor:
    return x.double().flatten(1).norm(dim=1)
