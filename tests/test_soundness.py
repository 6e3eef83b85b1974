"""The soundness fuzzer of benchmarks/soundness.py: its first draws hold, and it sees what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import lipkit
from benchmarks import soundness, soundness_modules


def draws(count: int, seed: int = 0, **options: Any) -> list[tuple[str, str]]:
    # Float32 certificates are refused while NNPACK may evaluate convolutions.
    with torch.backends.nnpack.flags(False):
        return [soundness.attempt(seed, index, **options) for index in range(count)]


@pytest.mark.thorough
def test_the_first_draws_hold() -> None:
    found = draws(40)
    for kind in soundness.KINDS:
        assert (kind.__name__, "held") in found
    for kind in (soundness.graphs, soundness_modules.ranks, soundness_modules.forward):
        assert (kind.__name__, "refused") in found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", soundness_modules.KINDS, ids=lambda kind: kind.__name__)
def test_the_first_draws_of_odd_options_hold(kind: Any) -> None:
    assert len(draws(2, kinds=[kind])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_thousand_draws_hold(seed: int) -> None:
    assert len(draws(10_000, seed)) == 10_000


@pytest.mark.parametrize(("kind", "name"), [("matrix_norms", "lipschitz"), ("layers", "lipschitz")])
def test_it_sees_a_bound_that_is_too_small(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    right = getattr(lipkit, name)
    monkeypatch.setattr(lipkit, name, lambda *given, **options: right(*given, **options) * 0.999, raising=False)
    with pytest.raises(soundness.Failure, match="is above the bound"):
        draws(40, kinds=[getattr(soundness, kind)])


@pytest.mark.thorough
def test_it_sees_a_radius_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lipkit.certify

    def wrong(*given: Any, **options: Any) -> lipkit.certificates.Certificate:
        found = right(*given, **options)
        return dataclasses.replace(found, radius=1.5 * found.radius)

    monkeypatch.setattr(lipkit, "certify", wrong, raising=False)
    with pytest.raises(soundness.Failure, match="but the logits are"):
        draws(150, kinds=[soundness.networks])


@pytest.mark.thorough
def test_it_sees_a_graph_whose_bound_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lipkit.analyze

    def wrong(*given: Any, **options: Any) -> lipkit.analysis.NetworkBound:
        found = right(*given, **options)
        return dataclasses.replace(found, upper=0.3 * found.upper)

    monkeypatch.setattr(lipkit, "analyze", wrong, raising=False)
    with pytest.raises(soundness.Failure, match="bound"):
        draws(100, kinds=[soundness.graphs])


def test_it_sees_a_quotient_that_passes_through_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    right = soundness_modules.integer_program

    def wrong(network: lipkit.modules.Network) -> Any:
        program, proof = right(network)
        operations = []
        for operation, reads in program.operations:
            if isinstance(operation, lipkit.integer.program.IntLinear):
                operation = dataclasses.replace(operation, weight=operation.weight.float().long())
            operations.append((operation, reads))
        return dataclasses.replace(program, operations=tuple(operations)), proof

    monkeypatch.setattr(soundness_modules, "integer_program", wrong)
    with pytest.raises(soundness.Failure, match="times the error that is proved"):
        draws(20, kinds=[soundness_modules.integer_programs])


@pytest.mark.thorough
def test_it_sees_a_radius_of_integers_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lipkit.certify

    def wrong(*given: Any, **options: Any) -> lipkit.certificates.Certificate:
        found = right(*given, **options)
        return dataclasses.replace(found, radius=found.radius * (1 + 1e-6))

    monkeypatch.setattr(lipkit, "certify", wrong, raising=False)
    with pytest.raises(soundness.Failure, match="another at"):
        draws(20, kinds=[soundness_modules.integer_programs])


@pytest.mark.thorough
def test_it_sees_a_product_whose_range_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lipkit.export

    def wrong(*given: Any, **options: Any) -> lipkit.modules.Network:
        found = right(*given, **options)
        for name, value in found.named_buffers():
            if name.endswith("limits"):
                value.mul_(0.5)
        return found

    monkeypatch.setattr(lipkit, "export", wrong, raising=False)
    with pytest.raises(soundness.Failure, match="the export is another function"):
        draws(30, kinds=[soundness_modules.boxes])


def test_it_sees_a_softmax_over_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.softmax(0)

    monkeypatch.setattr(soundness_modules, "_module", lambda draw, n: Wrong())
    monkeypatch.setattr(lipkit, "export", lambda module, shape: lipkit.modules.Network([nn.ReLU()], shape))
    with pytest.raises(soundness.Failure, match="does not compute sample by sample"):
        draws(5, kinds=[soundness_modules.ranks])


@pytest.mark.thorough
def test_it_sees_a_network_that_looks_at_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lipkit, "export", lambda module, shape: lipkit.modules.Network([nn.Linear(4, 4)], shape))
    with pytest.raises(soundness.Failure, match="export: bounded by"):
        draws(10, kinds=[soundness_modules.forward])
