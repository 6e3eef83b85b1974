"""Products of half precision: features, gradients and derivatives of the Cayley and the phase forms against float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from lipkit.conv import phases, symbol
from lipkit.conv.cayley_conv import cayley_conv2d, solve_form
from lipkit.conv.exponential_conv import Way, exponential_conv2d
from lipkit.conv.normal_matrices import Form, normal_matrices
from lipkit.conv.phases import apply_phases
from lipkit.conv.spectrum import Symbol, apply_symbol, kernel_symbol
from lipkit.conv.spread import spread_cayley
from lipkit.layers import families
from lipkit.linalg.cayley import cayley_linear

# Factors of 8 bits: a product of random numbers is off by about 2^-8 of its size, a chain of four by 1 %, and
# sums that cancel (of a bias) by somewhat more. A wrong term is off by its whole size.
CLOSE = 0.04


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


@pytest.mark.thorough
@pytest.mark.parametrize("side", [1, 2, 5, 6, 8, 10, 13])
@pytest.mark.parametrize(
    ("form", "cin", "cout"),
    [("tall", 4, 4), ("tall", 4, 7), ("wide", 7, 4), ("second", 7, 4), ("second", 6, 4), ("first adjoint", 7, 4)],
)
def test_values_and_gradients_of_the_solve_form(form: Form, cin: int, cout: int, side: int) -> None:
    torch.manual_seed(side)
    least = min(cin, cout)
    kernel = 0.3 * torch.randn(cout, cin, 3, 3)
    x = torch.randn(16, {"second": cin - cout, "first adjoint": least}.get(form, cin), side, side)
    bias = None if form == "first adjoint" else torch.randn(cout if form in ("tall", "wide") else least)
    scale = torch.rand(least) + 0.5 if form in ("second", "first adjoint") else None
    results: list[list[Tensor]] = []
    for made, dtype in ((torch.float64, torch.float64), (torch.float32, torch.bfloat16)):
        given = [None if t is None else t.to(made).requires_grad_() for t in (kernel, bias, scale)]
        free, shift, factor = given
        assert free is not None
        features = x.to(dtype).requires_grad_()
        y = solve_form(form, features, normal_matrices(free, side, side), bias=shift, scale=factor)
        assert y.dtype == dtype
        torch.manual_seed(99)
        y.backward(torch.randn(y.shape, dtype=torch.float64).to(dtype))
        assert features.grad is not None
        results.append([y, features.grad, *(t.grad for t in given if t is not None and t.grad is not None)])
    assert len(results[0]) == len(results[1]) >= 3
    for found, exact in zip(results[1], results[0], strict=True):
        assert off(found, exact) < CLOSE


def results_of(made: torch.dtype, dtype: torch.dtype, kernel: Tensor, x: Tensor, bias: Tensor) -> list[Tensor]:
    """Output and gradients of the Cayley layer with few inputs (an image) or of the dense one."""
    free, shift, features = (t.to(d).requires_grad_() for t, d in ((kernel, made), (bias, made), (x, dtype)))
    y = spread_cayley(free, features, shift) if kernel.ndim == 4 else cayley_linear(free, features, shift)
    assert y.dtype == dtype
    y.backward(torch.cos(torch.arange(y.numel())).view(y.shape).to(dtype))
    assert free.grad is not None
    assert features.grad is not None
    assert shift.grad is not None
    assert (free.grad.dtype, features.grad.dtype, shift.grad.dtype) == (made, dtype, made)
    return [y, free.grad, features.grad, shift.grad]


@pytest.mark.parametrize(
    ("kernel", "x"),
    [((8, 3, 3, 3), (4, 3, 9, 8)), *(((m, n), (b, n)) for m, n in ((9, 9), (9, 40), (40, 9)) for b in (3, 20))],
    ids=str,
)
def test_values_and_gradients_of_few_inputs_and_of_dense_layers(kernel: tuple[int, ...], x: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    given = 0.3 * torch.randn(kernel), torch.randn(x).bfloat16(), torch.randn(kernel[0])
    exact = results_of(torch.float64, torch.float64, *given)
    for found, true in zip(results_of(torch.float32, torch.bfloat16, *given), exact, strict=True):
        assert off(found, true) < CLOSE
        assert true.norm() > 0
    # The products were rounded.
    assert off(results_of(torch.float32, torch.bfloat16, *given)[0], exact[0]) > 1e-4


def test_the_gradient_can_be_differentiated() -> None:
    torch.manual_seed(0)
    kernel, x = torch.randn(3, 3, 3, 3), torch.randn(8, 3, 5, 5)

    def second(kernel: Tensor, x: Tensor) -> Tensor:
        kernel, x = kernel.requires_grad_(), x.requires_grad_()
        (g,) = torch.autograd.grad(cayley_conv2d(kernel, x).double().pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.double().square().sum(), kernel)[0]

    exact = second(kernel.double(), x.double())
    # Third powers of features of 8 bits lose more of them.
    assert off(second(kernel.clone(), x.bfloat16()), exact) < 3 * CLOSE


def test_few_images_are_solved_for_in_float32() -> None:
    torch.manual_seed(1)
    kernel, x = torch.randn(16, 16, 3, 3), torch.randn(2, 16, 6, 6)
    y = cayley_conv2d(kernel, x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert off(y, cayley_conv2d(kernel.double(), x.bfloat16().double())) < 2.0**-8


def test_matrices_that_are_solved_with_at_pairs_alone_are_not_taken_for_inverses() -> None:
    torch.manual_seed(0)
    a = 3 * torch.randn(48, 48)
    # Odd taps: N is I at self-conjugate frequencies, and too large for an inverse by blocks at the pairs.
    kernel = torch.stack((a + a.mT, torch.zeros_like(a), -a - a.mT), -1)[:, :, None]
    x = torch.randn(32, 48, 6, 6).bfloat16()
    assert off(cayley_conv2d(kernel, x), cayley_conv2d(kernel.double(), x.double())) < CLOSE


@pytest.mark.parametrize("size", [2**21, 256])
def test_gradients_of_the_phase_form_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FORWARD_BYTES", size)
    monkeypatch.setattr(phases, "BACKWARD_BYTES", size)
    monkeypatch.setattr(phases, "PIECE_PIXELS", 1)
    torch.manual_seed(2)
    real, pair, bias, x = torch.randn(1, 3, 2), torch.randn(4, 1, 3, 2), torch.randn(3), torch.randn(9, 2, 6, 6)
    results: list[list[Tensor]] = []
    for dtype, autocast in ((torch.float64, False), (torch.float32, True)):
        leaves = [t.to(dtype).requires_grad_() for t in (real, pair, bias, x)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = apply_phases(Symbol(*leaves[:2]), leaves[3], (3, 3), bias=leaves[2])
        assert y.dtype == (torch.bfloat16 if autocast else torch.float64)
        torch.manual_seed(99)
        y.backward(torch.randn(y.shape, dtype=torch.float64).to(y.dtype))
        results.append([y, *(t.grad for t in leaves if t.grad is not None)])
    assert len(results[1]) == 5
    for found, exact in zip(results[1], results[0], strict=True):
        assert off(found, exact) < CLOSE


def test_a_symbol_is_applied_in_the_dtype_of_autocast() -> None:
    torch.manual_seed(3)
    kernel, x = torch.randn(3, 2, 3, 3), torch.randn(4, 2, 9, 9)
    exact = apply_symbol(kernel_symbol(kernel.double(), 9, 9), x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = apply_symbol(kernel_symbol(kernel, 9, 9), x)
    assert y.dtype == torch.bfloat16
    assert 1e-4 < off(y, exact) < CLOSE


@pytest.mark.parametrize("name", ["cayley", "eco", "lot", "bcop", "aol", "sandwich"])
def test_layers_return_what_a_convolution_under_autocast_returns(name: str) -> None:
    torch.manual_seed(4)
    layer = families.FAMILIES[name].conv(4, 4, 3)
    x = torch.randn(8, 4, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert 1e-5 < off(y, layer.double()(x.double())) < CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_of_half_precision_are_widened(dtype: torch.dtype) -> None:
    """As every matrix of ``lipkit.linalg``: torch has no factors and no complex numbers of half precision."""
    torch.manual_seed(0)
    for shape, side in (((8, 3, 3, 3), 20), ((3, 8, 3, 3), 5), ((4, 4, 3, 3), 9)):
        kernel, x = (0.3 * torch.randn(shape)).to(dtype), torch.randn(20, shape[1], side, side).to(dtype)
        y = cayley_conv2d(kernel, x)
        assert y.dtype == dtype
        assert off(y, cayley_conv2d(kernel.double(), x.double())) < CLOSE
        assert torch.equal(symbol(kernel, 5, 4), symbol(kernel.float(), 5, 4))
    weight, rows = kernel.flatten(1), torch.randn(5, 36).to(dtype)
    assert off(cayley_linear(weight, rows), cayley_linear(weight.double(), rows.double())) < CLOSE
    exact = exponential_conv2d(kernel.double(), x.double(), 3)
    for way in get_args(Way):
        y = exponential_conv2d(kernel, x, 3, way=way)
        assert y.dtype == dtype
        assert off(y, exact) < CLOSE
