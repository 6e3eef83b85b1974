"""A constant sandwich block: two linear maps with a scalar activation between them, and the multiplier of its bound."""

from __future__ import annotations

from torch import Tensor, nn

from lipkit.errors import ShapeError


class SandwichBlock(nn.Module):
    r"""``y = second(activation(first(x)))`` with the diagonal :math:`\Lambda` that proves its gain.

    .. math:: \|f\|_{Lip} \le \tfrac12 \big\| [\, \Lambda^{1/2} W_1 \;|\; \Lambda^{-1/2} W_2^* \,] \big\|_2^2

    for an activation with slope in [0, 1] (``lipkit.bounds.sandwich``).

    Args:
        first: ``nn.Linear``, :class:`FourierConv2d`, or an ``nn.Conv2d`` whose windows do not overlap (with its bias).
        activation: a scalar activation.
        second: a module of the same kind.
        multiplier: ``(n,)`` for n hidden channels, positive. A claim that is checked, never trusted: where it proves
            nothing, the bound is the product of the three constants.

    Raises:
        ShapeError: a multiplier that is not a vector.

    >>> import torch
    >>> block = SandwichBlock(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), torch.ones(3))
    >>> block(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """

    multiplier: Tensor

    def __init__(self, first: nn.Module, activation: nn.Module, second: nn.Module, multiplier: Tensor) -> None:
        super().__init__()
        if multiplier.ndim != 1 or not len(multiplier):
            raise ShapeError(f"SandwichBlock: expected a multiplier of shape (n,), got {tuple(multiplier.shape)}")
        self.first, self.activation, self.second = first, activation, second
        self.register_buffer("multiplier", multiplier.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))
