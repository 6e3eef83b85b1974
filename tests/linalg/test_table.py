"""The table of orthogonalisations: what `proved` says of it is true."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg import ORTHOGONALIZE, bjorck, cayley, resolve
from lipkit.linalg.table import function_name, orthogonalized, proved


@pytest.mark.usual(120)
@pytest.mark.parametrize("name", ORTHOGONALIZE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (2, 3, 3)])
@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-3, 1.0, 30.0])
def test_norm_is_at_most_one_for_every_entry(name, dtype, shape, scale):
    torch.manual_seed(0)
    q = resolve(name)(scale * torch.randn(shape, dtype=dtype))
    largest = np.linalg.svd(q.resolve_conj().numpy().astype(np.complex128), compute_uv=False).max()
    assert q.shape == shape
    assert largest <= 1 + 100 * (1 + scale) * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ORTHOGONALIZE)
def test_all_singular_values_are_one_for_every_entry(name):
    torch.manual_seed(1)
    q = resolve(name)(torch.randn(12, 5, dtype=torch.float64))
    values = np.linalg.svd(q.resolve_conj().numpy(), compute_uv=False)
    assert np.abs(values - 1).max() < 1e-12


def test_resolve_refuses_what_is_no_function():
    with pytest.raises(OptionError, match=r"expected one of cayley, .* or a function, got 'qr'"):
        resolve("qr")
    with pytest.raises(OptionError, match="got 3"):
        resolve(3)
    with pytest.raises(OptionError, match="Linear"):
        resolve(nn.Linear(2, 2))


def test_only_entries_of_the_table_count_as_proved():
    assert all(proved(function) for function in ORTHOGONALIZE.values())
    assert not proved(partial(bjorck, iterations=2))
    assert not proved(lambda w: w)


def test_names_of_functions():
    assert function_name(cayley) == "cayley"
    assert "partial" in function_name(partial(bjorck, iterations=2))


def test_a_result_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"expected a result of shape \(3, 2\), got \(2, 3\)"):
        orthogonalized(lambda w: w.mT, torch.zeros(3, 2))
