"""Layers with the whole geometry of torch's convolutions: strides, groups, dilations, paddings, transposed, 1-D.

Elsewhere in :mod:`lipkit.layers` a stride is an invertible downsampling and padding is circular. Here the convolution
*with its stride* is constrained, and the export is one plain convolution of torch, where a signal is an image of one
row.
"""

import inspect
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv.circular import circular_pad
from lipkit.conv.patches import Size, aoc_kernel, aol_scales, period, rko_factor
from lipkit.errors import OptionError, ShapeError, check_choice, rewording
from lipkit.layers import base, definitions
from lipkit.layers.aol import where_positive
from lipkit.layers.base import Family, Pair
from lipkit.layers.dense import BjorckLinear, orthogonal_stack
from lipkit.layers.export import exactly, torch_layer
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.linalg.table import Orthogonalize, function_name, orthogonalized, proved, resolve
from lipkit.modules import Shape, export_rule, lipschitz_rule, output_shape
from lipkit.modules.convolutions import borders, padded_copies
from lipkit.proof.roundoff import root


class Construction(nn.Module, ABC):
    """Makes the kernels of all groups, (groups, out_channels, in_channels, kh, kw), from its parameters."""

    def __init__(
        self, shape: tuple[int, ...], stride: Size, dilation: Size, orthogonalize: Orthogonalize, *place: Any
    ) -> None:
        super().__init__()
        self.shape, self.kernel_size = shape, (shape[3], shape[4])
        self.stride, self.dilation, self.orthogonalize = stride, dilation, orthogonalize
        self.make_parameters(*place)  # device and dtype

    def made(self, free: Tensor) -> Tensor:
        """The semi-orthogonal matrices that ``orthogonalize`` makes of free ones."""
        return orthogonalized(self.orthogonalize, at_least_float32(free))

    @abstractmethod
    def make_parameters(self, device: Any, dtype: Any) -> None: ...

    @abstractmethod
    def forward(self) -> Tensor:
        """The kernels, in float32 or better."""


class Aoc(Construction):
    """Kernels by :func:`lipkit.conv.patches.aoc_kernel`: orthogonal."""

    projectors: nn.Parameter | None
    last: nn.Parameter | None

    def make_parameters(self, device: Any, dtype: Any) -> None:
        groups, cout, cin, *kernel = self.shape
        if any(k < s for k, s in zip(kernel, self.stride, strict=True)):
            raise OptionError(
                f"kernel_size: expected at least the stride {self.stride} of an orthogonal layer, got "
                f"{self.kernel_size}: pixels between the windows would be lost; use constraint='rko' or 'aol'"
            )
        if math.gcd(self.stride[0], self.dilation[0]) > 1 or math.gcd(self.stride[1], self.dilation[1]) > 1:
            raise OptionError(
                f"dilation: expected no common divisor with the stride {self.stride} of an orthogonal layer, got "
                f"{self.dilation}: pixels between the taps would be lost; use constraint='rko' or 'aol'"
            )
        strided = max(self.stride) > 1
        inner = max(cin, cout // math.prod(self.stride)) if strided else cout  # c of `aoc_kernel`
        wide, factors = max(inner, cin), sum(kernel) - sum(self.stride)  # the last matrix adds s - 1 taps
        self.free = orthogonal_stack((groups, inner, cin), device, dtype)
        projectors = orthogonal_stack((groups * factors, wide, wide // 2), device, dtype)
        self.register_parameter("projectors", projectors if projectors.numel() else None)
        last = orthogonal_stack((groups, cout, inner * math.prod(self.stride)), device, dtype)
        self.register_parameter("last", last if strided else None)
        self.stacks = (groups, factors, wide, wide // 2)  # projectors of rank wide / 2, as in BCOP

    def forward(self) -> Tensor:
        h = self.made(self.free)
        # The only projectors of one channel are 0 and 1: the factors are shifts, by projectors of rank 0.
        v = (h.new_zeros(0) if self.projectors is None else self.made(self.projectors)).reshape(self.stacks)
        last = [None] * len(h) if self.last is None else self.made(self.last)
        each = [aoc_kernel(*parts, self.kernel_size, self.stride) for parts in zip(h, v, last, strict=True)]
        return torch.stack(each)


class Rko(Construction):
    """Kernels that are semi-orthogonal as matrices, divided by :func:`lipkit.conv.patches.rko_factor`."""

    def make_parameters(self, device: Any, dtype: Any) -> None:
        groups, cout, cin, kh, kw = self.shape
        self.free = orthogonal_stack((groups, cout, cin * kh * kw), device, dtype)
        self.classes = period(self.stride, self.dilation)

    def forward(self) -> Tensor:
        return (self.made(self.free) / rko_factor(self.kernel_size, self.classes)).reshape(self.shape)


class Aol(Rko):
    """Free kernels whose taps are divided by the roots of :func:`lipkit.conv.patches.aol_scales`."""

    def forward(self) -> Tensor:
        free = at_least_float32(self.free).reshape(self.shape)
        scales = where_positive(torch.rsqrt, aol_scales(free, self.classes))
        return free * scales[:, None]  # one for each input and tap, the same for all outputs


CONSTRAINTS: dict[str, type[Construction]] = {"aoc": Aoc, "rko": Rko, "aol": Aol}
"""Constructions of kernels of any stride, by name."""


GEOMETRY = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
"""Arguments of torch's convolutions; a layer keeps them under the names that torch uses."""


class _Native(base.Biased):
    """A convolution with a constrained weight. It takes the arguments of torch's layer ``plain``, which checks them."""

    plain: type[Any] = nn.Conv2d
    axes = 2
    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    output_padding: tuple[int, ...]
    _reversed_padding_repeated_twice: list[int]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = [p for p in inspect.signature(_Native.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        torchs = inspect.signature(cls.plain)
        cls.__signature__ = torchs.replace(parameters=[*torchs.parameters.values(), *own])  # type: ignore[attr-defined]

    def __init__(
        self, *args: Any, constraint: str = "aoc", orthogonalize: str | Orthogonalize = "bjorck", **named: Any
    ) -> None:
        super().__init__()
        given = inspect.signature(self.plain).bind(*args, **named)
        given.apply_defaults()
        in_channels, out_channels, groups, device, dtype = (
            given.arguments[name] for name in ("in_channels", "out_channels", "groups", "device", "dtype")
        )
        base.check_positive(in_channels=in_channels, out_channels=out_channels, groups=groups)
        base.check_dtype(dtype)
        check_choice("constraint", constraint, CONSTRAINTS)
        function = resolve(orthogonalize)
        if not proved(function):
            raise OptionError(f"orthogonalize: expected a name of linalg.ORTHOGONALIZE, got {function!r}")
        kinds = (ValueError, TypeError, RuntimeError, AssertionError)
        with rewording(OptionError, f"{type(self).__name__}: expected arguments of nn.{self.plain.__name__}: ", *kinds):
            like = self.plain(**{**given.arguments, "device": "meta"})
            # Sizes below 1 are refused below: torch accepts them here and fails at the first input.
            # A signal is an image of one row.
            sizes = {name: (1, *getattr(like, name))[-2:] for name in ("kernel_size", "stride", "dilation")}
            least = {name: min(size) for name, size in sizes.items()}
        base.check_positive(**least)
        if not isinstance(like.padding, str) and not all(isinstance(p, int) and p >= 0 for p in like.padding):
            raise OptionError(f"padding: expected numbers of at least 0, got {given.arguments['padding']!r}")
        for name in ("kernel_size", "stride", "padding", "dilation", "output_padding"):
            if not isinstance(size := getattr(like, name), str) and len(size) != self.axes:
                raise OptionError(f"{name}: expected one integer for each of {self.axes} axes, got {size}")
        axes = zip(like.output_padding, like.stride, like.dilation, strict=True)
        if not all(0 <= more < max(step, apart) for more, step, apart in axes):
            most = "less than the stride or the dilation on each axis"
            raise OptionError(f"output_padding: expected {most}, got {like.output_padding}")
        for name in (*GEOMETRY, "output_padding", "_reversed_padding_repeated_twice"):
            setattr(self, name, getattr(like, name))
        self.constraint = constraint
        # Transposed layers store (in, out / groups, kh, kw): the kernel of the adjoint.
        rows, cols = like.weight.shape[0] // groups, like.weight.shape[1]
        shape, geometry = (groups, rows, cols, *sizes["kernel_size"]), (sizes["stride"], sizes["dilation"])
        self.construction = CONSTRAINTS[constraint](shape, *geometry, function, device, dtype)
        fan_in = math.prod(like.weight.shape[1:])
        self.register_parameter("bias", base.new_bias(out_channels, fan_in, given.arguments["bias"], device, dtype))
        reach, padded = self.reach, [before + after for before, after in borders(self)]
        if self.padding_mode == "circular" and any(p > r for p, r in zip(padded, reach, strict=True)):
            raise OptionError(
                f"padding: expected at most {reach} circular rows and columns in total (dilation x (kernel_size - 1)), "
                f"got {padded}: outputs beyond one period repeat and raise the norm"
            )

    @property
    def reach(self) -> list[int]:
        """Pixels from the first to the last tap, for each axis."""
        return [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]

    def least_sides(self) -> tuple[int, ...]:
        """The smallest image that torch accepts with this padding and that holds one window, padding included."""
        window = [r + 1 - sum(pair) for r, pair in zip(self.reach, borders(self), strict=True)]
        # A wrapped border is at most as wide as the image, a reflected one narrower by a pixel.
        border = [max(pair) + (self.padding_mode == "reflect") for pair in borders(self)]
        wraps = self.padding_mode in ("reflect", "circular")
        return tuple(max(1, w, b if wraps else 1) for w, b in zip(window, border, strict=True))

    def weight(self) -> Tensor:
        """The constrained weight, in the shape of torch's layer and in float32 or better."""
        kernels = self.construction().flatten(0, 1)
        return kernels if self.axes == 2 else kernels[:, :, 0]  # without the axis of one row

    def check_input(self, shape: Shape) -> None:
        """Raise ``ShapeError`` unless the layer accepts a sample of this shape."""
        if len(shape) != self.axes + 1 or shape[0] != self.in_channels:
            raise ShapeError(
                f"{type(self).__name__}: expected input of shape (B, {self.in_channels}{', length' * (self.axes == 1)}"
                f"{', height, width' * (self.axes == 2)}), got samples of shape {tuple(shape)}"
            )
        least, sides, kind = self.least_sides(), tuple(shape[1:]), type(self).__name__
        if self.padding_mode == "circular" and any(n % s for n, s in zip(sides, self.stride, strict=True)):
            raise ShapeError(f"{kind}: expected sides that the stride {self.stride} divides (circular), got {sides}")
        if any(n < m for n, m in zip(sides, least, strict=True)):
            raise ShapeError(f"{kind}: expected sides of at least {least} for this kernel and padding, got {sides}")

    @base.half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        self.check_input(tuple(x.shape[1:]))
        with autocast_off(x):
            weight = self.weight()
        return self.convolve(x, weight, self.bias_as(weight))

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Torch's convolution with this geometry."""
        pads, sides = tuple(before for before, _ in borders(self)), list(self._reversed_padding_repeated_twice)
        if self.padding_mode != "zeros" or any(before != after for before, after in borders(self)):
            mode, pads = "constant" if self.padding_mode == "zeros" else self.padding_mode, (0,) * self.axes
            x = circular_pad(x, sides) if mode == "circular" and x.ndim == 4 else F.pad(x, sides, mode=mode)
        function = F.conv1d if self.axes == 1 else F.conv2d
        return function(x, weight, bias, self.stride, pads, self.dilation, self.groups)

    def extra_repr(self) -> str:
        how = function_name(self.construction.orthogonalize)
        return f"{self.plain.extra_repr(self)}, constraint={self.constraint}, orthogonalize={how}"


class NativeConv2d(_Native):
    r"""``nn.Conv2d`` with a constrained kernel: its own stride, padding, dilation and groups.

    Args:
        in_channels, ..., dtype: as ``nn.Conv2d``, with its defaults (no padding); float32 or float64.
        constraint: 'aoc' (orthogonal), 'rko' (a matrix on patches) or 'aol' (rescaled taps).
        orthogonalize: of 'aoc' and 'rko', a name of ``linalg.ORTHOGONALIZE``.

    Parameters: those of the construction, one for each group in the first axis, and ``bias``.

    Guarantee:
        1-Lipschitz with zero padding of any width, without padding, and with circular padding.
        'aoc' gives more. Let :math:`s^2` be the product of the strides, and c channels of a group. All singular values
        are 1 with circular padding of dilation (k - 1) pixels in total, or up to stride - 1 fewer. Rows are orthonormal
        without padding if :math:`c_{out} \le s^2 c_{in}`, columns with zero padding of dilation (k - 1) on each side if
        :math:`c_{out} \ge s^2 c_{in}`.
        Reflecting and replicating padding copies pixels: the constant is the root of the largest number of copies of
        one pixel, so it is 2 for one reflected pixel on each side of an image.

    Raises:
        OptionError: arguments that torch refuses; an 'aoc' layer whose kernel is smaller than its stride, or whose
            dilation and stride have a common divisor; circular padding beyond one period. ShapeError: an input that
            does not fit.

    >>> NativeConv2d(8, 16, 3, stride=2, padding=1, groups=2)(torch.ones(1, 8, 6, 6)).shape
    torch.Size([1, 16, 3, 3])

    References:
        Boissin et al., ICML 2025 (AOC); Li et al., NeurIPS 2019 (BCOP, RKO); Prach & Lampert, ECCV 2022 (AOL); the
        factors of strides and dilations are derived in :mod:`lipkit.conv.patches`.
    """


class NativeConv1d(_Native):
    """:class:`NativeConv2d` for signals ``(B, in_channels, length)``.

    >>> NativeConv1d(2, 4, 5, padding=2, padding_mode="circular")(torch.ones(1, 2, 9)).shape
    torch.Size([1, 4, 9])
    """

    plain, axes = nn.Conv1d, 1


class _Transposed(_Native):
    def least_sides(self) -> tuple[int, ...]:
        """The smallest input with an output of at least one pixel."""
        axes = zip(self.dilation, self.kernel_size, self.output_padding, self.padding, self.stride, strict=True)
        # One pixel makes d (k - 1) + 1 + o - 2 p outputs, and each further one s more.
        return tuple(max(1, 1 + -((d * (k - 1) + o - 2 * p) // s)) for d, k, o, p, s in axes)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        function = F.conv_transpose1d if self.axes == 1 else F.conv_transpose2d
        return function(x, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation)


class NativeConvTranspose2d(_Transposed):
    r"""``nn.ConvTranspose2d`` with a constrained kernel: the adjoint of a :class:`NativeConv2d` with zero padding.

    Args: as ``nn.ConvTranspose2d``, and ``constraint`` and ``orthogonalize`` of :class:`NativeConv2d`.

    Guarantee:
        1-Lipschitz, as the adjoint of a contraction. With 'aoc', no padding and :math:`c_{in} \le s^2 c_{out}` it
        keeps the norm of its input.

    >>> x = torch.randn(1, 8, 3, 3)
    >>> bool(torch.isclose(NativeConvTranspose2d(8, 2, 2, stride=2, bias=False)(x).norm(), x.norm()))
    True

    References:
        Boissin et al., ICML 2025 (AOC).
    """

    plain = nn.ConvTranspose2d


class NativeConvTranspose1d(_Transposed):
    """:class:`NativeConvTranspose2d` for signals ``(B, in_channels, length)``.

    >>> NativeConvTranspose1d(4, 2, 3, stride=2, padding=1, output_padding=1)(torch.ones(1, 4, 5)).shape
    torch.Size([1, 2, 10])
    """

    plain, axes = nn.ConvTranspose1d, 1


@lipschitz_rule(NativeConv1d, NativeConv2d, NativeConvTranspose1d, NativeConvTranspose2d)
def _native(layer: _Native, input_shape: Shape | None) -> float | Tensor:
    if input_shape is not None:
        layer.check_input(input_shape)
    if layer.padding_mode not in ("reflect", "replicate"):
        return 1.0
    return root(max(padded_copies(layer, input_shape), 1))


@export_rule(NativeConv1d, NativeConv2d, NativeConvTranspose1d, NativeConvTranspose2d)
def _export_native(layer: _Native, input_shape: Shape) -> nn.Module:
    layer.check_input(input_shape)
    output_shape(layer, input_shape)
    (weight,) = exactly(layer, lambda made: [made.weight()])
    return torch_layer(layer.plain, layer, weight, layer.bias)


def aoc_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Pair,
    stride: Pair = 1,
    padding: str | Pair = "same",
    dilation: Pair = 1,
    groups: int = 1,
    bias: bool = True,
    padding_mode: str = "circular",
    device: Any = None,
    dtype: Any = None,
    **options: Any,
) -> NativeConv2d:
    """The convolution of the family AOC: an orthogonal, circular :class:`NativeConv2d` that strides natively.

    A kernel smaller than the stride grows to it, so that no pixel is lost: 1 gives a matrix on patches.
    """
    (kh, kw), step = base.simple_geometry(kernel_size, stride, dilation, groups)
    if padding_mode != "circular":
        raise OptionError(f"padding_mode: expected 'circular', got {padding_mode!r}: use lipkit.layers.NativeConv2d")
    kernel = (max(kh, step), max(kw, step))  # no pixel between the windows
    same = tuple((k - step + 1) // 2 for k in kernel)
    base.check_same(padding, same if step > 1 or all(k % 2 for k in kernel) else None, kernel)
    pads: Any = "same" if step == 1 else same  # even kernels need 'same', which torch offers for stride 1 only
    geometry = (in_channels, out_channels, kernel, step, pads, 1, 1, bias, "circular")
    return NativeConv2d(*geometry, device, dtype, **options)


AOC = Family(
    name="aoc",
    title="block convolution of projectors, then a matrix on patches: a stride of its own",
    paper="Boissin et al., ICML 2025",
    equation="BCOP, Li et al. 2019, algorithm 1, and RKO of kernel = stride",
    definition=definitions.aoc,
    conv=aoc_conv2d,
    linear=BjorckLinear,
    sizes="any kernel at most twice as large as the image",
    accepts=lambda k, h, w: k // 2 <= min(h, w),
    options={"orthogonalize": ("bjorck", "cayley")},
)
