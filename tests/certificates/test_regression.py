"""Certified output deviations against closed forms, in physical units, and everything they must refuse."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipkit import export, models, modules
from lipkit.bounds.lmi import gain_bound
from lipkit.certificates import RegressionCertificate, certify, certify_regression, tight
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import MaxMin, Normalize, Rescale, Scale
from lipkit.modules import Affine, Network

WEIGHT = [[3.0, 4.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def linear_network(weight: list[list[float]] = WEIGHT, dtype: torch.dtype = torch.float32) -> Network:
    layer = nn.Linear(len(weight[0]), len(weight), dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
    return Network([layer], (len(weight[0]),))


def samples(network: Network, count: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, *network.input_shape, generator=generator)
    with torch.no_grad():
        return x, network(x) + 0.1


def deep_network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    net = models.lbdn([3, 16, 16, 4], gamma=2.0)
    with torch.no_grad():  # outputs of very different sizes
        net.output.y_free.mul_(torch.tensor([1.0, 0.3, 0.1, 0.01])[None])
    return export(net, (3,))


def jacobians(network: Network, count: int = 200) -> np.ndarray:
    """(count, d, n) by autograd in float64 at random points."""
    twin = modules.Network([m.double() for m in network], network.input_shape)
    x = 2 * torch.randn(count, *network.input_shape, dtype=torch.float64)
    return torch.func.vmap(torch.func.jacrev(lambda v: twin(v[None])[0]))(x).numpy()


def test_a_linear_network_gets_its_row_norms() -> None:
    network = linear_network()
    x, y = samples(network)
    found = certify_regression(network, x, y, delta=0.5)
    assert isinstance(found, RegressionCertificate)
    assert found.method == "outputs"
    truth = np.linalg.norm(np.array(WEIGHT), axis=1)
    np.testing.assert_allclose(found.output_constants.numpy(), truth, rtol=1e-12)
    assert (found.output_constants.numpy() >= truth).all()
    assert found.output_constants[2] == 0
    np.testing.assert_allclose(found.output_deviation.numpy(), truth / 2, rtol=1e-12, atol=1e-14)
    assert found.deviation == pytest.approx(np.linalg.norm(np.array(WEIGHT), 2) / 2, rel=1e-12)
    assert found.deviation >= np.linalg.norm(np.array(WEIGHT), 2) / 2


def test_the_deviation_is_reached_by_the_worst_direction_and_never_exceeded() -> None:
    network = linear_network(dtype=torch.float64)
    x = torch.randn(20, 3, dtype=torch.float64)
    with torch.no_grad():
        y = network(x)
    found = certify_regression(network, x, y, delta=0.25)
    direction = torch.tensor([[0.6, 0.8, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        moved = network(x + 0.25 * direction) - network(x)
    np.testing.assert_allclose(moved[:, 0].numpy(), found.output_deviation[0].item(), rtol=1e-9)
    others = torch.randn(100, 3, dtype=torch.float64)
    others = 0.25 * others / others.norm(dim=1, keepdim=True)
    with torch.no_grad():
        change = (network(x[:1] + others) - network(x[:1])).abs()
    assert (change <= found.output_deviation * (1 + 1e-12)).all()


def test_errors_at_the_samples() -> None:
    network = linear_network()
    x, y = samples(network)
    found = certify_regression(network, x, y, delta=0.0)
    assert found.mse == pytest.approx(0.01, rel=1e-4)
    assert 0 < found.deviation < 1e-13  # what rounding may do to two evaluations
    assert certify_regression(network, x, y, delta=0.0, rounding="ignore").deviation == 0
    assert (found.worst_error >= found.error).all()
    np.testing.assert_allclose(found.worst_error.numpy(), found.error.numpy(), atol=1e-10)
    moved = certify_regression(network, x, y, delta=0.1)
    np.testing.assert_allclose(
        moved.worst_error.numpy(), (found.error + 0.1 * found.output_constants).numpy(), atol=1e-10
    )


@pytest.mark.parametrize("evaluator", ["float32", "float64"])
def test_errors_of_large_outputs_count_at_both_inputs(evaluator: str) -> None:
    network = linear_network()
    network[0].bias.copy_(torch.tensor([1e9, 1e6, 1.0]))
    x, y = samples(network)
    found = certify_regression(network, x, y, delta=0.1, evaluator=evaluator)
    worst = found.rounding_error.amax(0).numpy()
    np.testing.assert_allclose(found.output_deviation.numpy(), found.moved.numpy() + 2 * worst, rtol=1e-12)
    norm = float(found.rounding_error.norm(dim=1).amax())
    assert found.deviation == pytest.approx(0.1 * found.constant + 2 * norm, rel=1e-12)
    parts = (found.error, found.moved.expand(20, 3), found.prediction_error, found.rounding_error)
    np.testing.assert_allclose(found.worst_error.numpy(), sum(part.numpy() for part in parts), rtol=1e-12)
    assert bool((worst > {"float32": 1e-8, "float64": 1e-16}[evaluator] * np.array([1e9, 1e6, 1.0])).all())
    assert bool((found.prediction_error[:, 0] > 1e-8).all())


@pytest.mark.thorough
def test_no_output_moves_further_than_all_of_them() -> None:
    network = Network([nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 65)], (1,))  # |x|, and 64 outputs that do not move
    network[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    network[2].weight.zero_()[0] = 1.0
    network = tight(network)
    found = certify_regression(network, *samples(network), delta=1.0)
    assert 1 <= found.output_constants[0] <= found.constant < 1.5
    assert not found.output_constants[1:].any()


@pytest.mark.thorough
def test_sensors_that_move_by_different_amounts_count_one_by_one() -> None:
    torch.manual_seed(0)
    network = export(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), (3,))
    x = torch.randn(30, 3)
    delta = torch.tensor([0.5, 0.01, 0.0])
    found = certify_regression(network, x, network(x), delta=delta)
    norm = certify_regression(network, x, network(x), delta=float(delta.norm()) * (1 + 1e-6))
    assert found.delta == pytest.approx(float(delta.norm()))
    assert bool((found.output_deviation < norm.output_deviation).all())
    assert found.deviation < norm.deviation
    assert found.deviation == pytest.approx(float(found.moved.norm()), rel=1e-9)
    corners = torch.tensor([[a, b, 0.0] for a in (-1, 1) for b in (-1, 1)]) * delta
    moved = (network((x[:, None] + corners).flatten(0, 1)) - network(x).repeat_interleave(4, 0)).abs().amax(0)
    assert bool((moved <= found.output_deviation).all())
    assert bool((moved >= 0.5 * found.output_deviation).all())
    assert bool((found.worst_error < norm.worst_error).all())
    assert "whose entries move by 0 to 0.5 moves the outputs" in str(found)
    linear = linear_network()
    exact = certify_regression(linear, *samples(linear), delta=np.array([0.0, 2.0, 0.1])).output_deviation
    np.testing.assert_allclose(exact, np.abs(np.array(WEIGHT)) @ [0.0, 2.0, 0.1], rtol=1e-9, atol=1e-12)
    assert torch.equal(exact, certify_regression(linear, *samples(linear), delta=[0.0, 2.0, 0.1]).output_deviation)
    assert bool((exact.numpy() >= np.abs(np.array(WEIGHT)) @ [0.0, 2.0, 0.1]).all())
    # Of a network without a matrix of gains the norm counts.
    other = export(nn.Sequential(nn.Linear(3, 4), MaxMin(), nn.Linear(4, 4)), (3,))
    same = [certify_regression(other, x, other(x), delta=d) for d in (torch.full((3,), 3**-0.5), 1.0)]
    np.testing.assert_allclose(*(each.output_deviation for each in same), rtol=1e-6)
    assert same[0].deviation == pytest.approx(same[1].deviation, rel=1e-6)
    with pytest.raises(OptionError, match=r"delta as numbers >= 0, .* got tensor\(\[-0.5"):
        certify_regression(network, x, network(x), delta=-delta)
    with pytest.raises(OptionError, match=r"delta as numbers >= 0, .* got \['a', 1\.0\]"):
        certify_regression(network, x, network(x), delta=["a", 1.0])
    with pytest.raises(ShapeError, match="delta: expected ends of shape"):
        certify_regression(network, x, network(x), delta=torch.ones(2))


def test_physical_units_count_in_the_gain() -> None:
    # Inputs in units of 0.1 and 10, outputs in units of 1, 100 and 0.01: entry (i, j) becomes u_i W_ij / s_j.
    std, units = [0.1, 10.0, 1.0], [1.0, 100.0, 0.01]
    inner = nn.Linear(3, 3)
    model = nn.Sequential(Normalize([0.5, -1.0, 0.0], std), inner, Rescale(units, [1.0, 2.0, 3.0])).eval()
    network = export(model, (3,))
    x, y = samples(network)
    found = certify_regression(network, x, y, delta=1.0)
    # The stored scale is the rounded reciprocal of std; std alone is bounded by its smallest entry.
    rows = np.linalg.norm(inner.weight.detach().double().numpy(), axis=1)
    expected = np.array(units) * rows / 0.1
    np.testing.assert_allclose(found.output_constants.numpy(), expected, rtol=1e-6)
    true = np.array(units)[:, None] * inner.weight.detach().double().numpy() / np.array(std)
    assert (found.output_constants.numpy() >= np.linalg.norm(true, axis=1) * (1 - 1e-6)).all()
    assert np.linalg.norm(true, 2) * (1 - 1e-6) <= found.constant <= np.linalg.norm(expected) * (1 + 1e-6)


def test_a_scale_in_front_counts_too() -> None:
    model = nn.Sequential(Scale(3.0), nn.Linear(2, 1))
    network = export(model, (2,))
    x, y = samples(network)
    plain_constant = certify_regression(export(model[1], (2,)), x, y, delta=1.0).output_constants
    found = certify_regression(network, x, y, delta=1.0).output_constants
    np.testing.assert_allclose(found, 3 * plain_constant, rtol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_each_output_of_an_lbdn_has_its_own_proved_constant(seed: int) -> None:
    network = deep_network(seed)
    x, y = samples(network)
    found = certify_regression(network, x, y, delta=0.1)
    slopes = np.linalg.norm(jacobians(network), axis=2).max(axis=0)
    assert (slopes <= found.output_constants.numpy()).all()
    assert found.constant <= 2.0
    assert (found.output_constants <= found.constant).all()
    # The multipliers balance all outputs together; rebalanced for one they prove more, and more than norms do.
    weights = [m.weight for m in network if isinstance(m, nn.Linear)]
    multipliers = list(network.multipliers().values())
    product = math.prod(float(torch.linalg.matrix_norm(w.double(), 2)) for w in weights[:-1])
    for j, constant in enumerate(found.output_constants.tolist()):
        row = weights[-1][j : j + 1]
        alone = gain_bound([*weights[:-1], row], multipliers)
        assert constant <= min(alone, product * float(row.double().norm())) * (1 + 1e-9)
    small = found.output_constants.argmin()
    alone = gain_bound([*weights[:-1], weights[-1][small : small + 1]], multipliers)
    assert found.output_constants[small] < 0.9 * alone


def test_networks_with_another_end_fall_back_to_the_whole_constant() -> None:
    network = Network([nn.Linear(3, 4), nn.ReLU()], (3,))
    x, y = samples(network)
    found = certify_regression(network, x, y, delta=1.0)
    assert found.method == "global"
    assert (found.output_constants == found.constant).all()


def test_a_shared_scale_at_the_end() -> None:
    network = Network([*linear_network(), Affine(torch.tensor([-2.0]), torch.tensor([1.0]))], (3,))
    x, y = samples(network)
    found = certify_regression(network, x, y, delta=1.0).output_constants.numpy()
    np.testing.assert_allclose(found, 2 * np.linalg.norm(np.array(WEIGHT), axis=1), rtol=1e-12)


def test_saved_rows_read_back_exactly(tmp_path: Path) -> None:
    network = linear_network()
    x, y = samples(network, 5)
    found = certify_regression(network, x, y, delta=0.1)
    found.save_csv(tmp_path / "p.csv")
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert len(rows) == 5
    for j in range(3):
        assert [float(row[f"prediction_{j}"]) for row in rows] == found.prediction[:, j].tolist()
        assert [float(row[f"worst_error_{j}"]) for row in rows] == found.worst_error[:, j].tolist()


def bad(**changes: object) -> dict[str, object]:
    network = linear_network()
    x, y = samples(network)
    return {"network": network, "x": x, "y": y, "delta": 0.1} | changes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"network": nn.Linear(3, 3)}, NoRuleError, "expected an exported network"),
        ({"x": torch.zeros(20, 4)}, ShapeError, r"expected inputs of shape \(N, 3\), got \(20, 4\)"),
        ({"x": torch.zeros(20, 3, dtype=torch.int64)}, OptionError, "expected floating-point inputs"),
        ({"x": torch.zeros(0, 3), "y": torch.zeros(0, 3)}, OptionError, "at least one sample"),
        ({"y": torch.zeros(20, dtype=torch.int64)}, OptionError, "floating-point targets .* by lipkit.certify"),
        ({"y": torch.zeros(20)}, ShapeError, r"expected targets of shape \(20, 3\) as the outputs, got \(20,\)"),
        ({"y": torch.zeros(19, 3)}, ShapeError, r"targets of shape \(20, d\), got \(19, 3\)"),
        ({"y": torch.zeros(20, 2)}, ShapeError, r"expected targets of shape \(20, 3\) as the outputs, got \(20, 2\)"),
        ({"y": torch.full((20, 3), math.nan)}, OptionError, "finite targets"),
        ({"delta": -0.1}, OptionError, "delta: expected a finite number >= 0"),
        ({"delta": math.inf}, OptionError, "delta: .* got inf"),
        ({"delta": math.nan}, OptionError, "delta: .* got nan"),
        ({"delta": True}, OptionError, "delta: .* got True"),
        ({"batch_size": 0}, OptionError, "batch_size: expected an integer of at least 1, got 0"),
    ],
)
def test_refusals(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        certify_regression(**bad(**change))


def test_numpy_arrays_are_taken() -> None:
    network = linear_network()
    x, y = samples(network)
    found, expected = (certify_regression(network, *xy, delta=0.1) for xy in ((x.numpy(), y.numpy()), (x, y)))
    assert torch.equal(found.worst_error, expected.worst_error)
    assert "20 samples, 3 outputs: mean" in str(found)
    one = certify_regression(linear_network([[1.0, 2.0]]), torch.ones(20, 2), torch.zeros(20), delta=0.1)
    assert "20 samples, 1 output: mean" in str(one)


def test_targets_given_as_labels_name_the_remedy() -> None:
    network = linear_network()
    x, y = samples(network)
    with pytest.raises(OptionError, match=r"regression targets by lipkit\.certificates\.certify_regression"):
        certify(network, x, y)


def test_a_network_that_overflows_is_refused() -> None:
    network = linear_network([[math.inf, 0.0]])
    with pytest.raises(OptionError, match="finite outputs"):
        certify_regression(network, torch.ones(1, 2), torch.zeros(1, 1), delta=1.0)
