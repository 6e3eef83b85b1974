"""The square wave: the definition of the paper, the same points everywhere."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from lipkit.data import load
from lipkit.data.embedded import square_wave, uniform_points


def test_values_are_the_definition():
    # [LBDN] section 6.1, interval by interval, ends included.
    x = np.array([-2, -1.5, -1.0000001, -1, -0.5, -1e-9, 0, 0.5, 0.9999999, 1, 1.5, 2])
    expected = np.where(((x >= -2) & (x < -1)) | ((x >= 0) & (x < 1)), 1.0, 0.0)
    assert square_wave(torch.from_numpy(x)).tolist() == expected.tolist()


def test_sizes_and_types():
    data = load("square_wave")
    assert (len(data.train), len(data.test)) == (300, 200)
    assert (data.task, data.input_shape, data.classes) == ("regression", (1,), ())
    for split in (data.train, data.test):
        assert (split.x.shape[1:], split.y.shape[1:]) == ((1,), (1,))
        assert split.x.dtype == split.y.dtype == torch.float32
        assert -2 <= split.x.min() < -1.95
        assert 1.95 < split.x.max() <= 2
        assert torch.equal(split.y, square_wave(split.x))
        assert 0.4 < split.y.mean() < 0.6
    assert not set(data.train.x.flatten().tolist()) & set(data.test.x.flatten().tolist())


def test_the_points_are_the_same_on_every_machine():
    points = load("square_wave").train.x.numpy()
    assert hashlib.sha256(points.astype("<f4").tobytes()).hexdigest()[:16] == "75b0f6f263b2118f"


def test_points_are_uniform():
    # Kolmogorov-Smirnov distance of 10 000 points: 1.63 / sqrt(n) is exceeded once in a hundred samples.
    x = np.sort(uniform_points(10_000, 3).double().numpy())
    rank = np.arange(1, 10_001) / 10_000
    assert np.abs(rank - (x + 2) / 4).max() < 1.63 / 100


def test_limit_and_batch():
    split = load("square_wave", limit=7).train
    x, y = split.batch(torch.arange(7))
    assert x.shape == y.shape == (7, 1)
