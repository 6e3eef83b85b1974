"""Rounding rules against what float32 really loses (float64 is exact beside it): never below it, never idle."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit import certify, export, modules
from lipkit.certificates.evaluators import machine
from lipkit.conv import kernel_symbol
from lipkit.errors import NoRuleError
from lipkit.layers.families import FAMILIES, names
from lipkit.lowering import lipschitz
from lipkit.modules import ROWS, local_error
from lipkit.modules.dense import blocked
from lipkit.modules.fourier import spectral_blocks
from lipkit.modules.machine import prepare, prove_module, through
from lipkit.modules.plain import stored_types
from lipkit.proof.roundoff import FLOAT32, FLOAT64, Line

VECTOR, IMAGE = (12,), (4, 6, 6)


def fourier(cin: int, cout: int, side: int) -> modules.FourierConv2d:
    symbol = kernel_symbol(torch.randn(cout, cin, 3, 3) / (3 * cin**0.5), side, side)
    return modules.FourierConv2d.from_symbol(symbol, side, side, torch.randn(cout))


def phase(complex_pairs: bool) -> modules.FourierConv2d:
    layer = modules.FourierConv2d(4, 4, 6, 6, (3, 3), complex_pairs=complex_pairs)
    for tensor in layer.state_dict().values():
        tensor.normal_(std=0.5)
    return layer


def taylor() -> modules.TaylorConv2d:
    layer = modules.TaylorConv2d(4, 3, (3, 3), terms=6)
    layer.kernel.normal_(std=0.1)
    return layer


def norm_with_statistics() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(4)
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.running_mean):
            tensor.normal_()
        layer.running_var.uniform_(0.5, 2.0)
    return layer.eval()


def layer_norm() -> nn.LayerNorm:
    layer = nn.LayerNorm((6, 6), 0.1)
    for tensor in layer.parameters():
        nn.init.normal_(tensor)
    return layer


def positions() -> nn.Module:
    layer = modules.PositionCode(*IMAGE)
    nn.init.normal_(layer.offset)
    return layer


# name: (module, input shape, the factor by which the bound may exceed what random inputs lose at most)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "linear": (lambda: nn.Linear(12, 7), VECTOR, 60),
    "linear, huge bias": (lambda: nn.Linear(12, 7).requires_grad_(False), VECTOR, 60),
    "linear on rows": (lambda: nn.Linear(6, 5, bias=False), IMAGE, 60),
    "conv": (lambda: nn.Conv2d(4, 5, 3, padding=1), IMAGE, 300),
    "conv, circular, even": (lambda: nn.Conv2d(4, 5, 2, padding="same", padding_mode="circular"), IMAGE, 150),
    "conv, reflect, stride": (lambda: nn.Conv2d(4, 6, 3, padding=2, stride=2, padding_mode="reflect"), IMAGE, 300),
    "conv, replicate, groups": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="replicate"),
        IMAGE,
        200,
    ),
    "conv, dilated": (lambda: nn.Conv2d(4, 5, 2, dilation=3), IMAGE, 150),
    "conv on a row": (lambda: nn.Conv2d(4, 5, (1, 3), padding=(0, 1)), (4, 1, 9), 150),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), IMAGE, 200),
    "affine": (lambda: modules.Affine(torch.randn(4), torch.randn(4)), IMAGE, 20),
    "batch norm": (lambda: export(norm_with_statistics(), IMAGE)[0], IMAGE, 60),
    "layer norm": (layer_norm, IMAGE, 4000),
    "layer norm, plain": (lambda: nn.LayerNorm((6, 6), 0.1, elementwise_affine=False), IMAGE, 4000),
    "layer center": (lambda: modules.LayerCenter(1, 3), IMAGE, 200),
    "average": (lambda: nn.AvgPool2d(2), IMAGE, 60),
    "average, padded": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE, 150),
    "global average": (lambda: nn.AdaptiveAvgPool2d(1), IMAGE, 300),
    "leaky": (lambda: nn.LeakyReLU(0.1), VECTOR, 50),
    "prelu": (lambda: nn.PReLU(init=0.3), VECTOR, 50),
    "tanh": (nn.Tanh, VECTOR, 400),
    "tanhshrink": (nn.Tanhshrink, VECTOR, 400),
    "sigmoid": (nn.Sigmoid, VECTOR, 400),
    "log sigmoid": (nn.LogSigmoid, VECTOR, 400),
    "softsign": (nn.Softsign, VECTOR, 60),
    "hard sigmoid": (nn.Hardsigmoid, VECTOR, 100),
    "hard swish": (nn.Hardswish, VECTOR, 200),
    "silu": (nn.SiLU, VECTOR, 400),
    "mish": (nn.Mish, VECTOR, 1200),
    "selu": (nn.SELU, VECTOR, 800),
    "gelu": (nn.GELU, VECTOR, 800),
    "gelu, tanh": (lambda: nn.GELU("tanh"), VECTOR, 800),
    "elu": (lambda: nn.ELU(1.5), VECTOR, 400),
    "celu": (lambda: nn.CELU(0.7), VECTOR, 400),
    "softplus": (lambda: nn.Softplus(2.0), VECTOR, 800),
    "hard tanh": (lambda: nn.Hardtanh(-0.1, 0.3), VECTOR, math.inf),
    "soft shrink": (lambda: nn.Softshrink(0.3), VECTOR, 100),
    "softmax": (lambda: nn.Softmax(1), VECTOR, 4000),
    "relu": (nn.ReLU, VECTOR, math.inf),
    "relu6": (nn.ReLU6, VECTOR, math.inf),
    "maxmin": (modules.MaxMin, IMAGE, math.inf),
    "group sort": (lambda: modules.GroupSort(2), IMAGE, math.inf),
    "full sort": (lambda: modules.GroupSort(None), IMAGE, math.inf),
    "half abs": (modules.HalfAbs, IMAGE, math.inf),
    "N-activation": (lambda: modules.NActivation(4, -0.3, 0.2), IMAGE, 60),
    "LPReLU": (lambda: export(modules.LPReLU(4, 0.3), IMAGE)[0], IMAGE, 60),
    "Householder": (lambda: modules.Householder(4), IMAGE, 500),
    "Householder, order 3": (lambda: modules.Householder(4, 3), IMAGE, 900),
    "norms of windows": (lambda: modules.L2NormPool2d(2), IMAGE, 100),
    "norms of images": (modules.L2NormPool2d, IMAGE, 400),
    "unit norm": (lambda: modules.UnitNorm(1, 3, eps=0.1), IMAGE, 4000),
    "unit norm, small": (lambda: modules.UnitNorm(1, eps=1e-6), VECTOR, 4000),
    "adaptive average, overlapping": (lambda: nn.AdaptiveAvgPool2d((3, 4)), IMAGE, 200),
    "position code": (lambda: export(positions(), IMAGE)[0], IMAGE, 60),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), IMAGE, math.inf),
    "shift": (lambda: modules.Shift2d(4, 1), IMAGE, math.inf),
    "resize": (lambda: modules.Pad(0, 0, 0, 0, 0, 2), IMAGE, math.inf),
    "fourier, dense": (lambda: fourier(4, 5, 6), IMAGE, 1000),
    "fourier, separable": (lambda: fourier(3, 4, 12), (3, 12, 12), 1000),
    "phase, real": (lambda: phase(False), IMAGE, 600),
    "phase, complex": (lambda: phase(True), IMAGE, 600),
    "taylor": (taylor, IMAGE, 2500),
    "sandwich": (
        lambda: modules.SandwichBlock(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5), torch.ones(8)),
        VECTOR,
        600,
    ),
    "slope residual": (
        lambda: modules.SlopeResidual(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 12), torch.ones(8)),
        VECTOR,
        200,
    ),
    "attraction": (lambda: modules.Attraction(2), (9, 6), 300),
    "memory": (
        lambda: modules.GradientStep(nn.Linear(6, 8), nn.Softmax(-1), torch.tensor(2.0)),
        (5, 6),
        2000,
    ),
    "tokens": (
        lambda: modules.GradientStep(nn.Linear(6, 8), modules.Attraction(2), torch.tensor(0.7)),
        (5, 6),
        800,
    ),
    "blend": (
        lambda: modules.Graph([nn.Linear(12, 12), modules.Blend(torch.tensor(0.3))], [[0], [1, 0]]),
        VECTOR,
        200,
    ),
    "sum": (
        lambda: modules.Graph([nn.Linear(12, 12), nn.Tanh(), modules.Add(1, 1, 1)], [[0], [0], [1, 2, 0]]),
        VECTOR,
        400,
    ),
    "sequential": (lambda: nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3)), VECTOR, 300),
}


def norms(x: Tensor) -> Tensor:
    return x.double().flatten(1).norm(dim=1)


def make(name: str) -> tuple[nn.Module, tuple[int, ...], float]:
    torch.manual_seed(sum(map(ord, name)))
    maker, shape, factor = CASES[name]
    module = maker()
    if name == "linear, huge bias":
        module.bias.mul_(1e6)
    return module.eval(), shape, factor


@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds_and_is_not_idle(name: str) -> None:
    module, shape, factor = make(name)
    exact = copy.deepcopy(module).double()
    measure = local_error(exact, shape, FLOAT32)
    closest = 0.0
    for size in (0.0, 1e-6, 1.0, 30.0):
        for far in (0.0, 1e-3, 1.0, 10.0):
            x = size * torch.randn(32, *shape)
            h = x + (size or 1.0) * far * torch.randn(32, *shape)  # from 0, all of the error is its growth
            with torch.no_grad():
                error = norms(module(h).double() - exact(h.double()))
            local = measure(x.double())
            distance = norms(h.double() - x.double())
            bound = local.error.at + local.error.slope * distance
            assert (error <= bound).all(), f"{name}, {size}, {far}"
            with torch.no_grad():
                assert (module(h).flatten(1).abs().amax(1) <= local.peak.at + local.peak.slope * distance).all() or (
                    type(module) in (modules.Pad, modules.Shift2d)
                )
            closest = max(closest, float((error / bound).amax()))
    if not math.isinf(factor):
        assert closest * factor > 1, f"bound {1 / max(closest, 1e-12):.0f} times what is lost at most"
    else:
        assert float(measure(torch.ones(1, *shape).double()).error.at) < 1e-5  # nothing but comparisons


@pytest.mark.parametrize("name", ["linear", "conv", "conv, circular, even", "conv, reflect, stride", "sequential"])
def test_blocks_lose_less_and_stay_within_their_bound(name: str) -> None:
    module, shape, _ = make(name)
    x = 10 * torch.randn(64, *shape)
    exact = copy.deepcopy(module).double()
    for block in (4, 32):
        arithmetic = type(FLOAT32)(FLOAT32.unit, FLOAT32.tiny, FLOAT32.largest, block=block)
        with torch.no_grad():
            error = norms(blocked(module, block)(x).double() - exact(x.double()))
        assert (error <= local_error(exact, shape, arithmetic)(x.double()).error.at).all()


def test_long_sums_in_blocks() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3000, 10)
    exact, x = copy.deepcopy(layer).double(), torch.rand(20, 3000)
    arithmetic = type(FLOAT32)(FLOAT32.unit, FLOAT32.tiny, FLOAT32.largest, block=32)
    loose = local_error(exact, (3000,), FLOAT32)(x.double()).error.at
    tight = local_error(exact, (3000,), arithmetic)(x.double()).error.at
    with torch.no_grad():
        error = norms(blocked(layer)(x).double() - exact(x.double()))
    assert (error <= tight).all()
    assert (tight < loose / 50).all()


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-1e6, 1e6, width=64), min_size=3, max_size=3),
    st.lists(st.floats(-1e6, 1e6, width=64), min_size=3, max_size=3),
    st.floats(-1e6, 1e6),
)
def test_float64_inner_products_against_fractions(weight: list[float], x: list[float], bias: float) -> None:
    layer = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([weight], dtype=torch.float64))
        layer.bias.fill_(bias)
        got = Fraction(float(layer(torch.tensor([x], dtype=torch.float64))))
    truth = sum((Fraction(a) * Fraction(b) for a, b in zip(weight, x, strict=True)), Fraction(bias))
    bound = float(local_error(layer, (3,), FLOAT64)(torch.tensor([x], dtype=torch.float64)).error.at)
    assert abs(got - truth) <= Fraction(bound)


@pytest.mark.thorough
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(1e-3, 10.0), st.booleans())
def test_a_chain_is_never_below_what_it_loses(seed: int, size: float, spread: float, blocks: bool) -> None:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(40, 30), modules.MaxMin(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 5)).eval()
    network = modules.Network(module, (40,))
    exact = copy.deepcopy(network).double()
    name = "float32_blocked" if blocks else "float32"
    arithmetic = type(FLOAT32)(FLOAT32.unit, FLOAT32.tiny, FLOAT32.largest, block=32 if blocks else None)
    x = size * torch.randn(8, 40)
    h = x + spread * torch.randn(8, 40)
    walk = through(prepare([*exact], (40,), arithmetic), x.double())
    with torch.no_grad():
        error = norms(machine(network, name)(h).double() - exact(h.double()))
    distance = norms(h.double() - x.double())
    assert (error <= walk.error.at + walk.error.slope * distance).all()
    with torch.no_grad():
        moved = norms(exact(h.double()) - walk.centre)
    assert (moved <= (walk.move.at + walk.move.slope * distance) * (1 + 1e-9)).all()


def test_the_error_grows_with_the_distance_from_the_sample() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(40, 30, bias=False), nn.ReLU(), nn.Linear(30, 20, bias=False), nn.ReLU()]
    network = modules.Network(layers, (40,))
    exact = copy.deepcopy(network).double()
    walk = through(prepare([*exact], (40,), FLOAT32), torch.zeros(1, 40, dtype=torch.float64))
    assert float(walk.error.at) < 1e-30  # nothing is lost at 0
    for distance in (1e-3, 1.0, 1e3):
        h = distance * torch.randn(200, 40)
        with torch.no_grad():
            error = norms(network(h).double() - exact(h.double()))
        bound = walk.error.slope * norms(h)
        assert (error <= bound + float(walk.error.at)).all()
        assert (error > bound / 1000).any()


def test_weights_below_the_normal_range_may_count_as_zero() -> None:
    layer = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.fill_(1e-40)  # subnormal in float32
    x = torch.full((1, 3), 1e30, dtype=torch.float64)
    error = float(local_error(layer, (3,), FLOAT32)(x).error.at)
    assert error >= float(layer(x).detach().norm())  # flushed to zero, nothing of the output is left
    assert float(local_error(layer, (3,), FLOAT64)(x).error.at) < 1e-20


def test_each_copy_of_a_pixel_may_be_off() -> None:
    layer = nn.Conv2d(1, 1, 1, padding=1, padding_mode="replicate", bias=False, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    slope = local_error(layer, (1, 1, 1), FLOAT32)(torch.zeros(1, 1, 1, 1).double()).error.slope
    assert slope >= 3 * FLOAT32.unit  # nine outputs of one pixel


def test_errors_of_weights_whose_squares_underflow_still_grow() -> None:
    # Row sum times column sum is below every float64 number, their roots are not.
    layer = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    fourier = modules.FourierConv2d(1, 1, 4, 4, bias=False).double()
    for tensor in (layer.weight, fourier.real, fourier.pair):
        nn.init.constant_(tensor, 1e-175)
    slope = local_error(layer, (3,), FLOAT64)(torch.zeros(1, 3).double()).error.slope
    assert 1e-175 * 2.0**-53 < slope < 1e-175 * 2.0**-46
    assert spectral_blocks(fourier) >= 1e-175
    assert Line(torch.zeros(1).double(), 1e-200).times(1e-200).slope > 0  # rounded up


def test_a_certificate_counts_the_errors_of_tiny_weights() -> None:
    torch.manual_seed(1)
    first, last = nn.Linear(64, 1, bias=False).double(), nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        first.weight.copy_(torch.rand(1, 64) * 1e-10).mul_(1e-165)
        last.weight.copy_(torch.tensor([[1.0], [-1.0]])).mul_(1e120)
        x = torch.randn(40, 64, dtype=torch.float64) * 1e55
        for _ in range(3):  # the sums cancel: only their errors are left
            x[:, -1] -= (first(x) / first.weight[0, -1])[:, 0]
    found = [certify(modules.Network([first, last], (64,)), x, torch.full((40,), label)).radius for label in (0, 1)]
    assert float(torch.maximum(*found).max()) == 0


def test_the_jump_of_softplus_counts() -> None:
    layer = nn.Softplus(1.0, 20.0).double()
    x = torch.tensor([[20.0, 20.0 + 1e-9, 21.0]], dtype=torch.float64)
    error = (layer(x) - torch.log1p(x.exp())).abs().norm()
    assert 1e-9 < error <= local_error(layer, (3,), FLOAT64)(x).error.at.item() < 1e-8


@pytest.mark.thorough
@pytest.mark.parametrize("name", names())
def test_every_family_has_rules(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = nn.Sequential(family.conv(2, 4, 3), modules.MaxMin(), nn.Flatten(), family.linear(4 * 36, 8)).eval()
    if name == "eco":
        assert any(isinstance(m, modules.FourierConv2d) for m in export(model, (2, 6, 6)))
    network = export(model, (2, 6, 6))
    exact = copy.deepcopy(network).double()
    x = torch.rand(4, 2, 6, 6)
    walk = through(prepare([*exact], (2, 6, 6), FLOAT32), x.double())
    with torch.no_grad():
        error = norms(network(x).double() - exact(x.double()))
    assert (error <= walk.error.at).all()
    assert (walk.error.at < 1e-3).all()


def test_every_type_that_can_be_exported_and_stored_has_a_rule() -> None:
    rounded = {kind for kind, row in ROWS.items() if row.rounding is not None}
    assert {kind for kind in stored_types() if ROWS[kind].join is None} <= rounded


def test_a_module_without_a_rule_is_refused() -> None:
    class Mystery(nn.ReLU):
        pass

    with pytest.raises(NoRuleError, match=r"Mystery, which has none: export .* or certify with rounding='ign"):
        local_error(Mystery(), (3,), FLOAT64)
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(NoRuleError, match="hooks"):
        local_error(hooked, (3,), FLOAT64)


def test_the_gain_of_a_chain_is_that_of_its_modules() -> None:
    layer = nn.Linear(5, 5).double()
    gain = prove_module(layer, (5,), FLOAT32, lipschitz(layer)).gain
    assert gain >= float(torch.linalg.matrix_norm(layer.weight.detach(), 2))


@pytest.mark.parametrize("kind", [nn.Hardsigmoid, nn.Hardswish])
def test_the_sixth_by_which_torch_multiplies_on_cuda_is_covered_in_float64(kind: type[nn.Module]) -> None:
    # ATen's CUDA kernels hold 1 / 6 as a float32 number in every format.
    x = torch.linspace(-4, 4, 64, dtype=torch.float64)
    sixth = float(torch.tensor(1 / 6, dtype=torch.float32))
    made = (x + 3).clamp(0, 6) * sixth * (x if kind is nn.Hardswish else 1)
    lost = float((made - kind()(x)).norm())
    covered = float(local_error(kind(), (64,), FLOAT64)(x[None]).error.at)
    assert lost <= covered <= 3 * lost
