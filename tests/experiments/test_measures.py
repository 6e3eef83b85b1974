"""What the tables measure, against closed forms and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lipkit import modules
from lipkit.data import Data, Split
from lipkit.errors import OptionError
from lipkit.experiments import measures
from lipkit.experiments.measures.preservation import norm_preservation
from lipkit.experiments.measures.speed import layer_step, network_step
from lipkit.experiments.measures.trained import attack, attack_steps, jacobian_norms, secant_slopes

SHAPE = (1, 4, 4)


def data(n: int = 12) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = 0.25 + 0.5 * torch.rand(n, *SHAPE, generator=generator)
    split = Split(x, torch.arange(n) % 3)
    return Data("random", split, split, ("a", "b", "c"))


def network(*between: nn.Module) -> modules.Network:
    torch.manual_seed(1)
    layers = [nn.Flatten(), nn.Linear(16, 8), *between, nn.Linear(8, 3)]
    return modules.Network(layers, SHAPE).eval().requires_grad_(False)


def matrices(net: modules.Network) -> list[np.ndarray]:
    return [m.weight.double().numpy() for m in net if isinstance(m, nn.Linear)]


def test_secants_of_a_linear_map_reach_its_norm_and_never_pass_it() -> None:
    net = network()
    first, last = matrices(net)
    norm = np.linalg.norm(last @ first, 2)
    found = secant_slopes(net, data(), eps=0.2, steps=60)["emp_lip"]
    assert 0.99 * norm < found <= norm * (1 + 1e-9)
    few = secant_slopes(net, data(), eps=0.2, steps=1)["emp_lip"]
    assert 0.1 * norm < few < found
    assert secant_slopes(net, data(), eps=0.2, steps=60, batch_size=5, samples=5)["emp_lip"] > 0.99 * norm


def test_secants_see_the_network_around_each_sample_alone() -> None:
    # sin has slope 1 at 0 alone: around samples it is that of the cosine, up to the ball's size
    class Sine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(3 * x.flatten(1))

    found = secant_slopes(Sine(), data(), eps=1e-4, steps=40)["emp_lip"]  # type: ignore[arg-type]
    x, _ = data().test.batch(torch.arange(12))
    expected = 3 * np.abs(np.cos(3 * x.double().flatten(1).numpy())).max(1).mean()
    assert 0.97 * expected < found < 1.001 * expected


def test_norms_of_jacobians_are_those_of_the_active_units() -> None:
    net, x = network(nn.ReLU()), data().test.batch(torch.arange(12))[0]
    first, last = matrices(net)
    active = (net[1](x.flatten(1)) > 0).numpy()
    norms = sorted(np.linalg.norm(last @ (a[:, None] * first), 2) for a in active)
    found = jacobian_norms(net, data(), batch_size=5)
    assert found["jacobian_mean"] == pytest.approx(np.mean(norms), rel=1e-5)
    for q in (0, 25, 50, 100):
        assert found[f"jacobian({q})"] == pytest.approx(np.quantile(norms, q / 100), rel=1e-5)


def test_an_attack_after_more_steps_is_that_attack_with_these_steps() -> None:
    net = network(nn.ReLU())
    found = attack_steps(net, data(), steps=[1, 9], name="pgd", norm="linf", eps=0.1)
    assert list(found) == ["pgd_after(1)", "pgd_after(9)"]
    expected = attack(net, data(), steps=9, name="pgd", norm="linf", eps=0.1)
    assert list(expected.values()) == [found["pgd_after(9)"]]
    assert found["pgd_after(9)"] <= found["pgd_after(1)"]


@pytest.mark.parametrize(
    ("channels", "low", "high"), [([3, 3], 0.99999, 1.00001), ([2, 5], 0.99999, 1.00001), ([6, 2], 0.2, 0.9)]
)
def test_quotients_of_norms(channels: list[int], low: float, high: float) -> None:
    found = norm_preservation(channels=channels, side=4, samples=16, steps=2)
    assert low < found["smallest"] <= found["largest"] < high
    assert found["ppm(0)"] == pytest.approx(1e6 * (found["smallest"] - 1), abs=1e-3)
    assert found["ppm(100)"] == pytest.approx(1e6 * (found["largest"] - 1), abs=1e-3)
    assert not any(name.startswith("after") for name in found)


def test_quotients_through_depth_fall_where_layers_are_rescaled() -> None:
    deep = {
        family: norm_preservation(family=family, channels=[4] * 6, side=4, samples=16) for family in ("cayley", "rko")
    }
    assert deep["cayley"]["after(5)"] == pytest.approx(1, abs=1e-5)
    assert deep["rko"]["after(5)"] < 0.5 * deep["rko"]["after(1)"] < 0.5
    assert norm_preservation(channels=[4, 4, 4], side=4, steps=3) != norm_preservation(channels=[4, 4, 4], side=4)


@pytest.mark.thorough
def test_times_have_a_figure_for_each_point() -> None:
    found = layer_step(family="rko", vary="channels", values=[2, 3], side=4, batch=2, seconds=0)
    assert set(found) == {"ratio(2)", "ratio(3)", "ms(2)", "ms(3)"}
    assert all(value > 0 for value in found.values())
    assert set(network_step(model="kwlarge", layer="aol", batch=2, seconds=0, dense=[8, 8])) == {"ratio", "ms"}
    with pytest.raises(OptionError, match="vary: expected channels, cin, cout, side, kernel, got 'width'"):
        layer_step(family="rko", vary="width", values=[1])


@pytest.mark.parametrize("table", [measures.MEASURES, measures.AFTER])
def test_every_measure_is_a_function_of_its_name(table: dict[str, str]) -> None:
    assert [measures.find(name, table).__name__ for name in table] == list(table)
