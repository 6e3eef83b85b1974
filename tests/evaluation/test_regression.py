"""Errors, slopes and the latency of regression networks; a wrong constant must stop the evaluation."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

import lipkit
from lipkit import modules
from lipkit.data import Split
from lipkit.errors import CertificateViolation, NoRuleError
from lipkit.evaluation import evaluate_regression, latency
from lipkit.evaluation.regression import _slopes, check_slopes
from lipkit.linalg.precision import on_threads
from lipkit.lowering import lipschitz
from lipkit.modules import chains

QUICK = {"restarts": 8, "steps": 20}


def network(seed: int = 0) -> modules.Network:
    torch.manual_seed(seed)
    return modules.Network([nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)], (3,))


def split(net: modules.Network, count: int = 30) -> Split:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1)).to(next(net.parameters()))
    y = net(x)
    return Split(x, y + y.new_tensor([0.1, -0.2])[: y.shape[1]])


@pytest.mark.thorough
def test_figures() -> None:
    net = network()
    found = evaluate_regression(net, split(net), delta=0.3, **QUICK)
    assert found.rmse == pytest.approx((0.1, 0.2), rel=1e-4)
    assert found.mse == pytest.approx((0.01 + 0.04) / 2, rel=1e-4)
    assert found.certificate.delta == 0.3
    assert 0 < found.lower <= found.certificate.constant
    assert found.tightness == found.lower / found.certificate.constant
    assert found.metrics() == {
        "test_mse": found.mse,
        "lipschitz": found.certificate.constant,
        "lower": found.lower,
        "tightness": found.tightness,
    }
    assert set(found.times) == {"certify", "search"}


@pytest.mark.parametrize(
    ("scale", "offset", "least"), [(1.0, 0.0, 1 - 1e-6), (1e30, 0.0, 1 - 1e-6), (1e-10, 1.0, 0.1), (1.0, 1e9, 0.1)]
)
def test_a_linear_network_is_tight_and_rounding_is_no_slope(scale: float, offset: float, least: float) -> None:
    torch.manual_seed(0)
    net = modules.Network([nn.Linear(3, 2).double()], (3,))
    net[0].weight.mul_(scale), net[0].bias.add_(offset)
    found = evaluate_regression(net, split(net), **QUICK)
    weight = net[0].weight.numpy()
    truth = np.linalg.norm(weight, 2)
    assert least * truth <= found.lower <= truth
    assert all(0 <= seconds < 600 for seconds in found.times.values())
    assert least <= found.tightness <= 1
    # Each output's slope is that of the steepest secant of all, at least.
    rows = np.linalg.norm(weight, axis=1)
    assert all(slope <= row for slope, row in zip(found.output_slopes, rows, strict=True))
    assert np.hypot(*found.output_slopes) >= truth * least


@pytest.mark.parametrize(("offset", "least"), [(0.0, 1 - 1e-8), (2.0**53, 0.0)])
def test_the_rounding_of_both_ends_is_taken_off_a_slope(offset: float, least: float) -> None:
    """x + 2^53 is 2^53 at 0.6 and 2^53 + 2 at 1.4."""
    net = modules.Network([nn.Linear(1, 1).double()], (1,))
    net[0].weight.fill_(1.0), net[0].bias.fill_(offset)
    x, y = torch.tensor([[[0.6], [0.0]], [[1.4], [0.0]]], dtype=torch.float64)
    whole, slopes = _slopes(lipkit.prove(net), x, y, 2)
    assert least <= float(whole[0]) <= 1
    assert float(slopes[0]) == float(whole[0])
    assert float(whole[1]) == 0  # the same input twice


@pytest.mark.parametrize("factor", [0.5, 0.9])
def test_a_wrong_constant_stops_the_evaluation(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    net = modules.Network([nn.Linear(3, 2)], (3,))
    monkeypatch.setattr(chains, "lipschitz", lambda module, shape=None: factor * lipschitz(module, shape))
    with pytest.raises(
        CertificateViolation,
        match=r"the network: expected no slope above .* got .* between two inputs",
    ):
        evaluate_regression(net, split(net), **QUICK)


def test_a_wrong_constant_of_one_output_is_named() -> None:
    net = network()
    found = evaluate_regression(net, split(net), **QUICK)
    wrong = dataclasses.replace(found.certificate, output_constants=torch.tensor([1e9, found.output_slopes[1] / 2]))
    with pytest.raises(CertificateViolation, match="output 1: "):
        check_slopes(wrong, found.lower, torch.tensor(found.output_slopes, dtype=torch.float64))


def test_the_lower_bound_counts_neighbouring_samples_that_the_search_missed() -> None:
    net = modules.Network([nn.Linear(1, 1), nn.Hardtanh(), nn.Linear(1, 1)], (1,))
    with torch.no_grad():
        net[0].weight.fill_(1.0), net[0].bias.zero_()
    x = torch.tensor([[50.0]] * 100 + [[-0.5], [0.5]])  # steep between the last two, flat where the search starts
    found = evaluate_regression(net, Split(x, net(x)), restarts=1, steps=1)
    assert found.search.lower == 0
    assert found.lower == found.output_slopes[0] == pytest.approx(found.certificate.constant)
    assert found.tightness == pytest.approx(1)


def test_a_constant_network() -> None:
    layer = nn.Linear(3, 1)
    nn.init.zeros_(layer.weight)
    net = modules.Network([layer], (3,))
    found = evaluate_regression(net, split(net, 4), **QUICK)
    assert (found.certificate.constant, found.lower) == (0, 0)
    assert math.isnan(found.tightness)


def test_a_pair_is_taken_and_a_network_that_was_not_exported_is_refused() -> None:
    net = network()
    data = split(net)
    assert evaluate_regression(net, (data.x.numpy(), data.y), **QUICK).metrics() == (
        evaluate_regression(net, data, **QUICK).metrics()
    )
    for call in (lambda: evaluate_regression(net[0], data), lambda: latency(net[0])):
        with pytest.raises(NoRuleError, match="expected an exported network"):
            call()


@pytest.mark.thorough
def test_one_sample_is_enough() -> None:
    net = network()
    assert evaluate_regression(net, split(net, 1), **QUICK).lower > 0


def test_latency_gives_the_number_of_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    with on_threads(before + 1):
        found = latency(network())
        assert torch.get_num_threads() == before + 1
    assert (found.runs, found.threads, found.device) == (100, 1, "cpu")
    assert 0 < found.low <= found.median <= found.high
    monkeypatch.setattr(sys.modules[latency.__module__], "SECONDS", 0.0)
    assert latency(network()).runs == 1  # a slow network
