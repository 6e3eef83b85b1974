"""SOC against scipy's exponential of the dense skew matrix; its truncation error two-sided."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from lipkit import export, lipschitz
from lipkit.bounds import symbol_sup
from lipkit.conv import adjoint
from lipkit.errors import OptionError
from lipkit.layers import soc
from lipkit.layers.soc import SocConv2d, reshaped_norm
from lipkit.linalg.exponential import gram_norm
from lipkit.modules import FourierConv2d, TaylorConv2d, load, save
from lipkit.modules.fourier import _taylor
from lipkit.testing import check_layer, dense_matrix

# in, out, kernel, stride, height, width
LAYERS = [
    (3, 5, 3, 1, 6, 6),
    (5, 3, 3, 1, 5, 7),
    (2, 6, 3, 2, 6, 8),
    (1, 9, 3, 3, 6, 3),
    (3, 3, 5, 1, 3, 4),
    (4, 4, 3, 1, 1, 1),
    (3, 4, (3, 5), 1, 4, 6),
]
each_mode = pytest.mark.parametrize("mode", ["circular", "zeros"])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def singular_values(layer: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    return np.linalg.svd(dense_matrix(layer, shape, dtype), compute_uv=False)


@each_mode
@pytest.mark.usual(14)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_singular_values_bound_and_export(sizes, dtype: torch.dtype, mode: str) -> None:
    cin, cout, k, s, h, w = sizes
    layer = SocConv2d(cin, cout, k, stride=s, padding_mode=mode, dtype=dtype)
    rounding = 64 * torch.finfo(dtype).eps
    for training, below_one in ((True, 1e-3), (False, 2e-8)):
        values = singular_values(layer.train(training), (cin, h, w), dtype)
        bound = float(lipschitz(layer))
        assert values.max() <= bound * (1 + rounding)
        assert values.min() >= 1 - rounding
        assert bound <= 1 + below_one
    plain = export(layer, (cin, h, w))
    x = torch.randn(3, cin, h, w, dtype=dtype)
    torch.testing.assert_close(plain(x), layer(x).detach(), rtol=rounding, atol=rounding)
    assert type(plain[-1]) is (FourierConv2d if mode == "circular" else TaylorConv2d)
    proved = float(lipschitz(plain))
    assert values.max() <= proved * (1 + rounding)
    assert proved <= bound * (1 + rounding)
    assert not any(p.requires_grad for p in plain.parameters())


@each_mode
def test_is_the_exponential_of_its_skew_operator(mode: str) -> None:
    layer = SocConv2d(3, 3, 3, padding_mode=mode, eval_terms=20, dtype=torch.float64).eval()
    kernel = layer.generator().detach()
    assert torch.equal(kernel, -adjoint(kernel))
    conv = torch.nn.Conv2d(3, 3, 3, padding=1, padding_mode=mode, bias=False, dtype=torch.float64)
    conv.weight.data = kernel
    rotation = expm(dense_matrix(conv, (3, 5, 4)))
    np.testing.assert_allclose(dense_matrix(layer, (3, 5, 4)), rotation, atol=1e-14)


@pytest.mark.thorough
def test_kernel_is_inside_the_unit_ball_and_uses_it() -> None:
    for channels, size in ((1, 3), (4, 3), (16, 3), (8, 5), (8, 1)):
        kernel = SocConv2d(channels, channels, size).generator()
        norm = float(symbol_sup(kernel.detach()))
        assert 0.4 <= norm <= 1.01


def test_truncation_error_is_in_the_bound_and_attained() -> None:
    # Two channels, one tap: the angle reaches 0.997, where five terms give a norm of 1 + 8.9e-4.
    layer = SocConv2d(2, 2, 1, dtype=torch.float64)
    for training, least in ((True, 8e-4), (False, 1e-8)):
        norm = singular_values(layer.train(training), (2, 2, 2), torch.float64).max()
        bound = float(lipschitz(layer))
        assert 1 + least <= norm <= bound <= norm + 0.05 * (bound - 1)
    assert bound < 1 + 2e-8


def test_terms_of_the_two_modes_differ_by_the_truncation() -> None:
    layer = SocConv2d(2, 2, 1, bias=False, dtype=torch.float64)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        gap = float((layer.train()(x) - layer.eval()(x)).norm() / x.norm())
    assert 1e-3 < gap < 1 / 720 + 1 / 5040 + 1e-5
    wide = SocConv2d(2, 2, 1, bias=False, train_terms=10, dtype=torch.float64)
    assert torch.equal(wide.train()(x), wide.eval()(x))


@each_mode
@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 20, 2), (8, 3, 1)], ids=str)
def test_few_patches_are_multiplied_by_the_matrix_as_many_are(shape: tuple[int, int, int], mode: str) -> None:
    cin, cout, stride = shape
    layer = SocConv2d(cin, cout, 1, stride=stride, padding_mode=mode, dtype=torch.float64)
    weight = layer.polynomial(layer.generator(), 5)
    patches = torch.randn(40, cin, stride, 2 * stride, dtype=torch.float64)
    g = torch.randn(40, cout, 1, 2, dtype=torch.float64)
    for count in (1, 40):
        x = patches[:count].requires_grad_()
        assert layer.bias is not None
        expected = torch.nn.functional.pixel_unshuffle(x, stride)
        expected = torch.einsum("oi,bihw->bohw", weight, expected) + layer.bias[:, None, None]
        y = layer(x)
        torch.testing.assert_close(y, expected)
        wanted = (x, layer.free, layer.bias)
        found = torch.autograd.grad(y, wanted, g[:count])
        for one, two in zip(found, torch.autograd.grad(expected, wanted, g[:count], retain_graph=True), strict=True):
            torch.testing.assert_close(one, two)


def test_reshaped_norm_is_an_upper_bound() -> None:
    for shape in ((4, 3, 3, 3), (3, 4, 1, 5), (4, 3, 5, 1), (2, 2, 4, 2)):
        kernel = torch.randn(*shape, dtype=torch.float64)
        # A search over the torus, independent of the reshapings.
        taps = torch.cartesian_prod(torch.arange(shape[2]), torch.arange(shape[3])).double().numpy()
        angles = np.random.default_rng(0).uniform(0, 2 * np.pi, (500, 2))
        waves = np.exp(1j * angles @ taps.T)
        symbols = np.einsum("fs,mns->fmn", waves, kernel.flatten(2).numpy())
        truth = np.linalg.norm(symbols, 2, axis=(1, 2)).max()
        assert truth <= float(reshaped_norm(kernel)) <= 4 * truth
    one = torch.einsum("oi,st->oist", torch.eye(2), torch.eye(3))  # with rows (o, s), the identity
    other = torch.eye(18)[[0, 3]].reshape(2, 2, 3, 3)  # with rows o, orthonormal; with rows (o, s), two equal ones
    assert all(3 <= float(reshaped_norm(kernel)) <= 3 * 1.03 for kernel in (one, other))


@each_mode
def test_zero_parameters(mode: str) -> None:
    layer = SocConv2d(2, 3, 3, padding_mode=mode)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    x = torch.randn(2, 2, 4, 4)
    y = layer(x)
    torch.testing.assert_close(y[:, :2], x)
    y.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices by the way of the large ones."""
    monkeypatch.setattr(soc, "LARGE", 1)


@pytest.mark.usefixtures("large")
@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [LAYERS[0], LAYERS[2], LAYERS[4]], ids=str)
def test_layers_of_the_quick_norm(sizes: tuple[int, ...], dtype: torch.dtype, mode: str) -> None:
    test_singular_values_bound_and_export(sizes, dtype, mode)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("shape", [(12, 12, 1, 1), (5, 5, 3, 3), (6, 6, 3, 1)])
def test_quick_norm_and_its_derivatives_are_those_of_products(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a matrix that is far from other ones of its norm: a large rank-one part.
    u, v = torch.randn(shape[0], 1), torch.randn(1, shape[1])
    kernel = 0.1 * torch.randn(shape, dtype=torch.float64) + (u @ v)[:, :, None, None] * torch.ones(shape[2:])
    kernel.requires_grad_()
    along = torch.randn_like(kernel)
    quick, first, second = _derivatives(kernel, along)
    monkeypatch.setattr(soc, "LARGE", 10**9)
    smooth, expected, curvature = _derivatives(kernel, along)
    assert quick == pytest.approx(smooth, rel=0.03)
    assert torch.allclose(first, expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))
    assert torch.allclose(second, curvature, rtol=1e-9, atol=1e-12)


def _derivatives(kernel: torch.Tensor, along: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    bound = reshaped_norm(kernel)
    (first,) = torch.autograd.grad(bound, kernel, retain_graph=True)
    (again,) = torch.autograd.grad(bound, kernel, create_graph=True)
    (second,) = torch.autograd.grad((again * along).sum(), kernel)
    return float(bound.detach()), first, second


@pytest.mark.usefixtures("large")
@each_mode
@pytest.mark.parametrize("name", ["zeros_", "dirac_"])
def test_without_a_skew_part_large_layers_are_the_identity(name: str, mode: str) -> None:
    layer = SocConv2d(12, 12, 3, padding_mode=mode, bias=False)
    getattr(torch.nn.init, name)(layer.free)
    x = torch.randn(2, 12, 4, 4)
    y = layer(x)
    torch.testing.assert_close(y, x)
    y.square().sum().backward()
    assert torch.isfinite(layer.free.grad).all()


@pytest.mark.usefixtures("large")
def test_the_quick_norm_steps_back_where_it_cannot_prove() -> None:
    kernel = torch.randn(12, 12, 3, 3)
    expected = gram_norm(kernel.reshape(12, -1))
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(soc._norm(kernel.reshape(12, -1)), expected)
    finally:
        torch.set_flush_denormal(False)
    batched = torch.func.vmap(reshaped_norm)(torch.stack((kernel, kernel)))
    assert batched == pytest.approx(float(reshaped_norm(kernel)), rel=0.03)
    with torch.device("meta"):
        assert float(soc._norm(kernel.reshape(12, -1))) == pytest.approx(float(expected), rel=0.03)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("size", [1, 3])
def test_a_step_whose_estimate_misses_the_norm_has_a_larger_proved_constant(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = SocConv2d(12, 12, size, bias=False, dtype=torch.float64)
    usual, evaluated = float(lipschitz(layer)), singular_values(layer.eval(), (12, 3, 3), torch.float64)
    estimate = soc.quick_norm_estimate

    def low(matrix: torch.Tensor) -> Any:
        found = estimate(matrix)
        return found._replace(bound=found.bound / 3)

    monkeypatch.setattr(soc, "quick_norm_estimate", low)
    reached = singular_values(layer.train(), (12, 3, 3), torch.float64).max()
    assert 1.002 < reached <= float(lipschitz(layer))
    assert usual < 1.001 < reached
    assert np.array_equal(singular_values(layer.eval(), (12, 3, 3), torch.float64), evaluated)
    assert float(lipschitz(layer)) < 1 + 2e-8
    assert float(lipschitz(export(layer.train(), (12, 3, 3)))) < 1 + 1e-6


@pytest.mark.usefixtures("large")
def test_training_divides_by_what_the_proof_tries_first() -> None:
    layer = SocConv2d(16, 16, 3, train_terms=10, dtype=torch.float64)
    kernels = [layer.generator(proved).detach() for proved in (True, False)]
    torch.testing.assert_close(*kernels, rtol=1e-7, atol=0)
    with torch.no_grad():
        layer.free[0, 0] = torch.nan
    assert layer(torch.ones(1, 16, 3, 3)).isnan().all()


def test_taylor_module_bound_of_a_kernel_that_is_not_skew() -> None:
    good = export(SocConv2d(3, 3, 3, padding_mode="zeros", dtype=torch.float64), (3, 5, 5))[0]
    assert isinstance(good, TaylorConv2d)
    before = float(lipschitz(good))
    for error in (1e-6, 1e-2, 0.3):
        bad = copy.deepcopy(good)
        # A symmetric part of the centre tap expands every direction.
        bad.kernel[:, :, 1, 1] += error * torch.eye(3, dtype=torch.float64)
        norm = singular_values(bad, (3, 5, 5), torch.float64).max()
        bound = float(lipschitz(bad))
        assert 1 + error / 2 < norm <= bound
        assert before + error / 2 < bound < 1 + 5 * error
    big = copy.deepcopy(good)
    big.kernel *= 4
    assert singular_values(big, (3, 5, 5), torch.float64).max() <= float(lipschitz(big)) < 1.5
    big.terms = 3
    assert 1.1 < singular_values(big, (3, 5, 5), torch.float64).max() <= float(lipschitz(big))
    big.kernel.fill_(torch.nan)
    assert not np.isfinite(float(_taylor(big, None)))


def test_taylor_module_round_trip(tmp_path) -> None:
    plain = export(SocConv2d(2, 3, (3, 5), stride=2, padding_mode="zeros"), (2, 4, 6))
    again = load(save(plain, tmp_path / "net"))
    x = torch.randn(2, 2, 4, 6)
    assert torch.equal(again(x), plain(x))
    assert float(lipschitz(again)) == float(lipschitz(plain))


def test_refusals() -> None:
    with pytest.raises(OptionError, match=r"kernel_size: expected odd sizes .*got \(2, 2\)"):
        SocConv2d(3, 3, 2)
    with pytest.raises(OptionError, match=r"padding_mode: expected 'circular' or 'zeros', got 'reflect'"):
        SocConv2d(3, 3, 3, padding_mode="reflect")
    with pytest.raises(OptionError, match=r"padding: expected 'same' or \(1, 1\).*got 0"):
        SocConv2d(3, 3, 3, padding=0)
    with pytest.raises(OptionError, match=r"train_terms: expected .*got 0"):
        SocConv2d(3, 3, 3, train_terms=0)
    with pytest.raises(OptionError, match=r"eval_terms: expected .*got 2.5"):
        SocConv2d(3, 3, 3, eval_terms=2.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"kernel_size: expected two odd integers, got \(2, 3\)"):
        TaylorConv2d(1, 1, (2, 3), 5)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_laws_with_zero_padding(dtype: torch.dtype) -> None:
    check_layer(
        partial(SocConv2d, 2, 3, 3, padding_mode="zeros"),
        input_shape=[(2, 4, 5), (2, 3, 3), (2, 1, 1)],
        dtype=dtype,
        slack=1e-3,
        train_gap=1.5e-3,
        laws=(1, 2, 3, 10, 11) if dtype == torch.float32 else None,
        backends=(),
    )
