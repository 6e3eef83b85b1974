"""A circular convolution of full dilation with a constant symbol, in real arithmetic."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from lipkit.conv import Symbol
from lipkit.conv.phase_product import apply_phases
from lipkit.conv.phases import check_fits, distinct_frequencies
from lipkit.errors import ShapeError
from lipkit.modules.configuration import COUNT, INTEGER, flag, stored
from lipkit.modules.fourier import (
    _ROOM,
    MAX_SIDE,
    SIDE,
    FourierConv2d,
    StoredSymbol,
    relative_to_input,
    spectral_blocks,
    transform_error,
    transform_norm,
)
from lipkit.modules.machine import Measure, entries, rounding_rule
from lipkit.modules.rearrange import export_same
from lipkit.modules.registry import Shape, export_rule, lipschitz, lipschitz_rule, output_shape
from lipkit.proof.arithmetic import Arithmetic, flat, grow_number, size
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import to_double, up


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


@lipschitz_rule(PhaseConv2d)
def _phase(module: PhaseConv2d, input_shape: Shape | None) -> Tensor:
    norms = [spectral_norm(module.real)]
    if module.pair.numel():
        pair = to_double(module.pair)
        norms.append(spectral_norm(torch.complex(pair[:, 0], pair[:, 1]) if module.complex_pairs else pair))
    # Splitting into phase images moves pixels; a 1 x 1 kernel has no transform.
    norm = torch.stack(norms).amax()
    return norm if module.kernel_size == (1, 1) else up(norm * transform_norm(module.matrices()) ** 2, 4)


@rounding_rule(FourierConv2d, PhaseConv2d)
def _stored_symbol(module: StoredSymbol, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    outputs, cin = entries(output_shape(module, input_shape)), module.in_channels
    gain = float(lipschitz(module, input_shape)) * (1 + 2.0**-44)
    blocks = spectral_blocks(module)
    parts = module.pair.shape[1] if module.pair.numel() else 1
    terms = parts * cin
    sizes = [len(matrix) for matrix in module.matrices()]
    transform = transform_error(sizes, arithmetic)
    product = arithmetic.gamma(terms + _ROOM + arithmetic.stored) * blocks
    there = gain * transform + product * (1 + transform)
    # Back: the error so far, and that of the inverse transform on numbers of at most (gain + there) ||x||.
    relative = grow_number(there + transform * (gain + there))
    # Underflow: at most two for each operation, each carried on by a norm of at most sqrt(2) (1 + blocks) sqrt(terms).
    steps = entries(input_shape) + outputs
    biggest = float(torch.cat([module.real.flatten(), module.pair.flatten()]).detach().abs().amax())
    carried = (sum(sizes) + terms + 8) * (2 + blocks) ** 2 * (1 + biggest)
    floor = 8 * math.sqrt(steps) * carried * arithmetic.tiny
    # Numbers below the normal range are lost: of each entry of the transform and of the matrices, at most eta.
    relative += 4 * (steps + sum(sizes) + terms) * (2 + blocks) * arithmetic.tiny
    found = relative_to_input(relative, floor, module.bias, outputs, gain + blocks, arithmetic, transform)
    if biggest > arithmetic.room:
        return lambda x: found(x)._replace(peak=flat(size(x), math.inf))
    return found


export_rule(PhaseConv2d)(export_same)

stored(
    PhaseConv2d,
    in_channels=COUNT,
    out_channels=COUNT,
    height=SIDE,
    width=SIDE,
    kernel_size=INTEGER,
    complex_pairs=flag,
    bias=flag,
)
