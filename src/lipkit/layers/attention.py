r"""Attention layers of constant 1: :math:`y = x - s\, A^\top F(A x + c)`, with a free A and the longest step s.

`lipkit.modules.attention` has the proof. The larger A, the sharper the attention and the shorter the step.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers.base import Biased, check_dtype, check_positive, half_through_float32, new_bias
from lipkit.layers.export import linear_module
from lipkit.linalg import at_least_float32
from lipkit.linalg.exponential import gram_norm
from lipkit.linalg.precision import autocast_off
from lipkit.modules import Attraction, GradientStep, Permute, Reshape, Shape, export_rule, lipschitz_rule
from lipkit.modules.attention import attraction


class Attention(Biased, ABC):
    """Base of both attention layers, on sequences (B, n, d) and images (B, d, H, W), whose pixels are the tokens."""

    slope: float  # Lipschitz constant of F: the longest step is 2 / (slope |A|^2)
    least: int  # fewest dimensions of an input
    birth: float  # singular values of A in a new layer

    def __init__(self, features: int, slots: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_positive(features=features, slots=slots)
        check_dtype(dtype)
        self.features = features
        free = torch.empty(slots, features, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.orthogonal_(free, gain=self.birth))
        self.register_parameter("bias", new_bias(slots, features, bias, device, dtype))

    @abstractmethod
    def force(self, z: Tensor) -> Tensor:
        """F(z) for ``z = A x + c``, ``(..., n, slots)``."""

    def matrix_and_step(self) -> tuple[Tensor, Tensor]:
        """A and s (0-d), in float32 or better, s rounded down."""
        weight = at_least_float32(self.free)
        square = gram_norm(weight).square()  # above |A|^2
        return weight, (2 / self.slope * (1 - torch.finfo(weight.dtype).eps) / square).to(weight.dtype)

    def check_input(self, shape: Shape) -> None:
        """Raise ``ShapeError`` unless the layer accepts inputs of this shape, the batch included."""
        if not self.least <= len(shape) <= 4 or shape[1 if len(shape) == 4 else -1] != self.features:
            d, kind, vectors = self.features, type(self).__name__, f"(B, {self.features}), " * (self.least == 2)
            raise ShapeError(f"{kind}: expected inputs {vectors}(B, n, {d}) or (B, {d}, H, W), got {tuple(shape)}")

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x.shape)
        with autocast_off(x):
            weight, step = self.matrix_and_step()
            tokens = (x.flatten(2).mT if x.ndim == 4 else x).to(weight.dtype)  # pixels in rows
            y = tokens - step * (self.force(F.linear(tokens, weight, self.bias_as(weight))) @ weight)
        return y.mT.reshape(x.shape) if x.ndim == 4 else y

    def extra_repr(self) -> str:
        return f"{self.features}, {len(self.free)}"


class MemoryAttention(Attention):
    r"""Each token x attends to a memory of m trained rows: :math:`y = x - s\, A^\top \mathrm{softmax}(A x + c)`.

    Keys and values are the rows of A. :math:`s = 4 / \|A\|^2` uses a bound of the norm, at most 3 % too large.

    Args:
        features, slots: d and m.
        bias: False for c = 0.
        device, dtype: of the parameters (float32 or float64).

    Parameters ``free`` A (slots, features) and ``bias`` c (slots,). Shapes: ``(B, d)``, ``(B, n, d)`` or images
    ``(B, d, H, W)``; the output has the same shape.

    Guarantee:
        1-Lipschitz for any number of tokens. Attained for m <= d: softmax ignores a number added to all its inputs, so
        some direction of x passes unchanged.

    >>> MemoryAttention(4, 8)(torch.randn(2, 5, 4)).shape
    torch.Size([2, 5, 4])

    References:
        Ramsauer et al., "Hopfield Networks is All You Need", ICLR 2021, for attention to a memory as a gradient step.
    """

    # With this initial A, the logits of a token with entries of size 1 differ by a few units.
    slope, least, birth = 0.5, 2, 2.0

    def force(self, z: Tensor) -> Tensor:
        return z.softmax(-1)


class TokenAttention(Attention):
    r"""Tokens attract each other, the less the farther apart they are. Each head, a group of rows of A, acts by itself:

    .. math:: y_i = x_i + s A^\top \tfrac1n \textstyle\sum_j w_{ij} A (x_j - x_i), \qquad
              w_{ij} = 1 / \sqrt{1 + |A (x_i - x_j)|^2},\qquad s = 2 / \|A\|^2

    Args:
        features: d.
        hidden: rows of A, a multiple of ``heads``; d by default.
        heads: groups of rows, each with weights of its own.
        device, dtype: of the parameters (float32 or float64).

    Parameter ``free`` A (hidden, features). Shapes: ``(B, n, d)`` or images ``(B, d, H, W)``, as the output; any n.

    Guarantee:
        1-Lipschitz, by construction, and attained: the mean of all tokens is kept.

    >>> layer, x = TokenAttention(4, heads=2), torch.randn(2, 5, 4)
    >>> torch.allclose(layer(x).mean(1), x.mean(1), atol=1e-6)
    True
    """

    # With a small initial A, all w are nearly 1: the layer is nearly the reflection at the mean, an isometry.
    slope, least, birth = 1.0, 3, 0.2

    def __init__(
        self, features: int, hidden: int | None = None, heads: int = 1, device: Any = None, dtype: Any = None
    ) -> None:
        check_positive(features=features, hidden=features if hidden is None else hidden, heads=heads)
        super().__init__(features, hidden or features, False, device, dtype)
        self.heads = heads
        if len(self.free) % heads:
            raise OptionError(f"heads: expected a divisor of hidden={len(self.free)}, got {heads}")

    def force(self, z: Tensor) -> Tensor:
        return attraction(z, self.heads)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}"


lipschitz_rule(MemoryAttention, TokenAttention)(1.0)


@export_rule(MemoryAttention, TokenAttention)
def _export_attention(layer: Attention, input_shape: Shape) -> nn.Module:
    layer.check_input((1, *input_shape))
    weight, step = layer.matrix_and_step()
    force = Attraction(layer.heads) if isinstance(layer, TokenAttention) else nn.Softmax(-1)
    plain = GradientStep(linear_module(weight, layer.bias), force, step)
    if len(input_shape) < 3:
        return plain
    return nn.Sequential(nn.Flatten(2), Permute(2, 1), plain, Permute(2, 1), Reshape(*input_shape))
