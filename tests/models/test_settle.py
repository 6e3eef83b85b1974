"""Networks of parametrised and of others' layers as plain ones: what is replaced, what is compared, what is refused."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import lipkit
from lipkit.errors import NoRuleError, ShapeError
from lipkit.models import convert
from lipkit.models.settle import plain_form


def settle(model: nn.Module, x: Tensor) -> nn.Module:
    return convert(model, None, input_shape=x.shape[1:]).model


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return (w + w.mT) / 2


def parametrized(layer: nn.Module, name: str = "weight") -> nn.Module:
    parametrize.register_parametrization(layer, name, Symmetric())
    return layer


def hooked(layer: nn.Module, how: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return how(layer)


TORCH: dict[str, tuple[Any, type[nn.Module], tuple[int, ...]]] = {
    "spectral": (lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), nn.Conv2d, (2, 6, 6)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 3)), nn.Linear, (4,)),
    "weight": (
        lambda: parametrizations.weight_norm(nn.ConvTranspose2d(2, 3, 3, 2, 1, 1)),
        nn.ConvTranspose2d,
        (2, 4, 4),
    ),
    "own": (lambda: parametrized(nn.Linear(4, 4)), nn.Linear, (4,)),
    "hook": (lambda: hooked(nn.Conv1d(2, 3, 3), nn.utils.spectral_norm), nn.Conv1d, (2, 6)),
    "weight hook": (lambda: hooked(nn.Linear(4, 3), nn.utils.weight_norm), nn.Linear, (4,)),
}


@pytest.mark.parametrize("name", TORCH)
def test_layers_of_torch_become_plain(name: str) -> None:
    torch.manual_seed(0)
    make, kind, shape = TORCH[name]
    net = nn.Sequential(make(), nn.ReLU())
    x = torch.randn(3, *shape)
    if name in ("spectral", "hook"):  # in training mode their weights change at every forward pass
        with pytest.raises(NoRuleError, match=r"call \.eval\(\)"):
            lipkit.lipschitz(net, shape)
    net(x)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    settled = settle(net, x)
    assert type(settled[0]) is kind
    assert net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    torch.testing.assert_close(settled(x), net.eval()(x))
    plain = lipkit.export(settled, shape)
    matrix = torch.autograd.functional.jacobian(settled[0], x[:1]).detach().reshape(settled[0](x[:1]).numel(), -1)
    assert float(torch.linalg.matrix_norm(matrix.double(), 2)) <= float(lipkit.lipschitz(plain)) * (1 + 1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_a_hook_is_settled_before_its_first_pass(training: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(hooked(nn.Linear(4, 3), nn.utils.spectral_norm), nn.ReLU()).train(training)
    made = lipkit.convert(net, None, input_shape=(4,))
    x = torch.randn(3, 4)
    torch.testing.assert_close(made.model(x), net.eval()(x))
    near = lipkit.convert(net.train(training), "lot", input_shape=(4,))
    assert [(row.name, row.start) for row in near.converted] == [("0", "nearest")]


def test_nothing_is_done_to_plain_networks() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2)))
    settled = settle(net, torch.randn(2, 3))
    assert [type(m) for m in settled.modules()] == [type(m) for m in net.modules()]
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), settled.parameters(), strict=True))
    assert plain_form(net[0]) is None


def test_a_parametrised_module_that_is_no_layer_keeps_its_type() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.matrix)

    x = torch.randn(2, 3)
    net = parametrized(Bilinear(), "matrix")
    before = net(x)
    settled = settle(net, x)
    assert type(settled) is Bilinear
    assert torch.equal(net(x), before)
    assert torch.equal(settled.matrix, settled.matrix.mT)


def test_the_same_layer_twice() -> None:
    layer = parametrized(nn.Linear(3, 3))
    net = nn.Sequential(layer, nn.ReLU(), layer)
    settled = settle(net, torch.randn(2, 3))
    assert [type(m) for m in settled] == [nn.Linear, nn.ReLU, nn.Linear]
    assert torch.equal(settled[0].weight, settled[2].weight)


class Vanilla(nn.Linear):
    """A layer that says what it is, as those of deel-torchlip do."""

    def __init__(self, *sizes: int, lie: float = 0.0) -> None:
        super().__init__(*sizes)
        self.lie = lie

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(), self.bias)

    def vanilla_export(self) -> nn.Module:
        plain = nn.Linear(self.in_features, self.out_features)
        plain.weight.data.copy_(self.weight / self.weight.norm() + self.lie)
        plain.bias.data.copy_(self.bias)
        return plain


def test_what_a_layer_says_of_itself_is_compared() -> None:
    x = torch.randn(2, 3)
    assert type(settle(Vanilla(3, 2), x)) is nn.Linear
    with pytest.raises(NoRuleError, match=r"got other outputs at 'inner', Vanilla as Linear"):
        settle(_named(Vanilla(3, 2, lie=1e-3)), x)


def _named(layer: nn.Module) -> nn.Module:
    net = nn.Sequential()
    net.add_module("inner", layer)
    return net


def test_a_forward_pass_of_its_own_is_found() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(NoRuleError, match=r"other outputs at 'inner', Doubled as Linear"):
        settle(_named(Doubled(3, 2)), torch.randn(2, 3))


def test_a_sample_that_reaches_not_every_layer() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), parametrized(nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if x.sum() > -1e9 else self.two(x)

    with pytest.raises(ShapeError, match="reaches every layer, got none at 'two'"):
        settle(Branch(), torch.randn(2, 3))


def peer(package: str) -> Any:
    """A peer, if it is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(package)
        except ImportError:
            pytest.skip(f"{package} is not installed")


# Constructor and input, by expression: theirs is imported only where it is installed.
TORCHLIP = {
    "SpectralLinear(8, 5)": (8,),
    "FrobeniusLinear(8, 5)": (8,),
    "SpectralConv1d(4, 8, 3, padding=1, padding_mode='circular')": (4, 16),
    "SpectralConv2d(4, 8, 3, padding=1, padding_mode='reflect')": (4, 8, 8),
    "FrobeniusConv2d(4, 1, 3)": (4, 8, 8),
    "SpectralConvTranspose2d(4, 8, 3, stride=2)": (4, 8, 8),
    "GroupSort(4)": (8, 4, 4),
    "GroupSort2()": (8,),
    "FullSort()": (8,),
    "MaxMin()": (8,),
    "HouseHolder(8)": (8, 4, 4),
    "LPReLU(8, init=-1.7)": (8, 4, 4),
    "ScaledL2NormPool2d(2)": (4, 8, 8),
    "ScaledAvgPool2d(2)": (4, 8, 8),
    "InvertibleDownSampling(2)": (4, 8, 8),
    "InvertibleUpSampling(2)": (4, 8, 8),
    "BatchCentering(4)": (4, 8, 8),
    "BatchLipNorm(4)": (4, 8, 8),
    "LayerCentering()": (4, 8, 8),
    "LayerCentering(4)": (4, 8, 8),
    "LayerCentering(bias=False)": (4, 8, 8),
}
ORTHOGONIUM = {
    "AdaptiveOrthoConv2d(4, 8, 3, padding='same', padding_mode='circular')": (4, 8, 8),
    "AdaptiveOrthoConv2d(4, 8, 4, stride=2, groups=2, padding=1)": (4, 8, 8),
    "AdaptiveOrthoConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1)": (4, 8, 8),
    "OrthoLinear(8, 5)": (8,),
    "UnitNormLinear(8, 5)": (8,),
    "MaxMin()": (8, 4, 4),
    "HouseHolder(8)": (8, 4, 4),
    "BatchCentering2D(4)": (4, 8, 8),
    "LayerCentering2D(4)": (4, 8, 8),
    "ChannelShuffle(2, 4)": (8, 4, 4),
}
PEERS = [("deel.torchlip", k, v) for k, v in TORCHLIP.items()] + [
    ("orthogonium.layers", k, v) for k, v in ORTHOGONIUM.items()
]


@pytest.mark.parametrize(("package", "expression", "shape"), PEERS)
@pytest.mark.filterwarnings("ignore")
def test_layers_of_peers(package: str, expression: str, shape: tuple[int, ...]) -> None:
    layers = peer(package)
    torch.manual_seed(0)
    layer = eval(expression, vars(layers))
    for p in layer.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    x = torch.randn(3, *shape)
    layer.train()(x)
    theirs = copy.deepcopy(layer).eval()(x)
    settled = settle(nn.Sequential(layer), x)
    torch.testing.assert_close(settled(x), theirs)
    plain = lipkit.export(settled, shape)
    torch.testing.assert_close(plain(x), theirs, rtol=1e-4, atol=1e-5)
    assert all(not type(m).__module__.startswith(("deel", "orthogonium")) for m in plain.modules())
    if "LayerCentering" in expression:
        assert float(lipkit.lipschitz(plain)) <= 1 + 1e-6
    bound, steps = float(lipkit.lipschitz(plain)), torch.randn_like(x) * 1e-2
    assert float(((plain(x + steps) - plain(x)).norm() / steps.norm()).detach()) <= bound * (1 + 1e-4)
