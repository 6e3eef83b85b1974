"""STL-10 in its binary format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit.data import load
from lipkit.errors import DataError


def pixels(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 3, 96, 96), np.uint8)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for seed, (name, n) in enumerate((("train", 3), ("test", 2))):
        # Each plane column by column: row index last but one in the file.
        (folder / f"{name}_X.bin").write_bytes(pixels(seed, n).transpose(0, 1, 3, 2).tobytes())
    (folder / "train_y.bin").write_bytes(bytes([1, 10, 2]))
    (folder / "test_y.bin").write_bytes(bytes([5, 5]))
    return tmp_path


def test_load(root):
    data = load("stl10", root=root)
    assert (data.input_shape, len(data.classes)) == ((3, 96, 96), 10)
    assert np.array_equal(data.train.x.numpy(), pixels(0, 3))
    assert np.array_equal(data.test.x.numpy(), pixels(1, 2))
    assert data.train.y.tolist() == [0, 9, 1]
    assert data.test.y.tolist() == [4, 4]
    x, _ = data.train.batch(torch.tensor([2]))
    assert np.array_equal(x.numpy(), pixels(0, 3)[2:].astype(np.float32) / 255)


def test_the_images_stay_on_disk_and_the_file_is_never_written(root):
    path = root / "stl10_binary" / "train_X.bin"
    before = path.read_bytes()
    data = load("stl10", root=root)
    data.train.x.zero_()
    assert path.read_bytes() == before
    assert len(load("stl10", root=root, limit=1).train) == 1


def refused(root, name: str, content: bytes | None, message: str) -> None:
    path = root / "stl10_binary" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("stl10", root=root)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_X.bin", None, r"train_X\.bin, got none; unpack stl10_binary\.tar\.gz"),
        ("train_X.bin", b"", "positive multiple of 27648 bytes, got 0"),
        ("train_X.bin", bytes(27647), "positive multiple of 27648 bytes, got 27647"),
        ("test_y.bin", bytes([1]), r"test_y\.bin: expected 2 labels, one for each image, got 1"),
        ("test_y.bin", bytes([1, 0]), "labels 1 to 10, got 0"),
        ("test_y.bin", bytes([1, 11]), "labels 1 to 10, got 11"),
    ],
)
def test_wrong_files(root, name, content, message):
    refused(root, name, content, message)
