"""Two linear maps with a scalar activation between them, and the multiplier that proves their constant."""

import math

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import sandwich_gain
from lipkit.bounds.symbol_sup import symbol_error
from lipkit.conv.symbol import symbol
from lipkit.errors import ShapeError
from lipkit.modules.activations import slope_restricted
from lipkit.modules.chains import chain_constant
from lipkit.modules.convolutions import windows_overlap
from lipkit.modules.fourier import FourierConv2d, transform_norm
from lipkit.modules.graph import Add, Graph, refuse_inplace
from lipkit.modules.machine import chain_error, local_error
from lipkit.modules.parametrised import settled
from lipkit.modules.plain import COUNT, Plain, RoundingError, Shape, Stored, add_plain, submodule
from lipkit.modules.registry import export_parts, output_shape
from lipkit.proof.norms import spectral_norm
from lipkit.proof.roundoff import Arithmetic, gamma, to_double, up

_PARTS = ("first", "activation", "second")


class Block(nn.Module):
    """The base of `SandwichBlock` and `SlopeResidual`: three parts, and the diagonal of the multiplier."""

    multiplier: Tensor

    def __init__(self, first: nn.Module, activation: nn.Module, second: nn.Module, multiplier: Tensor) -> None:
        super().__init__()
        if multiplier.ndim != 1 or not len(multiplier):
            name = type(self).__name__
            raise ShapeError(f"{name}: expected a multiplier of shape (n,), got {tuple(multiplier.shape)}")
        self.first, self.activation, self.second = first, activation, second
        self.register_buffer("multiplier", multiplier.detach().clone())

    def parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The parts in the order of computation."""
        return self.first, self.activation, self.second


def _export_block(module: Block, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    first, activation, second = export_parts(module.parts(), input_shape)
    return type(module)(first, activation, second, module.multiplier)


def _stored(kind: type[Block]) -> Stored:
    return Stored(
        {"channels": COUNT, **dict.fromkeys(_PARTS, submodule)},
        lambda block: {"channels": len(block.multiplier)} | {name: getattr(block, name) for name in _PARTS},
        lambda channels, **parts: kind(**parts, multiplier=torch.zeros(channels)),
    )


class SandwichBlock(Block):
    r"""``y = second(activation(first(x)))`` with the diagonal :math:`\Lambda` that proves its gain.

    .. math:: \|f\|_{Lip} \le \tfrac12 \big\| [\, \Lambda^{1/2} W_1 \;|\; \Lambda^{-1/2} W_2^* \,] \big\|_2^2

    for an activation with slope in [0, 1] (``lipkit.bounds.lmi``).

    Args:
        first: ``nn.Linear``, :class:`FourierConv2d`, or an ``nn.Conv2d`` whose windows do not overlap (with its bias).
        activation: a scalar activation.
        second: a module of the same kind.
        multiplier: ``(n,)`` for n hidden channels, positive. A claim that is checked, never trusted: where it proves
            nothing, the bound is the product of the three constants.

    Raises:
        ShapeError: a multiplier that is not a vector.

    >>> block = SandwichBlock(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), torch.ones(3))
    >>> block(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


def _matrix(module: nn.Module) -> Tensor | None:
    """The matrix of a dense layer, or of a convolution whose windows do not overlap; None for any other module."""
    if type(module) is nn.Linear:
        return module.weight
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding in ((0, 0), "valid"):
        return None if windows_overlap(module) else module.weight.flatten(1)  # one product for each window
    return None


def _sandwich(module: SandwichBlock, input_shape: Shape | None) -> Tensor:
    """The smaller of the multiplier's bound and the product of the three constants, whose computation refuses hooks."""
    product = chain_constant(module.parts(), None)
    if not slope_restricted(module.activation) or not bool(product.isfinite()):
        return product
    multiplier, one, two = module.multiplier, settled(module.first), settled(module.second)
    first, second = _matrix(one), _matrix(two)
    alike = type(one) is type(two)  # else hidden units are columns of an image for one, its channels for the other
    if alike and first is not None and second is not None and len(first) == len(multiplier) == second.shape[1]:
        return torch.minimum(product, sandwich_gain(first, second, multiplier))
    if type(one) is FourierConv2d and type(two) is FourierConv2d and one.out_channels == len(multiplier):
        transforms = one.matrices() if one.whole and two.whole else []
        if len(transforms) == two.transforms and all(map(torch.equal, transforms, two.matrices())):
            size = transform_norm(transforms) ** 2 * (1 + gamma(2))  # to the frequencies, and back
            gains = [sandwich_gain(one.real, two.real, multiplier, size)]
            if len(one.pair):
                pairs = [torch.complex(*to_double(layer.pair).unbind(1)) for layer in (one, two)]
                gains.append(sandwich_gain(pairs[0], pairs[1], multiplier, size))
            return torch.minimum(product, torch.stack(gains).amax())
    return product


class SlopeResidual(Block):
    r"""``y = x + second(activation(first(x)))`` with a multiplier that proves its constant.

    With linear parts W1, W2 and an activation of slope in [0, 1], a positive diagonal :math:`\Lambda` with
    :math:`W_2 = -W_1^\top \Lambda` and :math:`\|\Lambda^{1/2} W_1\|^2 \le 2` proves that y is 1-Lipschitz.

    Args:
        first, second: both ``nn.Linear``, or both ``nn.Conv2d`` (circular or with zeros, stride 1).
        activation: a scalar activation.
        multiplier: diagonal of Lambda, ``(hidden,)``.

    >>> zero = nn.Linear(2, 3), nn.Linear(3, 2, bias=False)
    >>> _ = [nn.init.zeros_(layer.weight) for layer in zero]
    >>> SlopeResidual(zero[0], nn.ReLU(), zero[1], torch.ones(3))(torch.ones(1, 2)).tolist()
    [[1.0, 1.0]]
    """

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.activation(self.first(x)))
        if y.shape != x.shape:
            raise ShapeError(f"SlopeResidual: expected parts that keep shape {tuple(x.shape)}, got {tuple(y.shape)}")
        return x + y


def slope_residual_bound(w1: Tensor, w2: Tensor, multiplier: Tensor, errors: tuple[float, float] = (0, 0)) -> Tensor:
    """Upper bound of the constant of a `SlopeResidual` with matrices ``(..., h, n)`` and ``(..., n, h)`` in float64.

    ``errors`` bound the spectral norms of the rounding errors that w1 and w2 already have.
    """
    lam = to_double(multiplier)
    largest, half, back = float(lam.max()), lam.sqrt()[:, None] * w1, w1.mH * lam
    # Products and sums here carry one or two roundings per entry; the Frobenius norm turns that into a norm.
    in_half, in_back, in_w2 = (gamma(4) * float(torch.linalg.matrix_norm(m).amax()) for m in (half, back, w2))
    off = in_back + largest * errors[0]
    forward = spectral_norm(w1) + errors[0]
    scaled = spectral_norm(half) + in_half + math.sqrt(largest) * errors[0]
    gap = spectral_norm(w2 + back) + off + in_w2 + errors[1]
    s = up(scaled.square() / 2, 4).clamp_min(1.0)
    excess = (1 - 1 / s + gamma(4)).clamp_min(0) if float(s) > 1 else torch.zeros_like(s)
    return up(1 + forward * (gap + excess * (spectral_norm(back) + off)), 12)


def _convolution_matrices(layer: nn.Conv2d, shape: Shape) -> tuple[Tensor, float, tuple[int, int]] | None:
    """Matrices of a 'same' convolution at the frequencies of a circular image, their error, and the image's size.

    With zero padding the layer is a part of a circular convolution, on an image that is larger by the border.
    """
    plain = layer.padding == "same" and layer.padding_mode in ("circular", "zeros") and layer.groups == 1
    if not plain or tuple(layer.stride) != (1, 1) or tuple(layer.dilation) != (1, 1) or len(shape) != 3:
        return None
    (kh, kw), (h, w) = layer.weight.shape[2:], shape[1:]
    if layer.padding_mode == "zeros":
        h, w = h + kh - 1, w + kw - 1  # the image with its border
    if h < kh or w < kw:
        return None
    kernel = to_double(layer.weight)
    return symbol(kernel, h, w).flatten(0, 1), float(symbol_error(kernel)), (h, w)


def _slope_residual(module: SlopeResidual, input_shape: Shape | None) -> Tensor:
    """The smaller of the multiplier's bound and 1 + the product of the three parts' constants."""
    refuse_inplace(module)
    lam, one, two = module.multiplier, settled(module.first), settled(module.second)
    product = up(1 + chain_constant(module.parts(), None), 5).to(lam.device)
    usable = slope_restricted(module.activation) and bool((torch.isfinite(lam) & (lam >= 0)).all())
    if not usable or not bool(product.isfinite()):
        return product
    if type(one) is nn.Linear and type(two) is nn.Linear and one.out_features == len(lam) == two.in_features:
        return torch.minimum(product, slope_residual_bound(to_double(one.weight), to_double(two.weight), lam))
    if type(one) is nn.Conv2d and type(two) is nn.Conv2d and input_shape and one.out_channels == len(lam):
        first, second = (_convolution_matrices(layer, input_shape) for layer in (one, two))
        same = one.padding_mode == two.padding_mode  # else the matrices are of two images
        if first is not None and second is not None and same and first[2] == second[2]:
            (w1, one_off, _), (w2, two_off, _) = first, second
            return torch.minimum(product, slope_residual_bound(w1, w2, lam, (one_off, two_off)))
    return product


def _error(module: Block, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    if isinstance(module, SandwichBlock):
        return chain_error(module.parts(), input_shape, arithmetic)
    return local_error(Graph([*module.parts(), Add(1, 1)], [[0], [1], [2], [0, 3]]), input_shape, arithmetic)


add_plain(Plain(SandwichBlock, _sandwich, _error, _stored(SandwichBlock), export=_export_block))
add_plain(Plain(SlopeResidual, _slope_residual, _error, _stored(SlopeResidual), export=_export_block))
