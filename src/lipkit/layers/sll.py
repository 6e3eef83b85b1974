r"""SLL and CPL: residual layers :math:`y = x - F^* \Lambda\, \sigma(F x + b)` with slopes :math:`\sigma'` in [0, 1].

They are 1-Lipschitz if the positive diagonal :math:`\Lambda` has :math:`\|\Lambda^{1/2} F\|^2 \le 2` (Araujo et al.,
ICLR 2023, theorem 1). SLL and CPL differ in how they find :math:`\Lambda`.
"""

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds import spectral_norm
from lipkit.conv import adjoint
from lipkit.conv.block import autocorrelation
from lipkit.errors import ShapeError
from lipkit.layers import base, definitions
from lipkit.layers.aol import where_positive
from lipkit.layers.base import Family
from lipkit.layers.cayley import CayleyLinear
from lipkit.layers.export import circular_module, linear_module, resampled_size, stride_modules
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.modules import Shape, export_rule, lipschitz_rule
from lipkit.modules.registry import export_part
from lipkit.modules.sandwich import SlopeResidual
from lipkit.modules.views import Pad


class SlopeResidualLayer(base.Constrained):
    """Base: ``x - F^* Lambda act(F x + b)``; missing inputs are zeros, surplus outputs are dropped."""

    def make_parameters(
        self, device: Any, dtype: Any, *, hidden: int | None = None, activation: str | nn.Module = "relu"
    ) -> None:
        self.activation = base.slope_activation(activation)
        self.inner = max(self.shape[:2])
        self.hidden = self.inner if hidden is None else hidden
        base.check_positive(hidden=self.hidden)
        free = torch.empty(self.hidden, self.inner, *self.shape[2:], device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.xavier_normal_(free))  # as in the papers: singular values spread below 1

    def bias_sizes(self) -> tuple[int, int]:
        return self.hidden, math.prod(self.shape[1:]) if self.shape[2:] else self.inner  # inside the layer, after F

    @abstractmethod
    def multiplier(self, proved: bool = True) -> Tensor:
        """Diagonal of Lambda ``(hidden,)`` for every image size, in float32 or better.

        ``proved=False`` allows, in training, an unproved estimate where a proof would dominate the time of a step.
        """


class SlopeResidualLinear(SlopeResidualLayer, base.DenseLayer):
    """Base of the dense SLL and CPL layers: F is a matrix."""

    shown = ("hidden",)

    @base.half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x.shape)
        with autocast_off(x):
            free, multiplier = at_least_float32(self.free), self.multiplier()
            x = F.pad(x.to(free.dtype), [0, self.inner - self.in_features])
            inside = self.activation(F.linear(x, free, self.bias_as(free)))
            # Lambda scales the rows of F; transposed, this is F^T Lambda.
            y = x - F.linear(inside, (multiplier[:, None] * free).mT)
        return y[..., : self.out_features]


class SlopeResidualConv2d(SlopeResidualLayer, base.ConstrainedConv2d):
    """Base of the SLL and CPL convolutions: F is a convolution, applied once itself and once as its adjoint."""

    # Zero padding takes a part of the convolution F of the plane and, for odd kernels, the same part of F^*.
    padding_modes = ("circular", "zeros")
    needs_odd, shown = "the adjoint must be centred", ("padding_mode",)

    @base.half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        x = self.resample(x)
        with autocast_off(x):
            kernel, multiplier = at_least_float32(self.free), self.multiplier(not self.training)
            x = x.to(kernel.dtype)
            if self.inner != self.inner_channels:
                x = F.pad(x, [0, 0, 0, 0, 0, self.inner - self.inner_channels])  # axes from the last one: channels
            inside = self.activation(self.convolve(x, kernel, self.bias_as(kernel)))
            y = x - self.convolve(inside, adjoint(multiplier[:, None, None, None] * kernel))
        return y[:, : self.out_channels]


def cpl_multiplier(norm: Tensor, hidden: int, like: Tensor) -> Tensor:
    r"""Diagonal :math:`\Lambda = 2 / \|F\|^2 \cdot I` from a proved upper bound of the norm.

    An estimate from below is not enough: a norm that is 3 % too small already gives a layer of norm 1.13.
    """
    # Clamped, so that a norm near 0 gives no infinity.
    exact = (2 * where_positive(torch.reciprocal, norm.square())).clamp_max(torch.finfo(like.dtype).max)
    made = exact.to(like.dtype)
    # Rounded down: among subnormal numbers, the nearest one can be larger by a half.
    below = torch.nextafter(made.detach(), torch.zeros_like(made))
    return (made - torch.where(made.detach() > exact.detach(), made.detach() - below, 0)).expand(hidden)


class Sll(SlopeResidualLayer):
    """Base of the SLL layers: the multiplier Lambda with a learnable q."""

    def make_parameters(self, device: Any, dtype: Any, *_: Any, **options: Any) -> None:
        super().make_parameters(device, dtype, **options)
        self.log_q = nn.Parameter(torch.zeros(self.hidden, device=device, dtype=dtype))

    def multiplier(self, proved: bool = True) -> Tensor:
        r""":math:`\Lambda = 2 T^{-1}`, :math:`T_{ii} = \sum_j |F F^*|_{ij}\, q_j / q_i`, summed over the taps.

        :math:`T - F F^*` is diagonally dominant after scaling by q, hence positive semidefinite.
        """
        free, log_q = at_least_float32(self.free), at_least_float32(self.log_q)
        if free.ndim == 2:
            magnitudes = (free @ free.mT).abs()
        else:  # with channels exchanged, the autocorrelation F* F is that of F F*
            magnitudes = autocorrelation(free.transpose(0, 1)).abs().sum((-2, -1))
        ratio = (log_q[None, :] - log_q[:, None]).exp()  # q_j / q_i, without overflow of either
        return 2 * where_positive(torch.reciprocal, (magnitudes * ratio).sum(1))


class Cpl(SlopeResidualLayer):
    """Base of the CPL layers: the multiplier Lambda from a bound of the norm of F."""

    def multiplier(self, proved: bool = True) -> Tensor:
        free = at_least_float32(self.free)
        norm = spectral_norm if free.ndim == 2 else base.proved_norm if proved else base.training_norm
        return cpl_multiplier(norm(free), self.hidden, free)


class SllLinear(Sll, SlopeResidualLinear):
    r"""SDP-based Lipschitz layer, dense: :math:`y = x - 2 F^\top T^{-1} \sigma(F x + b)`.

    Args: as ``nn.Linear``; ``hidden``: rows of F (default max(in, out)); ``activation``: slope in [0, 1].
    Parameters ``free`` F (hidden, n), ``log_q`` (hidden,), ``bias`` (hidden,), n = max(in, out).

    Guarantee:
        1-Lipschitz, by construction (T: :meth:`multiplier`).

    >>> SllLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Araujo et al., ICLR 2023, theorem 3 and equation 8.
    """


class CplLinear(Cpl, SlopeResidualLinear):
    r"""Convex potential layer, dense: :math:`y = x - \tfrac{2}{\|F\|^2} F^\top \sigma(F x + b)`.

    Args: as :class:`SllLinear`. Parameters ``free`` F (hidden, n) and ``bias`` (hidden,), n = max(in, out).

    Guarantee:
        1-Lipschitz: each forward pass proves an upper bound of the norm, so the bound never lags behind the weights.

    >>> CplLinear(3, 5)(torch.ones(2, 3)).shape
    torch.Size([2, 5])

    References:
        Meunier et al., ICML 2022, equation 8.
    """


class SllConv2d(Sll, SlopeResidualConv2d):
    r"""SDP-based Lipschitz layer, convolution of odd kernel size: :math:`y = x - 2 F^* T^{-1} \sigma(F x + b)`.

    Args: as ``nn.Conv2d`` (stride by invertible downsampling, 'same' padding, circular or with zeros); ``hidden``:
    channels of F (default max of the two); ``activation``: slope in [0, 1]. Parameters ``free`` F, ``log_q``, ``bias``.

    Guarantee:
        1-Lipschitz for every image size (T: :meth:`multiplier`).

    >>> SllConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        Araujo et al., ICLR 2023, theorem 3.
    """


class CplConv2d(Cpl, SlopeResidualConv2d):
    r"""Convex potential layer, convolution of odd kernel size: :math:`y = x - \tfrac{2}{\|F\|^2} F^* \sigma(F x + b)`.

    Args: as :class:`SllConv2d`. Parameters ``free`` F and ``bias`` (hidden,).

    Guarantee:
        1-Lipschitz for every image size: the norm is proved, within 2 % of the supremum over all frequencies; training
        steps have the exception of :class:`LiResConv2d`.

    >>> CplConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        Meunier et al., ICML 2022, equation 8.
    """


lipschitz_rule(SllLinear, CplLinear, SllConv2d)(1.0)


@lipschitz_rule(CplConv2d)
@torch.no_grad()
def _cpl(layer: CplConv2d, input_shape: Shape | None) -> float:
    if base.always_proved(layer.free) or not layer.training:
        return 1.0
    # I - m F* D F is Hermitian, between 1 - m ||F||^2 and 1, and the proved multiplier p has p ||F||^2 <= 2.
    proved, used = (float(m.amax()) for m in (layer.multiplier(), layer.multiplier(proved=False)))
    if used <= proved:
        return 1.0
    return (2 * used / proved - 1) * (1 + 1e-15) if proved > 0 else math.inf  # |1 - used ||F||^2|


@export_rule(SllLinear, CplLinear, SllConv2d, CplConv2d)
def _export(layer: SlopeResidualLinear | SlopeResidualConv2d, input_shape: Shape) -> nn.Module:
    """A `SlopeResidual` of the linear maps F and -F^* Lambda, with kernels as they act on this image size."""
    free, multiplier = at_least_float32(layer.free), layer.multiplier()
    first: nn.Module
    second: nn.Module
    if isinstance(layer, SlopeResidualLinear):
        if input_shape != (layer.in_features,):
            raise ShapeError(f"{type(layer).__name__}: expected input_shape ({layer.in_features},), got {input_shape}")
        first, second = linear_module(free, layer.bias), linear_module(-(multiplier[:, None] * free).mT, None)
        axes, resampled = 0, list[nn.Module]()
    else:
        size = resampled_size(layer, input_shape)
        back = layer.fitted(adjoint(-multiplier[:, None, None, None] * free), *size)
        first = circular_module(layer.fitted(free, *size), layer.bias, layer.padding_mode)
        second, axes = circular_module(back, None, layer.padding_mode), 2
        resampled = stride_modules(layer)
    block = SlopeResidual(first, export_part(layer.activation, (1,)), second, multiplier)
    (after, before), inner = layer.shape[:2], layer.inner
    # Zero channels are appended to the input, and surplus channels of the output dropped (negative: cut).
    head, tail = (Pad(*[0, 0] * axes, 0, more) for more in (inner - before, after - inner))
    return nn.Sequential(*resampled, *([head] if before != inner else []), block, *([tail] if after != inner else []))


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

CPL = replace(
    SLL,
    name="cpl",
    title="Residual around an activation, weight used twice, divided by its squared norm",
    paper="Meunier et al., ICML 2022",
    equation="equation 8",
    definition=definitions.cpl,
    conv=CplConv2d,
    linear=CplLinear,
)
