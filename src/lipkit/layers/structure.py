"""Layers that shape a network rather than learn features: normalisation, gain, residual, pooling."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import OptionError, ShapeError, finite
from lipkit.layers.base import check_dtype, check_positive
from lipkit.modules import Affine, Plain, Shape, add_plain, export_rule, lipschitz_rule, output_shape
from lipkit.modules.graph import Graph, Join, blend_of, check_alike, export_graph, graph_constant
from lipkit.modules.views import per_channel
from lipkit.proof.roundoff import reciprocal_up


class _PerChannel(nn.Module):
    """Two buffers with one number for each channel."""

    def __init__(self, device: Any, dtype: Any, **numbers: Any) -> None:
        super().__init__()
        check_dtype(dtype)
        kind, lists = type(self).__name__, list[list[float]]()
        for name, values in numbers.items():  # None, for the second: zeros
            try:
                lists.append([0.0] * len(lists[0]) if values is None and lists else [float(value) for value in values])
            except (TypeError, ValueError):
                wanted = "a list of one number for each channel"
                raise OptionError(f"{kind}: {name}: expected {wanted}, got {values!r}") from None
            self.register_buffer(name, torch.tensor(lists[-1], device=device, dtype=dtype))
        one, two = lists
        held = torch.tensor(one + two, dtype=dtype, device="cpu")
        if not one or len(one) != len(two) or not bool(held.isfinite().all()):
            wanted = f"{' and '.join(numbers)} of equally many finite numbers ({held.dtype}), at least one"
            raise OptionError(f"{kind}: expected {wanted}, got {one} and {two}")
        self.channels = len(one)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={'?' if t.is_meta else t.tolist()}" for name, t in self.named_buffers())


def shown(number: Tensor) -> str:
    """A 0-d number for ``repr``: six digits, or ? on the meta device."""
    return "?" if number.is_meta else f"{float(number.detach()):.6g}"


class Normalize(_PerChannel):
    r"""Input normalisation ``(x - mean) / std`` per channel, as a layer of the model: radii are in units of the images.

    The constant is :math:`1 / \min_c \mathrm{std}_c`.

    Args:
        mean, std: one number per channel; every std positive.

    >>> from lipkit import lipschitz
    >>> layer = Normalize([0.5], [0.25])
    >>> layer(torch.ones(1, 1, 1, 1)).item(), float(lipschitz(layer))
    (2.0, 4.0)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: Any = None, dtype: Any = None) -> None:
        super().__init__(device, dtype, mean=mean, std=std)
        if not (self.std.is_meta or bool((self.std > 0).all())):
            raise OptionError(f"Normalize: expected positive stds ({self.std.dtype}), got {std}")

    def forward(self, x: Tensor) -> Tensor:
        return (x - per_channel(self, self.mean, x)) / per_channel(self, self.std, x)


class Rescale(_PerChannel):
    r"""Output scaling ``units * x + offset`` per channel, as a layer of the model: outputs leave in physical units.

    Its constant is :math:`\max_c |\mathrm{units}_c|`; ``certify_regression`` uses each output's own.

    Args:
        units: one number per output, finite and not zero.
        offset: added after it, one number per output; zeros by default.

    >>> from lipkit import lipschitz
    >>> Rescale([2.0, 10.0], [0.0, 1.0])(torch.ones(1, 2)).tolist(), float(lipschitz(Rescale([2.0, 10.0])))
    ([[2.0, 11.0]], 10.0)
    """

    units: Tensor
    offset: Tensor

    def __init__(
        self, units: Sequence[float], offset: Sequence[float] | None = None, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(device, dtype, units=units, offset=offset)
        if not (self.units.is_meta or bool(self.units.all())):
            raise OptionError(f"Rescale: expected units other than 0 ({self.units.dtype}), got {units}")

    def forward(self, x: Tensor) -> Tensor:
        return x * per_channel(self, self.units, x) + per_channel(self, self.offset, x)


class Scale(nn.Module):
    """``y = gamma * x``: gives a 1-Lipschitz network the target constant gamma, positive and finite.

    If ``learnable``, gamma is trained as its logarithm, so it stays positive.

    >>> from lipkit import lipschitz
    >>> layer = Scale(3.0)
    >>> layer(torch.ones(1, 1)).item(), float(lipschitz(layer))
    (3.0, 3.0)
    """

    def __init__(self, gamma: float, learnable: bool = False, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_dtype(dtype)
        gamma = finite("gamma", gamma, positive=True)
        if not 0 < float(held := torch.tensor(gamma, dtype=dtype, device="cpu")) < math.inf:
            raise OptionError(f"gamma: expected a positive number within the range of {held.dtype}, got {gamma}")
        self.learnable = learnable
        if learnable:
            self.log_gamma = nn.Parameter(torch.tensor(math.log(gamma), device=device, dtype=dtype))
        else:
            self.register_buffer("fixed_gamma", torch.tensor(gamma, device=device, dtype=dtype))

    def gamma(self) -> Tensor:
        """The constant as it is now, 0-d."""
        return self.log_gamma.exp() if self.learnable else self.fixed_gamma  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma() * x

    def extra_repr(self) -> str:
        return f"gamma={shown(self.gamma())}, learnable={self.learnable}"


class ConvexSum(Join):
    r"""The join :math:`y = s x_1 + (1 - s) x_2`, with a learnable s in (0, 1), initially ``weight``.

    Its constant is :math:`s L_1 + (1 - s) L_2`: a residual connection that keeps 1 ([Cayley] section 5).

    >>> ConvexSum(0.25)(torch.ones(1, 2), torch.zeros(1, 2)).tolist()
    [[0.25, 0.25]]
    """

    def __init__(self, weight: float = 0.5, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_dtype(dtype)
        if not 0 < finite("weight", weight) < 1:
            raise OptionError(f"weight: expected a number strictly between 0 and 1, got {weight}")
        self.alpha = nn.Parameter(torch.tensor(math.log(weight / (1 - weight)), device=device, dtype=dtype))  # logit

    def weight(self) -> Tensor:
        """s as it is now, 0-d."""
        return torch.sigmoid(self.alpha)

    def forward(self, *values: Tensor) -> Tensor:
        check_alike(self, values, 2)
        s = self.weight()
        return s * values[0] + (1 - s) * values[1]


class Residual(Graph):
    r"""Convex skip connection: :math:`y = s f(x) + (1 - s) g(x)` with a learnable :math:`s = \sigma(\alpha)`.

    Its constant is :math:`s L_f + (1 - s) L_g`: 1 for a 1-Lipschitz body and shortcut.

    Args:
        body: f.
        weight: initial s, strictly between 0 and 1.
        shortcut: g, with the output shape of f; the identity if omitted (f then keeps the shape of its input).
        place: device and dtype of s.

    >>> from lipkit import lipschitz
    >>> layer = Residual(nn.ReLU(), weight=0.5)
    >>> layer(torch.tensor([[-2.0, 2.0]])).tolist(), lipschitz(layer).item()
    ([[-1.0, 2.0]], 1.0)

    References:
        [Cayley] section 5 (convex combination in residual connections); Li et al., NeurIPS 2019.
    """

    def __init__(self, body: nn.Module, weight: float = 0.5, shortcut: nn.Module | None = None, **place: Any) -> None:
        branches = [body] if shortcut is None else [body, shortcut]
        join = ConvexSum(weight, **place)
        # Value 0 is the input, value i the output of node i.
        super().__init__([*branches, join], [*([0] for _ in branches), [1, 0 if shortcut is None else 2]])


class HalfThrough(nn.Module):
    r"""Half of the channels stay, the others go through ``body``: a skip connection for orthogonal U-Nets.

    .. math:: (a, b) \mapsto (a, f(b)), \qquad L = \max(1, L_f)

    The body f keeps the shape of its input. Concatenating all of x with f(x), as U-Nets do, would have the constant
    :math:`\sqrt{1 + L_f^2}`.

    >>> HalfThrough(nn.ReLU())(torch.tensor([[-1.0, -2.0]])).tolist()
    [[-1.0, 0.0]]

    References:
        Jacobsen et al., "i-RevNet", ICLR 2018 (the split); orthogonium's ConcatResidual.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] % 2:
            got = x.shape[1] if x.ndim > 1 else f"shape {tuple(x.shape)}"
            raise ShapeError(f"HalfThrough: expected an even number of channels, got {got}")
        kept, moved = x.chunk(2, 1)
        return torch.cat((kept, self.body(moved)), 1)


class ScaledAvgPool2d(nn.Module):
    """Averages over s x s windows that do not overlap, times s: norm 1. s = ``kernel_size`` divides both sides.

    >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 2, 2)).item()
    2.0
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        check_positive(kernel_size=kernel_size)
        self.kernel_size = kernel_size

    def forward(self, x: Tensor) -> Tensor:
        s = self.kernel_size
        if x.ndim != 4 or x.shape[-2] % s or x.shape[-1] % s:
            raise ShapeError(
                f"ScaledAvgPool2d: expected (B, C, H, W) with H and W multiples of {s}, got {tuple(x.shape)}"
            )
        return nn.functional.avg_pool2d(x, s) * s

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


add_plain(Plain(ConvexSum, join=blend_of(lambda join: join.weight())))
lipschitz_rule(Residual)(graph_constant)
export_rule(Residual)(export_graph)


# abs: a state dict may hold a std of any sign.
lipschitz_rule(Normalize)(lambda m, input_shape: reciprocal_up(float(m.std.to(torch.float64).abs().amin())))
lipschitz_rule(Rescale)(lambda module, input_shape: module.units.to(torch.float64).abs().amax())
lipschitz_rule(Scale)(lambda module, input_shape: module.gamma().to(torch.float64).abs())
lipschitz_rule(ScaledAvgPool2d)(1.0)
# One number for all channels.
export_rule(Scale)(lambda module, input_shape: Affine(module.gamma().reshape(1), module.gamma().new_zeros(1)))


@export_rule(Normalize)
def _export_normalize(module: Normalize, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    scale, dtype = 1 / module.std.double(), module.std.dtype
    return Affine(scale.to(dtype), (-module.mean.double() * scale).to(dtype))  # rounded once


@export_rule(Rescale)
def _export_rescale(module: Rescale, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)  # refuses another number of channels
    return Affine(module.units, module.offset)


@export_rule(ScaledAvgPool2d)
def _export_pool(module: ScaledAvgPool2d, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return nn.AvgPool2d(module.kernel_size, divisor_override=module.kernel_size)  # s means of s^2 pixels
