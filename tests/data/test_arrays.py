"""One .npz file."""

from __future__ import annotations

import contextlib
import io
import os
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipkit.data import load
from lipkit.errors import DataError


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    made = {
        "x_train": rng.integers(0, 256, (6, 3, 4, 5), np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "x_test": rng.integers(0, 256, (2, 3, 4, 5), np.uint8),
        "y_test": np.array([2, 0], np.uint8),
    }
    return {name: value for name, value in (made | changes).items() if value is not None}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_classification(tmp_path, save):
    save(tmp_path / "d.npz", **arrays())
    data = load(f"npz:{tmp_path / 'd.npz'}")
    assert data.task == "classification"
    assert data.classes == ("0", "1", "2")
    assert np.array_equal(data.train.x.numpy(), arrays()["x_train"])
    assert data.test.y.tolist() == [2, 0]


def test_names_of_classes(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays(classes=np.array(["a", "b", "c", "d"])))
    assert load(f"npz:{tmp_path / 'd.npz'}").classes == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"y_test": np.array([2, 1 << 21])},
            "expected at most 1000 classes for 8 samples, labels from 0 on, got 2097153",
        ),
        ({"y_train": np.array([0, 1, 2, 0, 1, 1000])}, "for 8 samples, labels from 0 on, got 1001"),
        ({"y_train": np.array([0, 1, 2, 0, 1, 2**63 - 1])}, f"got {2**63}"),
        ({"classes": np.zeros(1 << 20, "U1")}, "got 1048576"),
    ],
)
def test_a_label_makes_no_more_classes_than_samples_could_have(tmp_path, changes, message):
    np.savez_compressed(tmp_path / "d.npz", **arrays(**changes))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            load(f"npz:{tmp_path / 'd.npz'}")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_as_many_classes_as_samples_are_taken(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays(y_train=np.array([0, 1, 2, 0, 1, 999])))
    assert len(load(f"npz:{tmp_path / 'd.npz'}").classes) == 1000
    many = np.arange(1200)
    np.savez(
        tmp_path / "d.npz",
        **arrays(
            x_train=np.zeros((1200, 2), np.uint8), y_train=many, x_test=np.zeros((1, 2), np.uint8), y_test=many[:1]
        ),
    )
    assert load(f"npz:{tmp_path / 'd.npz'}").classes[-1] == "1199"


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2"])
def test_regression(tmp_path, dtype):
    x, y = np.linspace(-2, 2, 12).reshape(6, 2).astype(dtype), np.arange(6).astype(dtype)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    data = load(f"npz:{tmp_path / 'd.npz'}")
    assert data.task == "regression"
    assert data.classes == ()
    assert data.train.y.shape == (6, 1)
    assert data.train.y.dtype == torch.float32
    assert np.array_equal(data.train.batch(slice(None))[0].numpy(), x.astype("<f4"))


def test_grey_images_get_a_channel(tmp_path):
    made = arrays(x_train=arrays()["x_train"][:, 0], x_test=arrays()["x_test"][:, 0])
    np.savez(tmp_path / "d.npz", **made)
    assert load(f"npz:{tmp_path / 'd.npz'}").input_shape == (1, 4, 5)


def test_fortran_order(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays(x_train=np.asfortranarray(arrays()["x_train"])))
    assert np.array_equal(load(f"npz:{tmp_path / 'd.npz'}").train.x.numpy(), arrays()["x_train"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "got 'x_train', 'y_train', 'x_test': y_test missing"),
        ({"x_train": None, "y_train": None}, "got 'x_test', 'y_test': x_train, y_train missing"),
        (
            {**dict.fromkeys(arrays()), "images": np.zeros(2), "labels\033[2J": np.zeros(2)},
            r"got 'images', 'labels\\x1b\[2J': x_train, y_train, x_test, y_test missing",
        ),
        ({**dict.fromkeys(arrays()), **{f"a{i}": np.zeros(1) for i in range(30)}}, r"'a18', 'a19', \.\.\.: x_train"),
        ({"x_train": np.zeros((6, 4, 5, 3), np.uint8)}, r"channels last"),
        ({"y_train": np.zeros((6, 1), np.uint8)}, r"train: expected y as int64 labels .* got shape \(6, 1\)"),
        ({"y_train": np.zeros(5, np.uint8)}, "6 samples and 5 targets"),
        ({"x_test": np.zeros((2, 3, 4, 4), np.uint8)}, r"\(3, 4, 5\) and \(3, 4, 4\)"),
        ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "labels >= 0, got -1"),
        ({"x_train": np.zeros((6, 3, 4, 5), np.int64)}, "dtype int64"),
        ({"x_train": np.zeros((6, 3, 4, 5))}, "one dtype"),
        ({"y_train": np.zeros(6), "y_test": np.zeros(2, np.int64)}, "one dtype, .* torch.float32 and torch.int64"),
        ({"y_train": np.full(6, 2**64 - 1, np.uint64)}, "y: expected integers below 2.63, got 18446744073709551615"),
        ({"y_train": np.array(["a"] * 6)}, "array of numbers"),
        ({"y_train": np.array([None] * 6)}, "dtype object"),
        ({"y_train": np.zeros(6, "M8[s]")}, "got dtype datetime64"),
        ({"classes": np.arange(3)}, "classes as a list of strings, got int64"),
        ({"classes": np.array(["a", "b"])}, "number of classes 2, got 2"),
    ],
)
def test_wrong_arrays(tmp_path, changes, message):
    np.savez(tmp_path / "d.npz", **arrays(**changes))
    with pytest.raises(ValueError, match=message) as caught:
        load(f"npz:{tmp_path / 'd.npz'}")
    assert type(caught.value).__module__ == "lipkit.errors"


def test_missing(tmp_path):
    with pytest.raises(DataError, match=r"d\.npz, got none; write one with numpy\.savez"):
        load(f"npz:{tmp_path / 'd.npz'}")


def test_a_pickled_array_is_not_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    np.savez(tmp_path / "d.npz", **arrays(y_train=np.array([Evil()] * 6, dtype=object)))
    with pytest.raises(DataError, match="dtype object"):
        load(f"npz:{tmp_path / 'd.npz'}")
    assert not (tmp_path / "ran").exists()


def npy(shape: str, descr: str = "|u1", body: bytes = b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy("(1099511627776,)"), "claims 1099511627776 bytes before 0 bytes"),
        (npy("(1000000000,)", body=bytes(100)), "claims 1000000000 bytes before 100 bytes"),
        (npy("(-6,)", body=bytes(6)), "claims -6 bytes"),
        (npy("(5,)", body=bytes(6)), "claims 5 bytes before 6 bytes"),
        (npy("(99999999999999,)", "|S0"), "dtype"),
        (npy("(99999999999999,)", "<U0"), "got dtype <U0"),
        (npy("(6,)", "|O", bytes(48)), "dtype object"),
        (npy("(" * 50), "complete array"),
        (b"", "complete array"),
        (b"\x93NUMPY\x09\x00", "version"),
        (b"\x80\x04cos\nsystem\n.", "complete array"),
    ],
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_lying_headers(tmp_path, member, message, method):
    np.savez(tmp_path / "d.npz", **arrays(y_train=None))
    with zipfile.ZipFile(tmp_path / "d.npz", "a", method) as archive:
        archive.writestr("y_train.npy", member)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            load(f"npz:{tmp_path / 'd.npz'}")
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_changed_pixel_is_noticed(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays(x_test=np.full((2, 3, 4, 5), 77, np.uint8)))
    blob = (tmp_path / "d.npz").read_bytes()
    (tmp_path / "d.npz").write_bytes(blob.replace(b"M" * 60, b"M" * 59 + b"N", 1))
    with pytest.raises(DataError, match="Bad CRC-32"):
        load(f"npz:{tmp_path / 'd.npz'}")


def test_a_damaged_directory(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays())
    blob = bytearray((tmp_path / "d.npz").read_bytes())
    blob[blob.index(b"PK\x01\x02") + 6] = 200  # the version needed to extract
    (tmp_path / "d.npz").write_bytes(blob)
    with pytest.raises(DataError, match=r"d\.npz: expected a readable, complete file, got .*zip file version 20"):
        load(f"npz:{tmp_path / 'd.npz'}")


def test_names_without_bytes_are_refused(tmp_path):
    """They could claim any number of classes."""
    np.savez(tmp_path / "d.npz", **arrays())
    with zipfile.ZipFile(tmp_path / "d.npz", "a") as archive:
        archive.writestr("classes.npy", npy("(3,)", "<U0"))
    with pytest.raises(DataError, match="got dtype <U0"):
        load(f"npz:{tmp_path / 'd.npz'}")


def test_other_compression(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays(y_train=None))
    with zipfile.ZipFile(tmp_path / "d.npz", "a", zipfile.ZIP_LZMA) as archive:
        archive.writestr("y_train.npy", npy("(6,)", body=bytes(6)))
    with pytest.raises(DataError, match="zip method 14"):
        load(f"npz:{tmp_path / 'd.npz'}")


def test_not_a_zip(tmp_path):
    np.save(tmp_path / "d.npy", np.zeros(3))
    with pytest.raises(DataError, match="BadZipFile"):
        load(f"npz:{tmp_path / 'd.npy'}")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 100), place=st.integers(0, 5000), value=st.integers(0, 255), deflate=st.booleans())
def test_fuzz_damaged_files(scratch, cut, place, value, deflate):
    stream = io.BytesIO()
    (np.savez_compressed if deflate else np.savez)(stream, **arrays())
    changed = bytearray(stream.getvalue())
    changed = changed[: len(changed) - cut]
    changed[-1 - place % len(changed)] = value
    (scratch / "d.npz").write_bytes(changed)
    with contextlib.suppress(DataError):
        load(f"npz:{scratch / 'd.npz'}")
