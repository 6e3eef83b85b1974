"""ECO: what the laws cannot know about it. Published facts, both evaluations, the bound of the Taylor polynomial."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers.eco import EcoConv2d
from lipkit.linalg.exponential import taylor_range
from lipkit.linalg.polar import polar
from lipkit.lowering import export, lipschitz
from lipkit.modules import FourierConv2d, Permute, Reshape, load, save
from lipkit.testing import check_layer, dense_matrix

SIZES = [(6, 3), (12, 3), (24, 3), (30, 3), (8, 2), (16, 2), (32, 2), (8, 4), (16, 4), (32, 4), (6, 2)]
KINDS: list[dict[str, Any]] = [
    {},
    {"orthogonalize": "exponential"},
    {"orthogonalize": "cayley"},
    {"complex_p0": True},
    {"complex_p0": True, "orthogonalize": "exponential"},
]


def make(*conv: Any, seed: int = 0, **options: Any) -> EcoConv2d:
    torch.manual_seed(seed)
    return EcoConv2d(*conv, **options)


def values(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> np.ndarray:
    return np.linalg.svd(dense_matrix(layer, shape, dtype), compute_uv=False)


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_isometry_and_proved_norm_on_the_published_sizes(n: int, k: int) -> None:
    for options in KINDS:
        layer = make(3, 3, k, bias=False, **options).eval()
        x = torch.randn(2, 3, n, n)
        y = layer(x).detach()
        assert float(y.norm() / x.norm()) == pytest.approx(1, abs=1e-5)
        network = export(layer, (3, n, n))
        assert abs(float(lipschitz(network)) - 1) < 1e-5
        torch.testing.assert_close(network(x), y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_dilated_and_phase_evaluation_agree(n: int, k: int, options: dict[str, Any]) -> None:
    layer = make(2, 3, k, **options)
    other = make(2, 3, k, evaluation="dilated", **options)
    other.load_state_dict(layer.state_dict())
    x = torch.rand(2, 2, n, n)
    torch.testing.assert_close(other(x), layer(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "k"), [(6, 3), (6, 2), (8, 4)])
@pytest.mark.parametrize("channels", [(2, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_all_singular_values_are_one(options: dict[str, Any], channels: tuple[int, int], n: int, k: int) -> None:
    found = values(make(*channels, k, **options).eval(), (channels[0], n, n), torch.float32)
    np.testing.assert_allclose(found, 1, atol=1e-5)


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 10])
def test_taylor_layers_are_inside_their_bound(terms: int) -> None:
    layer = make(3, 4, 3, train_terms=terms, dtype=torch.float64)
    found = values(layer, (3, 6, 6))
    low, high = taylor_range(1.0, terms)
    assert low - 1e-12 <= found.min()
    assert found.max() <= high + 1e-12
    claimed = float(lipschitz(layer))
    assert high <= claimed <= high + 1e-12
    # Two-sided: matrices of one plane are normalised to almost 1 rad.
    plane = make(2, 2, 1, train_terms=terms, dtype=torch.float64)
    assert abs(values(plane, (2, 2, 2)) - 1).max() > 0.5 * max(high - 1, 1 - low)


def test_the_bound_follows_the_mode_and_the_export_uses_the_evaluation_terms() -> None:
    layer = make(3, 3, 3, dtype=torch.float64)
    assert float(lipschitz(layer)) == pytest.approx(1.0009, abs=1e-5)
    assert float(lipschitz(layer.eval())) == pytest.approx(1 + 1.98e-8, abs=1e-10)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    evaluated = layer(x)
    torch.testing.assert_close(export(layer.train(), (3, 6, 6))(x), evaluated, rtol=0, atol=1e-13)
    gap = float((layer(x) - evaluated).detach().norm() / x.norm())
    assert 1e-6 < gap < 1 / 720


def test_exact_layer_is_scipys_exponential_at_each_frequency() -> None:
    layer = make(3, 3, 2, orthogonalize="exponential", dtype=torch.float64)
    free = layer.free.detach().numpy()
    p0 = np.stack([scipy.linalg.expm(w - w.T) for w in free]).reshape(2, 2, 3, 3)
    x = torch.randn(1, 3, 2, 2, dtype=torch.float64)
    # On 2 x 2 pixels the dilation is 1, and the frequencies are those of a 2 x 2 Fourier transform.
    spectrum = np.einsum("pqij,jpq->ipq", p0, np.fft.fft2(x[0].numpy()))
    expected = np.fft.ifft2(spectrum).real + layer.bias.detach().numpy()[:, None, None]
    np.testing.assert_allclose(layer(x)[0].detach().numpy(), expected, atol=1e-13)


def test_complex_matrices_reach_a_shift_that_real_ones_cannot() -> None:
    layer = make(1, 1, 3, complex_p0=True, orthogonalize="exponential", bias=False, dtype=torch.float64)
    # exp(2 i a) at the pairs (0, 1), (1, 0), (1, 1), (1, -1): a shift by one tap along the width has 2 a = 2 pi f2 / 3.
    with torch.no_grad():
        layer.imaginary[:, 0, 0] = torch.tensor([1.0, 0.0, 1.0, -1.0], dtype=torch.float64) * torch.pi / 3
    x = torch.randn(1, 1, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x.roll(-2, 3))
    # Kernels of 1 and 2 taps have no conjugate pairs: nothing to make complex, and no empty parameter.
    assert make(1, 1, 2, complex_p0=True).imaginary is None


def test_zero_parameters_are_the_identity() -> None:
    for options in KINDS:
        layer = make(4, 3, 3, bias=False, **options).eval()
        nn.init.zeros_(layer.free)
        if layer.imaginary is not None:
            nn.init.zeros_(layer.imaginary)
        x = torch.randn(2, 4, 6, 9)
        torch.testing.assert_close(layer(x), x[:, :3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("complex_p0", [False, True])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_number_of_parameters(k: int, complex_p0: bool) -> None:
    layer = make(3, 5, k, stride=2, complex_p0=complex_p0)
    distinct = (k * k + 1) // 2 if k % 2 else (k * k + 4) // 2
    pairs = k * k - distinct
    assert layer.free.shape == (distinct, 12, 12)
    assert sum(p.numel() for p in layer.parameters()) == (distinct + complex_p0 * pairs) * 144 + 5
    assert make(12, 5, k).free.shape == make(5, 12, k).free.shape == (distinct, 12, 12)
    layer = make(3, 5, k, stride=2, complex_p0=complex_p0, square=False)
    assert layer.free.shape == (distinct, 5, 12)
    assert sum(p.numel() for p in layer.parameters()) == (distinct + complex_p0 * pairs) * 60 + 5


def test_zeros_around_a_rectangle_are_the_square_layer() -> None:
    for channels in ((3, 5), (5, 3), (2, 8)):
        square, other = (make(*channels, 3, square=s, complex_p0=True, dtype=torch.float64) for s in (True, False))
        state = other.state_dict()
        for name in ("free", "imaginary"):
            rows, columns = state[name].shape[-2:]
            state[name] = nn.functional.pad(state[name], (0, max(channels) - columns, 0, max(channels) - rows))
        square.load_state_dict(state)
        x = torch.randn(2, channels[0], 6, 3, dtype=torch.float64)
        torch.testing.assert_close(square(x), other(x), rtol=0, atol=1e-13)


def test_weights_of_the_other_form_are_refused_by_a_sentence() -> None:
    square, other = make(2, 5, 3), make(2, 5, 3, square=False)
    with pytest.raises(RuntimeError, match=r"free: expected \(5, 5, 5\), got \(5, 5, 2\): saved with square=False"):
        nn.Sequential(square).load_state_dict(nn.Sequential(other).state_dict())
    with pytest.raises(RuntimeError, match=r"free: expected \(5, 5, 2\), got \(5, 5, 5\): saved with square=True"):
        other.load_state_dict(square.state_dict())


def test_more_squarings_turn_farther() -> None:
    angles = []
    for squarings in (3, 4, 5, 6):
        matrices = make(64, 64, 1, squarings=squarings, dtype=torch.float64).eval().symbol().real.detach().numpy()
        angles.append(float(np.abs(np.angle(np.linalg.eigvals(matrices))).max()))
    assert angles == sorted(angles)
    assert angles[0] < 0.9
    assert 0.97 < angles[-1] <= 1


def test_stride_is_a_pixel_unshuffle_and_the_kernel_divides_what_is_left() -> None:
    layer = make(2, 8, 3, stride=2, dtype=torch.float64, orthogonalize="exponential")
    np.testing.assert_allclose(values(layer, (2, 6, 12)), 1, atol=1e-12)
    network = export(layer, (2, 6, 12))
    assert [type(m) for m in network] == [Reshape, Permute, Reshape, FourierConv2d]
    with pytest.raises(ShapeError, match=r"got 3 x 3 for 4 x 6; these fit: 1, 2$"):
        layer(torch.zeros(1, 2, 8, 12, dtype=torch.float64))


def test_one_pixel_is_a_dense_orthogonal_matrix() -> None:
    layer = make(4, 12, 1, stride=3, dtype=torch.float64, orthogonalize="exponential", bias=False)
    np.testing.assert_allclose(values(layer, (4, 3, 3)), 1, atol=1e-12)
    with pytest.raises(ShapeError, match=r"got 3 x 3 for 1 x 1; these fit: 1$"):
        make(4, 12, 3, stride=3)(torch.zeros(1, 4, 3, 3))


def test_rectangular_kernels_and_images() -> None:
    layer = make(2, 3, (2, 3), dtype=torch.float64, complex_p0=True).eval()
    np.testing.assert_allclose(values(layer, (2, 4, 9)), 1, atol=1e-7)


def test_32_pixels_refuse_a_kernel_of_3_and_the_message_names_those_that_fit() -> None:
    layer = make(3, 8, 3)
    message = "EcoConv2d: kernel_size: expected .* got 3 x 3 for 32 x 32; these fit: 1, 2, 4, 8, 16, 32$"
    with pytest.raises(ShapeError, match=message):
        layer(torch.zeros(1, 3, 32, 32))
    with pytest.raises(ShapeError, match=message):
        export(layer, (3, 32, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"orthogonalize": "expm"}, "orthogonalize: expected one of taylor, cayley, .*got 'expm'"),
        ({"orthogonalize": "cayley", "train_terms": 5}, "train_terms: expected None without .*got 5"),
        ({"eval_terms": 0}, "eval_terms: expected an integer from 1 to 100, got 0"),
        ({"orthogonalize": "cayley", "squarings": 4}, "squarings: expected None without .*got 4"),
        ({"squarings": 2}, "squarings: expected an integer from 3 to 6, got 2"),
        ({"square": "no"}, "square: expected True or False, got 'no'"),
        ({"complex_p0": 1}, "complex_p0: expected True or False, got 1"),
        ({"evaluation": "fourier"}, "evaluation: expected one of phase, dilated, got 'fourier'"),
        ({"padding_mode": "zeros"}, "padding_mode: expected 'circular', got 'zeros'"),
        ({"dilation": 2}, "dilation: expected 1, got 2"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EcoConv2d(3, 8, 3, **options)


def test_nothing_is_assumed_of_a_function_that_is_not_in_the_table() -> None:
    layer = make(3, 3, 3, orthogonalize=lambda w: 1.5 * polar(w), complex_p0=True, dtype=torch.float64)
    bound = lipschitz(layer)
    assert bound.requires_grad
    assert float(bound.detach()) == pytest.approx(1.5, rel=1e-9)
    assert values(layer, (3, 6, 6)).max() == pytest.approx(1.5, rel=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"complex_p0": True},
        {"complex_p0": True, "evaluation": "dilated"},
        {"orthogonalize": "exponential"},
        {"orthogonalize": "bjorck", "complex_p0": True},
        {"orthogonalize": "cayley", "complex_p0": True},
        {"square": False},
        {"squarings": 6, "complex_p0": True},
    ],
    ids=str,
)
def test_laws_of_the_other_variants(options: dict[str, Any]) -> None:
    taylor = "orthogonalize" not in options
    check_layer(
        partial(EcoConv2d, 4, 5, (2, 3), **options),
        input_shape=[(4, 4, 3), (4, 2, 9)] if len(options) == 1 else (4, 4, 3),
        slack=1e-3 * taylor,
        train_gap=1.5e-3 * taylor,
        laws=(1, 2, 3, 4, 5, 7, 9, 10),
    )


@pytest.mark.parametrize("complex_pairs", [False, True])
def test_plain_form_round_trip(complex_pairs: bool, tmp_path: Any) -> None:
    layer = make(3, 5, 3, complex_p0=complex_pairs)
    network = export(layer, (3, 6, 9))
    x = torch.randn(2, 3, 6, 9)
    loaded = load(save(network, tmp_path / "net"))
    assert torch.equal(loaded(x), network(x))
    assert float(lipschitz(loaded)) == float(lipschitz(network))
    double = network.double()
    assert double(x.double()).dtype == torch.float64
    dense = dense_matrix(double, (3, 6, 9))
    norm = np.linalg.norm(dense, 2)
    assert norm <= float(lipschitz(double)) <= norm * (1 + 1e-9)


def test_plain_form_of_broken_numbers_shows_in_its_bound() -> None:
    network = export(make(3, 3, 3), (3, 6, 6))
    before = float(lipschitz(network))
    phase = network[0]
    phase.pair[2].mul_(1.01)
    assert float(lipschitz(network)) == pytest.approx(1.01 * before, rel=1e-5)
    # A wrong transform counts twice: on the way in and on the way out.
    phase.transform0.mul_(1.01)
    assert float(lipschitz(network)) == pytest.approx(1.01**3 * before, rel=1e-5)


def test_plain_form_refuses_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match="got 3 x 3 for 8 x 9"):
        FourierConv2d(2, 2, 8, 9, (3, 3))
    with pytest.raises(ShapeError, match=r"expected positive .*got 2, 2, 8, 9, \(0, 3\)"):
        FourierConv2d(2, 2, 8, 9, (0, 3))
    with pytest.raises(ShapeError, match=r"expected input of shape \(B, 2, 6, 9\), got \(1, 2, 6, 6\)"):
        FourierConv2d(2, 2, 6, 9, (3, 3))(torch.zeros(1, 2, 6, 6))
