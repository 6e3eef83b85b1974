"""Pooling: Lipschitz constants of windows, overlapping ones included, and the rounding of averages."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError, ShapeError
from lipkit.linalg.matrices import check_positive
from lipkit.modules.activations import comparing
from lipkit.modules.machine import proportional
from lipkit.modules.plain import (
    COUNT,
    INTEGER,
    Plain,
    Range,
    RoundingBound,
    RoundingError,
    Shape,
    Shown,
    add_plain,
    either,
    flag,
    monotone,
    one_sign,
)
from lipkit.modules.registry import check_dims, lipschitz, output_shape
from lipkit.modules.views import EnlargeBilinear, Together, enlarged
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import FLOAT64, Arithmetic, Line, flat, gamma, grow, root, size


def overlap(kernel: int, stride: int, dilation: int = 1) -> int:
    """The most windows that one pixel can lie in, on one axis.

    >>> overlap(3, 2), overlap(2, 2), overlap(3, 1), overlap(2, 2, 2)
    (2, 1, 3, 2)
    """
    # Taps at multiples of ``dilation`` meet a pixel only if they agree with it modulo the stride.
    return math.ceil(kernel / (stride // math.gcd(dilation, stride)))


def max_pool_constant(kernels: list[int], strides: list[int], dilations: list[int]) -> float:
    """The root of the largest number of windows that hold one pixel, as each output is one pixel of its window."""
    return root(math.prod(overlap(k, s, d) for k, s, d in zip(kernels, strides, dilations, strict=True)))


def average_matrix(n: int, kernel: int, stride: int, padding: int, ceil_mode: bool, count_pad: bool) -> Tensor:
    """The matrix ``(outputs, n)`` of 1-D average pooling, or of 2-D pooling along one axis, in float64.

    >>> average_matrix(4, 2, 2, 0, False, True).tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    units = torch.eye(n, dtype=torch.float64)[:, None]
    return F.avg_pool1d(units, kernel, stride, padding, ceil_mode, count_pad)[:, 0].T.contiguous()


def average_norm(n: int | None, kernel: int, stride: int, padding: int, ceil_mode: bool, count_pad: bool) -> float:
    """Proved norm of :func:`average_matrix`; if n is None, ``sqrt(row sum x column sum)``, which holds for every n."""
    if n is not None:
        return float(spectral_norm(average_matrix(n, kernel, stride, padding, ceil_mode, count_pad)))
    # Rows sum to at most 1. A window weighs pixels by 1 / kernel; at the border, if it counts fewer, by up to 1.
    weight = 1.0 if ceil_mode or (padding and not count_pad) else 1 / kernel
    return math.sqrt(overlap(kernel, stride) * weight) * (1 + gamma(8))  # three roundings of half a unit each


def pair(value: int | tuple[int, ...]) -> list[int]:
    """An option for both axes: (rows, columns)."""
    return [value, value] if isinstance(value, int) else list(value)


def _sizes(module: nn.MaxPool2d | nn.AvgPool2d, *names: str) -> list[list[int]]:
    """Options for both axes. Refuses sizes below 1, which torch refuses only in the forward pass."""
    for name in names:
        if min(pair(size := getattr(module, name))) < 1:
            raise NoRuleError(f"nn.{type(module).__name__}: expected a {name} of at least 1, got {size}")
    return [pair(getattr(module, name)) for name in names]


def _refuse_indices(module: nn.MaxPool2d | nn.AdaptiveMaxPool2d) -> None:
    if module.return_indices:
        expected = "expected return_indices=False, got True: indices are not Lipschitz"
        raise NoRuleError(f"nn.{type(module).__name__}: {expected}")


def _max_pool(module: nn.MaxPool2d, input_shape: Shape | None) -> float:
    _refuse_indices(module)
    return max_pool_constant(*_sizes(module, "kernel_size", "stride", "dilation"))


def _avg_pool(module: nn.AvgPool2d, input_shape: Shape | None) -> float:
    kernels, strides = _sizes(module, "kernel_size", "stride")
    axes = list(zip(kernels, strides, pair(module.padding), strict=True))
    if module.divisor_override is not None:
        if not module.divisor_override:
            raise NoRuleError(f"nn.{type(module).__name__}: expected a divisor_override other than 0, got 0")
        # Every window then divides by the same number: the plain windows with counted padding, rescaled.
        factor = math.prod(kernels) / abs(module.divisor_override)
        return factor * math.prod(average_norm(None, *a, False, True) for a in axes) * (1 + gamma(8))
    if input_shape is not None:
        output_shape(module, input_shape)  # windows beyond the image are refused
    flags = (module.ceil_mode, module.count_include_pad)
    sizes = (None, None) if input_shape is None else input_shape[-2:]
    return math.prod(average_norm(n, *axis, *flags) for n, axis in zip(sizes, axes, strict=True)) * (1 + gamma(4))


def _axes(module: nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d, input_shape: Shape | None) -> list[tuple[int, int]]:
    """(input pixels, output pixels) of an adaptive pooling, for each axis."""
    name = f"nn.{type(module).__name__}"
    if input_shape is None:
        raise ShapeError(
            f"{name}: expected an input_shape, because its constant depends on the image, got none: "
            "lipkit.lipschitz(network, input_shape=(3, 32, 32)), for instance"
        )
    sizes = pair(module.output_size) if isinstance(module.output_size, int) else module.output_size or (None, None)
    axes = [(n, n if m is None else m) for n, m in zip(input_shape[-2:], sizes, strict=True)]
    if min(m for _, m in axes) < 1:
        raise NoRuleError(f"{name}: expected output sizes of at least 1, got {module.output_size}")
    return axes


def adaptive_matrix(n: int, m: int) -> Tensor:
    """The 1-D adaptive average pooling operator ``(m, n)`` in float64."""
    return F.adaptive_avg_pool1d(torch.eye(n, dtype=torch.float64)[:, None], m)[:, 0].T.contiguous()


def _adaptive_avg_pool(module: nn.AdaptiveAvgPool2d, input_shape: Shape | None) -> float:
    axes = _axes(module, input_shape)
    window = math.prod(n // m for n, m in axes if n % m == 0)
    constant = (1.0 if window == 1 else 1 / math.sqrt(window)) * (1 + gamma(4) * (window > 1))
    for n, m in axes:
        if n % m:
            # Entries are rounded once, and so is the product.
            constant *= float(spectral_norm(adaptive_matrix(n, m))) * (1 + gamma(4))
    return constant


def _adaptive_max_pool(module: nn.AdaptiveMaxPool2d, input_shape: Shape | None) -> float:
    _refuse_indices(module)
    count = math.prod(int((adaptive_matrix(n, m) > 0).sum(0).amax()) for n, m in _axes(module, input_shape))
    return root(count)  # how often a pixel is picked at most


def _export_adaptive_max_pool(module: nn.AdaptiveMaxPool2d, input_shape: Shape) -> nn.Module:
    _refuse_indices(module)
    rows, cols = _axes(module, input_shape)
    if rows[0] % rows[1] or cols[0] % cols[1]:
        raise NoRuleError(
            f"nn.AdaptiveMaxPool2d: expected an output_size that divides the image {input_shape[-2:]} to export it, "
            f"got {module.output_size}, whose windows overlap: use nn.MaxPool2d"
        )
    return nn.MaxPool2d((rows[0] // rows[1], cols[0] // cols[1]))


class Mean(Together):
    r"""The mean over dimensions ``dims`` (the batch is 0) of a sample: :math:`1/\sqrt n`-Lipschitz for n numbers each.

    Raises:
        OptionError: no dimension, one twice, or the batch.

    >>> Mean(2, 3)(torch.ones(1, 5, 2, 2)).shape
    torch.Size([1, 5])
    """

    def __init__(self, *dims: int, keepdim: bool = False) -> None:
        super().__init__(*dims)
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims, keepdim=self.keepdim)


def _mean(module: Mean, input_shape: Shape | None) -> float:
    if input_shape is None:
        raise ShapeError("Mean: expected an input_shape, because its constant depends on the sizes, got none")
    check_dims(module, input_shape, max(module.dims))
    return 1 / math.sqrt(math.prod(input_shape[dim - 1] for dim in module.dims)) * (1 + gamma(4))


class L2NormPool2d(Shown):
    r"""The l2 norm of each window of each channel: 1-Lipschitz. It keeps lengths, but neither signs nor places.

    Args:
        kernel_size: s of windows s x s that do not overlap; None for one window, the whole image.

    Shapes:
        ``(B, C, H, W) -> (B, C, H / s, W / s)``, or ``(B, C, 1, 1)``. The gradient at a window of zeros is zero.

    Raises:
        OptionError: ``kernel_size`` below 1. ShapeError: s does not divide the height and width.

    >>> L2NormPool2d()(torch.tensor([[[[3.0, 4.0]]]])).item()
    5.0

    References:
        Boureau, Ponce & LeCun, ICML 2010 (pooling by norms); its constant is the triangle inequality in each window.
    """

    def __init__(self, kernel_size: int | None = None) -> None:
        super().__init__()
        if kernel_size is not None:
            check_positive(kernel_size=kernel_size)
        self.kernel_size = kernel_size

    def forward(self, x: Tensor) -> Tensor:
        s = self.kernel_size
        if x.ndim != 4 or (s is not None and (x.shape[-2] % s or x.shape[-1] % s)):
            raise ShapeError(f"L2NormPool2d: expected (B, C, H, W), multiples of {s or 1}, got {tuple(x.shape)}")
        if s is None:
            return torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)
        return torch.linalg.vector_norm(x.unflatten(3, (-1, s)).unflatten(2, (-1, s)), dim=(3, 5))


def _l2_pool_error(module: L2NormPool2d, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    outputs = math.prod(output_shape(module, input_shape))
    terms = math.prod(input_shape) // outputs
    # Half the relative error of the sum of squares, and that of the root; a square below the range loses its number.
    error = arithmetic.gamma(terms + 4)
    floor = grow(math.sqrt(outputs) * 2 * math.sqrt((terms + 2) * arithmetic.tiny))
    # A norm of at most the root of the range has squares within it: n^2 <= n sqrt(room) up to there.
    return proportional(error, floor, grow(math.sqrt(arithmetic.room)))


def _norm_range(module: L2NormPool2d, x: Range) -> Range:
    return Range(module(x.nearest), module(x.farthest))


Average = nn.AvgPool2d | nn.AdaptiveAvgPool2d | Mean | EnlargeBilinear


def window_terms(module: Average, input_shape: Shape) -> int:
    """A bound of both the numbers in one window and the windows that hold one number."""
    if isinstance(module, nn.AvgPool2d):
        return math.prod(pair(module.kernel_size))
    if isinstance(module, EnlargeBilinear):
        return 5  # four pixels, by two products each
    if isinstance(module, Mean):
        return math.prod(input_shape) // math.prod(output_shape(module, input_shape))
    axes = _axes(module, input_shape)
    return math.prod(n // m if n % m == 0 else max(n // m, m // n) + 2 for n, m in axes)


def _average(module: Average, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    outputs = math.prod(output_shape(module, input_shape))
    terms = window_terms(module, input_shape)
    error = arithmetic.gamma(terms + 3)  # the sum, a rounded divisor, the quotient
    # All weights have one sign: the matrix of their moduli has the same norm.
    norm = grow(float(lipschitz(module, input_shape)))
    floor = math.sqrt(outputs) * (terms + 2) * arithmetic.tiny

    def measure(x: Tensor) -> RoundingBound:
        reached = Line(grow(size(module(x.abs())) * (1 + FLOAT64.gamma(terms + 8))), norm)
        found = reached.times(error).plus(flat(reached.at, floor))
        # Before the division a window holds the sum of its pixels.
        return RoundingBound(found, Line(size(x), 1.0).times(float(terms + 1)))

    return measure


_windows = {"kernel_size": INTEGER, "stride": INTEGER, "padding": INTEGER, "ceil_mode": flag}
_counted = {**_windows, "count_include_pad": flag, "divisor_override": either(INTEGER, None)}
_size = {"output_size": either(INTEGER, None)}
add_plain(Plain(nn.MaxPool2d, _max_pool, comparing, {**_windows, "dilation": INTEGER}, monotone, dims=(2, 3)))
add_plain(Plain(L2NormPool2d, 1.0, _l2_pool_error, {"kernel_size": either(COUNT, None)}, _norm_range))
add_plain(Plain(nn.AvgPool2d, _avg_pool, _average, _counted, one_sign, dims=(2, 3)))
add_plain(Plain(nn.AdaptiveAvgPool2d, _adaptive_avg_pool, _average, _size, one_sign, dims=(2, 3)))
add_plain(Plain(nn.AdaptiveMaxPool2d, _adaptive_max_pool, export=_export_adaptive_max_pool, dims=(2, 3)))
add_plain(Plain(Mean, _mean, _average, {"dims": COUNT, "keepdim": flag}, one_sign))
add_plain(Plain(EnlargeBilinear, enlarged, _average, {"rows": COUNT, "cols": COUNT}, one_sign))
