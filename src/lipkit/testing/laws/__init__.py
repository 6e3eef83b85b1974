"""The thirteen laws, one file each. A law is a function of a :class:`~lipkit.testing.case.Case`.

It returns what it measured and raises ``LawBroken`` where the layer breaks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lipkit.testing.case import Case
from lipkit.testing.laws.bounds import attained, sizes, sound, trained
from lipkit.testing.laws.gradients import gradients
from lipkit.testing.laws.interface import exported, options_act, refusals
from lipkit.testing.laws.moves import moves
from lipkit.testing.laws.state import complete, never_stale, pure, round_trips


class Law(NamedTuple):
    """Name of a law, what it says, and its test."""

    name: str
    says: str
    test: Callable[[Case], dict[str, float]]


LAWS: dict[int, Law] = {
    1: Law(
        "sound", "the true norm is at most the bound of the exported layer, and that at most the claimed one", sound
    ),
    2: Law("attained", "the claimed constant is reached, from both sides for an orthogonal layer", attained),
    3: Law("export", "the exported layer computes the same with constant plain modules", exported),
    4: Law("complete at birth", "a forward pass makes no parameters, and each one gets a gradient", complete),
    5: Law("pure", "a forward pass changes nothing, and its result depends on nothing else", pure),
    6: Law("round trips", "state_dict, deepcopy, pickle and EMA copies are equal and independent", round_trips),
    7: Law("never stale", "after any change of a parameter the next output follows", never_stale),
    8: Law("options act", "every constructor option acts, or raises", options_act),
    9: Law("gradients", "gradients are right, and finite at repeated singular values and at zero", gradients),
    10: Law("trained", "the bounds still hold after optimiser steps with a large rate", trained),
    11: Law("sizes", "every image size gives the right shape and bound, whatever came before it", sizes),
    12: Law("moves", "dtype, device, autocast, torch.compile, torch.func and torch.export keep the function", moves),
    13: Law("refusals", "a bad argument raises its documented error with the expected and the actual value", refusals),
}
"""The laws by number."""

__all__ = ["LAWS", "Law"]
