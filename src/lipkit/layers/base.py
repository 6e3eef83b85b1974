"""The base classes of constrained layers, and the record of a family in the table of families.

A :class:`ConstrainedLinear` returns a matrix, a convolution a kernel (:class:`KernelConv2d`) or a matrix at each
frequency (:class:`SymbolConv2d`); others derive from :class:`ConstrainedConv2d` itself. Exports:
:mod:`lipkit.layers.export`. A whole family, written from beginning to end: docs/adding_a_family.md.
"""

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds import symbol_sup, symbol_sup_estimate
from lipkit.conv import Symbol, apply_symbol, circular_conv2d, downsample, fold
from lipkit.conv.patches import check_divides, patch_kernel
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.matrices import check_positive
from lipkit.linalg.precision import autocast_off, autocast_on, product_dtype
from lipkit.linalg.table import function_name
from lipkit.linalg.transforms import is_empty, with_zeros
from lipkit.modules.activations import BY_NAME, slope_restricted

__all__ = ["ConstrainedConv2d", "ConstrainedLinear", "Family", "KernelConv2d", "SymbolConv2d"]
__all__ += ["check_dtype", "check_positive", "half_through_float32", "new_bias", "slope_activation"]

Pair = int | tuple[int, int]


@dataclass(frozen=True)
class Family:
    """One way to constrain a layer: a row of :data:`lipkit.layers.families.FAMILIES`.

    Attributes:
        name: acronym, as used in recipes (``layer=cayley``).
        title: the method in words.
        paper, equation: where it comes from.
        conv, linear: constructors with the argument order of ``nn.Conv2d`` and ``nn.Linear``.
        sizes: the kernels and images it accepts, in words.
        accepts: the same as a predicate of kernel size, height and width (after downsampling).
        options: keyword options of the convolution and the values that the laws try.
        claim, slack, attained, train_gap, smooth: expectations of the laws, see `lipkit.testing.Case`.
        own_activation: whether the layers contain their activation: a model puts none after them.
        affine: constructor of the affine dense layer that ends a network, for families whose ``linear`` is not affine.
        definition: ``(layer, x) -> y``, the paper's construction in plain torch (`lipkit.layers.definitions`).
    """

    name: str
    title: str
    paper: str
    equation: str
    conv: Callable[..., nn.Module]
    linear: Callable[..., nn.Module]
    claim: str = "orthogonal"
    sizes: str = "any kernel, any image"
    accepts: Callable[[int, int, int], bool] = field(default=lambda k, h, w: True)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    slack: float = 0.0
    attained: float | None = None
    train_gap: float = 0.0
    smooth: bool = True
    own_activation: bool = False
    affine: Callable[..., nn.Module] | None = None
    definition: Callable[[Any, Tensor], Tensor] | None = None

    def last(self, in_features: int, out_features: int, **options: Any) -> nn.Module:
        """The affine dense layer of this family: the last one of a network."""
        return (self.affine or self.linear)(in_features, out_features, **options)


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise ``OptionError`` unless parameters of this dtype can be constrained (float32 or float64)."""
    dtype = dtype or torch.get_default_dtype()
    if dtype not in (torch.float32, torch.float64):
        raise OptionError(
            f"dtype: expected torch.float32 or torch.float64, got {dtype}: constraints do not hold in less; "
            "use torch.autocast around the forward pass instead"
        )


def half_through_float32(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Decorate ``forward`` so that it accepts empty batches, and inputs in bfloat16 and float16.

    Weight and products are then made in float32; the output has the dtype of the input.
    """

    @functools.wraps(forward)
    def call(layer: Any, x: Tensor) -> Tensor:
        if is_empty(x):
            return with_zeros(lambda given: call(layer, given), x)
        if x.dtype not in (torch.bfloat16, torch.float16) or autocast_on(x):  # autocast chooses a dtype itself
            return forward(layer, x)
        return forward(layer, x.float()).to(x.dtype)

    return call


def simple_geometry(kernel_size: Pair, stride: Pair, dilation: Pair, groups: int) -> tuple[tuple[int, int], int]:
    """(kh, kw) and the stride of a convolution without dilation and groups; ``OptionError`` for any other."""
    kernel, steps = ((v, v) if isinstance(v, int) else v for v in (kernel_size, stride))
    if not isinstance(kernel, tuple | list) or len(kernel) != 2:
        raise OptionError(f"kernel_size: expected one or two integers, got {kernel_size!r}")
    if not isinstance(steps, tuple | list) or len(set(steps)) != 1:
        raise OptionError(f"stride: expected one integer for both axes, got {stride!r}")
    check_positive(stride=steps[0], **{f"kernel_size[{i}]": k for i, k in enumerate(kernel)})
    for name, value in (("dilation", dilation), ("groups", groups)):
        if value not in (1, (1, 1)):
            raise OptionError(f"{name}: expected 1, got {value!r}: use lipkit.layers.NativeConv2d")
    return (kernel[0], kernel[1]), steps[0]


def check_same(padding: Any, same: tuple[int, ...] | None, kernel: tuple[int, ...]) -> None:
    """Raise ``OptionError`` unless padding is 'same' or ``same``: the amounts that keep the size, None if none do."""
    if padding != "same" and (same is None or (padding not in (same, [*same]) and (padding, padding) != same)):
        keeps = "'same'" if same is None else f"'same' or {same}"
        raise OptionError(f"padding: expected {keeps} for kernel_size {kernel}, got {padding!r}")


def slope_activation(activation: str | nn.Module) -> nn.Module:
    """The activation of this name, or a copy of this module; ``OptionError`` unless its slope is in [0, 1] everywhere.

    These do: relu, relu6, hardtanh, tanh, sigmoid, hardsigmoid, softplus, softsign, logsigmoid, softshrink, tanhshrink,
    celu, elu (alpha <= 1), leakyrelu (slope <= 1). These do not: GELU, SiLU, Mish, Hardswish, SELU, abs (slopes above 1
    or below 0), PReLU (learnable), MaxMin, GroupSort, Softmax (not elementwise), Hardshrink and Threshold (jumps).

    >>> slope_activation("tanh"), slope_activation(nn.LeakyReLU(0.1))
    (Tanh(), LeakyReLU(negative_slope=0.1))
    """
    if isinstance(activation, str) and activation in BY_NAME:
        return BY_NAME[activation]()
    if isinstance(activation, nn.Module) and slope_restricted(activation):
        return copy.deepcopy(activation)  # two layers share no parameters
    raise OptionError(
        f"activation: expected one with slope in [0, 1] ({', '.join(sorted(BY_NAME))}, or such a module), "
        f"got {activation!r}"
    )


def new_bias(out: int, fan_in: int, bias: bool, device: Any, dtype: Any) -> nn.Parameter | None:
    """A bias of ``out`` values, uniform in +-1/sqrt(fan_in) as in ``nn.Linear``, or None."""
    if not bias:
        return None
    values = torch.empty(out, device=device, dtype=dtype)
    return nn.Parameter(nn.init.uniform_(values, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in)))


NORM_TOLERANCE = 0.02  # relative, of norms that layers prove in every step: 1 % would cost 1.5 times as much
WIDE = 64  # from this width on, a proof in every step would dominate training


def always_proved(kernel: Tensor) -> bool:
    """True if training, too, divides by the proved norm: the proof is cheap, or a search is likely to miss the norm."""
    return min(kernel.shape[:2]) < WIDE or max(kernel.shape[2:]) > 3  # symbols of many taps have narrow peaks


def training_norm(kernel: Tensor) -> Tensor:
    """The norm of a kernel in training: proved, or the estimate that the proof would try first."""
    return proved_norm(kernel) if always_proved(kernel) else symbol_sup_estimate(kernel, tolerance=NORM_TOLERANCE)


def proved_norm(kernel: Tensor) -> Tensor:
    """Proved bound of a kernel's norm on every image size; equal to :func:`training_norm` if that can be proved."""
    return symbol_sup(kernel, tolerance=NORM_TOLERANCE, finer=False)


class Biased(nn.Module):
    """A layer with an optional bias."""

    bias: nn.Parameter | None

    def bias_as(self, weight: Tensor) -> Tensor | None:
        """The bias in the dtype of a weight, to be added inside its product, which is cheaper."""
        return None if self.bias is None else self.bias.to(weight.dtype)


class Constrained(Biased, ABC):
    """Base of dense layers and convolutions: free parameters, which the constructor makes once, and a bias."""

    shape: tuple[int, ...]  # of the weight: (outputs, inputs), or (outputs, inputs after downsampling, kh, kw)
    shown: tuple[str, ...] = ()  # options in ``repr``

    @abstractmethod
    def make_parameters(self, device: Any, dtype: Any, *_: Any, **options: Any) -> None:
        """Check and keep the options, and create every free parameter; called once, by ``__init__``."""

    def bias_sizes(self) -> tuple[int, int]:
        """The number of biases, by default one for each output; and the fan-in, which sets their initial size."""
        return self.shape[0], math.prod(self.shape[1:])

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in self.shown}
        options = "".join(f", {k}={function_name(v) if callable(v) else repr(v)}" for k, v in values.items())
        return f"bias={self.bias is not None}{options}"


class DenseLayer(Constrained):
    """A layer from ``(..., in_features)`` to ``(..., out_features)``; arguments: see :class:`ConstrainedLinear`."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, **own: Any
    ) -> None:
        super().__init__()
        check_positive(in_features=in_features, out_features=out_features)
        check_dtype(dtype)
        self.in_features, self.out_features, self.shape = in_features, out_features, (out_features, in_features)
        self.make_parameters(device, dtype, **own)
        self.register_parameter("bias", new_bias(*self.bias_sizes(), bias, device, dtype))

    def check_input(self, shape: Sequence[int]) -> None:
        """Raise ``ShapeError`` unless the layer accepts inputs of this shape."""
        if tuple(shape[-1:]) != (self.in_features,):
            kind, got = type(self).__name__, tuple(shape)
            raise ShapeError(f"{kind}: expected input of shape (..., {self.in_features}), got {got}")

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {super().extra_repr()}"


class ConstrainedLinear(DenseLayer):
    """A dense layer ``y = Q x + b`` whose matrix Q obeys a constraint by construction.

    A subclass makes its parameters in :meth:`make_parameters` and returns Q from :meth:`weight`.

    Args:
        in_features, out_features, bias, device: as ``nn.Linear``.
        dtype: of the parameters, float32 or float64.
        own: keyword options of the subclass, handed to :meth:`make_parameters`.
    """

    @abstractmethod
    def weight(self) -> Tensor:
        """The constrained matrix ``(out_features, in_features)``, in float32 or better."""

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x.shape)
        with autocast_off(x):
            q = self.weight()
        return F.linear(x, q, self.bias_as(q))  # under autocast, the product alone is in its dtype


class ConstrainedConv2d(Constrained):
    """A circular, size-preserving convolution with emulated stride whose norm is constrained by construction.

    A subclass makes its parameters in :meth:`make_parameters` and computes its output in ``forward``.

    Args:
        in_channels, out_channels, kernel_size: as ``nn.Conv2d``; the kernel may be as large as the image or larger.
        stride: s, emulated by an invertible downsampling; ``kernel_size`` applies after it, so that the kernel acts
            on s^2 in_channels (``inner_channels``).
        padding: 'same', or the integer that preserves the size.
        dilation, groups: 1.
        padding_mode: 'circular', or another of ``padding_modes`` (odd kernels).
        bias, device, dtype, own: as :class:`ConstrainedLinear`.

    Shapes:
        ``(B, in_channels, H, W) -> (B, out_channels, H / s, W / s)``, any H and W that s divides.

    Raises:
        OptionError: an argument that is not supported. ShapeError: an input that does not fit.
    """

    padding_modes: tuple[str, ...] = ("circular",)
    needs_odd: str = ""  # the reason why both sizes of the kernel must be odd; empty if they need not

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: str | Pair = "same",
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: Any = None,
        dtype: Any = None,
        **own: Any,
    ) -> None:
        super().__init__()
        kernel, step = simple_geometry(kernel_size, stride, dilation, groups)
        check_positive(in_channels=in_channels, out_channels=out_channels)
        check_dtype(dtype)
        odd = all(k % 2 for k in kernel)  # an even kernel needs one more pixel of padding on one side
        if self.needs_odd and not odd:
            raise OptionError(f"kernel_size: expected odd sizes ({self.needs_odd}), got {kernel}")
        modes = self.padding_modes if odd else ("circular",)
        if padding_mode not in modes:
            allowed = " or ".join(map(repr, modes))
            raise OptionError(f"padding_mode: expected {allowed}, got {padding_mode!r}: use lipkit.layers.NativeConv2d")
        same = tuple((k - 1) // 2 for k in kernel) if odd else None  # an integer pads both sides alike
        check_same(padding, same, kernel)
        self.in_channels, self.out_channels, self.padding_mode = in_channels, out_channels, padding_mode
        # Downsampling moves each s x s patch into the channels.
        self.kernel_size, self.stride, self.inner_channels = kernel, step, in_channels * step**2
        self.shape = (out_channels, self.inner_channels, *kernel)
        self.make_parameters(device, dtype, **own)
        self.register_parameter("bias", new_bias(*self.bias_sizes(), bias, device, dtype))

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        return f"{sizes}, {super().extra_repr()}"

    @property
    def pointwise(self) -> bool:
        """True for a 1 x 1 kernel: one matrix then serves every frequency, and every s x s patch of the image."""
        return self.kernel_size == (1, 1)

    def check_input(self, x: Tensor) -> None:
        """Raise ``ShapeError`` unless the layer accepts ``x``."""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ShapeError(
                f"{type(self).__name__}: expected input of shape (B, {self.in_channels}, H, W), got {tuple(x.shape)}"
            )
        check_divides(x.shape[-2], x.shape[-1], self.stride)

    def resample(self, x: Tensor) -> Tensor:
        """The input after invertible downsampling, its shape checked."""
        self.check_input(x)
        return downsample(x, self.stride)

    def fitted(self, kernel: Tensor, height: int, width: int) -> Tensor:
        """A kernel as it acts on this image size: on a circular image, taps that meet after a full turn are added."""
        return fold(kernel, height, width) if self.padding_mode == "circular" else kernel

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """The size-preserving convolution with the padding of this layer."""
        kernel = self.fitted(kernel, *x.shape[-2:])
        if self.padding_mode == "circular":
            return circular_conv2d(x, kernel, bias)
        return F.conv2d(x, kernel, bias, padding="same")  # zeros, and an odd kernel

    def on_patches(self, x: Tensor, matrix: Tensor) -> Tensor:
        """``matrix`` (out_channels, s^2 in_channels) on each patch, plus bias: a layer with a 1 x 1 kernel."""
        # A strided convolution reads the patches in place, without downsampling.
        return F.conv2d(x, patch_kernel(matrix, self.stride), self.bias_as(matrix), stride=self.stride)

    def add_bias(self, y: Tensor) -> Tensor:
        """``y`` plus the bias of each channel, if there is one."""
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]  # (C, 1, 1): along the channels


class SymbolConv2d(ConstrainedConv2d):
    """A convolution constrained at each frequency: a subclass returns its :meth:`symbol` for an image size."""

    @abstractmethod
    def symbol(self, height: int, width: int) -> Symbol:
        """The constrained symbol on ``height x width`` (after downsampling), in float32 or better."""

    def matrix(self) -> Tensor:
        """The matrix (out_channels, s^2 in_channels) of a 1 x 1 kernel, the same at every frequency."""
        return self.symbol(1, 1).real[0]  # frequency 0, of an image of one pixel

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if self.pointwise:
            self.check_input(x)
            with autocast_off(x):
                matrix = self.matrix()
            return self.on_patches(x.to(product_dtype(x, matrix.dtype)), matrix)
        x = self.resample(x)
        with autocast_off(x):
            symbol = self.symbol(*x.shape[-2:])
        return apply_symbol(symbol, x.to(product_dtype(x, symbol.real.dtype)), bias=self.bias_as(symbol.real))


class KernelConv2d(ConstrainedConv2d):
    """A convolution whose constrained object is a kernel: a subclass returns it from :meth:`kernel`."""

    @abstractmethod
    def kernel(self) -> Tensor:
        """The constrained kernel ``(out_channels, inner_channels, kh, kw)``, in float32 or better."""

    def kernel_in_use(self) -> Tensor:
        """The kernel of a forward pass; in training a subclass may skip a proof that would dominate the time."""
        return self.kernel()

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        with autocast_off(x):
            kernel = self.kernel() if self.pointwise else self.kernel_in_use()  # one tap is proved cheaply
        if self.pointwise:
            return self.on_patches(x, kernel.flatten(1))
        return self.convolve(downsample(x, self.stride), kernel, self.bias_as(kernel))
