"""From images to images: norms against dense Jacobians, shapes, certificates of the exported parts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit.errors import OptionError, ShapeError
from lipkit.layers import HalfThrough
from lipkit.models import autoencoder, denoiser, unet
from lipkit.modules import Graph, load
from lipkit.testing.reference import jacobians


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    return torch.from_numpy(jacobians(lambda v: net(v).flatten(1), x)[0])


def drawn(net: nn.Module, by: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    for p in net.parameters():
        p.data += by * torch.randn_like(p)
    return net.double().eval()


NETS: dict[str, Any] = {
    "a level below": lambda: unet(8, 1, 1, input_shape=(1, 8, 8)),
    "two levels, patches of 1": lambda: unet(6, 2, 1, patch=1, kernel_size=1, input_shape=(3, 8, 8)),
    "a chain of Cayley layers": lambda: unet(8, 0, 2, layer="cayley", input_shape=(2, 8, 8)),
    "contractions": lambda: unet(8, 1, 1, layer="aol", activation="halfabs", input_shape=(1, 8, 8)),
    "autoencoder": lambda: autoencoder([8, 6], 3, input_shape=(1, 8, 8)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETS)
def test_the_constant_is_above_every_jacobian(name: str) -> None:
    net = drawn(NETS[name]())
    shape = (3, 8, 8) if name.startswith("two") else (2, 8, 8) if "Cayley" in name else (1, 8, 8)
    x = torch.rand(1, *shape, dtype=torch.float64)
    assert net(x).shape == x.shape
    plain = lipkit.export(net, shape)
    torch.testing.assert_close(plain(x), net(x))
    bound = float(lipkit.lipschitz(plain))
    values = torch.linalg.svdvals(jacobian(net, x))
    assert values[0] <= bound <= 1 + 1e-6


@pytest.mark.thorough
def test_a_constant_that_is_asked_for_is_claimed() -> None:
    twice = unet(8, 1, 1, input_shape=(1, 8, 8), lipschitz=2.5)
    assert float(lipkit.lipschitz(twice, (1, 8, 8))) == pytest.approx(2.5, rel=1e-5)


@pytest.mark.thorough
def test_levels_of_equal_layers_keep_every_length() -> None:
    # Channels that neither grow nor shrink: 12 numbers of a patch, 12 channels.
    net = drawn(unet(12, 1, 1, activation="halfabs", input_shape=(3, 8, 8)))
    x = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    values = torch.linalg.svdvals(jacobian(net, x))
    torch.testing.assert_close(values, torch.ones_like(values), atol=1e-6, rtol=0)


@pytest.mark.thorough
def test_half_through_is_as_lipschitz_as_its_half() -> None:
    torch.manual_seed(0)
    layer = HalfThrough(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")).double()
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    top = float(torch.linalg.svdvals(jacobian(layer, x))[0])
    assert top * (1 - 1e-9) <= float(lipkit.lipschitz(layer, (4, 5, 5)).detach()) <= max(top, 1) * (1 + 1e-2)
    assert type(lipkit.export(layer, (4, 5, 5))[0]) is Graph
    assert torch.equal(layer(x)[:, :2], x[:, :2])
    with pytest.raises(ShapeError, match="even number of channels, got 3"):
        layer(torch.zeros(1, 3, 2, 2))


@pytest.mark.thorough
def test_a_denoiser_is_firmly_non_expansive(tmp_path: Path) -> None:
    net, shape = drawn(denoiser(8, 1, 1, input_shape=(1, 8, 8))), (1, 8, 8)
    assert float(lipkit.lipschitz(lipkit.export(net.nodes[0].float(), shape))) <= 1
    net.double()
    x, y = torch.randn(2, 64, 1, 8, 8, dtype=torch.float64)
    moved, step = (net(x) - net(y)).flatten(1), (x - y).flatten(1)
    assert bool((moved.square().sum(1) <= (moved * step).sum(1) * (1 + 1e-9)).all())
    # Its Jacobian has a symmetric part of at least its square: a strict subset of the 1-Lipschitz maps.
    j = jacobian(net, x[:1])
    assert torch.linalg.eigvalsh(j + j.mT - 2 * j.mT @ j)[0] >= -1e-9
    plain = lipkit.export(net.float(), shape)
    back = load(lipkit.save(plain, tmp_path / "denoiser"))
    assert torch.equal(back(x.float()), plain(x.float()))
    # The same kernels on a larger image.
    assert float(lipkit.lipschitz(lipkit.export(net.nodes[0], (1, 16, 24)))) <= 1


@pytest.mark.thorough
def test_the_unconstrained_one_has_the_same_sizes() -> None:
    ours, theirs = (denoiser(8, 1, 1, layer=layer, input_shape=(3, 8, 8)) for layer in ("bcop", "plain_conv"))
    kernels = [
        [m.weight.shape for m in lipkit.export(net, (3, 16, 16)).modules() if type(m) is nn.Conv2d]
        for net in (ours, theirs)
    ]
    assert kernels[0] == kernels[1]
    assert len(kernels[0]) == 5


def test_refusals() -> None:
    for bad, message in (
        (lambda: unet(7), "multiple of 2, got 7"),
        (lambda: unet(8, -1), "depth: expected an integer of at least 0, got -1"),
        (lambda: unet(8, blocks=0), "blocks"),
        (lambda: unet(8, layer="sll"), "contains its activation"),
        (lambda: unet(8, options={"dtype": torch.float64}), "dtype"),
        (lambda: autoencoder([]), "at least one stage, got none"),
        (lambda: autoencoder([8], 0), "code"),
        (lambda: denoiser(8, lipschitz=2.0), "no option lipschitz, which is fixed, got 2"),
    ):
        with pytest.raises(OptionError, match=message):
            bad()
    with pytest.raises(ShapeError, match="multiples of 4, got"):
        unet(8, 1, input_shape=(3, 6, 6))
    with pytest.raises(ShapeError, match="multiples of 2, got"):
        autoencoder([8], input_shape=(3, 7, 8))
