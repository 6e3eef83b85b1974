"""The general multilayer perceptron, and models of families whose layers contain their activation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import CayleyLinear, MaxMin, SandwichConv2d, SandwichLinear
from lipkit.lowering import export, lipschitz
from lipkit.models import build, mlp


@pytest.mark.parametrize("layer", ["cayley", "rko", "lot", "sandwich", "aol", "sll", "cpl"])
def test_the_gain_is_gamma_for_every_family(layer: str) -> None:
    torch.manual_seed(0)
    network = build("mlp", hidden=[8, 6], layer=layer, gamma=4.0, input_shape=(1, 3, 3), classes=2).double()
    assert float(lipschitz(network)) == pytest.approx(4.0, rel=1e-6)
    assert float(lipschitz(export(network, (1, 3, 3)))) <= 4.0 * (1 + 1e-5)
    x = torch.randn(300, 1, 3, 3, dtype=torch.float64)
    d = 0.1 * torch.randn_like(x)
    secants = (network(x + d) - network(x)).norm(dim=1) / d.flatten(1).norm(dim=1)
    assert float(secants.detach().max()) <= 4.0 * (1 + 1e-6)
    activations = [m for m in network if isinstance(m, MaxMin)]
    assert len(activations) == (0 if layer in ("sandwich", "sll", "cpl") else 2)


def test_the_last_module_is_the_last_linear_layer_and_options_arrive() -> None:
    network = mlp([4], "cayley", 9.0, input_shape=(3,), classes=2, activation="relu", bias=False)
    assert [type(m).__name__ for m in network] == ["Scale", "CayleyLinear", "ReLU", "Scale", "CayleyLinear"]
    assert all(m.bias is None for m in network if isinstance(m, CayleyLinear))
    assert float(network[0].gamma()) == pytest.approx(3.0)
    sandwich = mlp([4], "sandwich", input_shape=(3,), classes=2, activation="tanh")
    assert isinstance(sandwich[0].activation, nn.Tanh)
    assert sandwich[-1].activation is None
    assert [type(m).__name__ for m in mlp([], "cayley", 9.0, input_shape=(3,), classes=2)] == ["Scale", "CayleyLinear"]
    learnable = mlp([4], "cayley", 9.0, input_shape=(3,), classes=2, learnable_gamma=True)
    bound = lipschitz(learnable)
    bound.backward()
    assert float(bound.detach()) == pytest.approx(9.0, rel=1e-6)
    assert float(learnable[0].log_gamma.grad) == pytest.approx(9.0, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"activation": "gelu"}, OptionError, "activation: expected one of .*maxmin.* got 'gelu'"),
        ({"activation": nn.GELU()}, OptionError, "activation: expected one of .* got GELU"),
        ({"layer": "sandwich", "activation": MaxMin()}, OptionError, r"slope in \[0, 1\]"),
        ({"gamma": -1.0}, OptionError, "gamma: expected a positive finite number, got -1.0"),
        ({"hidden": [0]}, OptionError, r"hidden\[0\]: expected an integer of at least 1, got 0"),
        ({"layer": "nothing"}, OptionError, "layer: expected one of"),
        ({"input_shape": ()}, ShapeError, "input_shape: expected positive sizes"),
    ],
)
def test_refused_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mlp(**{"hidden": [4], "input_shape": (3,), "classes": 2, **arguments})


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("kwlarge", (3, 8, 8), {}),
        ("small", (1, 8, 8), {}),
        ("resnet9", (1, 16, 16), {"width": 2}),
        ("wide_resnet", (1, 16, 16), {"widen": 1}),
    ],
)
def test_models_of_sandwich_layers(name: str, shape: tuple[int, ...], options: dict[str, int]) -> None:
    torch.manual_seed(0)
    network = build(name, layer="sandwich", input_shape=shape, classes=3, activation="tanh", **options)
    kinds = [m for m in network.modules() if isinstance(m, SandwichConv2d | SandwichLinear)]
    assert not any(isinstance(m, MaxMin) for m in network.modules())
    assert isinstance(network[-1], SandwichLinear)
    assert network[-1].activation is None
    assert all(isinstance(m.activation, nn.Tanh) for m in kinds if m is not network[-1])
    assert float(lipschitz(network).detach()) == pytest.approx(1.0)


@pytest.mark.thorough
def test_a_sandwich_classifier_is_proved_from_its_export() -> None:
    torch.manual_seed(0)
    network = build("small", layer="sandwich", input_shape=(1, 6, 6), classes=3)
    plain = export(network, (1, 6, 6))
    assert isinstance(plain[-1], nn.Linear)
    assert float(lipschitz(plain)) <= 1 + 1e-4
    x = torch.rand(4, 1, 6, 6)
    assert torch.allclose(plain(x), network(x), atol=1e-5)
