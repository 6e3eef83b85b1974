"""A constant sandwich block: two linear maps with a scalar activation between them, and the multiplier of its bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import sandwich_gain
from lipkit.errors import ShapeError
from lipkit.modules.activations import slope_restricted
from lipkit.modules.chains import chain_constant
from lipkit.modules.configuration import COUNT, submodule
from lipkit.modules.convolutions import windows_overlap
from lipkit.modules.fourier import FourierConv2d, transform_norm
from lipkit.modules.machine import chain_error
from lipkit.modules.plain import Measure, Plain, Shape, Stored, add_plain
from lipkit.modules.registry import export, output_shape
from lipkit.proof.arithmetic import Arithmetic
from lipkit.proof.roundoff import gamma, to_double


class SandwichBlock(nn.Module):
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

    >>> import torch
    >>> block = SandwichBlock(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), torch.ones(3))
    >>> block(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """

    multiplier: Tensor

    def __init__(self, first: nn.Module, activation: nn.Module, second: nn.Module, multiplier: Tensor) -> None:
        super().__init__()
        if multiplier.ndim != 1 or not len(multiplier):
            raise ShapeError(f"SandwichBlock: expected a multiplier of shape (n,), got {tuple(multiplier.shape)}")
        self.first, self.activation, self.second = first, activation, second
        self.register_buffer("multiplier", multiplier.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


def _matrix(module: nn.Module) -> Tensor | None:
    """The matrix of a dense layer, or of a convolution whose windows do not overlap; None for any other module."""
    if type(module) is nn.Linear:
        return module.weight
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding in ((0, 0), "valid"):
        return None if windows_overlap(module) else module.weight.flatten(1)
    return None


def _sandwich(module: SandwichBlock, input_shape: Shape | None) -> Tensor:
    """The smaller of what the multiplier proves and the product of the three constants (which refuses hooks)."""
    parts = (module.first, module.activation, module.second)
    product = chain_constant(parts, None)
    if not slope_restricted(module.activation) or not bool(product.isfinite()):
        return product
    multiplier, one, two = module.multiplier, module.first, module.second
    first, second = _matrix(one), _matrix(two)
    if first is not None and second is not None and len(first) == len(multiplier) == second.shape[1]:
        return torch.minimum(product, sandwich_gain(first, second, multiplier))
    if type(one) is FourierConv2d and type(two) is FourierConv2d and one.out_channels == len(multiplier):
        transforms = one.matrices() if one.whole and two.whole else []
        if len(transforms) == two.transforms and all(map(torch.equal, transforms, two.matrices())):
            size = transform_norm(transforms) ** 2 * (1 + gamma(2))
            gains = [sandwich_gain(one.real, two.real, multiplier, size)]
            if len(one.pair):
                pairs = [torch.complex(*to_double(layer.pair).unbind(1)) for layer in (one, two)]
                gains.append(sandwich_gain(pairs[0], pairs[1], multiplier, size))
            return torch.minimum(product, torch.stack(gains).amax())
    return product


def _export_sandwich(module: SandwichBlock, input_shape: Shape) -> nn.Module:
    parts: list[nn.Module] = []
    for part in (module.first, module.activation, module.second):
        plain = export(part, input_shape)
        input_shape = output_shape(plain, input_shape)
        # Unwrapped: the bound needs the two linear maps themselves.
        parts.append(plain[0] if len(plain) == 1 else plain)
    first, activation, second = parts
    return SandwichBlock(first, activation, second, module.multiplier)


def _sandwich_error(module: SandwichBlock, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    return chain_error([module.first, module.activation, module.second], input_shape, arithmetic)


def stored_block(kind: type[nn.Module]) -> Stored:
    """A block of two linear maps around an activation, with a multiplier for each unit."""

    def read(block: Any) -> dict[str, Any]:
        parts = {"first": block.first, "activation": block.activation, "second": block.second}
        return {"channels": len(block.multiplier), **parts}

    def make(channels: int, first: nn.Module, activation: nn.Module, second: nn.Module) -> nn.Module:
        return kind(first, activation, second, torch.zeros(channels))

    parts = dict.fromkeys(("first", "activation", "second"), submodule)
    return Stored({"channels": COUNT, **parts}, read, make)


add_plain(Plain(SandwichBlock, _sandwich, _sandwich_error, stored_block(SandwichBlock), export=_export_sandwich))
