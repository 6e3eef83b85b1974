"""Random numbers that depend on (seed, epoch) alone, and torch's global random state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def derived_seed(seed: int, *stream: int) -> int:
    """A 63-bit seed for one stream of random numbers: a function of ``seed`` and the stream's numbers alone.

    Neighbouring seeds and streams give unrelated numbers, which ``seed + epoch`` would not: epoch 1 of seed
    0 would repeat epoch 0 of seed 1.

    >>> derived_seed(0, 1) == derived_seed(1, 0), derived_seed(0, 1) == derived_seed(0, 1)
    (False, True)
    """
    return int(np.random.SeedSequence([seed, *stream]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def augment_generator(seed: int, epoch: int, rank: int) -> torch.Generator:
    """The generator, on the CPU, of one epoch's augmentation; apart from the shuffling's and other ranks'."""
    return torch.Generator().manual_seed(derived_seed(seed, epoch, 1, rank))


def attack_generator(seed: int, epoch: int, rank: int) -> torch.Generator:
    """The generator, on the CPU, of one epoch's adversarial examples; apart from all others."""
    return torch.Generator().manual_seed(derived_seed(seed, epoch, 3, rank))


@contextmanager
def own_random_state(device: torch.device, seed: int) -> Iterator[None]:
    """torch's global random state seeded for the time of the block, and given back as it was."""
    with kept_random_state(device):
        torch.manual_seed(seed)
        yield


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """torch's global random state given back after the block as it was before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def random_state(fabric: Any, generators: Mapping[str, torch.Generator]) -> dict[str, Tensor]:
    """The state of torch's global random numbers and of ``generators``, a row for each process.

    All processes must call it, each with generators of the same names.
    """
    device = fabric.device
    state = {"rng_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(device)
    state |= {name: generator.get_state() for name, generator in generators.items()}
    return {name: _rows(fabric, value) for name, value in state.items()}


def set_random_state(fabric: Any, state: Mapping[str, Tensor], generators: Mapping[str, torch.Generator]) -> None:
    """Give each process its own row of what `random_state` gathered."""
    rank, device = fabric.global_rank, fabric.device
    torch.set_rng_state(state["rng_cpu"][rank].clone())  # a copy: torch crashes on a view
    if device.type == "cuda" and "rng_cuda" in state:
        torch.cuda.set_rng_state(state["rng_cuda"][rank].clone(), device)
    for name, generator in generators.items():
        generator.set_state(state[name][rank].clone())


def _rows(fabric: Any, own: Tensor) -> Tensor:
    """A row for each process: a sum of tables with one row each."""
    table = torch.zeros(fabric.world_size, *own.shape, dtype=own.dtype, device=fabric.device)
    table[fabric.global_rank] = own.to(fabric.device)
    return (fabric.all_reduce(table, reduce_op="sum") if fabric.world_size > 1 else table).cpu()
