"""Convolutions with few inputs in two parts: values, proofs and refusals, against dense matrices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipkit
import lipkit_check
from lipkit.bounds import circular
from lipkit.conv import circular_conv2d, kernel_symbol
from lipkit.errors import OptionError
from lipkit.integer.quantisation import quantise
from lipkit.layers.cayley import CayleyConv2d
from lipkit.lowering import lipschitz
from lipkit.modules import FourierConv2d, SpreadConv2d, local_error
from lipkit.modules.chains import prove_chain
from lipkit.modules.network import Network
from lipkit.modules.storage import describe
from lipkit.proof.roundoff import FLOAT32, FLOAT64

SHAPES = [(1, 3, 8, 8, (3, 3)), (2, 3, 5, 6, (3, 2)), (3, 5, 9, 10, (2, 3)), (2, 2, 3, 4, (3, 4))]


def spread(cin: int, cout: int, h: int, w: int, kernel: tuple[int, int], dtype: torch.dtype) -> SpreadConv2d:
    first = FourierConv2d.from_symbol(kernel_symbol(torch.randn(cin, cin, 3, 3, dtype=dtype), h, w), h, w, None)
    weight = torch.randn(cout, cin, *kernel, dtype=dtype) / 3
    return SpreadConv2d.from_parts(first, weight, torch.randn(cout, dtype=dtype))


def dense(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The matrix of the linear part, from the layer's own outputs in its dtype."""
    dtype = next(layer.buffers()).dtype
    basis = torch.eye(math.prod(shape), dtype=dtype).view(-1, *shape)
    with torch.no_grad():
        return (layer(basis) - layer(torch.zeros(1, *shape, dtype=dtype))).flatten(1).mT.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_norm_of_the_whole_is_proved(shape: tuple[int, int, int, int, tuple[int, int]], dtype: torch.dtype) -> None:
    torch.manual_seed(sum(shape[:4]))
    layer, image = spread(*shape, dtype), (shape[0], *shape[2:4])
    truth = float(torch.linalg.matrix_norm(dense(layer, image), 2))
    size = float(lipschitz(layer.first, image) * circular(layer.weight, *shape[2:4]))
    eps = torch.finfo(dtype).eps
    found = float(lipschitz(layer, image))
    assert truth - 20 * eps * size <= found <= truth + 1e3 * eps * size + 1e-10
    # The parts alone would say more than that.
    assert found < size


def test_a_stored_transform_that_is_off_is_still_bounded() -> None:
    torch.manual_seed(0)
    layer = spread(1, 2, 4, 4, (2, 2), torch.float64)
    layer.first.transform0.mul_(1.5)
    truth = float(torch.linalg.matrix_norm(dense(layer, (1, 4, 4)), 2))
    assert float(lipschitz(layer, (1, 4, 4))) >= truth * (1 - 1e-13)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("cin", "kernel", "side"), [(1, 3, 8), (3, 3, 33), (1, 2, 9)])
def test_cayley_layers_with_few_inputs_are_exported_in_two_parts(cin: int, kernel: int, side: int, bias: bool) -> None:
    torch.manual_seed(1)
    layer = CayleyConv2d(cin, 4 * cin, kernel, bias=bias, dtype=torch.float64)
    plain, x = lipkit.export(layer, (cin, side, side)), torch.randn(2, cin, side, side, dtype=torch.float64)
    (part,) = plain
    assert type(part) is SpreadConv2d
    torch.testing.assert_close(plain(x), layer(x), atol=1e-13, rtol=0)
    shifted = x.clone()
    plain(x)
    assert torch.equal(x, shifted)
    assert 1 - 1e-13 <= float(lipschitz(plain)) <= 1 + 1e-10
    x.requires_grad_()
    g = torch.randn(2, 4 * cin, side, side, dtype=torch.float64)
    (one,), (two,) = torch.autograd.grad(plain(x), x, g), torch.autograd.grad(layer(x), x, g)
    torch.testing.assert_close(one, two, atol=1e-13, rtol=0)
    (three,) = torch.func.vjp(plain, x.detach())[1](g)
    torch.testing.assert_close(three, two, atol=1e-13, rtol=0)


def test_parts_that_would_lose_digits_are_not_made() -> None:
    torch.manual_seed(1)
    layer = CayleyConv2d(2, 4, 3)
    with torch.no_grad():
        # One input is solved with a matrix of 1, the other with one of 1e6.
        layer.free[:, 0] = 0
        layer.scale.fill_(1e3)
    (part,) = lipkit.export(layer, (2, 8, 8))
    assert type(part) is FourierConv2d
    assert float(lipschitz(part)) <= 1 + 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_float32_loses_is_bounded(shape: tuple[int, int, int, int, tuple[int, int]]) -> None:
    torch.manual_seed(4)
    layer, image = spread(*shape, torch.float32), (shape[0], *shape[2:4])
    x = torch.randn(8, *image)
    with torch.no_grad():
        exact = copy.deepcopy(layer).double()
        want, bound = exact(x.double()), local_error(exact, image, FLOAT32)(x.double()).error.at
        off = (layer(x).double() - want).flatten(1).norm(dim=1)
    assert (off <= bound).all()
    assert (bound <= 1500 * off.max()).all()


@pytest.mark.parametrize("machine", [lipkit_check.Floats, lipkit_check.Integers])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_the_checker_finds_the_same(
    shape: tuple[int, int, int, int, tuple[int, int]], machine: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lipkit_check, "ops", machine())
    torch.manual_seed(5)
    layer, image = spread(*shape, torch.float64), (shape[0], *shape[2:4])
    numbers = lipkit_check.Tensors({name: t.detach().numpy() for name, t in layer.state_dict().items()})
    node = lipkit_check.build(describe(layer), numbers, image)
    truth = float(torch.linalg.matrix_norm(dense(layer, image), 2))
    assert truth * (1 - 1e-12) <= float(node.norm) <= truth * (1 + 1e-7)
    if machine is lipkit_check.Floats:
        x = torch.randn(3, *image, dtype=torch.float64)
        got, error = node.run(x.numpy(), Fraction(0))
        np.testing.assert_allclose(got, layer(x).detach().numpy(), atol=float(error), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_second_part_is_a_circular_convolution(
    shape: tuple[int, int, int, int, tuple[int, int]], dtype: torch.dtype
) -> None:
    torch.manual_seed(6)
    layer, x = spread(*shape, dtype), torch.randn(2, shape[0], *shape[2:4], dtype=dtype)
    expected = circular_conv2d(layer.first(x), layer.weight, layer.bias)
    expected[:, : shape[0]] -= x
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(torch.vmap(layer)(x[:, None])[:, 0], expected)
    # With a gradient and under vmap it is a product.
    torch.testing.assert_close(layer(x.requires_grad_()), expected)


@pytest.mark.parametrize(
    ("first", "outputs", "kernel"),
    [
        (FourierConv2d(2, 2, 4, 4), 3, (3, 3)),
        (FourierConv2d(2, 3, 4, 4, bias=False), 3, (3, 3)),
        (nn.Conv2d(2, 2, 1, bias=False), 3, (3, 3)),
        (FourierConv2d(2, 2, 4, 4, bias=False), 1, (3, 3)),
        (FourierConv2d(2, 2, 4, 4, bias=False), 3, (5, 3)),
        (FourierConv2d(2, 2, 4, 4, bias=False), 3, (0, 3)),
    ],
)
def test_parts_that_do_not_fit_are_refused(first: nn.Module, outputs: int, kernel: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match="SpreadConv2d: expected a"):
        SpreadConv2d(first, outputs, kernel)


def other_weight(layer: SpreadConv2d) -> None:
    layer.weight = torch.cat([layer.weight, layer.weight[:1]])


def other_outputs(layer: SpreadConv2d) -> None:
    layer.out_channels = 2


def bias_inside(layer: SpreadConv2d) -> None:
    layer.first = FourierConv2d(1, 1, 8, 8).double()


def late_bias(layer: SpreadConv2d) -> None:
    layer.first.bias = torch.ones(1, dtype=torch.float64)


def other_first(layer: SpreadConv2d) -> None:
    layer.first = nn.Conv2d(1, 1, 1, bias=False).double()


@pytest.mark.parametrize("alter", [other_weight, other_outputs, bias_inside, late_bias, other_first])
def test_nothing_is_proved_of_parts_that_were_replaced(alter: Callable[[SpreadConv2d], None]) -> None:
    torch.manual_seed(7)
    layer = spread(1, 3, 8, 8, (3, 3), torch.float64)
    network = Network([layer, nn.Flatten(), nn.Linear(192, 2).double()], (1, 8, 8)).eval()
    network.input_range = (0.0, 1.0)
    proof = prove_chain(network, FLOAT64)
    alter(layer)
    with pytest.raises(OptionError, match="SpreadConv2d: expected a"):
        lipschitz(layer, (1, 8, 8))
    with pytest.raises(OptionError, match="SpreadConv2d: expected a"):
        local_error(layer, (1, 8, 8), FLOAT32)
    with pytest.raises(OptionError, match="SpreadConv2d: expected a"):
        quantise(network, proof)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_bias_that_is_no_number_bounds_nothing(number: float) -> None:
    layer = spread(1, 3, 8, 8, (3, 3), torch.float64)
    layer.bias[1] = number
    assert float(lipschitz(layer, (1, 8, 8))) == math.inf


def test_weights_with_gradients_have_the_same_proofs() -> None:
    torch.manual_seed(8)
    layer, image = spread(2, 3, 5, 6, (3, 2), torch.float64), (2, 5, 6)
    x = torch.randn(2, *image, dtype=torch.float64)
    before = float(lipschitz(layer, image)), local_error(layer, image, FLOAT32)(x).error.at
    layer.weight.requires_grad_()
    layer.bias.requires_grad_()
    after = float(lipschitz(layer, image).detach()), local_error(layer, image, FLOAT32)(x).error.at
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])


def test_a_kernel_size_of_one_number_is_refused() -> None:
    with pytest.raises(OptionError, match=r"expected at least 2 outputs and a kernel \(kh, kw\)"):
        SpreadConv2d(FourierConv2d(2, 2, 4, 4, bias=False), 3, 3)
