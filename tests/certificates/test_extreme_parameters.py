"""Parameters and inputs over the whole range of both formats: errors and slopes against 60 digits, refusals."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import mpmath
import pytest
import torch
from mpmath import mpf
from torch import Tensor, nn

from lipkit import certify, export, lipschitz, modules
from lipkit.certificates import Certificate
from lipkit.certificates.evaluators import arithmetic as evaluator_arithmetic
from lipkit.certificates.evaluators import machine
from lipkit.conv import kernel_symbol
from lipkit.errors import ShapeError
from lipkit.modules import local_error
from lipkit.modules.machine import prepare, through
from lipkit.proof.roundoff import FLOAT32, FLOAT64

pytestmark = pytest.mark.thorough

Scalar = Callable[[mpf], mpf]
FORMATS = [(torch.float32, FLOAT32), (torch.float64, FLOAT64)]


def expm1(x: mpf) -> mpf:
    return mpmath.expm1(x) if x > -(10**5) else mpf(-1)


def sigmoid(x: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-x)) if x > -(10**5) else mpf(0)


def tanh(x: mpf) -> mpf:
    return mpmath.tanh(x) if abs(x) < 10**4 else mpmath.sign(x)


def softplus(x: mpf) -> mpf:
    return mpmath.log1p(mpmath.exp(x)) if x < 10**4 else x


def gelu(x: mpf) -> mpf:
    return max(x, mpf(0)) if abs(x) > 1000 else x / 2 * mpmath.erfc(-x / mpmath.sqrt(2))


def gelu_tanh(x: mpf) -> mpf:
    return x / 2 * (1 + tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpf("0.044715") * x**3)))


def selu(x: mpf) -> mpf:
    scale, alpha = mpf("1.0507009873554804934193349852946"), mpf("1.6732632423543772848170429916717")
    return scale * (x if x > 0 else alpha * expm1(x))


def clamp(x: mpf, low: float, high: float) -> mpf:
    return min(max(x, mpf(low)), mpf(high))


def shrink(x: mpf, by: mpf) -> mpf:
    return x - by if x > by else x + by if x < -by else mpf(0)


def prelu(slope: float) -> nn.PReLU:
    module = nn.PReLU(dtype=torch.float64)
    module.weight.data.fill_(slope)
    return module


def leaky(slope: mpf) -> Scalar:
    return lambda x: x if x > 0 else slope * x


def elu(alpha: mpf, scale: mpf) -> Scalar:
    return lambda x: x if x > 0 else alpha * expm1(x / scale)


def cases(parameters: list[float], thresholds: list[float]) -> Iterator[tuple[nn.Module, Scalar]]:
    """Activations with the functions that they stand for."""
    yield nn.ReLU(), lambda x: max(x, mpf(0))
    yield nn.ReLU6(), lambda x: clamp(x, 0, 6)
    yield nn.Tanh(), tanh
    yield nn.Tanhshrink(), lambda x: x - tanh(x)
    yield nn.Sigmoid(), sigmoid
    yield nn.LogSigmoid(), lambda x: -softplus(-x)
    yield nn.Softsign(), lambda x: x / (1 + abs(x))
    yield nn.Hardsigmoid(), lambda x: clamp(x + 3, 0, 6) / 6
    yield nn.Hardswish(), lambda x: x * clamp(x + 3, 0, 6) / 6
    yield nn.SiLU(), lambda x: x * sigmoid(x)
    yield nn.Mish(), lambda x: x * tanh(softplus(x))
    yield nn.SELU(), selu
    yield nn.GELU(), gelu
    yield nn.GELU("tanh"), gelu_tanh
    for number in parameters:
        p = mpf(number)
        for slope in (number, -number):
            yield nn.LeakyReLU(slope), leaky(mpf(slope))
            yield prelu(slope), leaky(mpf(slope))
            yield nn.ELU(slope), elu(mpf(slope), mpf(1))
        yield nn.Softshrink(number), lambda x, p=p: shrink(x, p)
        if number > 0:
            yield nn.CELU(number), elu(p, p)
            yield nn.Hardtanh(-number, number / 2), lambda x, a=number: clamp(x, -a, a / 2)
            for threshold in thresholds:
                yield nn.Softplus(number, threshold), lambda x, p=p: softplus(p * x) / p


def inputs(dtype: torch.dtype, step: int, scales: tuple[float, ...] = (1.0,)) -> Tensor:
    """Both signs of powers of two over the range of the format, and of places where exponentials over- or underflow."""
    info = torch.finfo(dtype)
    lowest, highest = (-149, 128) if dtype is torch.float32 else (-1074, 1024)
    powers = [f * 2.0**k for k in range(lowest, highest, step) for f in (1.0, 1.37)]
    places = [0.3, 1.1, 3.0, 8.0, 15.0, 19.99, 20.01, 33.0, 86.0, 87.4, 88.3, 88.7, 88.75, 103.5, 110.0]
    places += [690.0, 705.0, 707.0, 708.5, 709.5, 709.7, 709.79, 715.0, 744.0, 750.0, 1e6]
    points = [*powers, *(place * scale for place in places for scale in scales), info.max, info.tiny, 0.0]
    x = torch.tensor(points, dtype=torch.float64).to(dtype)
    x = x[x.isfinite()]
    return torch.cat((x, -x))


def check_scalar(module: nn.Module, function: Scalar, step: int) -> float:
    """Assert that the rule holds at every input below the peak; the share of the inputs in reach that are below it."""
    covered = []
    scale = (1.0, 1 / float(module.beta)) if isinstance(module, nn.Softplus) else (1.0,)
    for dtype, arithmetic in FORMATS:
        x = inputs(dtype, step, scale)
        rule = local_error(copy.deepcopy(module).double(), (1,), arithmetic)
        there, zero = rule(x.double()[:, None]), rule(torch.zeros(1, 1).double())
        allowed = there.peak.at < arithmetic.room
        covered.append(float(allowed.double().mean()))
        if not bool(allowed.any()):
            continue
        y = copy.deepcopy(module).to(dtype)(x[:, None]).detach().flatten()
        for i in allowed.nonzero().flatten().tolist():
            at = float(x[i])
            bounds = [float(there.error.at[i])]
            # From a sample at 0, where the peak allows the distance.
            if float(zero.peak.at) + zero.peak.slope * abs(at) < arithmetic.room:
                bounds.append(float(zero.error.at) + zero.error.slope * abs(at))
            assert math.isfinite(float(y[i])), (module, dtype, at)
            lost = abs(mpf(float(y[i])) - function(mpf(at)))
            assert lost <= min(bounds), (module, dtype, at, float(y[i]), bounds)
    return min(covered)


EXTREME = ([5e-324, 1e-40, 1e-30, 1e30, 1e39, 1.7e308], [20.0, 88.5, 1e6, 1e300])
DEEP = (
    [0.0, 5e-324, 1e-310, 1e-300, 1e-46, 1e-42, 1e-38, 1e-8, 0.3, 3.0, 1e3, 1e8, 1e37, 3e38, 1e100, 1e300, 1e307],
    [20.0, 50.0, 80.0, 87.0, 88.5, 100.0, 700.0, 706.5, 709.0, 710.0, 1e3, 1e6, 1e38, 1e39],
)


def test_ordinary_activations_over_the_whole_range_of_inputs() -> None:
    with mpmath.workdps(60):
        for module, function in cases([1.0], [20.0]):
            assert check_scalar(module, function, 67) > 0.8
        for threshold in (88.5, 700.0, 1e6):  # the exponential may overflow: less of the range, but not nothing
            module = nn.Softplus(1.0, threshold)
            assert 0.5 < check_scalar(module, softplus, 67) < 0.8


def test_extreme_activations_over_the_whole_range_of_inputs() -> None:
    with mpmath.workdps(60):
        for module, function in cases(*EXTREME):
            check_scalar(module, function, 97)


@pytest.mark.slow
@pytest.mark.parametrize("flush", [False, True])
def test_activations_over_the_whole_range_in_small_steps(flush: bool) -> None:
    torch.set_flush_denormal(flush)
    try:
        with mpmath.workdps(60):
            for module, function in cases(*DEEP):
                check_scalar(module, function, 5)
    finally:
        torch.set_flush_denormal(False)


# Modules with numbers in tensors: float32 against float64, in whose range everything that float32 holds is ordinary.


def statistics(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if name.endswith("var") else torch.randn_like(tensor))
    return module.eval()


def fourier() -> modules.FourierConv2d:
    return modules.FourierConv2d.from_symbol(kernel_symbol(torch.randn(2, 2, 3, 3) / 4, 4, 4), 4, 4, torch.randn(2))


def phase(complex_pairs: bool) -> nn.Module:
    return statistics(modules.FourierConv2d(2, 2, 4, 4, (2, 2), complex_pairs=complex_pairs))


IMAGE = (2, 4, 4)
TENSORS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "conv1d": (lambda: export(nn.Conv1d(2, 2, 3, padding=1), (2, 5)), (2, 5)),
    "conv": (lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2), IMAGE),
    "conv, circular": (lambda: nn.Conv2d(2, 2, 3, padding="same", padding_mode="circular"), IMAGE),
    "transposed": (lambda: nn.ConvTranspose2d(2, 2, 3, stride=2), IMAGE),
    "affine": (lambda: statistics(modules.Affine(torch.ones(2), torch.ones(2))), IMAGE),
    "affine, entries": (lambda: statistics(modules.Affine(torch.ones(2, 1, 4), torch.ones(1, 4, 1))), IMAGE),
    "layer norm": (lambda: statistics(nn.LayerNorm((4, 4))), IMAGE),
    "layer norm, eps": (lambda: statistics(nn.LayerNorm(4, eps=10.0, bias=False)), IMAGE),
    "batch norm": (lambda: export(statistics(nn.BatchNorm2d(2)), IMAGE), IMAGE),
    "group norm": (lambda: export(statistics(nn.GroupNorm(1, 2)), IMAGE), IMAGE),
    "instance norm": (lambda: export(statistics(nn.InstanceNorm2d(2, affine=True)), IMAGE), IMAGE),
    "average": (lambda: nn.AvgPool2d(2, divisor_override=7), IMAGE),
    "layer centring": (lambda: modules.LayerCenter(1, 3), IMAGE),
    "bilinear": (lambda: modules.EnlargeBilinear(2, 4), IMAGE),
    "prelu": (lambda: statistics(nn.PReLU(2)), IMAGE),
    "softmax": (lambda: nn.Softmax(1), (5,)),
    "maxmin": (modules.MaxMin, IMAGE),
    "group sort": (modules.GroupSort, IMAGE),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), IMAGE),
    "fourier": (fourier, IMAGE),
    "phase": (lambda: phase(False), IMAGE),
    "phase, complex": (lambda: phase(True), IMAGE),
    "taylor": (lambda: statistics(modules.TaylorConv2d(2, 2, (3, 3), terms=4)), IMAGE),
    "sandwich": (lambda: modules.SandwichBlock(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4), torch.ones(3)), (4,)),
    "slope residual": (lambda: modules.SlopeResidual(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4), torch.ones(3)), (4,)),
    "attraction": (lambda: modules.Attraction(2), (3, 4)),
    "memory": (lambda: modules.GradientStep(nn.Linear(4, 3), nn.Softmax(-1), torch.tensor(2.0)), (2, 4)),
    "tokens": (lambda: modules.GradientStep(nn.Linear(4, 4), modules.Attraction(2), torch.tensor(0.5)), (3, 4)),
    "convex residual": (
        lambda: modules.Graph([nn.Linear(4, 4), modules.Blend(torch.tensor(0.3))], [[0], [1, 0]]),
        (4,),
    ),
    "sum": (
        lambda: modules.Graph([nn.Linear(4, 4), nn.LeakyReLU(-0.5), modules.Add(1, 1, 1)], [[0], [0], [1, 2, 0]]),
        (4,),
    ),
}


def check_tensors(name: str, scales: list[float], sizes: list[float], both: bool = True, flush: bool = False) -> None:
    """Each tensor of the module alone scaled, and all together: float32 stays within its bound of float64.

    With ``flush`` the float32 pass takes subnormal numbers as zero, as some machines do. Unless ``both``, a
    tensor that is scaled alone is stored in the two formats in turns.
    """
    maker, shape = TENSORS[name]
    torch.manual_seed(sum(map(ord, name)))
    base = modules.Network([maker()], shape).double()
    names = [n for n, t in base.state_dict().items() if t.is_floating_point() and "multiplier" not in n]
    usable, turns = 0, itertools.cycle((1, -1))
    for chosen in ([], *([n] for n in names), names):
        for scale in scales if chosen else [1.0]:
            exact = copy.deepcopy(base)
            for n in chosen:
                exact.state_dict()[n].mul_(scale)
            # Stored in float32, or in float64 and rounded by the evaluator.
            for stored in (torch.float32, torch.float64)[:: next(turns)]:
                network = copy.deepcopy(exact).to(stored)
                if not all(bool(t.isfinite().all()) for t in network.state_dict().values()):
                    continue
                usable += _check_float32(network, shape, sizes, flush)
                if len(chosen) == 1 and not both:
                    break
    assert usable > 0


def _check_float32(network: modules.Network, shape: tuple[int, ...], sizes: list[float], flush: bool) -> int:
    exact, twin = copy.deepcopy(network).double(), machine(network, "float32")
    arithmetic = evaluator_arithmetic("float32", network)
    gain = float(lipschitz(exact))
    rule = local_error(exact, shape, arithmetic)
    x = torch.cat([size * torch.randn(2, *shape, dtype=torch.float64) for size in sizes]).float()
    x = x[x.flatten(1).isfinite().all(1)]
    with torch.no_grad():
        h = torch.cat((x, torch.zeros_like(x[:1]), x + 0.5 * x.flip(0)))
    at = torch.cat((x, x[:1], x)).double()
    keep = h.flatten(1).isfinite().all(1)
    h, at = h[keep], at[keep]
    local = rule(at)
    distance = (h.double() - at).flatten(1).norm(dim=1) * (1 + 1e-12)
    inside = local.peak.at + local.peak.slope * distance < arithmetic.room
    with torch.no_grad():
        truth, centre = exact(h.double()), exact(at)
        torch.set_flush_denormal(flush)
        try:
            y = twin(h)
        finally:
            torch.set_flush_denormal(False)
        y = y.double()
    error = (y - truth).flatten(1).norm(dim=1)
    bound = local.error.at + local.error.slope * distance
    assert bool((error <= bound)[inside].all()), (network, error[inside], bound[inside])
    moved = (truth - centre).flatten(1).norm(dim=1)
    # The float64 passes round, too: by much where a bias of 1e18 meets inputs of 1e-15.
    own = local_error(exact, shape, FLOAT64)(at).error
    rounded = 2 * own.at + own.slope * distance
    assert bool((moved <= gain * distance * (1 + 1e-9) + rounded + 1e-300)[inside].all())
    return int(inside.sum()) if math.isfinite(gain) else 0


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_over_the_whole_range(name: str) -> None:
    check_tensors(name, [1e-42, 1e20, 1e39], [1e-40, 1.0, 1e19, 1e38], both=False)


@pytest.mark.slow
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_over_the_whole_range_in_small_steps(name: str, flush: bool) -> None:
    scales, sizes = [10.0**k for k in range(-60, 60, 3)], [10.0**k for k in range(-45, 39, 3)]
    check_tensors(name, scales, sizes, flush=flush)


# Whole certificates.


def attacked(network: modules.Network, x: Tensor, evaluator: str) -> tuple[Certificate, bool]:
    """The certificate, and whether an input inside a radius, with its logits, breaks it."""
    twin = machine(network, evaluator)
    y = network.double()(x.double()).argmax(1)
    certificate = certify(network, x, y, evaluator=evaluator)
    reach = certificate.radius.clamp_max(1e30)[:, None]
    generator = torch.Generator().manual_seed(0)
    for fraction in (0.0, 0.02, 0.1, 0.5, 0.9, 0.999):
        for _ in range(20):
            step = torch.randn(x.shape, dtype=torch.float64, generator=generator).flatten(1)
            step = step / step.norm(dim=1, keepdim=True)
            near = (x.double().flatten(1) + fraction * reach * step).view_as(x).to(next(twin.parameters()).dtype)
            inside = (near.double() - x.double()).flatten(1).norm(dim=1) < certificate.radius
            logits = twin(near)
            others = logits.scatter(1, y[:, None], -math.inf).amax(1)
            wins = logits.gather(1, y[:, None])[:, 0] > others
            if bool((inside & ~wins).any()):
                return certificate, True
    return certificate, False


@pytest.mark.parametrize(
    ("activation", "evaluator", "size", "certified"),
    [
        (nn.Softplus(1000.0, 1e6), "float64", 1.0, True),
        (nn.Softplus(1.0, 1e6), "float64", 300.0, True),
        (nn.Softplus(1.0, 1e6), "float32", 50.0, True),
        (nn.Softplus(1.0, 100.0), "float32", 50.0, True),
        (nn.Softplus(1e6, 1e9), "float64", 1e-4, False),
    ],
)
def test_softplus_never_overflows_inside_a_radius(
    activation: nn.Module, evaluator: str, size: float, certified: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -1.0], [-0.5, 0.7]]))
        layer.bias.copy_(torch.tensor([2 * size, 0.0]))
    network = modules.Network([activation, layer], (2,)).to(getattr(torch, evaluator))
    modules.save(network, tmp_path)
    x = size * torch.rand(20, 2, dtype=torch.float64).float()
    for net in (network, modules.load(tmp_path)):
        certificate, broken = attacked(net, x, evaluator)
        assert not broken
        assert bool((certificate.radius > 0).any()) == certified


@pytest.mark.parametrize("evaluator", ["float64", "float32"])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(32), (32,)),
        (nn.LayerNorm((2, 4)), (4, 2, 4)),
        (nn.InstanceNorm2d(2, affine=True), (2, 4, 4)),
        (nn.GroupNorm(2, 4, eps=0.1), (4, 3, 3)),
    ],
)
def test_normalisations_are_certified_and_hold(module: nn.Module, shape: tuple[int, ...], evaluator: str) -> None:
    torch.manual_seed(0)
    numbers = math.prod(shape)
    network = export(nn.Sequential(statistics(module), nn.Flatten(), nn.Linear(numbers, 3)), shape)
    certificate, broken = attacked(network, torch.randn(20, *shape), evaluator)
    assert not broken
    assert bool((certificate.radius > 0).any())
    if evaluator == "float64":
        assert bool((certificate.radius > 0.99 * certificate.radius_ignored).all())


def test_group_normalisation_has_no_sums_of_squares() -> None:
    torch.manual_seed(0)
    module = nn.GroupNorm(2, 4, eps=0.1).eval().requires_grad_(False)
    plain = export(module, (4, 5, 5))
    exact = copy.deepcopy(plain).double()
    for mean in (0.3, 3.0, 30.0):
        x = 0.01 * torch.randn(20, 4, 5, 5) + mean
        walk = through(prepare([*exact], (4, 5, 5), FLOAT32), x.double())
        images = x.contiguous(memory_format=torch.channels_last)
        error = (plain(images).double() - exact(x.double())).flatten(1).norm(dim=1)
        assert bool((error <= walk.error.at).all())
        assert float(error.max()) < 1e-5 * mean + 1e-6
    # The square of a mean of 30 swallows the variance: torch loses far more on images stored channels last.
    off = (module(images).double() - exact(x.double())).flatten(1).norm(dim=1)
    assert float(off.max()) > 4 * float(error.max())


def test_numbers_that_float32_cannot_hold_certify_nothing_there() -> None:
    x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([0])
    last = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        last.weight.fill_(1e-45).view(-1)[0] = 0.0
        last.bias.copy_(torch.tensor([1.0, 0.0]))
    for layer in (modules.Affine(torch.ones(1).double(), torch.zeros(1).double()), prelu(1e39)):
        network = modules.Network([layer, last], (2,))
        if isinstance(layer, modules.Affine):
            layer.scale.fill_(1e39)
        assert float(certify(network, x, y, evaluator="float64").radius) > 0, layer
        assert float(certify(network, x, y, evaluator="float32").radius) == 0, layer
    # Numbers of Python are refused by torch itself.
    for layer in (nn.LeakyReLU(1e39), nn.ELU(1e39), nn.CELU(1e-39), nn.Hardtanh(-1e39, 1e39), nn.Softplus(1e39)):
        with pytest.raises(ShapeError, match="cannot be converted to type float without overflow"):
            certify(modules.Network([layer, last], (2,)), x, y, evaluator="float32")
