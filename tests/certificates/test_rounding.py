"""Certificates that survive rounding: attacks inside the radius, exact corner cases, settings that break arithmetic."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit import modules
from lipkit.certificates import Certificate, certify, certify_regression
from lipkit.certificates.evaluators import evaluator, machine, violations
from lipkit.certificates.evaluators import settings as settings_of
from lipkit.errors import NoRuleError, OptionError
from lipkit.modules import ROWS

EVALUATORS = ("float64", "float32", "float32_blocked")


@contextlib.contextmanager
def without_nnpack() -> Iterator[None]:
    with torch.backends.nnpack.flags(enabled=False):
        yield


def linear(weight: list[list[float]], bias: list[float], dtype: torch.dtype = torch.float64) -> modules.Network:
    layer = nn.Linear(len(weight[0]), len(weight), dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=dtype))
        layer.bias.copy_(torch.tensor(bias, dtype=dtype))
    return modules.Network([layer], (len(weight[0]),))


@pytest.mark.parametrize(("name", "dtype", "bits"), [("float64", torch.float64, 53), ("float32", torch.float32, 24)])
def test_a_bias_that_swallows_the_input_breaks_the_convention_only(name: str, dtype: torch.dtype, bits: int) -> None:
    # y_1 = x + 2^p, y_0 = 2^p: rounded to even, x = 1.5 counts as 2 and x' = 0.5 as 0.
    network = linear([[0.0], [1.0]], [2.0**bits, 2.0**bits], dtype)
    x, y, other = torch.tensor([[1.5]], dtype=dtype), torch.tensor([1]), torch.tensor([[0.5]], dtype=dtype)
    assert network(x).argmax().item() == 1
    assert network(other).argmax().item() == 0
    naive = certify(network, x, y, rounding="ignore")
    assert naive.radius.item() > 1.4
    sound = certify(network, x, y, evaluator=name)
    assert sound.radius.item() == 0
    assert sound.radius_ignored.item() == naive.radius.item()


def test_numbers_that_cancel_inside_the_body_count() -> None:
    # The sum x + 2^60 - 2^60 is 0 for the machine and x in real arithmetic; the last layer itself rounds nothing.
    body, difference, last = (nn.Linear(*size, dtype=torch.float64) for size in ((1, 2), (2, 1), (1, 2)))
    with torch.no_grad():
        body.weight.copy_(torch.tensor([[1.0], [0.0]]))
        body.bias.fill_(2.0**60)
        difference.weight.copy_(torch.tensor([[1.0, -1.0]]))
        difference.bias.fill_(0.0)
        last.weight.copy_(torch.tensor([[0.0], [1.0]]))
        last.bias.copy_(torch.tensor([0.0, 1.0]))
    network = modules.Network([body, nn.ReLU(), difference, last], (1,))
    x, y = torch.full((1, 1), 100.0, dtype=torch.float64), torch.tensor([1])
    naive, sound = certify(network, x, y, rounding="ignore"), certify(network, x, y)
    assert naive.radius.item() > 0.5
    assert sound.radius.item() == 0


def near_the_boundary(seed: int, dtype: torch.dtype) -> tuple[modules.Network, Tensor, Tensor, Tensor]:
    """A linear network, inputs within a few roundings of its boundary, their classes, the direction across it."""
    torch.manual_seed(seed)
    network = modules.Network([nn.Linear(30, 2, dtype=dtype)], (30,))
    weight, bias = network[0].weight.double(), network[0].bias.double()
    x = torch.rand(200, 30, dtype=torch.float64)
    across = weight[1] - weight[0]
    gap = x @ across + bias[1] - bias[0]
    unit = torch.finfo(dtype).eps
    aim = unit * torch.randn(200, dtype=torch.float64) * 3
    x = (x - ((gap - aim) / across.square().sum())[:, None] * across).to(dtype)
    return network, x, network(x).argmax(dim=1), across / across.norm()


def flips(network: modules.Network, x: Tensor, y: Tensor, across: Tensor, radius: Tensor) -> int:
    """How many points of the open balls, found by steps of a few last places, the machine gives to another class."""
    found = 0
    sign = torch.where(y == 1, -1.0, 1.0).double()[:, None]
    for share in (0.2, 0.5, 0.8, 0.95, 0.999):
        for _ in range(20):
            ideal = x.double() + sign * across * (share * radius.clamp_max(1.0))[:, None]
            noise = 1 + torch.finfo(x.dtype).eps * torch.randint(-2, 3, x.shape)
            moved = (ideal * noise).to(x.dtype)
            inside = (moved.double() - x.double()).norm(dim=1) < radius * (1 - 1e-9)
            found += int((inside & (network(moved).argmax(dim=1) != y)).sum())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVALUATORS)
@pytest.mark.parametrize("seed", range(3))
def test_a_search_in_the_last_places_never_beats_a_sound_radius(name: str, seed: int) -> None:
    dtype = torch.float64 if name == "float64" else torch.float32
    network, x, _, across = near_the_boundary(seed, dtype)
    run = machine(network, name)
    labels = run(x).argmax(dim=1)
    naive = certify(network, x, labels, rounding="ignore")
    sound = certify(network, x, labels, evaluator=name)
    assert (sound.radius <= naive.radius).all()
    assert flips(run, x, labels, across, sound.radius) == 0
    # far from the boundary the sound radius is the convention's but for rounding
    clear = torch.rand(50, 30, dtype=dtype)
    labels = run(clear).argmax(dim=1)
    both = certify(network, clear, labels, evaluator=name)
    assert (both.radius_ignored - both.radius).abs().max() < (1e-13 if name == "float64" else 2e-5)
    assert flips(run, clear, labels, across, both.radius) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["float64", "float32"])
def test_the_same_search_beats_the_convention(name: str) -> None:
    dtype = torch.float64 if name == "float64" else torch.float32
    found = 0
    for seed in range(4):
        network, x, y, across = near_the_boundary(seed, dtype)
        y = network(x).argmax(dim=1)
        naive = certify(network, x, y, rounding="ignore")
        found += flips(network, x, y, across, naive.radius)
    assert found > 0


@pytest.mark.thorough
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(1e-2, 1e4), st.sampled_from(EVALUATORS))
def test_no_step_inside_a_sound_radius_changes_the_class(seed: int, size: float, name: str) -> None:
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 12), modules.MaxMin(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3)]
    network = modules.Network(layers, (8,))
    run = machine(network, name)
    dtype = torch.float64 if name == "float64" else torch.float32
    x = (size * torch.randn(40, 8)).to(dtype)
    y = run(x).argmax(dim=1)
    certificate = certify(network, x, y, evaluator=name)
    assert (certificate.radius <= certificate.radius_ignored).all()
    for _ in range(20):
        direction = torch.randn(40, 8, dtype=torch.float64)
        step = direction / direction.norm(dim=1, keepdim=True) * certificate.radius[:, None]
        moved = (x.double() + 0.999999 * step).to(dtype)
        inside = (moved.double() - x.double()).norm(dim=1) < certificate.radius
        assert (run(moved).argmax(dim=1) == y)[inside].all()


def test_ties_and_wrong_labels_get_nothing() -> None:
    network = linear([[1.0, 0.0], [1.0, 0.0]], [0.0, 0.0])
    assert certify(network, torch.rand(5, 2), torch.zeros(5, dtype=torch.int64)).radius.eq(0).all()
    network = linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0])
    found = certify(network, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.zeros(2, dtype=torch.int64))
    assert found.radius[0] > 0.7
    assert found.radius[1] == 0


@pytest.mark.parametrize("name", EVALUATORS)
def test_weights_that_are_not_finite_get_nothing(name: str) -> None:
    for value in (math.nan, math.inf):
        network = linear([[value, 0.0], [0.0, 1.0]], [0.0, 0.0])
        found = certify(network, torch.rand(3, 2), torch.zeros(3, dtype=torch.int64), evaluator=name)
        assert found.radius.eq(0).all()
        assert math.isinf(value) or found.prediction.eq(-1).all()


def test_what_overflows_in_float32_is_not_certified_there() -> None:
    big = linear([[1e37, 0.0], [0.0, 1e37]], [0.0, 0.0])
    x, y = torch.tensor([[300.0, 1.0]]), torch.tensor([0])
    assert certify(big, x, y).radius.item() > 20
    assert machine(big, "float32")(x).isinf().any()
    assert certify(big, x, y, evaluator="float32").radius.item() == 0
    # within the ball the numbers must stay finite too
    radius = certify(big, torch.tensor([[0.5, -0.5]]), y, evaluator="float32").radius.item()
    assert 0 < radius < 3.4e38 / 1e37


def test_a_radius_ends_where_numbers_would_overflow() -> None:
    # The difference is 1e36 for every input, but from |x| = 3.4e8 on both logits are infinite in float32.
    network = linear([[1e30], [1e30]], [0.0, 1e36], torch.float32)
    x, y = torch.zeros(1, 1), torch.tensor([1])
    assert network(torch.full((1, 1), 5e8)).argmax().item() == 0
    radius = certify(network, x, y, evaluator="float32").radius.item()
    assert 1e7 < radius < 3.4e8
    assert network(torch.full((1, 1), radius)).argmax().item() == 1
    assert certify(network, x, y, rounding="ignore").radius.item() == math.inf


def test_weights_below_the_normal_range() -> None:
    tiny = 2.0**-1060
    network = linear([[tiny, 0.0], [0.0, tiny]], [0.0, 0.0])
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert certify(network, x, y, rounding="ignore").radius.item() > 0.5
    assert certify(network, x, y).radius.item() == 0  # a machine that flushes to zero sees a tie
    # stored in float64, all weights are zero in float32
    network = linear([[1e-50, 0.0], [0.0, 1e-50]], [0.0, 0.0])
    assert certify(network, x, y).radius.item() > 0.5
    assert certify(network, x, y, evaluator="float32").radius.item() == 0


def test_a_zero_bound_certifies_everything_only_beyond_its_rounding() -> None:
    x = torch.rand(3, 2)
    y = torch.tensor([0, 0, 1])
    for name in EVALUATORS:
        assert certify(linear([[0.0, 0.0]] * 2, [1.0, 0.0]), x, y, evaluator=name).radius.tolist() == [
            math.inf,
            math.inf,
            0.0,
        ]
    # Equal rows, biases closer than the rounding of what is added to them.
    close = linear([[1.0, 1.0]] * 2, [2.0**-51, 0.0])
    at = torch.ones(1, 2, dtype=torch.float64)
    assert certify(close, at, torch.tensor([0]), rounding="ignore").radius.item() == math.inf
    assert certify(close, at, torch.tensor([0])).radius.item() == 0
    # A clear margin is certified until rounding could swallow it: not everywhere.
    clear = certify(linear([[1.0, 1.0]] * 2, [1.0, 0.0]), at, torch.tensor([0])).radius.item()
    assert 1e12 < clear < 1e16


def test_the_global_constant_is_charged_too() -> None:
    network = modules.Network([nn.Linear(6, 4), modules.MaxMin()], (6,))
    x = torch.rand(20, 6)
    y = network(x).argmax(dim=1)
    double, single = certify(network, x, y), certify(network, x, y, evaluator="float32")
    certified = double.radius > 1e-3
    assert (single.radius < double.radius)[certified].all()
    assert (double.radius < double.radius_ignored)[certified].all()
    assert (double.radius_ignored - single.radius)[certified].max() < 1e-4


def convolutional() -> tuple[modules.Network, Tensor, Tensor]:
    torch.manual_seed(0)
    chain = [nn.Conv2d(1, 4, 3, padding=1), modules.MaxMin(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 5)]
    network, x = modules.Network(chain, (1, 8, 8)), torch.rand(10, 1, 8, 8)
    return network, x, network(x).argmax(dim=1)


@pytest.mark.thorough
def test_the_evaluators_are_ordered_and_named() -> None:
    network, x, y = convolutional()
    with without_nnpack():
        found = {name: certify(network, x, y, evaluator=name) for name in EVALUATORS}
    double, single, blocks = (found[name].radius for name in EVALUATORS)
    positive = single > 0
    assert positive.any()
    assert (single < blocks)[positive].all()
    assert (blocks < double)[positive].all()
    for name, certificate in found.items():
        made = certificate.evaluator
        assert (certificate.rounding, made.name, made.device, made.torch) == ("sound", name, "cpu", torch.__version__)
        assert made.dtype == name.split("_")[0]
        assert made.block == (16 if name.endswith("blocked") else None)
        assert json.loads(json.dumps(dataclasses.asdict(made))) == dataclasses.asdict(made)
    ignored = certify(network, x, y, rounding="ignore")
    assert (ignored.rounding, ignored.evaluator.name) == ("ignore", "real")
    assert torch.equal(ignored.radius, ignored.radius_ignored)


def test_both_accuracies_from_one_certificate() -> None:
    network, x, y = convolutional()
    with without_nnpack():
        found = certify(network, x, y, evaluator="float32")
    between = float((found.radius.max() + found.radius_ignored.max()) / 2)
    assert found.accuracy(between) == found.accuracy(between, rounding="sound") == 0
    assert found.accuracy(between, rounding="ignore") == 0.1
    with pytest.raises(OptionError, match="expected a certificate with rounding='sound'"):
        certify(network, x, y, rounding="ignore").accuracy(0.1, rounding="sound")
    with pytest.raises(OptionError, match="expected one of sound, ignore, got 'none'"):
        found.accuracy(0.1, rounding="none")


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("restored")
def test_settings_that_lower_the_precision_are_refused() -> None:
    network = linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], torch.float32)
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    single, double = certify(network, x, y, evaluator="float32"), certify(network, x, y)
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(OptionError, match=r"IEEE float32 .*float32_matmul_precision\(\) is not 'highest'"):
        certify(network, x, y, evaluator="float32")
    with pytest.raises(OptionError, match="not 'highest'"):
        single.evaluator.check(network)
    double.evaluator.check(network)
    assert certify(network, x, y).radius.item() == double.radius.item()  # float64 is not concerned


def test_settings_of_one_backend_are_refused_by_name() -> None:
    """torch does not read out its setting for all backends then."""
    network = linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], torch.float32)
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    matmul = torch.backends.mkldnn.matmul
    matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(OptionError, match=r"mkldnn\.matmul\.fp32_precision is 'bf16' \(expected 'ieee'"):
            certify(network, x, y, evaluator="float32")
        certify(network, x, y)
        matmul.fp32_precision = "ieee"
        certify(network, x, y, evaluator="float32")
    finally:
        matmul.fp32_precision = "none"


def test_autocast_and_convolutions_that_are_no_inner_products_are_refused() -> None:
    network, x, y = convolutional()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(OptionError, match="autocast is on"):
        certify(network, x, y, evaluator="float32")
    with torch.backends.nnpack.flags(enabled=torch.backends.nnpack.is_available()):
        if torch.backends.nnpack.is_available():
            with pytest.raises(OptionError, match="NNPACK may evaluate convolutions by Winograd"):
                certify(network, x, y, evaluator="float32")
        certify(network, x, y, evaluator="float32_blocked")  # its convolutions are products of windows
        certify(network, x, y)
    assert any("cuDNN" in reason for reason in violations("float32", "cuda", settings_of("cuda"), network))
    assert any("nothing is known" in reason for reason in violations("float32", "xpu", settings_of("xpu")))
    assert violations("float64", "cuda", settings_of("cuda"), network) == []


@pytest.mark.parametrize("value", ["BF16", "any", "F16", "tf32"])
@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_variables_that_lower_the_precision_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], torch.float32)
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"the environment variable {name} is '{value}'"):
        evaluator("float32", "cpu", network)
    assert evaluator("float64", "cpu", network).settings[name] == value
    monkeypatch.setenv(name, "STRICT")
    evaluator("float32", "cpu", network)


def test_emulated_products_of_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "1")
    with pytest.raises(OptionError, match=r"IEEE float64 .*CUBLAS_EMULATE_DOUBLE_PRECISION is '1'"):
        evaluator("float64", "cuda")
    evaluator("float64", "cpu")
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "0")
    assert evaluator("float64", "cuda").settings["CUBLAS_EMULATE_DOUBLE_PRECISION"] == "0"


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    yield
    torch.set_flush_denormal(False)


def tiny(weight: float, then: float) -> modules.Network:
    """Two dense layers in float32 whose product is weight * then, once with either sign."""
    layers = [nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)]
    with torch.no_grad():
        layers[0].weight.fill_(weight)
        layers[1].weight.copy_(torch.tensor([[then], [-then]]))
    return modules.Network(layers, (1,))


@pytest.mark.usefixtures("flushing")
def test_the_mode_that_flushes_is_found_and_refused_where_numbers_are_converted() -> None:
    network = tiny(1e-40, 1e38)
    torch.set_flush_denormal(False)
    made = certify(network, torch.ones(1, 1), torch.tensor([0])).evaluator
    assert made.settings["flush_denormal"] == "False"
    single = certify(network, torch.ones(1, 1), torch.tensor([0]), evaluator="float32").evaluator
    torch.set_flush_denormal(True)
    assert float(network.double()(torch.ones(1, 1).double())[0, 0]) == 0  # in real arithmetic 0.01
    with pytest.raises(OptionError, match=r"IEEE float64 .*set_flush_denormal"):
        made.check()
    with pytest.raises(OptionError, match="set_flush_denormal"):
        machine(network, "float64")
    single.check(network)  # its statement allows flushing
    torch.set_flush_denormal(False)
    made.check()


@pytest.mark.parametrize("weight", [1e-40, 3e-39, 1e-38, 1e-37, 1e-30])
@pytest.mark.usefixtures("flushing")
def test_a_float32_radius_holds_for_evaluations_that_flush(weight: float) -> None:
    network = tiny(weight, 1e36)
    torch.set_flush_denormal(False)
    x = torch.tensor([[0.5], [1.0], [64.0]])
    radius = certify(network, x, torch.zeros(3, dtype=torch.int64), evaluator="float32").radius
    torch.set_flush_denormal(True)
    for centre, r in zip(x, radius, strict=True):
        if r > 0:
            inside = (centre + float(r) * torch.linspace(-0.999, 0.999, 101)[:, None]).float()
            logits = network(inside)
            assert bool((logits[:, 0] > logits[:, 1]).all())
    torch.set_flush_denormal(False)
    if weight <= 3e-39:
        assert float(radius.max()) == 0  # an evaluation that flushes gives equal logits
    if weight >= 1e-30:
        assert float(radius.max()) > 0


def test_what_decides_about_arithmetic_is_recorded() -> None:
    on_cpu, on_cuda = (evaluator("float64", kind).settings for kind in ("cpu", "cuda"))
    both = {"float32_matmul_precision", "autocast", "flush_denormal", "default_dtype", "deterministic_algorithms"}
    assert both | {"threads", "cpu_capability", "nnpack", "mkldnn"} <= set(on_cpu)
    assert both | {"cudnn.allow_tf32", "cudnn.enabled", "cuda.blas", "cuda.linalg"} <= set(on_cuda)
    for found in (on_cpu, on_cuda):
        assert all(isinstance(value, str) for value in found.values())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert evaluator("float64", "cpu").settings["threads"] == str(threads + 1)
    finally:
        torch.set_num_threads(threads)


def test_a_certificate_of_another_torch_is_not_printed() -> None:
    made = evaluator("float64", "cpu")
    made.check()
    with pytest.raises(OptionError, match=r"made for torch 1\.0: expected that version"):
        dataclasses.replace(made, torch="1.0").check()


def test_unknown_names_are_refused() -> None:
    network, x, y = convolutional()
    with pytest.raises(OptionError, match="rounding: expected one of sound, ignore, got 'up'"):
        certify(network, x, y, rounding="up")
    with pytest.raises(OptionError, match="expected one of float64, float32, float32_blocked, integer, got 'bfloat16'"):
        certify(network, x, y, evaluator="bfloat16")
    with pytest.raises(OptionError, match="'ignore', which knows none"):
        certify(network, x, y, rounding="ignore", evaluator="float32")


def test_a_module_without_a_rounding_rule_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, nn.ReLU, ROWS[nn.ReLU]._replace(rounding=None))
    network = modules.Network([nn.Linear(2, 2), nn.ReLU()], (2,))
    x, y = torch.rand(2, 2), torch.zeros(2, dtype=torch.int64)
    remedy = r"nn\.modules\.activation\.ReLU, .* or certify with rounding='ignore' and method='global'"
    for options in ({}, {"method": "local", "rounding": "ignore"}):
        with pytest.raises(NoRuleError, match=remedy):
            certify(network, x, y, **options)
    assert isinstance(certify(network, x, y, rounding="ignore"), Certificate)


@pytest.mark.parametrize("name", EVALUATORS)
def test_deviations_of_a_regression_include_rounding(name: str) -> None:
    torch.manual_seed(0)
    network = modules.Network([nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)], (3,))
    run = machine(network, name)
    dtype = next(run.parameters()).dtype
    x, y = torch.randn(50, 3).to(dtype), torch.zeros(50, 2, dtype=dtype)
    delta = 1e-7  # so small that rounding counts in float32
    found = certify_regression(network, x, y, delta=delta, evaluator=name)
    ignored = certify_regression(network, x, y, delta=delta, rounding="ignore")
    steps = torch.randn(200, 50, 3, dtype=torch.float64)
    moved = (x.double() + delta * steps / steps.norm(dim=2, keepdim=True)).to(dtype)
    inside = (moved.double() - x.double()).norm(dim=2) <= delta
    change = (run(moved.flatten(0, 1)).unflatten(0, (200, 50)) - run(x)).double().abs()
    assert (change <= found.output_deviation)[inside].all()
    worst = run(moved.flatten(0, 1)).unflatten(0, (200, 50)).double().abs()
    assert (worst <= found.worst_error)[inside].all()
    assert (found.output_deviation > ignored.output_deviation).all()
    assert found.deviation > ignored.deviation
    assert (found.rounding, found.evaluator.name) == ("sound", name)
    assert found.rounding_error.max() < (1e-13 if name == "float64" else 1e-4)
    if name == "float32":
        assert (change > ignored.output_deviation)[inside].any()


def test_the_machine_is_the_network_in_the_format_of_the_evaluator() -> None:
    network, x, _ = convolutional()
    assert type(machine(network, "float32_blocked")[0]).__name__ == "BlockedConv2d"
    assert next(machine(network, "float64").parameters()).dtype == torch.float64
    torch.testing.assert_close(machine(network, "float32_blocked")(x), network(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionError, match="evaluator: expected one of"):
        machine(network, "float16")
