"""The table of functions that make a matrix semi-orthogonal: the values of ``orthogonalize=``."""

from collections.abc import Callable

from torch import Tensor, nn

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.bjorck import bjorck
from lipkit.linalg.cayley import cayley
from lipkit.linalg.exponential import exponential
from lipkit.linalg.householder import householder
from lipkit.linalg.newton_schulz import newton_schulz
from lipkit.linalg.polar import polar

Orthogonalize = Callable[[Tensor], Tensor]

ORTHOGONALIZE: dict[str, Orthogonalize] = {
    "cayley": cayley,
    "exponential": exponential,
    "bjorck": bjorck,
    "newton_schulz": newton_schulz,
    "polar": polar,
    "householder": householder,
}
"""The functions by name; each returns a matrix of norm at most 1, up to rounding, for every input (see `proved`)."""


def resolve(orthogonalize: str | Orthogonalize, others: str = "") -> Orthogonalize:
    """Look up a name in :data:`ORTHOGONALIZE`; return a function ``(..., m, n) -> (..., m, n)`` unchanged.

    ``others`` lists further names for the message, such as ``"taylor, "``, which the caller handles itself.

    Raises:
        OptionError: an unknown name, or neither a name nor a function.

    >>> resolve("cayley") is cayley, resolve(cayley) is cayley
    (True, True)
    """
    if isinstance(orthogonalize, str) and orthogonalize in ORTHOGONALIZE:
        return ORTHOGONALIZE[orthogonalize]
    # A module is no pure function: it may have parameters and a training mode.
    if isinstance(orthogonalize, str | nn.Module) or not callable(orthogonalize):
        raise OptionError(
            f"orthogonalize: expected one of {others}{', '.join(ORTHOGONALIZE)} or a function, got {orthogonalize!r}"
        )
    return orthogonalize


def proved(function: Orthogonalize) -> bool:
    """True for the functions of the table, whose results have norm at most 1 by proof."""
    return function in ORTHOGONALIZE.values()


def orthogonalized(function: Orthogonalize, w: Tensor) -> Tensor:
    """``function(w)``, checked to have the shape of ``w``."""
    q = function(w)
    if q.shape != w.shape:
        raise ShapeError(f"orthogonalize: expected a result of shape {tuple(w.shape)}, got {tuple(q.shape)}")
    return q


def function_name(function: Orthogonalize) -> str:
    """The name of ``function`` in the table, else its ``__qualname__``."""
    known = [name for name, entry in ORTHOGONALIZE.items() if entry is function]
    return known[0] if known else getattr(function, "__qualname__", repr(function))
