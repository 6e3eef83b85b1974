"""The sources of batches (a Split, a pair of tensors, a Dataset), the samples of each batch, and random states.

Random numbers depend on (seed, epoch) only; torch's global random state is restored after training.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lipkit.data import Data, Split, as_split
from lipkit.data.split import as_targets
from lipkit.errors import DataError, rewording, warn_of_bytes

# Streams of random numbers of an epoch. NETWORK is torch's global state, seeded once, at epoch 0.
SHUFFLE, AUGMENT, NETWORK, ATTACK = range(4)


def generator(seed: int, *stream: int) -> torch.Generator:
    """A generator on the CPU for one stream of random numbers, independent of all others.

    A plain ``seed + epoch`` would make epoch 1 of seed 0 repeat epoch 0 of seed 1.
    """
    state = np.random.SeedSequence([seed, *stream]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))  # 63 bits: torch's seeds are int64


@contextmanager
def own_random_state(device: torch.device, *stream: int) -> Iterator[None]:
    """Restore torch's global random state after the block, which begins seeded by ``stream``, if given."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if stream:
            torch.manual_seed(generator(*stream).initial_seed())
        yield


def random_state(fabric: Any, generators: Mapping[str, torch.Generator]) -> dict[str, Tensor]:
    """States of torch's global random numbers and of ``generators``, a row per process; all processes must call it."""
    state = {"rng_cpu": torch.get_rng_state()}
    if fabric.device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(fabric.device)
    state |= {name: generator.get_state() for name, generator in generators.items()}
    alone = fabric.world_size == 1
    rows = {name: own[None] for name, own in state.items()} if alone else fabric.all_gather(state)
    return {name: value.cpu() for name, value in rows.items()}


def set_random_state(fabric: Any, state: Mapping[str, Tensor], generators: Mapping[str, torch.Generator]) -> None:
    """Restore in each process its row of the state from `random_state`."""
    rank, device = fabric.global_rank, fabric.device
    torch.set_rng_state(state["rng_cpu"][rank].clone())  # torch crashes on a view
    if device.type == "cuda" and "rng_cuda" in state:
        torch.cuda.set_rng_state(state["rng_cuda"][rank].clone(), device)
    for name, generator in generators.items():
        generator.set_state(state[name][rank].clone())


Augment = Callable[[Tensor, torch.Generator], Tensor]


class Source(Protocol):
    """Training data: anything with these two methods, such as `data.Split`."""

    def __len__(self) -> int: ...

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The samples at ``index`` (int64, on the CPU) as (x float, y)."""


class DatasetSource:
    """A map-style torch Dataset of items (x, y), collated here; uint8 x is divided by 255, as in data.Split."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        try:
            self._length = len(dataset)  # type: ignore[arg-type]
        except TypeError as error:
            got = f"{type(dataset).__name__} without one"
            raise DataError(f"expected a data set with a length (map-style), got {got}") from error
        if self._length == 0:
            raise DataError("expected at least one training sample, got an empty data set")
        self._dataset = dataset

    def __len__(self) -> int:
        return self._length

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        kind = type(self._dataset).__name__
        fetch = getattr(self._dataset, "__getitems__", None)  # torch's name for fetching many at once
        items = fetch(index.tolist()) if fetch is not None else [self._dataset[i] for i in index.tolist()]
        if wrong := [item for item in items if not isinstance(item, Sequence) or len(item) != 2]:
            raise DataError(f"expected items (x, y) from {kind}, got {_kind(wrong[0])}")
        with rewording(DataError, f"expected items (x, y) of one shape from {kind}, got: ", RuntimeError, TypeError):
            x, y = default_collate(items)
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            raise DataError(f"expected items (x, y) of tensors or numbers, got {_kind(x)} and {_kind(y)}")
        return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x.to(torch.float32), as_targets(y)


def source(train: object) -> Source:
    """The data given to ``fit`` as a `Source`; ``DataError`` for other types.

    Takes a `data.Split`; a pair (x, y), see `data.as_split`; or a map-style torch Dataset, which is read anew in every
    epoch, so that its own augmentation takes effect.
    """
    if isinstance(train, Split):
        return train
    if isinstance(train, tuple | list | TensorDataset):
        split = as_split(train, "train")
        if isinstance(split.x, Tensor):
            warn_of_bytes(split.x, "x / 255 or uint8")
        if not split.y.is_floating_point() and len(split) > 1 and bool((split.y == split.y[0]).all()):
            warnings.warn(f"expected labels of several classes, got {int(split.y[0])} alone", stacklevel=3)
        return split
    if isinstance(train, Dataset):
        return DatasetSource(train)
    hint = {DataLoader: ": pass its dataset", Data: ": pass its train", Tensor: ": pass (x, y)"}.get(type(train), "")
    raise DataError(f"expected a data.Split, a pair (x, y) of tensors or a torch Dataset, got {_kind(train)}{hint}")


def batches(
    length: int, batch_size: int, *, seed: int, epoch: int, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Tensor, int, int]]:
    """The batches of one epoch, a permutation drawn from (seed, epoch): (indices of this rank, size, how many it owns).

    Every rank draws the same permutation and takes every ``ranks``-th index of each batch of ``batch_size``, so all
    ranks together have the batch that one device would have, ``size`` indices, each once. A rank that gets none of a
    smaller last batch has the first index, of which it owns 0: all ranks must take the same number of steps.

    >>> [(len(index), size, own) for index, size, own in batches(10, 4, seed=0, epoch=0)]
    [(4, 4, 4), (4, 4, 4), (2, 2, 2)]
    >>> [list(batches(2, 4, seed=0, epoch=0, rank=rank, ranks=3))[0][2] for rank in range(3)]
    [1, 1, 0]
    """
    for batch in torch.randperm(length, generator=generator(seed, epoch, SHUFFLE)).split(batch_size):
        own = batch[rank::ranks]
        yield own if len(own) else batch[:1], len(batch), len(own)


def _kind(value: object) -> str:
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
