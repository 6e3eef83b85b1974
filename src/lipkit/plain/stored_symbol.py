"""What the plain convolutions that keep a constant symbol share: its buffers, and the transform it is applied in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from lipkit.conv import Symbol, transform_matrices

# The transform of a side n has n^2 numbers: a small file must not be able to ask for terabytes.
MAX_SIDE = 4096


class StoredSymbol(nn.Module):
    """A convolution ``(B, in_channels, height, width) -> (B, out_channels, height, width)`` kept as its symbol.

    Subclasses set ``in_channels``, ``out_channels``, ``height`` and ``width`` and call :meth:`make_buffers`. The
    transform is no state: it follows from ``transform_size``, is made in float64 and rounded once to the dtype of the
    module (again after ``.double()`` or ``.to``).
    """

    in_channels: int
    out_channels: int
    height: int
    width: int
    transform_size: tuple[int, int]
    real: Tensor
    pair: Tensor
    bias: Tensor | None

    def make_buffers(
        self,
        counts: tuple[int, int, int],
        transform_size: tuple[int, int],
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Zero buffers ``real`` (n_r, cout, cin), ``pair`` (n_p, parts, cout, cin) and ``bias``, and the transform.

        Args:
            counts: (n_r, n_p, parts).
            transform_size: sides of the images that are transformed.
            bias, device, dtype: as in the constructors.
        """
        n_real, n_pair, parts = counts
        matrix = (self.out_channels, self.in_channels)
        self.transform_size = transform_size
        self.register_buffer("real", torch.zeros(n_real, *matrix, device=device, dtype=dtype))
        self.register_buffer("pair", torch.zeros(n_pair, parts, *matrix, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(self.out_channels, device=device, dtype=dtype) if bias else None)
        self._make_transform()

    def _make_transform(self) -> None:
        made = transform_matrices(*self.transform_size, dtype=self.real.dtype, device=self.real.device)
        self.transforms = len(made)
        for i, matrix in enumerate(made):
            self.register_buffer(f"transform{i}", matrix, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._make_transform()
        return self

    def fill(self, symbol: Symbol, bias: Tensor | None) -> Self:
        """Copy these values into the buffers."""
        with torch.no_grad():
            self.real.copy_(symbol.real)
            self.pair.copy_(symbol.pair)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)
        return self

    def matrices(self) -> list[Tensor]:
        """The transform: one dense matrix, or one per axis."""
        return [getattr(self, f"transform{i}") for i in range(self.transforms)]

    def symbol(self) -> Symbol:
        """The stored symbol."""
        return Symbol(self.real, self.pair)

    def add_bias(self, y: Tensor) -> Tensor:
        """``y`` plus the bias, if there is one."""
        return y if self.bias is None else y + self.bias[:, None, None]
