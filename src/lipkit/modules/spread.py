r"""A convolution from few channels to many (`lipkit.conv.spread`): a small one in the Fourier basis, then a kernel.

The layer, which subtracts its input, has the symbol :math:`F S - E`, with the symbols S of the first part and F of the
kernel, and E the identity on the channels of the input. The norm of this symbol is proved. The norms of the parts alone
say little: in a Cayley layer :math:`S = 2 N^{-1}`, and :math:`\|F\|` can be anything.
"""

import functools
import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds import circular
from lipkit.bounds.symbol_sup import symbol_error
from lipkit.conv.circular import circular_conv2d, circular_pads
from lipkit.conv.spectrum import frequencies, transform_matrices
from lipkit.conv.symbol import symbol_at
from lipkit.errors import OptionError
from lipkit.linalg.transforms import transformed
from lipkit.modules.dense import inner_products
from lipkit.modules.fourier import FourierConv2d
from lipkit.modules.guarding import guard
from lipkit.modules.machine import ProvedModule, prepare, reach, start, through
from lipkit.modules.plain import COUNT, Plain, RoundingBound, RoundingError, Shape, add_plain, flag, submodule
from lipkit.modules.registry import lipschitz, output_shape
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import FLOAT64, Arithmetic, flat, gamma, grow, to_double, up


class SpreadConv2d(nn.Module):
    r"""A small circular convolution, then a kernel to more channels, minus the input: a Cayley layer with few inputs.

    .. math:: y = F * t - [x;\, 0] + b, \qquad t = \mathrm{first}(x)

    Args:
        first: :class:`FourierConv2d` from cin to cin channels, without a bias.
        out_channels: cout >= cin.
        kernel_size: of F, the buffer ``weight``, at most as large as the image.
        bias: whether a bias (cout,) is added.

    Buffers ``weight`` (cout, cin, kh, kw) and ``bias`` are zero until they are set.

    Guarantee:
        ``lipschitz`` proves the norm of the whole at every frequency, rounding included.

    Cost:
        Two transforms of the input, and one product of the matrix [F, -E, b] with the shifted images, because fast
        convolutions round differently. On a CPU, in float32 and without gradients, oneDNN's direct convolution
        replaces this product.

    Raises:
        OptionError: parts of another type or size. ShapeError: an input of another size.

    >>> layer = SpreadConv2d(FourierConv2d(1, 1, 4, 4, bias=False), 2, (3, 3))
    >>> layer(torch.ones(1, 1, 4, 4))[0, :, 0, 0].tolist()
    [-1.0, 0.0]
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, first: nn.Module, out_channels: int, kernel_size: tuple[int, int], bias: bool = True) -> None:
        super().__init__()
        small, kernel = _small(first), kernel_size
        n, sides = small.in_channels, (small.height, small.width)
        pair = isinstance(kernel, tuple | list) and len(kernel) == 2
        if not pair or not all(1 <= k <= side for k, side in zip(kernel, sides, strict=True)) or out_channels < n:
            raise OptionError(
                f"SpreadConv2d: expected at least {n} outputs and a kernel (kh, kw) of at most {sides}, got "
                f"{out_channels} and {kernel}"
            )
        self.first, self.out_channels, self.kernel_size = small, out_channels, tuple(kernel_size)
        self.register_buffer("weight", torch.zeros(out_channels, n, *kernel_size))
        self.register_buffer("bias", torch.zeros(out_channels) if bias else None)

    @classmethod
    def from_parts(cls, first: FourierConv2d, weight: Tensor, bias: Tensor | None) -> Self:
        """The layer of these numbers, as detached copies."""
        cout, _, kh, kw = weight.shape
        layer = cls(first, cout, (kh, kw), bias is not None).to(weight)
        layer.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias}, strict=False)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        t, (kh, kw) = self.first(x), self.kernel_size
        (h, w), (cout, cin) = t.shape[-2:], self.weight.shape[:2]
        padded = F.pad(t, circular_pads(kh, kw), mode="circular")
        if self._convolves(t):
            y = torch.mkldnn_convolution(padded, self.weight, self.bias, (0, 0), (1, 1), (1, 1), 1)
            y[:, :cin].sub_(x)  # minus [x; 0]
            return y
        images = [padded[:, :, i : i + h, j : j + w] for i in range(kh) for j in range(kw)]
        matrices = [self.weight.permute(0, 2, 3, 1).flatten(1), -torch.eye(cout, cin, dtype=t.dtype, device=t.device)]
        images.append(x)  # times -E: the input is subtracted
        if self.bias is not None:
            images.append(torch.ones_like(x[:, :1]))
            matrices.append(self.bias[:, None])
        return (torch.cat(matrices, 1) @ torch.cat(images, 1).flatten(2)).view(-1, cout, h, w)

    def _convolves(self, t: Tensor) -> bool:
        """True where oneDNN's direct convolution takes the place of the product: it is 1.2 times as fast."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # another runtime may not have it
        plain = not (torch.is_grad_enabled() or transformed() or traced)
        fits = t.device.type == "cpu" and t.dtype == self.weight.dtype == torch.float32
        return plain and fits and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)

    def extra_repr(self) -> str:
        return f"{self.out_channels}, kernel_size={self.kernel_size}, bias={self.bias is not None}"


def _small(first: nn.Module) -> FourierConv2d:
    """``first``, after a check that it is a `FourierConv2d` from n to n channels without a bias."""
    if type(first) is FourierConv2d and first.whole and first.in_channels == first.out_channels and first.bias is None:
        return first
    raise OptionError(f"SpreadConv2d: expected a FourierConv2d from n to n channels without bias, got {first}")


def check_parts(module: SpreadConv2d) -> FourierConv2d:
    """The first part, after a check that both parts have the types and shapes that the proof assumes."""
    guard(module.first)
    first = _small(module.first)
    expected = (module.out_channels, first.in_channels, *module.kernel_size)
    if module.weight.shape != expected:
        raise OptionError(f"SpreadConv2d: expected a weight of shape {expected}, got {tuple(module.weight.shape)}")
    return first


def _transform_distance(module: FourierConv2d) -> float:
    """Bound of the distance of the stored transform from the exact one."""
    # Entries made in float64 are within 64 u of sqrt(2 / n). The butterfly is part of either product, or multiplies by
    # a rounded root of one half.
    exact = transform_matrices(*module.kernel_size, dtype=torch.float64, device=torch.device("cpu"))
    total = 1 + 8 * float(torch.finfo(module.real.dtype).eps)
    for stored_matrix, made in zip(module.matrices(), exact, strict=True):
        off = float(spectral_norm(stored_matrix.detach().cpu().double() - made)) * (1 + 1e-12)
        # The factor 2: a product may have both kinds of rows.
        total *= (1 + off + 64 * FLOAT64.unit * math.sqrt(2.0 * len(made))) ** 2
    return total * (1 + 1e-12) - 1


def _spread(module: SpreadConv2d, input_shape: Shape | None) -> Tensor:
    """Proved constant of the layer, from the symbols F, S and E that the top of the file defines.

    The smaller of ``max ||F S - E||`` over all frequencies and ``||F|| ||S|| + 1``.
    """
    first, kernel = check_parts(module), to_double(module.weight)
    h, w, n = first.height, first.width, first.in_channels
    norms = [lipschitz(first, (n, h, w)), circular(kernel, h, w)]
    by_norms = up(norms[0] * norms[1] + 1, 4)
    if not bool(by_norms.isfinite()) or (module.bias is not None and not bool(module.bias.isfinite().all())):
        return torch.full_like(by_norms, math.inf)
    order, real = frequencies(h, w), to_double(first.real)
    small = torch.complex(real, torch.zeros_like(real)), torch.complex(*to_double(first.pair).unbind(1))  # S
    eye = torch.eye(module.out_channels, n, dtype=torch.float64, device=kernel.device)
    found = torch.zeros((), dtype=torch.float64, device=kernel.device)
    # Error of the computed F; below, the error of products of n complex terms and of the sum with E is added.
    off = float(symbol_error(kernel.detach()))
    for which, s in zip(order, small, strict=True):
        if len(which):
            f = symbol_at(kernel, which[:, 0].to(kernel.device), which[:, 1].to(kernel.device), h, w)
            sizes = [float(torch.linalg.matrix_norm(t.detach()).amax()) * (1 + 1e-12) for t in (f, s)]
            lost = off * sizes[1] + gamma(4 * n + 8) * (sizes[0] * sizes[1] + math.sqrt(n))
            found = torch.maximum(found, up(spectral_norm(f @ s - eye) + lost, 4))
    distance = _transform_distance(first)
    moved = float(norms[0].detach()) * float(norms[1].detach()) * distance * (2 + distance)
    return torch.minimum(by_norms, up(found + moved, 4))


def _spread_error(module: SpreadConv2d, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    """Rounding rule: with t from the first part, each output is one inner product, ``F t + b - x`` in any order."""
    check_parts(module)
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    # Terms of one output: the kernel's, x and the bias.
    terms, outputs = weight[0].numel() + 2, math.prod(output_shape(module, input_shape))
    steps = prepare([module.first], input_shape, arithmetic)
    gain = grow(float(circular(to_double(weight), *input_shape[1:])))  # of the kernel alone

    def measured(machine: Arithmetic) -> RoundingError:
        return inner_products(
            lambda t: circular_conv2d(t, weight.abs(), None if bias is None else bias.abs()),
            lambda w: (float(w.flatten(1).sum(1).amax()), float(w.sum((0, 2, 3)).amax())),
            weight,
            terms,
            outputs,
            machine,
            blocked=False,
        )

    spreading = functools.partial(circular_conv2d, kernel=module.weight, bias=module.bias)
    steps.append(ProvedModule(spreading, gain, measured(arithmetic), measured(FLOAT64)))
    floor = 4 * (terms + 1) * math.sqrt(outputs) * arithmetic.tiny

    def measure(x: Tensor) -> RoundingBound:
        bound = through(steps, x)
        total = reach(bound).plus(reach(start(x)))
        error = bound.error.plus(total.times(arithmetic.gamma(terms + 1))).plus(flat(total.at, floor))
        return RoundingBound(error, bound.peak.most(total.times(2.0)))

    return measure


_stored = {"first": submodule, "out_channels": COUNT, "kernel_size": COUNT, "bias": flag}
add_plain(Plain(SpreadConv2d, _spread, _spread_error, _stored))
