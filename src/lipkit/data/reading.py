"""Reading files that may be missing, truncated, or claim a wrong size."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lipkit.errors import DataError
from lipkit.files import MAX_BYTES

# A deflate stream expands at most 1032 times (RFC 1951: 258 bytes from 2 bits); gzip and zip only add headers.
_DEFLATE_RATIO = 1032

# zipfile raises the last three for a damaged directory: an unknown version, a bad name, a short record.
_BROKEN = (OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of the operating system and of the decompressors into a DataError that names `path`."""
    try:
        yield
    except _BROKEN as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{path}: expected a readable, complete file, got {type(error).__name__}: {text}") from error


def file_size(path: Path, source: str) -> int:
    """Return the size of a regular file in bytes; if there is none, the DataError says where to get it (`source`)."""
    with reading(path):
        if not path.exists():
            raise DataError(f"expected a file at {path}, got none; {source}")
        if not path.is_file():
            raise DataError(f"expected a regular file at {path}, got a folder or device")
        return path.stat().st_size


def check_claim(path: Path, claimed: int, stored: int, *, compressed: bool) -> None:
    """Refuse a claimed size above MAX_BYTES, or above what `stored` bytes on disk can hold, before memory is taken."""
    available = stored * _DEFLATE_RATIO if compressed else stored
    if claimed > MAX_BYTES:
        raise DataError(f"{path}: expected at most {MAX_BYTES} bytes of data, got a header that claims {claimed}")
    if claimed > available:
        raise DataError(
            f"{path}: expected the {claimed} bytes of data that its header claims, got a file that can hold {available}"
        )


def read_exactly(stream: io.BufferedIOBase, size: int, path: Path) -> bytearray:
    """Read `size` bytes; ``DataError`` unless the stream ends there.

    Reads at most size + 1 bytes, so a compressed file cannot unpack to more than its header claims.
    """
    buffer = bytearray(size)
    view = memoryview(buffer)
    filled = 0
    while filled < size:  # a stream that decompresses may give less than is asked for
        got = stream.readinto(view[filled:])
        if not got:
            raise DataError(f"{path}: expected {size} bytes of data, got {filled} (the file is truncated)")
        filled += got
    if stream.read(1):
        raise DataError(f"{path}: expected {size} bytes of data, got more (trailing bytes)")
    return buffer
