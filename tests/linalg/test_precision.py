"""Settings of torch that change arithmetic: found where they are on, of no consequence where a proof can avoid them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipkit
from lipkit.analysis import analyze
from lipkit.bounds import aol, fantastic_four, gram, lipbound, reshaped, spectral_norm, spectral_norms, symbol_sup
from lipkit.bounds.lmi import proves_gain
from lipkit.errors import OptionError
from lipkit.layers.families import FAMILIES
from lipkit.linalg.precision import check_underflow, flushes, without_autocast
from lipkit.proof.roundoff import to_double


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def tiny_network() -> lipkit.modules.Network:
    """The constant of 1e-40, 1e38: 0.01."""
    layers = [nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)]
    with torch.no_grad():
        layers[0].weight.fill_(1e-40)
        layers[1].weight.copy_(torch.tensor([[1e38], [-1e38]]))
    return lipkit.modules.Network(layers, (1,))


TINY = torch.full((2, 2), 1e-40)
KERNEL = torch.full((1, 1, 3, 3), 1e-40)
PROOFS: dict[str, Callable[[], object]] = {
    "lipschitz": lambda: lipkit.lipschitz(tiny_network()),
    "lipschitz of a module without weights": lambda: lipkit.lipschitz(nn.ReLU()),
    "certify": lambda: lipkit.certify(tiny_network(), torch.ones(1, 1), torch.tensor([0])),
    "certify in float32": lambda: lipkit.certify(
        tiny_network(), torch.ones(1, 1), torch.tensor([0]), evaluator="float32"
    ),
    "certify without rounding": lambda: lipkit.certify(
        tiny_network(), torch.ones(1, 1), torch.tensor([0]), rounding="ignore"
    ),
    "certify of a regression": lambda: lipkit.certificates.certify_regression(
        tiny_network(), torch.ones(1, 1), torch.zeros(1, 2), delta=1.0
    ),
    "analyze": lambda: analyze(nn.Linear(2, 2), (2,), restarts=0),
    "spectral_norm": lambda: spectral_norm(TINY),
    "spectral_norms": lambda: spectral_norms(TINY),
    "symbol_sup": lambda: symbol_sup(KERNEL),
    "gram": lambda: gram(KERNEL),
    "lipbound": lambda: lipbound(KERNEL),
    "reshaped": lambda: reshaped(KERNEL),
    "aol": lambda: aol(KERNEL),
    "fantastic_four": lambda: fantastic_four(KERNEL),
    "proves_gain": lambda: proves_gain([TINY], [], 1e-30),
}


@pytest.mark.parametrize("name", PROOFS)
@pytest.mark.usefixtures("flushing")
def test_no_proof_is_made_while_small_numbers_count_as_zero(name: str) -> None:
    with pytest.raises(OptionError, match=r"torch\.set_flush_denormal\((False|True\) loses)"):
        PROOFS[name]()


@pytest.mark.parametrize("name", PROOFS)
def test_every_proof_is_made_otherwise(name: str) -> None:
    assert not flushes()
    PROOFS[name]()


def test_weights_below_the_normal_range_count() -> None:
    network = tiny_network()
    one, two = (Fraction(float(layer.weight.detach()[0, 0])) for layer in network)
    bound = float(lipkit.lipschitz(network))
    assert (Fraction(bound) / (one * two)) ** 2 >= 2
    assert bound <= 1.0001 * 0.01 * 2**0.5
    x = torch.ones(1, 1)
    certificate = lipkit.certify(network, x, torch.tensor([0]), rounding="ignore")
    margin = 2 * one * two
    assert 0 < Fraction(float(certificate.radius)) <= margin / (2 * one * two)


@pytest.mark.usefixtures("flushing")
def test_flushing_is_found_by_arithmetic() -> None:
    assert flushes(workers=False)
    assert flushes()
    assert float(torch.full((1,), 1e-40) * 1e38) == 0
    torch.set_flush_denormal(False)
    assert not flushes()


def in_a_thread_of_its_own(work: Callable[[], None]) -> None:
    """Torch starts workers for each thread that computes, which inherit the mode that it has then."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            torch.set_num_threads(2)
            work()
        except BaseException as error:
            errors.append(error)

    before = torch.get_num_threads()
    thread = threading.Thread(target=run)
    try:
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    if errors:
        raise errors[0]


def test_flushing_by_workers_alone_is_found() -> None:
    many = torch.full((1 << 17,), 1e-40)

    def work() -> None:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush")
        try:
            many.mul(2)  # starts the workers
        finally:
            torch.set_flush_denormal(False)
        assert not flushes(workers=False)
        assert not bool((many.double() > 0).all())
        assert flushes()
        with pytest.raises(OptionError, match="and on torch's own"):
            check_underflow()
        with pytest.raises(OptionError, match="flush_denormal"):
            lipkit.lipschitz(nn.Linear(256, 256))
        with pytest.raises(OptionError, match="flush_denormal"):
            lipkit.certify(tiny_network(), torch.ones(1, 1), torch.tensor([0]), evaluator="float32")
        assert float(lipkit.lipschitz(tiny_network())) > 0  # what is small never leaves this thread
        with pytest.raises(OptionError, match="flush_denormal"):
            to_double(many)
        assert bool((to_double(many[:100]) > 0).all())

    in_a_thread_of_its_own(work)


def test_workers_that_do_not_flush_pass() -> None:
    in_a_thread_of_its_own(check_underflow)


def settings() -> dict[str, Callable[[], object]]:
    return {
        "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
        "inference mode": torch.inference_mode,
        "no gradients": torch.no_grad,
        "a float64 default": lambda: _Default(torch.float64),
        "a bfloat16 default": lambda: _Default(torch.bfloat16),
        "bfloat16 products": _Products,
        "deterministic algorithms": _Deterministic,
        "without oneDNN": _WithoutOneDnn,
    }


class _Default:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(torch.float32)


class _Products:
    def __enter__(self) -> None:
        torch.set_float32_matmul_precision("medium")

    def __exit__(self, *error: object) -> None:
        torch.set_float32_matmul_precision("highest")


class _WithoutOneDnn:
    def __enter__(self) -> None:
        torch.backends.mkldnn.enabled = False

    def __exit__(self, *error: object) -> None:
        torch.backends.mkldnn.enabled = True


class _Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(False)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv2d": (lambda: nn.Conv2d(3, 8, 3, padding=1), (3, 6, 6)),
    "wide Conv2d": (lambda: nn.Conv2d(32, 24, 3, padding=1), (32, 4, 4)),
    "strided Conv2d": (lambda: nn.Conv2d(3, 8, 3, stride=2), (3, 7, 7)),
    "Conv1d in groups": (lambda: nn.Conv1d(4, 8, 3, groups=2), (4, 9)),
    "Linear": (lambda: nn.Linear(6, 5), (6,)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3).eval(), (3, 4, 4)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), (3, 4, 4)),
    "network": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        (1, 4, 4),
    ),
    **{f"{name} convolution": (lambda f=f: f.conv(4, 4, 3), (4, 6, 6)) for name, f in FAMILIES.items()},
    **{f"{name} dense": (lambda f=f: f.linear(6, 4), (6,)) for name, f in FAMILIES.items()},
}


def everything(module: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """The bound of a module, its export, and the bound and the certificate of that."""
    plain = lipkit.export(module, shape)
    dtype = next((t.dtype for t in plain.state_dict().values() if t.is_floating_point()), torch.float32)
    x = torch.linspace(-1, 1, 2 * int(np.prod(shape)), dtype=torch.float64).reshape(2, *shape).to(dtype)
    found = [lipkit.lipschitz(module, shape), *plain.state_dict().values(), lipkit.lipschitz(plain)]
    if len(lipkit.modules.output_shape(plain, shape)) == 1:
        found.append(lipkit.certify(plain, x, torch.tensor([0, 1])).radius)
    return [t.detach().clone() for t in found]


@functools.cache
def ordinarily(name: str) -> list[Tensor]:
    """Everything of a module under the settings that torch starts with."""
    make, shape = MODULES[name]
    return everything(seeded(make), shape)


# Under each setting every fourth layer of the families and every second of the others, in turns; the rest is slow.
PAIRS = [
    pytest.param(
        name,
        setting,
        marks=[pytest.mark.slow] * ((i + j) % (4 if name.endswith((" convolution", " dense")) else 2) > 0),
    )
    for i, name in enumerate(MODULES)
    for j, setting in enumerate(settings())
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "setting"), PAIRS)
def test_settings_do_not_change_bounds_exports_and_certificates(name: str, setting: str) -> None:
    make, shape = MODULES[name]
    module, expected = seeded(make), ordinarily(name)
    with settings()[setting]():  # type: ignore[attr-defined]
        found = everything(module, shape)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        if name == "soc convolution" and setting == "bfloat16 products":
            # Its export is made in float32, its bound of the kernel then in float64: another rounding.
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(a, b)


def test_a_layer_made_under_a_float64_default_has_bounds() -> None:
    with _Default(torch.float64):
        layer = seeded(lambda: nn.Conv2d(3, 4, 3, padding=1))
        bound = float(lipkit.lipschitz(layer, (3, 5, 5)).detach())
        plain = lipkit.export(layer, (3, 5, 5))
        eye = torch.eye(75).reshape(75, 3, 5, 5)
        truth = np.linalg.norm(F.conv2d(eye, layer.weight.detach(), padding=1).flatten(1).numpy(), 2)
        assert plain[0].weight.dtype == torch.float64
    assert truth * (1 - 1e-12) <= bound <= 1.5 * truth


def test_autocast_stays_off_inside_and_on_outside() -> None:
    one = torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert (one @ one).dtype == torch.bfloat16
        with without_autocast():
            assert (one @ one).dtype == torch.float32
        assert (one @ one).dtype == torch.bfloat16


def test_sparse_and_meta_numbers_are_refused_by_the_bounds() -> None:
    sparse, meta = torch.eye(3).to_sparse(), torch.eye(3, device="meta")
    for bad, remedy in ((sparse, r"\.to_dense\(\)"), (meta, "load its numbers")):
        with pytest.raises(OptionError, match=f"expected a dense tensor with numbers, got .*{remedy}"):
            to_double(bad)
        with pytest.raises(OptionError, match="expected a dense tensor with numbers"):
            spectral_norm(bad)
    with pytest.raises(OptionError, match="expected a dense tensor with numbers"):
        symbol_sup(torch.ones(1, 1, 3, 3, device="meta"))
