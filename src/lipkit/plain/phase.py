"""A circular convolution of full dilation with a constant symbol, in real arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from lipkit.conv import Symbol, transform_matrices
from lipkit.conv.phases import apply_phases, check_fits, distinct_frequencies
from lipkit.errors import ShapeError
from lipkit.plain.fourier import MAX_SIDE


class PhaseConv2d(nn.Module):
    r"""Circular convolution ``(B, cin, H, W) -> (B, cout, H, W)`` with kh x kw taps, H / kh and W / kw apart.

    It is stored as its symbol, the matrices at the distinct ones of kh kw frequencies, and evaluated on the phase
    images (``lipkit.conv.phases``): real products and reshapes only.

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

    real: Tensor
    pair: Tensor
    bias: Tensor | None

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
        matrix = (out_channels, in_channels)
        parts = 2 if complex_pairs else 1
        self.register_buffer("real", torch.zeros(n_real, *matrix, device=device, dtype=dtype))
        self.register_buffer("pair", torch.zeros(n_pair, parts, *matrix, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(out_channels, device=device, dtype=dtype) if bias else None)
        self._make_transform()

    def _make_transform(self) -> None:
        made = transform_matrices(*self.kernel_size, dtype=self.real.dtype, device=self.real.device)
        self.transforms = len(made)
        for i, matrix in enumerate(made):
            self.register_buffer(f"transform{i}", matrix, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._make_transform()
        return self

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
        with torch.no_grad():
            layer.real.copy_(symbol.real)
            layer.pair.copy_(symbol.pair)
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias)
        return layer

    def matrices(self) -> list[Tensor]:
        """The transform of one phase image: one dense matrix, or one per axis."""
        return [getattr(self, f"transform{i}") for i in range(self.transforms)]

    def symbol(self) -> Symbol:
        """The stored symbol on kh x kw."""
        return Symbol(self.real, self.pair)

    def forward(self, x: Tensor) -> Tensor:
        c, h, w = self.in_channels, self.height, self.width
        if x.ndim != 4 or tuple(x.shape[1:]) != (c, h, w):
            raise ShapeError(f"PhaseConv2d: expected input of shape (B, {c}, {h}, {w}), got {tuple(x.shape)}")
        y = apply_phases(self.symbol(), x, self.kernel_size, self.matrices())
        return y if self.bias is None else y + self.bias[:, None, None]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, {self.height}, {self.width}, kernel_size={self.kernel_size}, "
            f"complex_pairs={self.complex_pairs}, bias={self.bias is not None}"
        )
