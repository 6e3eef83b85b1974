"""Devices, processes and precision: the options of Lightning Fabric, and the ones that lipkit refuses."""

import atexit
import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lipkit.errors import LipkitError, OptionError, RunError, first_line
from lipkit.linalg.precision import SERIAL, on_threads
from lipkit.training.options import Numbers, TrainOptions

T = TypeVar("T")


def make_fabric(options: Numbers) -> Any:
    """A launched Fabric; ``OptionError`` for options that it refuses.

    Under torchrun, which decides the number of processes, ``devices`` and ``nodes`` may be left at 1.

    A process group that this function makes is destroyed at the end of the process. That joins gloo's threads, which
    otherwise abort the process if they hold a tensor when the interpreter shuts down. The caller's group is left alone.
    """
    from lightning_fabric import Fabric  # takes two seconds to import, so only for training

    devices, nodes, strategy = options.devices, options.nodes, options.strategy
    if os.environ.get("TORCHELASTIC_RUN_ID") and os.environ.get("LOCAL_WORLD_SIZE"):  # torchrun's values as defaults
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        devices = local if devices in (1, "1", "auto") else devices
        nodes = world // local if nodes == 1 else nodes
        strategy = "ddp" if strategy == "auto" and world > 1 else strategy
    chosen: dict[str, Any] = {
        "accelerator": options.accelerator, "devices": devices, "num_nodes": nodes, "strategy": strategy,
        "precision": options.precision,
    }  # fmt: skip
    try:
        fabric = Fabric(**chosen)
    except (ValueError, TypeError, RuntimeError) as error:
        got = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
        raise OptionError(f"expected devices that Lightning Fabric can use, got {got}: {error}") from error
    given = dist.is_available() and dist.is_initialized()  # the caller made a group
    fabric.launch()
    if not given and dist.is_available() and dist.is_initialized():
        atexit.register(_end_group)
    return fabric


def _end_group() -> None:
    if dist.is_initialized():  # the caller may have destroyed it
        dist.destroy_process_group()


# Below this number of parameters a second thread does not speed up matrix products.
_FEW = 2**18


def threads_for(fabric: Any, parameters: int, numbers: int) -> contextlib.AbstractContextManager[None]:
    """A context for training: one CPU thread if steps are small; ``numbers`` is the count of entries in a batch of x.

    Pooled threads spin until all have finished an operation. If operations take microseconds, threads wait more than
    they work, especially if another process uses one of their cores. ``OMP_NUM_THREADS`` has priority.
    """
    small = fabric.device.type == "cpu" and parameters < _FEW and numbers < SERIAL
    return on_threads(1 if small and "OMP_NUM_THREADS" not in os.environ else torch.get_num_threads())


def check_recordable(fabric: Any, options: TrainOptions) -> None:
    """Raise OptionError for devices and options that CUDA graphs do not support."""
    alone = type(fabric.strategy).__name__ == "SingleDeviceStrategy"
    precision = fabric.strategy.precision.precision
    for wanted, holds, got in (
        ("one CUDA device", fabric.device.type == "cuda" and fabric.world_size == 1, fabric.device),
        ("strategy auto", alone, type(fabric.strategy).__name__),
        ("no adversary", options.adversary is None, type(options.adversary).__name__),
        ("optimizer adam, adamw or spectral", options.optimizer in ("adam", "adamw", "spectral"), options.optimizer),
        ("another precision", precision != "16-mixed", precision),
    ):
        if not holds:
            raise OptionError(f"cuda_graph: expected {wanted}, got {got}")


def device_here(name: str | torch.device) -> torch.device:
    """The device of this name; ``OptionError`` if this machine has none."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)  # torch.device accepts names of absent devices
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"expected a device of this machine, got {str(name)!r}: {first_line(error)}") from error
    return device


def on_first(fabric: Any, act: Callable[[], T]) -> T:
    """Call ``act()`` in the first process and return its result in all; its LipkitError is raised in all, too."""
    if fabric.world_size == 1:
        return act()
    result, failure = None, None
    if fabric.is_global_zero:
        try:
            result = act()
        except LipkitError as error:
            failure = error
    # Broadcast the message, not the error: not every exception can be pickled.
    result, message = fabric.broadcast((result, None if failure is None else str(failure)), src=0)
    if failure is not None:
        raise failure
    if message is not None:
        raise RunError(message)
    return result
