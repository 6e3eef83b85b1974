from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lipkit.data import Split
from lipkit.errors import DataError
from lipkit.training.sources import AUGMENT, batches, generator, source


class Noisy(Dataset):
    """Items that differ at each reading."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.read += 1
        return torch.full((2,), 51 * i, dtype=torch.uint8), i % 2


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide():
    def epoch(**kwargs):
        return torch.cat([index for index, _, _ in batches(103, 10, **kwargs)])

    first = epoch(seed=0, epoch=0)
    assert sorted(first.tolist()) == list(range(103))
    assert first.tolist() != list(range(103))
    assert torch.equal(first, epoch(seed=0, epoch=0))
    for other in ({"seed": 0, "epoch": 1}, {"seed": 1, "epoch": 0}, {"seed": 1, "epoch": 1}):
        assert not torch.equal(first, epoch(**other))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_cut_the_batches_that_one_device_sees(ranks):
    whole = list(batches(41, 12, seed=3, epoch=2))
    parts = [list(batches(41, 12, seed=3, epoch=2, rank=r, ranks=ranks)) for r in range(ranks)]
    for number, (batch, size, own) in enumerate(whole):
        pieces = [part[number] for part in parts]
        assert sorted(torch.cat([index for index, _, _ in pieces]).tolist()) == sorted(batch.tolist())
        assert {size, own, len(batch)} == {size for _, size, _ in pieces} == {41 % 12 if number == 3 else 12}
        assert [len(index) for index, _, _ in pieces] == [own for _, _, own in pieces]


def test_a_rank_without_a_sample_takes_one_for_company():
    last = [list(batches(9, 8, seed=0, epoch=0, rank=r, ranks=4))[-1] for r in range(4)]
    assert len({tuple(index.tolist()) for index, _, _ in last}) == 1
    assert [(size, own) for _, size, own in last] == [(1, 1), (1, 0), (1, 0), (1, 0)]


def test_a_dataset_that_fetches_many_at_once_is_asked_to():
    class Many(Noisy):
        def __getitems__(self, indices):
            return [(torch.full((2,), i / 8), i % 2) for i in indices]

    dataset = Many()
    x, y = source(dataset).batch(torch.tensor([4, 1]))
    assert dataset.read == 0
    assert (x[:, 0].tolist(), y.tolist()) == ([0.5, 0.125], [0, 1])


def test_streams_of_neighbouring_seeds_differ():
    seeds = {generator(s, e, k).initial_seed() for s in range(10) for e in range(10) for k in range(3)}
    assert len(seeds) == 300
    assert all(0 <= s < 2**63 for s in seeds)
    a, b = (torch.rand(4, generator=generator(0, 0, AUGMENT, rank)) for rank in (0, 1))
    assert not torch.equal(a, b)


def test_sources():
    split = Split(torch.rand(4, 3), torch.arange(4))
    assert source(split) is split
    x = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
    for pair in ((x, np.arange(4)), TensorDataset(torch.from_numpy(x), torch.arange(4))):
        found, labels = source(pair).batch(torch.tensor([2, 0]))
        assert torch.equal(found, torch.from_numpy(x[[2, 0]]))
        assert labels.tolist() == [2, 0]


def test_a_dataset_is_read_anew_for_each_batch():
    dataset = Noisy()
    read = source(dataset)
    assert dataset.read == 0
    for _ in range(2):
        x, y = read.batch(torch.tensor([1, 4]))
    assert dataset.read == 4
    assert x.tolist() == [[pytest.approx(0.2)] * 2, [pytest.approx(0.8)] * 2]
    assert (y.dtype, y.tolist()) == (torch.int64, [1, 0])


def test_targets_of_a_dataset_become_columns_for_regression():
    class Line(Noisy):
        def __getitem__(self, i):
            return np.full(2, i, dtype=np.float64), float(i)

    x, y = source(Line()).batch(torch.tensor([3]))
    assert (x.dtype, y.dtype, y.tolist()) == (torch.float32, torch.float32, [[3.0]])


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1), 0


class Empty(Noisy):
    def __len__(self):
        return 0


class Single(Noisy):
    def __getitem__(self, i):
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Endless(), "expected a data set with a length .map-style., got Endless"),
        (Empty(), "expected at least one training sample"),
        (torch.zeros(3), "a torch Dataset, got Tensor"),
        ([torch.zeros(3, 1)], r"expected a pair \(x, y\)"),
        ((torch.zeros(3, 1), torch.zeros(2, dtype=torch.int64)), "3 samples and 2 targets"),
    ],
)
def test_refusals(train, message):
    with pytest.raises(DataError, match=message):
        source(train)


def test_items_that_are_not_pairs_are_refused():
    with pytest.raises(DataError, match=r"expected items \(x, y\) from Single, got Tensor"):
        source(Single()).batch(torch.tensor([0]))


@pytest.mark.parametrize("other", [torch.zeros(4), object()])
def test_items_that_do_not_make_one_tensor_are_refused(other):
    class Odd(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (torch.zeros(3), other)[index], 0

    with pytest.raises(DataError, match=r"expected items \(x, y\) of one shape from Odd, got: "):
        source(Odd()).batch(torch.tensor([0, 1]))
