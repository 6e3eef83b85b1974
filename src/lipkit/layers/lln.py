"""Last-layer normalisation: a linear classifier whose rows have unit norm, and nothing else is constrained."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds import spectral_norm
from lipkit.layers._base import ConstrainedLinear
from lipkit.layers._export import export_linear
from lipkit.linalg import at_least_float32
from lipkit.modules import Shape, export_rule, lipschitz_rule


def unit_rows(v: Tensor) -> Tensor:
    r"""Each row divided by its norm; a zero row stays zero (with a finite gradient).

    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1e-12)


class NormalizedLinear(ConstrainedLinear):
    r"""Last layer with unit rows: :math:`y_i = \langle v_i / \|v_i\|, x \rangle + b_i`.

    A margin :math:`y_t - y_i` has the constant :math:`\|w_t - w_i\| \le 2` behind a 1-Lipschitz body: what the
    pairwise certificate of :func:`lipkit.certify` uses for any network with a linear last layer. The layer as a whole
    is **not** 1-Lipschitz: :math:`\sigma_{max}(W)` can reach the root of the number of rows, and ``lipschitz`` says so.

    Args: as ``nn.Linear``. Parameters ``free`` V (out_features, in_features) and ``bias``.

    Guarantee:
        Unit rows up to rounding; ``lipschitz`` is the proved spectral norm of the weight as it is now.

    >>> layer = NormalizedLinear(8, 3)
    >>> layer.weight().norm(dim=1).round(decimals=5).tolist()
    [1.0, 1.0, 1.0]

    References:
        Singla, Singla & Feizi, ICLR 2022 (LLN); [LBDN] section 6.3.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        free = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.kaiming_uniform_(free, a=math.sqrt(5)))

    def weight(self) -> Tensor:
        return unit_rows(at_least_float32(self.free))


@lipschitz_rule(NormalizedLinear)
def _norm(module: NormalizedLinear, input_shape: Shape | None) -> Tensor:
    return spectral_norm(module.weight())


export_rule(NormalizedLinear)(export_linear)
