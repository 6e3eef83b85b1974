"""Modules, torch's among them, that reorder, reshape, repeat, pad or select the numbers of a sample.

All are exact, except bilinear upsampling. Dimensions are counted as in torch; all leave dimension 0, the batch, alone.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.modules.machine import exact
from lipkit.modules.plain import COUNT, INTEGER, Plain, Shape, Shown, add_plain, one_sign, whole
from lipkit.modules.registry import output_shape
from lipkit.proof.roundoff import root


class Reshape(Shown):
    """The numbers of each sample under another shape, in the same order; ``Reshape()`` takes one number, to ``(N,)``.

    Raises:
        OptionError: sizes below 1. ShapeError: an input of another number of entries.

    >>> Reshape(2, 2)(torch.arange(4.0)[None]).tolist()
    [[[0.0, 1.0], [2.0, 3.0]]]
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        if min(shape, default=1) < 1:
            raise OptionError(f"Reshape: expected positive sizes, got {shape}")
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or math.prod(x.shape[1:]) != math.prod(self.shape):
            raise ShapeError(f"Reshape: expected {math.prod(self.shape)} entries of each sample, got {tuple(x.shape)}")
        return x.reshape(x.shape[0], *self.shape)


def per_channel(module: Any, values: Tensor, x: Tensor) -> Tensor:
    """``values`` (..., n) shaped to meet dimension 1 of x; ``ShapeError`` unless x has the module's channels there."""
    if x.ndim < 2 or x.shape[1] != module.channels:
        got = f"got shape {tuple(x.shape)}" + ": one sample is x[None]" * (x.ndim == 1)
        raise ShapeError(f"{type(module).__name__}: expected {module.channels} channels in dimension 1, {got}")
    return values.view(*values.shape, *[1] * (x.ndim - 2))


def channels_of(x: Tensor, name: str) -> int:
    """The size of dimension 1; ``ShapeError`` for a sample without its batch."""
    if x.ndim > 1:
        return x.shape[1]
    raise ShapeError(f"{name}: expected a batch (N, C, ...), got shape {tuple(x.shape)}: one sample is x[None]")


def numbered(shape: Shape) -> Tensor:
    """The numbers 1, 2, ... as a sample of this shape: behind a module that moves entries they tell where each is from.

    0 is padding.
    """
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device="cpu").view(1, *shape)


def reshaped(shape: Shape) -> nn.Module:
    """The module that gives samples this shape."""
    return nn.Flatten() if len(shape) == 1 else Reshape(*shape)


class Together(Shown):
    """The base of modules that act on several dimensions ``dims`` at once; dimension 0 is the batch."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        if not dims or min(dims) < 1 or len(set(dims)) != len(dims):
            expected = "expected different dimensions after the batch, at least 1"
            raise OptionError(f"{type(self).__name__}: {expected}, got {dims}")
        self.dims = tuple(dims)


class Permute(Shown):
    """Dimensions 1, 2, ... in another order; 0, the batch, stays first.

    Raises:
        OptionError: not a permutation of 1, 2, ...

    >>> Permute(2, 1)(torch.zeros(1, 3, 4)).shape
    torch.Size([1, 4, 3])
    """

    def __init__(self, *dims: int) -> None:
        super().__init__()
        if sorted(dims) != list(range(1, len(dims) + 1)):
            raise OptionError(f"Permute: expected 1, 2, ... in any order, got {dims}")
        self.dims = tuple(dims)

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, *self.dims)


class Piece(Shown):
    """The entries ``start, start + step, ...`` below ``stop`` of one dimension, as chunks and slices take them.

    Raises:
        OptionError: a dimension below 1, or no entry. ShapeError: an input without some of the entries.

    >>> Piece(1, 1, 4, 2)(torch.arange(5.0)[None]).tolist()
    [[1.0, 3.0]]
    """

    def __init__(self, dim: int, start: int, stop: int, step: int = 1) -> None:
        super().__init__()
        if dim < 1 or start < 0 or step < 1 or not range(start, stop, step):
            got = f"dim={dim}, start={start}, stop={stop}, step={step}"
            raise OptionError(f"Piece: expected entries of a dimension from 1 on, got {got}")
        self.dim, self.start, self.stop, self.step = dim, start, stop, step

    @property
    def entries(self) -> range:
        """The entries that are taken."""
        return range(self.start, self.stop, self.step)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim <= self.dim or x.shape[self.dim] <= self.entries[-1]:
            raise ShapeError(f"Piece: expected entry {self.entries[-1]} in dimension {self.dim}, got {tuple(x.shape)}")
        return x[(slice(None),) * self.dim + (slice(self.start, self.stop, self.step),)]


class Roll(Shown):
    """The entries of one dimension moved circularly, as by ``torch.roll``.

    >>> Roll(1, 1)(torch.arange(3.0)[None]).tolist()
    [[2.0, 0.0, 1.0]]
    """

    def __init__(self, dim: int, shift: int) -> None:
        super().__init__()
        if dim < 1:
            raise OptionError(f"Roll: expected a dimension after the batch, at least 1, got {dim}")
        self.dim, self.shift = dim, shift

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(self.shift, self.dim)


class Pad(Shown):
    """Zeros around the last dimensions, as ``torch.nn.functional.pad``; negative numbers cut off.

    Args:
        padding: before and after the last dimension, the one before it, and so on.

    Raises:
        OptionError: an odd number of sizes. ShapeError: an input of too few dimensions, whose batch would be padded.

    >>> Pad(1, 0)(torch.ones(1, 2)).tolist()
    [[0.0, 1.0, 1.0]]
    """

    def __init__(self, *padding: int) -> None:
        super().__init__()
        if not padding or len(padding) % 2:
            raise OptionError(f"Pad: expected sizes before and after each dimension, got {padding}")
        self.padding = tuple(padding)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim <= len(self.padding) // 2:
            raise ShapeError(f"Pad: expected more than {len(self.padding) // 2} dimensions, got {tuple(x.shape)}")
        y = F.pad(x, [max(size, 0) for size in self.padding]) if max(self.padding) > 0 else x  # cuts follow
        # Cuts are slices: not every runtime takes negative sizes.
        for i, (before, after) in enumerate(zip(self.padding[::2], self.padding[1::2], strict=True)):
            if min(before, after) < 0:
                begin, end = max(-before, 0), y.shape[-1 - i] - max(-after, 0)
                y = y.narrow(y.ndim - 1 - i, begin, end - begin)
        return y


class Enlarge(Shown):
    r"""Every pixel ``rows`` times ``cols``: nearest-neighbour upsampling, of constant :math:`\sqrt{rows\,cols}`.

    Raises:
        OptionError: factors below 1. ShapeError: an input that is not an image.

    >>> Enlarge(1, 2)(torch.tensor([[[[1.0, 2.0]]]])).tolist()
    [[[[1.0, 1.0, 2.0, 2.0]]]]
    """

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        if min(rows, cols) < 1:
            raise OptionError(f"Enlarge: expected factors of at least 1, got {rows} and {cols}")
        self.rows, self.cols = rows, cols

    def _check(self, x: Tensor) -> None:
        if x.ndim != 4:
            raise ShapeError(f"{type(self).__name__}: expected images (B, C, H, W), got {tuple(x.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return x.repeat_interleave(self.rows, 2).repeat_interleave(self.cols, 3)


class EnlargeBilinear(Enlarge):
    r"""Bilinear upsampling by powers of two, of constant :math:`\sqrt{rows\,cols}`.

    Along an axis the map is a matrix of weights at least 0 whose rows sum to 1 and whose columns sum to the factor f,
    at the borders too: :math:`\|A\|^2 \le \|A\|_1 \|A\|_\infty = f`, which equal pixels attain. Weights are multiples
    of 1 / 2f, exact in every format; pixels lie as with ``align_corners=False``.

    Raises:
        OptionError: factors that are not powers of two. ShapeError: an input that is not an image.

    >>> EnlargeBilinear(1, 2)(torch.tensor([[[[0.0, 4.0]]]])).tolist()
    [[[[0.0, 1.0, 3.0, 4.0]]]]
    """

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__(rows, cols)
        if rows & (rows - 1) or cols & (cols - 1):
            raise OptionError(f"EnlargeBilinear: expected powers of two as factors, got {rows} and {cols}")

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        factors = [float(self.rows), float(self.cols)]
        return F.interpolate(x, scale_factor=factors, mode="bilinear", align_corners=False)


class Expand(Shown):
    """The numbers of each sample repeated to another shape, along its dimensions of size 1.

    Raises:
        OptionError: sizes below 1. ShapeError: an input that does not fit it.

    >>> Expand(2, 2)(torch.tensor([[[1.0, 2.0]]])).tolist()
    [[[1.0, 2.0], [1.0, 2.0]]]
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        if not shape or min(shape) < 1:
            raise OptionError(f"Expand: expected positive sizes, got {shape}")
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        fits = x.ndim == len(self.shape) + 1
        if not fits or any(n not in (1, m) for n, m in zip(x.shape[1:], self.shape, strict=True)):
            raise ShapeError(f"Expand: expected samples that can be repeated to {self.shape}, got {tuple(x.shape)}")
        return x.expand(-1, *self.shape)


def _expand(module: Expand, input_shape: Shape | None) -> float:
    if input_shape is None:
        return root(math.prod(module.shape))  # as if all of it were copies of one number
    output_shape(module, input_shape)  # of another shape the quotient below could be 0
    return root(math.prod(module.shape) // math.prod(input_shape))


def enlarged(module: Enlarge, input_shape: Shape | None) -> float:
    return root(module.rows * module.cols)


def _export_enlarge(module: Enlarge, input_shape: Shape) -> nn.Module:
    (c, h, w), together = input_shape, output_shape(module, input_shape)
    return nn.Sequential(Reshape(c, h, 1, w, 1), Expand(c, h, module.rows, w, module.cols), Reshape(*together))


def _export_zeros(module: nn.ZeroPad2d, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)  # torch cuts before it pads, `Pad` after it
    return Pad(*module.padding)


def _dropout(module: nn.Module, input_shape: Shape | None) -> float:
    if module.training:
        raise NoRuleError(
            f"nn.{type(module).__name__}: expected evaluation mode, got training mode, where the output is random; "
            "call .eval()"
        )
    return 1.0


def _left_out(module: nn.Module, input_shape: Shape) -> nn.Module:
    _dropout(module, input_shape)
    return nn.Sequential()


def _channel_shuffle(module: nn.ChannelShuffle, input_shape: Shape | None) -> float:
    if input_shape is not None and input_shape[0] % module.groups:
        raise ShapeError(f"nn.ChannelShuffle: expected channels in {module.groups} groups, got {input_shape[0]}")
    return 1.0


def _export_channel_shuffle(module: nn.ChannelShuffle, input_shape: Shape) -> nn.Module:
    _channel_shuffle(module, input_shape)
    channels, *rest = input_shape
    apart = Reshape(module.groups, channels // module.groups, *rest)
    return nn.Sequential(apart, Permute(2, 1, *range(3, 3 + len(rest))), Reshape(*input_shape))


def _export_pixels(module: nn.PixelShuffle | nn.PixelUnshuffle, input_shape: Shape) -> nn.Module:
    (*lead, c, h, w), together = input_shape, output_shape(module, input_shape)
    if isinstance(module, nn.PixelShuffle):
        r = module.upscale_factor
        apart, order = (c // r**2, r, r, h, w), (1, 4, 2, 5, 3)  # a row of pixels and its r channels, then columns
    else:
        r = module.downscale_factor
        apart, order = (c, h // r, r, w // r, r), (1, 3, 5, 2, 4)
    n = len(lead)  # dimensions in front, which stay
    moved = Permute(*range(1, n + 1), *(n + dim for dim in order))
    return nn.Sequential(Reshape(*lead, *apart), moved, Reshape(*together))


def shift(x: Tensor, moved: int, steps: int = 1) -> Tensor:
    """The last 4 ``moved`` channels moved circularly by one pixel: ``moved`` each down, up, right and left.

    A permutation, so an isometry: between pointwise layers it lets neighbours meet, without a product.

    Args:
        x: ``(B, C, H, W)`` with C >= 4 ``moved``.
        moved: channels of each direction, at least 1.
        steps: pixels; -1 undoes what 1 does.

    >>> x = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2).repeat(1, 4, 1, 1)
    >>> shift(x, 1)[0, :, 0].tolist()  # a single row has no other to move to
    [[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [2.0, 1.0]]

    References:
        Wu et al., CVPR 2018 (shift instead of spatial convolutions); LipNeXt, ICLR 2026 (as an isometry).
    """
    kept, down, up, right, left = x.split([x.shape[1] - 4 * moved, *[moved] * 4], dim=1)
    rolled = [down.roll(steps, 2), up.roll(-steps, 2), right.roll(steps, 3), left.roll(-steps, 3)]
    return torch.cat([kept, *rolled], dim=1)


class Shift2d(Shown):
    """:func:`shift` as a module, for inputs with ``channels`` channels: 1-Lipschitz.

    Raises:
        OptionError: fewer than 4 ``moved`` channels. ShapeError: a wrong number of channels, or no image.

    >>> Shift2d(16, 2)(torch.zeros(1, 16, 4, 4)).shape
    torch.Size([1, 16, 4, 4])
    """

    def __init__(self, channels: int, moved: int) -> None:
        super().__init__()
        if moved < 1 or channels < 4 * moved:
            raise OptionError(f"Shift2d: expected channels >= 4 * moved >= 4, got channels={channels}, moved={moved}")
        self.channels, self.moved = channels, moved

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ShapeError(f"Shift2d: expected images (B, {self.channels}, H, W), got {tuple(x.shape)}")
        return shift(x, self.moved)


def _flat(module: nn.Flatten | nn.Unflatten, shape: Shape) -> nn.Module:
    return reshaped(output_shape(module, shape))


_first, _last = (lambda dim: type(dim) is int and dim == 1), (lambda dim: type(dim) is int and dim == -1)
add_plain(Plain(Reshape, 1.0, exact, {"shape": COUNT}, one_sign))
add_plain(Plain(Permute, 1.0, exact, {"dims": COUNT}, one_sign))
add_plain(Plain(Piece, 1.0, exact, {"dim": COUNT, "start": whole(0), "stop": COUNT, "step": COUNT}, one_sign))
add_plain(Plain(Roll, 1.0, exact, {"dim": COUNT, "shift": INTEGER}, one_sign))
add_plain(Plain(Pad, 1.0, exact, {"padding": INTEGER}, one_sign))
add_plain(Plain(Enlarge, enlarged, export=_export_enlarge, dims=(3, 3)))
add_plain(Plain(Expand, _expand, exact, {"shape": COUNT}, one_sign))
add_plain(Plain(Shift2d, 1.0, exact, {"channels": COUNT, "moved": COUNT}))
for _kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout):
    add_plain(Plain(_kind, _dropout, export=_left_out))
add_plain(Plain(nn.Identity, 1.0, range=one_sign, export=lambda module, input_shape: nn.Sequential()))
add_plain(Plain(nn.ZeroPad2d, 1.0, export=_export_zeros, dims=(2, 9)))
add_plain(Plain(nn.Flatten, 1.0, exact, {"start_dim": _first, "end_dim": _last}, one_sign, export=_flat))
add_plain(Plain(nn.Unflatten, 1.0, export=_flat))
for _pixels in (nn.PixelShuffle, nn.PixelUnshuffle):
    add_plain(Plain(_pixels, 1.0, export=_export_pixels, dims=(3, 9)))
add_plain(Plain(nn.ChannelShuffle, _channel_shuffle, export=_export_channel_shuffle))
