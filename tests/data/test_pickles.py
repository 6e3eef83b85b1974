"""Pickles: what real files hold is read, anything that names more is refused and never runs."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipkit.data.pickles import read_pickle
from lipkit.errors import DataError


def arrays() -> dict[str, Any]:
    data = np.random.default_rng(0).integers(0, 256, (5, 12), np.uint8)
    return {
        "data": data,
        "labels": [0, 3, 255, 70_000, -1],
        "name": "batch 1",
        "nested": [["a", 1.5, None, True]],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_python_3_writes(tmp_path, protocol, order):
    value = arrays()
    value["data"] = np.asarray(value["data"], order=order)
    path = tmp_path / "f"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    read = read_pickle(path)
    assert np.array_equal(read.pop("data"), value.pop("data"))
    assert read == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_two_arrays_share_their_dtype(tmp_path, protocol):
    value = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(4, dtype=np.uint8).reshape(2, 2)}
    (tmp_path / "f").write_bytes(pickle.dumps(value, protocol=protocol))
    read = read_pickle(tmp_path / "f")
    assert all(np.array_equal(read[k], value[k]) for k in value)


class Call:
    """Pickles to a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_of_os_system_is_refused_and_nothing_runs(tmp_path, protocol, monkeypatch):
    marker = tmp_path / "ran"
    path = tmp_path / "evil"
    path.write_bytes(pickle.dumps({"data": Call(os.system, f"touch {marker}")}, protocol=protocol))
    expected = "names .*system" if protocol >= 1 else "opcode"  # protocol 0 is text
    with pytest.raises(DataError, match=expected):
        read_pickle(path)
    assert not marker.exists()
    # The file is a working attack: the ordinary reader does run it.
    pickle.loads(path.read_bytes())
    assert marker.exists()


@pytest.mark.parametrize("function", [eval, exec, open, getattr, __import__, np.load, np.fromfile, np.zeros, bytearray])
def test_other_names_are_refused(tmp_path, function):
    for protocol in (2, 4):
        (tmp_path / "f").write_bytes(pickle.dumps({"data": Call(function, "x")}, protocol=protocol))
        with pytest.raises(DataError, match="names only NumPy arrays, got one that names"):
            read_pickle(tmp_path / "f")


def refused(path, body: bytes, message: str) -> None:
    path.write_bytes(b"\x80\x04" + body)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            read_pickle(path)
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
UINT8 = b"cnumpy\ndtype\n(" + text("u1") + b"\x89\x88tR"
HUGE = b"\x8a\x06" + (1 << 40).to_bytes(6, "little")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"cos\nsystem\n.", "names os.system"),
        (text("os") + text("system") + b"\x93.", "names os.system"),
        (b"cnumpy.core.multiarray\nscalar\n.", "names numpy.core.multiarray.scalar"),
        (b"cnumpy\nndarray\n(" + HUGE + b"\x85tR.", "a call of numpy.ndarray"),
        (b"cnumpy\nndarray\n)\x81.", "opcode NEWOBJ"),
        (b"(ios\nsystem\n.", "opcode INST"),
        (b"\x82\x01.", "opcode EXT1"),
        (b"Pos\n.", "opcode PERSID"),
        (b"cnumpy\ndtype\n(" + text("f8") + b"tR.", r"dtype uint8 \(u1\), got 'f8'"),
        (b"cnumpy\ndtype\n(" + text("O") + b"tR.", "dtype uint8"),
        (b"cnumpy\nndarray\n)b.", "state of an array, got one for a name"),
        (b"]).", "expected a pickled dict, got tuple"),
        (b"])b.", "complete pickle"),
        (b"K\x01)R.", "complete pickle"),
        (b"]K\x01K\x01s.", "complete pickle"),
        (b"}K\x01a.", "complete pickle"),
        (b"}(K\x01u.", "complete pickle"),
        (b"})K\x01s.", "strings as keys, got tuple"),
        (b"\x85.", "complete pickle"),
        (b"h\x05.", "complete pickle"),
        (b"e.", "complete pickle"),
        (b"}", "complete pickle"),
        (b"", "complete pickle"),
        (b"B\xff\xff\xff\x7fxx.", "complete pickle"),
        (b"\x8e" + b"\xff" * 7 + b"\x7fxx.", "complete pickle"),
        (
            RECONSTRUCT + b"(K\x01" + HUGE + b"\x85" + UINT8 + b"\x89C\x02xxtb.",
            "1099511627776 bytes for an array",
        ),
        (RECONSTRUCT + b"(K\x01J\xfe\xff\xff\xff\x85" + UINT8 + b"\x89C\x02xxtb.", "another shape"),
        (RECONSTRUCT + b"(K\x01K\x02\x85" + UINT8 + b"\x89]tb.", "with its bytes, got list"),
        (RECONSTRUCT + b"(K\x01tb.", "complete pickle"),
        (b"}r\xff\xff\xff\xff.", "memo index of at most 2, got 4294967295"),
        (b"\x95" + b"\xff" * 7 + b"\x0f}.", "complete pickle"),
        (b"\x8c\x01x" * 3 + b"]" * 3 + b"0.", "opcode POP"),
    ],
)
def test_hostile_programs(tmp_path, body, message):
    refused(tmp_path / "f", body, message)


# The last three leave the tuple on the stack and end in an opcode that usually leaves something else there.
@pytest.mark.parametrize("hidden", [b"", b"q\x00", b"Nb", b"(e", b"(u"])
def test_a_tuple_that_would_take_forever_to_hash(tmp_path, hidden):
    twice = b"h\x00\x86" + hidden + b"q\x00"
    refused(tmp_path / "f", b"}" + b")" + hidden + b"q\x00" + twice * 100 + b"K\x01s.", "got one that is used again")


def test_a_tuple_too_deep_to_hash(tmp_path):
    refused(tmp_path / "f", b"})" + b"\x85" * 200_000 + b"K\x01s.", "at most 1000 tuples")
    refused(tmp_path / "f", b"})" + b"\x85" * 990 + b"K\x01s.", "strings as keys, got tuple")


@pytest.mark.parametrize("name", [b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n"])
@pytest.mark.parametrize("state", ["}{}s", "N}{}s\x86"])
def test_a_pickle_cannot_change_the_functions_that_stand_for_its_names(tmp_path, name, state):
    for attribute in ("_call", "__class__", "__code__", "call"):
        body = state.encode("latin-1").replace(b"{}", text(attribute) + b"K\x01")
        refused(tmp_path / "f", name + body + b"b.", "expected the state of an array, got one for a name")
    value = {"data": np.arange(4, dtype=np.uint8)}
    (tmp_path / "f").write_bytes(pickle.dumps(value, protocol=2))
    assert np.array_equal(read_pickle(tmp_path / "f")["data"], value["data"])


def test_bytes_are_not_multiplied(tmp_path):
    body = b"}K\x00](" + text("a" * 100_000) + b"q\x00"
    encode = b"c_codecs\nencode\nh\x00" + text("latin1") + b"\x86R"
    refused(tmp_path / "f", body + encode * 1000 + b"es.", "more bytes than the file holds")


def test_too_many_opcodes(tmp_path, monkeypatch):
    monkeypatch.setattr("lipkit.data.pickles.MAX_OPCODES", 1000)
    refused(tmp_path / "f", b"](" + b"}" * 2000 + b"e.", "at most 1000 opcodes")


def test_too_large_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("lipkit.data.pickles.MAX_FILE_BYTES", 10)
    refused(tmp_path / "f", bytes(20), "at most 10 bytes, got 22")


@pytest.mark.thorough
def test_deep_nesting_is_only_refused(tmp_path):
    refused(tmp_path / "f", b")" + b"\x85" * 999 + b".", "expected a pickled dict, got tuple")
    refused(tmp_path / "f", b"]" * 40_000 + b"a" * 39_999 + b".", "expected a pickled dict, got list")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def read_or_refuse(path, blob: bytes) -> None:
    path.write_bytes(blob)
    try:
        read = read_pickle(path)
    except DataError:
        return
    assert type(read) is dict


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=60))
def test_fuzz_random_bytes(scratch, body):
    read_or_refuse(scratch / "f", body)


OPCODES = [op.code.encode("latin-1") for op in pickletools.opcodes]


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(body=st.lists(st.sampled_from(OPCODES) | st.binary(max_size=2) | st.just(UINT8) | st.just(RECONSTRUCT)))
def test_fuzz_random_programs(scratch, body):
    read_or_refuse(scratch / "f", b"\x80\x02" + b"".join(body) + b".")


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(protocol=st.integers(2, 5), cut=st.integers(0, 400), place=st.integers(0, 400), value=st.integers(0, 255))
def test_fuzz_damaged_pickles(scratch, protocol, cut, place, value):
    good = pickle.dumps(arrays(), protocol=protocol)
    changed = bytearray(good[: len(good) - cut % len(good)])
    changed[place % len(changed)] = value
    read_or_refuse(scratch / "f", bytes(changed))
