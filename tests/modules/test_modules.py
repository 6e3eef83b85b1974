"""The plain modules: what they compute, how they move, what they refuse."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit.conv import kernel_symbol
from lipkit.errors import OptionError, ShapeError
from lipkit.modules import (
    Affine,
    FourierConv2d,
    GroupSort,
    HalfAbs,
    MaxMin,
    MaxMinShift2d,
    Network,
    Shift2d,
    group_sort,
    maxmin,
)

SIZES = [(1, 1), (1, 4), (2, 2), (3, 5), (7, 7), (8, 8), (8, 9), (9, 16)]


def fourier(size: tuple[int, int], dtype: torch.dtype = torch.float64) -> tuple[FourierConv2d, nn.Conv2d]:
    """A circular convolution twice: with its kernel, and with its symbol."""
    torch.manual_seed(0)
    k = tuple(min(3, n) for n in size)
    conv = nn.Conv2d(2, 3, k, padding="same", padding_mode="circular").double()
    with torch.no_grad():
        layer = FourierConv2d.from_symbol(kernel_symbol(conv.weight, *size), *size, conv.bias)
    return layer.to(dtype), conv.to(dtype)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fourier_convolution_equals_the_convolution(size: tuple[int, int], dtype: torch.dtype) -> None:
    layer, conv = fourier(size, dtype)
    x = torch.randn(4, 2, *size, dtype=dtype)
    with torch.no_grad():
        assert torch.allclose(layer(x), conv(x), atol=200 * torch.finfo(dtype).eps)
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("size", SIZES)
def test_buffers_have_the_documented_shapes(size: tuple[int, int]) -> None:
    h, w = size
    layer = FourierConv2d(2, 3, h, w)
    n_real = (2 - h % 2) * (2 - w % 2)
    assert layer.real.shape == (n_real, 3, 2)
    assert layer.pair.shape == ((h * w - n_real) // 2, 2, 3, 2)
    assert set(layer.state_dict()) == {"real", "pair", "bias"}
    assert set(FourierConv2d(2, 3, h, w, bias=False).state_dict()) == {"real", "pair"}


def orthogonality_error(layer: FourierConv2d) -> float:
    return max(float((t.double() @ t.double().mT - torch.eye(len(t)).double()).abs().max()) for t in layer.matrices())


@pytest.mark.parametrize("size", [(5, 6), (9, 16)])
def test_a_move_to_float64_makes_the_transform_anew(size: tuple[int, int]) -> None:
    layer, _ = fourier(size, torch.float32)
    assert 1e-9 < orthogonality_error(layer) < 1e-5
    for moved in (
        copy.deepcopy(layer).double(),
        copy.deepcopy(layer).to(torch.float64),
        nn.Sequential(layer).double()[0],
    ):
        assert orthogonality_error(moved) < 1e-14
        assert moved.real.dtype == torch.float64
    assert orthogonality_error(copy.deepcopy(layer).half().double()) < 1e-14
    assert layer.bfloat16().matrices()[0].dtype == torch.bfloat16


def test_copies_are_equal_and_independent() -> None:
    layer, _ = fourier((5, 6), torch.float32)
    x = torch.randn(2, 2, 5, 6)
    expected = layer(x)
    fresh = FourierConv2d(2, 3, 5, 6)
    fresh.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert torch.equal(other(x), expected)
        other.real.zero_()
    assert torch.equal(layer(x), expected)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    assert set(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)) == {"real", "pair", "bias"}


def test_from_symbol_copies() -> None:
    symbol = kernel_symbol(torch.randn(3, 2, 3, 3), 4, 4)
    layer = FourierConv2d.from_symbol(symbol, 4, 4, None)
    symbol.real.zero_()
    assert float(layer.real.abs().sum()) > 0
    assert layer.bias is None


@pytest.mark.parametrize("shape", [(2, 5, 6), (1, 3, 5, 6), (1, 2, 6, 5), (1, 2, 5, 7)])
def test_fourier_convolution_refuses_other_inputs(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"expected input of shape \(B, 2, 5, 6\), got"):
        fourier((5, 6))[0](torch.zeros(shape))


@pytest.mark.parametrize(
    "sizes", [(0, 1, 4, 4), (1, 0, 4, 4), (1, 1, 0, 4), (1, 1, 4, -1), (1, 1, 1, 10**6), (1, 1, 10**12, 1)]
)
def test_fourier_convolution_refuses_sizes_without_computing(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ShapeError, match=r"expected .* got"):
        FourierConv2d(*sizes)


# ---------------------------------------------------------------- activations


def test_maxmin_by_hand() -> None:
    x = torch.tensor([[1.0, 5.0, 3.0, 2.0], [4.0, -1.0, 4.0, 0.0]])
    assert maxmin(x).tolist() == [[3.0, 5.0, 1.0, 2.0], [4.0, 0.0, 4.0, -1.0]]
    assert torch.equal(MaxMin()(x), maxmin(x))
    image = torch.randn(2, 6, 3, 4)
    a, b = image[:, :3], image[:, 3:]
    assert torch.equal(maxmin(image), torch.cat((torch.maximum(a, b), torch.minimum(a, b)), 1))


@pytest.mark.parametrize("module", [MaxMin(), GroupSort(2), GroupSort(None), HalfAbs()], ids=repr)
def test_a_sample_without_its_batch_is_refused(module: nn.Module) -> None:
    """As under `vmap`, which takes the batch off; a dense layer would accept it."""
    x = torch.randn(3, 4)
    with pytest.raises(ShapeError, match=r"expected a batch \(N, C, ...\), got shape \(4,\): one sample is x\[None\]"):
        torch.func.vmap(module)(x)
    assert torch.equal(torch.func.vmap(lambda one: module(one[None])[0])(x), module(x))


@pytest.mark.parametrize("size", [2, 3, 6])
def test_group_sort_against_numpy(size: int) -> None:
    x = torch.randn(2, 6, 3)
    expected = -np.sort(-x.numpy().reshape(2, 6 // size, size, 3), axis=2).reshape(2, 6, 3)
    assert np.array_equal(group_sort(x, size).numpy(), expected)
    assert torch.equal(GroupSort(size)(x), group_sort(x, size))


def test_activations_refuse_channels_that_do_not_divide() -> None:
    with pytest.raises(ShapeError, match="even number of channels, got 3"):
        maxmin(torch.zeros(1, 3))
    with pytest.raises(ShapeError, match="multiple of 4"):
        group_sort(torch.zeros(1, 6), 4)
    for bad in (1, 0, -2):
        with pytest.raises(OptionError, match="at least 2"):
            GroupSort(bad)


def test_gradients_of_sorting_are_permutations() -> None:
    x = torch.randn(1, 6, dtype=torch.float64)
    for function in (maxmin, lambda x: group_sort(x, 3)):
        jacobian = torch.autograd.functional.jacobian(function, x).reshape(6, 6)
        assert torch.equal(jacobian @ jacobian.T, torch.eye(6, dtype=torch.float64))


# ---------------------------------------------------------------- affine and residual


def test_shift_moves_each_group_as_numpy_does() -> None:
    x = torch.rand(2, 9, 3, 4)
    n = x.numpy()
    moved = [
        np.roll(n[:, 1 + 2 * i : 3 + 2 * i], by, axis)
        for i, (axis, by) in enumerate([(2, 1), (2, -1), (3, 1), (3, -1)])
    ]
    assert np.array_equal(Shift2d(9, 2)(x).numpy(), np.concatenate([n[:, :1], *moved], axis=1))
    with pytest.raises(ShapeError, match=r"expected images \(B, 9, H, W\), got \(2, 8, 3, 4\)"):
        Shift2d(9, 2)(x[:, 1:])
    with pytest.raises(OptionError, match=r"expected channels >= 4 \* moved >= 4, got channels=7, moved=2"):
        Shift2d(7, 2)


def test_affine_by_hand() -> None:
    module = Affine(torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.0]))
    assert module(torch.ones(1, 2)).tolist() == [[2.5, -1.0]]
    assert module(torch.ones(1, 2, 1, 1)).flatten().tolist() == [2.5, -1.0]
    assert Affine(torch.tensor([3.0]), torch.tensor([1.0]))(torch.ones(1, 4)).tolist() == [[4.0] * 4]
    with pytest.raises(ShapeError):
        module(torch.ones(2))


# ---------------------------------------------------------------- networks


def test_a_network_flattens_chains_and_drops_identities() -> None:
    a, b = nn.Linear(2, 2), nn.ReLU()
    inner = Network([b, nn.Identity()], (2,))
    net = Network([nn.Identity(), nn.Sequential(a, nn.Sequential(inner)), nn.Sequential()], (2,))
    assert list(net) == [a, b]
    assert net.input_shape == (2,)
    assert not net.training
    assert not a.weight.requires_grad


def test_a_network_applies_a_module_as_often_as_it_stands_there() -> None:
    double = Affine(torch.tensor([2.0]), torch.zeros(1))
    net = Network([double, nn.Sequential(double, double)], (1,))
    assert net(torch.ones(1, 1)).item() == 8.0


def test_a_network_checks_the_shape_of_its_input() -> None:
    net = Network([nn.ReLU()], (3, 4, 4))
    assert net(torch.zeros(5, 3, 4, 4)).shape == (5, 3, 4, 4)
    for shape in ((3, 4, 4), (1, 3, 4, 5), (1, 1, 4, 4), (1, 48)):
        with pytest.raises(ShapeError, match=r"expected input of shape \(B, 3, 4, 4\), got"):
            net(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(), (0,), (-3, 4), (2.5,), ("3",), 7, None])
def test_a_network_needs_a_sensible_input_shape(shape: object) -> None:
    with pytest.raises(ShapeError, match="expected positive sizes"):
        Network([nn.ReLU()], shape)  # type: ignore[arg-type]


def test_parts_of_a_network() -> None:
    net = Network([nn.Flatten(), nn.Linear(4, 3), nn.ReLU()], (1, 2, 2))
    assert type(net[:2]) is nn.Sequential
    assert net[-1] is list(net)[2]
    assert len(net) == 3
    assert torch.equal(net[1:](net[:1](torch.ones(1, 1, 2, 2))), net(torch.ones(1, 1, 2, 2)))


def test_a_copy_of_a_network_is_a_network() -> None:
    net = Network([nn.Linear(3, 2)], (3,))
    x = torch.randn(2, 3)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other) is Network
        assert other.input_shape == (3,)
        assert torch.equal(other(x), net(x))
    assert copy.deepcopy(net).double()(x.double()).dtype == torch.float64


def test_an_export_of_a_network_keeps_its_range() -> None:
    network = Network([nn.Linear(2, 2)], (2,))
    network.input_range = (0.0, 255.0)
    assert lipkit.export(network, (2,)).input_range == (0.0, 255.0)
    assert lipkit.export(network, (2,), box=(0.0, 1.0)).input_range == (0.0, 1.0)
    assert lipkit.export(nn.Sequential(nn.Linear(2, 2), network), (2,)).input_range is None  # of the hidden units


def test_multipliers_travel_with_their_module() -> None:
    values = torch.tensor([1.0, 2.0])
    net = Network([nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)], (3,), {1: values})
    outer = Network([nn.Identity(), nn.Flatten(), net], (3,))
    assert {i: m.tolist() for i, m in outer.multipliers().items()} == {2: [1.0, 2.0]}
    values.zero_()
    assert net.multiplier(1).tolist() == [1.0, 2.0]  # type: ignore[union-attr]
    assert net.multiplier(0) is None
    bad: list[dict[int, Tensor]] = [{3: values}, {-1: values}, {0: values[None]}]
    for multipliers in bad:
        with pytest.raises(ShapeError, match="multiplier"):
            Network([nn.ReLU(), nn.ReLU()], (2,), multipliers)


# Torch warns of its own code when it first takes a forward derivative.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_maxmin_has_every_derivative_and_permutes_gradients_of_ties() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(maxmin, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(maxmin, (x,))
    each = torch.func.vmap(torch.func.jacrev(lambda one: maxmin(one[None])[0].flatten()))(x)
    assert torch.equal(each.flatten(2).square().sum(2), torch.ones(2, 12))
    ties = torch.zeros(1, 4, requires_grad=True)
    maxmin(ties).backward(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert ties.grad is not None
    assert sorted(ties.grad[0].tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_maxmin_are_exchanged_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=generator).to(dtype)
    x[0] = 0.0  # ties stay where they are
    g = (torch.randn(40, 8, generator=generator) * 10.0 ** torch.randint(-4, 5, (40, 8), generator=generator)).to(dtype)
    x.requires_grad_()
    maxmin(x).backward(g)
    a, b = x.detach().chunk(2, 1)
    p, q = g.chunk(2, 1)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.cat((torch.where(a >= b, p, q), torch.where(a >= b, q, p)), 1))


@pytest.mark.parametrize(("channels", "moved"), [(16, 1), (16, 2), (12, 2), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_maxmin_and_shift_in_one_pass_are_the_two_to_the_bit(channels: int, moved: int, dtype: torch.dtype) -> None:
    fused, generator = MaxMinShift2d(channels, moved), torch.Generator().manual_seed(0)
    x = torch.randn(3, channels, 4, 3, generator=generator).to(dtype).requires_grad_()
    a, b = x.chunk(2, 1)
    y, apart = fused(x), Shift2d(channels, moved)(torch.cat((torch.maximum(a, b), torch.minimum(a, b)), 1))
    assert torch.equal(y, apart)
    assert torch.equal(fused(x.detach()), apart)
    g = torch.randn(y.shape, generator=generator).to(dtype)
    found = torch.autograd.grad(y, x, g, retain_graph=True)[0]
    assert torch.equal(found, torch.autograd.grad(apart, x, g)[0])
    assert torch.equal(torch.autograd.grad(y, x, torch.stack((g, g)), is_grads_batched=True)[0][1], found)


@pytest.mark.thorough
def test_maxmin_and_shift_in_one_pass_can_be_differentiated_twice_and_are_exported_apart() -> None:
    x = torch.randn(1, 8, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(MaxMinShift2d(8, 1), (x,), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(MaxMinShift2d(8, 1), (x,))
    exported = lipkit.export(nn.Sequential(MaxMinShift2d(8, 1)), (8, 2, 3))
    assert [type(m) for m in exported] == [MaxMin, Shift2d]
    with pytest.raises(ShapeError, match="Shift2d: expected images"):
        MaxMinShift2d(8, 1)(x[:, :6])
