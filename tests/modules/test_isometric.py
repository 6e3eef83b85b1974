"""Isometric activations, centring, position codes and pooling by norms against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit import certify, export, lipschitz
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import (
    BatchLipNorm,
    CayleyLinear,
    Center,
    HalfAbs,
    Householder,
    L2NormPool2d,
    LayerCenter,
    LPReLU,
    MaxMin,
    NActivation,
    PositionCode,
    SandwichLinear,
)
from lipkit.modules import Affine, Network, load, save
from lipkit.modules.activations import slope_restricted


def randomised(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


@pytest.mark.thorough
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_no_pair_of_points_is_moved_apart(seed: int, size: float) -> None:
    torch.manual_seed(seed)
    x, y = size * torch.randn(2, 40, 6, 4, 4, dtype=torch.float64)
    y = torch.cat((x[:20] + 1e-3 * size * y[:20], y[20:]))
    kinds = (HalfAbs(), NActivation(6), LPReLU(6), Householder(6, 3), L2NormPool2d(2), L2NormPool2d())
    for module in map(randomised, kinds):
        assert float(lipschitz(module)) == 1.0
        moved, apart = ((t[0] - t[1]).flatten(1).norm(dim=1) for t in ((module(x), module(y)), (x, y)))
        assert bool((moved <= apart * (1 + 1e-12) + 1e-14 * (size + 10)).all()), module


def test_isometries_keep_the_norm_of_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 6, dtype=torch.float64)
    for module in map(randomised, (HalfAbs(), NActivation(6), Householder(6), Householder(6, 2))):
        jacobian = torch.autograd.functional.jacobian(module, x).reshape(6, 6)
        assert torch.allclose(jacobian @ jacobian.t(), torch.eye(6, dtype=torch.float64), atol=1e-12)


def test_half_abs_is_maxmin_between_rotations() -> None:
    # 2 (max, min) = (a + b + |a - b|, a + b - |a - b|): absolute values of (a - b, a + b) / sqrt(2), rotated back.
    x = torch.randn(50, 2, dtype=torch.float64)
    rotation = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64) / math.sqrt(2)
    mirror = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64) / math.sqrt(2)
    assert torch.allclose(HalfAbs()(x @ rotation.t()) @ mirror.t(), MaxMin()(x))
    assert HalfAbs()(torch.tensor([[-1.0, -2.0, -3.0]])).tolist() == [[1.0, -2.0, -3.0]]


def test_n_activation_against_interpolation() -> None:
    x = np.linspace(-5, 5, 400)
    for low, high in ((-1.0, 2.0), (2.0, -1.0), (0.5, 0.5)):
        a, b = min(low, high), max(low, high)
        # Through its kinks, and with slope 1 beyond them.
        expected = np.interp(x, [-10, a, b, 10], [-10 - 2 * a, -a, -b, 10 - 2 * b])
        got = NActivation(1, low, high).double()(torch.from_numpy(x)[:, None])
        assert np.allclose(got.detach().numpy()[:, 0], expected, atol=1e-12)
    assert not slope_restricted(NActivation(1))  # slope -1: no sandwich layer takes it
    with pytest.raises(OptionError, match="slope"):
        SandwichLinear(4, 4, activation=NActivation(4))


def test_householder_against_the_reflection_matrix() -> None:
    torch.manual_seed(0)
    layer = randomised(Householder(2))
    theta = float(layer.angles.detach()[0, 0])
    v = np.array([math.sin(theta / 2), -math.cos(theta / 2)])
    mirror = np.eye(2) - 2 * np.outer(v, v)
    for point in np.random.default_rng(0).normal(size=(50, 2)):
        expected = point if v @ point > 0 else mirror @ point
        assert np.allclose(layer(torch.from_numpy(point)[None])[0].detach().numpy(), expected)
    x = torch.randn(9, 6, 2, 2)
    assert torch.allclose(Householder(6)(x), MaxMin()(x), atol=1e-6)
    assert Householder(4, 2)(x[:, :4]).shape == (9, 4, 2, 2)


def test_lprelu_is_exported_with_its_clipped_slopes() -> None:
    layer = LPReLU(3)
    layer.slopes.data = torch.tensor([-4.0, 0.5, 7.0])
    plain = export(layer, (3,))
    assert type(plain[0]) is nn.PReLU
    assert plain[0].weight.tolist() == [-1.0, 0.5, 1.0]
    x = torch.randn(8, 3)
    assert torch.equal(plain(x), layer(x))


def test_centring_follows_the_batches_and_is_a_translation() -> None:
    torch.manual_seed(0)
    layer, batches = Center(3, momentum=0.25), torch.randn(30, 16, 3, 2, 2) + 5
    mean = torch.zeros(3)
    for x in batches:
        assert torch.allclose(layer(x).mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
        mean = 0.75 * mean + 0.25 * x.mean((0, 2, 3))
    assert torch.allclose(layer.running_mean, mean, atol=1e-5)
    with pytest.raises(NoRuleError, match=r"call \.eval"):
        lipschitz(layer)
    with pytest.raises(NoRuleError, match=r"call \.eval"):
        export(layer, (3, 2, 2))
    layer.eval()
    x = batches[0]
    assert torch.allclose(layer(x), x - mean[:, None, None], atol=1e-5)
    assert float(lipschitz(layer)) == 1.0
    plain = export(layer, (3, 2, 2))
    assert type(plain[0]) is Affine
    assert torch.allclose(plain(x), layer(x))
    assert torch.equal(layer.running_mean, layer.running_mean.clone())
    for bad in (0.0, 1.5, math.nan):
        with pytest.raises(OptionError, match="momentum"):
            Center(3, bad)
    with pytest.raises(ShapeError, match="3 channels"):
        layer(torch.zeros(2, 4))


def test_batch_lip_norm_is_batch_norm_of_the_widest_channel() -> None:
    torch.manual_seed(0)
    layer, batches = BatchLipNorm(3, momentum=0.25, eps=1e-3).double(), torch.randn(20, 16, 3, 2, 2).double()
    batches = batches * torch.tensor([0.5, 4.0, 1.0])[:, None, None] + 5
    layer.bias.data = torch.tensor([1.0, -2.0, 0.0]).double()
    mean, variance = np.zeros(3), np.ones(3)
    for x in batches:
        rows = x.numpy().swapaxes(1, 0).reshape(3, -1)
        expected = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1).max() + 1e-3)
        found = layer(x).detach().numpy().swapaxes(1, 0).reshape(3, -1)
        assert np.allclose(found, expected + np.array([[1.0], [-2.0], [0.0]]))
        mean, variance = 0.75 * mean + 0.25 * rows.mean(1), 0.75 * variance + 0.25 * rows.var(1, ddof=1)
    assert np.allclose(layer.running_mean, mean)
    assert np.allclose(layer.running_var, variance)
    with pytest.raises(NoRuleError, match=r"BatchLipNorm.*call \.eval"):
        lipschitz(layer)
    layer.eval()
    constant = 1 / math.sqrt(variance.max() + 1e-3)
    assert constant * (1 - 1e-12) <= float(lipschitz(layer)) <= constant * (1 + 1e-12)
    plain = export(layer, (3, 2, 2))
    assert type(plain[0]) is Affine
    assert torch.allclose(plain(batches[0]), layer(batches[0]))
    assert float(lipschitz(plain)) == pytest.approx(constant, rel=1e-12)
    with pytest.raises(OptionError, match="eps"):
        BatchLipNorm(3, eps=0.0)
    with pytest.raises(ShapeError, match="two numbers of each channel"):
        layer.train()(torch.zeros(1, 3).double())
    with pytest.raises(ShapeError, match="BatchLipNorm: expected 3 channels"):
        layer(torch.zeros(2, 4).double())


def test_layer_centring_against_its_projection() -> None:
    x = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    a = x.numpy()
    assert np.allclose(LayerCenter(1, 3)(x).numpy(), a - a.mean((1, 3), keepdims=True))
    assert float(lipschitz(LayerCenter(2))) == 1.0
    for dims in ((), (0, 1), (1, 1)):
        with pytest.raises(OptionError, match="LayerCenter"):
            LayerCenter(*dims)
    with pytest.raises(ShapeError, match="LayerCenter"):
        lipschitz(LayerCenter(2, 3), (4, 4))


def test_a_position_code_is_one_offset_for_each_place() -> None:
    layer = randomised(PositionCode(2, 3, 4))
    x = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    plain = export(layer, (2, 3, 4))
    assert type(plain[0]) is Affine
    assert torch.equal(plain(x), layer(x))
    assert torch.allclose(layer(x) - x, layer.offset.expand_as(x))


def test_pooling_by_norms_against_numpy() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    windows = x.numpy().reshape(2, 3, 2, 2, 3, 2)
    assert np.allclose(L2NormPool2d(2)(x).numpy(), np.sqrt((windows**2).sum((3, 5))))
    assert np.allclose(L2NormPool2d()(x).numpy()[..., 0, 0], np.linalg.norm(x.numpy().reshape(2, 3, -1), axis=2))
    zero = torch.zeros(1, 1, 2, 2, requires_grad=True)
    L2NormPool2d()(zero).sum().backward()
    assert zero.grad is not None
    assert zero.grad.tolist() == torch.zeros(1, 1, 2, 2).tolist()


@pytest.mark.thorough
def test_they_are_certified_stored_and_read_again(tmp_path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        PositionCode(2, 4, 4), LayerCenter(2, 3), nn.Upsample(scale_factor=2, mode="bilinear"), NActivation(2),
        L2NormPool2d(4), nn.Flatten(), CayleyLinear(8, 8), HalfAbs(),
        LPReLU(8, -0.5), Householder(8, 2), Center(8), BatchLipNorm(8), nn.Linear(8, 3),
    ).eval()  # fmt: skip
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.rand(16, 2, 4, 4)
    plain = export(net, (2, 4, 4))
    assert type(plain) is Network
    assert torch.allclose(plain(x), net(x), atol=1e-6)
    labels = plain(x).argmax(1)
    cert = certify(plain, x, labels)
    assert bool((cert.radius > 0).any())
    back = load(save(plain, tmp_path / "network"))
    assert torch.equal(back(x), plain(x))
    # No radius is contradicted by random points inside it.
    for _ in range(20):
        step: Tensor = torch.randn_like(x)
        step *= (0.999 * cert.radius.float() / step.flatten(1).norm(dim=1))[:, None, None, None]
        assert bool((plain(x + step).argmax(1) == labels)[cert.radius > 0].all())
