"""Nothing is ever assumed to be 1-Lipschitz: what ``lipschitz`` and ``export`` refuse, at the top and deep inside."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, spectral_norm

from lipkit.errors import NoRuleError
from lipkit.layers import CayleyConv2d, CayleyLinear, MaxMin, Residual, Scale
from lipkit.lowering import export, lipschitz
from lipkit.testing.reference import dense_matrix


class TenTimes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x)


class LooseCayley(CayleyLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sign())


class DoubledCayley(CayleyLinear):
    def weight(self) -> Tensor:
        return 2 * super().weight()


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def with_hook() -> nn.Module:
    layer = linear()
    layer.register_forward_hook(lambda module, args, output: 10 * output)
    return layer


def with_pre_hook() -> nn.Module:
    layer = linear()
    layer.register_forward_pre_hook(lambda module, args: (10 * args[0],))
    return layer


def with_instance_forward() -> nn.Module:
    layer = linear()
    layer.forward = types.MethodType(lambda self, x: 10 * x, layer)  # type: ignore[method-assign]
    return layer


def with_instance_call() -> nn.Module:
    layer = linear()
    layer._call_impl = lambda x: 10 * x  # type: ignore[method-assign,assignment]
    return layer


def with_instance_weight() -> nn.Module:
    layer = CayleyLinear(4, 4)
    layer.weight = lambda: 10 * torch.eye(4)  # type: ignore[method-assign]
    return layer


def with_parametrization() -> nn.Module:
    return parametrizations.spectral_norm(linear())


def with_old_spectral_norm() -> nn.Module:
    return spectral_norm(linear())


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a subclass of a lipkit layer": (lambda: LooseCayley(4, 4), "sign|LooseCayley"),
    "an unknown function": (Unknown, "sign|input_shape"),
    "a torch module without a rule": (lambda: nn.LogSoftmax(1), "no rule for .*LogSoftmax"),
    "BatchNorm in training mode": (lambda: nn.BatchNorm1d(4), "expected evaluation mode.*got training=True"),
    "Dropout in training mode": (lambda: nn.Dropout(0.5), "expected evaluation mode.*got training"),
    "a forward hook": (with_hook, "forward hooks or pre-hooks.*expected none"),
    "a forward pre-hook": (with_pre_hook, "forward hooks or pre-hooks.*expected none"),
    "an instance-level forward": (with_instance_forward, "instance-level 'forward'.*expected none"),
    "an instance-level call": (with_instance_call, "instance-level '_call_impl'.*expected none"),
    "an instance-level weight()": (with_instance_weight, "instance-level 'weight'.*expected none"),
    "a parametrization that changes": (with_parametrization, r"the same numbers at each evaluation.*call \.eval\(\)"),
    "the old spectral_norm": (with_old_spectral_norm, "expected evaluation mode, got training mode"),
}


def deep(inner: nn.Module) -> nn.Module:
    """Sequential in Residual in Sequential."""
    body = nn.Sequential(CayleyLinear(4, 4), nn.Sequential(MaxMin(), inner))
    return nn.Sequential(Scale(2.0), Residual(body), CayleyLinear(4, 3))


def in_shortcut(inner: nn.Module) -> nn.Module:
    return nn.Sequential(Residual(CayleyLinear(4, 4), shortcut=nn.Sequential(inner)))


PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda inner: inner,
    "deep inside": deep,
    "in a shortcut": in_shortcut,
}
FUNCTIONS: dict[str, Callable[[nn.Module], object]] = {
    "lipschitz": lipschitz,
    "lipschitz with a shape": lambda module: lipschitz(module, (4,)),
    "export": lambda module: export(module, (4,)),
}


@pytest.fixture
def _no_global_hooks() -> Iterator[None]:
    yield
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.*is deprecated.*:FutureWarning")
def test_is_refused(what: str, place: str, function: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(NoRuleError, match=message):
        FUNCTIONS[function](PLACES[place](make()))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [TenTimes, DoubledCayley])
@pytest.mark.parametrize("place", PLACES)
def test_a_rule_does_not_carry_over_to_a_subclass(place: str, make: Callable[[int, int], nn.Module]) -> None:
    module = make(4, 4)
    norm = np.linalg.norm(dense_matrix(module, (4,), torch.float32), 2)
    assert float(lipschitz(module, (4,)).detach()) == pytest.approx(norm, rel=1e-6)
    network = PLACES[place](module)
    x = torch.randn(5, 4)
    plain = export(network, (4,))
    assert torch.allclose(plain(x), network(x), rtol=1e-4, atol=1e-5)
    assert float(lipschitz(plain)) == pytest.approx(float(lipschitz(network, (4,)).detach()), rel=1e-5)
    with pytest.raises(NoRuleError, match="input_shape"):
        lipschitz(network)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_the_same_network_without_it_is_accepted(place: str, function: str) -> None:
    FUNCTIONS[function](PLACES[place](linear()))
    FUNCTIONS[function](PLACES[place](nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()).eval()))


@pytest.mark.parametrize("pre", [False, True], ids=["hook", "pre-hook"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.usefixtures("_no_global_hooks")
def test_global_hooks_are_refused(function: str, pre: bool) -> None:
    network = deep(linear())
    if pre:
        handle = torch_module.register_module_forward_pre_hook(lambda module, args: None)
    else:
        handle = torch_module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(NoRuleError, match=r"global forward hooks are installed.*expected none"):
            FUNCTIONS[function](network)
    finally:
        handle.remove()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_hook_on_a_container_is_refused(function: str) -> None:
    network = deep(linear())
    body = network[1].nodes[0]  # type: ignore[union-attr]
    body.register_forward_hook(lambda module, args, output: 10 * output)  # type: ignore[union-attr]
    with pytest.raises(NoRuleError, match=r"Sequential has forward hooks or pre-hooks"):
        FUNCTIONS[function](network)


def test_a_hook_on_an_exported_network_is_refused() -> None:
    plain = export(nn.Sequential(CayleyConv2d(2, 2, 3), MaxMin()), (2, 4, 4))
    assert float(lipschitz(plain)) < 1.001
    plain[0].register_forward_hook(lambda module, args, output: 10 * output)
    with pytest.raises(NoRuleError, match="forward hooks"):
        lipschitz(plain)


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(NoRuleError, match=r"lipschitz: expected an nn.Module, got builtins\.function|got .*function"):
        lipschitz(lambda x: x)  # type: ignore[arg-type]
