"""Cayley layers against their dense matrix: the accuracy that the library promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lipkit.layers import CayleyConv2d, CayleyLinear
from lipkit.layers.cayley import rescaled
from lipkit.testing import dense_matrix

CHANNELS = ((3, 8), (8, 8), (8, 3))
SIZES = ((1, 1), (7, 7), (8, 8), (5, 9))
KERNELS = (1, 2, 3, 5)


def _spread(layer: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """The largest distance of a singular value from 1."""
    values = np.linalg.svd(dense_matrix(layer, shape, dtype), compute_uv=False)
    return float(np.abs(values - 1).max())


def _conv(cin: int, cout: int, kernel: int, dtype: torch.dtype, scale: float = 1.0) -> CayleyConv2d:
    torch.manual_seed(cin + 10 * cout + 100 * kernel)
    layer = CayleyConv2d(cin, cout, kernel, dtype=dtype)
    with torch.no_grad():
        layer.scale.mul_(scale)
    return layer


@pytest.mark.usual(48)
@pytest.mark.parametrize(
    ("dtype", "scale", "allowed"),
    [(torch.float32, 1.0, 1e-5), (torch.float64, 1.0, 1e-12), (torch.float32, 1000.0, 5e-4)],
    ids=["float32", "float64", "float32, scale x 1000"],
)
@pytest.mark.parametrize("channels", CHANNELS, ids=lambda c: f"{c[0]}->{c[1]}")
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_singular_value_is_1(
    channels: tuple[int, int], size: tuple[int, int], kernel: int, dtype: torch.dtype, scale: float, allowed: float
) -> None:
    cin, cout = channels
    layer = _conv(cin, cout, kernel, dtype, scale)
    assert _spread(layer, (cin, *size), dtype) <= allowed


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (8, 8), (1, 1)], ids=str)
def test_a_dense_layer_is_semi_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert _spread(CayleyLinear(*shape, dtype=torch.float64), (shape[0],), torch.float64) <= 1e-14


def _by_fft(layer: CayleyConv2d, x: Tensor) -> Tensor:
    """[Cayley] as printed: rfft2 of the zero-padded kernel, transform at each frequency, irfft2 with the size."""
    h, w = x.shape[-2:]
    kernel = layer.free * layer.scale / layer.free.norm()
    k = kernel.shape[-1]
    padded = kernel.new_zeros(*kernel.shape[:2], h, w)
    padded[..., :k, :k] = kernel
    centre = (k - 1) // 2
    raw = torch.fft.rfft2(padded.roll((-centre, -centre), (-2, -1))).conj().permute(2, 3, 0, 1)
    tall = raw if raw.shape[-2] >= raw.shape[-1] else raw.mH
    n = tall.shape[-1]
    u, v, eye = tall[..., :n, :], tall[..., n:, :], torch.eye(n, dtype=raw.dtype)
    z = u - u.mH + v.mH @ v
    q = torch.cat((torch.linalg.solve(eye + z, eye - z), -2 * v @ torch.linalg.inv(eye + z)), -2)
    q = q if raw.shape[-2] >= raw.shape[-1] else q.mH
    y = torch.einsum("hwoi,bihw->bohw", q, torch.fft.rfft2(x))
    assert layer.bias is not None
    return torch.fft.irfft2(y, s=(h, w)) + layer.bias[:, None, None]


@pytest.mark.parametrize("channels", CHANNELS, ids=lambda c: f"{c[0]}->{c[1]}")
@pytest.mark.parametrize("size", [(8, 8), (7, 7), (5, 9), (6, 5)], ids=str)
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_it_is_the_paper_formula(channels: tuple[int, int], size: tuple[int, int], kernel: int) -> None:
    layer = _conv(*channels, kernel, torch.float64)
    x = torch.randn(2, channels[0], *size, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(layer(x), _by_fft(layer, x), rtol=0, atol=1e-12)


def test_a_rescaled_weight_has_all_its_derivatives() -> None:
    free = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rescaled(free, scale), 1.5 * free / free.norm())
    assert torch.autograd.gradcheck(rescaled, (free, scale))
    assert torch.autograd.gradgradcheck(rescaled, (free, scale))
    many = torch.stack((free, 2 * free)).detach()
    each = torch.func.vmap(torch.func.grad(lambda f: rescaled(f, scale).square().sum()))(many)
    torch.testing.assert_close(each, torch.zeros_like(many), atol=1e-12, rtol=0)  # its norm is that of the scale


def test_a_zero_weight_has_a_finite_gradient() -> None:
    free, scale = torch.zeros(2, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    g = torch.ones(2, 3)
    for_free, for_scale = torch.autograd.grad(rescaled(free, scale), (free, scale), g)
    # By torch's own operations: the norm counts as 1e-12, and has no gradient.
    made = free * (scale / free.norm().clamp_min(1e-12))
    torch.testing.assert_close((for_free, for_scale), torch.autograd.grad(made, (free, scale), g))


@pytest.mark.thorough
def test_norms_are_kept_before_and_after_training() -> None:
    torch.manual_seed(0)
    layer = CayleyConv2d(3, 16, 3, bias=False)
    x = torch.randn(8, 3, 12, 12)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(5):
        ratio = layer(x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
        assert float((ratio.detach() - 1).abs().max()) < 1e-5
        optimiser.zero_grad()
        (layer(x) - 1).square().mean().backward()
        optimiser.step()


def test_stride_is_downsampling_then_the_same_layer() -> None:
    torch.manual_seed(0)
    strided = CayleyConv2d(2, 5, 3, stride=2, dtype=torch.float64)
    inner = CayleyConv2d(8, 5, 3, dtype=torch.float64)
    inner.load_state_dict(strided.state_dict())
    x = torch.randn(2, 2, 6, 10, dtype=torch.float64)
    patches = torch.nn.functional.pixel_unshuffle(x, 2)
    assert torch.allclose(strided(x), inner(patches), rtol=0, atol=1e-14)
