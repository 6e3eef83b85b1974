"""A circular convolution with a constant symbol, in real arithmetic."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from lipkit.conv import Symbol, apply_symbol
from lipkit.errors import ShapeError
from lipkit.plain.stored_symbol import MAX_SIDE, StoredSymbol


class FourierConv2d(StoredSymbol):
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
        self.make_buffers((n_real, n_pair, 2), (height, width), bias, device, dtype)

    @classmethod
    def from_symbol(cls, symbol: Symbol, height: int, width: int, bias: Tensor | None) -> Self:
        """The layer of this symbol and bias, as detached copies."""
        _, cout, cin = symbol.real.shape
        layer = cls(cin, cout, height, width, bias is not None, device=symbol.real.device, dtype=symbol.real.dtype)
        return layer.fill(symbol, bias)

    def forward(self, x: Tensor) -> Tensor:
        expected = (self.in_channels, self.height, self.width)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ShapeError(f"FourierConv2d: expected input of shape (B, *{expected}), got {tuple(x.shape)}")
        return apply_symbol(self.symbol(), x, self.matrices(), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, {self.height}, {self.width}, bias={self.bias is not None}"
