"""Checks that torch computes in IEEE arithmetic: its settings for float32 products, and its flushing of subnormals."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import OptionError

# Values of a setting that keep float32 products IEEE float32; "none" leaves the choice to the setting above.
_EXACT = ("none", "ieee")
# Environment variables by which a library computes in lower precision, whatever torch's settings say.
_VARIABLES = {
    "cpu": ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    "cuda": ("NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION", "CUBLAS_EMULATE_DOUBLE_PRECISION"),
}
_HARMLESS = ("unset", "", "0", "strict")


def product_settings(kind: str) -> dict[str, str]:
    """The settings of torch for float32 products on a type of device ("cpu", "cuda").

    Torch cannot read a setting whose backends differ: it is "mixed" here, and the settings of the backends follow.
    """
    if kind == "cuda":
        names = ["cuda.matmul.fp32_precision", "cuda.matmul.allow_tf32"]
    else:
        names = ["mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision"]
    return {
        "float32_matmul_precision": _read(torch.get_float32_matmul_precision),
        **{name: _read(partial(attrgetter(name), torch.backends)) for name in ("fp32_precision", *names)},
        **{name: os.environ.get(name, "unset") for name in _VARIABLES.get(kind, ())},
    }


def _read(get: Callable[[], object]) -> str:
    try:
        return str(get())
    except RuntimeError:
        return "mixed"


def reduced_products(found: dict[str, str]) -> list[str]:
    """A sentence for each setting of :func:`product_settings` that allows float32 products of lower precision."""
    wrong = [
        f"{key} is {value!r} (expected 'ieee' or 'none')"
        for key, value in found.items()
        if key.endswith("fp32_precision") and value not in _EXACT
    ]
    if found.get("float32_matmul_precision") not in ("highest", "mixed"):
        wrong.append("torch.get_float32_matmul_precision() is not 'highest'")
    if found.get("cuda.matmul.allow_tf32") == "True":
        wrong.append("torch.backends.cuda.matmul.allow_tf32 is True")
    return wrong + [
        f"the environment variable {name} is {found[name]!r} (expected it unset)"
        for names in _VARIABLES.values()
        for name in names
        if found.get(name, "unset").casefold() not in _HARMLESS
    ]


def flushes(workers: bool = True) -> bool:
    """True if numbers below the normal range count as zero (``torch.set_flush_denormal``), found by computing with one.

    Each thread has its own mode; a new thread inherits that of its creator. ``workers`` checks torch's workers, too.
    """
    tiny = sys.float_info.min
    if tiny * 0.5 == 0.0:
        return True
    threads = torch.get_num_threads() if workers else 1
    if threads == 1:
        return False
    # Pooling splits its work by channels; most operations use more threads only for thousands of numbers each.
    each = torch.full((1, 4 * threads, 1, 2), 0.5 * tiny, dtype=torch.float64, device="cpu")
    return bool((F.avg_pool2d(each, (1, 2)).view(torch.int64) == 0).any())


# Operations on fewer numbers than this run on the calling thread (torch's grain size).
SERIAL = 1 << 15


def check_underflow(workers: bool = True) -> None:
    """Raise ``OptionError`` if :func:`flushes`, because a proof needs every number, however small."""
    if flushes(workers):
        raise OptionError(
            "expected torch.set_flush_denormal(False) on this thread and on torch's own, got a mode in which numbers "
            "below the normal range count as zero: a bound computed in it would leave such weights out"
        )


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run torch on ``count`` threads inside the block, and restore the setting after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off inside the block, on every device: computations keep the precision of their numbers."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def autocast_on(x: Tensor) -> bool:
    """True if autocast may lower the precision of products on the device of ``x``."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def product_dtype(x: Tensor, made: torch.dtype) -> torch.dtype:
    """The dtype of products of ``x`` by weights of dtype ``made``: autocast's, if it is on and ``made`` is float32.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product_dtype(torch.ones(1), torch.float32), product_dtype(torch.ones(1), torch.float64)
    (torch.bfloat16, torch.float64)
    """
    return torch.get_autocast_dtype(x.device.type) if made == torch.float32 and autocast_on(x) else made


def autocast_off(x: Tensor) -> Any:
    """A context in which autocast does not lower the precision of products on the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if autocast_on(x) else contextlib.nullcontext()
