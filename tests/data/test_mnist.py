"""MNIST and its IDX files: read exactly, and refused when they are not what their header says."""

from __future__ import annotations

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipkit.data import load
from lipkit.data.binary import read_idx
from lipkit.errors import DataError


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def random_images(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n, np.uint8)


def write_mnist(root, *, compressed: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    made = {}
    for part, n in (("train", 7), ("t10k", 3)):
        made[part] = random_images(n, n)
        for kind, values in zip(("images-idx3", "labels-idx1"), made[part], strict=True):
            path = folder / f"{part}-{kind}-ubyte"
            if compressed:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx(values)))
            else:
                path.write_bytes(idx(values))
    return made


@pytest.mark.parametrize("compressed", [False, True])
def test_load(tmp_path, compressed):
    made = write_mnist(tmp_path, compressed=compressed)
    data = load("mnist", root=tmp_path)
    assert data.input_shape == (1, 28, 28)
    assert data.classes == tuple("0123456789")
    for split, part in ((data.train, "train"), (data.test, "t10k")):
        assert split.x.dtype == torch.uint8
        assert np.array_equal(split.x[:, 0].numpy(), made[part][0])
        assert np.array_equal(split.y.numpy(), made[part][1])


@pytest.mark.thorough
def test_files_of_the_same_form_are_data_of_a_recipe(tmp_path, one_recipe):
    made = write_mnist(tmp_path, compressed=True)
    folder = tmp_path / "MNIST" / "raw"
    data = load(f"idx:{folder}")
    assert data.classes == tuple(map(str, range(int(made["train"][1].max()) + 1)))
    assert np.array_equal(data.test.x[:, 0].numpy(), made["t10k"][0])
    assert one_recipe("mnist_patchnet", f"idx:{folder}") == len(data.classes)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(3, 200, np.uint8)))
    with pytest.raises(DataError, match=r"test labels below the number of classes \d+, got 200"):
        load(f"idx:{folder}")
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load(f"idx:{tmp_path}")


def test_raw_is_taken_before_gz(tmp_path):
    write_mnist(tmp_path, compressed=False)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"not read")
    assert len(load("mnist", root=tmp_path).train) == 7


def test_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"MNIST/raw/train-labels-idx1-ubyte, got none; put the four IDX .*https://"):
        load("mnist", root=tmp_path)


def replaced(tmp_path, name: str, content: bytes):
    write_mnist(tmp_path, compressed=False)
    (tmp_path / "MNIST" / "raw" / name).write_bytes(content)
    return load("mnist", root=tmp_path)


def test_inconsistent_files_are_refused(tmp_path_factory):
    images, labels = random_images(7, 7)
    for name, content, message in (
        ("train-images-idx3-ubyte", idx(images[:5]), "expected 5 labels, one for each image, got 7"),
        (
            "train-labels-idx1-ubyte",
            idx(labels + np.uint8(10)),
            r"train-labels-idx1-ubyte: expected labels 0 to 9, got 1",
        ),
        ("t10k-images-idx3-ubyte", idx(images[:3, :14]), "28 x 28, got 14 x 28"),
        ("train-images-idx3-ubyte", idx(labels), "magic number 00000803, got 00000801"),
    ):
        with pytest.raises(DataError, match=message):
            replaced(tmp_path_factory.mktemp("mnist"), name, content)


GOOD = idx(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "magic number 00000803, got nothing"),
        (GOOD[:9], "header of 16 bytes, got 9"),
        (b"\x00\x00\x0d" + GOOD[3:], "magic number 00000803, got 00000d03"),
        (GOOD[:-1], "12 bytes of data"),
        (GOOD + b"x", "expected 12 bytes of data, got more"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0, 2, 2), "at least one value"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "at most 17179869184 bytes"),
        (
            struct.pack(">4B3I", 0, 0, 8, 3, 10**6, 100, 100),
            "10000000000 bytes of data that its header claims",
        ),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_wrong_files(tmp_path, content, message, compressed):
    path = tmp_path / ("f.gz" if compressed else "f")
    path.write_bytes(gzip.compress(content) if compressed else content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.thorough
def test_decompression_stops_at_the_claimed_size(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(GOOD + bytes(50_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="got more"):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_corrupt_gzip(tmp_path):
    blob = gzip.compress(GOOD)
    for bad in (blob[:-5], blob[:-8] + b"\0" * 8, b"plain" * 10, blob + b"trailing"):
        path = tmp_path / "f.gz"
        path.write_bytes(bad)
        with pytest.raises(DataError, match="complete file"):
            read_idx(path, 3)


def test_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(DataError, match="regular file"):
        read_idx(tmp_path, 3)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def read_or_refuse(path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        values = read_idx(path, 3)
    except DataError:
        return
    plain = gzip.decompress(content) if path.suffix == ".gz" else content
    assert idx(values.numpy()) == plain


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=64), header=st.booleans())
def test_fuzz_random_bytes(scratch, content, header):
    content = b"\x00\x00\x08\x03" + content if header else content
    read_or_refuse(scratch / "raw", content)
    read_or_refuse(scratch / "zipped.gz", gzip.compress(content))
    read_or_refuse(scratch / "not_zipped.gz", content)


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 100), place=st.integers(0, 99), value=st.integers(0, 255))
def test_fuzz_damaged_files(scratch, cut, place, value):
    for name, good in (("raw", GOOD), ("zipped.gz", gzip.compress(GOOD, mtime=0))):
        changed = bytearray(good[: len(good) - cut % len(good)])
        changed[place % len(changed)] = value
        read_or_refuse(scratch / name, bytes(changed))
