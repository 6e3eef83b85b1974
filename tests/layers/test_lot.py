"""LOT against scipy's polar factor of the symbol at each frequency."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import polar

from lipkit import export, lipschitz
from lipkit.errors import OptionError, ShapeError
from lipkit.layers.lot import LotConv2d
from lipkit.linalg import ORTHOGONALIZE, bjorck, cayley
from lipkit.modules import FourierConv2d
from lipkit.testing import dense_matrix

# in, out, kernel, stride, height, width
LAYERS = [
    (3, 5, 3, 1, 6, 6),
    (5, 3, 3, 1, 5, 7),
    (2, 6, 3, 2, 6, 8),
    (3, 5, 3, 2, 6, 6),
    (1, 9, 3, 3, 6, 3),
    (3, 3, 5, 1, 3, 4),
    (4, 4, 2, 1, 1, 1),
    (3, 4, (2, 5), 1, 4, 6),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_singular_values_and_export(sizes, dtype: torch.dtype) -> None:
    cin, cout, k, s, h, w = sizes
    layer = LotConv2d(cin, cout, k, stride=s, dtype=dtype)
    values = np.linalg.svd(dense_matrix(layer, (cin, h, w), dtype), compute_uv=False)
    np.testing.assert_allclose(values, 1, atol=1e-5 if dtype == torch.float32 else 1e-13)
    plain = export(layer, (cin, h, w))
    x = torch.randn(3, cin, h, w, dtype=dtype)
    torch.testing.assert_close(plain(x), layer(x).detach(), rtol=0, atol=2e-5 if dtype == torch.float32 else 1e-12)
    assert type(plain[-1]) is FourierConv2d
    assert values.max() <= float(lipschitz(plain)) * (1 + 64 * torch.finfo(dtype).eps)
    assert float(lipschitz(plain)) <= 1 + 1e-5


@pytest.mark.parametrize("channels", [(2, 4), (4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("image", [(4, 6), (5, 3), (2, 1)], ids=str)
def test_equals_the_polar_factor_at_each_frequency(image: tuple[int, int], channels: tuple[int, int]) -> None:
    cin, cout = channels
    h, w = image
    layer = LotConv2d(cin, cout, 3, bias=False, dtype=torch.float64)
    x = torch.randn(2, cin, h, w, dtype=torch.float64)
    kernel, hat = layer.free.detach().numpy(), np.fft.fft2(x.numpy())
    out = np.zeros((2, cout, h, w), dtype=complex)
    for f1 in range(h):
        for f2 in range(w):
            wave = np.exp(2j * np.pi * (f1 / h * np.arange(-1, 2)[:, None] + f2 / w * np.arange(-1, 2)))
            v = (kernel * wave).sum((-2, -1))
            # cout > cin: V (V* V)^(-1/2); else (V V*)^(-1/2) V.
            unitary, _ = polar(v, side="right") if cout > cin else polar(v, side="left")
            out[:, :, f1, f2] = hat[:, :, f1, f2] @ unitary.T
    expected = np.fft.ifft2(out)
    np.testing.assert_allclose(expected.imag, 0, atol=1e-12)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected.real, atol=1e-12)


def test_starts_well_conditioned() -> None:
    for cin, cout in ((16, 16), (3, 32), (32, 4)):
        layer = LotConv2d(cin, cout, 3, orthogonalize="bjorck")
        # Twenty iterations reach 1 from a condition number of at most about 10 with a wide margin.
        values = np.linalg.svd(dense_matrix(layer, (cin, 4, 4), torch.float32), compute_uv=False)
        np.testing.assert_allclose(values, 1, atol=1e-5)


@pytest.mark.parametrize("name", ORTHOGONALIZE)
def test_every_named_function_gives_a_contraction(name: str) -> None:
    layer = LotConv2d(3, 4, 3, orthogonalize=name, dtype=torch.float64)
    with torch.no_grad():
        layer.free.copy_(5 * torch.randn_like(layer.free))
    values = np.linalg.svd(dense_matrix(layer, (3, 4, 5)), compute_uv=False)
    assert 0.99 <= values.max() <= float(lipschitz(layer)) + 1e-12
    assert values.max() <= float(lipschitz(export(layer, (3, 4, 5)))) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("function", "smallest", "largest"),
    [(partial(bjorck, iterations=1), 0.3, 1.0), (lambda w: 1.3 * cayley(w), 1.3, 1.3)],
    ids=["unconverged", "too large"],
)
def test_nothing_is_assumed_about_other_functions(function, smallest: float, largest: float) -> None:
    layer = LotConv2d(3, 4, 3, orthogonalize=function, dtype=torch.float64)
    with torch.no_grad():
        layer.free.copy_(torch.randn_like(layer.free))
    values = np.linalg.svd(dense_matrix(layer, (3, 4, 5)), compute_uv=False)
    norm = values.max()
    assert values.min() <= smallest * (1 + 1e-12)
    assert largest - 0.3 <= norm <= largest * (1 + 1e-12)
    bound = float(lipschitz(layer, (3, 4, 5)).detach())
    assert norm * (1 - 1e-13) <= bound <= norm * (1 + 1e-9)
    assert norm * (1 - 1e-13) <= float(lipschitz(export(layer, (3, 4, 5)))) <= norm * (1 + 1e-9)
    with pytest.raises(ShapeError, match=r"expected an input_shape, .*got None"):
        lipschitz(layer)


@pytest.mark.parametrize("name", ["polar", "bjorck", "newton_schulz"])
def test_zero_parameters(name: str) -> None:
    layer = LotConv2d(2, 3, 3, orthogonalize=name)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    y = layer(torch.randn(2, 2, 4, 4))
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_an_ensemble_of_wide_layers_under_vmap() -> None:
    torch.manual_seed(0)
    layer, x = LotConv2d(3, 2, 3), torch.randn(2, 3, 4, 5)
    free = torch.stack((layer.free, 2 * layer.free - 1)).detach()

    def outputs(free: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"free": free}, (x,))

    each = torch.stack([outputs(one) for one in free])
    assert (torch.func.vmap(outputs)(free) - each).abs().max() < 1e-5


def test_refusals() -> None:
    with pytest.raises(OptionError, match=r"orthogonalize: expected one of .*got 'qr'"):
        LotConv2d(3, 3, 3, orthogonalize="qr")
    with pytest.raises(OptionError, match=r"expected 'circular', got 'zeros': use lipkit.layers.NativeConv2d"):
        LotConv2d(3, 3, 3, padding_mode="zeros")
    with pytest.raises(ShapeError, match=r"orthogonalize: expected a result of shape .* got "):
        LotConv2d(2, 3, 3, orthogonalize=lambda w: w.mT)(torch.zeros(1, 2, 4, 4))
