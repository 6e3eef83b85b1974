"""Stiefel layers: the laws, what they compute, and a constant that is that of the numbers as they are."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import StiefelConv2d, StiefelLinear, after_step
from lipkit.lowering import export, lipschitz
from lipkit.testing import check_layer

LAWS = (1, 2, 3, 4, 5, 6, 7, 9, 10, 11)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 5), (5, 7), (7, 4)])
def test_dense_laws(shape: tuple[int, int], dtype: torch.dtype) -> None:
    make = partial(StiefelLinear, *shape)
    check_layer(make, input_shape=(shape[0],), dtype=dtype, laws=LAWS, claim="none", attained=0.999)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("cin", "cout", "stride"), [(3, 4, 1), (2, 8, 2), (3, 2, 1)])
def test_convolution_laws(cin: int, cout: int, stride: int, dtype: torch.dtype) -> None:
    make = partial(StiefelConv2d, cin, cout, 1, stride)
    shape = (cin, 2 * stride, 3 * stride)
    check_layer(make, input_shape=shape, dtype=dtype, laws=LAWS, claim="none", attained=0.999)


def test_they_multiply_by_their_parameter() -> None:
    x = torch.rand(2, 3, 4, 6)
    conv, dense = StiefelConv2d(3, 8, 1, stride=2), StiefelLinear(6, 4)
    expected = torch.einsum("oc,bchw->bohw", conv.free.flatten(1), F.pixel_unshuffle(x, 2))
    torch.testing.assert_close(conv(x), expected + conv.bias[:, None, None])
    torch.testing.assert_close(dense(x), F.linear(x, dense.free, dense.bias))
    plain = export(conv, (3, 4, 6))
    assert [type(m) for m in plain] == [nn.Conv2d]
    torch.testing.assert_close(plain(x), conv(x))


@pytest.mark.parametrize("layer", [StiefelLinear(6, 4), StiefelConv2d(6, 4, 1)])
def test_off_the_manifold_the_constant_says_so_and_after_a_step_it_is_1(layer: nn.Module) -> None:
    shape = (6,) if isinstance(layer, StiefelLinear) else (6, 2, 2)
    with torch.no_grad():
        layer.free.mul_(3).add_(0.1)
    largest = np.linalg.svd(layer.free.detach().flatten(1).double().numpy(), compute_uv=False).max()
    assert largest <= float(lipschitz(layer, shape).detach()) <= largest * (1 + 1e-5)
    assert largest > 2.9
    assert after_step(nn.Sequential(layer), shape) == 1
    values = np.linalg.svd(layer.free.detach().flatten(1).double().numpy(), compute_uv=False)
    np.testing.assert_allclose(values, 1, atol=1e-6)


def test_larger_kernels_are_refused() -> None:
    with pytest.raises(OptionError, match=r"kernel_size: expected 1, got \(3, 3\)"):
        StiefelConv2d(3, 4, 3)
