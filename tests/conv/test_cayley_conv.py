"""The solve form against the matrices of the Cayley transform, and its two halves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lipkit.conv import Symbol, apply_symbol, cayley_conv2d, cayley_linear, kernel_symbol, spectrum
from lipkit.conv.cayley_conv import factors_for, solve_form
from lipkit.conv.normal_matrices import normal_matrices
from lipkit.conv.spectrum import transform_matrices
from lipkit.conv.spread import FEW, normal_kernel, spread_cayley, spread_pays
from lipkit.conv.symbol import symbol
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg import cayley
from lipkit.linalg.cayley import factorize, solve_rows

# cout, cin, kernel, h, w, batch: dense and separable transforms, one pixel, a line, both kinds of factors; few inputs.
LAYERS = [
    (3, 3, (3, 3), 4, 5, 2),
    (5, 3, (2, 2), 4, 4, 9),
    (3, 5, (3, 3), 9, 10, 2),
    (3, 4, (4, 4), 3, 3, 9),
    (4, 3, (2, 3), 12, 7, 9),
    (2, 2, (1, 1), 1, 1, 2),
    (2, 3, (3, 3), 1, 70, 1),
    (2, 3, (3, 3), 2, 2, 1),
    (3, 2, (5, 5), 11, 11, 1),
    (8, 3, (3, 3), 20, 21, 9),
    (6, 1, (4, 2), 8, 8, 2),
    (5, 2, (2, 3), 9, 12, 2),
    (3, 1, (1, 1), 2, 1, 1),
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrices(kernel: Tensor, h: int, w: int) -> list[Tensor]:
    """The Cayley transform at each frequency: real ones, then complex ones."""
    raw = kernel_symbol(kernel, h, w)
    return [cayley(raw.real), cayley(torch.complex(raw.pair[:, 0], raw.pair[:, 1]))]


def convolved(parts: list[Tensor], x: Tensor) -> Tensor:
    """The convolution with these matrices."""
    real, pair = parts
    return apply_symbol(Symbol(real, torch.stack((pair.real, pair.imag), 1)), x)


def close(one: Tensor, two: Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-10, atol=1e-12 * (1 + float(two.detach().abs().max())))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("create_graph", [False, True], ids=["solve form", "plain form"])
def test_equals_the_matrices_with_its_gradients(
    layer: tuple[int, int, tuple[int, int], int, int, int], create_graph: bool
) -> None:
    cout, cin, kernel, h, w, batch = layer
    free = (random(cout, cin, *kernel) / 3).requires_grad_()
    x, bias = random(batch, cin, h, w, seed=1).requires_grad_(), random(cout, seed=2).requires_grad_()
    y = cayley_conv2d(free, x, bias)
    expected = convolved(matrices(free, h, w), x) + bias[:, None, None]
    assert close(y, expected)
    g = random(*y.shape, seed=3)
    got = torch.autograd.grad(y, (free, x, bias), g, create_graph=create_graph)
    for one, two in zip(got, torch.autograd.grad(expected, (free, x, bias), g), strict=True):
        assert close(one, two)


@pytest.mark.parametrize("size", [(4, 5, 2), (9, 10, 9), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("form", ["second", "first adjoint"])
def test_halves_of_the_wide_transform(form: str, size: tuple[int, int, int]) -> None:
    h, w, batch = size
    free = (random(3, 7, 3, 3) / 3).requires_grad_()
    x = random(batch, 4 if form == "second" else 3, h, w, seed=1).requires_grad_()
    both = matrices(free, h, w)
    expected = convolved([m[..., 3:] if form == "second" else m[..., :3].mH for m in both], x)
    normal = normal_matrices(free, h, w)
    y = solve_form(form, x, normal, factors_for(normal, x))
    assert close(y, expected)
    g = random(*y.shape, seed=2)
    for one, two in zip(torch.autograd.grad(y, (free, x), g), torch.autograd.grad(expected, (free, x), g), strict=True):
        assert close(one, two)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [(4, 5), (5, 6), (1, 1)], ids=str)
@pytest.mark.parametrize(("batch", "biased"), [(2, False), (5, True)])
def test_halves_with_scaled_channels(size: tuple[int, int], batch: int, biased: bool) -> None:
    # More images than the four channels: the second half is made explicitly.
    free = (random(3, 7, 3, 3) / 3).requires_grad_()
    normal = normal_matrices(free, *size)
    bias = random(3, seed=3).requires_grad_() if biased else None
    scale = random(3, seed=4).abs().add(0.5).requires_grad_()
    channels = scale[:, None, None]
    for form, count in (("second", 4), ("first adjoint", 3)):
        x = random(batch, count, *size, seed=1).requires_grad_()
        y = solve_form(form, x, normal, bias=bias, scale=scale)
        if form == "second":
            expected = solve_form(form, x, normal) * channels
        else:
            expected = solve_form(form, x * channels, normal)
        expected = expected if bias is None else expected + bias[:, None, None]
        assert close(y, expected)
        g, inputs = random(*y.shape, seed=2), [free, x, scale, *([] if bias is None else [bias])]
        found, wanted = (torch.autograd.grad(one, inputs, g, retain_graph=True) for one in (y, expected))
        assert all(close(one, two) for one, two in zip(found, wanted, strict=True))
        (alone,) = torch.autograd.grad(y, scale, g, retain_graph=True)
        assert close(alone, found[2])

        def function(free: Tensor, x: Tensor, scale: Tensor, form: str = form) -> Tensor:
            return solve_form(form, x, normal_matrices(free, *size), bias=bias, scale=scale)

        assert torch.autograd.gradcheck(function, (free, x, scale), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (free, x, scale), fast_mode=True)


def test_only_halves_are_scaled() -> None:
    with pytest.raises(OptionError, match=r"scale: expected None with form='wide', got shape \(3,\)"):
        solve_form("wide", random(1, 3, 2, 2), normal_matrices(random(3, 3, 1, 1), 2, 2), scale=random(3))


@pytest.mark.thorough
@pytest.mark.parametrize("channels", [(2, 2), (3, 2), (2, 3)], ids=str)
def test_gradients_of_both_orders(channels: tuple[int, int]) -> None:
    free, x = (random(*channels, 1, 2) / 2).requires_grad_(), random(1, channels[1], 2, 3, seed=1).requires_grad_()
    bias = random(channels[0], seed=2).requires_grad_()
    assert torch.autograd.gradcheck(cayley_conv2d, (free, x, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(cayley_conv2d, (free, x, bias), fast_mode=True)


# Torch warns of its own code when it first takes a forward derivative.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_few_inputs_take_the_convolution() -> None:
    # The choice itself, and that it changes nothing: values above, further derivatives and transforms here.
    assert [spread_pays(random(cout, cin, *k), h, w) for cout, cin, k, h, w, _ in LAYERS] == [False] * 9 + [True] * 4
    assert [spread_pays(random(4 * c, c, 1, 1), 64, 64) for c in (FEW, FEW + 1)] == [True, False]
    free, x, bias = (
        t.requires_grad_() for t in (random(4, 1, 1, 2) / 2, random(2, 1, 2, 3, seed=1), random(4, seed=2))
    )
    assert torch.autograd.gradcheck(cayley_conv2d, (free, x, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(cayley_conv2d, (free, x, bias), fast_mode=True)
    y = cayley_conv2d(free, x, bias)
    each = torch.func.vmap(lambda one: cayley_conv2d(free, one[None], bias)[0])(x)
    assert close(each, y)
    along = torch.func.jvp(lambda one: cayley_conv2d(free, one, bias), (x,), (torch.ones_like(x),))[1]
    assert close(along, cayley_conv2d(free, torch.ones_like(x)))


@pytest.mark.parametrize("size", [(3, 3), (2, 3), (4, 1)], ids=str)
def test_normal_kernel_has_the_symbol_of_the_definition(size: tuple[int, int]) -> None:
    kernel = random(7, 3, *size)
    both = symbol(kernel, 7, 8)
    own, rest = both[..., :3, :], both[..., 3:, :]
    assert close(symbol(normal_kernel(kernel), 7, 8), torch.eye(3) + own - own.mH + rest.mH @ rest)


def test_few_inputs_in_any_memory_and_arithmetic_around() -> None:
    free, x = random(8, 3, 3, 3).float() / 3, random(2, 3, 20, 21, seed=1).float()
    y = cayley_conv2d(free, x)
    ratio = y.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert float((ratio - 1).abs().max()) < 1e-6
    assert torch.allclose(cayley_conv2d(free, x.to(memory_format=torch.channels_last)), y, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cayley_conv2d(free, x), y)
    # The output is the caller's: the gradient does not look at it again.
    free.requires_grad_()
    (expected,) = torch.autograd.grad(2 * cayley_conv2d(free, x)[:, 5].sum(), free)
    (found,) = torch.autograd.grad(cayley_conv2d(free, x).mul_(2)[:, 5].sum(), free)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("kernel", [(1, 2), (2, 2), (2, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("size", [(4, 5), (5, 4), (12, 11), (9, 12)], ids=str)
@pytest.mark.parametrize("channels", [(3, 1), (7, 2)], ids=str)
def test_few_inputs_have_their_gradients(
    kernel: tuple[int, int], size: tuple[int, int], channels: tuple[int, int]
) -> None:
    given = random(*channels, *kernel) / 2, random(2, channels[1], *size, seed=1), random(channels[0], seed=2)
    free, x, bias = (t.requires_grad_() for t in given)
    g = random(2, channels[0], *size, seed=3)
    found = torch.autograd.grad(spread_cayley(free, x, bias), (free, x, bias), g)
    reference = convolved(matrices(free, *size), x) + bias[:, None, None]
    for one, two in zip(found, torch.autograd.grad(reference, (free, x, bias), g), strict=True):
        assert close(one, two)


@pytest.mark.parametrize("channels", [(3, 5), (6, 1)], ids=str)
@pytest.mark.parametrize("size", [(4, 4), (10, 10)], ids=str)
def test_only_the_gradients_that_are_asked_for(channels: tuple[int, int], size: tuple[int, int]) -> None:
    free, x = random(*channels, 3, 3) / 3, random(2, channels[1], *size, seed=1)
    for asked in (free, x):
        asked.requires_grad_()
        y = cayley_conv2d(free, x)
        (got,) = torch.autograd.grad(y.square().sum() + y.sum(), asked)
        reference = convolved(matrices(free, *size), x)
        (expected,) = torch.autograd.grad(reference.square().sum() + reference.sum(), asked)
        assert close(got, expected)
        asked.requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_both_kinds_of_factors_solve(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    n = torch.randn(2, 3, 3, dtype=dtype, generator=generator) + 3 * torch.eye(3)
    b = torch.randn(2, rows, 3, dtype=dtype, generator=generator)
    factors = factorize(n.mT.contiguous(), rows)
    assert (factors.pivots is None) == (rows > 4)
    assert torch.allclose(solve_rows(factors, b) @ n.mT, b, atol=1e-12)
    assert torch.allclose(solve_rows(factors, b, transposed=True) @ n, b, atol=1e-12)


@pytest.mark.parametrize(("channels", "size", "batch"), [(64, (4, 4), 8), (64, (4, 4), 128), (48, (9, 9), 4)])
def test_norms_are_kept_in_float32(channels: int, size: tuple[int, int], batch: int) -> None:
    free = random(channels, channels, 3, 3).float() / channels**0.5 / 2
    x = random(batch, channels, *size, seed=1).float()
    ratio = cayley_conv2d(free, x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert float((ratio - 1).abs().max()) < 1e-5


# Torch warns of its own code when it first takes a forward derivative.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("size", [(2, 3), (1, 66)], ids=str)
def test_products_by_a_symbol_have_every_derivative(size: tuple[int, int]) -> None:
    kernel, x, bias = random(1, 2, 1, 2).requires_grad_(), random(1, 2, *size, seed=1).requires_grad_(), random(1)
    bias.requires_grad_()

    def f(kernel: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return apply_symbol(kernel_symbol(kernel, *size), x, bias=bias)

    assert torch.autograd.gradcheck(f, (kernel, x, bias), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (kernel, x, bias), fast_mode=True)
    g = random(1, 1, *size, seed=3)
    once, twice = (torch.autograd.grad(f(kernel, x, bias), (kernel, x, bias), g, create_graph=c) for c in (False, True))
    assert all(close(one, two) for one, two in zip(once, twice, strict=True))
    batch = random(3, 1, 2, *size, seed=4)
    each = torch.func.vmap(lambda one: f(kernel, one, bias))(batch)
    assert close(each, torch.stack([f(kernel, one, bias) for one in batch]))


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (5, 9)], ids=str)
@pytest.mark.parametrize("channels", [(2, 5), (5, 2)], ids=str)
def test_products_by_hand_are_the_plain_ones(channels: tuple[int, int], size: tuple[int, int]) -> None:
    kernel, x = random(*channels, 3, 3), random(3, channels[1], *size, seed=1).requires_grad_()
    real, pair = (part.requires_grad_() for part in kernel_symbol(kernel, *size))
    plain = spectrum._plain(real, pair, None, x, transform_matrices(*size, dtype=x.dtype))
    found, wanted = (
        (y, *torch.autograd.grad(y.square().sum(), (real, pair, x)))
        for y in (apply_symbol(Symbol(real, pair), x), plain)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("cout", "cin", "size"), [(8, 3, 20), (8, 3, 4), (3, 8, 9)])
def test_an_empty_batch_and_autocast_around(cout: int, cin: int, size: int) -> None:
    kernel, none = random(cout, cin, 3, 3).float().requires_grad_(), torch.zeros(0, cin, size, size)
    assert cayley_conv2d(kernel, none).shape == (0, cout, size, size)
    assert apply_symbol(kernel_symbol(kernel, size, size), none).shape == (0, cout, size, size)
    x = random(2, cin, size, size).float()
    exact = cayley_conv2d(kernel, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cayley_conv2d(kernel, x), exact)
        values, rows = symbol(kernel, 4, 5), cayley_linear(kernel.flatten(1), torch.ones(2, 9 * cin))
    assert torch.equal(values, symbol(kernel, 4, 5))
    assert torch.equal(rows, cayley_linear(kernel.flatten(1), torch.ones(2, 9 * cin)))
    with pytest.raises(ShapeError, match=r"kernel and x: expected one number of inputs, got .* and \(2, 1, "):
        cayley_conv2d(kernel, x[:, :1])
    with pytest.raises(ShapeError, match=r"x: expected images \(B, C, h, w\), got shape"):
        cayley_conv2d(kernel, x[0])
