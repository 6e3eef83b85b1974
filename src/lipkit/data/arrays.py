"""Data sets in one .npz file and arrays in .npy files: headers are checked before memory is taken."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np

from lipkit.data.reading import check_claim, file_size, reading
from lipkit.data.split import Data, as_data, as_split
from lipkit.errors import DataError
from lipkit.files import open_regular

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
