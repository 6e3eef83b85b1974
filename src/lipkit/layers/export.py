"""Exports of constrained layers: made in float64, rounded once, as the plainest modules that compute them.

For a layer whose norm is at most 1 by construction, :func:`register_one_lipschitz` registers all rules that it needs.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipkit.conv import Symbol, kernel_symbol
from lipkit.conv.patches import patch_kernel
from lipkit.conv.spectrum import as_complex
from lipkit.errors import NoRuleError, OptionError
from lipkit.layers.base import ConstrainedConv2d, ConstrainedLinear, KernelConv2d, SymbolConv2d
from lipkit.linalg import at_least_float32
from lipkit.modules import FourierConv2d, Shape, export_rule, lipschitz_rule

__all__ = ["export_kernel_conv", "export_linear", "export_symbol_conv", "register_one_lipschitz"]  # rules
__all__ += ["exactly", "in_float64", "placed_like"]  # made in float64
__all__ += ["circular_module", "filled", "linear_module", "patch_module", "torch_layer"]  # plain modules
__all__ += ["resampled_size", "stride_modules"]

Layer = TypeVar("Layer", bound=nn.Module)


def stride_modules(layer: ConstrainedConv2d) -> list[nn.Module]:
    """The plain module of the emulated stride: one, or none for a stride of 1."""
    return [nn.PixelUnshuffle(layer.stride)] if layer.stride > 1 else []


def in_float64(layer: Layer) -> Layer:
    """A float64 copy of a layer, on the CPU where its device has no float64.

    A transform that is ill-conditioned in float32 (Cayley of huge weights) then keeps its guarantee up to rounding.
    """
    twin = copy.deepcopy(layer)  # .double() acts in place
    return (twin.cpu() if next(layer.parameters()).device.type == "mps" else twin).double()


def placed_like(layer: nn.Module, exact: Tensor) -> Tensor:
    """``exact`` in the dtype (float32 at least) and on the device of the layer's parameters."""
    own = at_least_float32(next(layer.parameters()).detach())
    return exact.to(device=own.device, dtype=own.dtype)


APART = 1e-2  # largest change of a row over the largest row: float32 rounding makes 1e-6, a lost direction 1


def exactly(layer: Layer, make: Callable[[Layer], Iterable[Tensor]], size: tuple[int, int] = (1, 1)) -> list[Tensor]:
    """The objects that ``make`` gives for a layer, in float64 and rounded once, if its own dtype gives the same.

    Args:
        make: maps a layer to its constrained objects. size: of the image after downsampling, for the message only.

    Raises:
        OptionError: both differ, because the layer's dtype loses too much of the parameters.
    """
    found = [placed_like(layer, exact) for exact in make(in_float64(layer))]
    if all(exact.dtype == torch.float64 for exact in found):
        return found  # nothing was rounded
    for own, exact in zip(make(layer), found, strict=True):
        off = torch.linalg.vector_norm(own.nan_to_num(nan=math.inf) - exact, dim=-1)
        apart = float(off.amax() / torch.linalg.vector_norm(exact, dim=-1).amax()) if exact.numel() else 0.0
        if apart > APART:
            raise OptionError(
                f"export: expected a {type(layer).__name__} that is the same in {own.dtype} and float64, got weights "
                f"that differ by {apart:.2g}, because its parameters have {_singular_values(layer, size)}: give them "
                "full rank and a size near 1, or export layer.double()"
            )
    return found


def _singular_values(layer: nn.Module, size: tuple[int, int]) -> str:
    """Rank and singular values of a layer's free matrices in words; for a `SymbolConv2d`, those at each frequency."""
    like = next(p for p in layer.parameters() if p.ndim > 1)  # neither scale nor bias
    free = getattr(in_float64(layer), "directions", lambda: like.detach().cpu().double())()
    matrices = [free.flatten(1)[None]]
    if isinstance(layer, SymbolConv2d):
        real, pair = kernel_symbol(free, *size)
        matrices = [real, as_complex(pair)]  # one of each conjugate pair
    values = torch.cat([torch.linalg.svdvals(part).flatten(0, -2) for part in matrices if len(part)])
    rank = int((values > torch.finfo(torch.float32).eps * values.shape[-1] * values.amax()).sum(-1).amin())
    return f"rank {rank} of {values.shape[-1]} and singular values from {values.amin():.3g} to {values.amax():.3g}"


def export_linear(layer: ConstrainedLinear, input_shape: Shape) -> nn.Module:
    """``nn.Linear`` with the layer's present constrained matrix."""
    layer.check_input(input_shape)
    return linear_module(exactly(layer, lambda made: [made.weight()])[0], layer.bias)


def linear_module(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """The ``nn.Linear`` with copies of this matrix and bias."""
    sizes = weight.shape[1], weight.shape[0]
    return filled(nn.Linear(*sizes, bias is not None, device=weight.device, dtype=weight.dtype), weight, bias)


def filled(plain: Layer, weight: Tensor, bias: Tensor | None) -> Layer:
    """``plain`` with these values copied into it."""
    with torch.no_grad():
        plain.get_parameter("weight").copy_(weight)
        if bias is not None:
            plain.get_parameter("bias").copy_(bias)
    return plain


def torch_layer(kind: type[Any], module: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """The layer of torch with the options of ``module``, which has them under torch's names, and these values."""
    names = inspect.signature(kind).parameters.keys() - {"bias", "device", "dtype"}
    options = {name: getattr(module, name) for name in names}
    plain = kind(**options, bias=bias is not None, device=weight.device, dtype=weight.dtype)
    if plain.weight.shape != weight.shape:
        raise NoRuleError(
            f"{type(module).__name__}: expected a weight of shape {tuple(plain.weight.shape)}, as of "
            f"nn.{kind.__name__}, got {tuple(weight.shape)}"
        )
    return filled(plain, weight, bias)


def resampled_size(layer: ConstrainedConv2d, input_shape: Shape) -> tuple[int, int]:
    """Image size after downsampling; ``ShapeError`` if the layer does not accept ``input_shape``."""
    layer.check_input(torch.empty(1, *input_shape, device="meta"))  # a shape without numbers
    return input_shape[1] // layer.stride, input_shape[2] // layer.stride


def export_symbol_conv(layer: SymbolConv2d, input_shape: Shape) -> nn.Module:
    """Pixel-unshuffle and a :class:`FourierConv2d` with the symbol as it is now; one strided product if pointwise."""
    size = resampled_size(layer, input_shape)
    if layer.pointwise:
        return patch_module(exactly(layer, lambda made: [made.matrix()])[0], layer.stride, layer.bias)
    symbol = Symbol(*exactly(layer, lambda made: made.symbol(*size), size))
    return nn.Sequential(*stride_modules(layer), FourierConv2d.from_symbol(symbol, *size, layer.bias))


def circular_module(kernel: Tensor, bias: Tensor | None, padding_mode: str = "circular") -> nn.Conv2d:
    """The ``nn.Conv2d`` with copies of this kernel and bias that keeps the image size, by this kind of padding."""
    return _module(kernel, bias, padding="same", padding_mode=padding_mode)


def patch_module(matrix: Tensor, stride: int, bias: Tensor | None) -> nn.Conv2d:
    """The ``nn.Conv2d`` that multiplies each s x s patch by a copy of ``matrix`` (cout, s^2 cin) and adds ``bias``."""
    return _module(patch_kernel(matrix, stride), bias, stride=stride)


def _module(kernel: Tensor, bias: Tensor | None, **options: Any) -> nn.Conv2d:
    cout, cin, kh, kw = kernel.shape
    plain = nn.Conv2d(cin, cout, (kh, kw), bias=bias is not None, device=kernel.device, dtype=kernel.dtype, **options)
    return filled(plain, kernel, bias)


def export_kernel_conv(layer: KernelConv2d, input_shape: Shape) -> nn.Module:
    """Pixel-unshuffle and a padded ``nn.Conv2d`` with the present kernel; if pointwise one strided ``nn.Conv2d``."""
    size = resampled_size(layer, input_shape)
    if layer.pointwise:
        return patch_module(exactly(layer, lambda made: [made.kernel().flatten(1)])[0], layer.stride, layer.bias)
    # The kernel is folded to the image, because nn.Conv2d pads by at most one period.
    (kernel,) = exactly(layer, lambda made: [made.fitted(made.kernel(), *size)])
    return nn.Sequential(*stride_modules(layer), circular_module(kernel, layer.bias, layer.padding_mode))


def register_one_lipschitz(*types: type[nn.Module]) -> None:
    """Register the rules of ``lipschitz`` and ``export`` for exactly these layer classes, 1-Lipschitz by construction.

    The export follows from the base class: ``nn.Linear``, :class:`FourierConv2d` or a circular ``nn.Conv2d``.
    """
    exports: list[tuple[type[nn.Module], Callable[..., nn.Module]]] = [
        (ConstrainedLinear, export_linear),
        (SymbolConv2d, export_symbol_conv),
        (KernelConv2d, export_kernel_conv),
    ]
    for kind in types:
        lipschitz_rule(kind)(1.0)
        export_rule(kind)(next(rule for base, rule in exports if issubclass(kind, base)))
