"""Data from a user's own function, tensors or Dataset."""

from __future__ import annotations

import hashlib
import textwrap

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lipkit.data import Data, Split, as_split, load
from lipkit.errors import DataError


class Squares(Dataset):
    """Map-style, with Python numbers as targets."""

    def __init__(self, n: int, kind: type = int) -> None:
        self.n, self.kind = n, kind

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        return torch.full((1, 2, 2), i / self.n), self.kind(i % 3)


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Write a module with the given body; its name is unique, so no test sees another's."""
    monkeypatch.syspath_prepend(tmp_path)
    name = "user_" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]

    def write(body: str) -> str:
        (tmp_path / f"{name}.py").write_text("import torch\nfrom lipkit.data import *\n" + textwrap.dedent(body))
        return name

    return write


PAIR = """
def make():
    x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 1])
    return (x, y), (x[:2], y[:2])
"""


def test_a_pair_of_tensor_pairs(module):
    name = module(PAIR)
    data = load(f"{name}:make")
    assert data.name == f"{name}:make"
    assert data.classes == ("0", "1", "2")
    assert data.train.x.tolist() == torch.arange(12.0).reshape(6, 2).tolist()
    assert data.test.y.tolist() == [0, 1]
    assert len(load(f"{name}:make", limit=3).train) == 3


def test_data_and_datasets(module):
    name = module(
        """
        from torch.utils.data import TensorDataset
        split = Split(torch.zeros(2, 3), torch.tensor([0, 1]))
        def data():
            return Data("mine", split, split, ("no", "yes"))
        def datasets():
            return TensorDataset(split.x, split.y), split
        """
    )
    assert load(f"{name}:data").classes == ("no", "yes")
    assert load(f"{name}:data").name == f"{name}:data"
    assert load(f"{name}:datasets").input_shape == (3,)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "expected a function to import, got AttributeError"),
        ("make = 3", "expected a function to call, got int"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("def make(): raise KeyError('lost')", "KeyError: 'lost'"),
        ("def make(n): return n", "TypeError: .*missing 1 required"),
        ("def make(): return None", "pair .train, test., got NoneType"),
        ("def make(): return 1, 2, 3", "got 3 values"),
        ("def make(): return torch.zeros(2, 2), torch.zeros(2)", "train: expected a pair .* got Tensor"),
        ("def make(): return (1, 2), (1, 2)", "train: x: expected a tensor or a numpy array, got int"),
        (
            "import numpy as np\ndef make(): return ((np.ma.zeros((4, 2)), np.zeros(4, int)),) * 2",
            "train: x: expected a tensor or a numpy array, got MaskedArray",
        ),
        ("def make(): return [(torch.zeros(2), torch.zeros(2))] * 2", r"train: expected x of shape"),
    ],
)
def test_wrong_factories(module, body, message):
    name = module(body)
    with pytest.raises(DataError, match=message):
        load(f"{name}:make")


def test_no_such_module():
    with pytest.raises(DataError, match="ModuleNotFoundError: No module named 'no_such_package'"):
        load("no_such_package.data:make")


def test_a_map_style_dataset():
    split = as_split(Squares(7))
    assert split.x.shape == (7, 1, 2, 2)
    assert split.y.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert split.y.dtype == torch.int64
    regression = as_split(Squares(7, float))
    assert regression.y.tolist() == [[0], [1], [2], [0], [1], [2], [0]]
    assert regression.y.dtype == torch.float32


def test_tensor_dataset_and_numpy_agree():
    x, y = np.random.default_rng(0).random((5, 3)), np.array([1, 0, 1, 1, 0], np.uint16)
    a = as_split((x, y))
    b = as_split(TensorDataset(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)
    assert as_split(a) is a


def test_a_converted_array_is_a_copy():
    x = np.zeros((2, 3))
    split = as_split((x, np.array([0, 1])))
    x += 1
    assert split.x.abs().sum() == 0


class Ragged(Squares):
    def __getitem__(self, i: int):
        return torch.zeros(2 + i), 0


class Unpaired(Squares):
    def __getitem__(self, i: int):
        return torch.zeros(2)


class Strings(Squares):
    def __getitem__(self, i: int):
        return torch.zeros(2), "cat"


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Ragged(3), r"train: expected samples of one shape, \(2,\) .* got \(3,\) .* at index 1"),
        (Unpaired(3), r"expected samples \(x, y\), got Tensor at index 0"),
        (Strings(3), "y at index 0: expected a tensor or a numpy array, got str"),
        (Squares(0), "empty Dataset"),
        (Endless(), "Dataset with a length, got Endless without one"),
        (TensorDataset(torch.zeros(2, 2)), r"pair \(x, y\) .* got 1 values"),
        ("mnist", "got str"),
        ((np.zeros((2, 2), complex), np.zeros(2)), "got dtype complex128"),
        ((np.zeros((2, 2), np.longdouble), np.zeros(2)), "at most 64 bits|labels"),
    ],
)
def test_as_split_refuses(value, message):
    with pytest.raises(DataError, match=message):
        as_split(value, "train")


def test_exports_are_the_same_objects():
    split = as_split((torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)))
    assert isinstance(split, Split)
    assert isinstance(Data("d", split, split, ("a",)), Data)
