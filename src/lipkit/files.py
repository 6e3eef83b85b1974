"""Atomic writes, so that a crash leaves files whole or absent; reads of regular files only, up to a limit of size."""

import contextlib
import errno
import io
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 34
"""Limit on the size of a file that is read, and on the memory of one array in it: 16 GiB."""
MAX_TEXT = 1 << 26
"""Limit on the size of a text (configuration, record, recipe, metrics): 64 MiB."""

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file (links are followed); ``OSError`` unless regular: a device may have no end, a pipe may block."""
    # Without O_NONBLOCK, opening a pipe waits for a writer. For a regular file the flag has no effect.
    patient = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | patient))  # noqa: SIM115
    mode = os.fstat(file.fileno()).st_mode  # of the open file: nobody can swap it after this check
    if not stat.S_ISREG(mode):
        file.close()
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"{kind} in place of a regular file", os.fspath(path))
    return file


def read_bytes(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """The content of a regular file (see `open_regular`); ``OSError`` before it is read if it exceeds ``most`` bytes.

    >>> read_bytes("/dev/null")
    Traceback (most recent call last):
    OSError: [Errno 22] a device in place of a regular file: '/dev/null'
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, more than {most}", os.fspath(path))
        return file.read(size)


def read_text(path: str | os.PathLike[str], most: int = MAX_TEXT) -> str:
    """The text of a regular UTF-8 file (else ``ValueError``), read by `read_bytes`; line ends become line feeds."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding="utf-8").read()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, but refuse NaN, infinities and duplicate keys, which readers interpret differently.

    Raises ``ValueError``, or ``RecursionError`` if the text is nested too deeply.
    """

    def refuse(text: str) -> Any:
        raise ValueError(f"a bare {text}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key twice")
        return values

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an ``OSError`` of a write, such as a full disk, name this file, rather than a temporary one or none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    r"""Write ``content`` to ``path``, replacing a file, so that no reader, and no crash, ever sees a part of it.

    An ``OSError`` (a missing folder, a full disk) names ``path`` and leaves it unchanged.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with _naming(path):
        # O_EXCL: the name is ours alone. Mode 666 minus the umask, as open() would give.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # before the rename: a crash between the two must not leave an empty file
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)  # so that the rename survives a power failure, too


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Append a line to a text file, made if absent, by one write synced to disk; ``ValueError`` for several lines."""
    if "\n" in line or "\r" in line:
        raise ValueError(f"expected one line, got {line!r}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    with _naming(path), open(descriptor, "ab", buffering=0) as file:  # unbuffered: readers see a whole line
        file.write(line.encode() + b"\n")
        os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync the names in ``folder`` to disk; does nothing where folders cannot be opened (Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
