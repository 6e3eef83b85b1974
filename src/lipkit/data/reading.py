"""Reading files that may be missing, truncated, or claim a wrong size; arrays and data sets in NumPy's formats."""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lipkit.data.split import Data, as_data, as_split
from lipkit.errors import DataError
from lipkit.files import MAX_BYTES, open_regular

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


def record_count(path: Path, each: int, source: str) -> int:
    """The number of records of `each` bytes in a file that holds nothing else, at least one; see `file_size`."""
    size = file_size(path, source)
    if size == 0 or size % each:
        raise DataError(f"{path}: expected a positive multiple of {each} bytes, got {size}")
    return size // each


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


NAMES = ("x_train", "y_train", "x_test", "y_test")
SHOWN = 20  # names that a message lists
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def load_npz(path: Path, limits: tuple[float, float] | None = None) -> Data:
    """Load a .npz file with the arrays `x_train`, `y_train`, `x_test`, `y_test`; pickled arrays are refused.

    Samples and targets are those of `as_split`; an optional array `classes` names the classes. Samples of shape
    (C, H, W) that are not images need `limits`, see `Data`.
    """
    file_size(path, "write one with numpy.savez_compressed(path, x_train=, y_train=, x_test=, y_test=)")
    with reading(path), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if missing := [name for name in NAMES if name not in members]:
            there = [repr(name) for name in members][:SHOWN] + ["..."] * (len(members) > SHOWN)
            raise DataError(
                f"{path}: expected the arrays {', '.join(NAMES)}, got {', '.join(there) or 'no arrays'}: "
                f"{', '.join(missing)} missing"
            )
        wanted = [*NAMES, "classes"] if "classes" in members else [*NAMES]
        arrays = {name: _read(path, archive, members[name]) for name in wanted}
    classes = arrays.get("classes", np.empty(0, "U1"))  # if empty, `as_data` numbers them
    if classes.dtype.kind != "U" or classes.ndim != 1:
        raise DataError(f"{path}: expected classes as a list of strings, got {classes.dtype} of shape {classes.shape}")
    train, test = (as_split((arrays[f"x_{p}"], arrays[f"y_{p}"]), f"{path}: {p}") for p in ("train", "test"))
    return as_data(f"npz:{path}", train, test, classes, limits)


def _read(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Read one array, after comparing the size in its header with the archive's and the file's."""
    where = path / info.filename
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{where}: expected a stored or deflated array, got zip method {info.compress_type}")
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    check_claim(where, info.file_size, info.compress_size, compressed=deflated)  # by the archive's directory
    check_claim(where, info.compress_size, path.stat().st_size, compressed=False)
    try:
        with archive.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            if version not in _HEADERS:
                raise ValueError(f"version {version} of the format")
            shape, _, dtype = _HEADERS[version](stream)
            claimed, held = math.prod(shape) * dtype.itemsize, info.file_size - stream.tell()
            if dtype.kind not in "biufU" or dtype.itemsize == 0:
                raise ValueError(f"dtype {dtype}")
            if claimed != held:
                raise ValueError(f"a header that claims {claimed} bytes before {held} bytes of data")
        with archive.open(info) as stream:  # from the start again: the header above was checked
            return np.lib.format.read_array(stream, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python source and may raise any of the parser's errors
        raise DataError(f"{where}: expected a complete array of numbers in .npy format, got {error}") from error


def read_npy(path: Path) -> np.ndarray:
    """Read an array of numbers in NumPy's .npy format; ``DataError`` if the file is missing or of another kind."""
    size = file_size(path, "write one with numpy.save(path, array)")
    check_claim(path, size, size, compressed=False)  # against MAX_BYTES
    with reading(path):
        try:
            # Mapping compares the size in the header with the file's before memory is taken.
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError:  # `reading` turns it into a DataError
            raise
        except Exception as error:  # any error of numpy's parser of the header
            raise DataError(f"{path}: expected an array of numbers in .npy format, got {error}") from error
        if not isinstance(mapped, np.ndarray):  # an archive of arrays
            mapped.close()
            raise DataError(f"{path}: expected one array in .npy format, got an archive of several")
        if mapped.dtype.kind not in "biuf":
            raise DataError(f"{path}: expected an array of numbers, got dtype {mapped.dtype}")
        return np.array(mapped)
