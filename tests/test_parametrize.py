"""Constraints on the weights of one's own layers: norms, families, and the manners of torch's parametrizations."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm as torch_spectral_norm

import lipkit
from lipkit.bounds.power import maps
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers.families import FAMILIES
from lipkit.modules.parametrised import settled
from lipkit.parametrize import FamilyWeight, gaps, norm_at_most, orthogonal, spectral_norm
from lipkit.testing.reference import dense_matrix


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def norm(layer: nn.Module, shape: tuple[int, ...]) -> float:
    """By singular values, of the weights as they are now."""
    with torch.no_grad():
        fixed: Any = copy.deepcopy(settled(layer)).double()
    fixed.bias = None
    return float(np.linalg.norm(dense_matrix(fixed, shape), 2))


LAYERS: dict[str, tuple[Any, tuple[int, ...], float]] = {
    # a layer, the shape of an input, and the share of its norm that is reached at least
    "linear": (lambda: nn.Linear(5, 4), (5,), 1 - 1e-5),
    "matrix": (lambda: nn.Conv2d(3, 4, 1), (3, 4, 4), 1 - 1e-5),
    "patches": (lambda: nn.Conv2d(3, 4, 2, 2), (3, 6, 6), 1 - 1e-5),
    "grouped patches": (lambda: nn.ConvTranspose2d(4, 6, 2, 2, groups=2), (4, 3, 3), 1 - 1e-5),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 6, 7), 0.9),
    "zeros": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 8, 8), 0.9),
    "valid": (lambda: nn.Conv2d(2, 3, (1, 3)), (2, 5, 9), 0.9),
    "strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 8, 8), 0.85),
    "dilated, grouped": (lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=2, groups=2), (4, 9, 9), 0.85),
    "strided and dilated": (lambda: nn.Conv2d(2, 4, 3, stride=3, dilation=2, padding=2), (2, 9, 9), 0.4),
    "transposed": (lambda: nn.ConvTranspose2d(4, 2, 4, 2, 1, groups=2), (4, 4, 4), 0.85),
    "signal": (lambda: nn.Conv1d(2, 4, 5, padding=2), (2, 12), 0.85),
    "transposed signal": (lambda: nn.ConvTranspose1d(4, 2, 3, 2, 1, 1), (4, 6), 0.85),
}
MADE: dict[str, Any] = {
    "spectral_norm": spectral_norm,
    "norm_at_most": lambda layer: norm_at_most(layer, 0.5),
    "cayley": orthogonal,
    "aoc": lambda layer: orthogonal(layer, "aoc"),
    "rko": lambda layer: orthogonal(layer, "rko"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_norms_are_proved_and_reached(name: str) -> None:
    make, shape, share = LAYERS[name]
    layer = make()
    with torch.no_grad():
        layer.weight.mul_(7)
    bounded = spectral_norm(copy.deepcopy(layer)).eval()
    found = norm(bounded, shape)
    assert share <= found <= 1
    assert found <= float(lipkit.lipschitz(lipkit.export(bounded, shape))) <= 1 + 1e-5
    limited = norm_at_most(copy.deepcopy(layer), 1.5).eval()
    assert 1.5 * share <= norm(limited, shape) <= 1.5
    large = norm_at_most(copy.deepcopy(layer), 1e4)
    assert all(torch.equal(large.train(mode).weight, layer.weight) for mode in (True, False))


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "size"), [({}, 5), ({"groups": 2}, 8), ({"stride": 2}, 6), ({}, 3)])
def test_circular_norms_of_one_size_are_exact(options: dict[str, int], size: int) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", **options)
    shape = (4, size, size)
    exact, every = spectral_norm(copy.deepcopy(layer), input_shape=shape).eval(), spectral_norm(layer).eval()
    assert 1 - 1e-4 <= norm(exact, shape) <= 1
    assert norm(every, shape) <= norm(exact, shape)
    exact.train()
    for _ in range(300):
        trained = exact.weight
    assert torch.allclose(trained, exact.eval().weight, rtol=1e-3)


@pytest.mark.parametrize(("options", "size"), [({"stride": 2}, 5), ({"dilation": 2, "padding": 2}, 8), ({}, 2)])
def test_circular_norms_of_sizes_that_do_not_fit_are_those_of_every_size(options: dict[str, int], size: int) -> None:
    layer = nn.Conv2d(4, 6, 3, **{"padding": 1, **options}, padding_mode="circular")  # type: ignore[arg-type]
    made = spectral_norm(layer, input_shape=(4, size, size)).eval()
    assert made.parametrizations["weight"][0].input_shape is None
    assert 0.3 < norm(made, (4, size, size)) <= 1


@pytest.mark.thorough
def test_what_torch_takes_for_the_norm_of_a_convolution_is_not() -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        layer.weight.abs_()
    assert norm(torch_spectral_norm(copy.deepcopy(layer), n_power_iterations=30).eval(), (4, 8, 8)) > 2.4
    assert norm(spectral_norm(layer).eval(), (4, 8, 8)) <= 1


@pytest.mark.parametrize("name", LAYERS)
def test_training_divides_by_an_estimate_near_the_proved_norm(name: str) -> None:
    layer = spectral_norm(LAYERS[name][0]())
    bound = layer.parametrizations.weight[0]
    weight = layer.parametrizations.weight.original
    for _ in range(40):
        made = layer.weight
    ((estimate, proved),) = gaps(layer).values()
    assert 0.93 <= estimate / proved <= 1 + 1e-6
    assert torch.allclose(made, weight / estimate, rtol=1e-3)
    kernel = bound._kernel(weight.detach()).double()
    forward, back = maps(kernel, bound.groups)
    v = bound.v.double()
    y = torch.randn_like(forward(v))
    assert torch.allclose((forward(v) * y).sum(), (v * back(y)).sum())


@pytest.mark.thorough
def test_the_gradient_is_that_of_the_quotient() -> None:
    layer = spectral_norm(nn.Linear(3, 3).double())
    for _ in range(300):
        layer.weight  # noqa: B018
    weight = layer.parametrizations.weight.original
    direction = torch.randn(3, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad((layer.weight * direction).sum(), weight)
    exact = weight.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((exact / torch.linalg.matrix_norm(exact, 2) * direction).sum(), exact)
    assert torch.allclose(found, expected, atol=1e-6)
    (proved,) = torch.autograd.grad((layer.eval().weight * direction).sum(), weight)
    assert torch.allclose(proved, expected, atol=1e-6)


@pytest.mark.usual(36)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("family", ["cayley", "bcop", "rko", "crko", "aol"])
def test_families_of_every_geometry(name: str, family: str) -> None:
    make, shape, _ = LAYERS[name]
    layer = make()
    if name == "strided and dilated" and family in ("cayley", "bcop"):
        layer = nn.Conv2d(2, 4, 3, stride=3, padding=1)
    found = norm(orthogonal(layer, family), shape)
    assert found <= 1 + 1e-5
    assert family in ("rko", "crko", "aol") or found >= 0.99
    assert torch.isfinite(layer(torch.randn(2, *shape))).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_yields_a_matrix_and_some_a_kernel(family: str) -> None:
    layer, conv = nn.Linear(4, 3), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    assert norm(orthogonal(layer, family), (4,)) <= 1 + 1e-5
    if family in ("aoc", "bcop", "cayley", "cayley_bcop", "rko", "crko", "aol", "liresnet", "cholesky"):
        assert norm(orthogonal(conv, family), (4, 6, 6)) <= 1 + 1e-5
    else:
        with pytest.raises(OptionError, match="overlap a kernel of this layer's size"):
            orthogonal(conv, family)


def test_a_stride_that_does_not_divide_a_circle_is_left_to_the_export() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 4, 3, stride=3, padding=1, groups=2, padding_mode="circular")
    layer = orthogonal(layer, "aol").eval()
    assert norm(layer, (2, 6, 6)) <= 1 + 1e-5
    found = norm(layer, (2, 7, 6))  # the first and the last row are read twice
    assert 1.01 < found <= float(lipkit.lipschitz(lipkit.export(layer, (2, 7, 6))))


def test_a_family_starts_near_a_weight_or_refuses_it() -> None:
    turn = torch.linalg.qr(torch.randn(4, 4))[0]
    turn *= torch.det(turn).sign() * torch.eye(4)[0] + 1 - torch.eye(4)[0]
    layer = nn.Linear(4, 4)
    layer.weight.data.copy_(3 * turn)
    assert torch.allclose(orthogonal(layer).weight, turn, atol=1e-4)
    layer.weight = 2 * torch.eye(4)
    assert torch.allclose(layer.weight, torch.eye(4), atol=1e-4)
    with pytest.raises(OptionError, match="expected a family that starts near"):
        orthogonal(nn.Conv2d(2, 2, 3), "aoc").weight = torch.ones(2, 2, 3, 3)


@pytest.mark.thorough
def test_a_network_in_one_line_and_its_bound() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
    net.append(nn.Linear(8 * 16, 10))
    assert spectral_norm(net) is net
    net(torch.randn(2, 3, 8, 8))
    assert [*gaps(net)] == ["0", "2", "5"]
    assert all(estimate <= proved * (1 + 1e-6) for estimate, proved in gaps(net).values())
    with pytest.raises(NoRuleError, match=r"call \.eval\(\)"):
        lipkit.lipschitz(net)
    plain = lipkit.export(net.eval(), (3, 8, 8))
    assert float(lipkit.lipschitz(plain)) <= 1 + 1e-5
    x = torch.randn(6, 3, 8, 8)
    found = lipkit.certify(plain, x, plain(x).argmax(1))
    assert (found.radius > 0).any()


# What torch's own tests ask of a parametrization.


@pytest.fixture(params=MADE)
def made(request: pytest.FixtureRequest) -> Any:
    return MADE[request.param]


@pytest.fixture(params=["linear", "zeros"])
def layer(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    return LAYERS[request.param][0]()


def shape_of(layer: nn.Module) -> tuple[int, ...]:
    return (2, 5) if isinstance(layer, nn.Linear) else (2, 3, 6, 6)


def test_registered_and_removed(made: Any, layer: nn.Module) -> None:
    kind, names = type(layer), {name for name, _ in layer.named_parameters()}
    assert made(layer) is layer
    assert parametrize.is_parametrized(layer, "weight")
    assert type(layer).__name__ == f"Parametrized{kind.__name__}"
    assert isinstance(layer, kind)
    assert "weight" not in dict(layer.named_parameters())
    assert all(p.requires_grad for p in layer.parameters())
    value = layer.eval().weight
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    assert type(layer) is kind
    assert {name for name, _ in layer.named_parameters()} == names
    assert torch.allclose(layer.weight, value)


def test_the_original_comes_back_where_it_is_one_tensor(layer: nn.Module) -> None:
    before = layer.weight.clone()
    parametrize.remove_parametrizations(spectral_norm(layer), "weight", leave_parametrized=False)
    assert torch.equal(layer.weight, before)


def test_evaluation_changes_nothing_and_training_the_vector_alone(made: Any, layer: nn.Module) -> None:
    made(layer).eval()
    state = {key: t.clone() for key, t in layer.state_dict().items()}
    layer(torch.randn(shape_of(layer)))
    assert all(torch.equal(t, state[key]) for key, t in layer.state_dict().items())
    layer.train()(torch.randn(shape_of(layer)))
    assert all(torch.equal(t, state[key]) for key, t in layer.state_dict().items() if not key.endswith(".v"))


def test_a_parametrization_has_the_mode_of_its_layer(made: Any, layer: nn.Module) -> None:
    assert not made(layer.eval()).parametrizations.weight[0].training
    assert layer.train().parametrizations.weight[0].training


def test_state_dicts_carry_all_that_the_weight_is_made_of(made: Any, layer: nn.Module) -> None:
    twin = made(copy.deepcopy(layer))
    made(layer)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    layer(torch.randn(shape_of(layer)))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    x = torch.randn(shape_of(layer))
    assert torch.equal(twin(x), layer(x))
    assert torch.equal(twin.eval()(x), layer.eval()(x))
    with pytest.raises(RuntimeError, match="state_dict"):
        torch.save(layer, io.BytesIO())


def test_a_deep_copy_stands_alone(made: Any, layer: nn.Module) -> None:
    made(layer)
    x = torch.randn(shape_of(layer))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    before = layer.eval()(x)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1)
    assert not torch.equal(twin.eval()(x), before)
    assert torch.equal(layer(x), before)


def test_values_are_kept_by_cached(made: Any, layer: nn.Module) -> None:
    made(layer)
    assert layer.weight is not layer.weight
    with parametrize.cached():
        first = layer.weight
        assert layer.weight is first
    assert layer.weight is not first


def test_its_parameters_train(made: Any, layer: nn.Module) -> None:
    made(layer)
    x, y = torch.randn(shape_of(layer)), torch.randn(shape_of(layer))
    losses = []
    for _ in range(8):
        loss = (layer(x).flatten(1)[:, :4] - y.flatten(1)[:, :4]).square().mean()
        parameters = list(layer.parameters())
        with torch.no_grad():
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.sub_(0.1 * g)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_a_parametrization_behind_another(layer: nn.Module) -> None:
    norm_at_most(orthogonal(layer, "rko").eval(), 0.25)
    shape = shape_of(layer)[1:]
    assert norm(layer, shape) <= 0.25
    assert gaps(layer) == {}


def test_parametrizations_go_to_another_layer(made: Any, layer: nn.Module) -> None:
    twin = copy.deepcopy(layer).eval()
    made(layer).eval()
    if isinstance(layer, nn.Conv2d) and isinstance(layer.parametrizations.weight[0], FamilyWeight):
        pytest.skip("its parameters do not follow from a weight")
    parametrize.transfer_parametrizations_and_params(layer, twin)
    assert torch.equal(twin.weight, layer.weight)


def test_autocast_changes_no_constraint(made: Any, layer: nn.Module) -> None:
    made(layer).eval()
    exact = layer.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.weight, exact)
        layer.train()(torch.randn(shape_of(layer))).float().sum().backward()
        assert layer.weight.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_other_devices_and_formats_go_with_the_layer(made: Any, layer: nn.Module) -> None:
    made(layer).double()
    assert layer.weight.dtype == torch.float64
    assert layer(torch.randn(shape_of(layer), dtype=torch.float64)).dtype == torch.float64
    assert made(LAYERS["linear"][0]().double()).weight.dtype == torch.float64


@pytest.mark.thorough
@pytest.mark.usual(6)
def test_data_parallel(made: Any, layer: nn.Module) -> None:
    """With one process: buffers are broadcast, and gradients go through its reducer."""
    made(layer)
    alone = copy.deepcopy(layer)
    x = torch.randn(shape_of(layer))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shared = nn.parallel.DistributedDataParallel(layer)
        for _ in range(2):
            shared(x).square().sum().backward()
            alone(x).square().sum().backward()
        # gloo's thread drops the last reduction and needs the interpreter's lock for it; the group's end waits for that
        # thread with the lock held.
        time.sleep(0.2)
    finally:
        torch.distributed.destroy_process_group()
    for own, expected in zip(layer.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(own.grad, expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: spectral_norm(nn.ReLU()), OptionError, "expected a linear layer, a convolution, or a network"),
        (lambda: spectral_norm(nn.Sequential(nn.Conv3d(1, 1, 3))), OptionError, "got Conv3d at '0'"),
        (lambda: spectral_norm(nn.Bilinear(2, 2, 2)), OptionError, "got Bilinear"),
        (lambda: spectral_norm(nn.Linear(2, 2).half()), OptionError, "float32 or torch.float64"),
        (lambda: norm_at_most(nn.Linear(2, 2), 0.0), OptionError, "gamma: expected a positive finite number, got 0"),
        (lambda: norm_at_most(nn.Linear(2, 2), float("inf")), OptionError, "gamma"),
        (lambda: spectral_norm(nn.Conv2d(1, 1, 3), input_shape=(1, 5)), ShapeError, "expected 3 numbers"),
        (lambda: spectral_norm(nn.Sequential(nn.Linear(2, 2)), input_shape=(2,)), OptionError, "none for a network"),
        (
            lambda: spectral_norm(nn.Sequential(nn.Conv2d(1, 1, 3, padding=2, padding_mode="circular"))),
            NoRuleError,
            "at '0'.*padded rows",
        ),
        (lambda: orthogonal(nn.Linear(2, 2), "qr"), OptionError, "expected one of"),
        (lambda: orthogonal(nn.Linear(2, 2), nonsense=3), OptionError, "expected options of the family 'cayley'"),
        (lambda: orthogonal(spectral_norm(nn.Linear(2, 2))), OptionError, "without a parametrization on its weight"),
        (
            lambda: spectral_norm(nn.Sequential(prune.identity(nn.Linear(2, 2), "weight"))),
            OptionError,
            "at '0': expected a weight that is a parameter, got one made by a hook: use .*prune.remove first",
        ),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_refusal_leaves_the_network_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 3, padding=2, padding_mode="circular"))
    with pytest.raises(NoRuleError):
        spectral_norm(net)
    assert not any(parametrize.is_parametrized(m) for m in net)


def test_a_subnormal_weight_stays_finite() -> None:
    layer = spectral_norm(nn.Linear(2, 2))
    with torch.no_grad():
        layer.parametrizations.weight.original.fill_(1e-40)
    assert bool(layer.eval().weight.isfinite().all())
    assert float(lipkit.lipschitz(layer).detach()) <= 1


def test_a_zero_weight_stays_zero() -> None:
    layer = spectral_norm(nn.Linear(2, 2))
    with torch.no_grad():
        layer.parametrizations.weight.original.zero_()
    assert not layer.weight.any()
    assert not layer.eval().weight.any()


def test_what_is_printed() -> None:
    assert (
        repr(spectral_norm(nn.Linear(2, 2)).parametrizations.weight[0]) == "NormBound(norm = 1, proved for every size)"
    )
    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    text = repr(norm_at_most(layer, 2, input_shape=(1, 5, 5)).parametrizations.weight[0])
    assert text == "NormBound(norm <= 2, proved for inputs (1, 5, 5))"
    assert isinstance(orthogonal(nn.Linear(2, 2)).parametrizations.weight[0], FamilyWeight)
