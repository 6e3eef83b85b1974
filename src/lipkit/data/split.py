"""A data set of two splits of samples, checked when made, and functions that turn other data into one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lipkit.data.images import ImageFiles
from lipkit.errors import DataError, ShapeError, interval
from lipkit.linalg.matrices import check_integer

SUBSET_SEED = 20240


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and their targets, in memory; or image files, decoded when a batch asks for them.

    Args:
        x: inputs of shape (N, *shape): uint8 images 0..255, or floating point (images in [0, 1]); or `ImageFiles`.
        y: int64 labels >= 0 of shape (N,), or floating-point targets of shape (N, d) for regression. All are finite.

    Raises:
        DataError: another shape or dtype, different lengths, no sample, a negative label, a value that is not finite.

    >>> split = Split(torch.tensor([[0], [51], [255]], dtype=torch.uint8), torch.tensor([0, 1, 1]))
    >>> split.batch(torch.tensor([1, 2]))
    (tensor([[0.2000],
            [1.0000]]), tensor([1, 1]))
    """

    x: Tensor | ImageFiles
    y: Tensor

    def __post_init__(self) -> None:
        x, y = self.x, self.y
        if x.ndim < 2 or 0 in x.shape[1:] or not (x.dtype == torch.uint8 or x.is_floating_point()):
            wide = "integers wider than uint8 have no defined range: make them floating point, images divided to [0, 1]"
            hint = wide if x.ndim > 1 else "one number each: x[:, None]"
            raise DataError(f"expected x of shape (N, *shape), uint8 or floating point, got {_describe(x)} ({hint})")
        if not (y.dtype == torch.int64 and y.ndim == 1) and not (y.is_floating_point() and y.ndim == 2 and y.shape[1]):
            raise DataError(
                f"expected y as int64 labels of shape (N,) or floating-point targets of shape (N, d), "
                f"got {_describe(y)}{' (one-hot labels: y.argmax(1))' if y.ndim == 2 else ''}"
            )
        if len(x) != len(y) or len(x) == 0:
            raise DataError(
                f"expected at least one sample, each with one target, got {len(x)} samples and {len(y)} targets"
            )
        for name, values, dtype in (("x as float32", x, torch.float32), ("y", y, y.dtype)):  # the formats of a batch
            if values.is_floating_point() and not bool(values[:].to(dtype).isfinite().all()):
                raise DataError(f"expected finite values in {name}, got NaN or infinity")
        if not y.is_floating_point() and int(y.min()) < 0:
            raise DataError(f"expected labels >= 0, got {int(y.min())}")

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The samples at `index` as (x, y), x in float32: uint8 is divided by 255, float stays."""
        x, y = self.x[index], self.y[index]
        return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x.to(torch.float32), y

    def take(self, limit: int) -> Split:
        """A random subset of at most `limit` samples, in their order; ``OptionError`` unless it is a positive integer.

        The seed is fixed: every machine draws the same samples, and a smaller limit a subset of those of a larger one.
        """
        check_integer("limit", limit, 1)
        if limit >= len(self):
            return self
        index = torch.from_numpy(np.sort(fixed_permutation(len(self), SUBSET_SEED)[:limit]))  # sorted: in order
        x = self.x.subset(index) if isinstance(self.x, ImageFiles) else self.x[index]
        return Split(x, self.y[index])

    def to(self, device: torch.device | str) -> Split:
        """The split with both tensors on `device`; image files stay where they are."""
        return self if isinstance(self.x, ImageFiles) else Split(self.x.to(device), self.y.to(device))

    def held(self, limit: int) -> Split:
        """The split with image files decoded into memory if they then take at most `limit` bytes."""
        if not isinstance(self.x, ImageFiles) or self.x.nbytes > limit:
            return self
        return Split(self.x[:], self.y)


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: a training split, a test split and the names of the classes.

    Args:
        name: the name it was loaded by.
        train: samples to train on.
        test: held-out samples, of the same shape and dtype.
        classes: the name of each class, in label order; empty for regression.
        limits: (low, high) that every entry must keep to, infinite for no limit. None: no limit, but (0, 1) for samples
            (C, H, W), which are taken to be images: normalisation is a layer of the model, radii are in pixel units.

    Raises:
        ShapeError: if the splits differ in the shape of a sample or of a target.
        DataError: if the splits differ in dtype, a label has no class name, or samples leave the limits.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...] = ()
    limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        train, test = self.train, self.test
        if self.limits is not None:
            interval("limits", self.limits, finite=False)
        if train.x.dtype != test.x.dtype or train.y.dtype != test.y.dtype:  # first: labels and numbers differ in shape
            raise DataError(
                f"{self.name}: expected training and test data of one dtype, got inputs {train.x.dtype} and "
                f"{test.x.dtype}, targets {train.y.dtype} and {test.y.dtype}"
            )
        if train.x.shape[1:] != test.x.shape[1:] or train.y.shape[1:] != test.y.shape[1:]:
            raise ShapeError(
                f"{self.name}: expected training and test samples of one shape, got inputs "
                f"{tuple(train.x.shape[1:])} and {tuple(test.x.shape[1:])}, targets "
                f"{tuple(train.y.shape[1:])} and {tuple(test.y.shape[1:])}"
            )
        for part, split in (("training", train), ("test", test)):
            self._check(part, split)

    def _check(self, part: str, split: Split) -> None:
        if self.task == "regression":
            if self.classes:
                raise DataError(f"{self.name}: expected no class names for regression, got {len(self.classes)}")
        elif int(split.y.max()) >= len(self.classes):
            raise DataError(
                f"{self.name}: expected {part} labels below the number of classes {len(self.classes)}, "
                f"got {int(split.y.max())}"
            )
        if self.input_range is not None:
            (least, most), x = self.input_range, split.x
            low, high = 0.0, 1.0  # of uint8, which is divided by 255
            if isinstance(x, Tensor) and x.is_floating_point():
                low, high = (float(v) for v in torch.aminmax(x))
            elif (least, most) != (0, 1):
                raise DataError(
                    f"{self.name}: expected limits 0 and 1 for uint8, which is divided by 255, got {least:g} and "
                    f"{most:g}: floating point keeps its values"
                )
            if low < least or high > most:
                raise DataError(
                    f"{self.name}: expected {part} samples in [{least:g}, {most:g}], got values from {low:g} to "
                    f"{high:g} (images: store uint8 or rescale; normalisation is a layer of the model; data that are "
                    "no images: data.range=LOW,HIGH, in Python limits=)"
                )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, without the batch."""
        return tuple(self.train.x.shape[1:])

    @property
    def input_range(self) -> tuple[float, float] | None:
        """(low, high) of every entry, which attacks respect; None without limits."""
        low, high = self.limits or ((0.0, 1.0) if len(self.input_shape) == 3 else (-math.inf, math.inf))
        return (low, high) if math.isfinite(high - low) else None  # a single finite end does not count

    @property
    def task(self) -> str:
        """`"classification"` for integer labels, `"regression"` for floating-point targets."""
        return "regression" if self.train.y.is_floating_point() else "classification"

    @property
    def outputs(self) -> int:
        """The number of outputs of a network for these data: of classes, or of targets."""
        return len(self.classes) if self.task == "classification" else int(self.train.y.shape[1])

    def held(self, limit: int) -> Data:
        """The data set; image files of a split are decoded into memory if they then take at most `limit` bytes."""
        return replace(self, train=self.train.held(limit), test=self.test.held(limit))

    def take(self, limit: int) -> Data:
        """The data set with at most `limit` samples in each split: see `Split.take`."""
        return replace(self, train=self.train.take(limit), test=self.test.take(limit))


def fixed_permutation(n: int, seed: int) -> np.ndarray:
    """A permutation of 0..n-1 that depends on `n` and `seed` alone.

    >>> fixed_permutation(5, 0)
    array([3, 2, 1, 0, 4])
    """
    # NumPy guarantees the raw stream of PCG64 across versions and platforms, but not that of Generator.permutation,
    # nor torch that of randperm.
    return np.argsort(np.random.PCG64(seed).random_raw(n), kind="stable")


def labels_of(path: Path, numbers: np.ndarray, classes: int, first: int = 0) -> Tensor:
    """Labels of a file that counts classes from ``first``, as int64 from 0; ``DataError`` for one out of range.

    >>> labels_of(Path("y.bin"), np.array([1, 10], dtype=np.uint8), 10, first=1)
    tensor([0, 9])
    """
    wrong = numbers[(numbers < first) | (numbers >= first + classes)]
    if len(wrong):
        raise DataError(f"{path}: expected labels {first} to {first + classes - 1}, got {wrong[0]}")
    return torch.from_numpy(numbers.astype(np.int64) - first)


def _describe(t: Tensor | ImageFiles) -> str:
    return f"shape {tuple(t.shape)} and dtype {str(t.dtype).removeprefix('torch.')}"


def as_data(
    name: str,
    train: Split,
    test: Split,
    classes: Sequence[str] | np.ndarray = (),
    limits: tuple[float, float] | None = None,
) -> Data:
    """Join two splits into a `Data`; classes without names are numbered. Far more classes than samples are refused.

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
    for regression, (N,) becoming (N, 1). A Dataset is read once, in order, into memory. Errors call the data ``name``.

    Raises:
        DataError: it is none of these, or the samples do not have one shape.

    >>> split = as_split((np.zeros((4, 2)), np.array([0, 1, 1, 0], dtype=np.uint8)))
    >>> split.x.shape, split.y.dtype
    (torch.Size([4, 2]), torch.int64)
    """
    if isinstance(value, Split):
        return value
    if isinstance(value, TensorDataset):
        value = tuple(value.tensors)  # read its tensors, not sample by sample
    if isinstance(value, Dataset):
        value = _collect(value, name)
    if not isinstance(value, tuple | list) or len(value) != 2:
        got = f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__
        raise DataError(f"{name}: expected a pair (x, y) of tensors or a torch Dataset of such pairs, got {got}")
    x, y = as_tensor(value[0], f"{name}: x"), as_tensor(value[1], f"{name}: y")
    if x.dtype == torch.uint8 and x.ndim == 3:
        x = x[:, None]  # grey images without a channel axis
    if x.dtype == torch.uint8 and x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        got = f"{tuple(x.shape)} (channels last: transpose)"
        raise DataError(f"{name}: expected images of shape (N, C, H, W), got {got}")
    try:
        return Split(x, as_targets(y))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def as_targets(y: Tensor) -> Tensor:
    """Labels as int64, targets of a regression as float32 (N, d)."""
    if y.is_floating_point():
        y = y.to(torch.float32)
        return y[:, None] if y.ndim == 1 else y
    return y.to(torch.int64)


def as_tensor(value: Any, name: str) -> Tensor:
    """A tensor without its graph, or an array of numbers copied to one; ``DataError`` for anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):  # masked numbers would count
        raise DataError(f"{name}: expected a tensor or a numpy array, got {type(value).__name__}")
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise DataError(f"{name}: expected an array of numbers of at most 64 bits, got dtype {value.dtype}")
    native = value.dtype.newbyteorder("=")  # torch has no foreign byte order
    if native.kind == "u" and native.itemsize > 1:  # torch has hardly any operation on wider unsigned integers
        native = np.dtype(np.int64)
        if value.size and int(value.max()) >= 2**63:
            raise DataError(f"{name}: expected integers below 2^63, got {value.max()}")
    return torch.from_numpy(np.array(value, dtype=native, order="C"))


def _collect(dataset: Dataset[Any], name: str) -> tuple[Tensor, Tensor]:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(f"{name}: expected a Dataset with a length, got {type(dataset).__name__} without one")
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for i in range(len(dataset)):
        sample = dataset[i]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(f"{name}: expected samples (x, y), got {type(sample).__name__} at index {i}")
        x, y = as_tensor(sample[0], f"{name}: x at index {i}"), sample[1]
        y = torch.as_tensor(y) if isinstance(y, int | float | np.number) else as_tensor(y, f"{name}: y at index {i}")
        if xs and (x.shape != xs[0].shape or y.shape != ys[0].shape):
            first, here = (f"{tuple(a.shape)} with target {tuple(b.shape)}" for a, b in ((xs[0], ys[0]), (x, y)))
            raise DataError(f"{name}: expected samples of one shape, {first} as at index 0, got {here} at index {i}")
        xs.append(x)
        ys.append(y)
    if not xs:
        raise DataError(f"{name}: expected at least one sample, got an empty Dataset")
    return torch.stack(xs), torch.stack(ys)
