"""The networks of the tables of [LBDN]: sizes as printed, structure, the constant before the last layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import AolConv2d, CayleyConv2d, MaxMin, NormalizedLinear, SandwichConv2d, SandwichLinear
from lipkit.lowering import export, lipschitz
from lipkit.models import build, kwlarge, lbdn_conv


def millions(name: str, **options: object) -> float:
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, **options).parameters()) / 1e6


@pytest.mark.parametrize(
    ("options", "size"),
    [({"classes": 100}, 26), ({"blocks": 4, "input_shape": (3, 64, 64), "classes": 200}, 39)],
)
def test_the_certified_networks_have_the_printed_sizes(options, size) -> None:
    assert round(millions("lbdn_conv", **options)) == size


@pytest.mark.parametrize(("width", "size"), [(1, 3), (2, 12), (4, 48)])
@pytest.mark.parametrize(("layer", "first"), [("sandwich", 512), ("cayley", 640), ("aol", 640)])
def test_the_attacked_networks_have_the_printed_sizes(layer, first, width, size) -> None:
    options = {"layer": layer, "width": width, "dense": [first * width, 512 * width], "classes": 100}
    assert round(millions("kwlarge", pool=layer == "aol", activation="relu", **options)) == size


def test_structure() -> None:
    model = lbdn_conv(width=4, blocks=2, hidden=[24, 16], input_shape=(3, 8, 8), classes=7)
    convs = [m for m in model if isinstance(m, SandwichConv2d)]
    assert [(m.in_channels, m.out_channels, m.kernel_size, m.stride) for m in convs] == [
        (3, 4, (3, 3), 1), (4, 4, (1, 1), 2), (4, 8, (3, 3), 1), (8, 8, (1, 1), 2)
    ]  # fmt: skip
    dense = [m for m in model if isinstance(m, SandwichLinear)]
    assert [(m.in_features, m.out_features) for m in dense] == [(32, 24), (24, 16)]
    assert isinstance(model[-1], NormalizedLinear)
    assert (model[-1].in_features, model[-1].out_features) == (16, 7)


@pytest.mark.thorough
def test_only_the_last_layer_is_above_the_target() -> None:
    torch.manual_seed(0)
    options = {"width": 4, "blocks": 2, "hidden": [24, 16], "input_shape": (3, 8, 8), "classes": 30, "lipschitz": 2.0}
    free, bound = lbdn_conv(**options), lbdn_conv(**options, last_layer_normalization=False)
    norm = float(torch.linalg.matrix_norm(free[-1].weight().detach().double(), 2))
    assert norm > 1
    assert float(lipschitz(free).detach()) == pytest.approx(2 * norm, rel=1e-5)
    assert float(lipschitz(bound).detach()) == 2.0
    assert float(lipschitz(export(bound, (3, 8, 8)))) <= 2 * (1 + 1e-4)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="multiples of 8"):
        lbdn_conv(input_shape=(3, 12, 12))
    with pytest.raises(OptionError, match="last_layer_normalization: expected True or False, got 1"):
        lbdn_conv(last_layer_normalization=1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"hidden\[0\]"):
        lbdn_conv(hidden=[0])


def test_kwlarge_with_other_activations_dense_layers_and_pooling() -> None:
    shape = (3, 8, 8)
    model = kwlarge("aol", dense=[24, 16], activation="relu", pool=True, input_shape=shape)
    kinds = [type(m) for m in model]
    assert MaxMin not in kinds
    assert kinds.count(nn.ReLU) == 6
    assert [m.stride for m in model if isinstance(m, AolConv2d)] == [1] * 4
    assert [m.kernel_size for m in model if isinstance(m, AolConv2d)] == [(3, 3)] * 4
    # Sums of 4 x 4 pixels over 4 have norm 1: an average over them would take three quarters of the gain away.
    (pool,) = [m for m in model if isinstance(m, nn.AvgPool2d)]
    matrix = torch.stack([pool(e.view(1, 4, 4)).flatten() for e in torch.eye(16)], 1)
    assert float(torch.linalg.matrix_norm(matrix, 2)) == pytest.approx(1.0, abs=1e-6)
    assert float(lipschitz(model, shape).detach()) == pytest.approx(1.0, abs=1e-6)
    plain = kwlarge("cayley", dense=[24, 16], input_shape=shape)
    assert [type(m) for m in plain].count(MaxMin) == 6
    assert [m.stride for m in plain if isinstance(m, CayleyConv2d)] == [1, 2, 1, 2]
    tanh = kwlarge("sandwich", dense=[24, 16], activation="tanh", input_shape=shape)
    assert isinstance(tanh[0].activation, nn.Tanh)
    with pytest.raises(OptionError, match="dense: expected the units of two layers"):
        kwlarge(dense=[3])
    with pytest.raises(OptionError, match="activation: expected one of"):
        kwlarge(activation="gelu")
