"""One array in a .npy file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lipkit.data.reading import check_claim, file_size, reading
from lipkit.errors import DataError


def read_npy(path: Path) -> np.ndarray:
    """Read an array of numbers in NumPy's .npy format; no pickled object in it is read.

    Args:
        path: the file.

    Raises:
        DataError: the file is missing, is no such array, or its header claims another size than the file has.
    """
    size = file_size(path, "write one with numpy.save(path, array)")
    check_claim(path, size, size, compressed=False)
    with reading(path):
        try:
            # Mapping compares the size in the header with the file's before memory is taken.
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError:
            raise
        except Exception as error:  # the header is parsed as Python source, whose errors come through
            raise DataError(f"{path}: expected an array of numbers in .npy format, got {error}") from error
        if not isinstance(mapped, np.ndarray):  # an archive of arrays
            mapped.close()
            raise DataError(f"{path}: expected one array in .npy format, got an archive of several")
        if mapped.dtype.kind not in "biuf":
            raise DataError(f"{path}: expected an array of numbers, got dtype {mapped.dtype}")
        return np.array(mapped)
