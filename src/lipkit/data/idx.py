"""The IDX format of MNIST: a magic number, big-endian sizes, then unsigned bytes."""

from __future__ import annotations

import gzip
import io
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from lipkit.data.reading import check_claim, file_size, read_exactly, reading
from lipkit.errors import DataError
from lipkit.files import open_regular

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, ndim: int, *, source: str = "check the path") -> Tensor:
    """Read an IDX file of unsigned bytes, raw or gzipped (by the suffix `.gz`).

    The layout is `00 00 08 ndim`, then `ndim` big-endian uint32 sizes, then the values in row-major order.
    The sizes are compared with the file before memory is taken, and decompression stops at the claimed size.

    Args:
        path: the file.
        ndim: the number of dimensions it must have: 1 for labels, 3 for images.
        source: what to add to the message when the file is missing.

    Returns:
        uint8 tensor of the sizes in the header.

    Raises:
        DataError: if the file is missing, has another magic number, is truncated, or has trailing bytes.

    References:
        LeCun, Cortes, Burges, "The MNIST database of handwritten digits", section on file formats.
    """
    stored = file_size(path, source)
    compressed = path.suffix == ".gz"
    with reading(path), open_regular(path) as raw:
        stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if compressed else raw
        header = stream.read(4 + 4 * ndim)
        magic = bytes([0, 0, _UNSIGNED_BYTE, ndim])
        if header[:4] != magic:
            raise DataError(f"{path}: expected the IDX magic number {magic.hex()}, got {header[:4].hex() or 'nothing'}")
        if len(header) < 4 + 4 * ndim:
            raise DataError(f"{path}: expected an IDX header of {4 + 4 * ndim} bytes, got {len(header)}")
        shape = struct.unpack(f">{ndim}I", header[4:])
        size = math.prod(shape)
        if size == 0:
            raise DataError(f"{path}: expected at least one value, got the sizes {shape}")
        check_claim(path, size, stored if compressed else stored - len(header), compressed=compressed)
        values = read_exactly(stream, size, path)
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)
