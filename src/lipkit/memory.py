"""Memory of a process: what is freed, kept or given back by the C library; imports without a search for garbage."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

# Names of malloc.h, glibc's own.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next tensor of this process; returns whether glibc agreed.

    Each step of a training run allocates the same large tensors. By default glibc returns them to the system when they
    are freed, which then hands out, zeroed, and maps every page of 4 KiB anew: about a tenth of the time of a step
    (``docs/lab/performance.md``). The price: a process keeps its peak of memory. ``lipkit train`` and
    ``python -m papers`` call this for their own process; a library must not. Another allocator that was preloaded goes
    its own way, whatever glibc answers.

    >>> isinstance(keep_freed_memory(), bool)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl and others have no such function
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # No block by mmap, which free would return at once; no limit from which on free trims the heap. 1: done.
    return all(mallopt(name, value) == 1 for name, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the imports of a program: Python does not look for garbage in them, then or later.

    Modules stay, but each collection looks through all that they made: a quarter of the time to import all that trains.

    >>> with importing():
    ...     import json
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # moves all that is there out of the collector's sight
            gc.enable()
