"""Every proved method against the layer written out as a matrix: never below it, in any configuration."""

from __future__ import annotations

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit.bounds import (
    METHODS,
    aol,
    circular,
    fantastic_four,
    gram,
    grid_correction,
    lipbound,
    lipbound_estimate,
    reshaped,
    symbol_sup,
)
from lipkit.errors import OptionError, ShapeError

from .reference import conv_matrix, norm, supremum, symbol_norm

# numpy and scipy are right to about this.
EXACT = 1 - 1e-12


def kernel_of(kind: str, *shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(shape, dtype=torch.float64, generator=g)
    if kind == "smooth":
        k = 0.2 * k + torch.randn(*shape[:2], 1, 1, dtype=torch.float64, generator=g)
    elif kind == "low rank":
        u, v = (
            torch.randn(shape[0], dtype=torch.float64, generator=g),
            torch.randn(shape[1:], dtype=torch.float64, generator=g),
        )
        k = u[:, None, None, None] * v
    elif kind == "one tap":
        mask = torch.zeros(shape[2:], dtype=torch.float64)
        mask[-1, 0] = 1
        k = k * mask
    elif kind == "float32":
        k = k.float()
    return k


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["random", "smooth", "low rank", "one tap", "float32"]),
    n=st.sampled_from([3, 5, 8, 16]),
    kh=st.sampled_from([1, 2, 3, 5, 7]),
    kw=st.sampled_from([1, 2, 3, 5, 7]),
    cin=st.integers(1, 3),
    cout=st.integers(1, 3),
    groups=st.integers(1, 2),
    stride=st.integers(1, 2),
    padding=st.integers(0, 3),
    mode=st.sampled_from(["zeros", "circular"]),
    seed=st.integers(0, 10**6),
)
def test_no_bound_is_below_the_truth(
    kind: str,
    n: int,
    kh: int,
    kw: int,
    cin: int,
    cout: int,
    groups: int,
    stride: int,
    padding: int,
    mode: str,
    seed: int,
) -> None:
    if mode == "circular":
        padding = min(padding, (min(kh, kw) - 1) // 2)
    if n + 2 * padding < max(kh, kw):
        kh, kw = min(kh, n), min(kw, n)
    kernel = kernel_of(kind, cout * groups, cin, kh, kw, seed=seed)
    matrix = conv_matrix(kernel, n, padding=padding, stride=stride, groups=groups, mode=mode)
    truth = norm(matrix) * EXACT
    for name, method in METHODS.items():
        assert float(method(kernel, groups=groups)) >= truth, name
    assert float(lipbound(kernel, groups=groups, correction="paper")) >= truth
    assert float(gram(kernel, groups=groups, size=(n + 2 * padding, n + 2 * padding), iterations=seed % 7)) >= (
        truth if mode == "zeros" else 0
    )
    if mode == "circular":
        assert float(circular(kernel, n, n, groups=groups)) >= truth
        assert float(gram(kernel, groups=groups, size=(n, n), iterations=seed % 7)) >= truth
    elif kind != "float32":
        assert float(reshaped(kernel, groups=groups, stride=stride)) >= truth


@pytest.mark.thorough
def test_trained_kernels(trained_kernels: list[Tensor]) -> None:
    for kernel in trained_kernels:
        k = kernel.shape[-1]
        bounds = {name: float(method(kernel)) for name, method in METHODS.items()}
        for n, mode in itertools.product((8, 12), ("zeros", "circular")):
            truth = norm(conv_matrix(kernel, n, padding=(k - 1) // 2, mode=mode)) * EXACT
            for name, bound in bounds.items():
                assert bound >= truth, (name, kernel.shape, n, mode)


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(["random", "smooth", "low rank", "one tap", "float32"]),
    kh=st.sampled_from([1, 2, 3, 5, 7]),
    kw=st.sampled_from([1, 2, 3, 5, 7]),
    cin=st.integers(1, 6),
    cout=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
@example(kind="random", kh=2, kw=2, cin=3, cout=5, seed=456)  # two peaks that differ by a thousandth
def test_symbol_sup_is_within_one_percent(kind: str, kh: int, kw: int, cin: int, cout: int, seed: int) -> None:
    kernel = kernel_of(kind, cout, cin, kh, kw, seed=seed)
    exact = supremum(kernel)
    assert exact * (1 - 1e-9) <= float(symbol_sup(kernel)) <= 1.01 * exact * (1 + 1e-9)


@pytest.mark.thorough
def test_symbol_sup_is_within_one_percent_of_trained_and_large_kernels(trained_kernels: list[Tensor]) -> None:
    g = torch.Generator().manual_seed(5)
    large = torch.randn(40, 30, 3, 3, generator=g)  # factorised in float32 first
    for kernel in [*trained_kernels, large]:
        exact = supremum(kernel)
        assert exact * (1 - 1e-9) <= float(symbol_sup(kernel)) <= 1.01 * exact * (1 + 1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("tolerance", [0.3, 0.05, 0.002])
def test_tolerance_is_kept(tolerance: float) -> None:
    for seed in range(4):
        kernel = kernel_of("random", 3, 4, 3, 3, seed=seed)
        exact = supremum(kernel)
        assert exact * (1 - 1e-9) <= float(symbol_sup(kernel, tolerance=tolerance)) <= (1 + tolerance) * exact


def test_transposed_convolutions_have_the_same_norm() -> None:
    kernel = kernel_of("random", 3, 2, 3, 3, seed=1)
    layer = nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(kernel)
        eye = torch.eye(3 * 25, dtype=torch.float64).reshape(-1, 3, 5, 5)
        truth = np.linalg.norm(layer(eye).flatten(1).numpy(), 2) * EXACT
    assert all(float(method(kernel)) >= truth for method in METHODS.values())


def test_groups_take_the_maximum() -> None:
    a, b = kernel_of("random", 3, 2, 3, 2, seed=2), 3 * kernel_of("random", 3, 2, 3, 2, seed=3)
    for name, method in METHODS.items():
        both = float(method(torch.cat((a, b)), groups=2))
        assert both == pytest.approx(
            max(float(method(a)), float(method(b))), rel=0.011 if name == "symbol_sup" else 1e-9
        )


@pytest.mark.thorough
def test_depthwise_kernels_of_many_channels() -> None:
    kernel = kernel_of("random", 9, 1, 3, 3, seed=4)
    exact = max(supremum(kernel[i : i + 1]) for i in range(9))
    assert exact <= float(symbol_sup(kernel, groups=9)) <= 1.01 * exact
    # One output and one input channel: LipBound is the grid alone.
    assert exact <= float(lipbound(kernel, groups=9)) <= exact * grid_correction(3, 10) ** 2 * (1 + 1e-9)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients(name: str, groups: int) -> None:
    kernel = kernel_of("random", 4, 3, 3, 2, seed=5).requires_grad_()
    step = kernel_of("random", 4, 3, 3, 2, seed=6)
    (grad,) = torch.autograd.grad(METHODS[name](kernel, groups=groups), kernel)
    h = 1e-6
    with torch.no_grad():
        ends = [METHODS[name](kernel + sign * h * step, groups=groups) for sign in (1, -1)]
        slope = float(ends[0] - ends[1]) / (2 * h)
    assert float((grad * step).sum()) == pytest.approx(slope, rel=1e-5)


SIZED = {"circular": lambda k, **o: circular(k, 6, 6, **o), "sized gram": lambda k, **o: gram(k, size=(6, 6), **o)}


@pytest.mark.parametrize("name", [*METHODS, *SIZED])
def test_extreme_kernels(name: str) -> None:
    method = (METHODS | SIZED)[name]
    zero = torch.zeros(2, 2, 3, 3, requires_grad=True)
    bound = method(zero)
    bound.backward()
    assert (bound.item(), bound.dtype) == (0, torch.float64)
    assert zero.grad is not None and not zero.grad.any()  # noqa: PT018
    kernel = kernel_of("random", 2, 4, 3, 3, seed=7)
    value = float(method(kernel))
    for scale in (2.0**-900, 2.0**-300, 2.0**400, 2.0**900):
        assert float(method(kernel * scale)) / scale == pytest.approx(value, rel=1e-9)
    for tiny in (5e-324, 1e-320, 1e-308):
        assert float(method(torch.full((1, 1, 3, 3), tiny, dtype=torch.float64))) >= 9 * tiny
    for bad in (math.nan, math.inf):
        broken = kernel.clone()
        broken[1, 2, 0, 1] = bad
        assert (float(method(broken)), method(broken).dtype) == (math.inf, torch.float64)
        assert float(method(broken, groups=2)) == math.inf
    half = kernel.to(torch.bfloat16)
    assert float(method(half)) == float(method(half.double()))


def test_a_symbol_that_vanishes_has_a_gradient_of_zeros() -> None:
    kernel = torch.tensor([[[[1.0, -1.0]]]], requires_grad=True)  # on one pixel both taps meet
    for bound in (circular(kernel, 1, 1), gram(kernel, size=(1, 1)), reshaped(0 * kernel)):
        assert bound < 1e-13
        assert not torch.autograd.grad(bound, kernel)[0].any()


@pytest.mark.parametrize("name", METHODS)
def test_one_signature(name: str) -> None:
    parameters = list(inspect.signature(METHODS[name]).parameters.values())
    assert [p.name for p in parameters][:2] == ["kernel", "groups"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters[1:])
    bound = METHODS[name](torch.ones(2, 1, 3, 3))
    assert bound.shape == () and bound.dtype == torch.float64  # noqa: PT018
    with pytest.raises(ShapeError, match=r"expected shape \(cout, cin, kh, kw\)"):
        METHODS[name](torch.ones(3, 3))
    with pytest.raises(OptionError, match=r"groups: expected a divisor of the 4"):
        METHODS[name](torch.ones(4, 1, 3, 3), groups=3)


def test_lipbound_is_the_formula_of_the_paper() -> None:
    kernel = kernel_of("random", 3, 5, 3, 3, seed=8)
    w = 2 * np.pi * np.arange(10) / 10
    e = np.exp(1j * np.outer(w, np.arange(3)))
    symbol = np.einsum("ocst,xs,yt->xyoc", kernel.numpy(), e, e)
    rows = math.sqrt((np.abs(symbol) ** 2).sum(3).max((0, 1)).sum())
    columns = math.sqrt((np.abs(symbol) ** 2).sum(2).max((0, 1)).sum())
    plain = min(rows, columns)
    assert float(lipbound_estimate(kernel)) == pytest.approx(plain, rel=1e-12)
    assert float(lipbound(kernel)) == pytest.approx(plain / math.cos(math.pi / 10) ** 2, rel=1e-12)
    assert float(lipbound(kernel, points=16, correction="paper")) == pytest.approx(
        float(lipbound_estimate(kernel, points=16)) / (1 - 2 / 16), rel=1e-12
    )


def test_an_uncorrected_grid_is_no_bound() -> None:
    kernel = torch.tensor([1.0, 0.0, -1.0]).reshape(1, 1, 1, 3)
    assert float(lipbound_estimate(kernel)) < 2 <= float(lipbound(kernel))
    assert "estimate" in lipbound_estimate.__name__


def test_gram_falls_with_iterations_towards_the_norm() -> None:
    kernel = kernel_of("random", 6, 5, 3, 3, seed=9)
    w = np.stack(np.meshgrid(*[2 * np.pi * np.arange(7) / 7] * 2), -1).reshape(-1, 2)
    truth = symbol_norm(kernel, w).max()
    values = [float(gram(kernel, size=(7, 7), iterations=t)) for t in (0, 1, 3, 6, 12)]
    assert values == sorted(values, reverse=True)
    assert truth * EXACT <= values[-1] <= truth * (1 + 1e-3)
    assert all(v <= truth * 5 ** (0.5 ** (t + 2)) * (1 + 1e-9) for v, t in zip(values, (0, 1, 3, 6, 12), strict=True))


def test_reshaped_is_exact_for_windows_that_do_not_overlap() -> None:
    kernel = kernel_of("random", 3, 2, 2, 2, seed=10)
    truth = norm(conv_matrix(kernel, 8, stride=2))
    assert truth * EXACT <= float(reshaped(kernel, stride=2)) <= truth * (1 + 1e-9)


@pytest.mark.parametrize(("stride", "windows"), [(1, 15), (2, 6), ((1, 4), 6), ([2, 3], 4), (7, 1)])
def test_reshaped_counts_the_windows_over_a_pixel(stride: object, windows: int) -> None:
    kernel = kernel_of("random", 4, 2, 3, 5, seed=11)
    norms = [np.linalg.norm(half.flatten(1).numpy(), 2) for half in kernel.split(2)]
    expected = max(norms) * math.sqrt(windows)
    assert float(reshaped(kernel, groups=2, stride=stride)) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]


def test_fantastic_four_is_the_smallest_of_four_norms() -> None:
    smallest = set()
    for seed, (o, i, h, w) in enumerate([(2, 6, 4, 12), (12, 1, 3, 4), (1, 12, 3, 4), (6, 2, 4, 12)]):
        kernel = kernel_of("random", o, i, h, w, seed=seed)
        k = kernel.numpy()
        four = [k.transpose(0, 2, 1, 3).reshape(o * h, i * w), k.transpose(0, 3, 1, 2).reshape(o * w, i * h)]
        four += [k.reshape(o, i * h * w), k.transpose(0, 2, 3, 1).reshape(o * h * w, i)]
        norms = [np.linalg.norm(one, 2) for one in four]
        smallest.add(int(np.argmin(norms)))
        assert float(fantastic_four(kernel)) == pytest.approx(min(norms) * math.sqrt(h * w), rel=1e-12)
    assert smallest == {0, 1, 2, 3}


def test_aol_is_the_largest_row_sum_of_the_gram_matrix() -> None:
    kernels = [kernel_of("random", o, i, 3, 2, seed=12) for o, i in ((2, 4), (4, 2), (3, 3))]
    for kernel in [*kernels, 3 * kernels[0]]:
        t = conv_matrix(kernel, 7, padding=2).toarray()
        sums = [np.abs(gram).sum(1).max() for gram in (t.T @ t, t @ t.T)]
        assert float(aol(kernel)) == pytest.approx(math.sqrt(min(sums)), rel=1e-12)
    together = torch.cat((kernels[0], 3 * kernels[0].flip(0)))
    assert float(aol(together, groups=2)) == pytest.approx(3 * float(aol(kernels[0])), rel=1e-12)


BAD_STRIDES = (0, 1.5, None, (1,), (1, 1, 1), (1, 0), (1, 1.0), (1, True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: symbol_sup(k, tolerance=0.0), "tolerance: expected a number in"),
        (lambda k: symbol_sup(k, tolerance=math.nan), "tolerance: expected a finite number, got nan"),
        (lambda k: symbol_sup(k, points=8.5), "points: expected an integer of at least 1, got 8.5"),
        (lambda k: symbol_sup(k[0, 0, 0], points=8), "kernel: expected shape"),
        (lambda k: circular(k, 0, 3), "h: expected an integer of at least 1, got 0"),
        (lambda k: lipbound(k, correction="none"), "correction: expected 'exact' or 'paper'"),
        (lambda k: lipbound(k, points=2), "points: expected at least the number of taps 3, got 2"),
        (lambda k: lipbound(k, points=0), "points: expected an integer of at least 1, got 0"),
        (lambda k: lipbound(k, points=2, correction="paper"), "points: expected more than 2 d = 2"),
        (lambda k: gram(k, iterations=-1), "iterations: expected an integer of at least 0, got -1"),
        (lambda k: gram(k, size=(0, 3)), "size: expected"),
        *((lambda k, s=s: reshaped(k, stride=s), "stride: expected one or two integers") for s in BAD_STRIDES),
        (lambda k: reshaped(k, groups=True), "groups: expected a divisor of the 2 output channels, got True"),
        (lambda k: gram(k, size=(3,)), "size: expected"),
        (lambda k: gram(k, size=(6.5, 6)), "size: expected"),
        (lambda k: gram(k, size=6), "size: expected"),
    ],
)
def test_refusals(call: object, message: str) -> None:
    with pytest.raises((OptionError, ShapeError), match=message):
        call(torch.ones(2, 2, 3, 3))  # type: ignore[operator]
