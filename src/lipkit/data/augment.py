"""Augmentation of a batch of images: pure functions, on the device the images are on."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional

from lipkit.errors import OptionError, ShapeError


def random_crop(x: Tensor, padding: int, generator: Generator) -> Tensor:
    r"""Shift each image by its own random offset, zeros coming in from the border.

    The image is padded by `padding` zeros on each side and an H x W window is cut out of it:

    .. math:: z_{n,c,i,j} = \mathrm{pad}(x)_{n,c,\,i + a_n,\,j + b_n}, \quad
        a_n, b_n \sim U\{0, \dots, 2\,\mathrm{padding}\}

    Args:
        x: images of shape (N, C, H, W), any dtype.
        padding: p >= 0, in pixels.
        generator: the only source of randomness. A CPU generator gives the same offsets for `x` on any
            device.

    Returns:
        a new tensor of the shape, dtype and device of `x`.

    Raises:
        ShapeError: if `x` is not of shape (N, C, H, W).
        OptionError: if `padding` is not an integer >= 0.

    Example:
        >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
        >>> random_crop(x, 1, torch.Generator().manual_seed(0)).shape
        torch.Size([1, 1, 2, 2])

    References:
        He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2.
    """
    _check_images(x)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise OptionError(f"expected padding as an integer >= 0, got {padding!r}")
    n, _, height, width = x.shape
    # Drawn where the generator lives, then moved: two numbers per image.
    offset = torch.randint(2 * padding + 1, (2, n), generator=generator, device=generator.device).to(x.device)
    padded = functional.pad(x, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, 2p + 1, 2p + 1, H, W)
    return windows[torch.arange(n, device=x.device), :, offset[0], offset[1]]


def random_flip(x: Tensor, generator: Generator) -> Tensor:
    """Mirror each image left to right with probability 1/2.

    Args:
        x: images of shape (N, C, H, W), any dtype.
        generator: the only source of randomness. A CPU generator gives the same choices for `x` on any
            device.

    Returns:
        a new tensor of the shape, dtype and device of `x`.

    Raises:
        ShapeError: if `x` is not of shape (N, C, H, W).

    Example:
        >>> x = torch.arange(3.0).reshape(1, 1, 1, 3).repeat(4, 1, 1, 1)
        >>> random_flip(x, torch.Generator().manual_seed(1))[:, 0, 0, 0].unique()
        tensor([0., 2.])
    """
    _check_images(x)
    chosen = torch.randint(2, (len(x),), generator=generator, device=generator.device).to(x.device).bool()
    return torch.where(chosen[:, None, None, None], x.flip(-1), x)


def _check_images(x: Tensor) -> None:
    if x.ndim != 4:
        raise ShapeError(f"expected images of shape (N, C, H, W), got {tuple(x.shape)}")


# Of red, green and blue in the luma of ITU-R BT.601.
LUMA = (0.299, 0.587, 0.114)


def color_jitter(
    x: Tensor,
    generator: Generator,
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
) -> Tensor:
    r"""Change brightness, contrast, saturation and hue of each image by its own random amounts, in this order.

    .. math:: x_1 = \kappa(b\, x),\quad
              x_2 = \kappa(c\, x_1 + (1 - c)\, \overline{g(x_1)}),\quad
              x_3 = \kappa(s\, x_2 + (1 - s)\, g(x_2)),\quad
              x_4 = \mathrm{rgb}(H + h \bmod 1, S, V)

    with g the grey image (luma) and its mean over the pixels, :math:`\kappa` the cut to [0, 1], (H, S, V) the hue,
    saturation and value of :math:`x_3`, and for each image b, c, s uniform in [max(0, 1 - a), 1 + a], a the argument,
    and h uniform in [-hue, hue]. All four are drawn, used or not, so one argument does not change what another does.

    Args:
        x: images of shape (N, C, H, W), floating point in [0, 1]; C = 3, or C = 1 for brightness and contrast only.
        generator: the only source of randomness. A CPU generator gives the same amounts for `x` on any device.
        brightness, contrast, saturation: half width of the range of the factor, >= 0.
        hue: in [0, 1/2], in turns of the colour circle.

    Returns:
        a new tensor of the shape, dtype and device of `x`, in [0, 1].

    Raises:
        ShapeError: if `x` is not of such a shape. OptionError: an amount out of range, or images that are not
            floating point.

    Example:
        >>> x = torch.full((2, 3, 1, 1), 0.5)
        >>> z = color_jitter(x, torch.Generator().manual_seed(0), brightness=0.4)
        >>> bool((z >= 0.3).all() and (z <= 0.7).all()), bool(z[0, 0] == z[1, 0])
        (True, False)

    References:
        Smith, "Color gamut transform pairs", SIGGRAPH 1978 (HSV); ITU-R BT.601 (luma).
    """
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise ShapeError(f"expected images of shape (N, 3, H, W) or (N, 1, H, W), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise OptionError(f"expected floating-point images in [0, 1], got {str(x.dtype).removeprefix('torch.')}")
    for name, amount in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation), ("hue", hue)):
        _check(name, amount, 0.5 if name == "hue" else math.inf)
    if x.shape[1] == 1 and (saturation or hue):
        raise ShapeError(f"expected images of 3 channels for saturation and hue, got {tuple(x.shape)}")
    drawn = torch.rand(4, len(x), generator=generator, device=generator.device, dtype=torch.float64)
    drawn = drawn.to(x.device, torch.promote_types(x.dtype, torch.float32))[..., None, None, None]
    z = x.to(drawn.dtype)
    if brightness:
        z = (_factor(drawn[0], brightness) * z).clamp(0, 1)
    if contrast:
        z = _blend(z, grey(z).mean((-2, -1), keepdim=True), _factor(drawn[1], contrast))
    if saturation:
        z = _blend(z, grey(z), _factor(drawn[2], saturation))
    if hue:
        z = rotate_hue(z, hue * (2 * drawn[3][:, 0] - 1))
    return z.to(x.dtype) if z is not x else x.clone()


def grey(x: Tensor) -> Tensor:
    """The luma (N, 1, H, W) of RGB images; grey images as they are."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def rotate_hue(x: Tensor, turns: Tensor) -> Tensor:
    """RGB images (N, 3, H, W) in [0, 1] with their hue moved by `turns`, which broadcasts to (N, H, W).

    >>> rotate_hue(torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1), torch.tensor(1 / 3)).flatten().tolist()
    [0.0, 1.0, 0.0]
    """
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    chroma = value - low
    safe = torch.where(chroma > 0, chroma, 1)
    sixth = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixth = sixth + 6 * turns
    # Each channel is a trapezoid in the hue: value - chroma max(0, min(k, 4 - k, 1)).
    channels = []
    for offset in (5, 3, 1):
        k = (offset + sixth).remainder(6)
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1).clamp(0, 1)


def _blend(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    return (weight * x + (1 - weight) * other).clamp(0, 1)


def _factor(drawn: Tensor, amount: float) -> Tensor:
    low = max(0.0, 1 - amount)
    return low + (1 + amount - low) * drawn


def _check(name: str, amount: float, most: float) -> None:
    if (
        isinstance(amount, bool)
        or not isinstance(amount, int | float)
        or not (0 <= amount <= most and amount < math.inf)
    ):
        kind = f"a number from 0 to {most:g}" if most < math.inf else "a finite number >= 0"
        raise OptionError(f"expected {name} as {kind}, got {amount!r}")
