"""The truncated exponential of a zero-padded convolution, with a constant kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv.kernel_exponential import taylor_features
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.exponential import check_terms


class TaylorConv2d(nn.Module):
    r"""``(B, cin, H, W) -> (B, cout, H, W)``: the Taylor polynomial of a zero-padded convolution A.

    .. math:: y = \Big[\sum_{i=0}^{T} \frac{A^i}{i!}\, [x; 0]\Big]_{1..c_{out}} + b

    on c = max(cin, cout) channels: missing inputs are zeros, outputs beyond cout are dropped.

    Args:
        in_channels, out_channels: channels.
        kernel_size: odd kh, kw.
        terms: T, the highest power.
        bias: whether a bias (cout,) is added.
        device, dtype: of the buffers.

    Buffers ``kernel`` (c, c, kh, kw) and ``bias`` are zero until they are set.

    Raises:
        OptionError: an even kernel size or wrong terms. ShapeError: another channel number.

    >>> TaylorConv2d(2, 3, (3, 3), terms=5)(torch.ones(1, 2, 4, 5)).shape
    torch.Size([1, 3, 4, 5])
    """

    kernel: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        terms: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_terms(terms)
        if len(kernel_size) != 2 or any(k < 1 or k % 2 == 0 for k in kernel_size):
            raise OptionError(f"kernel_size: expected two odd integers, got {kernel_size}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.terms = tuple(kernel_size), terms
        inner = max(in_channels, out_channels)
        self.register_buffer("kernel", torch.zeros(inner, inner, *kernel_size, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(out_channels, device=device, dtype=dtype) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ShapeError(
                f"TaylorConv2d: expected input of shape (B, {self.in_channels}, H, W), got {tuple(x.shape)}"
            )
        x = F.pad(x, (0, 0, 0, 0, 0, self.kernel.shape[1] - self.in_channels))
        half = [k // 2 for k in self.kernel_size]
        y = taylor_features(x, lambda term: F.conv2d(term, self.kernel, padding=half), self.terms)
        y = y[:, : self.out_channels]
        return y if self.bias is None else y + self.bias[:, None, None]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, terms={self.terms}, "
            f"bias={self.bias is not None}"
        )
