"""Trained networks of any forward pass as networks of constrained layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.architectures import NETWORKS, SMALL
from torch import nn

from lipkit import certify, export, lipschitz, save
from lipkit.errors import NoRuleError, OptionError
from lipkit.layers import CayleyConv2d, ConvexSum, ScaledAvgPool2d
from lipkit.models import build, convert
from lipkit.modules import Blend, Concatenate, Graph, MaxMin


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["VGG-11", "ResNet-18", pytest.param("WRN-16-4", marks=pytest.mark.slow), "DenseNet", "U-Net"]
)
def test_every_layer_is_constrained_and_the_constant_is_1(name: str) -> None:
    shape = NETWORKS[name][1]
    torch.manual_seed(10)
    result = convert(SMALL[name]().eval(), "cayley", input_shape=shape, forward="rebuild", activation="maxmin")
    assert result.kept == ()
    plain = export(result.model, shape)
    assert 0.5 < float(lipschitz(plain)) < 1 + 1e-5
    x = torch.rand(3, *shape)
    with torch.no_grad():
        assert torch.allclose(plain(x), result.model(x), atol=1e-5)
    assert not any(isinstance(m, (nn.Conv2d, nn.BatchNorm2d)) for m in result.model.modules())


def test_products_are_limited_by_a_box() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.value(x) * self.gate(x).sigmoid()

    with pytest.raises(NoRuleError, match=r"give the range of the inputs, such as box=\(0, 1\)"):
        convert(Gate().eval(), "cayley", input_shape=(4,), forward="rebuild")
    result = convert(Gate().eval(), "cayley", input_shape=(4,), forward="rebuild", box=(0, 1))
    assert [row.new for row in result.converted] == ["CayleyLinear"] * 2
    assert [row.kind for row in result.kept] == ["Product"]
    x = torch.rand(64, 4)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda one: result.model(one[None])[0]))(x).detach()
    assert float(torch.linalg.matrix_norm(jacobians, 2).max()) <= float(lipschitz(export(result.model, (4,)))) < 2.5


def test_blocks_of_a_transposed_convolution_are_a_convolution_and_a_shuffle() -> None:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(4, 1, 2, stride=2)
    q, _ = torch.linalg.qr(torch.randn(4, 4))
    q[0] *= torch.linalg.det(q).sign()  # a Cayley transform is a rotation
    up.weight.data = q.view_as(up.weight)
    result = convert(up.eval(), "cayley", input_shape=(4, 3, 3), forward="rebuild")
    x = torch.randn(2, 4, 3, 3)
    # An orthogonal map is its own nearest: the same function, the bias included.
    assert torch.allclose(result.model(x), up(x), atol=1e-5)
    overlapping = convert(
        nn.ConvTranspose2d(4, 1, 3, stride=2).eval(), "cayley", input_shape=(4, 3, 3), forward="rebuild"
    )
    assert [row.kind for row in overlapping.kept] in ([], ["ConvTranspose2d"])
    assert any(isinstance(m, nn.ConvTranspose2d) for m in overlapping.model.modules())


@pytest.mark.thorough
def test_what_keeps_a_larger_constant_is_reported() -> None:
    shape = NETWORKS["SqueezeNet"][1]
    result = convert(SMALL["SqueezeNet"]().eval(), "cayley", input_shape=shape, forward="rebuild")
    assert {row.kind for row in result.kept} == {"Conv2d", "MaxPool2d"}
    assert "its constant is 2" in str(result)
    assert float(lipschitz(result.model, shape).detach()) > 1


@pytest.mark.thorough
def test_it_trains_and_its_weights_are_learnt() -> None:
    torch.manual_seed(0)
    shape = NETWORKS["ResNet-18"][1]
    model = convert(
        SMALL["ResNet-18"]().eval(), "cayley", input_shape=shape, forward="rebuild", activation="maxmin"
    ).model
    assert any(isinstance(m, CayleyConv2d) for m in model.modules())
    assert any(isinstance(m, MaxMin) for m in model.modules())
    assert any(isinstance(m, ScaledAvgPool2d) for m in model.modules())
    joins = [m for m in model.modules() if isinstance(m, ConvexSum)]
    assert len(joins) == 8
    x, y = torch.rand(8, *shape), torch.arange(8)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.005), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(20 * model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(float(m.weight().detach()) != 0.5 for m in joins)
    plain = export(model.eval(), shape)
    blends = [m for m in plain.modules() if isinstance(m, Blend)]
    assert [float(b.share) for b in blends] == pytest.approx([float(m.weight().detach()) for m in joins])
    assert float(lipschitz(plain)) < 1 + 1e-5
    assert bool((certify(plain, x, plain(x).argmax(1)).radius > 0).any())


@pytest.mark.parametrize(("pool", "side"), [
    (nn.AvgPool2d(2), 2), (nn.AvgPool2d(2, stride=(2, 2)), 2), (nn.AvgPool2d((4, 4)), 4), (nn.AdaptiveAvgPool2d(4), 2),
    (nn.AvgPool2d(3), None), (nn.AvgPool2d((2, 4)), None), (nn.AvgPool2d(2, stride=4), None),
    (nn.AvgPool2d(2, padding=1), None), (nn.AdaptiveAvgPool2d(3), None),
])  # fmt: skip
def test_averages_get_norm_one_if_their_windows_tile_the_image(pool: nn.Module, side: int | None) -> None:
    result = convert(nn.Sequential(pool, nn.Flatten()).eval(), "cayley", input_shape=(2, 8, 8), forward="rebuild")
    x = torch.randn(3, 2, 8, 8)
    assert isinstance(result.model[0], ScaledAvgPool2d) == (side is not None)
    assert torch.allclose(result.model(x), (side or 1) * pool(x).flatten(1), atol=1e-6)


def test_concatenations_are_divided_by_the_root_of_their_number() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, torch.relu(x), x.tanh()], 1)

    result = convert(Wide(), "cayley", input_shape=(4,), forward="rebuild")
    assert isinstance(result.model[0], Graph)
    assert any(isinstance(m, Concatenate) for m in result.model[0].nodes)
    assert float(lipschitz(result.model, (4,))) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.thorough
def test_recipes_name_it_with_a_folder(tmp_path: Path) -> None:
    shape = (3, 16, 16)
    folder = save(export(SMALL["WRN-16-4"]().eval(), shape), tmp_path / "network")
    model = build("rebuild", network=str(folder), input_shape=shape, classes=10)
    assert 0.9 < float(lipschitz(model, shape).detach()) < 1 + 1e-6
    with pytest.raises(OptionError, match="expected 7 outputs"):
        build("rebuild", network=str(folder), input_shape=shape, classes=7)


def test_refusals() -> None:
    for options, word in (({"layer": "cpl"}, "bare linear maps"), ({"activation": "relu"}, "'maxmin' or None")):
        with pytest.raises(OptionError, match=word):
            convert(nn.Linear(2, 2), input_shape=(2,), forward="rebuild", **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="strictly between"):
        ConvexSum(1.0)
