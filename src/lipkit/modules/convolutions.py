r"""Rules of torch's convolutions: the bound of the kernel times the norm of the padding.

A strided convolution is one of stride 1 after a permutation of pixels, so its bound is that of the polyphase kernel.

A padded convolution is the convolution of the plane restricted to a window, after an operator :math:`P` that copies
pixels into the border. Every padded pixel is one pixel of the image, so the columns of P are orthogonal and
:math:`\|P\|_2^2` is the largest number of copies of a pixel (itself included), the product over the axes of

* zeros: 1;
* replicate: 1 + the wider border (both borders together on an image of one pixel);
* reflect: 2, or 3 where both borders reach the same pixel (together at least n - 1 of n >= 3), 1 without a border;
* circular: at most one more for each whole period: here only paddings of at most ``dilation (k - 1)`` in total are
  accepted, for which the outputs are those of one period and the norm is that of the circular convolution.
"""

import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lipkit.bounds import circular, polyphase, symbol_sup
from lipkit.errors import NoRuleError
from lipkit.modules.dense import linear_error, linear_range
from lipkit.modules.plain import COUNT, Accepts, Plain, RoundingError, Shape, add_plain, either, flag, whole
from lipkit.modules.registry import export_plain, lipschitz, output_shape
from lipkit.modules.views import Reshape
from lipkit.proof.roundoff import Arithmetic, up

_Conv = nn.Conv2d | nn.ConvTranspose2d

# Arguments that leave an axis of one row as it is.
_OF_A_ROW = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "output_size": 1}


def on_row(module: Any) -> Any:
    """The 2-D module that does to images of one row what a 1-D convolution or pooling does to signals."""
    kind = getattr(nn, type(module).__name__.replace("1d", "2d"))
    row, own = kind.__new__(kind), vars(module)
    vars(row).update({"divisor_override": None, **own})  # nn.AvgPool1d lacks it
    for key, neutral in _OF_A_ROW.items():
        size = own.get(key)
        if size is not None and not isinstance(size, str):
            vars(row)[key] = (neutral, size[-1] if isinstance(size, tuple | list) else size)
    if "weight" in module._parameters:
        weight = module.weight[:, :, None]  # a view, which hands on derivatives
        moves = weight.requires_grad and torch.is_grad_enabled()  # an export holds parameters
        weight = weight if moves else nn.Parameter(weight, requires_grad=False)
        vars(row)["_parameters"] = {**module._parameters, "weight": weight}
        vars(row)["_reversed_padding_repeated_twice"] = [*module._reversed_padding_repeated_twice, 0, 0]
    return row


def constant_on_row(module: nn.Module, input_shape: Shape | None) -> Tensor:
    return lipschitz(on_row(module), None if input_shape is None else (input_shape[0], 1, *input_shape[1:]))


def export_on_row(module: nn.Module, input_shape: Shape) -> nn.Module:
    before, after = (input_shape[0], 1, *input_shape[1:]), output_shape(module, input_shape)
    return nn.Sequential(Reshape(*before), export_plain(on_row(module), before), Reshape(*after))


def copies(mode: str, before: int, after: int, size: int | None) -> int:
    """Largest number of copies of a pixel on an axis of ``size`` pixels (None: any) that is padded at both ends."""
    before, after = max(before, 0), max(after, 0)
    if mode == "circular":
        return 1 + before + after if size is None else math.ceil((before + size + after) / size)
    if mode == "replicate":
        return 1 + (before + after if size is None or size == 1 else max(before, after))
    if mode == "reflect":
        meet = before and after and (size is None or 3 <= size <= before + after + 1)  # both borders copy one pixel
        return 3 if meet else 2 if before or after else 1
    return 1


def borders(module: Any) -> list[tuple[int, int]]:
    """Pixels padded before and after on each axis: what the forward pass hands to F.pad, the last axis first."""
    flat = list(module._reversed_padding_repeated_twice)
    return [(flat[i], flat[i + 1]) for i in reversed(range(0, len(flat), 2))]


def padded_copies(module: Any, input_shape: Shape | None) -> int:
    """The most copies of one pixel in the padded image or signal."""
    if module.padding_mode == "zeros":
        return 1
    pads = borders(module)
    sizes = (None,) * len(pads) if input_shape is None else input_shape[1:]
    return math.prod(copies(module.padding_mode, *pad, n) for pad, n in zip(pads, sizes, strict=True))


def kernel_with_stride(module: Any) -> Tensor:
    """A kernel whose convolution of stride 1 has at least the module's norm, both on the infinite plane.

    The norms are equal unless the module is dilated.
    """
    if module.weight.ndim == 3:
        module = on_row(module)
    kernel: Tensor = module.weight
    # Dilated taps meet the phases of the stride in another pattern: their bound is that of stride 1.
    plain = all(d == 1 or k == 1 for d, k in zip(module.dilation, kernel.shape[2:], strict=True))
    return polyphase(kernel, module.stride) if plain else kernel


def _on_plane(module: _Conv) -> Tensor:
    return symbol_sup(kernel_with_stride(module), groups=module.groups)


def _conv(module: nn.Conv2d, input_shape: Shape | None) -> Tensor:
    kernel, groups, mode = module.weight, module.groups, module.padding_mode
    if mode == "zeros":
        return _on_plane(module)
    if mode in ("reflect", "replicate"):
        count, bound = padded_copies(module, input_shape), _on_plane(module)
        return up(bound * math.sqrt(count), 3) if count > 1 else bound
    if mode != "circular":
        raise NoRuleError(
            f"nn.Conv2d: expected padding_mode 'zeros', 'circular', 'reflect' or 'replicate', got {mode!r}"
        )
    reach = [(size - 1) * d for size, d in zip(module.weight.shape[2:], module.dilation, strict=True)]  # of a window
    padded = [before + after for before, after in borders(module)]
    if any(p > r for p, r in zip(padded, reach, strict=True)):
        raise NoRuleError(
            f"nn.Conv2d with circular padding: expected at most {reach} padded rows and columns in total "
            f"(dilation x (kernel_size - 1)), got {padded}: outputs beyond one period repeat and raise the norm"
        )
    if input_shape is not None and all(d == 1 for d in module.dilation):
        sides, stride = (input_shape[1], input_shape[2]), (module.stride[0], module.stride[1])
        if all(side % s == 0 for side, s in zip(sides, stride, strict=True)):
            kernel, sides = polyphase(kernel, stride), (sides[0] // stride[0], sides[1] // stride[1])
        # Else the windows are some of those of stride 1.
        return circular(kernel, *sides, groups=groups)
    # A bound for every image size, including those whose last window meets the first one out of phase.
    return symbol_sup(kernel, groups=groups)


def _transposed(module: nn.ConvTranspose2d, input_shape: Shape | None) -> Tensor:
    # Rows of the adjoint of a strided convolution of the plane; padding and output_padding choose which.
    if module.padding_mode != "zeros":
        raise NoRuleError(f"nn.ConvTranspose2d: expected padding_mode 'zeros', got {module.padding_mode!r}")
    return _on_plane(module)


def _three(module: nn.Module, input_shape: Shape | None) -> NoReturn:
    raise NoRuleError(
        f"nn.{type(module).__name__}: expected a convolution of one or two dimensions, got three: its symbol has three "
        "frequencies, which no bound here covers; register a rule with lipkit.modules.lipschitz_rule"
    )


def windows_overlap(conv: nn.Conv1d | nn.Conv2d) -> bool:
    """True if some pixel lies in two windows of the convolution: its kernel reaches further than its stride.

    Without overlap the layer is a product of matrices, and no fast algorithm can share work between windows.
    """
    reach = (d * (k - 1) for d, k in zip(conv.dilation, conv.weight.shape[2:], strict=True))
    return any(one >= step for one, step in zip(reach, conv.stride, strict=True))


def _conv_error(module: _Conv, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    return linear_error(module, input_shape, arithmetic, padded_copies(module, input_shape))


def _padding(sizes: Accepts) -> Accepts:
    return lambda value: value in ("same", "valid") if isinstance(value, str) else sizes(value)


_counts, _sizes = whole(1, count=2), whole(0, count=2)
_both = {"in_channels": COUNT, "out_channels": COUNT, "kernel_size": _counts, "stride": _counts, "bias": flag}
_both |= {"dilation": _counts, "groups": COUNT}
_modes = either(None, "zeros", "reflect", "replicate", "circular")
_own, _back = {"padding": _padding(_sizes), "padding_mode": _modes}, {"padding": _sizes, "output_padding": _sizes}
add_plain(Plain(nn.Conv2d, _conv, _conv_error, _both | _own, linear_range, dims=(3, 3)))
add_plain(Plain(nn.ConvTranspose2d, _transposed, _conv_error, _both | _back, linear_range, dims=(3, 3)))
_signals = (nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d)
for _kind in (nn.Conv3d, nn.ConvTranspose3d):
    add_plain(Plain(_kind, _three, export=_three))
for _signal in _signals:
    add_plain(Plain(_signal, constant_on_row, export=export_on_row, dims=(2, 2)))
