"""The norms that attacks measure with, by name."""

from __future__ import annotations

from lipkit.attacks.ascent import Ball, check_choice
from lipkit.attacks.pgd import BALL as L2
from lipkit.attacks.pgd_linf import BALL as LINF

BALLS: dict[str, Ball] = {"l2": L2, "linf": LINF}


def ball(norm: str) -> Ball:
    """The ball of this norm.

    Raises:
        OptionError: another name than ``"l2"`` or ``"linf"``.

    >>> import torch
    >>> ball("linf").distance(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).tolist()
    [4.0]
    """
    check_choice("norm", norm, tuple(BALLS))
    return BALLS[norm]
