"""How far the truncated exponential of ECO is from an orthogonal matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lipkit.layers import EcoConv2d
from lipkit.linalg.exponential import schatten_bound, skew_part, taylor
from lipkit.models import lipconvnet


def truncation(*, seed: int = 0, root: Path | None = None, terms: int, depth: int = 5) -> dict[str, float]:
    r"""Truncation of the matrices of a new LipConvnet's ECO layers, in float64.

    .. math:: \|\exp(A) - p_T(A)\|_2, \qquad \Big|\frac{\|\mathrm{conv}(x)\|}{\|x\|} - 1\Big|

    with the skew matrices A of norm close to 1 that the layers make, and normal x.

    Args:
        seed: of the weights and of x.
        root: not used.
        terms: T, the degree.
        depth: of the network.

    Returns:
        ``error`` and ``deviation``, means over matrices and over layers; ``worst``, the error where ``||A|| = 1``.

    >>> found = truncation(terms=5)
    >>> found["error"] < found["worst"] < 0.0015
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = lipconvnet(depth, width=0.25).double()
        errors: list[Tensor] = []
        worst: list[Tensor] = []
        deviations: list[Tensor] = []
        for layer in model:
            if not isinstance(layer, EcoConv2d):
                continue
            skew = skew_part(layer.free.detach())
            norms = torch.linalg.matrix_norm(skew, 2)[:, None, None]
            for scale, out in ((schatten_bound(skew)[:, None, None], errors), (norms, worst)):
                a = skew / scale
                gap = torch.linalg.matrix_norm(torch.linalg.matrix_exp(a) - taylor(a, terms), 2)
                out.append(gap.mean() if out is errors else gap.max())
            layer.eval_terms = terms
            side = layer.kernel_size[0] * layer.stride
            x = torch.randn(8, layer.in_channels, side, side, dtype=torch.float64)
            square = layer.in_channels * layer.stride**2 <= layer.out_channels
            if square:  # fewer outputs than inputs lose a part of x, which is no truncation
                with torch.no_grad():
                    y = layer.eval()(x) - (0 if layer.bias is None else layer.bias[:, None, None])
                deviations.append((y.norm() / x.norm() - 1).abs())
    return {
        "error": float(torch.stack(errors).mean()),
        "worst": float(torch.stack(worst).max()),
        "deviation": float(torch.stack(deviations).mean()) if deviations else 0.0,
    }
