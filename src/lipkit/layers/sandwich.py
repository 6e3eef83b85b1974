r"""Sandwich layers: a linear map, an activation with slope in [0, 1] and another map, together 1-Lipschitz [LBDN]."""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv.cayley_conv import solve_form, solves_pay
from lipkit.conv.normal_matrices import normal_matrices_of, prepare
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers._base import half_through_float32
from lipkit.layers._export import export_linear, in_float64, placed_like
from lipkit.layers.activations import slope_activation
from lipkit.layers.cayley import rescaled
from lipkit.layers.cayley_pair import CayleyPairLinear
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.modules import SandwichBlock, Shape, export_rule, guard, lipschitz_rule
from lipkit.modules.activations import slope_restricted

SQRT2 = math.sqrt(2.0)


class SandwichLinear(CayleyPairLinear):
    r"""Dense layer with its activation inside, :math:`y = \sqrt2 A^\top \Psi\, \sigma(\sqrt2 \Psi^{-1} B x + b)`.

    .. math:: [A^\top; B^\top] = \mathrm{cayley}([X; Y]),\quad X = g X'/\|X'\|_F,\quad Y = h Y'/\|Y'\|_F,\quad
              \Psi = \mathrm{diag}(e^d)

    Without activation it is the linear form :math:`y = 2 A^\top B x + b`, which reaches every :math:`\|W\|_2 \le 1`.

    Args:
        in_features, out_features, bias: as ``nn.Linear``; the hidden width is ``out_features``.
        device, dtype: of the parameters (float32 or float64).
        activation: name or module of a scalar activation with slope in [0, 1] (:func:`slope_activation`), or None for
            the linear form. Put no other activation after the layer than one that is 1-Lipschitz.

    Parameters ``x_free`` X' (out_features, out_features), ``y_free`` Y' (in_features, out_features), ``x_scale`` g,
    ``y_scale`` h (0-d), ``log_psi`` d (out_features; not in the linear form) and ``bias``.

    Guarantee:
        1-Lipschitz. Exports as a :class:`lipkit.modules.SandwichBlock` whose bound is proved from its numbers with the
        multiplier :math:`\Psi^2`; the linear form as one ``nn.Linear``.

    Cost:
        One inverse of size out_features per forward pass; for large layers and a smaller batch LU factors, and solves
        for the batch (``lipkit.conv.cayley_conv``).

    Raises:
        OptionError: sizes below 1, another dtype, an activation that does not qualify (MaxMin inside a sandwich
            layer reaches norm 2 and more).

    >>> layer = SandwichLinear(3, 5, activation="tanh")
    >>> x = torch.randn(2, 3)
    >>> y = layer(x)
    >>> y.shape, bool((y[0] - y[1]).norm() <= (x[0] - x[1]).norm())
    (torch.Size([2, 5]), True)

    References:
        [LBDN] Wang & Manchester, ICML 2023, equations 6, 7, 10 and 11, theorem 3.2, proposition 3.3, Appendix E.
    """

    log_psi: nn.Parameter | None

    def __init__(self, *linear: Any, activation: str | nn.Module | None = "relu", **named: Any) -> None:
        module = None if activation is None else slope_activation(activation)
        self.linear_form = module is None
        super().__init__(*linear, **named)
        self.activation = module

    def make_parameters(self, device: Any, dtype: Any) -> None:
        super().make_parameters(device, dtype)
        add_log_psi(self, self.linear_form, self.out_features, device, dtype)

    def weight(self) -> Tensor:
        """:math:`2 A^\\top B` (out_features, in_features): the layer itself in its linear form."""
        at, b = self.factors()
        return 2 * (at @ b)

    def psi(self) -> Tensor:
        """The diagonal of Psi (out_features,), in float32 or better."""
        assert self.log_psi is not None
        return at_least_float32(self.log_psi).exp()

    def halves(self) -> tuple[Tensor, Tensor]:
        """The two matrices around the activation, :math:`\\sqrt2 \\Psi^{-1} B` and :math:`\\sqrt2 A^\\top \\Psi`."""
        at, b = self.factors()
        psi = self.psi()
        return SQRT2 * b / psi[:, None], SQRT2 * at * psi

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None:
            return super().forward(x)
        with autocast_off(x):
            if solves_pay(x, self.out_features):
                return self._solved(x, self.activation)
            first, second = self.halves()
        bias = None if self.bias is None else self.bias.to(first.dtype)
        return F.linear(self.activation(F.linear(x, first, bias)), second)

    def _solved(self, x: Tensor, activation: nn.Module) -> Tensor:
        """The layer on images of one pixel (:class:`SandwichConv2d`): neither of its matrices is made."""
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"SandwichLinear: expected inputs (..., {self.in_features}), got {tuple(x.shape)}")
        batch, q = x.shape[:-1], self.out_features
        free = rescaled(self.x_free, self.x_scale), rescaled(self.y_free, self.y_scale)
        own, rest = (one.mT[:, :, None, None] for one in free)
        psi = self.psi()
        rows = x.reshape(math.prod(batch), self.in_features, 1, 1).to(psi.dtype)
        normal = normal_matrices_of(own, rest, 1, 1, wide=True)
        factors = prepare(normal, 2 * len(rows))
        bias = None if self.bias is None else self.bias.to(psi.dtype)
        v = solve_form("second", rows, normal, factors, bias, SQRT2 / psi)
        # The activation sees the features where it always does, last.
        inside = activation(v.reshape(*batch, q)).reshape(-1, q, 1, 1)
        return solve_form("first adjoint", inside, normal, factors, scale=SQRT2 * psi).reshape(*batch, q)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", activation=None" if self.activation is None else "")

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        r"""The linear form with this matrix: its parameters from the singular value decomposition.

        With :math:`W = U S V^\top`, :math:`A = U \tfrac{\sqrt{1+S}+\sqrt{1-S}}2 U^\top` and
        :math:`B = U \tfrac{\sqrt{1+S}-\sqrt{1-S}}2 V^\top`.

        Args:
            weight: ``(out_features, in_features)`` of spectral norm at most 1.
            bias: ``(out_features,)``.

        Raises:
            ShapeError: ``weight`` is not a matrix, or ``bias`` does not fit. OptionError: a norm above 1.

        >>> SandwichLinear.from_weight(torch.tensor([[0.0, 1.0], [-0.5, 0.0]])).weight().round(decimals=5) + 0.0
        tensor([[ 0.0000,  1.0000],
                [-0.5000,  0.0000]], grad_fn=<AddBackward0>)

        References:
            [LBDN] proposition 3.3 and Appendix D.5, equations 33 to 35.
        """
        if weight.ndim != 2 or 0 in weight.shape or (bias is not None and bias.shape != weight.shape[:1]):
            got = tuple(weight.shape), None if bias is None else tuple(bias.shape)
            raise ShapeError(f"expected weight (m, n) and bias (m,), got {got[0]} and {got[1]}")
        q, p = weight.shape
        u, s, vt = torch.linalg.svd(weight.detach().double(), full_matrices=True)
        if not bool(s[0] <= 1 + 8 * max(p, q) * torch.finfo(weight.dtype).eps):
            raise OptionError(f"weight: expected a spectral norm of at most 1, got {float(s[0])}")
        s = torch.cat((s.clamp_max(1), s.new_zeros(q - len(s))))
        sa, sb = ((1 + s).sqrt() + (1 - s).sqrt()) / 2, ((1 + s).sqrt() - (1 - s).sqrt()) / 2
        least = min(p, q)
        layer = cls(p, q, bias is not None, weight.device, weight.dtype, activation=None)
        layer.set_factors(u * sa @ u.mT, u[:, :least] * sb[:least] @ vt[:least])
        if layer.bias is not None and bias is not None:
            with torch.no_grad():
                layer.bias.copy_(bias)
        return layer


def add_log_psi(layer: nn.Module, linear_form: bool, channels: int, device: Any, dtype: Any) -> None:
    """Give a new layer the parameter ``log_psi`` (channels,), zero; None in its linear form."""
    zeros = None if linear_form else nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
    layer.register_parameter("log_psi", zeros)


def bound_with_activation(layer: nn.Module, input_shape: Shape | None) -> float:
    """1 for a sandwich layer: its rule.

    Raises:
        NoRuleError: its activation was replaced by one whose slope leaves [0, 1].
    """
    activation = layer.activation
    if activation is not None:
        assert isinstance(activation, nn.Module)
        guard(activation)
        name = type(layer).__name__
        if not slope_restricted(activation):
            raise NoRuleError(f"{name}: expected an activation with slope in [0, 1], got {activation!r}")
    return 1.0


lipschitz_rule(SandwichLinear)(bound_with_activation)


@export_rule(SandwichLinear)
def _export_dense(layer: SandwichLinear, input_shape: Shape) -> nn.Module:
    if layer.activation is None:
        return export_linear(layer, input_shape)
    if input_shape[-1] != layer.in_features:
        raise ShapeError(f"expected input of shape (..., {layer.in_features}), got {input_shape}")
    exact = in_float64(layer)
    one, two = (placed_like(layer, half) for half in exact.halves())
    first, second = (
        nn.Linear(w.shape[1], w.shape[0], bias, device=w.device, dtype=w.dtype)
        for w, bias in ((one, layer.bias is not None), (two, False))
    )
    first.weight.copy_(one)
    second.weight.copy_(two)
    if layer.bias is not None:
        first.bias.copy_(layer.bias)
    return SandwichBlock(first, plain_activation(layer.activation), second, placed_like(layer, exact.psi().square()))


def plain_activation(activation: nn.Module) -> nn.Module:
    """A copy of the activation for an export, not in place."""
    guard(activation)
    plain = copy.deepcopy(activation)
    if hasattr(plain, "inplace"):
        setattr(plain, "inplace", False)  # noqa: B010
    return plain
