"""OSSN: the bound is proved from the numbers, never below the true norm, and the norm is close to 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import OssnConv2d, families
from lipkit.lowering import export, lipschitz
from lipkit.testing import check_layer, dense_matrix

LAYERS = [(3, 8, 3, 1), (8, 3, 3, 1), (2, 9, 3, 3), (3, 12, 2, 2)]


def norm_of(layer, shape):
    with torch.no_grad():
        return float(np.linalg.norm(dense_matrix(layer, shape, layer.free.dtype), 2))


@pytest.mark.thorough
@pytest.mark.parametrize(("cin", "cout", "k", "stride"), LAYERS)
def test_obeys_the_laws(cin, cout, k, stride):
    family = families.get("ossn")

    def make(**named):
        return family.conv(**{"in_channels": cin, "out_channels": cout, "kernel_size": k, "stride": stride, **named})

    shapes = [(cin, 2 * stride, stride), (cin, stride, stride), (cin, 2 * stride, 3 * stride)]
    check_layer(
        make,
        input_shape=shapes,
        claim=family.claim,
        smooth=family.smooth,
        laws=(1, 2, 3, 9, 10, 11),  # the others do not depend on the shape: tests/laws
    )


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize(("cin", "cout", "k", "stride"), LAYERS)
def test_bound_is_never_below_the_true_norm(cin, cout, k, stride, iterations, dtype):
    eps = torch.finfo(dtype).eps
    torch.manual_seed(0)
    layer = OssnConv2d(cin, cout, k, stride=stride, iterations=iterations, dtype=dtype)
    torch.nn.init.normal_(layer.free)
    for shape in [(cin, 2 * stride, stride), (cin, 4 * stride, 3 * stride)]:
        truth = norm_of(layer, shape)
        bound = lipschitz(layer, shape).item()
        assert truth <= bound * (1 + 50 * eps)
        assert bound <= truth * (1 + 50 * eps + 1e-9)
        assert truth >= 1 - 100 * eps
        assert lipschitz(export(layer, shape)).item() <= bound * (1 + 1e-9)


@pytest.mark.thorough
def test_norm_is_close_to_one_after_ten_steps():
    for seed in range(5):
        torch.manual_seed(seed)
        layer = OssnConv2d(56, 56, 3)
        torch.nn.init.normal_(layer.free)
        assert 1 - 1e-5 < lipschitz(layer, (56, 8, 8)).item() < 1.02


def test_norm_is_close_to_one_for_a_kernel_like_a_trained_one():
    torch.manual_seed(0)
    values = torch.tensor([1.31, 1.24, 1.23, 1.22, *[1.1] * 12], dtype=torch.float64)
    u, v = (torch.linalg.qr(torch.randn(n, 16, dtype=torch.float64))[0] for n in (16, 32))
    layer = OssnConv2d(32, 16, 1, dtype=torch.float64)
    with torch.no_grad():
        layer.free.copy_(((u * values) @ v.mT)[:, :, None, None])
    assert 1 - 1e-9 < lipschitz(layer, (32, 4, 4)).item() < 1.02


def test_norm_is_one_with_few_channels():
    torch.manual_seed(0)
    layer = OssnConv2d(3, 16, 3, iterations=1)
    torch.nn.init.normal_(layer.free)
    assert abs(lipschitz(layer, (3, 8, 8)).item() - 1) < 1e-5


@pytest.mark.thorough
def test_fewer_steps_leave_a_larger_norm():
    torch.manual_seed(0)
    bounds = []
    for iterations in (1, 4, 40):
        layer = OssnConv2d(56, 56, 3, iterations=iterations)
        with torch.no_grad():
            layer.free.copy_(torch.randn(56, 56, 3, 3, generator=torch.Generator().manual_seed(3)))
        bounds.append(lipschitz(layer, (56, 9, 9)).item())
    assert bounds[0] > bounds[1] > bounds[2] > 1 - 1e-5
    assert bounds[2] < 1.001


def test_starts_with_all_singular_values_one():
    layer = OssnConv2d(3, 5, 3, dtype=torch.float64)
    with torch.no_grad():
        values = np.linalg.svd(dense_matrix(layer, (3, 4, 5)), compute_uv=False)
    assert np.abs(values - 1).max() < 1e-12


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e15, 1e30])
def test_the_scale_of_the_kernel_does_not_matter(scale):
    torch.manual_seed(0)
    layer, other = OssnConv2d(2, 3, 3, bias=False), OssnConv2d(2, 3, 3, bias=False)
    torch.nn.init.normal_(layer.free)
    with torch.no_grad():
        other.free.copy_(layer.free * scale)
    x = torch.randn(2, 2, 5, 5)
    assert torch.allclose(layer(x), other(x), atol=1e-5)


def test_bound_without_an_image_size_is_refused():
    with pytest.raises(ShapeError, match=r"expected an input_shape .*, got None"):
        lipschitz(OssnConv2d(2, 3, 3))


def test_refusals():
    with pytest.raises(OptionError, match="iterations"):
        OssnConv2d(2, 3, 3, iterations=0)
