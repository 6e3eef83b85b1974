"""RKO and CRKO: contractions on every image size, orthogonal only for one tap."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit.bounds import reshaped
from lipkit.errors import OptionError
from lipkit.layers import families
from lipkit.layers.rko import RkoConv2d
from lipkit.linalg import ORTHOGONALIZE, polar
from lipkit.lowering import export, lipschitz
from lipkit.testing import check_layer, dense_matrix

LAYERS = [(3, 8, 3, 1), (8, 3, 3, 1), (2, 9, 3, 3), (3, 12, 2, 2)]


def values_of(layer, shape):
    with torch.no_grad():
        return np.linalg.svd(dense_matrix(layer, shape, layer.free.dtype), compute_uv=False)


@pytest.mark.thorough
@pytest.mark.usual(5)
@pytest.mark.parametrize("name", ["rko", "crko"])
@pytest.mark.parametrize(("cin", "cout", "k", "stride"), LAYERS)
def test_obeys_the_laws(name, cin, cout, k, stride):
    family = families.get(name)

    def make(**named):
        return family.conv(**{"in_channels": cin, "out_channels": cout, "kernel_size": k, "stride": stride, **named})

    shapes = [(cin, 2 * stride, stride), (cin, stride, stride), (cin, 2 * stride, 3 * stride)]
    check_layer(
        make,
        input_shape=shapes,
        claim=family.claim,
        laws=(1, 2, 3, 9, 10, 11),  # the others do not depend on the shape: tests/laws
    )


@pytest.mark.parametrize("orthogonalize", ORTHOGONALIZE)
@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 1, 1), (3, 2, 7)])
def test_is_a_contraction_with_every_function_and_size(orthogonalize, shape):
    torch.manual_seed(0)
    layer = RkoConv2d(3, 5, 3, orthogonalize=orthogonalize, dtype=torch.float64)
    for scale in (0.0, 1.0, 20.0):
        with torch.no_grad():
            layer.free.copy_(scale * torch.randn_like(layer.free))
        assert values_of(layer, shape).max() <= 1 + 1e-12
        assert lipschitz(layer).item() == 1.0
        assert lipschitz(export(layer, shape)).item() <= 1 + 1e-12


@pytest.mark.parametrize("orthogonalize", ["bjorck", "cayley"])
def test_mean_square_of_the_singular_values_is_one_over_the_taps(orthogonalize):
    layer = RkoConv2d(4, 5, 3, orthogonalize=orthogonalize, dtype=torch.float64)
    values = values_of(layer, (4, 5, 4))
    assert abs((values**2).sum() / (5 * 20) - 1 / 9) < 1e-10


@pytest.mark.parametrize("orthogonalize", ["bjorck", "cayley", "polar"])
def test_one_tap_is_orthogonal(orthogonalize):
    layer = RkoConv2d(2, 6, 1, stride=2, orthogonalize=orthogonalize, dtype=torch.float64)
    assert np.abs(values_of(layer, (2, 4, 6)) - 1).max() < 1e-12


def test_the_bound_of_a_users_function_is_computed_from_its_numbers():
    torch.manual_seed(1)
    layer = RkoConv2d(2, 3, 3, orthogonalize=lambda w: 5 * polar(w), dtype=torch.float64)
    truth = values_of(layer, (2, 6, 5)).max()
    assert truth <= lipschitz(layer, (2, 6, 5)).item() <= truth * (1 + 1e-9)
    assert truth <= lipschitz(layer).item() <= 5 * (1 + 1e-9)
    assert lipschitz(layer).item() <= reshaped(layer.kernel()).item()


def test_crko_is_rko_with_another_default():
    layer = families.get("crko").conv(2, 3, 3)
    assert type(layer) is RkoConv2d
    assert "orthogonalize=cayley" in repr(layer)
    assert "orthogonalize=polar" in repr(families.get("crko").conv(2, 3, 3, orthogonalize="polar"))


def test_refusals():
    with pytest.raises(OptionError, match=r"orthogonalize: expected one of .*, got 'none'"):
        RkoConv2d(2, 3, 3, orthogonalize="none")
