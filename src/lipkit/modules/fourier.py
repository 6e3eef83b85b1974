r"""Convolutions with constant numbers, in the Fourier basis or as Taylor polynomials, and their rounding errors.

The exact function of a Fourier layer is :math:`T^\top \mathrm{diag}(M_f)\, T x + b` with the stored matrices and the
*exact* orthonormal transform T. The machine's operations are counted, with allowances, as follows; the order of rows,
columns and products does not matter.

* T and its inverse: one product by each matrix :math:`T_i` of ``matrices()``, with n terms, :math:`\||T_i|\| \le
  \sqrt{n}` and four roundings of allowance. If there are two matrices, the larger one counts with 2 n terms, since
  cosines and sines may be combined along either side. T is orthogonal, so the errors of the two stages add up.
* Matrix entries: rounded to the format, after a float64 computation that is within 64 u of :math:`\sqrt{2/n}`.
* A bias is added to the pixels, or, times the root of their number, to the coefficients of frequency 0.
* The matrix R + i S of a frequency: inner products of 2 cin real terms with coefficients :math:`|R|, |S|` (cin terms
  if it is real), with four roundings of allowance.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds.symbol_sup import symbol_sup
from lipkit.conv import Symbol, apply_symbol
from lipkit.conv.exponential_conv import adjoint, taylor_features, taylor_norm
from lipkit.conv.phases import apply_phases, check_fits, distinct_frequencies
from lipkit.conv.spectrum import is_dense, transform_matrices
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.exponential import check_terms
from lipkit.modules.machine import proportional
from lipkit.modules.plain import COUNT, INTEGER, Plain, RoundingError, Shape, add_plain, flag, whole
from lipkit.modules.registry import lipschitz, output_shape
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import FLOAT64, Arithmetic, flat, gamma, grow, size, to_double, up

# The transform of a side n has n^2 numbers: a small file must not be able to ask for terabytes.
MAX_SIDE = 4096


class FourierConv2d(nn.Module):
    r"""Circular convolution ``(B, cin, h, w) -> (B, cout, h, w)`` stored as its symbol: real products only.

    .. math:: y = T^\top \, \mathrm{diag}(M_f) \, T \, x + b

    with T the real orthonormal 2-D Fourier transform (``lipkit.conv.spectrum``) and :math:`M_f` the matrices of the
    symbol. No inverse, no complex number, no FFT: it runs wherever matrix products do.

    With a smaller kernel kh x kw, whose taps lie h / kh and w / kw apart, T is that of kh x kw, on each of the phase
    images (``lipkit.conv.phases``).

    Args:
        height, width: the only image size it accepts.
        kernel_size: (kh, kw), which divide height and width; by default the whole image.
        complex_pairs: whether the matrices of the conjugate pairs of frequencies are complex.
        bias: whether a bias (cout,) is added.

    Buffers ``real`` (n_r, cout, cin), ``pair`` (n_p, 2, cout, cin: real and imaginary part; or n_p, 1, cout, cin) and
    ``bias`` are zero until they are set, for instance by ``load_state_dict`` or :meth:`from_symbol`. The transform is
    no state: it follows from the size, is made in float64 and rounded once to the dtype of the module (again after
    ``.double()`` or ``.to``).

    Raises:
        ShapeError: an empty or too large size, a kernel that does not divide the image; an input of another image size
            or channel number.

    >>> layer = FourierConv2d(2, 4, 5, 6, bias=False)
    >>> layer(torch.ones(1, 2, 5, 6)).shape
    torch.Size([1, 4, 5, 6])
    >>> FourierConv2d(2, 4, 6, 9, (3, 3), bias=False).real.shape
    torch.Size([1, 4, 2])
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
        kernel_size: tuple[int, int] | None = None,
        complex_pairs: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        kernel = (height, width) if kernel_size is None else kernel_size
        if len(kernel) != 2 or min(in_channels, out_channels, height, width, *kernel) < 1 or max(kernel) > MAX_SIDE:
            raise ShapeError(
                f"FourierConv2d: expected positive channels and sides, and kernel sizes from 1 to {MAX_SIDE} (the "
                f"transform takes the square of a side), got {in_channels}, {out_channels}, {height}, {width}, {kernel}"
            )
        check_fits(height, width, kernel)
        self.in_channels, self.out_channels, self.height, self.width = in_channels, out_channels, height, width
        self.kernel_size, self.complex_pairs = (kernel[0], kernel[1]), complex_pairs
        (n_real, n_pair), matrix = distinct_frequencies(self.kernel_size), (out_channels, in_channels)
        self.register_buffer("real", torch.zeros(n_real, *matrix))
        self.register_buffer("pair", torch.zeros(n_pair, 1 + complex_pairs, *matrix))
        self.register_buffer("bias", torch.zeros(out_channels) if bias else None)
        self._make_transform()

    def _make_transform(self) -> None:
        like: dict[str, Any] = {"dtype": self.real.dtype, "device": self.real.device}
        if self.real.is_meta:  # torch would load its compiler for operations without numbers
            h, w = self.kernel_size
            made = [torch.empty(n, n, **like) for n in ((h * w,) if is_dense(h, w) else (h, w))]
        else:
            made = transform_matrices(*self.kernel_size, **like)
        self.transforms = len(made)
        for i, matrix in enumerate(made):
            self.register_buffer(f"transform{i}", matrix, persistent=False)  # it follows from the sizes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._make_transform()
        return self

    @classmethod
    def from_symbol(
        cls, symbol: Symbol, height: int, width: int, bias: Tensor | None, kernel_size: tuple[int, int] | None = None
    ) -> Self:
        """The layer of this symbol and bias, as detached copies."""
        _, parts, cout, cin = symbol.pair.shape
        layer = cls(cin, cout, height, width, kernel_size, parts == 2, bias is not None).to(symbol.real)
        numbers = {"real": symbol.real, "pair": symbol.pair}
        layer.load_state_dict(numbers if bias is None else {**numbers, "bias": bias})
        return layer

    def matrices(self) -> list[Tensor]:
        """The transform: one dense matrix, or one per axis."""
        return [getattr(self, f"transform{i}") for i in range(self.transforms)]

    def symbol(self) -> Symbol:
        """The stored symbol."""
        return Symbol(self.real, self.pair)

    @property
    def whole(self) -> bool:
        """True if the symbol has every frequency of the image, and complex matrices; False in the phase form."""
        return self.complex_pairs and self.kernel_size == (self.height, self.width)

    def forward(self, x: Tensor) -> Tensor:
        expected = (self.in_channels, self.height, self.width)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ShapeError(f"FourierConv2d: expected input of shape (B, {str(expected)[1:-1]}), got {tuple(x.shape)}")
        if self.whole:
            return apply_symbol(self.symbol(), x, self.matrices(), self.bias)
        return apply_phases(self.symbol(), x, self.kernel_size, self.matrices(), self.bias)

    def extra_repr(self) -> str:
        kernel = "" if self.whole else f", kernel_size={self.kernel_size}, complex_pairs={self.complex_pairs}"
        sizes = f"{self.in_channels}, {self.out_channels}, {self.height}, {self.width}"
        return f"{sizes}{kernel}, bias={self.bias is not None}"


def transform_norm(matrices: list[Tensor]) -> float:
    """Proved bound of the norm of the transform by these stored matrices, and of its transpose."""
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


def symbol_norm(symbol: Symbol) -> Tensor:
    """Proved bound of the norm of a convolution with this symbol, whose ``pair`` may hold real parts only."""
    norms = [spectral_norm(symbol.real)]
    if len(symbol.pair):
        parts = to_double(symbol.pair).unbind(1)
        norms.append(spectral_norm(torch.complex(*parts) if len(parts) == 2 else parts[0]))  # R + i S
    return torch.stack(norms).amax()  # of a block diagonal matrix


def _fourier(module: FourierConv2d, input_shape: Shape | None) -> Tensor:
    norm = symbol_norm(module.symbol())
    # Splitting into phase images moves pixels; a 1 x 1 kernel has no transform.
    return norm if module.kernel_size == (1, 1) else up(norm * transform_norm(module.matrices()) ** 2, 4)


_ROOM = 4  # spare roundings of each product


def transform_error(sizes: list[int], arithmetic: Arithmetic) -> float:
    r"""Relative error of the transform by square matrices of these sizes: :math:`\|\hat T x - T x\| \le e \|x\|`."""
    total = 0.0
    # The butterfly may be part of the product along either side, which then has twice as many terms.
    for n in [*sorted(sizes)[:-1], (len(sizes) > 1) * max(sizes) + max(sizes)]:
        entry = 64 * FLOAT64.unit * math.sqrt(2.0 * n)
        total += arithmetic.gamma(n + _ROOM) * math.sqrt(n) * (1 + entry) + entry
    # The stages follow each other: each enlarges what came before by at most its own relative error.
    return grow(total * (1 + total)) if total < 0.1 else math.inf


def schur(magnitude: Tensor) -> float:
    """The largest root of row sum times column sum in a batch of non-negative matrices (F, m, n); 0 for none."""
    if not magnitude.numel():
        return 0.0
    products = magnitude.sum(2).amax(1).sqrt() * magnitude.sum(1).amax(1).sqrt()  # no product underflows to 0
    return grow(float(products.amax()) * (1 + FLOAT64.gamma(magnitude.shape[1] + magnitude.shape[2])))


def spectral_blocks(module: FourierConv2d) -> float:
    """Bound, over all frequencies, of the norm of the symbol's matrix with every entry replaced by its modulus."""
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
) -> RoundingError:
    """Rounding rule of a linear map of h with an error of at most ``relative ||h|| + floor``, and of the bias after it.

    ``carried`` is the relative error of the operations that the bias passes through after it is added.
    """
    shift = 0.0 if bias is None else size(bias.detach()[None]).item() * math.sqrt(outputs / len(bias))
    adding = 0.0 if bias is None else arithmetic.gamma(1 + arithmetic.stored)
    of_bias = 0.0 if bias is None else arithmetic.gamma(4 + arithmetic.stored) + carried
    shift, factor = grow(shift), grow(relative + adding * (gain + relative))
    constant = grow(floor + of_bias * shift + 4 * math.sqrt(outputs) * arithmetic.tiny)
    return proportional(factor, constant, grow((2 + gain + relative) * math.sqrt(2.0)), shift + constant)


def _symbol_error(module: FourierConv2d, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    outputs, cin = math.prod(output_shape(module, input_shape)), module.in_channels
    gain = float(lipschitz(module, input_shape)) * (1 + 2.0**-44)
    blocks = spectral_blocks(module)
    parts = module.pair.shape[1] if module.pair.numel() else 1
    terms = parts * cin  # real ones: two for each complex number
    sizes = [len(matrix) for matrix in module.matrices()]
    transform = transform_error(sizes, arithmetic)
    product = arithmetic.gamma(terms + _ROOM + arithmetic.stored) * blocks
    there = gain * transform + product * (1 + transform)  # T x is off, then the products are
    # Back: the error so far, and that of the inverse transform on numbers of at most (gain + there) ||x||.
    relative = grow(there + transform * (gain + there))
    # Underflow: at most two for each operation, each carried on by a norm of at most sqrt(2) (1 + blocks) sqrt(terms).
    steps = math.prod(input_shape) + outputs
    biggest = float(torch.cat([module.real.flatten(), module.pair.flatten()]).detach().abs().amax())
    carried = (sum(sizes) + terms + 8) * (2 + blocks) ** 2 * (1 + biggest)
    floor = 8 * math.sqrt(steps) * carried * arithmetic.tiny
    # Numbers below the normal range are lost: of each entry of the transform and of the matrices, at most eta.
    relative += 4 * (steps + sum(sizes) + terms) * (2 + blocks) * arithmetic.tiny
    found = relative_to_input(relative, floor, module.bias, outputs, gain + blocks, arithmetic, transform)
    if biggest > arithmetic.room:
        return lambda x: found(x)._replace(peak=flat(size(x), math.inf))  # a stored number is too large for the format
    return found


class TaylorConv2d(nn.Module):
    r"""``(B, cin, H, W) -> (B, cout, H, W)``: the Taylor polynomial of a zero-padded convolution A.

    .. math:: y = \Big[\sum_{i=0}^{T} \frac{A^i}{i!}\, [x; 0]\Big]_{1..c_{out}} + b

    on c = max(cin, cout) channels: missing inputs are zeros, outputs beyond cout are dropped.

    Args:
        in_channels, out_channels, kernel_size: cin, cout and the odd kh, kw.
        terms: T, the highest power.
        bias: whether a bias (cout,) is added.

    Buffers ``kernel`` (c, c, kh, kw) and ``bias`` are zero until they are set.

    Raises:
        OptionError: an even kernel size or wrong terms. ShapeError: another channel number.

    >>> TaylorConv2d(2, 3, (3, 3), terms=5)(torch.ones(1, 2, 4, 5)).shape
    torch.Size([1, 3, 4, 5])
    """

    kernel: Tensor
    bias: Tensor | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: tuple[int, int], terms: int, bias: bool = True
    ) -> None:
        super().__init__()
        check_terms(terms)
        if len(kernel_size) != 2 or any(k < 1 or k % 2 == 0 for k in kernel_size):
            raise OptionError(f"kernel_size: expected two odd integers, got {kernel_size}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.terms = tuple(kernel_size), terms
        inner = max(in_channels, out_channels)
        self.register_buffer("kernel", torch.zeros(inner, inner, *kernel_size))
        self.register_buffer("bias", torch.zeros(out_channels) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ShapeError(f"TaylorConv2d: expected input (B, {self.in_channels}, H, W), got {tuple(x.shape)}")
        x = F.pad(x, (0, 0, 0, 0, 0, self.kernel.shape[1] - self.in_channels))  # zeros for missing channels
        half = [k // 2 for k in self.kernel_size]
        y = taylor_features(x, lambda term: F.conv2d(term, self.kernel, padding=half), self.terms)
        y = y[:, : self.out_channels]
        return y if self.bias is None else y + self.bias[:, None, None]

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return f"{sizes}, terms={self.terms}, bias={self.bias is not None}"


def _taylor(module: TaylorConv2d, input_shape: Shape | None) -> float:
    """`taylor_norm` of the skew part, whose norm bounds the angle; the norm of the symmetric part counts as error."""
    kernel = to_double(module.kernel)
    mirrored = adjoint(kernel)  # the kernel of A^T
    skew_part, rest = (kernel - mirrored) / 2, (kernel + mirrored) / 2  # rest is 0 but for rounding
    # A grid four times finer than the kernel overestimates the angle by at most 17 %: enough where p_T is flat.
    points = 4 * (max(module.kernel_size) - 1) or None
    angle = float(symbol_sup(skew_part, points=points))
    error = 0.0
    if bool((rest != 0).any()):
        # Rounding of the two parts: its norm is at most sqrt(taps) times its Frobenius norm.
        lost = gamma(4) * math.sqrt(math.prod(module.kernel_size)) * float(kernel.abs().sum())
        error = float(symbol_sup(rest, points=points)) + lost
    return taylor_norm(angle, error, module.terms)


def _taylor_error(module: TaylorConv2d, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    """The term A^i x / i! has an error e_i = (|A| e_{i-1} + gamma M (n_{i-1} + e_{i-1})) / i, relative to x.

    Here n_i bounds the norm of the term, and M that of the moduli of A.
    """
    kernel = module.kernel.detach().double()
    channels = len(kernel)
    terms = channels * math.prod(module.kernel_size)
    norm = float(symbol_sup(kernel)) * (1 + 2.0**-44)
    magnitude = schur(kernel.abs().flatten(2).sum(2)[None])
    weight = arithmetic.gamma(terms + 2 + arithmetic.stored)
    reached, error, total_reached, total = 1.0, 0.0, 1.0, 0.0
    for i in range(1, module.terms + 1):
        error = (norm * error + weight * magnitude * (reached + error)) / i
        reached = norm * reached / i  # norms of the terms of e^|A|
        total_reached += reached + error
        total += error + arithmetic.gamma(1) * total_reached
    steps = channels * math.prod(input_shape[-2:])
    lost = 8 * module.terms * terms * (1 + magnitude) ** 2 * math.sqrt(steps) * arithmetic.tiny
    # Underflow in one term is carried through the later ones, whose factors sum to at most e^|A|.
    grown = math.exp(min(norm + magnitude, 700.0))
    outputs = math.prod(output_shape(module, input_shape))
    relative = grow(total * (1 + 2.0**-40) + lost * grown)
    peak = magnitude + total_reached * (1 + magnitude)
    return relative_to_input(relative, lost * grown, module.bias, outputs, grow(peak), arithmetic)


_side = whole(-(2**31), 1 << 16)
_stored = {"in_channels": COUNT, "out_channels": COUNT, "height": _side, "width": _side, "bias": flag}
_stored |= {"kernel_size": INTEGER, "complex_pairs": flag}
add_plain(Plain(FourierConv2d, _fourier, _symbol_error, _stored))
_terms = {"kernel_size": INTEGER, "terms": whole(-(2**31), 1000), "bias": flag}
add_plain(Plain(TaylorConv2d, _taylor, _taylor_error, {"in_channels": COUNT, "out_channels": COUNT, **_terms}))
