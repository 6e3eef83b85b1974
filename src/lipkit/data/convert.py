"""Turns a user's data into `Split` and `Data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lipkit.data.split import Data, Split
from lipkit.errors import DataError


def as_data(
    name: str,
    train: Split,
    test: Split,
    classes: Sequence[str] | np.ndarray = (),
    limits: tuple[float, float] | None = None,
) -> Data:
    """Join two splits; the classes of a classification are numbered if they have no names.

    Raises:
        ShapeError, DataError: if the splits do not fit together, see `Data`, or have far more classes than samples.
    """
    labels = [split.y for split in (train, test) if not split.y.is_floating_point()]
    count, samples = max([len(classes), *(int(y.max()) + 1 for y in labels)]), len(train) + len(test)
    if count > (most := max(1000, samples)):  # before each class gets a name: a tiny file can hold any label
        raise DataError(f"{name}: expected at most {most} classes for {samples} samples, labels from 0 on, got {count}")
    if not len(classes) and len(labels) == 2:
        classes = [str(i) for i in range(count)]
    return Data(name, train, test, tuple(map(str, classes)), limits)


def as_split(value: Any, name: str = "data") -> Split:
    """Turn a Split, a pair (x, y) of tensors or arrays, or a map-style torch Dataset of pairs into a Split.

    Inputs may be uint8 or floating point. Grey images without a channel axis, uint8 of shape (N, H, W), get
    one. Integer targets of shape (N,) become int64 labels; floating-point targets of shape (N,) or (N, d) are
    for regression, (N,) becoming (N, 1). A Dataset is read once, in order, into memory.

    Args:
        value: the data.
        name: what to call it in an error message.

    Raises:
        DataError: if it is none of these, or the samples do not have one shape.

    Example:
        >>> split = as_split((np.zeros((4, 2)), np.array([0, 1, 1, 0], dtype=np.uint8)))
        >>> split.x.shape, split.y.dtype
        (torch.Size([4, 2]), torch.int64)
    """
    if isinstance(value, Split):
        return value
    if isinstance(value, TensorDataset):
        value = tuple(value.tensors)
    if isinstance(value, Dataset):
        value = _collect(value, name)
    if not isinstance(value, tuple | list) or len(value) != 2:
        got = f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__
        raise DataError(f"{name}: expected a pair (x, y) of tensors or a torch Dataset of such pairs, got {got}")
    x, y = _tensor(value[0], f"{name}: x"), _tensor(value[1], f"{name}: y")
    try:
        return Split(_inputs(x, name), as_targets(y))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _inputs(x: Tensor, name: str) -> Tensor:
    if x.dtype != torch.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        raise DataError(f"expected images of shape (N, C, H, W), got {tuple(x.shape)} (channels last: transpose)")
    return x


def as_targets(y: Tensor) -> Tensor:
    """Labels as int64, targets of a regression as float32 (N, d)."""
    if y.is_floating_point():
        y = y.to(torch.float32)
        return y[:, None] if y.ndim == 1 else y
    return y.to(torch.int64)


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, np.ndarray):
        raise DataError(f"{name}: expected a tensor or a numpy array, got {type(value).__name__}")
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise DataError(f"{name}: expected an array of numbers of at most 64 bits, got dtype {value.dtype}")
    native = value.dtype.newbyteorder("=")  # torch has no other order
    if native.kind == "u" and native.itemsize > 1:  # torch has hardly any operation on wider unsigned integers
        native = np.dtype(np.int64)
    return torch.from_numpy(np.array(value, dtype=native, order="C"))


def _collect(dataset: Dataset[Any], name: str) -> tuple[Tensor, Tensor]:
    """Read a map-style Dataset into two tensors."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(f"{name}: expected a Dataset with a length, got {type(dataset).__name__} without one")
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for i in range(len(dataset)):
        sample = dataset[i]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(f"{name}: expected samples (x, y), got {type(sample).__name__} at index {i}")
        x, y = _tensor(sample[0], f"{name}: x at index {i}"), sample[1]
        y = torch.as_tensor(y) if isinstance(y, int | float | np.number) else _tensor(y, f"{name}: y at index {i}")
        if xs and (x.shape != xs[0].shape or y.shape != ys[0].shape):
            raise DataError(
                f"{name}: expected samples of one shape, {tuple(xs[0].shape)} with target "
                f"{tuple(ys[0].shape)} as at index 0, "
                f"got {tuple(x.shape)} with target {tuple(y.shape)} at index {i}"
            )
        xs.append(x)
        ys.append(y)
    if not xs:
        raise DataError(f"{name}: expected at least one sample, got an empty Dataset")
    return torch.stack(xs), torch.stack(ys)
