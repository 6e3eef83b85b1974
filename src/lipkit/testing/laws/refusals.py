"""Law 13: what is not supported is refused at once, in one clear sentence."""

from __future__ import annotations

from typing import Any

from torch import nn

from lipkit.errors import LipkitError, ShapeError
from lipkit.modules import export
from lipkit.testing.case import Case, Refusal, require


def _other_size(case: Case) -> Refusal:
    shape = case.shape
    other = (*shape[:-1], shape[-1] + 1)
    return Refusal(
        f"the layer exported for {shape} called on {other}",
        lambda make: export(make(), shape)(case.x(other)),
        ShapeError,
        (str(shape[-1]), str(shape[-1] + 1)),
    )


def refusals(case: Case) -> dict[str, float]:
    """Law 13: each bad argument raises its error, whose message has "expected ..., got ..." and both values."""
    table = (_other_size(case), *case.refusals)

    def make(**options: Any) -> nn.Module:
        return case.layer(**options)

    for refusal in table:
        name = refusal.error.__name__
        try:
            refusal.call(make)
        except LipkitError as error:
            message = str(error)
            require(isinstance(error, refusal.error), f"{refusal.what}: expected {name}, got {type(error).__name__}")
            missing = [word for word in ("expected", "got", *refusal.words) if word not in message]
            require(not missing, f"{refusal.what}: expected a message that holds {missing}, got {message!r}")
        except Exception as error:
            require(False, f"{refusal.what}: expected {name}, got {type(error).__name__}: {error}")
        else:
            require(False, f"{refusal.what}: expected {name}, got no error")
    return {"refusals": float(len(table))}
