"""Devices, processes and precision: what Lightning Fabric is asked for, and what it must not be."""

from __future__ import annotations

import atexit
import functools
import math
import os
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lipkit.errors import LipkitError, OptionError, RunError

T = TypeVar("T")
# Parameters in these have too few digits for a constraint; autocast ("mixed") leaves them in float32.
_LOW = ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16", "nf4", "fp4", "int8")


def make_fabric(
    *, accelerator: str, devices: int | str | list[int], strategy: str, precision: str, nodes: int = 1
) -> Any:
    """A launched Fabric; what it refuses becomes an OptionError.

    Under torchrun the number of processes is torchrun's: ``devices`` and ``nodes`` may then be left at 1.

    Args:
        accelerator, devices, strategy, precision: Fabric's. Strategy "fsdp" is FSDP2, see `sharding`.
        nodes: number of machines.

    Raises:
        OptionError: what Fabric refuses, or a precision in which constraints do not hold.
    """
    from lightning_fabric import Fabric  # two seconds to import: paid by those who train

    check_precision(precision)
    devices, nodes, strategy = under_torchrun(devices, nodes, strategy)
    chosen: dict[str, Any] = {
        "accelerator": accelerator, "devices": devices, "num_nodes": nodes, "strategy": strategy,
        "precision": precision,
    }  # fmt: skip
    try:
        if strategy == "fsdp":
            from lipkit.training.sharding import strategy as sharded

            fabric = Fabric(**{**chosen, "strategy": sharded()})
        else:
            fabric = Fabric(**chosen)
    except (ValueError, TypeError, RuntimeError) as error:
        got = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
        raise OptionError(f"expected devices that Lightning Fabric can use, got {got}: {error}") from error
    launch(fabric)
    return fabric


def launch(fabric: Any) -> None:
    """``fabric.launch()``, and at the end of the process the end of the process group that it made.

    gloo's threads hold tensors. One that still does when the interpreter goes away asks for its lock, and the
    whole process is aborted, after all its work and with an exit status that says it failed. So the threads are
    joined while the interpreter is there. A group of the caller's own is the caller's to end.
    """
    import torch.distributed as dist

    given = dist.is_available() and dist.is_initialized()
    fabric.launch()
    if not given and dist.is_available() and dist.is_initialized():
        atexit.register(_end_group)


def _end_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # a caller may have ended it before
        dist.destroy_process_group()


def under_torchrun(devices: int | str | list[int], nodes: int, strategy: str) -> tuple[int | str | list[int], int, str]:
    """(devices, nodes, strategy) with what torchrun decided in place of the defaults 1, 1, "auto"."""
    if not (os.environ.get("TORCHELASTIC_RUN_ID") and os.environ.get("LOCAL_WORLD_SIZE")):
        return devices, nodes, strategy
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if devices in (1, "1", "auto"):
        devices = local
    if nodes == 1:
        nodes = world // local
    return devices, nodes, "ddp" if strategy == "auto" and world > 1 else strategy


def check_precision(precision: object) -> None:
    """Raise OptionError for a precision whose parameters are not float32 or float64.

    >>> check_precision("bf16-mixed")
    >>> check_precision("bf16-true")
    Traceback (most recent call last):
    lipkit.errors.OptionError: expected parameters in float32 or float64, such as precision 32-true, 64-true or \
bf16-mixed, got 'bf16-true': constraints do not hold in less
    """
    if str(precision).startswith(_LOW):
        raise OptionError(
            "expected parameters in float32 or float64, such as precision 32-true, 64-true or bf16-mixed, "
            f"got {precision!r}: constraints do not hold in less"
        )


def on_first(fabric: Any, act: Callable[[], T]) -> T:
    """The result of ``act()`` in the first process, handed to all; its error is raised in all, so that none waits.

    Args:
        fabric: a launched Fabric.
        act: run in the first process alone.

    Raises:
        what ``act`` raises in the first process; RunError with its message in the others.
    """
    if fabric.world_size == 1:
        return act()
    result, failure = None, None
    if fabric.is_global_zero:
        try:
            result = act()
        except LipkitError as error:
            failure = error
    result, message = fabric.broadcast((result, None if failure is None else str(failure)), src=0)
    if failure is not None:
        raise failure
    if message is not None:
        raise RunError(message)
    return result


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
