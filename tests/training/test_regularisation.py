"""The Lipschitz penalty: its value against dense singular values and the paper's formula, its gradients, its layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipkit import training
from lipkit.bounds import METHODS
from lipkit.errors import NoRuleError, OptionError, RunError
from lipkit.layers import CayleyConv2d
from lipkit.lowering import lipschitz
from lipkit.models import convnet, wrn_plain
from lipkit.training import LipschitzPenalty
from lipkit.training.regularisation import layer_bound, regularised

# Ten steps of the power method reach nine tenths of most norms, not of all.
torch.manual_seed(0)
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.Conv2d(3, 4, 3, padding=1), (3, 6, 6)),
    "strided, grouped": (nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), groups=2), (4, 7, 6)),
    "dilated": (nn.Conv2d(2, 2, 3, dilation=2), (2, 8, 8)),
    "one dimension": (nn.Conv1d(3, 5, 3, 2, groups=1), (3, 9)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), (4, 4, 4)),
    "transposed, one dimension": (nn.ConvTranspose1d(2, 3, 3), (2, 6)),
    "dense": (nn.Linear(7, 4), (7,)),
}


def dense(layer: nn.Module, shape: tuple[int, ...]) -> np.ndarray:
    layer = layer.double()
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        return (layer(basis) - layer(0 * basis)).flatten(1).numpy().T


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("name", list(LAYERS))
def test_no_layer_is_bounded_below_its_norm(name: str, method: str) -> None:
    layer, shape = LAYERS[name]
    norm = np.linalg.norm(dense(layer, shape), 2)
    assert norm <= float(layer_bound(layer, method).detach()) <= 12 * norm


@pytest.mark.parametrize("name", list(LAYERS))
def test_the_power_method_estimates_the_bound_from_below(name: str) -> None:
    layer, _ = LAYERS[name]
    estimate = layer_bound(layer, "farnia_lower_estimate")
    above = float(layer_bound(layer, "symbol_sup").detach())
    assert estimate.dtype == torch.float64
    assert 0.9 * above < float(estimate.detach()) <= above * (1 + 1e-6)


@pytest.mark.parametrize("method", ["symbol_sup", "farnia_lower_estimate"])
def test_groups_are_bounded_one_by_one(method: str) -> None:
    layer = nn.Conv2d(2, 2, 1, groups=2)
    nn.init.ones_(layer.weight)  # together the two rows would have the norm sqrt(2)
    assert float(layer_bound(layer, method).detach()) == pytest.approx(1.0, rel=1e-6)


def test_a_penalty_by_the_power_method_has_its_gradient() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 2)).double()
    found = LipschitzPenalty("farnia_lower_estimate", weight=2.0)
    found(net).backward()
    kernel = net[0].weight
    assert isinstance(kernel, Tensor)
    gradient, step = kernel.grad, 1e-6
    assert gradient is not None
    with torch.no_grad():
        kernel += step * gradient
        up = float(found(net))
        kernel -= 2 * step * gradient
        down = float(found(net))
    assert (up - down) / (2 * step) == pytest.approx(float(gradient.square().sum()), rel=1e-4)


def lipbound_by_hand(kernel: Tensor) -> float:
    """Theorem of the paper on its own grid of 10 x 10 points, with loops, and the smaller of both groupings."""
    kernel = kernel.detach().double().numpy()
    size, (kh, kw) = 10, kernel.shape[2:]
    found = []
    for weights in (kernel, kernel.swapaxes(0, 1)):
        total = 0.0
        for row in weights:
            values = []
            for p in range(size):
                for q in range(size):
                    wave = [[np.exp(2j * np.pi * (a * p + b * q) / size) for b in range(kw)] for a in range(kh)]
                    values.append(sum(abs((f * wave).sum()) ** 2 for f in row))
            total += max(values)
        found.append(math.sqrt(total))
    factor = math.cos(math.pi * 2 / (2 * size)) ** -2
    return min(found) * factor


def test_the_penalty_is_the_formula_of_the_paper() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2)
    )  # fmt: skip
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([0.5, -3.0, 0.5]))
        net[1].running_var.copy_(torch.tensor([4.0, 4.0, 0.25]))
    frobenius = [float(net[i].weight.detach().double().norm()) for i in (0, 1, 4)]
    norm_bound = max(abs(g) / math.sqrt(v + 1e-5) for g, v in zip((0.5, -3.0, 0.5), (4.0, 4.0, 0.25), strict=True))
    logs = math.log(lipbound_by_hand(net[0].weight)) + math.log(norm_bound) + math.log(frobenius[2])
    both = LipschitzPenalty("lipbound", weight=0.3, l1=0.07)(net)
    assert both.shape == ()
    assert float(both.detach()) == pytest.approx(0.3 * logs + 0.07 * sum(frobenius), rel=1e-6)
    assert float(LipschitzPenalty(weight=0.0, l1=0.5)(net).detach()) == pytest.approx(0.5 * sum(frobenius), rel=1e-12)
    assert float(LipschitzPenalty(weight=0.0)(net).detach()) == 0.0


@pytest.mark.parametrize("method", ["lipbound", "symbol_sup", "fantastic_four", "aol"])
def test_gradients_are_those_of_finite_differences_and_miss_the_last_layer_only(method: str) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3)
    )
    net = net.double()
    with torch.no_grad():
        net[1].weight.uniform_(0.5, 2.0)
    penalty = LipschitzPenalty(method, weight=1.0, l1=0.1)
    penalty(net).backward()
    assert net[4].weight.grad is None
    for layer in net[0], net[1], net[3]:
        assert layer.bias.grad is None
        direction = torch.randn_like(layer.weight)
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                layer.weight += sign * 1e-6 * direction
                values.append(float(penalty(net)))
                layer.weight -= sign * 1e-6 * direction
        slope = (values[0] - values[1]) / 2e-6
        # Bounds within a tolerance of the supremum move in steps where they prove it: their gradient is its one.
        tolerance = 0.05 if method == "symbol_sup" else 1e-4
        assert float((layer.weight.grad * direction).sum()) == pytest.approx(slope, rel=tolerance, abs=tolerance)


@pytest.mark.thorough
def test_a_step_down_the_penalty_lowers_the_bound_of_the_network() -> None:
    torch.manual_seed(0)
    net = convnet(batch_norm=False)
    before = float(lipschitz(net, (1, 8, 8)).detach())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    for _ in range(10):
        optimizer.zero_grad()
        LipschitzPenalty(weight=1.0)(net).backward()
        optimizer.step()
    assert float(lipschitz(net, (1, 8, 8)).detach()) < 0.9 * before


def test_which_layers_count() -> None:
    shared = nn.Conv2d(2, 2, 1)
    net = nn.Sequential(
        shared, nn.ReLU(), shared, CayleyConv2d(2, 2, 3), nn.LayerNorm(3), nn.Flatten(), nn.Linear(4, 4)
    )
    assert [name for name, _ in regularised(net)] == ["0"]
    names = [name for name, _ in regularised(wrn_plain(10, 1))]
    assert len(names) == 9 + 7
    assert not any(isinstance(module, nn.Linear) for _, module in regularised(wrn_plain(10, 1)))
    spectral = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 3, 1)))
    assert float(layer_bound(spectral[0], "symbol_sup").detach()) == pytest.approx(1.0, abs=0.2)
    LipschitzPenalty()(spectral).backward()
    assert any(p.grad is not None for p in spectral.parameters())


def test_zero_weights_have_a_finite_penalty_and_no_gradient() -> None:
    for layer in nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Linear(3, 3):
        nn.init.zeros_(layer.weight)
        net = nn.Sequential(layer, nn.Linear(2, 2))
        value = LipschitzPenalty(weight=1.0, l1=1.0)(net)
        value.backward()
        assert math.isfinite(float(value.detach()))
        assert layer.weight.grad is not None
        assert (layer.weight.grad == 0).all()


def test_the_penalty_is_the_logarithm_of_the_bound_of_a_chain() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6)).eval()
    bound = float(lipschitz(net, (1, 4, 4)).detach())
    found = LipschitzPenalty("symbol_sup", weight=1.0)(nn.Sequential(*net, nn.Linear(6, 2)))  # without the last layer
    assert float(found.detach()) == pytest.approx(math.log(bound), abs=1e-6)


def test_a_synchronised_batch_norm_counts_as_an_ordinary_one() -> None:
    conv, dense_layer = nn.Conv2d(1, 1, 1), nn.Linear(4, 2)
    both = [nn.Sequential(conv, kind(1), nn.Flatten(), dense_layer) for kind in (nn.BatchNorm2d, nn.SyncBatchNorm)]
    for net in both:
        nn.init.constant_(net[1].weight, 100.0)
    found = [float(LipschitzPenalty(weight=1.0)(net).detach()) for net in both]
    assert found[0] == found[1] > math.log(100.0) + math.log(abs(float(conv.weight.detach()))) - 1e-4


def test_refusals() -> None:
    for options, message in (
        ({"method": "power"}, "method: expected one of .*lipbound.*, got 'power'"),
        ({"weight": -1.0}, "weight: expected a finite number >= 0, got -1.0"),
        ({"weight": True}, "weight: expected a finite number >= 0, got True"),
        ({"l1": math.inf}, "l1: expected a finite number >= 0, got inf"),
    ):
        with pytest.raises(OptionError, match=message):
            LipschitzPenalty(**options)
    with pytest.raises(OptionError, match="expected a network with convolutions"):
        LipschitzPenalty()(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(NoRuleError, match="got Conv3d at '0'"):
        LipschitzPenalty()(nn.Sequential(nn.Conv3d(1, 1, 1), nn.Linear(2, 2)))
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))
    with pytest.raises(NoRuleError, match="track_running_stats=False at '1'"):
        LipschitzPenalty()(net)


@pytest.mark.thorough
def test_fit_adds_the_penalty_to_the_loss_and_reports_it(tmp_path) -> None:
    x, y = torch.rand(12, 3), torch.arange(12) % 2

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    penalty = LipschitzPenalty(weight=0.5, l1=0.1)
    common = {"epochs": 1, "batch_size": 12, "lr": 0.1, "optimizer": "sgd", "momentum": 0.0, "accelerator": "cpu"}
    common |= {"loss": "cross_entropy", "schedule": "constant"}
    by_hand, model = network(), network()
    (nn.functional.cross_entropy(by_hand(x), y) + penalty(by_hand).float()).backward()
    run = training.fit(model, (x, y), penalty=penalty, run_dir=tmp_path / "r", **common)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(ours, theirs - 0.1 * theirs.grad, atol=1e-6)
    assert run.history[0]["penalty"] == pytest.approx(float(penalty(model).detach()), rel=1e-6)
    start = network()
    total = nn.functional.cross_entropy(start(x), y) + penalty(start)
    assert run.history[0]["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    training.fit(network(), (x, y), penalty=LipschitzPenalty(weight=0.5, l1=0.1), run_dir=tmp_path / "r", resume=True,
                 **common)  # fmt: skip
    for other in None, LipschitzPenalty(weight=0.4, l1=0.1):
        with pytest.raises(RunError, match="expected penalty = "):
            training.fit(network(), (x, y), penalty=other, run_dir=tmp_path / "r", resume=True, **common)
