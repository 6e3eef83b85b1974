"""BjorckLinear and OrthogonalLinear: the laws, and the claims that a user's own function does not get."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import ortho_group

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import BjorckLinear, OrthogonalLinear
from lipkit.linalg import ORTHOGONALIZE, bjorck, polar
from lipkit.lowering import export, lipschitz
from lipkit.testing import check_layer, linear_options, linear_refusals

SIZES = [(5, 8), (8, 5), (6, 6), (1, 1)]


def dense(layer):
    with torch.no_grad():
        return layer.weight().double().numpy()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("cin", "cout"), SIZES[:3])
def test_bjorck_linear_obeys_the_laws(cin, cout, dtype):
    def make(**named):
        return BjorckLinear(**{"in_features": cin, "out_features": cout, **named})

    check_layer(
        make,
        input_shape=(cin,),
        dtype=dtype,
        claim="contraction",
        attained=0.99,
        laws=(1, 2, 3, 10) if dtype == torch.float32 else (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13),
        options={**linear_options(), "iterations": (1, 5), "order": (1, 2)},
        refusals=linear_refusals(cin),
    )


@pytest.mark.thorough
@pytest.mark.usual(12)
@pytest.mark.parametrize("name", ORTHOGONALIZE)
@pytest.mark.parametrize(("cin", "cout"), SIZES[:3])
def test_orthogonal_linear_obeys_the_laws(name, cin, cout):
    def make(**named):
        return OrthogonalLinear(**{"in_features": cin, "out_features": cout, "orthogonalize": name, **named})

    check_layer(make, input_shape=(cin,), laws=(1, 2, 3, 4, 6, 9, 10), options=linear_options())


def test_every_function_of_the_table_acts():
    torch.manual_seed(0)
    free = torch.randn(6, 6)
    made = []
    for name in ORTHOGONALIZE:
        layer = OrthogonalLinear(6, 6, orthogonalize=name)
        with torch.no_grad():
            layer.free.copy_(free)
        made.append(dense(layer))
    polar_factors = {"bjorck", "newton_schulz", "polar"}
    names = list(ORTHOGONALIZE)
    for i, a in enumerate(made):
        for j, b in enumerate(made[:i]):
            if not {names[i], names[j]} <= polar_factors:
                assert np.abs(a - b).max() > 1e-2


@pytest.mark.parametrize(("cin", "cout"), SIZES)
def test_starts_semi_orthogonal(cin, cout):
    values = np.linalg.svd(dense(BjorckLinear(cin, cout)), compute_uv=False)
    assert np.abs(values - 1).max() < 1e-5


def test_any_orthogonal_matrix_is_a_fixed_point_of_the_polar_family():
    q = torch.from_numpy(ortho_group.rvs(5, random_state=0))
    for name in ("bjorck", "newton_schulz", "polar"):
        layer = OrthogonalLinear(5, 5, orthogonalize=name, dtype=torch.float64)
        with torch.no_grad():
            layer.free.copy_(q)
        assert np.abs(dense(layer) - q.numpy()).max() < 1e-12


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_unconverged_bjorck_linear_is_still_a_contraction(iterations):
    layer = BjorckLinear(30, 20, iterations=iterations)
    torch.nn.init.normal_(layer.free)
    values = np.linalg.svd(dense(layer), compute_uv=False)
    assert values.max() <= 1 + 1e-6
    assert values.min() < 0.9
    assert lipschitz(layer).item() == 1.0
    assert lipschitz(export(layer, (30,))).item() <= 1 + 1e-6


def test_the_bound_of_a_users_function_is_computed_from_its_numbers():
    layer = OrthogonalLinear(4, 6, orthogonalize=lambda w: 3 * polar(w))
    truth = np.linalg.norm(dense(layer), 2)
    assert truth <= lipschitz(layer).item() <= truth * (1 + 1e-9)
    barely = OrthogonalLinear(4, 6, orthogonalize=partial(bjorck, iterations=1))
    torch.nn.init.normal_(barely.free)
    assert lipschitz(barely).item() < 1


def test_refusals():
    with pytest.raises(OptionError, match=r"orthogonalize: expected one of .*, got 'gram_schmidt'"):
        OrthogonalLinear(3, 3, orthogonalize="gram_schmidt")
    with pytest.raises(OptionError, match="iterations"):
        BjorckLinear(3, 3, iterations=0)
    with pytest.raises(OptionError, match="order"):
        BjorckLinear(3, 3, order=-1)
    with pytest.raises(ShapeError, match=r"expected a result of shape \(2, 3\), got \(3, 2\)"):
        OrthogonalLinear(3, 2, orthogonalize=lambda w: w.mT)(torch.ones(1, 3))


def test_repr_names_the_options():
    assert "iterations=7, order=2" in repr(BjorckLinear(2, 2, iterations=7, order=2))
    assert "orthogonalize=householder" in repr(OrthogonalLinear(2, 2, orthogonalize="householder"))
