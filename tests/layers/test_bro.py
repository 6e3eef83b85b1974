"""BRO against numpy's pseudo-inverse at each frequency, and its dense singular values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit import export, lipschitz
from lipkit.errors import OptionError
from lipkit.layers import BroConv2d, BroLinear, LiResConv2d
from lipkit.modules import FourierConv2d
from lipkit.testing import dense_matrix

# in, out, kernel, stride, height, width
LAYERS = [
    (3, 5, 3, 1, 6, 6),
    (5, 3, 3, 1, 5, 7),
    (2, 6, 3, 2, 6, 8),
    (3, 5, 1, 2, 6, 6),
    (3, 3, 5, 1, 3, 4),
    (4, 4, 2, 1, 1, 1),
    (3, 4, (2, 5), 1, 4, 6),
    (1, 1, 3, 1, 4, 5),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_singular_values_and_export(sizes, dtype: torch.dtype) -> None:
    cin, cout, k, s, h, w = sizes
    layer = BroConv2d(cin, cout, k, stride=s, dtype=dtype)
    values = np.linalg.svd(dense_matrix(layer, (cin, h, w), dtype), compute_uv=False)
    np.testing.assert_allclose(values, 1, atol=1e-5 if dtype == torch.float32 else 1e-13)
    plain = export(layer, (cin, h, w))
    x = torch.randn(3, cin, h, w, dtype=dtype)
    torch.testing.assert_close(plain(x), layer(x).detach(), rtol=0, atol=2e-5 if dtype == torch.float32 else 1e-12)
    assert (type(plain[-1]) is FourierConv2d) == (k != 1)
    assert values.max() <= float(lipschitz(plain)) * (1 + 64 * torch.finfo(dtype).eps)
    assert float(lipschitz(plain)) <= 1 + 1e-5


@pytest.mark.parametrize("channels", [(2, 4), (4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("image", [(4, 6), (5, 3), (2, 1)], ids=str)
def test_reflects_the_space_of_v_at_each_frequency(image: tuple[int, int], channels: tuple[int, int]) -> None:
    (cin, cout), (h, w) = channels, image
    layer = BroConv2d(cin, cout, 3, bias=False, depth=2, dtype=torch.float64)
    x = torch.randn(2, cin, h, w, dtype=torch.float64)
    kernel = (layer.scale * layer.free / 2**0.5).detach().numpy()
    kernel[range(layer.rank), range(layer.rank), 1, 1] += 1
    hat, out = np.fft.fft2(x.numpy()), np.zeros((2, cout, h, w), dtype=complex)
    for f1 in range(h):
        for f2 in range(w):
            wave = np.exp(2j * np.pi * (f1 / h * np.arange(-1, 2)[:, None] + f2 / w * np.arange(-1, 2)))
            v = (kernel * wave).sum((-2, -1))
            reflector = np.eye(len(v)) - 2 * v @ np.linalg.pinv(v)
            out[:, :, f1, f2] = hat[:, :, f1, f2] @ reflector[:cout, :cin].T
    expected = np.fft.ifft2(out)
    np.testing.assert_allclose(expected.imag, 0, atol=1e-12)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected.real, atol=1e-12)


@pytest.mark.parametrize("sizes", [(8, 5, 3, 1, 5, 4), (5, 8, 3, 1, 4, 4), (2, 8, 3, 2, 6, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_small_batches_are_reflected_as_large_ones_are_multiplied(sizes, dtype: torch.dtype) -> None:
    cin, cout, k, s, h, w = sizes
    layer = BroConv2d(cin, cout, k, stride=s, dtype=dtype)
    exact = 1e-5 if dtype == torch.float32 else 1e-12
    x, found = torch.randn(5, cin, h, w, dtype=dtype), []
    for parts in (x[:, None], x[None]):  # one image, then five, at a time
        y = torch.cat([layer(part) for part in parts])
        found.append((y, *torch.autograd.grad(y.square().sum() + y[0].sum(), (layer.free, layer.scale, layer.bias))))
    for one, five in zip(*found, strict=True):
        torch.testing.assert_close(one, five, rtol=10 * exact, atol=10 * exact)


def test_a_square_layer_is_an_involution_with_as_many_reflections_as_its_rank() -> None:
    layer = BroConv2d(6, 6, 3, rank=2, bias=False, dtype=torch.float64)
    matrix = dense_matrix(layer, (6, 3, 4))
    np.testing.assert_allclose(matrix @ matrix, np.eye(72), atol=1e-12)
    assert np.trace(matrix) == pytest.approx((6 - 2 * 2) * 12, abs=1e-10)
    dense = BroLinear(6, 6, rank=2, bias=False, dtype=torch.float64).weight().detach()
    assert float(torch.trace(dense)) == pytest.approx(2, abs=1e-12)


@pytest.mark.parametrize("sizes", [(5, 5), (4, 7), (7, 4), (1, 1)], ids=str)
def test_dense_layers_are_orthogonal(sizes: tuple[int, int]) -> None:
    layer = BroLinear(*sizes, dtype=torch.float64)
    values = np.linalg.svd(layer.weight().detach().numpy(), compute_uv=False)
    np.testing.assert_allclose(values, 1, atol=1e-14)
    assert layer.rank == max(1, max(sizes) // 2)


def test_starts_near_the_identity_and_nearer_in_deeper_networks() -> None:
    def kernel(layer: LiResConv2d, noise: float, scale: float) -> torch.Tensor:
        layer.free.data.fill_(noise)
        layer.scale.data.fill_(scale)
        return layer.directions().detach()

    zero = kernel(LiResConv2d(2, 4, 3), 0.0, 1.0)
    assert float(zero.sum()) == 2 == float(zero[[0, 1], [0, 1], 1, 1].sum())
    noise = [kernel(LiResConv2d(2, 2, 1, depth=d), 1.0, 3.0) - torch.eye(2)[:, :, None, None] for d in (1, 9)]
    torch.testing.assert_close(noise[0], 3 * noise[1])
    torch.manual_seed(0)
    assert float(BroConv2d(16, 16, 3).free.detach().std()) == pytest.approx(1 / 12, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rank": 5}, "rank: expected at most 4, below the 5"), ({"rank": 0}, "rank: .* got 0"), ({"depth": 0}, "depth")],
)
def test_refusals(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BroConv2d(3, 5, 3, **options)
    with pytest.raises(OptionError, match=message):
        BroLinear(3, 5, **options)
