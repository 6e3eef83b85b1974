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


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"rng_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["rng_cpu"])
    if device.type == "cuda" and "rng_cuda" in state:
        torch.cuda.set_rng_state(state["rng_cuda"], device)
