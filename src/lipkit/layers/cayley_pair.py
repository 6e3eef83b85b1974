r"""Dense layers made of the two blocks of a Cayley transform, :math:`A A^\top + B B^\top = I` [LBDN]."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.layers._base import ConstrainedLinear
from lipkit.layers._export import register_one_lipschitz
from lipkit.layers.cayley import free_and_scale, rescaled
from lipkit.linalg import cayley

# Singular values of Y at birth: A and B = 2 Y / (1 + Y^2) are then balanced, and the linear form near an isometry.
BALANCED = math.tan(math.pi / 8)
# Share of the usual size that X has at birth: A starts as a moderate rotation.
BIRTH_TURN = 0.5


def free_pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""The (X, Y) whose Cayley transform is :math:`[A^\top; B^\top]`, for :math:`A A^\top + B B^\top = I`.

    .. math:: Z = (I - A^\top)(I + A^\top)^{-1},\quad Y = -\tfrac12 B^\top (I + Z),\quad
              X = \tfrac12\, \mathrm{strictly\ lower}(Z - Z^\top)

    Args:
        a: ``(q, q)`` without the eigenvalue -1; a symmetric positive semidefinite one is safest.
        b: ``(q, p)``.

    >>> a, b = torch.tensor([[0.6]]), torch.tensor([[0.8, 0.0]])
    >>> x, y = free_pair(a, b)
    >>> cayley(torch.cat((x, y))).allclose(torch.tensor([[0.6], [0.8], [0.0]]))
    True

    References:
        [LBDN] Appendix D.5, equation 37.
    """
    eye = torch.eye(len(a), dtype=a.dtype, device=a.device)
    half = torch.linalg.inv(eye + a.mT)
    z = 2 * half - eye
    return torch.tril(z - z.mT, -1) / 2, -b.mT @ half


def _store(free: nn.Parameter, scale: nn.Parameter, value: Tensor) -> None:
    """Set ``scale * free / ||free||`` to ``value``; a zero keeps its random direction, so that it can be trained."""
    norm = torch.linalg.vector_norm(value)
    with torch.no_grad():
        if bool(norm <= 1e-14 * value.numel()):
            scale.zero_()
            return
        free.copy_(value)
        scale.copy_(norm)


class CayleyPairLinear(ConstrainedLinear):
    r"""Abstract: a dense layer made of the two blocks of a Cayley transform, :math:`A A^\top + B B^\top = I`.

    Parameters ``x_free`` (q, q), ``y_free`` (p, q) and their norms ``x_scale``, ``y_scale``: the free matrices are
    :math:`X = g X'/\|X'\|_F` and :math:`Y = h Y'/\|Y'\|_F`.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        p, q = self.in_features, self.out_features
        self.x_free, size = free_and_scale((q, q), device, dtype)
        self.x_scale = nn.Parameter(BIRTH_TURN * size.detach())
        self.y_free = nn.Parameter(nn.init.orthogonal_(torch.empty(p, q, device=device, dtype=dtype)))
        norm = self.birth_value() * math.sqrt(min(p, q))
        self.y_scale = nn.Parameter(torch.tensor(norm, device=device, dtype=dtype))

    def birth_value(self) -> float:
        """Singular values of Y in a new layer."""
        return BALANCED

    def factors(self) -> tuple[Tensor, Tensor]:
        """:math:`A^\\top` (q, q) and :math:`B` (q, p), in float32 or better."""
        free = torch.cat((rescaled(self.x_free, self.x_scale), rescaled(self.y_free, self.y_scale)))
        q = cayley(free)
        return q[: self.out_features], q[self.out_features :].mT

    def set_factors(self, a: Tensor, b: Tensor) -> None:
        """Set the free parameters so that :meth:`factors` gives A (q, q) and B (q, p); ``A A^T + B B^T = I``."""
        x, y = free_pair(a, b)
        _store(self.x_free, self.x_scale, x)
        _store(self.y_free, self.y_scale, y)


class ContractionLinear(CayleyPairLinear):
    r"""Dense layer ``y = B x + b`` that reaches every :math:`\|B\|_2 \le 1`: the last layer of an LBDN.

    Args:
        in_features, out_features, bias: as ``nn.Linear``.
        device, dtype: of the parameters (float32 or float64).

    Guarantee:
        1-Lipschitz; complete: every matrix of spectral norm at most 1 is reached (:math:`A = (I - B B^\top)^{1/2}`).

    Cost:
        One inverse of size out_features per forward pass.

    >>> layer = ContractionLinear(5, 3)
    >>> bool(torch.linalg.matrix_norm(layer.weight(), 2) <= 1 + 1e-6)
    True

    References:
        [LBDN] equations 6, 7 and 9.
    """

    def birth_value(self) -> float:
        return math.tan(math.pi / 6)

    def weight(self) -> Tensor:
        return self.factors()[1]


register_one_lipschitz(ContractionLinear)
