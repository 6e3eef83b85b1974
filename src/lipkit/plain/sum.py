"""Branches that read the same input and are added: the residual connection of ordinary networks."""

from __future__ import annotations

from torch import Tensor, nn

from lipkit.errors import OptionError, ShapeError


class Sum(nn.Module):
    r"""``y = f_1(x) + ... + f_k(x)``.

    Its constant is the sum of those of its branches: a residual connection around a 1-Lipschitz body has 2
    (`lipkit.layers.Residual` keeps it at 1).

    Args:
        branches: one or more modules that end in the same shape; ``nn.Identity()`` is a skip connection.

    Raises:
        OptionError: no branch. ShapeError: branches that end in different shapes (one would be repeated).

    >>> import torch
    >>> Sum(nn.ReLU(), nn.Identity())(torch.tensor([[-2.0, 2.0]])).tolist()
    [[-2.0, 4.0]]
    """

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        if not branches or not all(isinstance(branch, nn.Module) for branch in branches):
            raise OptionError(f"Sum: expected one or more modules, got {[type(b).__name__ for b in branches]}")
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.branches[0](x)
        for branch in self.branches[1:]:
            y = branch(x)
            if y.shape != total.shape:
                raise ShapeError(
                    f"Sum: expected branches that end in one shape, got {tuple(total.shape)} and {tuple(y.shape)}"
                )
            total = total + y
        return total
