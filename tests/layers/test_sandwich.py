"""Sandwich layers: written out by hand, complete, proved from their exported numbers, other activations refused."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipkit.conv import circular_conv2d, fold
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import MaxMin, SandwichConv2d, SandwichLinear
from lipkit.layers.base import slope_activation
from lipkit.layers.sandwich import ContractionLinear, free_pair
from lipkit.linalg import cayley
from lipkit.lowering import export, lipschitz
from lipkit.modules import FourierConv2d, SandwichBlock, load, save
from lipkit.modules.activations import BY_NAME
from lipkit.testing import dense_matrix

DTYPES = (torch.float32, torch.float64)
REFUSED = (
    MaxMin(),
    nn.PReLU(),
    nn.GELU(),
    nn.SiLU(),
    nn.Mish(),
    nn.SELU(),
    nn.Hardswish(),
    nn.Softmax(-1),
    nn.Hardshrink(),
    nn.Threshold(0.1, 0.0),
    nn.LeakyReLU(-0.1),
    nn.LeakyReLU(1.5),
    nn.ELU(2.0),
    nn.Identity,
    "maxmin",
    "abs",
    "gelu",
    torch.abs,
)


def moved(layer: nn.Module, seed: int = 0, size: float = 0.3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return layer


def test_dense_layer_written_out() -> None:
    torch.manual_seed(0)
    layer = moved(SandwichLinear(4, 3, activation="tanh", dtype=torch.float64))
    x, y = layer.x_free.detach().numpy(), layer.y_free.detach().numpy()
    x = layer.x_scale.item() * x / np.linalg.norm(x)
    y = layer.y_scale.item() * y / np.linalg.norm(y)
    z = x - x.T + y.T @ y
    inverse = np.linalg.inv(np.eye(3) + z)
    a, b = (inverse @ (np.eye(3) - z)).T, (-2 * y @ inverse).T
    assert np.allclose(a @ a.T + b @ b.T, np.eye(3), atol=1e-14)
    psi = np.diag(np.exp(layer.log_psi.detach().numpy()))
    point = torch.randn(5, 4, dtype=torch.float64)
    inner = np.sqrt(2) * point.numpy() @ b.T @ np.linalg.inv(psi) + layer.bias.detach().numpy()
    expected = np.sqrt(2) * np.tanh(inner) @ psi @ a
    assert np.allclose(layer(point).detach().numpy(), expected, atol=1e-13)


@pytest.mark.parametrize("size", [(1, 1), (3, 7), (4, 6)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_is_the_dense_layer_of_its_circulant_matrices(size: tuple[int, int], stride: int) -> None:
    # The Cayley transform of the big circulant matrices, without any Fourier transform.
    h, w = size
    torch.manual_seed(0)
    layer = moved(SandwichConv2d(2, 3, 3, stride=stride, activation="softplus", dtype=torch.float64))
    p, q, n = layer.inner_channels, 3, h * w

    def operator(free: Tensor, scale: Tensor) -> Tensor:
        kernel = free * scale / free.norm()
        folded = fold(kernel.detach(), h, w)
        return torch.from_numpy(dense_matrix(lambda x: circular_conv2d(x, folded), (kernel.shape[1], h, w)).copy())

    x, y = operator(layer.x_free, layer.x_scale), operator(layer.y_free, layer.y_scale)
    both = cayley(torch.cat((x, y), 1).mT).mT
    a, b = both[:, : q * n], both[:, q * n :]
    psi = layer.psi().detach().repeat_interleave(n)
    bias = layer.bias.detach().repeat_interleave(n)
    image = torch.randn(4, 2, stride * h, stride * w, dtype=torch.float64)
    flat = nn.functional.pixel_unshuffle(image, stride).flatten(1)
    assert flat.shape[1] == p * n
    hidden = nn.functional.softplus(math.sqrt(2) * flat @ b.mT / psi + bias)
    expected = math.sqrt(2) * (hidden * psi) @ a
    assert torch.allclose(layer(image).flatten(1), expected, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("largest", [0.0, 0.3, 1.0])
def test_linear_form_is_complete(shape: tuple[int, int], largest: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, p = shape
    u = torch.linalg.qr(torch.randn(q, q, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(p, p, generator=generator, dtype=torch.float64))[0]
    s = torch.linspace(largest, largest / 3, min(p, q), dtype=torch.float64)
    weight = u[:, : min(p, q)] * s @ v[:, : min(p, q)].mT
    bias = torch.randn(q, generator=generator, dtype=torch.float64)
    layer = SandwichLinear.from_weight(weight, bias)
    assert torch.allclose(layer.weight(), weight, atol=1e-13)
    x = torch.randn(3, p, generator=generator, dtype=torch.float64)
    assert torch.allclose(layer(x), x @ weight.mT + bias, atol=1e-12)
    plain = export(layer, (p,))
    assert [type(m) for m in plain] == [nn.Linear]
    # What the initialiser sets can be trained: every parameter has a gradient, at once or after the first step.
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(2):
        optimiser.zero_grad()
        (layer(x) - 1).square().sum().backward()
        optimiser.step()
    assert p * q == 1 or all(bool(parameter.grad.any()) for parameter in (layer.y_free, layer.y_scale, layer.bias))


def test_from_weight_refuses_what_the_form_cannot_reach() -> None:
    with pytest.raises(OptionError, match=r"expected a spectral norm of at most 1, got 1\.0"):
        SandwichLinear.from_weight(1.001 * torch.eye(2))
    with pytest.raises(ShapeError, match=r"expected weight \(m, n\) and bias \(m,\), got \(2, 2\) and \(3,\)"):
        SandwichLinear.from_weight(torch.eye(2), torch.zeros(3))
    with pytest.raises(ShapeError, match="expected weight"):
        SandwichLinear.from_weight(torch.zeros(2))


@pytest.mark.parametrize("seed", range(4))
def test_free_pair_inverts_the_transform(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, p = [(3, 5), (5, 3), (4, 4), (1, 1)][seed]
    both = cayley(torch.randn(q + p, q, generator=generator, dtype=torch.float64))
    a, b = both[:q].mT, both[q:].mT
    again = cayley(torch.cat(free_pair(a, b)))
    assert torch.allclose(again, both, atol=1e-11)


def test_contraction_reaches_and_keeps_norm_1() -> None:
    torch.manual_seed(0)
    layer = ContractionLinear(4, 3, dtype=torch.float64)
    for seed in range(5):
        assert float(torch.linalg.matrix_norm(moved(layer, seed, 3.0).weight().detach(), 2)) <= 1 + 1e-13
    target = torch.eye(3, 4, dtype=torch.float64)
    layer.set_factors(torch.zeros(3, 3, dtype=torch.float64), target)
    assert torch.allclose(layer.weight(), target, atol=1e-14)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", ["dense", "odd", "even", "pixel", "stride"])
def test_the_exported_block_proves_its_bound(make: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    shape: tuple[int, ...]
    layer: nn.Module
    if make == "dense":
        layer, shape = SandwichLinear(6, 5, dtype=dtype), (6,)
    else:
        shape = {"odd": (2, 7, 5), "even": (2, 4, 4), "pixel": (2, 1, 1), "stride": (2, 6, 10)}[make]
        layer = SandwichConv2d(2, 4, 3, stride=2 if make == "stride" else 1, dtype=dtype)
    layer = moved(layer)
    network = export(layer, shape)
    block = network[-1]
    assert type(block) is SandwichBlock
    assert type(block.first) is (nn.Linear if make == "dense" else FourierConv2d)
    assert torch.allclose(block.multiplier, layer.psi().square())
    x = torch.randn(40, *shape, dtype=dtype)
    assert torch.allclose(network(x), layer(x), atol=100 * torch.finfo(dtype).eps)
    bound = float(lipschitz(network))
    # 1/2 ||[B A]||^2 = 1 exactly; only the rounding of the stored numbers and of the proof is above it.
    assert bound <= 1 + 64 * torch.finfo(dtype).eps + 1e-10
    # With all slopes 1 the block is 2 A^* B: never above.
    double = copy.deepcopy(block).double()
    inner = (2 * 4, shape[1] // 2, shape[2] // 2) if make == "stride" else shape
    linear = dense_matrix(lambda v: double.second(double.first(v) - double.first(torch.zeros_like(v[:1]))), inner)
    assert np.linalg.norm(linear, 2) <= bound
    loaded = load(save(network, tmp_path))
    assert torch.equal(loaded(x), network(x))
    assert float(lipschitz(loaded)) == bound
    again = export(network, shape)
    assert torch.equal(again(x), network(x))
    assert float(lipschitz(again)) == bound


def test_half_the_multiplier_and_a_larger_weight_do_not_pass() -> None:
    torch.manual_seed(0)
    block = export(moved(SandwichLinear(6, 6, dtype=torch.float64)), (6,))[0]
    good = float(lipschitz(block))
    assert good <= 1 + 1e-12
    scaled = SandwichBlock(block.first, block.activation, block.second, block.multiplier / 2)
    assert float(lipschitz(scaled)) > 1.01
    with torch.no_grad():
        block.second.weight.mul_(1.02)
    assert float(lipschitz(block)) > good


def test_a_dense_layer_and_a_convolution_share_no_hidden_units() -> None:
    # For the dense layer the columns of an image are units, for the convolution its channels.
    def part(kind: type[nn.Module], column: int) -> nn.Module:
        layer = nn.Linear(3, 3, bias=False) if kind is nn.Linear else nn.Conv2d(3, 3, 1, bias=False)
        with torch.no_grad():
            layer.weight.zero_()[0, column] = 1.0
        return layer

    x, multiplier = torch.ones(1, 3, 3, 3), torch.tensor([1e-4, 1e4, 1.0])
    for one, two in itertools.product((nn.Linear, nn.Conv2d), repeat=2):
        block = SandwichBlock(part(one, 0), nn.ReLU(), part(two, 1), multiplier)  # unit 0 is made, unit 1 is read
        block.requires_grad_(False)
        slope, bound = float(block(x).norm() / x.norm()), float(lipschitz(block, (3, 3, 3)))
        assert slope <= bound
        assert (slope, bound < 1e-4) == (0.0, True) if one is two else slope > 0.3


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_multiplier_that_proves_nothing_leaves_the_product(value: float) -> None:
    torch.manual_seed(0)
    block = export(SandwichLinear(3, 4, dtype=torch.float64), (3,))[0]
    product = float(lipschitz(block.first) * lipschitz(block.second))
    block.multiplier[1] = value
    assert float(lipschitz(block)) == pytest.approx(product, rel=1e-12)
    # An activation of larger slope: the product again, its slope included.
    other = SandwichBlock(block.first, nn.GELU(), block.second, torch.ones(4))
    assert float(lipschitz(other)) == pytest.approx(product * 1.1289041452, rel=1e-9)


def test_the_bound_sees_hooks_and_replaced_activations() -> None:
    layer = SandwichLinear(3, 4)
    layer.activation = MaxMin()
    with pytest.raises(NoRuleError, match=r"expected an activation with slope in \[0, 1\], got MaxMin"):
        lipschitz(layer)
    layer = SandwichLinear(3, 4)
    layer.activation.register_forward_hook(lambda *_: None)
    with pytest.raises(NoRuleError, match="hooks"):
        lipschitz(layer)
    block = export(SandwichLinear(3, 4), (3,))
    block[0].first.register_forward_hook(lambda *_: None)
    with pytest.raises(NoRuleError, match="hooks"):
        lipschitz(block)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_activation_of_the_table_keeps_the_promise(name: str) -> None:
    torch.manual_seed(0)
    layer = moved(SandwichLinear(5, 6, activation=name, dtype=torch.float64), size=1.0)
    network = export(layer, (5,))
    assert float(lipschitz(network)) <= 1 + 1e-12
    x = 3 * torch.randn(500, 5, dtype=torch.float64)
    for step in (1e-3, 1.0, 10.0):
        d = step * torch.randn(500, 5, dtype=torch.float64)
        secants = (network(x + d) - network(x)).norm(dim=1) / d.norm(dim=1)
        assert float(secants.max()) <= 1 + 1e-9
    # The slope, by differences on a fine grid.
    grid = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    slopes = slope_activation(name)(grid).diff() / grid.diff()
    assert float(slopes.min()) >= -1e-9
    assert float(slopes.max()) <= 1 + 1e-9


@pytest.mark.parametrize("activation", REFUSED, ids=lambda a: getattr(a, "__name__", str(a)))
def test_other_activations_are_refused(activation: object) -> None:
    for make in (
        lambda: SandwichLinear(3, 4, activation=activation),
        lambda: SandwichConv2d(3, 4, 3, activation=activation),
    ):
        with pytest.raises(OptionError, match=r"expected one with slope in \[0, 1\] \(arcsinh, arctan, celu, .*got "):
            make()


def test_maxmin_inside_would_break_the_promise() -> None:
    # Why it is refused: A = B = 1/sqrt 2 makes the layer Psi MaxMin(Psi^-1 x), whose norm is max Psi / min Psi.
    psi = torch.tensor([4.0, 1.0])
    x, y = torch.tensor([[4.0, 0.0]]), torch.tensor([[4.0, 1.0]])

    def f(v: Tensor) -> Tensor:
        return MaxMin()(v / psi) * psi

    slope = (f(y + torch.tensor([[0.0, 1.0]])) - f(y)).norm()
    assert float(slope) == pytest.approx(4.0)
    assert f(x).shape == y.shape


def test_conv_of_linear_form_and_of_a_vector() -> None:
    torch.manual_seed(0)
    layer = moved(SandwichConv2d(2, 3, 3, activation=None, dtype=torch.float64))
    assert "log_psi" not in dict(layer.named_parameters())
    network = export(layer, (2, 5, 4))
    assert [type(m) for m in network] == [FourierConv2d]
    values = np.linalg.svd(dense_matrix(layer, (2, 5, 4)), compute_uv=False)
    assert 0.5 < values.max() <= 1 + 1e-13
    with pytest.raises(ShapeError, match=r"expected input of shape \(B, 2, H, W\), got \(1, 3, 4, 4\)"):
        layer(torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    # Vectors with leading dimensions, as nn.Linear takes them.
    assert SandwichLinear(4, 3)(torch.zeros(2, 5, 4)).shape == (2, 5, 3)


@pytest.mark.parametrize("activation", ["relu", None])
def test_one_linear_map_is_given_only_where_it_is_the_layer(activation: str | None) -> None:
    torch.manual_seed(0)
    dense = SandwichLinear(3, 4, activation=activation, dtype=torch.float64)
    conv = SandwichConv2d(3, 4, 1, activation=activation, dtype=torch.float64)
    if activation is None:
        x = torch.randn(5, 3, dtype=torch.float64)
        assert torch.allclose(dense(x), x @ dense.weight().mT + dense.bias, atol=1e-13)
        flat = conv(x[:, :, None, None])[:, :, 0, 0]
        assert torch.allclose(flat, x @ conv.matrix().mT + conv.bias, atol=1e-13)
        for method in (dense.halves, conv.matrices):
            with pytest.raises(OptionError, match="expected an activation between two linear maps, got None"):
                method()
        return
    for method in (dense.weight, lambda: conv.symbol(4, 4), conv.matrix):
        with pytest.raises(OptionError, match=r"expected activation=None.*got activation=ReLU\(\): use halves"):
            method()
