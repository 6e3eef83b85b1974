r"""Rounding errors of the convolutions that are evaluated in the Fourier basis, and of Taylor polynomials.

The exact function of a Fourier layer is :math:`T^\top \mathrm{diag}(M_f)\, T x + b` with the stored matrices and the
*exact* orthonormal transform T. What the machine does is counted, with room, as follows; another order of rows,
columns and products changes nothing here.

* T and its inverse: one product by each matrix of ``matrices()`` (n terms each, :math:`\||T_i|\| \le \sqrt{n}`); of
  two matrices the larger one counts with 2 n terms, for the butterfly is part of its product or a step of its own.
  Four roundings of room for each. As T is orthogonal the errors of the stages add up.
* Matrix entries: rounded to the format, after a float64 computation that is within 64 u of :math:`\sqrt{2/n}`.
* A bias is added to the pixels, or, times the root of their number, to the coefficients of frequency 0.
* Each frequency: an inner product of 2 cin real terms with coefficients :math:`|R|, |S|` (cin for a real matrix),
  four roundings of room.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from lipkit.conv import Symbol, apply_symbol
from lipkit.conv.transform import transform_matrices
from lipkit.errors import ShapeError
from lipkit.modules.configuration import COUNT, flag, stored, whole
from lipkit.modules.machine import Local, Measure
from lipkit.modules.rearrange import export_same
from lipkit.modules.registry import Shape, export_rule, lipschitz_rule
from lipkit.proof.arithmetic import FLOAT64, Arithmetic, Line, flat, grow_number, size
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import gamma, to_double, up

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


def transform_norm(matrices: list[Tensor]) -> float:
    """Proved bound of the norm of the stored transform (and of its transpose), butterfly included."""
    norm = 1.0
    for matrix in matrices:
        t = to_double(matrix)
        n = t.shape[0]
        # ||T||^2 = ||T T^*|| <= its largest absolute row sum.
        row_sum = float((t @ t.mT).abs().sum(1).amax()) + n * gamma(n + 2) * n
        norm *= math.sqrt(row_sum) * (1 + gamma(4))
    if len(matrices) > 1:
        # The butterfly multiplies by a rounded square root of one half.
        norm *= 1 + gamma(8)
    return norm * (1 + gamma(4))


@lipschitz_rule(FourierConv2d)
def _fourier(module: FourierConv2d, input_shape: Shape | None) -> Tensor:
    norms = [spectral_norm(module.real)]
    if len(module.pair):
        norms.append(spectral_norm(torch.complex(to_double(module.pair[:, 0]), to_double(module.pair[:, 1]))))
    return up(torch.stack(norms).amax() * transform_norm(module.matrices()) ** 2, 4)


_ROOM = 4


def transform_error(sizes: list[int], arithmetic: Arithmetic) -> float:
    r"""Relative error of the transform by square matrices of these sizes: :math:`\|\hat T x - T x\| \le e \|x\|`."""
    total = 0.0
    # The butterfly may be part of the product along either side, which then has twice as many terms.
    for n in [*sorted(sizes)[:-1], (len(sizes) > 1) * max(sizes) + max(sizes)]:
        entry = 64 * FLOAT64.unit * math.sqrt(2.0 * n)
        total += arithmetic.gamma(n + _ROOM) * math.sqrt(n) * (1 + entry) + entry
    # The stages follow each other: each enlarges what came before by at most its own relative error.
    return grow_number(total * (1 + total)) if total < 0.1 else math.inf


def schur(magnitude: Tensor) -> float:
    """The largest root of row sum times column sum in a batch of non-negative matrices (F, m, n); 0 for none."""
    if not magnitude.numel():
        return 0.0
    products = magnitude.sum(2).amax(1) * magnitude.sum(1).amax(1)
    return grow_number(math.sqrt(float(products.amax())) * (1 + FLOAT64.gamma(magnitude.shape[1] + magnitude.shape[2])))


def spectral_blocks(module: StoredSymbol) -> float:
    """Bound of the norm of the matrices of moduli of all frequencies."""
    real, pair = module.real.detach().double().abs(), module.pair.detach().double().abs()
    # For the block [[|R|, |S|], [|S|, |R|]] row and column sums are those of |R| + |S|.
    return max(schur(real), schur(pair.sum(1)))


def relative_to_input(
    relative: float,
    floor: float,
    bias: Tensor | None,
    outputs: int,
    gain: float,
    arithmetic: Arithmetic,
    carried: float = 0.0,
) -> Measure:
    """A linear map with the error ``relative ||h|| + floor``, and the sum with a bias for each channel.

    Args:
        carried: relative error of what the bias may still pass through after it is added.
    """
    shift = 0.0 if bias is None else size(bias.detach()[None]).item() * math.sqrt(outputs / len(bias))
    adding = 0.0 if bias is None else arithmetic.gamma(1 + arithmetic.stored)
    of_bias = 0.0 if bias is None else arithmetic.gamma(4 + arithmetic.stored) + carried
    shift, factor = grow_number(shift), grow_number(relative + adding * (gain + relative))
    constant = grow_number(floor + of_bias * shift + 4 * math.sqrt(outputs) * arithmetic.tiny)

    def measure(x: Tensor) -> Local:
        reached = Line(size(x), 1.0)
        peak = reached.times(grow_number((2 + gain + relative) * math.sqrt(2.0)))
        return Local(
            reached.times(factor).plus(flat(reached.at, constant)), peak.plus(flat(reached.at, shift + constant))
        )

    return measure


export_rule(FourierConv2d)(export_same)

SIDE = whole(-(2**31), 1 << 16)
stored(FourierConv2d, in_channels=COUNT, out_channels=COUNT, height=SIDE, width=SIDE, bias=flag)
