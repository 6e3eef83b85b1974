"""What ``fit`` checks of its arguments before it starts, and how a run records them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path

import torch
from torch import nn

from lipkit.errors import OptionError

OPTIMIZERS = ("adam", "adamw", "sgd")
Parameters = list[nn.Parameter] | list[dict[str, list[nn.Parameter]]]


def check_counts(**values: int) -> None:
    """Raise OptionError unless every value is an integer of at least 1; ``seed`` may be 0.

    >>> check_counts(epochs=1, seed=0)
    >>> check_counts(epochs=0)
    Traceback (most recent call last):
    lipkit.errors.OptionError: expected epochs as an integer >= 1, got 0
    """
    for name, count in values.items():
        least = 0 if name == "seed" else 1
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise OptionError(f"expected {name} as an integer >= {least}, got {count!r}")


def check_numbers(
    *, lr: float, momentum: float, weight_decay: float, grad_clip: float | None, ema: float | None
) -> None:
    """Raise OptionError unless every number is in its range."""
    if not (math.isfinite(lr) and lr > 0):
        raise OptionError(f"expected lr as a finite number > 0, got {lr}")
    if not 0 <= momentum < 1:
        raise OptionError(f"expected momentum in [0, 1), got {momentum}")
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise OptionError(f"expected weight_decay as a finite number >= 0, got {weight_decay}")
    if grad_clip is not None and not grad_clip > 0:
        raise OptionError(f"expected grad_clip > 0 or None, got {grad_clip}")
    if ema is not None and not 0 < ema < 1:
        raise OptionError(f"expected ema in (0, 1) or None, got {ema}")


def check_folder(run_dir: str | Path | None, *, resume: bool, tensorboard: bool) -> None:
    """Raise OptionError if what needs a run folder has none."""
    for name, wanted in (("resume", resume), ("tensorboard", tensorboard)):
        if wanted and run_dir is None:
            raise OptionError(f"expected run_dir with {name}=True, got None")


def optimizer_factory(
    name: str, *, lr: float, momentum: float, weight_decay: float
) -> Callable[[Parameters], torch.optim.Optimizer]:
    """What makes the optimiser called ``name`` of parameters, or of groups of them.

    Raises:
        OptionError: no such optimiser.
    """
    if name == "adam":
        return functools.partial(torch.optim.Adam, lr=lr, weight_decay=weight_decay)
    if name == "adamw":
        return functools.partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay)
    if name == "sgd":
        return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay)
    raise OptionError(f"expected optimizer as one of {', '.join(OPTIMIZERS)}, got {name!r}")


def name_of(function: object) -> str | None:
    """How settings record a function: its name and, for a partial or a dataclass, the options bound to it.

    >>> name_of(functools.partial(round, ndigits=2)), name_of(None)
    ('round(ndigits=2)', None)
    """
    if function is None:
        return None
    if is_dataclass(function):
        return repr(function)
    if isinstance(function, functools.partial):
        bound = [repr(value) for value in function.args] + [f"{k}={v!r}" for k, v in function.keywords.items()]
        return f"{name_of(function.func)}({', '.join(bound)})"
    return str(getattr(function, "__qualname__", type(function).__qualname__))
