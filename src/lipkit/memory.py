"""Memory of a process: freed memory stays in the C library; imports run without garbage collection."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next tensor of this process; returns True if glibc accepts.

    By default glibc returns freed tensors to the system, which zeroes and maps every page anew: about a tenth of the
    time of a training step (``docs/lab/performance.md``). The price: a process keeps its peak of memory. Programs call
    this for their own process; a library must not. With a preloaded allocator it has no effect, but returns True.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl and others have no such function
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Never use mmap, whose blocks free returns at once, and never trim the heap. mallopt returns 1 on success.
    return all(mallopt(name, value) == 1 for name, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Switch garbage collection off during imports, and exempt the imported objects from it for good.

    Modules are never garbage, but collections scan them: a quarter of the time to import the training code.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # exempts all present objects from collection
            gc.enable()
