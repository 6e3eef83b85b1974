"""The embedded digits: values, and a split that is stratified, disjoint, complete and fixed."""

from __future__ import annotations

import hashlib
import importlib.util

import numpy as np
import pytest
import torch
from sklearn import datasets

from lipkit.data import load
from lipkit.data.embedded import load_digits, stratified_split
from lipkit.errors import DataError


def test_values_are_sixteenths():
    data = load_digits()
    assert data.train.x.dtype == torch.float32
    assert data.input_shape == (1, 8, 8)
    assert set((data.train.x * 16).unique().tolist()) == set(range(17))


@pytest.mark.thorough
def test_splits_cover_the_original_without_overlap():
    data, bunch = load_digits(), datasets.load_digits()
    x, y = torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y])
    ours = sorted((*(v * 16).flatten().tolist(), t) for v, t in zip(x, y.tolist(), strict=True))
    original = sorted((*im.flatten().tolist(), t) for im, t in zip(bunch.images, bunch.target, strict=True))
    assert ours == original


def test_split_is_stratified():
    data = load_digits()
    total = np.bincount(datasets.load_digits().target)
    test = np.bincount(data.test.y.numpy())
    assert np.abs(test - 0.2 * total).max() <= 0.5


def test_split_is_fixed():
    train, test = stratified_split(datasets.load_digits().target, 0.2, 0)
    again = stratified_split(datasets.load_digits().target, 0.2, 0)
    assert np.array_equal(train, again[0])
    assert np.array_equal(test, again[1])
    # Frozen: results with this split are compared across versions.
    pixels = (load_digits().test.x * 16).to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(pixels).hexdigest()[:16] == "11b00c7eba4e9139"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_stratified_split_of_any_labels(share):
    labels = np.random.default_rng(1).integers(0, 4, 203)
    train, test = stratified_split(labels, share, seed=5)
    assert sorted([*train, *test]) == list(range(203))
    expected = [round(share * int(n)) for n in np.bincount(labels)]
    assert np.bincount(labels[test], minlength=4).tolist() == expected


def test_a_model_can_learn_it():
    """Nearest class mean on the held-out digits: labels and images belong together."""
    data = load("digits")
    x, y = data.train.batch(slice(None))
    means = torch.stack([x[y == c].flatten(1).mean(0) for c in range(10)])
    held_out, labels = data.test.batch(slice(None))
    accuracy = (torch.cdist(held_out.flatten(1), means).argmin(1) == labels).float().mean()
    assert accuracy > 0.85


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install \"lipkit\[train\]\""):
        load_digits()


def test_scikit_learn_is_asked_where_its_file_is_elsewhere(monkeypatch, tmp_path):
    expected = load_digits()
    spec = importlib.util.find_spec("sklearn")
    monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert torch.equal(load_digits().train.x, expected.train.x)
    assert torch.equal(load_digits().test.y, expected.test.y)
