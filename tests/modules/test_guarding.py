"""Everything that makes a forward pass another one than the type names is refused, and what does not is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lipkit import certify, modules
from lipkit.errors import NoRuleError
from lipkit.layers import CayleyLinear
from lipkit.lowering import export, lipschitz
from lipkit.modules import guard


def refused(module: nn.Module, match: str, shape: tuple[int, ...] = (1, 4, 4)) -> None:
    for function in (guard, lipschitz, lambda m: lipschitz(m, shape), lambda m: export(m, shape)):
        with pytest.raises(NoRuleError, match=match):
            function(module)


class Tenfold(Tensor):
    """A tensor whose linear maps are ten times too large, with the numbers of an ordinary one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            y = func(*args, **(kwargs or {}))
            return 10 * y if func is nn.functional.linear else y


class TenfoldParameter(nn.Parameter):
    __torch_function__ = Tenfold.__torch_function__


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(1, 2))])
@pytest.mark.parametrize("within", [nn.Sequential, lambda net: net])
@pytest.mark.parametrize("verb", [export, lipschitz])
def test_modules_of_torchscript_are_refused(make: Any, within: Any, verb: Any) -> None:
    with pytest.raises(NoRuleError, match="TorchScript: pass the network it was made from"):
        verb(within(make(nn.Sequential(nn.Linear(2, 2)).eval())), (2,))


def test_a_module_compiled_in_place_is_refused() -> None:
    layer = nn.Linear(2, 2)
    layer._compiled_call_impl = lambda x: 10 * x  # type: ignore[assignment]
    assert torch.equal(layer(torch.ones(1, 2)), 10 * torch.ones(1, 2))
    refused(layer, "_compiled_call_impl", (2,))
    layer._compiled_call_impl = None
    guard(layer)


REPLACED: dict[str, tuple[type, str, Callable[[], nn.Module]]] = {
    "a helper of the forward pass": (nn.Conv2d, "_conv_forward", lambda: nn.Conv2d(1, 1, 3)),
    "a helper of a base class": (nn.modules.batchnorm._NormBase, "reset_parameters", lambda: nn.BatchNorm2d(1).eval()),
    "a call of its own": (nn.Linear, "__call__", lambda: nn.Linear(4, 4)),
    "the call of every module": (nn.Module, "__call__", nn.ReLU),
    "what the call runs": (nn.Module, "_call_impl", nn.ReLU),
    "the way to the weights": (nn.Module, "__getattr__", lambda: nn.Linear(4, 4)),
    "attributes of a class": (nn.Conv2d, "__getattribute__", lambda: nn.Conv2d(1, 1, 3)),
    "attributes of every module": (nn.Module, "__getattribute__", nn.ReLU),
    "a compiled call": (nn.Linear, "_compiled_call_impl", lambda: nn.Linear(4, 4)),
    "a forward pass": (nn.Linear, "forward", lambda: nn.Linear(4, 4)),
    "a constrained weight": (CayleyLinear, "weight", lambda: CayleyLinear(4, 4)),
    "a plain module's helper": (modules.FourierConv2d, "matrices", lambda: plain_fourier()),
}


def plain_fourier() -> nn.Module:
    from lipkit.layers import CayleyConv2d

    return export(CayleyConv2d(1, 1, 3), (1, 4, 4))[0]


@pytest.mark.parametrize("name", REPLACED)
def test_methods_replaced_on_a_class_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, method, make = REPLACED[name]
    module = make()
    guard(module)
    original = getattr(kind, method, None)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        assert original is not None
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(kind, method, replacement, raising=False)
        with pytest.raises(NoRuleError, match=f"replaced after its rule was registered, {method}"):
            guard(module)
    guard(module)


def test_a_certificate_sees_replaced_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    network = modules.Network([nn.Conv2d(1, 2, 2), nn.Flatten()], (1, 2, 2))
    x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    certify(network, x, y)
    original = nn.Conv2d._conv_forward
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda self, *a: 10 * original(self, *a))
    with pytest.raises(NoRuleError, match="_conv_forward"):
        certify(network, x, y)


def test_other_methods_of_every_module_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "extra_repr", lambda self: "mine")
    assert float(lipschitz(nn.ReLU())) == 1


WEIGHTS: dict[str, tuple[Callable[[nn.Linear], object], str]] = {
    "a Tensor subclass": (lambda m: _put(m, torch.ones(2, 2).as_subclass(Tenfold)), "Tenfold.*operations are its own"),
    "a Parameter subclass": (lambda m: _put(m, TenfoldParameter(torch.ones(2, 2))), "TenfoldParameter"),
    "a bias": (lambda m: m._parameters.update(bias=torch.ones(2).as_subclass(Tenfold)), "'bias'.*Tenfold"),
    "a buffer": (lambda m: m.register_buffer("extra", torch.ones(2).as_subclass(Tenfold)), "'extra'.*Tenfold"),
    "an attribute": (lambda m: _attribute(m, torch.ones(2, 2).as_subclass(Tenfold)), "'weight'.*Tenfold"),
    "one that hides a weight": (
        lambda m: vars(m).update(weight=torch.ones(2, 2)),
        "attribute that hides its own 'weight'",
    ),
    "sparse": (lambda m: _put(m, torch.eye(2).to_sparse()), r"'weight'.*sparse_coo.*\.to_dense\(\)"),
    "sparse by rows": (lambda m: _put(m, _rows()), r"'weight'.*sparse_csr.*\.to_dense\(\)"),
    "on the meta device": (lambda m: m.to("meta"), "'weight'.*meta device.*load it first"),
}


def _put(module: nn.Module, value: Tensor) -> None:
    module._parameters["weight"] = value  # type: ignore[assignment]


def _attribute(module: nn.Module, value: Tensor) -> None:
    del module.weight
    module.weight = value


def _rows() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a beta
        return torch.eye(2).to_sparse_csr()


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_are_no_ordinary_tensors_are_refused(name: str) -> None:
    change, match = WEIGHTS[name]
    layer = nn.Linear(2, 2)
    change(layer)
    refused(layer, match, (2,))


def test_a_weight_with_operations_of_its_own_would_break_the_bound() -> None:
    layer = nn.Linear(2, 2, bias=False)
    _put(layer, torch.eye(2).as_subclass(Tenfold))
    assert torch.equal(layer(torch.ones(1, 2)).as_subclass(Tensor), 10 * torch.ones(1, 2))


class DoubledFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return 2 * y if func is nn.functional.linear else y


class DoubledOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [DoubledFunctions, DoubledOperations])
def test_modes_that_see_every_operation_are_refused(mode: Callable[[], Any]) -> None:
    with mode():
        refused(nn.Linear(2, 2), f"got .*{mode.__name__}", (2,))
    guard(nn.Linear(2, 2))


def test_a_default_device_is_no_such_mode() -> None:
    layer = nn.Conv2d(1, 2, 3, padding=1)
    expected = lipschitz(layer, (1, 4, 4))
    with torch.device("cpu"):
        assert torch.equal(lipschitz(layer, (1, 4, 4)), expected)
    with torch.device("meta"), pytest.raises(NoRuleError, match="DeviceContext"):
        lipschitz(layer, (1, 4, 4))


def test_ordinary_weights_of_every_kind_pass() -> None:
    layer = nn.Linear(3, 2)
    expected = lipschitz(layer)
    numbers = layer.weight.detach().clone()
    for weight in (numbers, numbers.T.contiguous().T, nn.Buffer(numbers), nn.Parameter(numbers, requires_grad=False)):
        layer._parameters["weight"] = weight  # as torch.func.functional_call puts them
        assert torch.equal(lipschitz(layer), expected)
    given = {"weight": numbers, "bias": torch.zeros(2)}
    inside = torch.func.grad(lambda w: torch.func.functional_call(Bounded(layer), {"inner.weight": w}, ()))
    assert inside(given["weight"]).shape == (2, 3)


class Bounded(nn.Module):
    """The bound of a module as its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> Tensor:
        return lipschitz(self.inner)
