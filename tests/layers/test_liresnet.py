"""LiResNet and Cholesky layers: contractions by dense SVD, and what they compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipkit import export, lipschitz
from lipkit.bounds import circular, symbol_sup
from lipkit.errors import OptionError
from lipkit.layers import CholeskyConv2d, CholeskyLinear, LiResConv2d, base
from lipkit.testing import dense_matrix


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.thorough
@pytest.mark.usual(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize(
    "sizes",
    [(3, 5, 3, 1, 6, 6), (5, 3, 3, 1, 5, 7), (2, 6, 3, 2, 6, 8), (3, 3, 5, 1, 3, 4), (4, 4, 1, 2, 4, 2)],
    ids=str,
)
def test_is_a_contraction_that_nearly_reaches_1(sizes: tuple[int, ...], mode: str, dtype: torch.dtype) -> None:
    cin, cout, k, s, h, w = sizes
    layer = LiResConv2d(cin, cout, k, stride=s, padding_mode=mode, dtype=dtype)
    values = np.linalg.svd(dense_matrix(layer, (cin, h, w), dtype), compute_uv=False)
    exact = 1e-5 if dtype == torch.float32 else 1e-13
    # On a few pixels no frequency need be near that of the supremum.
    assert (0.75 if mode == "circular" else 0.5) <= values.max() <= 1 + exact
    plain = export(layer, (cin, h, w))
    assert plain[-1].padding_mode == mode or (k == 1 and mode == "circular")
    x = torch.randn(3, cin, h, w, dtype=dtype)
    torch.testing.assert_close(plain(x), layer(x).detach(), rtol=0, atol=exact)
    assert values.max() <= float(lipschitz(plain)) * (1 + 64 * torch.finfo(dtype).eps) <= 1 + 1e-5


def test_computes_identity_plus_noise_over_a_bound_of_its_norm() -> None:
    layer = LiResConv2d(4, 4, 3, depth=4, dtype=torch.float64)
    kernel = (layer.scale * layer.free / 2).detach()
    kernel[range(4), range(4), 1, 1] += 1
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    by_hand = F.conv2d(F.pad(x, [1, 1, 1, 1], mode="circular"), kernel)
    y = (layer(x) - layer.bias[:, None, None]).detach()
    beta = float((by_hand / y).mean())
    torch.testing.assert_close(y * beta, by_hand)
    norm = float(circular(kernel, 6, 5))
    # On a large image the norm is within a percent of the supremum over all frequencies.
    large = float(circular(kernel, 60, 60))
    assert norm * (1 - 1e-12) <= large * (1 - 1e-12) <= beta <= large * 1.03


def test_the_gradient_sees_the_bound() -> None:
    layer = LiResConv2d(2, 2, 3, bias=False, dtype=torch.float64)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)

    def grown(factor: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"free": layer.free.detach() * factor}, (x,)).square().sum()

    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(grown(one), one)
    h = 1e-6
    with torch.no_grad():
        expected = (grown(one + h) - grown(one - h)) / (2 * h)
    # the derivative of the norm; the share above it that is proved moves a little with the kernel
    assert float(slope) == pytest.approx(float(expected), rel=1e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize(("cin", "cout"), [(64, 70), (16, 64), (5, 4)])  # the second after a downsampling
def test_training_takes_the_norm_that_evaluation_proves(cin: int, cout: int, mode: str) -> None:
    layer = LiResConv2d(cin, cout, 3, stride=1 + (cin == 16), padding_mode=mode)
    x = torch.randn(2, cin, 4, 4)
    outputs, gradients = [], []
    for training in (True, False):
        y = layer.train(training)(x)
        outputs.append(y.detach())
        gradients.append(torch.autograd.grad(y.square().sum(), (layer.free, layer.scale)))
    assert torch.equal(*outputs)
    assert all(map(torch.equal, *gradients))
    assert lipschitz(layer.train()) == lipschitz(layer.eval()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_a_missed_norm_in_training_is_seen_by_the_bound(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LiResConv2d(3, 3, 3, padding_mode=mode, dtype=torch.float64)
    proved, x = layer.kernel(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    monkeypatch.setattr(base, "WIDE", 3)
    monkeypatch.setattr(base, "symbol_sup_estimate", lambda k, tolerance: symbol_sup(k, tolerance=tolerance) / 2)
    bound = float(lipschitz(layer.train()))
    assert bound == pytest.approx(2, rel=0.02)
    values = np.linalg.svd(dense_matrix(layer, (3, 6, 6)), compute_uv=False)
    assert 1.4 < values.max() <= bound
    plain = export(layer, (3, 4, 4))
    assert torch.equal(plain[-1].weight, proved)
    assert float(lipschitz(plain)) <= 1 + 1e-12
    assert torch.allclose(plain(x), layer.eval()(x), atol=1e-12)
    assert lipschitz(layer) == 1


@pytest.mark.parametrize("sizes", [(5, 5), (4, 7), (7, 4)], ids=str)
def test_cholesky_layers_are_contractions(sizes: tuple[int, int]) -> None:
    layer = CholeskyLinear(*sizes, dtype=torch.float64)
    values = np.linalg.svd(layer.weight().detach().numpy(), compute_uv=False)
    np.testing.assert_allclose(values, 1 / np.sqrt(1.001), rtol=1e-12)  # semi-orthogonal parameters at birth
    cin, cout = sizes
    conv = CholeskyConv2d(cin, cout, 1, stride=2, ridge=0.1, dtype=torch.float64)
    assert [type(m) for m in export(conv, (cin, 4, 6))] == [nn.Conv2d]
    values = np.linalg.svd(dense_matrix(conv, (cin, 4, 6)), compute_uv=False)
    np.testing.assert_allclose(values, 1 / np.sqrt(1.1), rtol=1e-12)
    wide = CholeskyConv2d(cin, cout, 3, dtype=torch.float64)
    assert 0.2 < np.linalg.svd(dense_matrix(wide, (cin, 4, 5)), compute_uv=False).max() < 1


def test_refusals() -> None:
    with pytest.raises(OptionError, match=r"ridge: expected a positive finite number, got -1"):
        CholeskyLinear(2, 2, ridge=-1)
    with pytest.raises(OptionError, match=r"padding_mode: expected 'circular', got 'zeros'"):
        LiResConv2d(2, 2, 2, padding_mode="zeros")  # even kernels have no centre
    with pytest.raises(OptionError, match=r"depth: .* got 0"):
        LiResConv2d(2, 2, 3, depth=0)
