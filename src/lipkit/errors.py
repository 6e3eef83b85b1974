"""The errors lipkit raises on purpose: one clear sentence each, with the expected and the actual value.

Every class also inherits the built-in exception a caller would expect, so that ``except ValueError`` works.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class LipkitError(Exception):
    """Base of every error that lipkit raises on purpose; the command line prints its message without a traceback."""


class NoRuleError(LipkitError, TypeError):
    """No proved rule covers a module: nothing is assumed to be 1-Lipschitz."""


class ShapeError(LipkitError, ValueError):
    """A tensor, kernel or image has a shape that the operation does not accept."""


class OptionError(LipkitError, ValueError):
    """A constructor or function argument has a value outside the documented ones."""


class DataError(LipkitError, ValueError):
    """A data set is missing, corrupt, or contradicts its own description."""


class RecipeError(LipkitError, ValueError):
    """A recipe or an override of it is not valid."""


class RunError(LipkitError, RuntimeError):
    """A run folder is missing, incomplete, already there, or does not fit the request."""


class CertificateViolation(LipkitError, RuntimeError):
    """An adversarial example lies inside a certified radius: the certificate, and so the bound, is wrong."""


_NO_MEMORY = re.compile(r"OutOfMemoryError|out of memory|allocate memory|not enough memory|bad_alloc", re.IGNORECASE)


def lacks_memory(error: BaseException) -> bool:
    """True if the error means out of memory, which torch's allocators report as a RuntimeError.

    >>> lacks_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    >>> lacks_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x4 and 3x2)"))
    False
    """
    return isinstance(error, MemoryError) or _NO_MEMORY.search(f"{type(error).__name__}: {error}") is not None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def rewording(
    kind: type[LipkitError], start: str, *caught: type[Exception], end: str = "", named: bool = False
) -> Iterator[None]:
    """Turn errors of types ``caught`` into a ``kind`` whose message is ``start``, their first line, then ``end``.

    If ``named``, their type stands before the line. lipkit's own errors pass, and those that mean out of memory.
    """
    try:
        yield
    except caught as error:
        if isinstance(error, LipkitError) or lacks_memory(error):
            raise
        raise kind(f"{start}{f'{type(error).__name__}: ' * named}{first_line(error)}{end}") from error


def interval(name: str, value: Any, finite: bool = True) -> tuple[float, float]:
    """The two ends of an interval as floats; ``OptionError`` unless low < high and, if ``finite``, both are finite.

    >>> interval("box", [0, 1])
    (0.0, 1.0)
    """
    try:
        low, high = (float(end) for end in (() if isinstance(value, str) else value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        low = high = math.nan  # refused below: comparisons with NaN are false
    if not low < high or (finite and not math.isfinite(high - low)):
        got = " ".join(repr(value).split())
        raise OptionError(
            f"{name}: expected two {'finite ' * (low < high)}numbers, the smaller one first, got "
            + (got if len(got) < 100 else got[:97] + "...")
        )
    return low, high


def finite(name: str, value: Any, *, positive: bool = False, least: float = -math.inf) -> float:
    """A finite number as a float; ``OptionError`` for other values, booleans included, and for a number out of range.

    >>> finite("eps", 1, positive=True)
    1.0
    >>> finite("eps", -1, least=0)
    Traceback (most recent call last):
    lipkit.errors.OptionError: eps: expected a finite number >= 0, got -1
    """
    try:
        found = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or found < least or (positive and found <= 0):
        limit = "" if least == -math.inf else f" >= {least:g}"
        raise OptionError(f"{name}: expected a {'positive ' * positive}finite number{limit}, got {value!r}")
    return found


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Raise ``OptionError`` unless ``value`` is one of the names ``known``."""
    if value not in [*known]:  # it may be unhashable
        raise OptionError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise ``OptionError`` unless the value is a boolean."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}: expected True or False, got {value!r}")


def check_labels(y: Tensor, count: int, classes: float = math.inf) -> None:
    """Raise unless ``y`` holds ``count`` integers (int64), from 0 to ``classes - 1`` if ``classes`` is given."""
    hint = " (one-hot labels: y.argmax(1))" if y.ndim == 2 else ""
    if str(y.dtype) != "torch.int64":
        more = ": certify regression targets by lipkit.certificates.certify_regression" if y.is_floating_point() else ""
        got = str(y.dtype).removeprefix("torch.")
        raise OptionError(f"expected integer class labels (int64), got {got}{hint}{more}")
    if y.shape != (count,):
        raise ShapeError(f"expected {count} labels of shape ({count},), got {tuple(y.shape)}{hint}")
    if math.isfinite(classes) and y.numel() and not 0 <= int(y.min()) <= int(y.max()) < classes:
        found = f"labels from {int(y.min())} to {int(y.max())}"
        raise OptionError(f"expected labels from 0 to {classes - 1} for {classes} logits, got {found}")


def alike(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The names that ``word`` probably means: all that start with it, else the closest one, if any is close.

    >>> alike("cifar10", ["cifar100_lbdn", "cifar10_cayley", "cifar10_lbdn"]), alike("cifar01_lbdn", ["cifar10_lbdn"])
    (['cifar10_cayley', 'cifar10_lbdn'], ['cifar10_lbdn'])
    """
    names = list(known)
    for start in (f"{word}_", word):  # whole words first: cifar10_..., then cifar100_...
        if word and (found := [name for name in names if name.startswith(start)]):
            return found
    return difflib.get_close_matches(word, names, 1, cutoff)


def suggestion(word: str, known: Iterable[str]) -> str:
    """The question ", did you mean ...?" for a message about an unknown name; empty if no name is `alike`.

    >>> suggestion("digit", ["digits", "mnist"]), suggestion("a", ["a_b", "a_c", "a_d"])
    (", did you mean 'digits'?", ", did you mean 'a_b', 'a_c' or 'a_d'?")
    """
    *first, last = [repr(name) for name in alike(word, known)] or [""]  # [""]: no similar name
    return f", did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if last else ""


def warn_of_bytes(x: Tensor, remedy: str) -> None:
    """Warn if floating-point images of 1 or 3 channels range from about 0 to about 255: ``/ 255`` was forgotten."""
    images = x.is_floating_point() and x.ndim == 4 and {x.shape[1], x.shape[3]} & {1, 3}  # channels first or last
    if images and 240 <= float(x.max()) <= 255 and 0 <= float(x.min()) < 16:
        warnings.warn(f"expected images in [0, 1], got values up to {float(x.max()):g}: {remedy}", stacklevel=4)


__all__ = ["CertificateViolation", "LipkitError", "NoRuleError", "OptionError", "ShapeError"]  # of the library
__all__ += ["DataError", "RecipeError", "RunError"]  # of files
__all__ += ["alike", "finite", "first_line", "interval", "lacks_memory", "suggestion"]  # checks and messages

__dir__ = __all__.copy
