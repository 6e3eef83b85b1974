"""Parametrised modules count as modules of the numbers that they use now; what changes is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lipkit import analyze, certify, export, lipschitz
from lipkit.errors import NoRuleError
from lipkit.modules import SandwichBlock, SlopeResidual
from lipkit.modules.parametrised import settled
from lipkit.testing.reference import dense_matrix, singular_values


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return (w + w.mT) / 2


class Counting(nn.Module):
    calls = 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return w * self.calls


class Drifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, w: Tensor) -> Tensor:
        self.seen.add_(1)
        return 2 * w


def own(layer: nn.Module, kind: nn.Module) -> Any:
    return parametrize.register_parametrization(layer, "weight", kind)


MADE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 3)), (4,)),
    "spectral": (lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), (2, 5, 5)),
    "weight": (lambda: parametrizations.weight_norm(nn.ConvTranspose2d(2, 3, 3, 2, 1, 1)), (2, 3, 3)),
    "own": (lambda: own(nn.Linear(4, 4), Symmetric()), (4,)),
    "two": (lambda: own(parametrizations.weight_norm(nn.Linear(4, 4)), Symmetric()), (4,)),
    "bias": (lambda: parametrizations.weight_norm(nn.Linear(4, 3), "bias", dim=None), (4,)),
    "hook weight": (lambda: nn.utils.weight_norm(nn.ConvTranspose2d(2, 3, 3, 2, 1, 1)), (2, 3, 3)),
    "hook spectral": (lambda: nn.utils.spectral_norm(nn.Conv2d(2, 3, 3)), (2, 5, 5)),
    "two hooks": (lambda: nn.utils.weight_norm(nn.utils.spectral_norm(nn.Linear(4, 3)), "bias", dim=None), (4,)),
}
OLD = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


class First(nn.Module):
    """The outputs of a recurrent network."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0]


class Around(nn.Module):
    """A forward pass of its own."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x).flatten(1))


@OLD
@pytest.mark.usual(14)
@pytest.mark.parametrize("around", [lambda m: m, nn.Sequential, Around], ids=["alone", "in a chain", "in its own"])
@pytest.mark.parametrize("name", MADE)
def test_the_bound_is_that_of_the_numbers_and_proved_at_export(name: str, around: Any) -> None:
    torch.manual_seed(0)
    layer, shape = MADE[name][0]().eval(), MADE[name][1]
    net, x = around(layer).eval(), torch.randn(3, *MADE[name][1])
    before = {key: t.clone() for key, t in net.state_dict().items()}
    plain = export(net, shape)
    assert torch.allclose(plain(x), net(x), atol=1e-6)
    assert type(plain[0]) is (type(layer) if "hook" in name else type(layer).__bases__[0])
    assert not plain[0]._forward_pre_hooks
    assert {*plain[0].state_dict()} == {"weight", "bias"}
    assert not any(p.requires_grad for p in plain.parameters())
    norm = float(singular_values([dense_matrix(copy.deepcopy(plain[0]).double(), shape)]).max())
    whole = torch.tensor(analyze(net, shape, restarts=0).upper, dtype=torch.float64)
    for bound in (lipschitz(net, shape), lipschitz(plain), whole):
        # With zero padding the bound is that of every image.
        assert norm <= float(bound.detach()) <= (1.3 if len(shape) == 3 else 1 + 1e-6) * norm
    assert {*net.state_dict()} == {*before}
    assert all(torch.equal(t, before[k]) for k, t in net.state_dict().items())
    assert parametrize.is_parametrized(layer) or layer._forward_pre_hooks


@pytest.mark.thorough
@OLD
def test_a_recurrent_network_with_an_old_hook_is_that_of_its_numbers() -> None:
    torch.manual_seed(0)
    net = nn.utils.weight_norm(nn.RNN(2, 3, batch_first=True), "weight_hh_l0").eval()
    with torch.no_grad():
        net.weight_hh_l0_g.mul_(0.2)  # the weight of its last run is another one
    x = torch.randn(2, 5, 2)
    assert torch.allclose(export(Around(First(net)), (5, 2))(x), Around(First(net))(x), atol=1e-6)


@OLD
def test_a_batch_norm_with_an_old_hook_is_folded_as_that_of_its_numbers() -> None:
    torch.manual_seed(0)
    norm = nn.utils.weight_norm(nn.BatchNorm1d(3), dim=None)
    norm.weight_g.data.fill_(2.0)
    layer = nn.Sequential(nn.Linear(4, 3), norm).eval()
    plain, x = export(layer, (4,)), torch.randn(2, 4)
    assert [type(m) for m in plain] == [nn.Linear]
    torch.testing.assert_close(plain(x), layer(x))


@OLD
def test_an_old_hook_has_derivatives_and_others_are_refused() -> None:
    layer = nn.utils.weight_norm(nn.Linear(2, 2))
    with torch.no_grad():
        layer.weight_v.copy_(torch.eye(2))
        layer.weight_g.copy_(torch.tensor([[3.0], [2.0]]))
    lipschitz(layer).backward()
    assert torch.allclose(layer.weight_g.grad, torch.tensor([[1.0], [0.0]]), atol=1e-6)
    layer.register_forward_pre_hook(lambda module, args: (10 * args[0],))
    with pytest.raises(NoRuleError, match="has forward hooks"):
        lipschitz(layer)


@pytest.mark.parametrize("around", [nn.Sequential, Around])
def test_the_bound_has_the_derivatives_of_the_parametrization(around: Any) -> None:
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    scale = layer.parametrizations.weight.original0
    with torch.no_grad():
        layer.parametrizations.weight.original1.copy_(torch.eye(2))
        scale.copy_(torch.tensor([[3.0], [2.0]]))
    lipschitz(around(layer), (2,)).backward()
    assert torch.allclose(scale.grad, torch.tensor([[1.0], [0.0]]), atol=1e-6)


def test_a_certificate_of_a_parametrised_network() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.ReLU(), own(nn.Linear(4, 4), Symmetric()))
    x = torch.randn(8, 4)
    plain = export(net, (4,))
    found = certify(plain, x, plain(x).argmax(1))
    assert (found.radius > 0).all()
    assert found.constant <= 1.0001 * float(lipschitz(net).detach())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), r"the same numbers.*in training mode: call \.eval"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), r"got training mode.*call \.eval"),
        (lambda: own(nn.Linear(4, 4), Counting()), "the same numbers"),
        (lambda: own(nn.Linear(4, 4), Drifting()).eval(), "the same numbers at each evaluation, got ones that change$"),
    ],
)
@pytest.mark.parametrize("function", [lipschitz, export, lambda net, shape: analyze(net, shape, restarts=0)])
def test_weights_that_change_are_refused(make: Any, message: str, function: Any) -> None:
    layer = make()
    before = {key: t.clone() for key, t in layer.state_dict().items()}
    with pytest.raises(NoRuleError, match=message):
        function(nn.Sequential(layer), (4,))
    assert all(torch.equal(t, before[key]) for key, t in layer.state_dict().items())


def test_what_is_not_what_torch_makes_is_refused() -> None:
    layer = own(nn.Linear(2, 2), Symmetric())
    kind = type(layer)
    kind.forward = lambda self, x: 10 * x
    with pytest.raises(NoRuleError, match="expected the class that torch makes of it"):
        lipschitz(layer)
    layer = own(nn.Linear(2, 2), Symmetric())
    layer.__class__ = type("ParametrizedOther", (type(layer),), {})
    with pytest.raises(NoRuleError, match="expected the class that torch makes of it"):
        lipschitz(layer)
    layer = own(nn.Linear(2, 2), Symmetric())
    layer.register_forward_hook(lambda m, x, y: 2 * y)
    with pytest.raises(NoRuleError, match="hooks"):
        lipschitz(layer)


@pytest.mark.thorough
def test_numbers_kept_by_cached_are_not_taken_for_those_of_other_modules() -> None:
    """torch keeps values by the address of the module that was parametrised first, for its copies, too."""
    with parametrize.cached():
        for scale in (1.0, 2.0, 3.0, 4.0):
            layer = own(nn.Linear(2, 2), Symmetric())
            with torch.no_grad():
                layer.parametrizations.weight.original.copy_(scale * torch.eye(2))
            assert float(analyze(Around(layer), (2,), restarts=0).upper) == pytest.approx(scale)
            assert float(lipschitz(layer).detach()) == pytest.approx(scale)


def test_older_numbers_that_cached_keeps_are_refused() -> None:
    layer = own(nn.Linear(2, 2), Symmetric())
    with parametrize.cached():
        before = layer(torch.eye(2))
        assert float(lipschitz(layer).detach()) > 0
        with torch.no_grad():
            layer.parametrizations.weight.original.mul_(0.1)
        assert torch.equal(layer(torch.eye(2)), before)
        with pytest.raises(NoRuleError, match=r"numbers that stay inside of parametrize\.cached\(\), got other"):
            lipschitz(layer)
    assert float(lipschitz(layer).detach()) > 0


def test_numbers_of_inference_mode_alone_are_refused() -> None:
    class Deployed(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 10 * weight if torch.is_inference_mode_enabled() else weight

    layer = nn.Linear(3, 2)
    parametrize.register_parametrization(layer, "weight", Deployed())
    with pytest.raises(NoRuleError, match="expected the same numbers at each evaluation"):
        lipschitz(layer.eval())


def test_other_modules_stay_as_they_are() -> None:
    layer = nn.Linear(2, 2)
    assert settled(layer) is layer


@OLD
@pytest.mark.parametrize("kind", [SandwichBlock, SlopeResidual])
def test_a_block_is_bounded_by_the_weights_that_its_hooks_will_make(kind: Any) -> None:
    torch.manual_seed(0)
    first = nn.utils.weight_norm(nn.Linear(3, 3, bias=False))
    block, zero = kind(first, nn.ReLU(), nn.Linear(3, 3, bias=False), torch.ones(3)), torch.zeros(1, 3)
    with torch.no_grad():
        block(zero)  # the hook's weight is that of now
        first.weight_g.mul_(100)
        old = float(lipschitz(block))
        block(zero)
        x = torch.randn(100, 3)
        assert float((block(x).norm(dim=1) / x.norm(dim=1)).amax()) <= old == float(lipschitz(block)) < 1000
