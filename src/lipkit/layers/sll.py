r"""SLL and CPL: 1-Lipschitz residual layers whose weight is used twice, around a slope-restricted activation.

Both are :math:`y = x - F^* \Lambda\, \sigma(F x + b)` with a positive diagonal :math:`\Lambda` such that
:math:`\|\Lambda^{1/2} F\|^2 \le 2`; they differ in how the diagonal is found. For slopes in [0, 1] the derivative is
:math:`I - F^*\Lambda D F` with :math:`0 \le D \le I`, a symmetric-like map of norm at most 1 in the sense of the LMI of
Araujo et al., ICLR 2023, theorem 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds import spectral_norm
from lipkit.conv import adjoint
from lipkit.conv.block import autocorrelation
from lipkit.errors import OptionError, ShapeError
from lipkit.layers import definitions
from lipkit.layers.base import (
    Biased,
    ConstrainedConv2d,
    Family,
    always_proved,
    check_dtype,
    check_positive,
    half_through_float32,
    new_bias,
    proved_norm,
    slope_activation,
    training_norm,
)
from lipkit.layers.cayley import CayleyLinear
from lipkit.layers.export import circular_module, resampled_size, stride_modules
from lipkit.layers.sandwich import plain_activation
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.modules import Shape, export_rule, lipschitz_rule
from lipkit.modules.sandwich import SlopeResidual
from lipkit.modules.views import Pad


class SlopeResidualLinear(Biased, ABC):
    """Dense ``x - F^T Lambda act(F x + b)``; missing inputs are zeros, surplus outputs are dropped."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        hidden: int | None = None,
        activation: str | nn.Module = "relu",
    ) -> None:
        super().__init__()
        self.inner = max(in_features, out_features)
        self.hidden = self.inner if hidden is None else hidden
        check_positive(in_features=in_features, out_features=out_features, hidden=self.hidden)
        check_dtype(dtype)
        self.in_features, self.out_features = in_features, out_features
        self.activation = slope_activation(activation)
        # Like the papers' initialisations, this spreads the singular values below 1.
        free = torch.empty(self.hidden, self.inner, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.xavier_normal_(free))
        self.make_multiplier(device, dtype)
        self.register_parameter("bias", new_bias(self.hidden, self.inner, bias, device, dtype))

    def make_multiplier(self, device: Any, dtype: Any) -> None:
        """Create what the multiplier needs besides the weight; nothing by default."""

    @abstractmethod
    def multiplier(self) -> Tensor:
        """Diagonal of Lambda ``(hidden,)``, in float32 or better."""

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ShapeError(
                f"{type(self).__name__}: expected input of shape (..., {self.in_features}), got {tuple(x.shape)}"
            )
        with autocast_off(x):
            free, multiplier = at_least_float32(self.free), self.multiplier()
            x = F.pad(x.to(free.dtype), [0, self.inner - self.in_features])
            inside = self.activation(F.linear(x, free, self.bias_as(free)))
            # Lambda scales the rows of F; transposed, this is F^T Lambda.
            y = x - F.linear(inside, (multiplier[:, None] * free).mT)
        return y[..., : self.out_features]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, hidden={self.hidden}, bias={self.bias is not None}"


class SlopeResidualConv2d(ConstrainedConv2d):
    """``x - F^* (Lambda act(F x + b))`` by convolutions; missing inputs are zeros, surplus outputs are dropped."""

    # Zero padding takes a part of the convolution F of the plane and, for odd kernels, the same part of F^*.
    padding_modes = ("circular", "zeros")

    def make_parameters(
        self, device: Any, dtype: Any, *, hidden: int | None = None, activation: str | nn.Module = "relu"
    ) -> None:
        if any(k % 2 == 0 for k in self.kernel_size):
            raise OptionError(f"kernel_size: expected odd sizes, got {self.kernel_size}: the adjoint must be centred")
        self.activation = slope_activation(activation)
        self.inner = max(self.inner_channels, self.out_channels)
        self.hidden = self.inner if hidden is None else hidden
        check_positive(hidden=self.hidden)
        free = torch.empty(self.hidden, self.inner, *self.kernel_size, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.xavier_normal_(free))
        self.make_multiplier(device, dtype)

    def bias_channels(self) -> int:
        return self.hidden

    def make_multiplier(self, device: Any, dtype: Any) -> None:
        """Create what the multiplier needs besides the kernel; nothing by default."""

    @abstractmethod
    def multiplier(self) -> Tensor:
        """Diagonal of Lambda ``(hidden,)``, which holds for every image size, in float32 or better."""

    def training_multiplier(self) -> Tensor:
        """The diagonal in training mode; it differs only where a proof per step would dominate training."""
        return self.multiplier()

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        x = self.resample(x)
        with autocast_off(x):
            kernel = at_least_float32(self.free)
            multiplier = self.training_multiplier() if self.training else self.multiplier()
            x = x.to(kernel.dtype)
            if self.inner != self.inner_channels:
                x = F.pad(x, [0, 0, 0, 0, 0, self.inner - self.inner_channels])
            inside = self.activation(self.convolve(x, kernel, self.bias_as(kernel)))
            y = x - self.convolve(inside, adjoint(multiplier[:, None, None, None] * kernel))
        return y[:, : self.out_channels]


def export_residual_linear(layer: SlopeResidualLinear, input_shape: Shape) -> nn.Module:
    """The layer as two ``nn.Linear`` around its activation."""
    if input_shape != (layer.in_features,):
        raise ShapeError(f"{type(layer).__name__}: expected input_shape ({layer.in_features},), got {input_shape}")
    free, multiplier = at_least_float32(layer.free), layer.multiplier()
    first = nn.Linear(layer.inner, layer.hidden, layer.bias is not None, device=free.device, dtype=free.dtype)
    second = nn.Linear(layer.hidden, layer.inner, False, device=free.device, dtype=free.dtype)
    first.weight.copy_(free)
    if layer.bias is not None:
        first.bias.copy_(layer.bias)
    second.weight.copy_(-(multiplier[:, None] * free).mT)
    block = SlopeResidual(first, plain_activation(layer.activation), second, multiplier)
    return _resized(layer.in_features, layer.inner, layer.out_features, block, 0)


def export_residual_conv(layer: SlopeResidualConv2d, input_shape: Shape) -> nn.Module:
    """The layer at one image size as two convolutions around its activation, after its downsampling."""
    size = resampled_size(layer, input_shape)
    kernel, multiplier = at_least_float32(layer.free), layer.multiplier()
    back = layer.fitted(adjoint(-multiplier[:, None, None, None] * kernel), *size)
    first = circular_module(layer.fitted(kernel, *size), layer.bias, layer.padding_mode)
    second = circular_module(back, None, layer.padding_mode)
    block = SlopeResidual(first, plain_activation(layer.activation), second, multiplier)
    resized = _resized(layer.inner_channels, layer.inner, layer.out_channels, block, 2)
    return nn.Sequential(*stride_modules(layer), resized)


def _resized(before: int, inner: int, after: int, block: nn.Module, axes: int) -> nn.Sequential:
    """A block with zero channels appended to its input and surplus channels dropped from its output."""
    head, tail = (Pad(*[0, 0] * axes, 0, more) for more in (inner - before, after - inner))
    return nn.Sequential(*([head] if before != inner else []), block, *([tail] if after != inner else []))


def safe_reciprocal(t: Tensor) -> Tensor:
    """``1 / t``, and 0 (with gradient 0) where t is 0: a zero row of F adds nothing, whatever its multiplier.

    >>> safe_reciprocal(torch.tensor([4.0, 0.0])).tolist()
    [0.25, 0.0]
    """
    positive = t > 0
    return torch.where(positive, 1 / torch.where(positive, t, torch.ones_like(t)), torch.zeros_like(t))


def sll_multiplier(magnitudes: Tensor, log_q: Tensor) -> Tensor:
    r"""Diagonal :math:`\Lambda = 2 T^{-1}`, :math:`T_{ii} = \sum_j |F F^*|_{ij}\, q_j / q_i`.

    Args:
        magnitudes: ``(h, h)``: absolute values of :math:`F F^*`, for a convolution summed over its taps.
        log_q: ``(h,)``: logarithm of the free positive vector q.

    Returns:
        ``(h,)``. :math:`T - F F^*` is diagonally dominant after scaling by q, hence positive semidefinite.

    >>> sll_multiplier(torch.tensor([[4.0, 0.0], [0.0, 1.0]]), torch.zeros(2)).tolist()
    [0.5, 2.0]

    References:
        Araujo et al., ICLR 2023, theorem 3 (SLL).
    """
    ratio = (log_q[None, :] - log_q[:, None]).exp()
    return 2 * safe_reciprocal((magnitudes * ratio).sum(1))


def cpl_multiplier(norm: Tensor, hidden: int, like: Tensor) -> Tensor:
    r"""Diagonal :math:`\Lambda = 2 / \|F\|^2 \cdot I` from a proved upper bound of the norm.

    An estimate from below is not enough: a norm that is 3 % too small already gives a layer of norm 1.13. The result is
    rounded down: in the subnormal range the nearest number can be larger by a half.

    >>> cpl_multiplier(torch.tensor(2.0, dtype=torch.float64), 2, torch.zeros(1)).tolist()
    [0.5, 0.5]

    References:
        Meunier et al., ICML 2022 (CPL), equation 8.
    """
    exact = (2 * safe_reciprocal(norm.square())).clamp_max(torch.finfo(like.dtype).max)
    made = exact.to(like.dtype)
    below = torch.nextafter(made.detach(), torch.zeros_like(made))
    return (made - torch.where(made.detach() > exact.detach(), made.detach() - below, 0)).expand(hidden)


class SllLinear(SlopeResidualLinear):
    r"""SDP-based Lipschitz layer, dense: :math:`y = x - 2 F^\top T^{-1} \sigma(F x + b)`.

    Args: as ``nn.Linear``; ``hidden``: rows of F (default max(in, out)); ``activation``: slope in [0, 1].
    Parameters ``free`` F (hidden, n), ``log_q`` (hidden,), ``bias`` (hidden,), n = max(in, out).

    Guarantee:
        1-Lipschitz, by construction.

    Raises:
        OptionError: an activation whose slope leaves [0, 1] (MaxMin, GELU, ...), sizes below 1.

    >>> SllLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Araujo et al., ICLR 2023, theorem 3 and equation 8.
    """

    def make_multiplier(self, device: Any, dtype: Any) -> None:
        self.log_q = nn.Parameter(torch.zeros(self.hidden, device=device, dtype=dtype))

    def multiplier(self) -> Tensor:
        free = at_least_float32(self.free)
        return sll_multiplier((free @ free.mT).abs(), at_least_float32(self.log_q))


class CplLinear(SlopeResidualLinear):
    r"""Convex potential layer, dense: :math:`y = x - \tfrac{2}{\|F\|^2} F^\top \sigma(F x + b)`.

    The norm is a proved upper bound, computed at each forward pass, so it never lags behind the weights.

    Args: as ``nn.Linear``; ``hidden``: rows of F (default max(in, out)); ``activation``: slope in [0, 1].
    Parameters ``free`` F (hidden, n) and ``bias`` (hidden,), n = max(in, out).

    Guarantee:
        1-Lipschitz, by construction.

    Raises:
        OptionError: an activation whose slope leaves [0, 1], sizes below 1.

    >>> CplLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Meunier et al., ICML 2022, equation 8.
    """

    def multiplier(self) -> Tensor:
        free = at_least_float32(self.free)
        return cpl_multiplier(spectral_norm(free), self.hidden, free)


class SllConv2d(SlopeResidualConv2d):
    """SDP-based Lipschitz layer, convolution of odd kernel size.

    Args: as ``nn.Conv2d`` (stride by invertible downsampling, 'same' padding, circular or with zeros); ``hidden``:
    channels of F (default max of the two); ``activation``: slope in [0, 1]. Parameters ``free`` F, ``log_q`` and
    ``bias`` (hidden,).

    Guarantee:
        1-Lipschitz for every image size.

    Raises:
        OptionError: an even kernel, an activation whose slope leaves [0, 1].

    >>> SllConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        Araujo et al., ICLR 2023, theorem 3.
    """

    def make_multiplier(self, device: Any, dtype: Any) -> None:
        self.log_q = nn.Parameter(torch.zeros(self.hidden, device=device, dtype=dtype))

    def multiplier(self) -> Tensor:
        # The autocorrelation is that of F* F; with channels exchanged, that of F F*.
        outputs = autocorrelation(at_least_float32(self.free).transpose(0, 1))
        return sll_multiplier(outputs.abs().sum((-2, -1)), at_least_float32(self.log_q))


class CplConv2d(SlopeResidualConv2d):
    """Convex potential layer, convolution of odd kernel size.

    Args: as ``nn.Conv2d`` (stride by invertible downsampling, 'same' padding, circular or with zeros); ``hidden``:
    channels of F (default max of the two); ``activation``: slope in [0, 1]. Parameters ``free`` F and ``bias``
    (hidden,).

    Guarantee:
        1-Lipschitz for every image size: the norm is proved, within 2 % of the supremum over all frequencies. One
        exception: in training mode, kernels of up to 3 x 3 taps with 64 channels and more take the number that the
        proof tries first (:func:`lipkit.bounds.symbol_sup_estimate`). Weights are the same, bit for bit, unless its
        search misses the supremum by more than 2 %. Then this step has a larger constant, which ``lipschitz`` proves.
        Evaluation and exports always have the proved weights.

    Cost:
        One :func:`lipkit.bounds.symbol_sup` per forward pass: some hundred Cholesky factorisations of the smaller
        channel number, whatever the image. A training step without proof takes a search and one singular vector.

    Raises:
        OptionError: an even kernel, an activation whose slope leaves [0, 1].

    >>> CplConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        Meunier et al., ICML 2022, equation 8.
    """

    def multiplier(self) -> Tensor:
        free = at_least_float32(self.free)
        return cpl_multiplier(proved_norm(free), self.hidden, free)

    def training_multiplier(self) -> Tensor:
        free = at_least_float32(self.free)
        return cpl_multiplier(training_norm(free), self.hidden, free)


lipschitz_rule(SllLinear, CplLinear, SllConv2d)(1.0)


@lipschitz_rule(CplConv2d)
@torch.no_grad()
def _cpl(layer: CplConv2d, input_shape: Shape | None) -> float:
    if always_proved(layer.free) or not layer.training:
        return 1.0
    # I - m F* D F is Hermitian, between 1 - m ||F||^2 and 1, and the proved multiplier p has p ||F||^2 <= 2.
    proved, used = (float(m.amax()) for m in (layer.multiplier(), layer.training_multiplier()))
    if used <= proved:
        return 1.0
    return (2 * used / proved - 1) * (1 + 1e-15) if proved > 0 else math.inf


export_rule(SllLinear, CplLinear)(export_residual_linear)
export_rule(SllConv2d, CplConv2d)(export_residual_conv)

SLL = Family(
    name="sll",
    title="Residual around an activation, weight used twice, diagonal bound",
    paper="Araujo et al., ICLR 2023",
    equation="theorem 3",
    definition=definitions.sll,
    conv=SllConv2d,
    linear=SllLinear,
    claim="contraction",
    smooth=False,
    sizes="odd kernels, any image",
    accepts=lambda k, h, w: k % 2 == 1,
    options={"activation": ("relu", "tanh"), "hidden": (4, 6)},
    own_activation=True,
    affine=CayleyLinear,
)

CPL = Family(
    name="cpl",
    title="Residual around an activation, weight used twice, divided by its squared norm",
    paper="Meunier et al., ICML 2022",
    equation="equation 8",
    definition=definitions.cpl,
    conv=CplConv2d,
    linear=CplLinear,
    claim="contraction",
    smooth=False,
    sizes="odd kernels, any image",
    accepts=lambda k, h, w: k % 2 == 1,
    options={"activation": ("relu", "tanh"), "hidden": (4, 6)},
    own_activation=True,
    affine=CayleyLinear,
)
