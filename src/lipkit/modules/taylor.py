"""The truncated exponential of a zero-padded convolution, with a constant kernel."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds.symbol_sup import symbol_sup
from lipkit.conv.exponential_conv import adjoint, taylor_features, taylor_norm
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.exponential import check_terms
from lipkit.modules.configuration import COUNT, INTEGER, flag, whole
from lipkit.modules.fourier import relative_to_input, schur
from lipkit.modules.plain import Plain, RoundingError, Shape, add_plain
from lipkit.modules.registry import output_shape
from lipkit.proof.roundoff import Arithmetic, gamma, grow, to_double


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
    """`taylor_norm` for a skew kernel: angles up to the norm of its skew part; the symmetric part counts as error."""
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


_terms = {"kernel_size": INTEGER, "terms": whole(-(2**31), 1000), "bias": flag}
add_plain(Plain(TaylorConv2d, _taylor, _taylor_error, {"in_channels": COUNT, "out_channels": COUNT, **_terms}))
