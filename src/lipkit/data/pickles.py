"""Pickles of uint8 arrays, read without running anything that the file names.

A pickle is a program. `pickletools.genops` parses it without running it and compares each claimed length with the
file. An opcode that plain data does not need is refused before anything runs. Then an `Unpickler` runs the program. A
name in the file must belong to NumPy's array protocol, and is replaced by a function of this module, so NumPy never
allocates a size that the file claims.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lipkit.data.reading import file_size, reading
from lipkit.errors import DataError
from lipkit.files import read_bytes

MAX_FILE_BYTES = 1 << 28
MAX_OPCODES = 1_000_000
MAX_TUPLES = 1000
# Opcodes that leave a new object other than a tuple or number on the stack: the memo may repeat it at no cost.
_REUSABLE = {
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINSTRING", "SHORT_BINSTRING", "EMPTY_LIST", "EMPTY_DICT", "GLOBAL", "STACK_GLOBAL", "REDUCE",
}  # fmt: skip
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}
_OPCODES = _REUSABLE | _TUPLES | _PUTS | _GETS | {
    "PROTO", "FRAME", "STOP", "MARK", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE",
    "NEWFALSE", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD",
}  # fmt: skip


def read_pickle(path: Path, *, source: str = "check the path") -> dict[str, Any]:
    """Read a pickled dict of uint8 arrays, numbers, strings and lists of these, from a file of at most MAX_FILE_BYTES.

    Reads what Python 2 and Python 3 write in the binary protocols 2 to 5. Strings of Python 2 come back as bytes, the
    keys of the outer dict as str. `source` ends the message about a missing file. Any other pickle, also one that names
    anything but a uint8 NumPy array, raises ``DataError``: nothing is imported or run.
    """
    if (size := file_size(path, source)) > MAX_FILE_BYTES:
        raise DataError(f"{path}: expected a pickle of at most {MAX_FILE_BYTES} bytes, got {size}")
    with reading(path):
        blob = read_bytes(path, MAX_FILE_BYTES)
    try:
        _check_opcodes(blob)
        value = _Unpickler(blob).load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # a corrupt program can fail anywhere: empty stack, unknown memo, bad text
        raise DataError(f"{path}: expected a complete pickle, got {type(error).__name__}: {error}") from error
    if type(value) is not dict:
        raise DataError(f"{path}: expected a pickled dict, got {type(value).__name__}")
    if wrong := [key for key in value if not isinstance(key, str | bytes)]:
        raise DataError(f"{path}: expected strings as keys, got {type(wrong[0]).__name__}")
    return {_text(key): item.value if isinstance(item, _Array) else item for key, item in value.items()}


def _check_opcodes(blob: bytes) -> None:
    """Refuse a program that does more than build plain data, or whose cost exceeds its length.

    The memo is an array: a large index would reserve memory for nothing. A tuple may be a key, whose hash recurses into
    its entries: the limit on tuples bounds the depth, and forbidding their reuse bounds the time.
    """
    reusable: dict[int, bool] = {}
    before, tuples = "", 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(blob)):
        name = opcode.name
        if count >= MAX_OPCODES:
            raise DataError(f"expected a pickle of at most {MAX_OPCODES} opcodes, got more")
        if name not in _OPCODES:
            raise DataError(f"expected a pickle of plain arrays, got the opcode {name}")
        if name in _PUTS:
            index = len(reusable) if argument is None else argument  # MEMOIZE uses the next index
            if index > count:
                raise DataError(f"expected a memo index of at most {count}, got {index}")
            reusable[index] = before in _REUSABLE  # of the object that the opcode before left on the stack
        elif name in _GETS and not reusable.get(argument or 0, True):  # an index never set fails at run time
            raise DataError("expected each tuple and number of the pickle once, got one that is used again")
        tuples += name in _TUPLES
        if tuples > MAX_TUPLES:
            raise DataError(f"expected a pickle of at most {MAX_TUPLES} tuples, got more")
        before = name


class _Unpickler(pickle.Unpickler):
    """Reads strings of Python 2 as bytes; replaces a name by a function of this module, or refuses it."""

    def __init__(self, blob: bytes) -> None:
        super().__init__(io.BytesIO(blob), encoding="bytes")  # strings of Python 2, which may be pixels
        self._encodable = len(blob)  # characters that `_encode` may still copy

    def find_class(self, module: str, name: str) -> _Name:
        if (module, name) == ("_codecs", "encode"):
            return _Name(self._encode)
        if (module, name) not in _NAMES:
            raise DataError(f"expected a pickle that names only NumPy arrays, got one that names {module}.{name}")
        return _NAMES[module, name]

    def _encode(self, text: Any, encoding: Any) -> bytes:
        """Replaces _codecs.encode, which pickles of protocol 2 call to make bytes; copies at most the file's length."""
        if not isinstance(text, str) or _text(encoding) != "latin1":
            raise DataError(f"expected bytes written as latin1 text, got {type(text).__name__}")
        self._encodable -= len(text)
        if self._encodable < 0:
            raise DataError("expected each byte string of the pickle once, got more bytes than the file holds")
        return text.encode("latin-1")


class _Name:
    """Stands for a name in the file: calls run a function of this module, and the file cannot set its state."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise DataError("expected the state of an array, got one for a name")


class _Dtype:
    """Stands for dtype('uint8'), the only one accepted; its state, a byte order, means nothing for one byte."""

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for an array; its value is a view of the file's bytes."""

    def __init__(self, value: np.ndarray | None = None) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state  # the first is the version of NumPy's format
        self.value = _view(raw, dtype, shape, "F" if fortran else "C")


def _view(raw: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray):
        raise DataError(f"expected a uint8 array with its bytes, got {type(raw).__name__}")
    if not isinstance(shape, tuple) or len(shape) > 4 or not all(type(n) is int and n >= 0 for n in shape):
        raise DataError("expected an array of at most 4 dimensions, got another shape")
    if math.prod(shape) != len(raw):
        raise DataError(f"expected {math.prod(shape)} bytes for an array of shape {shape}, got {len(raw)}")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _dtype(code: Any, *rest: Any) -> _Dtype:
    if _text(code) not in ("u1", "|u1"):  # |: no byte order
        raise DataError(f"expected an array of dtype uint8 (u1), got {_text(code)[:20]!r}")
    return _Dtype()


def _ndarray(*arguments: Any) -> Any:
    raise DataError("expected an array with its bytes, got a call of numpy.ndarray")


_NAMES = {("numpy", "ndarray"): _Name(_ndarray), ("numpy", "dtype"): _Name(_dtype)}
for _package in ("numpy.core", "numpy._core"):  # before and since NumPy 2
    _NAMES[f"{_package}.multiarray", "_reconstruct"] = _Name(lambda subtype, shape, code: _Array())
    _NAMES[f"{_package}.numeric", "_frombuffer"] = _Name(
        lambda raw, dtype, shape, order: _Array(_view(raw, dtype, shape, _text(order)))
    )


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise DataError(f"expected a string in the pickle, got {type(value).__name__}")
    return value
