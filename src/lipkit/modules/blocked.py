r"""Linear layers whose inner products are summed in blocks: the same functions, with smaller rounding errors.

A sum of n terms in an unknown order may lose n units of roundoff. Summed in blocks of b and the blocks pairwise, no
term meets more than :math:`b + \log_2(n / b)` additions, and that bounds the error whatever a library does inside a
block.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 16


def pairwise(parts: Tensor) -> Tensor:
    """The sum over dimension 0, by halves."""
    while len(parts) > 1:
        half = len(parts) // 2
        rest = parts[2 * half :]  # the odd one, for the next round
        parts = parts[:half] + parts[half : 2 * half]
        if len(rest):
            parts = torch.cat((parts, rest))
    return parts[0]


def blocked_product(x: Tensor, weight: Tensor, block: int) -> Tensor:
    r"""``x @ weight.mT`` for x ``(..., N, n)`` and weight ``(m, n)``, in blocks of ``block`` terms."""
    n = weight.shape[1]
    fill = -n % block if n > block else 0  # zeros up to whole blocks
    if fill:
        x, weight = F.pad(x, (0, fill)), F.pad(weight, (0, fill))
    size = min(block, n)
    flat = x.reshape(-1, x.shape[-1])
    # One batched product, (k, N, b) by (k, b, m): the blocks are never added inside it.
    parts = flat.unflatten(1, (-1, size)).transpose(0, 1) @ weight.unflatten(1, (-1, size)).permute(1, 2, 0)
    return pairwise(parts).reshape(*x.shape[:-1], len(weight))


class BlockedLinear(nn.Linear):
    """``nn.Linear`` with its inner products in blocks."""

    block = BLOCK

    def forward(self, x: Tensor) -> Tensor:
        y = blocked_product(x, self.weight, self.block)
        return y if self.bias is None else y + self.bias


class BlockedConv2d(nn.Conv2d):
    """``nn.Conv2d`` without groups, by windows and products in blocks."""

    block = BLOCK

    def forward(self, x: Tensor) -> Tensor:
        zeros, border = self.padding_mode == "zeros", list(self._reversed_padding_repeated_twice)
        if zeros and not isinstance(self.padding, str):  # torch then pads by ``padding``
            border = [n for n in reversed(self.padding) for _ in (0, 1)]
        padded = F.pad(x, border, mode="constant" if zeros else self.padding_mode)
        kernel, dilation, stride = (tuple(v) for v in (self.weight.shape[2:], self.dilation, self.stride))
        sides = [
            (n - d * (k - 1) - 1) // s + 1
            for n, d, k, s in zip(padded.shape[2:], dilation, kernel, stride, strict=True)
        ]
        windows = F.unfold(padded, kernel, dilation=dilation, stride=stride).mT  # (N, places, channels * taps)
        y = blocked_product(windows, self.weight.flatten(1), self.block).mT.unflatten(2, sides)  # as images again
        return y if self.bias is None else y + self.bias[:, None, None]


def blocked(module: nn.Module, block: int = BLOCK) -> nn.Module:
    """A copy in which every ``nn.Linear`` and every ``nn.Conv2d`` without groups sums in blocks.

    Fourier and phase layers stay as they are: their inner products are short.
    """
    twin: Any = copy.deepcopy(module)
    if type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1):
        twin.__class__, twin.block = BlockedLinear if type(module) is nn.Linear else BlockedConv2d, block
        return twin
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else blocked(child, block)
    return twin
