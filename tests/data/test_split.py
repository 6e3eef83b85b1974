"""Split and Data: what they accept, what they refuse, what a batch is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lipkit.data import Data, Split
from lipkit.data.split import fixed_permutation
from lipkit.errors import DataError, OptionError, ShapeError


def labelled(n: int = 6, shape: tuple[int, ...] = (1, 2, 2)) -> Split:
    x = (torch.arange(n * int(np.prod(shape))) % 256).to(torch.uint8).reshape(n, *shape)
    return Split(x, torch.arange(n) % 3)


def test_batch_divides_uint8_by_255_in_float32():
    split = Split(torch.arange(256, dtype=torch.uint8).reshape(256, 1), torch.zeros(256, dtype=torch.int64))
    x, y = split.batch(slice(None))
    expected = (np.arange(256, dtype=np.float32) / np.float32(255))[:, None]
    assert x.dtype == torch.float32
    assert np.array_equal(x.numpy(), expected)
    assert y.shape == (256,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_batch_keeps_floats(dtype):
    split = Split(torch.tensor([[0.25], [0.5], [1.0]], dtype=dtype), torch.tensor([0, 1, 1]))
    x, y = split.batch(torch.tensor([2, 0]))
    assert x.dtype == torch.float32
    assert x.tolist() == [[1.0], [0.25]]
    assert y.tolist() == [1, 0]


def test_batch_does_not_share_memory_of_uint8():
    split = labelled()
    before = split.x.clone()
    split.batch(slice(0, 2))[0].zero_()
    assert torch.equal(split.x, before)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"\(N, \*shape\).* \(one number each: x\[:, None\]\)"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "int64 .*wider than uint8"),
        (torch.zeros(3, 2), torch.zeros(3), "targets of shape"),
        (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64), r"got shape \(3, 1\)"),
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32), "int32"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), "3 samples and 2 targets"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "0 samples"),
        (torch.tensor([[float("nan")]]), torch.zeros(1, dtype=torch.int64), "finite values in x"),
        (torch.full((1, 1), 1e300, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), "finite .* x as float32"),
        (torch.zeros(1, 2), torch.tensor([[float("inf")]]), "finite values in y"),
        (torch.zeros(1, 1, 0, 2), torch.zeros(1, dtype=torch.int64), r"\(N, \*shape\), .* got shape \(1, 1, 0, 2\)"),
        (torch.zeros(1, 2), torch.zeros(1, 0), r"shape \(N, d\), got shape \(1, 0\)"),
        (torch.zeros(2, 2), torch.tensor([0, -1]), "labels >= 0, got -1"),
    ],
)
def test_split_refuses(x, y, message):
    with pytest.raises(DataError, match=message):
        Split(x, y)


def test_data_properties():
    data = Data("d", labelled(), labelled(3), ("a", "b", "c"))
    assert data.input_shape == (1, 2, 2)
    assert data.task == "classification"
    targets = Split(torch.zeros(4, 2), torch.zeros(4, 3))
    assert Data("d", targets, targets).task == "regression"


def test_data_refuses_splits_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"\(1, 2, 2\) and \(1, 3, 3\)"):
        Data("d", labelled(), labelled(shape=(1, 3, 3)), ("a", "b", "c"))
    with pytest.raises(DataError, match="one dtype"):
        Data(
            "d",
            labelled(),
            Split(torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64)),
            ("a", "b", "c"),
        )
    with pytest.raises(DataError, match="number of classes 2, got 2"):
        Data("d", labelled(), labelled(), ("a", "b"))
    targets = Split(torch.zeros(4, 2), torch.zeros(4, 3))
    with pytest.raises(DataError, match="no class names"):
        Data("d", targets, targets, ("a",))


@pytest.mark.parametrize("value", [-0.5, 1.01, 255.0])
def test_float_images_outside_the_unit_interval_are_refused(value):
    good = Split(torch.full((1, 1, 2, 2), 0.5), torch.zeros(1, dtype=torch.int64))
    bad = Split(torch.full((1, 1, 2, 2), value), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(DataError, match=r"test samples in \[0, 1\]"):
        Data("d", good, bad, ("a",))


def test_samples_that_are_no_images_have_limits_of_their_own():
    windows = Split(torch.tensor([[[[-3.0, 40.0]]]]), torch.zeros(1, dtype=torch.int64))
    assert Data("d", windows, windows, ("a",), (-4.0, 41.0)).take(1).input_range == (-4.0, 41.0)
    assert Data("d", windows, windows, ("a",), (-math.inf, math.inf)).input_range is None
    with pytest.raises(
        DataError, match=r"training samples in \[0, 40\], got values from -3 to 40 .*data.range=LOW,HIGH"
    ):
        Data("d", windows, windows, ("a",), (0.0, 40.0))
    for wrong in ((1.0, 0.0), ("a", "b"), (0.0,), 3.0):
        with pytest.raises(OptionError, match="limits: expected two numbers, the smaller one first, got"):
            Data("d", windows, windows, ("a",), wrong)
    pixels = Split(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    for limits in ((0.0, 0.5), (0.0, 255.0)):
        with pytest.raises(DataError, match=rf"uint8, which is divided by 255, got 0 and {limits[1]:g}: "):
            Data("d", pixels, pixels, ("a",), limits)
    assert Data("d", pixels, pixels, ("a",), (-math.inf, math.inf)).input_range is None


def test_float_vectors_may_take_any_value():
    vectors = Split(torch.tensor([[-3.0, 40.0]]), torch.zeros(1, dtype=torch.int64))
    assert Data("d", vectors, vectors, ("a",)).input_shape == (2,)


def test_take_is_a_fixed_nested_random_subset():
    split = Split(torch.arange(1000.0)[:, None], torch.zeros(1000, dtype=torch.int64))
    few, more = split.take(50).x[:, 0].tolist(), split.take(200).x[:, 0].tolist()
    assert few == split.take(50).x[:, 0].tolist()
    assert len(few) == 50
    assert set(few) < set(more)
    assert few == sorted(few)
    assert max(few) > 500  # not the first ones
    assert split.take(1000) is split
    assert split.take(5000) is split


def test_take_draws_what_it_always_drew():
    split = Split(torch.arange(100.0)[:, None], torch.zeros(100, dtype=torch.int64))
    expected = sorted(np.argsort(np.random.PCG64(20240).random_raw(100), kind="stable")[:5].tolist())
    assert split.take(5).x[:, 0].tolist() == expected == [9, 13, 40, 70, 85]


@pytest.mark.parametrize("limit", [0, -1, 2.5, True, "3"])
def test_take_refuses(limit):
    with pytest.raises(OptionError, match="limit: expected an integer of at least 1"):
        labelled().take(limit)


@pytest.mark.parametrize("n", [1, 2, 17, 1000])
def test_fixed_permutation_is_one(n):
    assert sorted(fixed_permutation(n, 3).tolist()) == list(range(n))
    assert np.array_equal(fixed_permutation(n, 3), fixed_permutation(n, 3))
    assert n < 17 or not np.array_equal(fixed_permutation(n, 3), fixed_permutation(n, 4))


def test_to_moves_both():
    split = labelled().to(torch.device("cpu"))
    assert split.x.device == split.y.device == torch.device("cpu")
