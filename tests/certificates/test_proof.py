"""`prove` once, `certify` often: the same certificates, and no proof for anything but what was proved."""

from __future__ import annotations

import copy
import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lipkit
from lipkit import modules
from lipkit.certificates import Certificate, certify_regression, measurement
from lipkit.errors import NoRuleError, OptionError
from lipkit.modules.chains import prove_chain
from lipkit.modules.dense import blocked
from lipkit.proof.roundoff import FLOAT64


def network() -> modules.Network:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
    branch: nn.Module = modules.Graph([nn.ReLU(), nn.Conv2d(4, 4, 1), modules.Add(1, 1)], [[0], [1], [0, 2]])
    made = modules.Network([conv, branch, nn.Flatten(), nn.Linear(64, 3)], (1, 4, 4))
    made.input_range = (0.0, 1.0)
    return made


def samples() -> tuple[Tensor, Tensor]:
    x = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, network()(x).argmax(dim=1)


def numbers(certificate: Certificate) -> dict[str, Any]:
    found = dataclasses.asdict(certificate)
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in found.items()}


WAYS = [
    {"rounding": "sound", "evaluator": "float64"},
    {"rounding": "sound", "evaluator": "float32_blocked"},
    {"rounding": "sound", "evaluator": "integer"},
    {"rounding": "ignore", "evaluator": "float64"},
]


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['rounding']}-{way['evaluator']}")
def test_certificates_with_and_without_a_proof_are_the_same_to_the_bit(way: dict[str, str]) -> None:
    plain, x = network(), samples()[0]
    y = plain(x).argmax(dim=1)
    proof = lipkit.prove(plain, **way)  # type: ignore[arg-type]
    for part in (slice(0, 1), slice(0, 5)):
        expected = lipkit.certify(plain, x[part], y[part], **way)  # type: ignore[arg-type]
        assert float(expected.radius.max()) > 0
        found = lipkit.certify(plain, x[part], y[part], proof=proof, **way)  # type: ignore[arg-type]
        assert numbers(found) == numbers(expected)
    # The same numbers elsewhere are the same network.
    assert numbers(lipkit.certify(network(), x, y, proof=proof, **way)) == numbers(found)  # type: ignore[arg-type]


def test_a_regression_takes_a_proof_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, (x, _) = network(), samples()
    expected = certify_regression(plain, x, torch.zeros(5, 3), delta=0.1)
    proof = lipkit.prove(plain)
    monkeypatch.setattr(measurement, "prove_chain", None)  # nothing is proved a second time
    found = certify_regression(plain, x, torch.zeros(5, 3), delta=0.1, proof=proof)
    assert torch.equal(found.worst_error, expected.worst_error)
    assert found.deviation == expected.deviation
    assert found.network_sha256 == expected.network_sha256
    with pytest.raises(OptionError, match="proof: expected one of the network"):
        certify_regression(plain.double(), x, torch.zeros(5, 3), delta=0.1, proof=proof)


@pytest.mark.thorough
@given(place=st.integers(0, 10**6), tensor=st.integers(0, 10**6), up=st.booleans())
@settings(max_examples=25, deadline=None)
def test_one_number_moved_by_one_unit_in_the_last_place_is_another_network(place: int, tensor: int, up: bool) -> None:
    plain, (x, y) = network(), samples()
    proof = lipkit.prove(plain, rounding="ignore")
    weights = list(plain.state_dict().values())
    weight = weights[tensor % len(weights)].view(-1)
    before, i = modules.sha256(plain), place % len(weight)
    weight[i] = torch.nextafter(weight[i], torch.tensor(math.inf if up else -math.inf))
    with pytest.raises(OptionError, match=f"sha256 {modules.sha256(plain)} for .* got one of {before} for"):
        lipkit.certify(plain, x, y, rounding="ignore", proof=proof)


def _activation(plain: modules.Network) -> modules.Network:
    return modules.Network([plain[0], nn.Tanh(), *list(plain)[2:]], (1, 4, 4))


def _rewired(plain: modules.Network) -> modules.Network:
    plain[1].sources = ((0,), (1,), (1, 2))
    return plain


CHANGES: dict[str, Callable[[modules.Network], modules.Network]] = {
    "dtype": lambda plain: plain.double(),
    "module": _activation,
    "wiring": _rewired,
    "order of layers": lambda plain: modules.Network([*plain[:3], nn.Identity(), nn.ReLU(), plain[3]], (1, 4, 4)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_proof_of_another_structure_is_refused(change: Callable[[modules.Network], modules.Network]) -> None:
    (x, y), proof = samples(), lipkit.prove(network())
    with pytest.raises(OptionError, match=f"got one of {proof.network_sha256} for rounding='sound'"):
        lipkit.certify(change(network()), x, y, proof=proof)


@pytest.mark.parametrize("made", WAYS, ids=lambda way: f"{way['rounding']}-{way['evaluator']}")
@pytest.mark.parametrize("asked", WAYS, ids=lambda way: f"{way['rounding']}-{way['evaluator']}")
def test_a_proof_of_another_evaluation_is_refused(made: dict[str, str], asked: dict[str, str]) -> None:
    if made == asked:
        return
    plain, (x, y) = network(), samples()
    with pytest.raises(OptionError, match=r"proof: expected one of .*rounding='(sound|ignore)', evaluator="):
        lipkit.certify(plain, x, y, proof=lipkit.prove(plain, **made), **asked)  # type: ignore[arg-type]


def test_switches_that_no_hash_sees_are_compared() -> None:
    (x, y), proof = samples(), lipkit.prove(network())
    for name, key, value in (("1.nodes.0", "inplace", True), ("0", "training", True)):
        plain = network()
        setattr(plain.get_submodule(name), key, value)
        assert modules.sha256(plain) == proof.network_sha256
        with pytest.raises(OptionError, match=f"module '{name}' as it was proved, with {key} = False, got True"):
            lipkit.certify(plain, x, y, proof=proof)


def test_a_network_from_a_file_has_the_proof_of_the_one_that_was_saved(tmp_path: Path) -> None:
    signals = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(8, 3))
    plain, x = lipkit.export(signals, (1, 4)), torch.rand(5, 1, 4)
    y, proof, loaded = plain(x).argmax(1), lipkit.prove(plain), lipkit.load(modules.save(plain, tmp_path))
    assert numbers(lipkit.certify(loaded, x, y, proof=proof)) == numbers(lipkit.certify(plain, x, y))


@pytest.mark.thorough
def test_a_proof_does_not_load_the_compiler_of_torch() -> None:
    code = (
        "import sys, torch, lipkit; from torch import nn; from lipkit.modules import FourierConv2d, Network\n"
        "layers = [FourierConv2d(1, 1, 4, 4), nn.ReLU(), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)]\n"
        "lipkit.prove(Network(layers, (1, 4, 4))); assert 'torch._dynamo' not in sys.modules"  # it takes a second
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_option_of_numpy_that_came_later_is_refused_by_name() -> None:
    plain = modules.Network([nn.Linear(2, 2), nn.LeakyReLU(0.1)], (2,))
    plain[1].negative_slope = np.float32(0.1)
    with pytest.raises(OptionError, match="LeakyReLU: expected negative_slope as a number of Python"):
        lipkit.prove(plain)


def test_hooks_of_the_state_hide_no_change() -> None:
    (x, y), proof, plain = samples(), lipkit.prove(network()), network()
    plain[3].weight.mul_(2)
    plain[3].register_state_dict_post_hook(lambda m, state, prefix, _: state[prefix + "weight"].div_(2))
    with pytest.raises(OptionError, match="proof: expected one of the network"):
        lipkit.certify(plain, x, y, proof=proof)


def test_buffers_that_are_not_stored_are_compared_with_and_without_a_proof() -> None:
    fourier = modules.FourierConv2d(1, 1, 4, 4)
    plain = modules.Network([fourier, nn.Flatten(), nn.Linear(16, 3)], (1, 4, 4))
    (x, _), proof = samples(), lipkit.prove(plain)
    lipkit.certify(plain, x, torch.zeros(5, dtype=torch.int64), proof=proof)
    plain.get_buffer("0.transform0").mul_(2)
    for given_proof in (proof, None):
        with pytest.raises(OptionError, match=r"expected 'transform0' of FourierConv2d.* got other numbers"):
            lipkit.certify(plain, x, torch.zeros(5, dtype=torch.int64), proof=given_proof)


def test_activations_that_become_one_module_are_the_same_network() -> None:
    relus = [nn.ReLU(), nn.ReLU()]
    plain = modules.Network([nn.Linear(2, 2), relus[0], nn.Linear(2, 2), relus[1]], (2,))
    proof, x, y = lipkit.prove(plain), torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)
    expected = lipkit.certify(plain, x, y)
    plain._modules["3"] = relus[0]
    for each in (proof, None):
        assert numbers(lipkit.certify(plain, x, y, proof=each)) == numbers(expected)


def test_a_layer_that_stands_first_and_last_is_proved_in_both_places() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4).double(), torch.randn(20, 4, dtype=torch.float64)
    tied = modules.Network([layer, nn.ReLU(), layer], (4,))
    apart = copy.deepcopy(modules.Network([layer, nn.ReLU(), copy.deepcopy(layer)], (4,)))
    y = tied(x).argmax(1)
    found = lipkit.certify(tied, x, y)
    assert bool(found.correct.all())
    assert numbers(found) == numbers(lipkit.certify(apart, x, y))
    chain = prove_chain(tied, FLOAT64)
    assert len(chain.steps) == 2
    assert chain.last is layer


class _Scaled(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) * (5 if key == "weight" else 1)


def _padding(plain: modules.Network) -> None:
    plain[0]._reversed_padding_repeated_twice = [2, 0, 2, 0]


def _walk(plain: modules.Network) -> None:
    relu, clean = plain[1].nodes[0], nn.ReLU().eval()
    relu.named_modules = lambda *_, **__: iter([("", clean)])
    relu.register_forward_hook(lambda _, __, y: 5 * y)


def _detached(plain: modules.Network) -> None:
    kept = plain[3].weight.detach().clone()
    plain[3].weight.data.mul_(5)
    plain[3].weight.detach = lambda: kept


def _copied(plain: modules.Network) -> None:
    small = nn.Parameter(plain[3].weight.detach() / 100, requires_grad=False)
    plain[3].weight.__deepcopy__ = lambda _: small


def _indexed(plain: modules.Network) -> None:
    vars(plain[3])["_parameters"] = _Scaled(plain[3]._parameters)


def _unstored(plain: modules.Network) -> None:
    plain[3]._non_persistent_buffers_set.add("weight")


def _twice(plain: modules.Network) -> None:
    plain[3]._buffers["weight"] = plain[3].weight.data / 100  # torch reads the parameter of this name


class _Alike(tuple[Any, ...]):
    def __iter__(self) -> Any:  # as the constructor of the copy reads it
        return iter([[0], [1], [0, 2]])

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = tuple.__hash__


def _in_place(plain: modules.Network) -> None:
    plain[1].nodes[0].inplace = torch.tensor(True)


def _sources(plain: modules.Network) -> None:
    plain[1].sources = _Alike(((0,), (0,), (2, 2)))


@pytest.mark.parametrize("given_proof", [False, True])
@pytest.mark.parametrize(
    "change", [_padding, _walk, _detached, _copied, _indexed, _unstored, _twice, _in_place, _sources]
)
def test_what_makes_the_live_network_another_than_the_stored_one_is_refused(
    change: Callable[[modules.Network], None], given_proof: bool
) -> None:
    plain, (x, y) = network(), samples()
    proof = lipkit.prove(plain) if given_proof else None
    change(plain)
    with pytest.raises((NoRuleError, OptionError), match="expected"):
        lipkit.certify(plain, x, y, proof=proof)


def test_sizes_that_only_describe_a_weight_may_be_stale() -> None:
    plain, (x, y) = network(), samples()
    expected = lipkit.certify(plain, x, y).radius
    plain[3].in_features = 5
    assert torch.allclose(lipkit.certify(plain, x, y).radius, expected, rtol=1e-9)
    small = nn.Parameter(plain[3].weight / 100, requires_grad=False)
    other = copy.deepcopy(plain[3])
    other.weight = small
    plain[3].__deepcopy__ = lambda _: other
    with pytest.raises(OptionError, match=r"expected a copy with the same numbers, got others in '3\.weight'"):
        lipkit.certify(plain, x, y)
    clean = nn.ReLU()
    clean.negative_slope = 2.0  # type: ignore[assignment]
    steep = modules.Network([nn.Linear(2, 2), nn.LeakyReLU(2.0), nn.Linear(2, 2)], (2,))
    steep[0].in_features, steep[1].__deepcopy__ = 3, lambda _: clean
    with pytest.raises(OptionError, match=r"'1' as its stored form gives it, with type = .*ReLU'>, got .*LeakyReLU"):
        lipkit.prove(steep)


class Louder(nn.Module):
    """A module from outside whose function depends on attributes with the names of idle ones elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.init, self.where = 1.0, 1.0
        self.function = torch.abs

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * (self.init * self.where)


@pytest.fixture
def louder() -> Iterator[modules.Network]:
    modules.add_plain(modules.Plain(Louder, 1.0, modules.exact, {}))
    yield modules.Network([nn.Linear(2, 2), Louder()], (2,))
    del modules.ROWS[Louder]


@pytest.mark.parametrize("key", ["init", "where"])
def test_names_that_are_idle_in_one_type_count_in_others(louder: modules.Network, key: str) -> None:
    x, y, proof = torch.eye(2), torch.tensor([0, 1]), lipkit.prove(louder)
    setattr(louder[1], key, 3.0)
    with pytest.raises(OptionError, match=f"with {key} = 1.0, got 3.0"):
        lipkit.prove(louder)
    with pytest.raises(OptionError, match=f"with {key} = 1.0, got 3.0"):
        lipkit.certify(louder, x, y, proof=proof)
    setattr(louder[1], key, torch.tensor(3.0))
    for known in (proof, None):
        with pytest.raises(OptionError, match=f"Louder: expected {key} as a number .* make a tensor a buffer"):
            lipkit.certify(louder, x, y, proof=known)


def test_a_function_that_a_module_holds_is_compared(louder: modules.Network) -> None:
    x, y, proof = torch.eye(2), torch.tensor([0, 1]), lipkit.prove(louder)
    assert lipkit.certify(louder, x, y, proof=proof).constant == proof.constant
    louder[1].function = torch.exp
    with pytest.raises(OptionError, match="with function = <built-in method abs"):
        lipkit.certify(louder, x, y, proof=proof)


def test_the_first_value_of_a_slope_is_no_part_of_the_network() -> None:
    network = lipkit.export(nn.Sequential(nn.Linear(2, 3), nn.PReLU(init=0.1), nn.Linear(3, 2)), (2,))
    x, y = torch.eye(2), torch.tensor([0, 1])
    proof = lipkit.prove(network)
    radius = lipkit.certify(network, x, y, proof=proof).radius
    with torch.no_grad():
        network[1].weight.fill_(0.9)  # the slope itself is one
    with pytest.raises(OptionError, match="expected one of the network with sha256"):
        lipkit.certify(network, x, y, proof=proof)
    assert not lipkit.certify(network, x, y).radius.equal(radius)


def test_parts_count_in_the_order_of_the_chain_whatever_their_names() -> None:
    torch.manual_seed(0)
    plain, x = modules.Network([nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)], (3,)), torch.randn(6, 3)
    proof, hashed = lipkit.prove(plain), modules.sha256(plain)
    first, middle, last = plain
    plain._modules = {"2": last, "1": middle, "0": first}  # the names of `first` and `last` as before
    with pytest.raises(OptionError, match="proof: expected one of the network"):
        lipkit.certify(plain, x, plain(x).argmax(1), proof=proof)
    plain._modules = {"2": first, "1": middle, "0": last}
    assert modules.sha256(plain) == hashed
    swapped = modules.Network([last, nn.ReLU(), first], (3,))
    plain._modules = {"0": last, "relu": middle, "-1": first}
    assert modules.sha256(plain) == modules.sha256(swapped) != hashed
    y = plain(x).argmax(1)
    assert bool(lipkit.certify(plain, x, y).correct.all())
    assert lipkit.prove(plain).constant == lipkit.prove(swapped).constant
    assert torch.allclose(lipkit.prove(plain).network(x.double()), plain(x).double(), atol=1e-6)


def test_a_padding_that_was_changed_after_birth_counts_only_for_zeros() -> None:
    conv = nn.Conv2d(1, 2, 3, padding=2, padding_mode="replicate")
    conv.padding = (1, 1)  # torch goes on to pad by 2, and the stored form would pad by 1
    with pytest.raises(OptionError, match=r"with _reversed_padding.* = \(1, 1, 1, 1\), got \(2, 2,"):
        lipkit.prove(modules.Network([conv, nn.Flatten()], (1, 4, 4)))
    conv.padding_mode = "zeros"
    plain, x = modules.Network([conv, nn.Flatten(), nn.Linear(32, 3)], (1, 4, 4)), torch.randn(8, 1, 4, 4)
    y = plain(x).argmax(1)
    assert bool(lipkit.certify(plain, x, y, evaluator="float32_blocked").correct.all())
    assert torch.allclose(blocked(plain)(x), plain(x), atol=1e-5)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Module])
def test_an_attribute_of_a_class_that_hides_a_weight_is_refused(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, (x, y) = network().double(), samples()
    proof = lipkit.prove(plain)
    monkeypatch.setattr(kind, "weight", torch.ones(3, 64, dtype=torch.float64), raising=False)
    for each in (proof, None):
        with pytest.raises(NoRuleError, match="an attribute that hides its own 'weight'"):
            lipkit.certify(plain, x, y, proof=each)


def test_a_copy_of_another_network_has_no_part_in_a_proof() -> None:
    plain, (x, y), small = network(), samples(), nn.Linear(64, 3).requires_grad_(False)
    small.weight.div_(1000)
    expected = lipkit.certify(plain, x, y)
    plain[3].__deepcopy__ = lambda _: small
    assert numbers(lipkit.certify(plain, x, y)) == numbers(expected)


def test_hooks_and_replaced_methods_are_refused_with_a_proof_too() -> None:
    (x, y), proof = samples(), lipkit.prove(network())
    plain = network()
    plain[1].nodes[1].register_forward_hook(lambda *_: None)
    with pytest.raises(NoRuleError, match="forward hooks"):
        lipkit.certify(plain, x, y, proof=proof)
    plain = network()
    plain[3].forward = torch.tanh
    with pytest.raises(NoRuleError, match="instance-level 'forward'"):
        lipkit.certify(plain, x, y, proof=proof)


def test_the_integer_program_is_that_of_one_box() -> None:
    plain, (x, y) = network(), samples()
    proof = lipkit.prove(plain, evaluator="integer")
    plain.input_range = (0.0, 2.0)
    with pytest.raises(OptionError, match=r"for inputs in \(0.0, 2.0\), got one for \(0.0, 1.0\)"):
        lipkit.certify(plain, x, y, evaluator="integer", proof=proof)
    proof = lipkit.prove(plain)
    plain.input_range = None  # of float64 no part
    assert len(lipkit.certify(plain, x, y, proof=proof)) == 5


def test_settings_are_those_of_the_evaluation_not_of_the_proof() -> None:
    plain, (x, y) = network(), samples()
    torch.backends.nnpack.set_flags(False)
    try:
        proof = lipkit.prove(plain, evaluator="float32")
    finally:
        torch.backends.nnpack.set_flags(True)
    with pytest.raises(OptionError, match="NNPACK"):
        lipkit.certify(plain, x, y, evaluator="float32", proof=proof)


def test_a_proof_does_not_follow_the_network_it_was_made_from() -> None:
    plain, (x, y) = network(), samples()
    expected = lipkit.certify(plain, x, y)
    proof = lipkit.prove(plain)
    kept = copy.deepcopy(plain)
    for weight in plain.state_dict().values():
        weight.zero_()
    assert numbers(lipkit.certify(kept, x, y, proof=proof)) == numbers(expected)


def test_only_exported_networks_are_proved() -> None:
    with pytest.raises(NoRuleError, match=r"prove lipkit.export\(model, input_shape\)"):
        lipkit.prove(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="evaluator: expected one of"):
        lipkit.prove(network(), evaluator="float16")


def test_errors_by_norms_are_not_below_those_that_are_measured() -> None:
    """Every sample: at least the errors of the whole walk, and for large margins all but 2^-30 of the margin."""
    from lipkit.certificates.margins import Evaluation
    from lipkit.modules.machine import by_norms, through

    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 9), torch.nn.ReLU(), torch.nn.Linear(9, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3)]
    evaluation = lipkit.prove(modules.Network(layers, (6,))).logits
    assert isinstance(evaluation, Evaluation)
    assert evaluation.factors is not None
    x = torch.randn(50, 6, dtype=torch.float64)
    walk = through(evaluation.steps, x)
    for spare in (0.0, 1.0):
        found, far = by_norms(evaluation.steps, evaluation.factors, x, lambda y, s=spare: y.new_full((len(y),), s))
        assert bool((found.error.at >= walk.error.at * (1 - 1e-9)).all())
        assert bool((found.centre_error >= walk.centre_error * (1 - 1e-9)).all())
        assert bool((found.peak.at >= walk.peak.at).all() and (found.error.at < 20 * walk.error.at).all())
        assert found.error.slope == walk.error.slope
        assert far.all() == (spare == 0.0)


@pytest.mark.parametrize("kind", ["dense", "one column", "diagonal", "sparse"])
def test_two_inner_products_bound_a_product_of_moduli_from_both_sides(kind: str) -> None:
    """n with low <= || |W| |x| || / N <= n <= ||x||, N the norm that the rule of dense layers grows with."""
    import numpy as np

    from lipkit.modules.dense import moduli_sizes
    from lipkit.modules.machine import local_error
    from lipkit.proof.roundoff import FLOAT64

    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((7, 40)), rng.standard_normal((20, 40)) * rng.random((20, 40)) ** 4
    kept = {"one column": np.arange(40) == 3, "diagonal": np.eye(7, 40), "sparse": rng.random((7, 40)) < 0.1}
    weight = weight * kept.get(kind, 1.0)
    layer = nn.Linear(40, 7, bias=False).double().requires_grad_(False)
    layer.weight.copy_(torch.from_numpy(weight))
    sizes = moduli_sizes(layer)
    low, high = (t.numpy() for t in sizes(torch.from_numpy(x)))
    modulus = np.abs(weight)
    product = np.linalg.norm(np.abs(x) @ modulus.T, axis=1)
    norm = np.sqrt(modulus.sum(0).max() * modulus.sum(1).max())
    assert (low * norm <= product * (1 + 1e-12)).all()
    assert (product <= high * norm).all()
    assert (high <= np.linalg.norm(x, axis=1) * (1 + 1e-12)).all()
    if kind in ("dense", "one column"):  # where the bound of the norm alone is wide
        assert (high < 0.95 * np.linalg.norm(x, axis=1)).any()
        assert (low > 0.7 * high).all()
    # What is measured at x grows from that at 0 by at most its slope times n.
    error = local_error(layer, (40,), FLOAT64)
    at, zero = error(torch.from_numpy(x)).error, error(torch.zeros(20, 40).double()).error
    assert (at.at.numpy() <= zero.at.numpy() + at.slope * high * (1 + 1e-12)).all()


def test_weights_that_could_be_flushed_count_by_the_norm() -> None:
    from lipkit.modules.dense import moduli_sizes
    from lipkit.modules.machine import norm_sizes

    layer = nn.Linear(2, 2, bias=False).double().requires_grad_(False)
    for number in (1e-310, math.inf):
        layer.weight.copy_(torch.tensor([[1.0, number], [1.0, 1.0]], dtype=torch.float64))
        assert moduli_sizes(layer) is norm_sizes
    assert moduli_sizes(nn.ReLU()) is norm_sizes
