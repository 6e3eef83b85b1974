"""The result of an export: a chain of plain modules for one input shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lipkit.errors import ShapeError


def _flatten(modules: Iterable[nn.Module]) -> list[nn.Module]:
    flat: list[nn.Module] = []
    for module in modules:
        chain = type(module) in (nn.Sequential, Network)
        flat.extend(_flatten(module.children()) if chain else [module])
    return [m for m in flat if type(m) is not nn.Identity]


class Network(nn.Sequential):
    """A constant network of plain modules: what is evaluated, certified, attacked and shipped.

    Chains inside are flattened and identities dropped, so the last module of a classifier is its last linear layer.
    It is in evaluation mode and nothing in it asks for a gradient.

    Args:
        modules: plain modules, applied in order.
        input_shape: shape of one input, without the batch; another one raises ``ShapeError``.

    >>> import torch
    >>> net = Network([nn.Flatten(), nn.Sequential(nn.ReLU(), nn.Identity())], (1, 2, 2))
    >>> len(net), net(torch.ones(3, 1, 2, 2)).shape
    (2, torch.Size([3, 4]))
    """

    def __init__(self, modules: Iterable[nn.Module], input_shape: tuple[int, ...]) -> None:
        super().__init__(*_flatten(modules))
        self.input_shape = tuple(int(n) for n in input_shape)
        self.requires_grad_(False)
        self.eval()

    def __getitem__(self, index: slice | int) -> Any:
        # A part of the chain has another input shape: it is an ordinary Sequential.
        modules = list(self)[index]
        return nn.Sequential(*modules) if isinstance(modules, list) else modules

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.input_shape:
            raise ShapeError(f"expected input of shape (B, *{self.input_shape}), got {tuple(x.shape)}")
        for module in self:
            x = module(x)
        return x

    def extra_repr(self) -> str:
        return f"input_shape={self.input_shape}"
