"""What the tables measure, against closed forms and numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.measures.kernels import gap, methods, modulus, norm_preservation, random_kernel, true_norm
from papers.measures.speed import layer_step, network_step, recipe_step
from papers.measures.trained import (
    accuracy,
    attack,
    attack_steps,
    jacobian_norms,
    layer_gains,
    learning_curve,
    secant_slopes,
)
from torch import nn

from lipkit import certify, lowering, modules
from lipkit.bounds import circular
from lipkit.data import Data, Split
from lipkit.errors import OptionError
from lipkit.evaluation.attack import Attack, attack_samples
from lipkit.models import lbdn

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


def convolution(kernel: torch.Tensor, n: int, circular: bool) -> np.ndarray:
    """Dense matrix of the convolution on n x n, tap by tap."""
    cout, cin, k, _ = kernel.shape
    matrix = np.zeros((cout, n, n, cin, n, n))
    for o, c, a, b, i, j in np.ndindex(cout, cin, k, k, n, n):
        x, y = i + a - k // 2, j + b - k // 2
        if circular or (0 <= x < n and 0 <= y < n):
            matrix[o, i, j, c, x % n, y % n] += kernel[o, c, a, b].item()
    return matrix.reshape(cout * n * n, cin * n * n)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(1, 3, 3, 3), (4, 3, 3, 3), (2, 2, 5, 5)])
def test_methods_of_the_table_are_those_of_dense_matrices(shape: tuple[int, ...]) -> None:
    n, kernel = 8, random_kernel(*shape, seed=3)
    around, zero = (np.linalg.svd(convolution(kernel, n, c), compute_uv=False) for c in (True, False))
    table = {name: float(method(kernel)) for name, method in methods(n).items()}
    assert table["circular"] == pytest.approx(around[0], rel=1e-6)
    assert table["circular, mean"] == pytest.approx(around[: min(shape[:2]) * n * n].mean(), rel=1e-6)
    assert true_norm(kernel, n) == pytest.approx(zero[0], rel=1e-5)
    assert 0.85 * zero[0] < table["power method"] <= zero[0] * (1 + 1e-5)
    ten = np.linalg.svd(convolution(kernel, 10, True), compute_uv=False)
    assert table["symbol on 10 x 10"] == pytest.approx(ten[0], rel=1e-6)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1, 1, 3, 3), (1, 3, 3, 3), (3, 1, 3, 3), (2, 2, 5, 5)]))
def test_a_circular_norm_is_never_far_below_the_zero_padded_one(seed: int, shape: tuple[int, ...]) -> None:
    # The zero-padded convolution on (n - k + 1) x (n - k + 1) is a part of the circular one on n x n.
    n, kernel = 9, random_kernel(*shape, seed=seed)
    around, smaller = float(circular(kernel, n, n)), convolution(kernel, n - shape[2] + 1, False)
    assert around >= np.linalg.norm(smaller, 2) * (1 - 1e-9)


def test_the_gap_of_lipbound_falls_with_the_square_of_the_image() -> None:
    found = gap(shape=[1, 2, 3, 3], sizes=[6, 12, 24])
    kernel = random_kernel(1, 2, 3, 3, seed=0)
    largest = np.sqrt((np.abs(np.fft.fft2(kernel.double().numpy(), (800, 800))) ** 2).sum((0, 1)).max())
    assert found["gap(6)"] == pytest.approx(largest - np.linalg.norm(convolution(kernel, 6, False), 2), rel=1e-3)
    assert 3 < found["gap(12)"] / found["gap(24)"] < 5


def test_the_modulus_is_that_of_the_polynomial() -> None:
    found, kernel = modulus(size=3, points=6), random_kernel(1, 1, 3, 3, seed=0)[0, 0].numpy()
    wave = np.exp(-2j * np.pi * np.arange(3) / 6)
    assert found["modulus(2,5)"] == pytest.approx(abs((wave**2) @ kernel @ (wave**5)), rel=1e-6)
    assert found["largest"] == max(value for name, value in found.items() if name != "largest")


@pytest.mark.thorough
def test_secants_of_a_linear_map_reach_its_norm_and_never_pass_it() -> None:
    net = network()
    first, last = matrices(net)
    norm = np.linalg.norm(last @ first, 2)
    found = secant_slopes(net, data(), eps=0.2, steps=60)["emp_lip"]
    assert 0.99 * norm < found <= norm * (1 + 1e-9)
    few = secant_slopes(net, data(), eps=0.2, steps=1)["emp_lip"]
    assert 0.1 * norm < few < found
    assert secant_slopes(net, data(), eps=0.2, steps=60, batch_size=5, samples=5)["emp_lip"] > 0.99 * norm


@pytest.mark.thorough
def test_secants_see_the_network_around_each_sample_alone() -> None:
    # sin has slope 1 at 0 alone: around samples it is that of the cosine, up to the ball's size
    class Sine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(3 * x.flatten(1))

    found = secant_slopes(Sine(), data(), eps=1e-4, steps=40, batch_size=4)  # type: ignore[arg-type]
    x, _ = data().test.batch(torch.arange(12))
    steepest = 3 * np.abs(np.cos(3 * x.double().flatten(1).numpy())).max(1)
    for name, expected in (("emp_lip", steepest.mean()), ("emp_lip_batch", steepest.reshape(3, 4).max(1).mean())):
        assert 0.97 * expected < found[name] < 1.001 * expected
    assert found["emp_lip_batch"] > 1.01 * found["emp_lip"]


def test_norms_of_jacobians_are_those_of_the_active_units() -> None:
    net, x = network(nn.ReLU()), data().test.batch(torch.arange(12))[0]
    first, last = matrices(net)
    active = (net[1](x.flatten(1)) > 0).numpy()
    norms = sorted(np.linalg.norm(last @ (a[:, None] * first), 2) for a in active)
    found = jacobian_norms(net, data(), batch_size=5)
    assert found["jacobian_mean"] == pytest.approx(np.mean(norms), rel=1e-5)
    for q in (0, 25, 50, 100):
        assert found[f"jacobian({q})"] == pytest.approx(np.quantile(norms, q / 100), rel=1e-5)


@pytest.mark.thorough
def test_measurements_take_the_images_that_the_evaluation_attacks() -> None:
    net, images = network(nn.ReLU()), data(60)
    x, y = images.test.batch(torch.arange(60))
    certificate, found = certify(net, x, y), []
    for seed in range(6):
        tried = attack_samples(net, certificate, x, y, Attack(name="pgd", eps=(0.3,), samples=20, steps=10, seed=seed))
        found.append(tried.clean.value)
        assert accuracy(net, images, seed=seed, samples=20)["clean_attacked"] == tried.clean.value
        (survived,) = attack(net, images, seed=seed, samples=20, name="pgd", eps=0.3, steps=10).values()
        # Two runs of an attack, from different starts.
        assert survived == pytest.approx(tried.rows[0].share.value, abs=0.05)
    assert len(set(found)) > 2


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
def test_gains_of_ordinary_layers_are_their_norms_where_units_stay_active() -> None:
    net = network(nn.ReLU())
    net[1].bias.fill_(1e3)
    found = layer_gains(net, data(), restarts=4, steps=100)
    norms = [np.linalg.norm(matrix, 2) for matrix in matrices(net)]
    # The rows that are active everywhere near zero give the whole norm.
    for k, norm in enumerate(norms):
        assert found[f"layer_norm({k})"] == pytest.approx(norm, rel=1e-6)
        # Secants are as exact as values of 1e3 in float64.
        assert 0.999 * norm < found[f"layer_gain({k})"] <= norm * (1 + 1e-6)
    assert found["least_layer_gain"] == min(found["layer_gain(0)"], found["layer_gain(1)"])


@pytest.mark.thorough
def test_the_gain_of_a_layer_of_relu_is_found_where_all_units_are_open() -> None:
    generator = np.random.default_rng(0)
    left, right = (np.linalg.qr(generator.normal(size=(64, 64)))[0] for _ in range(2))
    # One direction of norm 1 and others far below it: with half of the units closed little of it is left.
    weight, bias = (left * np.r_[1, np.full(63, 0.5)]) @ right, generator.normal(size=64)
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)]
    net = modules.Network(layers, (64,)).eval().requires_grad_(False)
    net[0].weight.copy_(torch.from_numpy(weight))
    net[0].bias.copy_(torch.from_numpy(bias))
    # Independently: units are open in a ball around the solution of W x + b = 1, where the Jacobian is W.
    x, step = np.linalg.solve(weight, 1 - bias), 0.5 * right[0]
    opened = np.maximum(weight @ (x + step) + bias, 0) - np.maximum(weight @ x + bias, 0)
    assert np.linalg.norm(opened) / np.linalg.norm(step) == pytest.approx(1, rel=1e-9)
    found = layer_gains(net, data(), restarts=16, steps=50)
    assert 0.999 < found["layer_gain(0)"] <= 1 + 1e-6


@pytest.mark.thorough
def test_gains_of_sandwich_layers_are_at_most_one_in_the_norms_of_their_multipliers() -> None:
    torch.manual_seed(0)
    free = nn.Sequential(nn.Flatten(), lbdn([16, 8, 8, 3], gamma=3.0)).double()
    found = layer_gains(lowering.export(free, SHAPE), data(), restarts=16, steps=200)
    for k in range(3):
        assert 0.9 < found[f"layer_gain({k})"] <= 1 + 1e-6
        # In the l2 norm the layers are not contractions: this is what the multipliers are for.
    assert max(found[f"layer_norm({k})"] for k in range(3)) > 1.2


def test_a_learning_curve_is_what_the_training_wrote(tmp_path: Path) -> None:
    assert learning_curve(tmp_path) == {}
    lines = ({"epoch": 1, "loss": 2.0, "clean": 0.25}, {"epoch": 2, "loss": 1.0}, {"epoch": 3, "clean": 0.75})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert learning_curve(tmp_path) == {"error_after(1)": 0.75, "error_after(3)": 0.25}


@pytest.mark.thorough
def test_times_have_a_figure_for_each_point() -> None:
    found = layer_step(family="rko", vary="channels", values=[2, 3], side=4, batch=2, seconds=0)
    assert set(found) == {"ratio(2)", "ratio(3)", "ms(2)", "ms(3)"}
    assert all(value > 0 for value in found.values())
    assert set(network_step(model="kwlarge", layer="aol", batch=2, seconds=0, dense=[8, 8])) == {"ratio", "ms"}
    small = ["model.options.width=1", "model.options.dense=[16, 8]"]
    options = {"recipe": "cifar100_lbdn", "over": "cifar100_lbdn", "set": ["model.options.layer=aol"], "both": small}
    assert set(recipe_step(batch=2, seconds=0, **options)) == {"ratio", "ms"}
    with pytest.raises(OptionError, match="vary: expected channels, cin, cout, side, kernel, got 'width'"):
        layer_step(family="rko", vary="width", values=[1])
