"""Loading by name, and the data root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lipkit.data import DATASETS, data_root, load
from lipkit.errors import DataError, OptionError


def test_the_table_says_what_is_loaded():
    for name, entry in DATASETS.items():
        assert entry.description, name
        assert entry.source, name


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "mnits",
        "cifar1000",
        "folder:",
        "images:",
        "images:28:",
        "images:/x",
        "images:x:y",
        "npz:",
        "a b:c",
        ":f",
        "pkg:",
        "3d:f",
        "pkg:a.b",
    ],
)
def test_unknown_names(spec):
    known = (
        r"digits, mnist, cifar10, cifar100, .*, folder:PATH, images:SIZE:PATH, idx:PATH, npz:PATH or pkg\.mod:factory"
    )
    with pytest.raises(OptionError, match=known):
        load(spec)


def test_limit():
    data = load("digits", limit=5)
    assert (len(data.train), len(data.test)) == (5, 5)
    assert (data.train.x == load("digits", limit=5).train.x).all()
    with pytest.raises(OptionError, match="limit: expected an integer of at least 1, got 0"):
        load("digits", limit=0)


def test_root(tmp_path, monkeypatch):
    monkeypatch.delenv("LIPKIT_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("LIPKIT_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root("elsewhere") == Path("elsewhere")
    with pytest.raises(DataError, match=str(tmp_path)):
        load("mnist")


@pytest.mark.parametrize(
    ("name", "sizes", "mean"),
    # Means of the training images over all pixels, as widely published for normalisation.
    [
        ("mnist", (60_000, 10_000), 0.1307),
        ("cifar10", (50_000, 10_000), (0.4914 + 0.4822 + 0.4465) / 3),
        ("cifar100", (50_000, 10_000), (0.5071 + 0.4865 + 0.4409) / 3),
    ],
)
def test_the_real_files(name, sizes, mean):
    try:
        data = load(name)
    except DataError as error:
        if "got none" in str(error) or "got neither" in str(error):
            pytest.skip(f"no {name} in {os.environ.get('LIPKIT_DATA', './data')}")
        raise
    assert (len(data.train), len(data.test)) == sizes
    assert abs(data.train.x.sum(dtype=torch.int64).item() / data.train.x.numel() / 255 - mean) < 1e-4
