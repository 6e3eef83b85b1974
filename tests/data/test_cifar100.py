"""CIFAR-100 in its binary and its python version."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from lipkit.data import DATASETS, load
from lipkit.errors import DataError


def part(seed: int, n: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 256, (n, 3072), np.uint8),
        rng.integers(0, 20, n, np.uint8),
        rng.integers(0, 100, n, np.uint8),
    )


def write_binary(root, seeds=(0, 1)) -> None:
    folder = root / "cifar-100-binary"
    folder.mkdir()
    for seed, name in zip(seeds, ("train", "test"), strict=True):
        images, coarse, fine = part(seed)
        rows = np.concatenate([coarse[:, None], fine[:, None], images], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def write_python(root, protocol: int) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir()
    for seed, name in enumerate(("train", "test")):
        images, coarse, fine = part(seed)
        value = {
            "filenames": [f"{i}.png" for i in range(len(images))],
            "batch_label": "training batch 1 of 1",
            "fine_labels": fine.tolist(),
            "coarse_labels": coarse.tolist(),
            "data": images,
        }
        (folder / name).write_bytes(pickle.dumps(value, protocol=protocol))


@pytest.mark.parametrize("version", ["binary", "python 2", "python 4"])
def test_load(tmp_path, version):
    if version == "binary":
        write_binary(tmp_path)
    else:
        write_python(tmp_path, int(version[-1]))
    data = load("cifar100", root=tmp_path)
    assert (data.name, data.input_shape) == ("cifar100", (3, 32, 32))
    for seed, split in enumerate((data.train, data.test)):
        images, _, fine = part(seed)
        assert split.x.dtype == torch.uint8
        assert np.array_equal(split.x.numpy().reshape(-1, 3072), images)
        assert split.y.tolist() == fine.tolist()


def test_classes():
    names = DATASETS["cifar100"].classes
    assert len(names) == len(set(names)) == 100
    assert list(names) == sorted(names)


def test_missing(tmp_path):
    with pytest.raises(DataError, match=r"cifar-100-binary or .*cifar-100-python, got neither; unpack cifar-100"):
        load("cifar100", root=tmp_path)
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(DataError, match=r"cifar-100-python/train, got none; unpack cifar-100"):
        load("cifar100", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "multiple of 3074 bytes, got 0"),
        (bytes(3073), "multiple of 3074 bytes, got 3073"),
        (b"\x00\x64" + bytes(3072), "labels 0 to 99, got 100"),
    ],
)
def test_wrong_binary(tmp_path, content, message):
    write_binary(tmp_path)
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(content)
    with pytest.raises(DataError, match=rf"test\.bin: expected .*{message}"):
        load("cifar100", root=tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"data": part(0)[0], "labels": [0] * 5}, "'fine_labels' as a list of 5 numbers, got NoneType"),
        ({"data": part(0)[0], "fine_labels": [100] * 5}, "labels 0 to 99, got 100"),
        ({"data": part(0)[0], "fine_labels": [0] * 4}, "list of 5 numbers, got 4"),
        ({"data": part(0)[0][:, :9], "fine_labels": [0] * 5}, r"shape \(n, 3072\), got \(5, 9\)"),
    ],
)
def test_wrong_pickle(tmp_path, value, message):
    write_python(tmp_path, 2)
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(value, protocol=2))
    with pytest.raises(DataError, match=message):
        load("cifar100", root=tmp_path)


def test_a_pickle_of_the_published_size_is_read(tmp_path):
    # 155 MB in the published file: the limit must let it pass.
    from lipkit.data.pickles import MAX_FILE_BYTES

    assert MAX_FILE_BYTES > 155_249_918
