"""CIFAR-10 and CIFAR-100 in their binary and their python versions."""

from __future__ import annotations

import os
import pickle
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipkit.data import load
from lipkit.data.binary import CIFAR10, CIFAR100, read_binary, read_python
from lipkit.data.pickles import MAX_FILE_BYTES
from lipkit.errors import DataError

FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def batch(seed: int, n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), np.uint8), rng.integers(0, 10, n, np.uint8)


def python_2_pickle(images: np.ndarray, labels: np.ndarray) -> bytes:
    """What cPickle of Python 2 writes in protocol 2, as in the published cifar-10-python.tar.gz."""

    def string(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = images.tobytes()
    return b"".join(
        [
            b"\x80\x02}q\x01(" + string(b"batch_label") + b"q\x02" + string(b"training batch 1 of 5") + b"q\x03",
            string(b"labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([k]) for k in labels) + b"e",
            string(b"data") + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85",
            string(b"b") + b"\x87Rq\x09(K\x01M" + struct.pack("<H", len(images)) + b"M\x00\x0c\x86",
            b"cnumpy\ndtype\nq\x0a" + string(b"u1") + b"K\x00K\x01\x87Rq\x0b(K\x03" + string(b"|"),
            b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", len(raw)) + raw + b"tb",
            string(b"filenames") + b"q\x0c]q\x0d(" + b"".join(string(b"f%d.png" % k) for k in labels) + b"eu.",
        ]
    )


def test_the_python_2_pickle_is_one():
    images, labels = batch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old name numpy.core is deprecated
        read = pickle.loads(python_2_pickle(images, labels), encoding="bytes")
    assert np.array_equal(read[b"data"], images)
    assert read[b"labels"] == labels.tolist()


def python_3_pickle(images: np.ndarray, labels: np.ndarray) -> bytes:
    return pickle.dumps({"data": images, "labels": labels.tolist(), "batch_label": "x"}, protocol=4)


def binary(images: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None], images], axis=1).tobytes()


VERSIONS = {
    "binary": ("cifar-10-batches-bin", ".bin", binary),
    "python 2": ("cifar-10-batches-py", "", python_2_pickle),
    "python 3": ("cifar-10-batches-py", "", python_3_pickle),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_load(tmp_path, version):
    folder, suffix, write = VERSIONS[version]
    (tmp_path / folder).mkdir()
    for seed, name in enumerate(FILES):
        (tmp_path / folder / (name + suffix)).write_bytes(write(*batch(seed)))
    data = load("cifar10", root=tmp_path)
    assert data.classes == CIFAR10.classes
    assert data.input_shape == (3, 32, 32)
    assert data.train.x.dtype == torch.uint8
    for split, seeds in ((data.train, range(5)), (data.test, [5])):
        images = np.concatenate([batch(seed)[0] for seed in seeds])
        assert np.array_equal(split.x.numpy().reshape(-1, 3072), images)
        assert split.y.tolist() == [int(k) for seed in seeds for k in batch(seed)[1]]
    # Planes red, green, blue, each in rows: the pixel of row 2, column 5 in the green plane.
    assert data.test.x[1, 1, 2, 5] == batch(5)[0][1, 1024 + 2 * 32 + 5]


def test_missing(tmp_path):
    with pytest.raises(DataError, match=r"cifar-10-batches-bin or .*cifar-10-batches-py, got neither; unpack"):
        load("cifar10", root=tmp_path)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(DataError, match=r"data_batch_1\.bin, got none; unpack .*https://"):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "multiple of 3073 bytes, got 0"),
        (bytes(3072), "multiple of 3073 bytes, got 3072"),
        (bytes(3074), "multiple of 3073 bytes, got 3074"),
        (b"\x0a" + bytes(3072), "labels 0 to 9, got 10"),
    ],
)
def test_wrong_binary(tmp_path, content, message):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_binary(tmp_path / "f")


IMAGES, LABELS = batch(0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"labels": [0]}, r"'data' as an array of shape \(n, 3072\), got NoneType"),
        ({"data": IMAGES[:, :3071], "labels": [0] * 4}, r"got \(4, 3071\)"),
        ({"data": IMAGES[:0], "labels": []}, r"got \(0, 3072\)"),
        ({"data": IMAGES, "labels": [0] * 3}, "list of 4 numbers, got 3"),
        ({"data": IMAGES}, "list of 4 numbers, got NoneType"),
        ({"data": IMAGES, "labels": [0, 1, 2, 10]}, "labels 0 to 9, got 10"),
        ({"data": IMAGES, "labels": [0, 1, 2, -1]}, "labels 0 to 9, got -1"),
        ({"data": IMAGES, "labels": [0, 1, 2, 2.0]}, "labels as whole numbers, got float"),
        ({"data": IMAGES.astype(np.float32), "labels": [0] * 4}, "dtype uint8"),
        ([1], "expected a pickled dict, got list"),
    ],
)
def test_wrong_pickle(tmp_path, value, message):
    (tmp_path / "f").write_bytes(pickle.dumps(value, protocol=4))
    with pytest.raises(DataError, match=message):
        read_python(tmp_path / "f")


def test_a_pickle_that_calls_os_system_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(FILES):
        (folder / name).write_bytes(python_2_pickle(*batch(seed)))
    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": Evil(), "labels": [0]}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_3: expected a pickle that names only NumPy arrays, got .*system"):
        load("cifar10", root=tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def read_or_refuse(read, path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        images, labels = read(path)
    except DataError:
        return
    assert images.shape == (len(labels), 3072)
    assert (images.dtype, labels.dtype) == (np.uint8, torch.int64)
    assert labels.max() <= 9


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(start=st.binary(max_size=20), size=st.integers(0, 3 * 3073))
def test_fuzz_binary(scratch, start, size):
    for n in (size, 3073 * (size % 4)):
        read_or_refuse(read_binary, scratch / "f", (start + bytes(n))[:n])


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 20_000), place=st.integers(0, 400), end=st.booleans(), value=st.integers(0, 255))
def test_fuzz_damaged_pickles(scratch, cut, place, end, value):
    good = python_2_pickle(IMAGES, LABELS)
    for blob in (good[: len(good) - cut % len(good)], good):
        changed = bytearray(blob)
        place = place % len(changed)
        changed[-1 - place if end else place] = value
        read_or_refuse(read_python, scratch / "f", bytes(changed))


def part_100(seed: int, n: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 256, (n, 3072), np.uint8),
        rng.integers(0, 20, n, np.uint8),
        rng.integers(0, 100, n, np.uint8),
    )


def write_binary_100(root, seeds=(0, 1)) -> None:
    folder = root / "cifar-100-binary"
    folder.mkdir()
    for seed, name in zip(seeds, ("train", "test"), strict=True):
        images, coarse, fine = part_100(seed)
        rows = np.concatenate([coarse[:, None], fine[:, None], images], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def write_python_100(root, protocol: int) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir()
    for seed, name in enumerate(("train", "test")):
        images, coarse, fine = part_100(seed)
        value = {
            "filenames": [f"{i}.png" for i in range(len(images))],
            "batch_label": "training batch 1 of 1",
            "fine_labels": fine.tolist(),
            "coarse_labels": coarse.tolist(),
            "data": images,
        }
        (folder / name).write_bytes(pickle.dumps(value, protocol=protocol))


@pytest.mark.parametrize("version", ["binary", "python 2", "python 4"])
def test_load_cifar100(tmp_path, version):
    if version == "binary":
        write_binary_100(tmp_path)
    else:
        write_python_100(tmp_path, int(version[-1]))
    data = load("cifar100", root=tmp_path)
    assert (data.name, data.input_shape) == ("cifar100", (3, 32, 32))
    for seed, split in enumerate((data.train, data.test)):
        images, _, fine = part_100(seed)
        assert split.x.dtype == torch.uint8
        assert np.array_equal(split.x.numpy().reshape(-1, 3072), images)
        assert split.y.tolist() == fine.tolist()


@pytest.mark.thorough
def test_a_recipe_of_cifar10_takes_cifar100(tmp_path, one_recipe):
    write_binary_100(tmp_path)
    assert one_recipe("cifar10_patchnet", "cifar100", tmp_path, "model.options.patch=8") == 100


def test_classes_cifar100():
    names = CIFAR100.classes
    assert len(names) == len(set(names)) == 100
    assert list(names) == sorted(names)


def test_missing_cifar100(tmp_path):
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
def test_wrong_binary_cifar100(tmp_path, content, message):
    write_binary_100(tmp_path)
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(content)
    with pytest.raises(DataError, match=rf"test\.bin: expected .*{message}"):
        load("cifar100", root=tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"data": part_100(0)[0], "labels": [0] * 5}, "'fine_labels' as a list of 5 numbers, got NoneType"),
        ({"data": part_100(0)[0], "fine_labels": [100] * 5}, "labels 0 to 99, got 100"),
        ({"data": part_100(0)[0], "fine_labels": [0] * 4}, "list of 5 numbers, got 4"),
        ({"data": part_100(0)[0][:, :9], "fine_labels": [0] * 5}, r"shape \(n, 3072\), got \(5, 9\)"),
    ],
)
def test_wrong_pickle_cifar100(tmp_path, value, message):
    write_python_100(tmp_path, 2)
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(value, protocol=2))
    with pytest.raises(DataError, match=message):
        load("cifar100", root=tmp_path)


def test_a_pickle_of_the_published_size_is_read(tmp_path):
    # 155 MB in the published file: the limit must let it pass.
    assert MAX_FILE_BYTES > 155_249_918
