"""What the architectures share: checked options, the head and tail that carry the target constant."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import Normalize, Scale
from lipkit.protocol import Shape


def check_image(input_shape: Shape, multiple: int, model: str) -> tuple[int, int, int]:
    """(C, H, W), or ``ShapeError`` unless H and W are multiples of ``multiple``."""
    shape = tuple(input_shape)
    if len(shape) != 3 or min(shape) < 1 or shape[1] % multiple or shape[2] % multiple:
        raise ShapeError(
            f"{model}: expected an input shape (C, H, W) with H and W multiples of {multiple}, got {shape}"
        )
    return shape


def check_classes(classes: int) -> None:
    """Raise ``OptionError`` unless there are at least two classes."""
    if classes < 2:
        raise OptionError(f"classes: expected at least 2, got {classes}")


def bounded(
    layers: Sequence[nn.Module],
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Sequential:
    """A chain with an optional input normalisation in front and a gain of ``lipschitz`` after it.

    The gain comes before the layers, so that the last module of a classifier stays its last linear layer. Dividing
    by std multiplies the constant of the whole network by ``1 / min(std)``; ``lipschitz`` is that of the rest.
    """
    head: list[nn.Module] = []
    if (mean is None) != (std is None):
        raise OptionError(f"mean and std: expected both or neither, got mean={mean}, std={std}")
    if mean is not None and std is not None:
        head.append(Normalize(mean, std))
    if lipschitz != 1.0:
        head.append(Scale(lipschitz))
    return nn.Sequential(*head, *layers)
