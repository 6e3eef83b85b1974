"""Integer programs: operations on arrays of int32 with sums in int64. They give the same bits here as on any machine.

An array q of integers with the fraction f stands for 2^-f q. `lipkit.integer.quantisation` makes the program of a
network, with the proof of its error and that no sum overflows; `lipkit.interop.write_c` writes it in C.
"""

import math
import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import OptionError
from lipkit.modules.plain import Shape

WORD = 2**31 - 1
"""The largest modulus of an entry or a weight."""


@dataclass(frozen=True, eq=False)
class Move:
    """``y_i = x_index_i``, or 0 where the index is -1."""

    index: Tensor

    @property
    def size(self) -> int:
        """Number of outputs."""
        return len(self.index)

    def __call__(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 1))[:, self.index]  # index -1 is the 0 behind the last entry


@dataclass(frozen=True, eq=False)
class Sort:
    """Sorts in descending order along the middle dimension of the numbers in the shape (outer, length, inner)."""

    outer: int
    length: int
    inner: int

    @property
    def size(self) -> int:
        """Number of outputs."""
        return self.outer * self.length * self.inner

    def __call__(self, x: Tensor) -> Tensor:
        seen = x.view(len(x), self.outer, self.length, self.inner)
        return seen.sort(dim=2, descending=True).values.flatten(1)


@dataclass(frozen=True, eq=False)
class Fold:
    """``max(x, 0)`` (kind ``relu``) or ``|x|`` (kind ``abs``) of the first ``count`` numbers; the others stay."""

    kind: str
    count: int
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        head = x[:, : self.count]
        return torch.cat((head.clamp_min(0) if self.kind == "relu" else head.abs(), x[:, self.count :]), 1)


@dataclass(frozen=True, eq=False)
class IntBlend:
    """``round(2^-shift (u x + v y + ...))`` of values of one size."""

    factors: tuple[int, ...]
    shift: int
    size: int

    def sums(self, *values: Tensor) -> Tensor:
        """The integers ``u x + v y + ...``, before shift and rounding."""
        return sum(map(operator.mul, values, self.factors), values[0].new_zeros(()))

    def __call__(self, *values: Tensor) -> Tensor:
        return rounded(self.sums(*values), self.shift)


@dataclass(frozen=True, eq=False)
class IntLinear:
    """A convolution without padding of images (channels, height, width); a dense layer has images of one pixel."""

    weight: Tensor  # (rows, channels / groups, kh, kw) int64, entries of at most `WORD`
    bias: Tensor  # (rows,) int64, of the fraction of the sums
    image: tuple[int, int, int]  # channels, height, width of the input
    groups: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    shift: int  # right shift s >= 1 of the sums, see `quantisation`
    window: int  # the largest l2 norm of the integers that one output reads, rounded up; it bounds the sums

    @property
    def places(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        spans = [d * (k - 1) for d, k in zip(self.dilation, self.weight.shape[2:], strict=True)]
        h, w = ((n - span - 1) // s + 1 for n, span, s in zip(self.image[1:], spans, self.stride, strict=True))
        return h, w

    @property
    def size(self) -> int:
        """Number of outputs."""
        return len(self.weight) * math.prod(self.places)

    def sums(self, x: Tensor) -> Tensor:
        """The exact sums (N, rows, places), by float64 products of digits that are small enough to round nothing."""
        n = len(x)
        bias = self.bias[None, :, None]
        # A scaling: output channel i reads input channel i alone, pixel by pixel.
        if self.weight[0].numel() == 1 and self.groups == len(self.weight) and self.stride == (1, 1):
            return x.view(n, len(self.weight), -1) * self.weight.view(1, -1, 1) + bias
        terms = self.weight[0].numel()
        # |sum| <= 2^(bits - 1) sqrt(terms) window <= 2^53 for digits of `bits` bits
        bits = min(54 - ((math.isqrt(terms) + 1) * self.window).bit_length(), 32)  # isqrt rounds down, hence + 1
        if bits < 2:
            raise OverflowError(f"{terms} terms of one sum")
        image, rest, scale = x.view(n, *self.image).double(), self.weight, 0
        total = torch.zeros((), dtype=torch.int64)
        while bool((rest != 0).any()) or scale == 0:
            digit = (rest + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)  # signed, so of half the modulus
            total = total + (self._product(image, digit.double()).long() << scale)
            rest, scale = (rest - digit) >> bits, scale + bits
        return total.view(n, len(self.weight), -1) + bias

    def _product(self, image: Tensor, digit: Tensor) -> Tensor:
        if self.groups == 1 and math.prod(self.image[1:]) == 1:
            return F.linear(image.flatten(1), digit.flatten(1))
        if self.groups == 1 and digit[0, 0].numel() == 1 and self.stride == (1, 1):
            return torch.matmul(digit.flatten(1), image.flatten(2))
        return F.conv2d(image, digit, None, self.stride, 0, self.dilation, self.groups)

    def __call__(self, x: Tensor) -> Tensor:
        return rounded(self.sums(x), self.shift).flatten(1)

    def fits(self) -> bool:
        """True if weights fit into 32 bits and every sum is below 2^62, so that half a unit can be added."""
        if int(self.weight.abs().amax()) > WORD:
            return False
        high, low = self.weight.flatten(1) >> 16, self.weight.flatten(1) & 0xFFFF
        parts = [(a * b).sum(1).tolist() for a, b in ((high, high), (high, low), (low, low))]
        squares = [(hh << 32) + (hl << 17) + ll for hh, hl, ll in zip(*parts, strict=True)]  # (2^16 h + l)^2
        rows = zip(squares, self.bias.tolist(), strict=True)
        # Cauchy and Schwarz bound every partial sum, here in exact integers.
        return all((math.isqrt(square) + 1) * self.window + abs(b) < 2**62 for square, b in rows)


Operation = Move | Sort | Fold | IntBlend | IntLinear


def rounded(sums: Tensor, shift: int) -> Tensor:
    """``floor(2^-shift sums + 1/2)`` in int64."""
    return (sums + (1 << shift >> 1)) >> shift


@dataclass(frozen=True, eq=False)
class Program:
    """An integer program; value 0 is its input, value i + 1 the result of operation i.

    Attributes:
        input_shape: of one input.
        box: (low, high) of the inputs, which are clamped to it.
        input_fraction, fraction: of the integers that go in, and of those that come out.
        operations: each with the values that it reads.
        body_error: bound of the l2 error of the last dense layer's input, for all inputs of the network; of the
            outputs if the network does not end in a dense layer.
        own_error: (K,) error that the last dense layer adds to each output; None without such a layer.
    """

    input_shape: Shape
    box: tuple[float, float]
    input_fraction: int
    fraction: int
    operations: tuple[tuple[Operation, tuple[int, ...]], ...]
    body_error: float
    own_error: Tensor | None

    @property
    def ends(self) -> tuple[int, int]:
        """Smallest and largest integer input: the ends of the box, scaled and rounded."""
        low, high = (round(math.ldexp(end, self.input_fraction)) for end in self.box)
        return low, high

    def quantise(self, x: Tensor) -> Tensor:
        """Inputs (N, *input_shape) clamped to the box and rounded to integers (N, n)."""
        if bool(x.isnan().any()):
            raise OptionError("expected inputs that are numbers, got NaN")
        # Scaling by a power of two is exact: the only rounding is the one to integers.
        return (x.double().clamp(*self.box) * 2.0**self.input_fraction).round().long().flatten(1)

    def run(self, q: Tensor) -> Tensor:
        """Integers (N, n) in the box to the integer outputs (N, K): int64 tensors of numbers that fit into int32."""
        values = [q]
        for operation, reads in self.operations:
            values.append(operation(*(values[i] for i in reads)))
        return values[-1]

    def __call__(self, x: Tensor) -> Tensor:
        """Inputs (N, *input_shape) to outputs (N, K) in float64, which holds them exactly."""
        return self.run(self.quantise(x).cpu()).double() * 2.0**-self.fraction
