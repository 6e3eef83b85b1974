"""PNG images without an imaging library: a signature, three chunks and zlib."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

from lipkit.errors import ShapeError


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether inputs of this shape can be shown: (H, W), (1, H, W) or (3, H, W).

    >>> is_image((3, 32, 32)), is_image((1, 8, 8)), is_image((12,))
    (True, True, False)
    """
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def png(image: Tensor) -> bytes:
    """An 8-bit greyscale or RGB PNG.

    Args:
        image: (H, W), (1, H, W) or (3, H, W), values in [0, 1]; others are clipped, NaN becomes 0.

    Raises:
        ShapeError: another shape.

    >>> png(torch.zeros(1, 2, 2))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    if not is_image(tuple(image.shape)):
        raise ShapeError(f"expected an image of shape (H, W), (1, H, W) or (3, H, W), got {tuple(image.shape)}")
    pixels = image.detach().cpu().float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels)
    filtered = b"".join(b"\0" + row.numpy().tobytes() for row in rows)  # filter type 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(filtered, 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def data_uri(image: Tensor) -> str:
    """The PNG as a ``data:`` address, for a page that loads nothing."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
