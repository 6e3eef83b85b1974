"""Pickles of uint8 arrays, read without running anything that the file names.

A pickle is a program. `pickle.loads` imports and calls what the program names; with a restricted `find_class`
it still lets the program call NumPy, and so allocate what it claims. Here `pickletools.genops` takes the
program apart, which only lists it and compares each claimed length with the file, and a small machine follows
the opcodes that build numbers, strings, containers and arrays. A name in the file is looked up in an
allow-list, NumPy's array protocol, and stands for a function of this module; any other name or opcode is refused.
"""

from __future__ import annotations

import math
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


def read_pickle(path: Path, *, source: str = "check the path") -> dict[str, Any]:
    """Read a pickled dict of uint8 arrays, numbers, strings and lists of these.

    Reads what Python 2 and Python 3 write in the binary protocols 2 to 5. Strings of Python 2 come back as
    bytes, the keys of the outer dict as str.

    Args:
        path: the file, at most MAX_FILE_BYTES.
        source: what to add to the message when the file is missing.

    Raises:
        DataError: if the file is missing, is not such a pickle, or names anything but a uint8 NumPy array.
            Nothing that the file names is imported or run.
    """
    if (size := file_size(path, source)) > MAX_FILE_BYTES:
        raise DataError(f"{path}: expected a pickle of at most {MAX_FILE_BYTES} bytes, got {size}")
    with reading(path):
        blob = read_bytes(path, MAX_FILE_BYTES)
    try:
        value = _Machine(blob).run()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # a corrupt program can fail anywhere: empty stack, unknown memo, bad text
        raise DataError(f"{path}: expected a complete pickle, got {type(error).__name__}: {error}") from error
    if type(value) is not dict:
        raise DataError(f"{path}: expected a pickled dict, got {type(value).__name__}")
    return {_text(key): item.value if isinstance(item, _Array) else item for key, item in value.items()}


class _Machine:
    """The stack machine of the pickle format, for the opcodes that plain data needs."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._encodable = len(blob)

    def run(self) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._blob)):
            if count >= MAX_OPCODES:
                raise DataError(f"expected a pickle of at most {MAX_OPCODES} opcodes, got more")
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        return self._stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                stack.append(argument)
            case "BINSTRING" | "SHORT_BINSTRING":  # genops shows a Python 2 string as latin-1 text
                stack.append(argument.encode("latin-1"))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                n = int(name[-1])
                if len(stack) < n:
                    raise DataError(f"expected {n} values for a tuple, got {len(stack)}")
                stack[-n:] = [tuple(stack[-n:])]
            case "TUPLE":
                values = self._pop_to_mark()
                self._stack.append(tuple(values))
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                value = stack.pop()
                _as(list, stack[-1]).append(value)
            case "APPENDS":
                values = self._pop_to_mark()
                _as(list, self._stack[-1]).extend(values)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _as(dict, stack[-1])[_key(key)] = value
            case "SETITEMS":
                values = self._pop_to_mark()
                target = _as(dict, self._stack[-1])
                for key, value in zip(values[::2], values[1::2], strict=True):
                    target[_key(key)] = value
            case "MARK":
                self._marked.append(stack)
                self._stack = []
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(self._global(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(self._global(_text(module), _text(attribute)))
            case "REDUCE":
                arguments, function = _as(tuple, stack.pop()), _as(_Name, stack.pop())
                stack.append(function.call(*arguments))
            case "BUILD":
                state = _as(tuple, stack.pop())
                if isinstance(stack[-1], _Array):
                    stack[-1].build(state)
                elif not isinstance(stack[-1], _Dtype):  # a dtype's state, its byte order, says nothing for uint8
                    raise DataError(f"expected the state of an array, got one for {type(stack[-1]).__name__}")
            case _:
                raise DataError(f"expected a pickle of plain arrays, got the opcode {name}")

    def _pop_to_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._marked.pop()
        return values

    def _global(self, module: str, name: str) -> _Name:
        if (module, name) == ("_codecs", "encode"):
            return _Name(self._encode)
        if (module, name) not in _NAMES:
            raise DataError(f"expected a pickle that names only NumPy arrays, got one that names {module}.{name}")
        return _NAMES[module, name]

    def _encode(self, text: Any, encoding: Any) -> bytes:
        """Python 3 writes bytes so in protocol 2; the file may ask for no more of them than it holds."""
        if not isinstance(text, str) or _text(encoding) != "latin1":
            raise DataError(f"expected bytes written as latin1 text, got {type(text).__name__}")
        self._encodable -= len(text)
        if self._encodable < 0:
            raise DataError("expected each byte string of the pickle once, got more bytes than the file holds")
        return text.encode("latin-1")


class _Name:
    """What a name in the file stands for: a function of this module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class _Dtype:
    """Stands for dtype('uint8'), the only one accepted."""


class _Array:
    """Stands for an array: a view on bytes of the file."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def build(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _view(raw, dtype, shape, "F" if fortran else "C")


def _view(raw: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray):
        raise DataError(f"expected a uint8 array with its bytes, got {type(raw).__name__}")
    if not isinstance(shape, tuple) or len(shape) > 4 or not all(type(n) is int and n >= 0 for n in shape):
        raise DataError("expected an array of at most 4 dimensions, got another shape")
    if math.prod(shape) != len(raw):
        raise DataError(f"expected {math.prod(shape)} bytes for an array of shape {shape}, got {len(raw)}")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _reconstruct(subtype: Any, shape: Any, code: Any) -> _Array:
    return _Array()


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.value = _view(raw, dtype, shape, _text(order))
    return array


def _dtype(code: Any, *rest: Any) -> _Dtype:
    if _text(code) not in ("u1", "|u1"):
        raise DataError(f"expected an array of dtype uint8 (u1), got {_text(code)[:20]!r}")
    return _Dtype()


def _ndarray(*args: Any) -> Any:
    raise DataError("expected an array with its bytes, got a call of numpy.ndarray")


_NAMES = {
    ("numpy", "ndarray"): _Name(_ndarray),
    ("numpy", "dtype"): _Name(_dtype),
    ("numpy.core.multiarray", "_reconstruct"): _Name(_reconstruct),
    ("numpy._core.multiarray", "_reconstruct"): _Name(_reconstruct),
    ("numpy.core.numeric", "_frombuffer"): _Name(_from_buffer),
    ("numpy._core.numeric", "_frombuffer"): _Name(_from_buffer),
}


def _as(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise DataError(f"expected {kind.__name__.strip('_').lower()} in the pickle, got {type(value).__name__}")
    return value


def _key(value: Any) -> Any:
    # Hashing a tuple that refers to itself many times over would never end.
    if not isinstance(value, str | bytes | int):
        raise DataError(f"expected a string or a number as a key, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise DataError(f"expected a string in the pickle, got {type(value).__name__}")
    return value
