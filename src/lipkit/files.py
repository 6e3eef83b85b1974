"""Files that are whole or absent: a crash at any moment leaves the old content or the new one."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    r"""Write ``content`` to ``path`` so that no reader, and no crash, ever sees a part of it.

    The bytes go to a temporary name in the same folder, are synced to disk, take the final name in one step
    (``os.replace``), and the folder itself is synced, so that the new name survives a power failure too.

    Args:
        path: the file to write; one already there is replaced. Its folder must exist.
        content: the whole content.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full; ``path`` is then as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder) / "a.txt", b"new")
    ...     [p.name for p in Path(folder).iterdir()], (Path(folder) / "a.txt").read_bytes()
    (['a.txt'], b'new')
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    # O_EXCL: the name is ours alone. Mode 666 minus the umask, as open() would give.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Append one line to a text file with a single write, synced to disk before returning.

    Args:
        path: the file; made when absent.
        line: text without a line break.

    Raises:
        ValueError: if ``line`` holds a line break.
    """
    if "\n" in line or "\r" in line:
        raise ValueError(f"expected one line, got {line!r}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    with open(descriptor, "ab", buffering=0) as file:
        file.write(line.encode() + b"\n")
        os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in ``folder`` durable; does nothing where folders cannot be opened (Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, as 64 hexadecimal digits, read in pieces.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder) / "empty", b"")
    ...     sha256_file(Path(folder) / "empty")[:16]
    'e3b0c44298fc1c14'
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
