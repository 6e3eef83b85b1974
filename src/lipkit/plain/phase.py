"""A circular convolution of full dilation with a constant symbol, in real arithmetic."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from lipkit.conv import Symbol
from lipkit.conv.phase_product import apply_phases
from lipkit.conv.phases import check_fits, distinct_frequencies
from lipkit.errors import ShapeError
from lipkit.plain.stored_symbol import MAX_SIDE, StoredSymbol


class PhaseConv2d(StoredSymbol):
    r"""Circular convolution ``(B, cin, H, W) -> (B, cout, H, W)`` with kh x kw taps, H / kh and W / kw apart.

    It is stored as its symbol, the matrices at the distinct ones of kh kw frequencies, and evaluated on the phase
    images (``lipkit.conv.phase_product``): real products and reshapes only.

    Args:
        in_channels, out_channels: channels.
        height, width: the only image size it accepts.
        kernel_size: (kh, kw), which divide height and width.
        complex_pairs: whether the matrices of the conjugate pairs of frequencies are complex.
        bias: whether a bias (cout,) is added.
        device, dtype: of the buffers.

    Buffers ``real`` (n_r, cout, cin), ``pair`` (n_p, 1 or 2, cout, cin: real and imaginary part) and ``bias`` are zero
    until they are set. The transform is no state: it is made in float64 and rounded to the dtype of the module.

    Raises:
        ShapeError: another image size or channel number; a kernel that does not divide the image.

    >>> layer = PhaseConv2d(2, 4, 6, 9, (3, 3), bias=False)
    >>> layer(torch.ones(1, 2, 6, 9)).shape
    torch.Size([1, 4, 6, 9])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        height: int,
        width: int,
        kernel_size: tuple[int, int],
        complex_pairs: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if len(kernel_size) != 2 or min(in_channels, out_channels, height, width, *kernel_size) < 1:
            raise ShapeError(
                f"PhaseConv2d: expected positive channels, image size and two kernel sizes, "
                f"got {in_channels}, {out_channels}, {height} x {width} and {kernel_size}"
            )
        if max(kernel_size) > MAX_SIDE:
            raise ShapeError(f"PhaseConv2d: expected kernel sizes of at most {MAX_SIDE}, got {kernel_size}")
        self.kernel_size = (kernel_size[0], kernel_size[1])
        check_fits(height, width, self.kernel_size)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.height, self.width, self.complex_pairs = height, width, complex_pairs
        n_real, n_pair = distinct_frequencies(self.kernel_size)
        parts = 2 if complex_pairs else 1
        self.make_buffers((n_real, n_pair, parts), self.kernel_size, bias, device, dtype)

    @classmethod
    def from_symbol(
        cls, symbol: Symbol, kernel_size: tuple[int, int], height: int, width: int, bias: Tensor | None
    ) -> Self:
        """The layer of this symbol on kh x kw and bias, as detached copies."""
        _, parts, cout, cin = symbol.pair.shape
        layer = cls(
            cin,
            cout,
            height,
            width,
            kernel_size,
            complex_pairs=parts == 2,
            bias=bias is not None,
            device=symbol.real.device,
            dtype=symbol.real.dtype,
        )
        return layer.fill(symbol, bias)

    def forward(self, x: Tensor) -> Tensor:
        c, h, w = self.in_channels, self.height, self.width
        if x.ndim != 4 or tuple(x.shape[1:]) != (c, h, w):
            raise ShapeError(f"PhaseConv2d: expected input of shape (B, {c}, {h}, {w}), got {tuple(x.shape)}")
        return apply_phases(self.symbol(), x, self.kernel_size, self.matrices(), self.bias)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, {self.height}, {self.width}, kernel_size={self.kernel_size}, "
            f"complex_pairs={self.complex_pairs}, bias={self.bias is not None}"
        )
