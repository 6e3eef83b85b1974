"""Samples and options as they come from a user, checked once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipkit.errors import DataError, OptionError, ShapeError


def as_samples(values: Any, name: str) -> Tensor:
    """Samples as a floating-point tensor (n, *shape): uint8 images are divided by 255, vectors may come as (n,).

    Raises:
        DataError: not an array of finite floating-point numbers or uint8, or fewer than 4 samples.
        ShapeError: a 0-d array.

    >>> as_samples(np.zeros(5), "x").shape
    torch.Size([5, 1])
    """
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "uf":
            raise DataError(f"{name}: expected floating-point samples or uint8 images, got dtype {values.dtype}")
        values = torch.from_numpy(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("=")))
    if not isinstance(values, Tensor):
        raise DataError(f"{name}: expected a tensor or an array, got {type(values).__name__}")
    values = values.detach()
    if values.ndim == 0:
        raise ShapeError(f"{name}: expected samples of shape (n, *shape), got a single number")
    if values.dtype == torch.uint8:
        values = values.to(torch.float32) / 255
    elif not values.is_floating_point():
        raise DataError(f"{name}: expected floating-point samples or uint8 images, got dtype {values.dtype}")
    if len(values) < 4 or values.numel() == 0:
        raise DataError(f"{name}: expected at least 4 samples of at least one number, got shape {tuple(values.shape)}")
    if not bool(torch.isfinite(values).all()):
        raise DataError(f"{name}: expected finite samples, got NaN or infinity")
    return values[:, None] if values.ndim == 1 else values


def as_pair(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Both samples; their shapes must agree but for the number.

    Raises:
        ShapeError: they differ. DataError: see `as_samples`.
    """
    first, second = as_samples(x, "x"), as_samples(y, "y")
    if first.shape[1:] != second.shape[1:]:
        raise ShapeError(f"expected x and y of one shape, got {tuple(first.shape[1:])} and {tuple(second.shape[1:])}")
    return first, second


def check_counts(least: int, **counts: int) -> None:
    """Raise `OptionError` unless each is an integer that is at least ``least``."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise OptionError(f"expected {name} as an integer >= {least}, got {count!r}")


def check_positive(**values: float) -> None:
    """Raise `OptionError` unless each is a finite number above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise OptionError(f"expected {name} as a finite number > 0, got {value}")
