r"""Layers made of the two blocks of a Cayley transform, :math:`A A^\top + B B^\top = I` [LBDN].

A sandwich layer is a linear map, an activation with slope in [0, 1] and another linear map, together 1-Lipschitz.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv import Symbol, kernel_symbol
from lipkit.conv.cayley_conv import factors_for, solve_form, solves_pay
from lipkit.conv.normal_matrices import normal_matrices_of
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import base, definitions, export
from lipkit.layers.base import Family
from lipkit.layers.cayley import free_and_scale, rescaled
from lipkit.layers.dense import orthogonal_free
from lipkit.linalg import at_least_float32, cayley
from lipkit.linalg.matrices import eye_like
from lipkit.linalg.precision import autocast_off, product_dtype
from lipkit.modules import FourierConv2d, SandwichBlock, Shape, export_rule, guard, lipschitz_rule
from lipkit.modules.activations import slope_restricted
from lipkit.modules.registry import export_part

SQRT2 = math.sqrt(2.0)


def free_pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""The (X, Y) whose Cayley transform is :math:`[A^\top; B^\top]`, for :math:`A A^\top + B B^\top = I`.

    .. math:: Z = (I - A^\top)(I + A^\top)^{-1},\quad Y = -\tfrac12 B^\top (I + Z),\quad
              X = \tfrac12\, \mathrm{strictly\ lower}(Z - Z^\top)

    A (q, q) must not have the eigenvalue -1; a symmetric positive semidefinite one is safest. B is (q, p). See [LBDN]
    Appendix D.5, equation 37.
    """
    eye = eye_like(a)
    # I + Z = 2 (I + A^T)^-1, so one inverse gives Z and Y. X - X^T is the skew part of Z = X - X^T + Y^T Y.
    half = torch.linalg.inv(eye + a.mT)
    z = 2 * half - eye
    return torch.tril(z - z.mT, -1) / 2, -b.mT @ half  # X is free up to its symmetric part


def _store(free: nn.Parameter, scale: nn.Parameter, value: Tensor) -> None:
    """Set ``scale * free / ||free||`` to ``value``; for 0, ``free`` keeps its random direction, to be trainable."""
    norm = torch.linalg.vector_norm(value)
    with torch.no_grad():
        if not norm.is_meta and bool(norm <= 1e-14 * value.numel()):  # a meta tensor has no numbers
            scale.zero_()
            return
        free.copy_(value)
        scale.copy_(norm)


class CayleyPair(base.Constrained):
    r"""Abstract: free :math:`X = g X'/\|X'\|_F` and :math:`Y = h Y'/\|Y'\|_F`, whose Cayley transform gives A and B."""

    # Initial singular values of Y: A and B = 2 Y / (1 + Y^2) are balanced, and the linear form is near an isometry.
    birth = math.tan(math.pi / 8)

    def make_parameters(self, device: Any, dtype: Any) -> None:
        q, p, *taps = self.shape
        self.x_free, size = free_and_scale((q, q, *taps), device, dtype)
        self.x_scale = nn.Parameter(0.5 * size.detach())  # the initial A is a moderate rotation
        shape = (q, p, *taps)
        self.y_free = free_and_scale(shape, device, dtype)[0] if taps else orthogonal_free((p, q), device, dtype)
        # Over all frequencies of a convolution, ``birth`` is the root mean square of Y's singular values.
        self.y_scale = nn.Parameter(torch.tensor(self.birth * math.sqrt(min(p, q)), device=device, dtype=dtype))

    def free_pair(self) -> tuple[Tensor, Tensor]:
        """X and Y, in float32 or better."""
        return rescaled(self.x_free, self.x_scale), rescaled(self.y_free, self.y_scale)


class CayleyPairLinear(CayleyPair, base.ConstrainedLinear):
    """Abstract: a dense layer of the two blocks; parameters ``x_free`` (q, q), ``y_free`` (p, q) and their norms."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """:math:`A^\\top` (q, q) and :math:`B` (q, p), in float32 or better."""
        q = cayley(torch.cat(self.free_pair()))
        return q[: self.out_features], q[self.out_features :].mT

    def set_factors(self, a: Tensor, b: Tensor) -> None:
        """Set the free parameters so that :meth:`factors` gives A (q, q) and B (q, p); ``A A^T + B B^T = I``."""
        x, y = free_pair(a, b)
        _store(self.x_free, self.x_scale, x)
        _store(self.y_free, self.y_scale, y)


class ContractionLinear(CayleyPairLinear):
    r"""Dense layer ``y = B x + b`` that reaches every :math:`\|B\|_2 \le 1`: the last layer of an LBDN.

    Args: those of :class:`lipkit.layers.base.ConstrainedLinear`.

    Guarantee:
        1-Lipschitz; complete: every matrix of spectral norm at most 1 is reached (:math:`A = (I - B B^\top)^{1/2}`):
        [LBDN] equations 6, 7 and 9. A forward pass takes one inverse of size out_features.

    >>> bool(torch.linalg.matrix_norm(ContractionLinear(5, 3).weight(), 2) <= 1 + 1e-6)
    True
    """

    birth = math.tan(math.pi / 6)

    def weight(self) -> Tensor:
        return self.factors()[1]


export.register_one_lipschitz(ContractionLinear)


class Sandwich(CayleyPair):
    """Abstract base of both sandwich layers. The activation inside may be None: then the layer is linear."""

    log_psi: nn.Parameter | None
    activation: nn.Module | None

    def make_parameters(self, device: Any, dtype: Any, *, activation: str | nn.Module | None = "relu") -> None:
        super().make_parameters(device, dtype)
        self.register_module("activation", None if activation is None else base.slope_activation(activation))
        zeros = torch.zeros(self.shape[0], device=device, dtype=dtype)  # Psi = I
        self.register_parameter("log_psi", None if activation is None else nn.Parameter(zeros))

    def psi(self) -> Tensor:
        """The diagonal of Psi, one number for each output, in float32 or better; the linear form has none."""
        if self.log_psi is None:
            raise OptionError(f"{type(self).__name__}: expected an activation between two linear maps, got None")
        return at_least_float32(self.log_psi).exp()

    def check_linear_form(self, method: str) -> None:
        """Raise ``OptionError`` if the layer has an activation: then no single matrix computes it."""
        if self.activation is not None:
            raise OptionError(
                f"{type(self).__name__}.{method}: expected activation=None, where one linear map is the whole layer, "
                f"got activation={self.activation!r}: use halves(), the two maps around it"
            )

    def solved(self, x: Tensor, own: Tensor, rest: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """The output for images x, from the kernels X and Y, by `solve_form`: neither of the linear maps is formed."""
        psi = self.psi()
        normal = normal_matrices_of(own, rest, *x.shape[-2:], wide=True)
        factors = factors_for(normal, x, uses=2)  # both maps solve with the same matrices
        v = solve_form("second", x, normal, factors, self.bias_as(psi), SQRT2 / psi)
        return solve_form("first adjoint", activation(v), normal, factors, scale=SQRT2 * psi)

    def extra_repr(self) -> str:
        return super().extra_repr() + ", activation=None" * (self.activation is None)


class SandwichLinear(Sandwich, CayleyPairLinear):
    r"""Dense layer with its activation inside, :math:`y = \sqrt2 A^\top \Psi\, \sigma(\sqrt2 \Psi^{-1} B x + b)`.

    .. math:: [A^\top; B^\top] = \mathrm{cayley}([X; Y]),\quad X = g X'/\|X'\|_F,\quad Y = h Y'/\|Y'\|_F,\quad
              \Psi = \mathrm{diag}(e^d)

    Without activation it is the linear form :math:`y = 2 A^\top B x + b`, which reaches every :math:`\|W\|_2 \le 1`.

    Args:
        in_features, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedLinear`; the hidden width is
            ``out_features``.
        activation: name or module of a scalar activation with slope in [0, 1] (:func:`slope_activation`), or None for
            the linear form.

    Parameters ``x_free`` X' (out_features, out_features), ``y_free`` Y' (in_features, out_features), ``x_scale`` g,
    ``y_scale`` h (0-d), ``log_psi`` d (out_features; not in the linear form) and ``bias``.

    Guarantee:
        1-Lipschitz. Exports as a :class:`lipkit.modules.SandwichBlock` whose bound is proved from its numbers with the
        multiplier :math:`\Psi^2`; the linear form as one ``nn.Linear``.
        A forward pass takes one inverse of size out_features, or LU factors and solves (``lipkit.conv.cayley_conv``).

    >>> x = torch.randn(2, 3)
    >>> y = SandwichLinear(3, 5, activation="tanh")(x)
    >>> bool((y[0] - y[1]).norm() <= (x[0] - x[1]).norm())
    True

    References:
        [LBDN] Wang & Manchester, ICML 2023, equations 6, 7, 10 and 11, theorem 3.2, proposition 3.3, Appendix E.
    """

    def weight(self) -> Tensor:
        """:math:`2 A^\\top B`, in the linear form; ``OptionError`` with an activation, since no matrix computes it."""
        self.check_linear_form("weight()")
        at, b = self.factors()
        return 2 * (at @ b)

    def halves(self) -> tuple[Tensor, Tensor]:
        """The two matrices around the activation, :math:`\\sqrt2 \\Psi^{-1} B` and :math:`\\sqrt2 A^\\top \\Psi`."""
        at, b = self.factors()
        psi = self.psi()
        return SQRT2 * b / psi[:, None], SQRT2 * at * psi  # Psi^-1 from the left scales rows, Psi columns

    @base.half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None:
            return super().forward(x)
        self.check_input(x.shape)
        with autocast_off(x):
            if solves_pay(x, self.out_features):
                return self._solved(x, self.activation)
            if x.shape[:-1].numel() > self.in_features:
                first, second = self.halves()
            else:
                # For a small batch, multiplying by Y and by the inverse in turn is cheaper than forming B.
                (own, y), psi = self.free_pair(), self.psi()
                eye = eye_like(own)
                # A^T = 2 (I + Z)^-1 - I and B^T = -2 Y (I + Z)^-1 with Z = X - X^T + Y^T Y.
                inverse = torch.linalg.inv(torch.addmm(own - own.mT + eye, y.mT, y))
                second = (SQRT2 * psi) * (2 * inverse - eye)
                x, first = x.to(y.dtype) @ y, ((-2 * SQRT2 / psi) * inverse).mT
        return F.linear(self.activation(F.linear(x, first, self.bias_as(first))), second)

    def _solved(self, x: Tensor, activation: nn.Module) -> Tensor:
        """The output for rows x, computed as images of one pixel in solve form: neither matrix is formed."""
        batch, q = x.shape[:-1], self.out_features
        own, rest = (one.mT[:, :, None, None] for one in self.free_pair())  # the wide transposes of the tall X and Y
        rows = x.reshape(math.prod(batch), self.in_features, 1, 1).to(own.dtype)
        # An activation expects the features in the last dimension.
        y = self.solved(rows, own, rest, lambda v: activation(v.reshape(*batch, q)).reshape(-1, q, 1, 1))
        return y.reshape(*batch, q)

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        r"""The linear form with this matrix (m, n), of spectral norm at most 1, and bias (m,).

        With :math:`W = U S V^\top`, :math:`A = U \tfrac{\sqrt{1+S}+\sqrt{1-S}}2 U^\top` and :math:`B = U
        \tfrac{\sqrt{1+S}-\sqrt{1-S}}2 V^\top`: [LBDN] proposition 3.3 and Appendix D.5, equations 33 to 35.

        >>> layer = SandwichLinear.from_weight(torch.tensor([[0.0, 1.0], [-0.5, 0.0]]))
        >>> layer.weight().abs().round(decimals=5).tolist()
        [[0.0, 1.0], [0.5, 0.0]]
        """
        if weight.ndim != 2 or 0 in weight.shape or (bias is not None and bias.shape != weight.shape[:1]):
            got = tuple(weight.shape), None if bias is None else tuple(bias.shape)
            raise ShapeError(f"expected weight (m, n) and bias (m,), got {got[0]} and {got[1]}")
        base.check_dtype(weight.dtype)
        q, p = weight.shape
        u, s, vt = torch.linalg.svd(weight.detach().double(), full_matrices=True)
        if not bool(s[0] <= 1 + 8 * max(p, q) * torch.finfo(weight.dtype).eps):  # rounding of a norm of 1
            raise OptionError(f"weight: expected a spectral norm of at most 1, got {float(s[0])}")
        s = torch.cat((s.clamp_max(1), s.new_zeros(q - len(s))))  # A has q of them
        sa, sb = ((1 + s).sqrt() + (1 - s).sqrt()) / 2, ((1 + s).sqrt() - (1 - s).sqrt()) / 2
        least = min(p, q)
        layer = cls(p, q, bias is not None, weight.device, weight.dtype, activation=None)
        layer.set_factors(u * sa @ u.mT, u[:, :least] * sb[:least] @ vt[:least])
        if layer.bias is not None and bias is not None:
            with torch.no_grad():
                layer.bias.copy_(bias)
        return layer


class SandwichConv2d(Sandwich, base.SymbolConv2d):
    r"""Circular convolution with its activation inside: the sandwich layer at each frequency.

    .. math:: \hat v = \sqrt2\, \Psi^{-1} \hat B\, \hat x, \qquad
              \hat y = \sqrt2\, \hat A^* \Psi\, \widehat{\sigma(v + b)}, \qquad
              [\hat A\ \hat B] = \mathrm{cayley}([\hat X^*; \hat Y^*])^*,\quad \hat A \hat A^* + \hat B \hat B^* = I

    Without activation, :math:`\hat y = 2 \hat A^* \hat B \hat x` plus bias.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        activation: as :class:`SandwichLinear`.

    Parameters ``x_free`` (out_channels, out_channels, kh, kw), ``y_free`` (out_channels, s^2 in_channels, kh, kw),
    their norms ``x_scale`` and ``y_scale`` (0-d), ``log_psi`` (out_channels; not in the linear form) and ``bias``.

    Guarantee:
        1-Lipschitz. Exports as a :class:`lipkit.modules.SandwichBlock`, proved as that of :class:`SandwichLinear`, of
        two Fourier convolutions (of two ``nn.Conv2d`` for a 1 x 1 kernel); the linear form as one of them.

    Cost:
        At each of about H W / (2 s^2) frequencies LU factors of size out_channels, shared by two solves
        (``lipkit.conv.cayley_conv``); for a 1 x 1 kernel one inverse, and two products for each s x s patch.

    >>> SandwichConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        [LBDN] Wang & Manchester, ICML 2023, algorithm 1, Appendix B.
    """

    def factors(self, height: int, width: int) -> Symbol:
        """The symbol ``[A B]`` of matrices (q, q + p)."""
        return kernel_symbol(torch.cat(self.free_pair(), 1), height, width).map(cayley)

    def symbol(self, height: int, width: int) -> Symbol:
        """:math:`2 A^* B`, in the linear form; ``OptionError`` with an activation, since no symbol computes it."""
        self.check_linear_form("symbol()")
        q = self.out_channels
        return self.factors(height, width).map(lambda both: 2 * (both[..., :q].mH @ both[..., q:]))

    def halves(self, height: int, width: int) -> tuple[Symbol, Symbol]:
        """The symbols around the activation, :math:`\\sqrt2 \\Psi^{-1} B` and :math:`\\sqrt2 A^* \\Psi`."""
        q, psi = self.out_channels, self.psi()
        both = self.factors(height, width)
        first = both.map(lambda m: SQRT2 * m[..., q:] / psi[:, None])
        return first, both.map(lambda m: SQRT2 * m[..., :q].mH * psi)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The two halves of a 1 x 1 kernel, as the matrices that all frequencies share."""
        first, second = self.halves(1, 1)
        return first.real[0], second.real[0]

    @base.half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None:
            return super().forward(x)
        if self.pointwise:
            self.check_input(x)
            with autocast_off(x):
                first, second = self.matrices()
            inside = self.on_patches(x.to(product_dtype(x, first.dtype)), first)
            return F.conv2d(self.activation(inside), second[..., None, None])
        x = self.resample(x)
        dtype = product_dtype(x, torch.promote_types(self.x_scale.dtype, torch.float32))
        with autocast_off(x):
            return self.solved(x.to(dtype), *self.free_pair(), self.activation)


@lipschitz_rule(SandwichLinear, SandwichConv2d)
def _bound(layer: SandwichLinear | SandwichConv2d, input_shape: Shape | None) -> float:
    if layer.activation is not None:
        guard(layer.activation)
        if not slope_restricted(layer.activation):  # it was replaced
            raise NoRuleError(
                f"{type(layer).__name__}: expected an activation with slope in [0, 1], got {layer.activation!r}"
            )
    return 1.0


def _block(layer: Sandwich, first: nn.Module, second: nn.Module) -> SandwichBlock:
    """The layer from its two maps, with the multiplier Psi^2 that proves its bound."""
    assert layer.activation is not None
    multiplier = export.placed_like(layer, export.in_float64(layer).psi().square())
    return SandwichBlock(first, export_part(layer.activation, (1,)), second, multiplier)


@export_rule(SandwichLinear)
def _export_dense(layer: SandwichLinear, input_shape: Shape) -> nn.Module:
    if layer.activation is None:
        return export.export_linear(layer, input_shape)
    layer.check_input(input_shape)
    one, two = export.exactly(layer, SandwichLinear.halves)
    return _block(layer, export.linear_module(one, layer.bias), export.linear_module(two, None))


@export_rule(SandwichConv2d)
def _export_conv(layer: SandwichConv2d, input_shape: Shape) -> nn.Module:
    if layer.activation is None:
        return export.export_symbol_conv(layer, input_shape)
    size = export.resampled_size(layer, input_shape)
    if layer.pointwise:
        one, two = export.exactly(layer, SandwichConv2d.matrices)
        return _block(layer, export.patch_module(one, layer.stride, layer.bias), export.patch_module(two, 1, None))
    parts = export.exactly(layer, lambda made: [part for half in made.halves(*size) for part in half], size)
    first = FourierConv2d.from_symbol(Symbol(*parts[:2]), *size, layer.bias)
    second = FourierConv2d.from_symbol(Symbol(*parts[2:]), *size, None)
    return nn.Sequential(*export.stride_modules(layer), _block(layer, first, second))


SANDWICH = Family(
    name="sandwich",
    title="linear map, activation and linear map, from one Cayley transform at each frequency",
    paper="Wang & Manchester, ICML 2023",
    equation="equation 10, algorithm 1",
    definition=definitions.sandwich,
    conv=SandwichConv2d,
    linear=SandwichLinear,
    claim="contraction",
    options={"activation": ("relu", "tanh", None)},
    own_activation=True,
    affine=partial(SandwichLinear, activation=None),
)
