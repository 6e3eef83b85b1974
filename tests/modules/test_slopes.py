"""Constants of activations against the largest slope, found with 40 digits or in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lipkit.errors import NoRuleError
from lipkit.lowering import lipschitz
from lipkit.modules import Arcsinh, Arctan, GroupSort, MaxMin
from lipkit.modules.activations import ACTIVATIONS, slope_restricted


def largest_slope(f: Callable[[mpmath.mpf], mpmath.mpf], near: float) -> mpmath.mpf:
    """|f'| at the root of f'' near a point, to 40 digits."""
    with mpmath.workdps(40):
        at = mpmath.findroot(lambda x: mpmath.diff(f, x, 2), near)
        return abs(mpmath.diff(f, at))


def sigmoid(x: mpmath.mpf) -> mpmath.mpf:
    return 1 / (1 + mpmath.exp(-x))


def gelu_tanh(x: mpmath.mpf) -> mpmath.mpf:
    return x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)))


SMOOTH = [
    (nn.SiLU(), lambda x: x * sigmoid(x), 2.4),
    (nn.Mish(), lambda x: x * mpmath.tanh(mpmath.log(1 + mpmath.exp(x))), 1.5),
    (nn.GELU(), lambda x: x * mpmath.ncdf(x), 1.4),
    (nn.GELU("tanh"), gelu_tanh, 1.4),
]


@pytest.mark.parametrize(("module", "function", "near"), SMOOTH, ids=["silu", "mish", "gelu", "gelu tanh"])
def test_smooth_activations_with_a_steepest_point(
    module: nn.Module, function: Callable[[mpmath.mpf], mpmath.mpf], near: float
) -> None:
    truth = largest_slope(function, near)
    bound = float(lipschitz(module))
    assert mpmath.mpf(bound) >= truth
    assert bound <= float(truth) * (1 + 1e-9)


EXACT = [
    (nn.ReLU(), 1.0),
    (nn.ReLU6(), 1.0),
    (nn.LeakyReLU(0.3), 1.0),
    (nn.LeakyReLU(-2.5), 2.5),
    (nn.LeakyReLU(4.0), 4.0),
    (nn.ELU(0.5), 1.0),
    (nn.ELU(3.0), 3.0),
    (nn.ELU(-3.0), 3.0),
    (nn.CELU(0.2), 1.0),
    (nn.CELU(5.0), 1.0),
    (nn.SELU(), 1.0507009873554804934 * 1.6732632423543772848),
    (nn.Tanh(), 1.0),
    (Arctan(), 1.0),
    (Arcsinh(), 1.0),
    (nn.Sigmoid(), 0.25),
    (nn.Softplus(), 1.0),
    (nn.Softplus(3.0, 40.0), 1.0),
    (nn.Softsign(), 1.0),
    (nn.LogSigmoid(), 1.0),
    (nn.Hardtanh(-0.3, 2.0), 1.0),
    (nn.Hardsigmoid(), 1 / 6),
    (nn.Hardswish(), 1.5),
    (nn.Softshrink(0.7), 1.0),
    (nn.Tanhshrink(), 1.0),
    (nn.Identity(), 1.0),
]


@pytest.mark.parametrize(("module", "truth"), EXACT, ids=[repr(m) for m, _ in EXACT])
def test_closed_forms(module: nn.Module, truth: float) -> None:
    assert truth <= float(lipschitz(module)) <= truth * (1 + 1e-9)


ALL = [*(m for m, _ in EXACT), *(m for m, _, _ in SMOOTH)]


@pytest.mark.parametrize("module", ALL, ids=[repr(m) for m in ALL])
def test_torchs_function_reaches_the_constant_and_never_exceeds_it(module: nn.Module) -> None:
    # Secants of the function that torch computes, on a grid fine enough to see the steepest place.
    x = torch.cat((torch.linspace(-60, 60, 480_001, dtype=torch.float64), torch.tensor([-1e4, 1e4]).double())).sort()[0]
    y = module(x)
    secants = (y.diff() / x.diff()).abs()
    bound = float(lipschitz(module))
    assert float(secants.max()) <= bound * (1 + 1e-7)
    # Slope 1 of Softsign and Tanhshrink, slope -1 of LogSigmoid: reached at a point or at infinity.
    assert float(secants.max()) >= bound * 0.999


def test_hardsigmoid_constant_is_at_least_the_rational_number() -> None:
    with mpmath.workdps(40):
        assert mpmath.mpf(float(lipschitz(nn.Hardsigmoid()))) >= mpmath.mpf(1) / 6


def test_selu_constant_is_at_least_the_product_with_forty_digits() -> None:
    with mpmath.workdps(40):
        scale = mpmath.mpf("1.0507009873554804934193349852946")
        alpha = mpmath.mpf("1.6732632423543772848170429916717")
        assert mpmath.mpf(float(lipschitz(nn.SELU()))) >= scale * alpha


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=6))
def test_softmax_jacobian_is_at_most_one_half(values: list[float]) -> None:
    p = torch.softmax(torch.tensor(values, dtype=torch.float64), 0).numpy()
    assert np.linalg.norm(np.diag(p) - np.outer(p, p), 2) <= float(lipschitz(nn.Softmax(dim=1))) + 1e-15


def test_softmax_reaches_one_half() -> None:
    jacobian = torch.autograd.functional.jacobian(nn.Softmax(dim=0), torch.zeros(2, dtype=torch.float64))
    assert np.linalg.norm(jacobian.numpy(), 2) == pytest.approx(0.5)
    assert float(lipschitz(nn.Softmax(dim=-1))) == 0.5


@pytest.mark.parametrize(
    ("dim", "shape"), [(0, None), (None, None), (-2, None), (-2, (5,)), (-4, (2, 3, 4)), (0, (3,))]
)
def test_softmax_over_the_batch_is_refused(dim: int | None, shape: tuple[int, ...] | None) -> None:
    with pytest.raises(NoRuleError, match="batch"):
        lipschitz(nn.Softmax(dim=dim), shape)


def test_softmax_over_other_dimensions() -> None:
    assert float(lipschitz(nn.Softmax(dim=2))) == 0.5
    assert float(lipschitz(nn.Softmax(dim=-2), (3, 4))) == 0.5
    assert float(lipschitz(nn.Softmax(dim=-3), (2, 3, 4))) == 0.5


@pytest.mark.parametrize("weights", [[0.25], [-3.0, 0.5], [2.0, -1.0, 0.0]])
def test_prelu(weights: list[float]) -> None:
    module = nn.PReLU(len(weights))
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weights))
    bound = lipschitz(module)
    assert float(bound.detach()) == max(1.0, *(abs(w) for w in weights))
    x = torch.randn(200, len(weights))
    secants = (module(x) - module(x.flip(0))).norm(dim=1) / (x - x.flip(0)).norm(dim=1).clamp_min(1e-9)
    assert float(secants.detach().max()) <= float(bound.detach()) * (1 + 1e-6)


def test_prelu_gradient() -> None:
    module = nn.PReLU(2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([-3.0, 0.5]))
    lipschitz(module).backward()
    assert module.weight.grad.tolist() == [-1.0, 0.0]


REFUSED = [
    (nn.CELU(-1.0), "alpha"),
    (nn.CELU(0.0), "alpha"),
    (nn.CELU(math.nan), "alpha"),
    (nn.CELU(math.inf), "alpha"),
    (nn.Softplus(math.inf), "beta"),
    (nn.Softplus(1.0, math.inf), "threshold"),
    (nn.Softplus(-1.0), "beta"),
    (nn.Softplus(0.0), "beta"),
    (nn.Softplus(math.nan), "beta"),
    (nn.Softplus(1.0, 0.0), "threshold"),
    (nn.Softplus(1.0, 5.0), "threshold"),
    (nn.Softplus(1.0, math.nan), "threshold"),
]


@pytest.mark.parametrize(("module", "word"), REFUSED, ids=[repr(m) for m, _ in REFUSED])
def test_what_is_not_lipschitz_is_refused(module: nn.Module, word: str) -> None:
    with pytest.raises(NoRuleError, match=f"expected {word} .* got"):
        lipschitz(module)
    assert not slope_restricted(module)


def test_celu_with_negative_alpha_really_is_not_lipschitz() -> None:
    y = nn.CELU(-1.0)(torch.tensor([-10.0, -11.0]))
    assert float((y[0] - y[1]).abs()) > 1e4


def test_softplus_with_a_low_threshold_really_jumps() -> None:
    y = nn.Softplus(1.0, 0.0)(torch.tensor([0.0, 1e-6]))
    assert float((y[0] - y[1]).abs()) > 0.6


UNDEFINED = [nn.LeakyReLU(math.nan), nn.ELU(math.nan), nn.LeakyReLU(math.inf), nn.ELU(math.inf)]
UNDEFINED += [nn.Softshrink(math.nan), nn.Softshrink(math.inf), nn.Softshrink(-1.0), nn.Hardtanh(-math.inf, math.inf)]


@pytest.mark.parametrize("module", UNDEFINED, ids=[repr(m) for m in UNDEFINED])
def test_undefined_slopes_bound_nothing(module: nn.Module) -> None:
    assert float(lipschitz(module)) == math.inf
    assert not slope_restricted(module)


@pytest.mark.parametrize(
    "module",
    [
        nn.Hardshrink(),
        nn.RReLU(),
        nn.CrossMapLRN2d(2),
        nn.LogSoftmax(1),
    ],
)
def test_no_rule_no_bound(module: nn.Module) -> None:
    with pytest.raises(NoRuleError, match="has no rule"):
        lipschitz(module)


def test_a_gate_has_no_bound_on_all_of_space() -> None:
    with pytest.raises(NoRuleError, match="no Lipschitz constant on all of space"):
        lipschitz(nn.GLU(), (4,))


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([2, 3, 4]))
def test_sorting_activations_are_one_lipschitz(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(20, 12, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    for module in (MaxMin(), GroupSort(size)):
        change = (module(x) - module(y)).flatten(1).norm(dim=1)
        assert bool((change <= (x - y).flatten(1).norm(dim=1) * (1 + 1e-12)).all())
        assert float(lipschitz(module)) == 1.0
        # An isometry: the norm of every sample is kept.
        assert torch.allclose(module(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))


SCALAR = [m for m in ALL if not isinstance(m, nn.Identity)]


@pytest.mark.parametrize("module", SCALAR, ids=[repr(m) for m in SCALAR])
def test_slope_restricted_means_slopes_in_zero_to_one(module: nn.Module) -> None:
    x = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    secants = module(x).diff() / x.diff()
    inside = bool((secants >= -1e-7).all() & (secants <= 1 + 1e-7).all())
    assert slope_restricted(module) == inside


def test_a_function_is_known_by_all_of_its_names() -> None:
    # torch.f, torch.f_, tensor.f and tensor.f_ compute the same: a row that has one has all.
    missing = set[str]()
    for row in ACTIVATIONS.values():
        names = {f if isinstance(f, str) else f.__name__ for f in row.functions}
        for name in (n + end for n in {n.rstrip("_") for n in names} for end in ("", "_")):
            made = [getattr(place, name, None) for place in (torch, F)]
            missing |= {f"torch: {name}" for f in made if f is not None and not any(f is g for g in row.functions)}
            if hasattr(torch.Tensor, name) and name not in row.functions:
                missing.add(f"Tensor: {name}")
    assert not missing
