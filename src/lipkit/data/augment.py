"""Augmentation of a batch of images: pure functions, on the device the images are on."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional

from lipkit.errors import ShapeError
from lipkit.linalg.matrices import check_integer


def random_crop(x: Tensor, padding: int, generator: Generator) -> Tensor:
    """Shift each image by its own random offset, zeros coming in from the border (He et al. 2016, section 4.2).

    Args:
        x: images of shape (N, C, H, W), any dtype; the result is a new tensor like it.
        padding: largest offset along an axis, in pixels; offsets are uniform from -padding to padding.
        generator: the only source of randomness. One on the CPU gives the same numbers for `x` on any device.

    Raises:
        ShapeError, OptionError: another shape or padding.

    >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> random_crop(x, 1, torch.Generator().manual_seed(0)).shape
    torch.Size([1, 1, 2, 2])
    """
    _check_images(x)
    check_integer("padding", padding, 0)
    n, _, height, width = x.shape
    # Drawn where the generator lives, then moved: two numbers per image.
    offset = torch.randint(2 * padding + 1, (2, n), generator=generator, device=generator.device).to(x.device)
    padded = functional.pad(x, (padding,) * 4)  # the last two axes, both ends
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, 2p + 1, 2p + 1, H, W)
    return windows[torch.arange(n, device=x.device), :, offset[0], offset[1]]


def random_flip(x: Tensor, generator: Generator) -> Tensor:
    """Mirror each image left to right with probability 1/2; arguments, result and errors are those of `random_crop`.

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
