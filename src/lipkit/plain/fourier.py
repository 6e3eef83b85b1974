"""A circular convolution with a constant symbol, in real arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from lipkit.conv import Symbol, apply_symbol, transform_matrices
from lipkit.errors import ShapeError

# The transform of a side n has n^2 numbers: a small file must not be able to ask for terabytes.
MAX_SIDE = 4096


class FourierConv2d(nn.Module):
    r"""Circular convolution ``(B, cin, h, w) -> (B, cout, h, w)`` stored as its symbol: real products only.

    .. math:: y = T^\top \, \mathrm{diag}(M_f) \, T \, x + b

    with T the real orthonormal 2-D Fourier transform (``lipkit.conv.spectrum``) and :math:`M_f` the matrices of the
    symbol. No inverse, no complex number, no FFT: it runs wherever matrix products do.

    Args:
        in_channels, out_channels: channels.
        height, width: the only image size it accepts.
        bias: whether a bias (cout,) is added.
        device, dtype: of the buffers.

    Buffers ``real`` (n_r, cout, cin), ``pair`` (n_p, 2, cout, cin) and ``bias`` are zero until they are set, for
    instance by ``load_state_dict`` or :meth:`from_symbol`. The transform is no state: it follows from the size, is
    made in float64 and rounded once to the dtype of the module (again after ``.double()`` or ``.to``).

    Raises:
        ShapeError: an empty or too large size; an input of another image size or channel number.

    >>> layer = FourierConv2d(2, 4, 5, 6, bias=False)
    >>> layer(torch.ones(1, 2, 5, 6)).shape
    torch.Size([1, 4, 5, 6])
    """

    real: Tensor
    pair: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        height: int,
        width: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(in_channels, out_channels, height, width) < 1 or max(height, width) > MAX_SIDE:
            raise ShapeError(
                f"FourierConv2d: expected positive channels and sides from 1 to {MAX_SIDE} (the transform takes the "
                f"square of a side), got {in_channels}, {out_channels}, {height}, {width}"
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.height, self.width = height, width
        n_real = (2 - height % 2) * (2 - width % 2)
        n_pair = (height * width - n_real) // 2
        matrix = (out_channels, in_channels)
        self.register_buffer("real", torch.zeros(n_real, *matrix, device=device, dtype=dtype))
        self.register_buffer("pair", torch.zeros(n_pair, 2, *matrix, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(out_channels, device=device, dtype=dtype) if bias else None)
        self._make_transform()

    def _make_transform(self) -> None:
        made = transform_matrices(self.height, self.width, dtype=self.real.dtype, device=self.real.device)
        self.transforms = len(made)
        for i, matrix in enumerate(made):
            self.register_buffer(f"transform{i}", matrix, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._make_transform()
        return self

    @classmethod
    def from_symbol(cls, symbol: Symbol, height: int, width: int, bias: Tensor | None) -> Self:
        """The layer of this symbol and bias, as detached copies."""
        _, cout, cin = symbol.real.shape
        layer = cls(cin, cout, height, width, bias is not None, device=symbol.real.device, dtype=symbol.real.dtype)
        with torch.no_grad():
            layer.real.copy_(symbol.real)
            layer.pair.copy_(symbol.pair)
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias)
        return layer

    def matrices(self) -> list[Tensor]:
        """The transform: one dense matrix, or one per axis."""
        return [getattr(self, f"transform{i}") for i in range(self.transforms)]

    def symbol(self) -> Symbol:
        """The stored symbol."""
        return Symbol(self.real, self.pair)

    def forward(self, x: Tensor) -> Tensor:
        expected = (self.in_channels, self.height, self.width)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ShapeError(f"FourierConv2d: expected input of shape (B, *{expected}), got {tuple(x.shape)}")
        y = apply_symbol(self.symbol(), x, self.matrices())
        return y if self.bias is None else y + self.bias[:, None, None]

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, {self.height}, {self.width}, bias={self.bias is not None}"
