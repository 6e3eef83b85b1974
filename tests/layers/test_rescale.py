"""Output scaling: what it does, that it counts in the gain, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import Normalize, Rescale, Scale
from lipkit.lowering import export, lipschitz
from lipkit.models import LBDN
from lipkit.modules import Affine


def test_values_per_channel_of_vectors_and_images() -> None:
    layer = Rescale([2.0, -10.0], [0.5, 1.0])
    x = torch.tensor([[1.0, 2.0]])
    assert layer(x).tolist() == [[2.5, -19.0]]
    image = torch.ones(1, 2, 3, 3)
    assert layer(image)[0, :, 0, 0].tolist() == [2.5, -9.0]


def test_the_largest_unit_counts_in_the_gain() -> None:
    assert float(lipschitz(Rescale([2.0, -10.0]))) == 10.0
    inner = nn.Linear(3, 2)
    network = export(nn.Sequential(inner, Rescale([2.0, -10.0])), (3,))
    norm = float(torch.linalg.matrix_norm(inner.weight.detach().double(), 2))
    assert float(lipschitz(network)) == pytest.approx(10 * norm, rel=1e-9)


def test_export_is_the_same_function() -> None:
    layer = Rescale([2.0, 0.1], [0.3, -1.0])
    plain = export(layer, (2,))
    assert [type(m) for m in plain] == [Affine]
    x = torch.randn(7, 2)
    assert torch.equal(plain(x), layer(x))


def test_it_is_saved_with_the_model() -> None:
    layer = Rescale([2.0, 0.1])
    other = Rescale([1.0, 1.0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.units, layer.units)
    assert not list(layer.parameters())


@pytest.mark.parametrize(
    ("units", "offset", "message"),
    [
        ([], None, r"units and offset of equally many finite numbers \(torch.float32\), at least one"),
        ([1.0], [1.0, 2.0], r"equally many .* got \[1.0\] and \[1.0, 2.0\]"),
        ([0.0], None, "units other than 0"),
        ([math.nan], None, "finite numbers"),
        ([1.0], [math.inf], "finite numbers"),
        ([1e39], None, r"finite numbers \(torch.float32\), at least one, got \[1e\+39\]"),
        ([1e-46], None, r"units other than 0 \(torch.float32\), got \[1e-46\]"),
        (2.0, None, "Rescale: units: expected a list of one number for each channel, got 2.0"),
        (None, None, "Rescale: units: expected a list of one number for each channel, got None"),
        ([1.0], ["a"], r"Rescale: offset: expected a list of one number for each channel, got \['a'\]"),
    ],
)
def test_refusals(units: list[float] | None, offset: list[float] | None, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Rescale(units, offset)


def test_another_number_of_channels() -> None:
    with pytest.raises(ShapeError, match=r"expected 2 channels in dimension 1, got shape \(1, 3\)"):
        Rescale([1.0, 2.0])(torch.ones(1, 3))


def test_scalings_are_made_on_the_meta_device() -> None:
    """As parameters are counted without memory; numbers are checked there, too."""
    with torch.device("meta"):
        made = (Scale(2.0), Scale(2.0, learnable=True), Normalize([0.5], [0.25]), Rescale([2.0], [0.5]))
        with pytest.raises(OptionError, match=r"within the range of torch\.float32"):
            Scale(1e39)
        lbdn = LBDN([2, 3])
    assert all(t.is_meta for layer in made for t in layer.state_dict().values())
    assert [repr(layer) for layer in made[1:3]] == ["Scale(gamma=?, learnable=True)", "Normalize(mean=?, std=?)"]
    assert "gamma=?" in repr(lbdn)


def test_a_learnable_gain_is_shown() -> None:
    assert repr(Scale(2.0, learnable=True)) == "Scale(gamma=2, learnable=True)"
